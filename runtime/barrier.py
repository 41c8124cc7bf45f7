"""Waiting for all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.channels import NUMBERED
from runtime.transport import Transport

PATIENCE_S = 600.0
"""Ranks write checkpoints at different speeds, and wait while others measure slow links; one that dies meanwhile is noticed at
once all the same."""
MEETING, SAVING = "barrier", "checkpoint"
_GATHER, _SHARE = ": gather at rank 0", ": share of rank 0"
NUMBERS = {
    label: NUMBERED - 1 - number
    for number, label in enumerate(name + what for name in (MEETING, SAVING) for what in ("", _GATHER, _SHARE))
}
"""Of the labels of barriers, the last ones that there are: a checkpoint's files travel beside them under a label with a level's
name in it, whose tags are by chance."""


class Barrier:
    """A meeting point of all ranks at rank 0. It has a transport of its own, because ranks may wait here for long."""

    def __init__(self, *, rank: int, world_size: int, groups: Sequence[dist.ProcessGroup] = (), name: str = MEETING) -> None:
        """``groups``: connections in place of the default process group's. ``name``: ``MEETING`` or ``SAVING``, of each there is
        one at a time."""
        self._label, self._gather_label, self._share_label = name, name + _GATHER, name + _SHARE
        self._rank, self._others = rank, [other for other in range(world_size) if other != rank]
        self._transport = Transport(timeout_s=PATIENCE_S, groups=groups, numbers=NUMBERS)

    def wait(self) -> None:
        """Return when all ranks have called it."""
        self.agree(0.0)

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks, once all have called it."""
        mine = torch.tensor([value], dtype=torch.float64)
        if self._rank == 0:
            self._transport.exchange({}, {other: torch.zeros(1, dtype=torch.float64) for other in self._others}, self._label)
            self._transport.exchange(dict.fromkeys(self._others, mine), {}, self._label)
            return value
        answer: Tensor = torch.zeros(1, dtype=torch.float64)
        self._transport.exchange({0: mine}, {}, self._label)
        self._transport.exchange({}, {0: answer}, self._label)
        return float(answer)

    def most(self, values: Sequence[float]) -> list[float]:
        """For each position the largest value of all ranks, on all ranks."""
        return self._combine(values, lambda all_RN: all_RN.amax(0))

    def total(self, value: float) -> float:
        """The sum of all ranks' values, to the same bits on all ranks."""
        return self._combine([value], lambda all_RN: all_RN.sum(0))[0]

    def _combine(self, values: Sequence[float], combine: Callable[[Tensor], Tensor]) -> list[float]:
        gathered = self.gather(torch.tensor(values, dtype=torch.float64))
        answer = torch.zeros(len(values), dtype=torch.float64)
        if gathered is None:
            self._transport.exchange({}, {0: answer}, self._label)
        else:
            answer = combine(torch.stack(gathered))
            self._transport.exchange(dict.fromkeys(self._others, answer), {}, self._label)
        return [float(value) for value in answer]

    def gather(self, value: Tensor) -> list[Tensor] | None:
        """At rank 0 the tensors of all ranks, which have one shape and type, in the order of ranks; elsewhere None."""
        if self._rank:
            self._transport.exchange({0: value.contiguous()}, {}, self._gather_label)
            return None
        arrived = {other: torch.empty_like(value, memory_format=torch.contiguous_format) for other in self._others}
        self._transport.exchange({}, arrived, self._gather_label)
        return [value, *(arrived[other] for other in sorted(arrived))]

    def gather_bytes(self, value: bytes) -> list[bytes] | None:
        """At rank 0 what all ranks give, of any length, in the order of ranks; elsewhere None."""
        lengths = self.gather(torch.tensor([len(value)]))
        padded = torch.zeros(int(self.most([len(value)])[0]), dtype=torch.uint8)
        padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else padded[:0]
        gathered = self.gather(padded)
        if lengths is None or gathered is None:
            return None
        return [one[: int(length)].numpy().tobytes() for one, length in zip(gathered, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any] | None:
        """At rank 0 what all ranks give, plain data, in the order of ranks; elsewhere None."""
        gathered = self.gather_bytes(json.dumps(value).encode())
        return None if gathered is None else [json.loads(one) for one in gathered]

    def share_json(self, value: Any) -> Any:
        """Rank 0's value, plain data, on all ranks."""
        text = json.dumps(value).encode() if self._rank == 0 else b""
        message = torch.zeros(int(self.agree(float(len(text)))), dtype=torch.uint8)
        if self._rank:
            self._transport.exchange({}, {0: message}, self._share_label)
        else:
            message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._transport.exchange(dict.fromkeys(self._others, message), {}, self._share_label)
        return json.loads(message.numpy().tobytes())
