"""The command line ``hybridep``: finds the verb, loads it, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from hybridep.commands.interrupts import INTERRUPTED, terminate

VERBS = {
    "plan": "Find the plan for a cluster and a model, and explain it.",
    "simulate": "Step time and link loads of a plan, by flow-level simulation.",
    "train": "Train: over Ray, in emulated datacenters, or with --local processes.",
    "tokenize": "Texts -> token ids to train on, by a public model's tokenizer.",
    "probe": "Measure links and computation, and write a cluster file.",
    "lab": "Run a command inside emulated datacenters.",
    "demo": "A short tour: plan, simulate, train in emulated datacenters, compare.",
    "doctor": "What this machine can do, and how to fix what it cannot.",
    "reproduce": "Run the experiment behind a claim.",
}
"""Verb -> its line in the help, so that the help loads no verb."""


class Verbs(click.Group):
    """Imports the module of a verb when it is called: ``hybridep --help`` must not wait for torch or Ray."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"hybridep.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


class _ToStderr(logging.Handler):
    """What modules tell whoever waits, as lines beside progress."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"hybridep: {record.getMessage()}", file=sys.stderr, flush=True)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hybridep", prog_name="hybridep")
def hybridep() -> None:
    """Plan, simulate and run Mixture-of-Experts training over datacenters joined by slow links.

    Every verb takes --json (one JSON object on stdout, progress on stderr). Exit codes: 0 fine, 2 bad input, 3 no plan fits,
    4 solver limit without a plan, 5 a worker or datacenter lost, 130 interrupted, 143 ended by SIGTERM, 1 a bug.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point; ends the process with the exit code. A bug shows its traceback (and exit code 1)."""
    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # A terminal that is closed; whoever ignores it goes on (nohup).
        signal.signal(signal.SIGHUP, terminate)
    log = logging.getLogger("hybridep")
    log.setLevel(logging.INFO)
    log.handlers = [_ToStderr()]
    try:
        code = hybridep.main(arguments, prog_name="hybridep", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
