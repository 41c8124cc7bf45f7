"""Events as JSON lines over pipes, between a rank's process (or Ray's driver) and the launcher."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridep.launch.host import child_environment
from hybridep.launch.worker_group import DcLost, Event, Failed, FailureKind, Finished, Started, Stepped
from hybridep.run import StepReport

_READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where rank 0's store listens; the launcher passes it on to all other ranks."""

    address: str
    port: int


Report = Event | Rendezvous
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (Started, Stepped, Finished, Failed, DcLost, Rendezvous)}


def encode(report: Report) -> str:
    """One line of JSON without its end."""
    fields = asdict(report)
    if isinstance(report, Failed):
        fields["kind"] = report.kind.value
    return json.dumps({"event": type(report).__name__, **fields})


def decode(line: str) -> Report:
    """Inverse of :func:`encode`."""
    fields = json.loads(line)
    kind = _TYPES[fields.pop("event")]
    if kind is Stepped:
        return Stepped(report=StepReport(**fields["report"]))
    if kind is Failed:
        fields["kind"] = FailureKind(fields["kind"])
    event: Report = kind(**fields)
    return event


class ReportWriter:
    """The sending end; used by one thread."""

    def __init__(self, file: int) -> None:
        self._stream = os.fdopen(file, "w", encoding="utf-8", buffering=1)

    def __call__(self, report: Report) -> None:
        self._stream.write(encode(report) + "\n")


class ReportReader:
    """The receiving end of many pipes; each belongs to a sender with a number."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}

    def add(self, sender: int, file: int) -> None:
        """Read ``file`` from now on; it is closed at its end."""
        os.set_blocking(file, False)
        self._selector.register(file, selectors.EVENT_READ, sender)
        self._partial[sender] = b""

    def pipe(self, sender: int) -> int:
        """The end of a new pipe into which the sender writes, to be closed here once the sender has it."""
        read_end, write_end = os.pipe()
        self.add(sender, read_end)
        return write_end

    def start(
        self,
        sender: int,
        command: Sequence[str],
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``COMMAND PARENT_PID REPORT_FILE_DESCRIPTOR ARGUMENTS``, which prints at the end of ``log``, and read what it
        reports."""
        read_end, write_end = os.pipe()
        try:
            with log.open("ab") as stream:
                process = subprocess.Popen(
                    [*command, str(os.getpid()), str(write_end), *arguments],
                    env=child_environment(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    pass_fds=(write_end,),
                    # A session of its own: Ctrl-C is for the launcher alone, which then stops what it started.
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.add(sender, read_end)
        return process

    def read(self, timeout_s: float) -> Iterator[tuple[int, Report | None]]:
        """(sender, report) in order of arrival; None once when a sender has closed its end. Waits for the first."""
        if not self._selector.get_map():
            time.sleep(timeout_s)  # nobody is left to wait for, and callers poll in a loop
            return
        for key, _ in self._selector.select(timeout_s):
            sender = key.data
            try:
                data = os.read(key.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            *lines, self._partial[sender] = (self._partial[sender] + data).split(b"\n")
            for line in lines:
                yield sender, decode(line.decode())
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                yield sender, None

    def close(self) -> None:
        """Close what is still open; harmless when called again."""
        for key in list((self._selector.get_map() or {}).values()):
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._selector.close()
