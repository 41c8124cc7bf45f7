"""What the verbs share: ``--json``, ``--set``, and errors as one line with an exit code."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.errors import HybridEPError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from hybridep.topology import Cluster

Command = Callable[..., int | None]

OUTPUT = click.Path(dir_okay=False, path_type=Path)
"""A file to be written."""

_WIDE = 1000
"""Columns, where stdout is a file or a pipe."""

FIGURES = (".png", ".pdf", ".svg")
"""How a figure's file may end."""


class Finite(click.FloatRange):
    """A number in a range, which infinite ones and nan are not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def require_figure(path: Path) -> None:
    """Raises UserError for a figure that cannot be written there, as far as can be known before."""
    if path.suffix not in FIGURES:
        raise UserError(f"--figure {path}: must end in {' or '.join(FIGURES)}")
    require_place("--figure", path)


def require_place(option: str, path: Path) -> None:
    """Raises UserError for a file that cannot be written there, as far as can be known before anything is computed."""
    # Of os.path: those of a path raise PermissionError where a folder above may not be looked into.
    folder = next(one for one in path.absolute().parents if os.path.exists(one))
    if not os.path.isdir(folder) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written in {folder}")


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a config key, for example levels.dc.bandwidth='1 Gbps' or training.micro_batches=4. Repeatable.",
)


def verb(*, name: str, **settings: Any) -> Callable[[Command], click.Command]:
    """A click command with ``--json`` (argument ``as_json``). The function returns its exit code (None: 0); an error on
    purpose becomes one line on stderr, with ``--json`` also an object with the key ``error`` on stdout."""

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, as_json: bool, **kwargs: Any) -> int:
            try:
                return function(*args, as_json=as_json, **kwargs) or 0
            except HybridEPError as error:
                fail(name, error, as_json)
                return error.exit_code
            except MemoryError as error:
                short = UserError(f"this machine has too little memory for it ({error}); give fewer sites, ranks or layers")
                fail(name, short, as_json)
                return short.exit_code

        option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; progress on stderr.")
        make: Callable[[Command], click.Command] = click.command(name=name, **settings)
        return make(option(run))

    return decorate


def fail(name: str, error: HybridEPError, as_json: bool) -> None:
    """Report an error on purpose."""
    line = " ".join(str(error).split())
    print(f"hybridep {name}: {line}", file=sys.stderr)
    if as_json:
        emit({"error": line, "kind": type(error).__name__, "exit": error.exit_code})


def stdout_console(least_width: int = 0) -> Console:
    """For people, on stdout. Rows of tables are folded into a terminal's width, or ``least_width``, and nowhere else. Texts are
    printed as they are: names may have brackets or colons, which rich would take for markup or emoji."""
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    made.width = max(made.width, least_width) if made.is_terminal else _WIDE
    return made


def plan_files(output: Path, number: int, best: int = 0) -> list[Path]:
    """Files of so many plans: ``output`` for the one at the place ``best``, the others numbered from 2."""
    numbered = [output.with_stem(f"{output.stem}-{place}") for place in range(2, number + 1)]
    return [*numbered[:best], output, *numbered[best:]]


def again_in_lab(
    name: str, words: Sequence[str], cluster: Cluster, overrides: Sequence[str], as_json: bool, before: Sequence[str] = ()
) -> int | None:
    """Run ``hybridep NAME WORDS`` in emulated datacenters of the cluster's sites, by the command ``before`` where there is one:
    what ended it. None, once it is told why, where this machine or the cluster allows none."""
    from hybridep.launch.lab import run_in_lab
    from hybridep.launch.shaping import lab_spec, why_not_in_lab
    from hybridep.units import counted

    reason = why_not_in_lab(cluster)
    if reason is not None:
        note(f"hybridep {name}: unshaped, links are not emulated: {reason}")
        return None
    note(f"hybridep {name}: in {counted(cluster.sizes[0], 'emulated datacenter')}, {counted(cluster.num_gpus, 'rank')}")
    options = [*["--json"] * as_json, *(word for override in overrides for word in ("--set", override))]
    return run_in_lab([*before, sys.executable, "-m", "hybridep.cli", name, *words, *options], lab_spec(cluster))


def emit(result: Mapping[str, Any]) -> None:
    """Print the one JSON object of ``--json``."""
    print(json.dumps(result), flush=True)


def note(text: str) -> None:
    """One line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)
