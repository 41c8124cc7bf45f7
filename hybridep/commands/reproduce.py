"""``hybridep reproduce``: the experiment behind a claim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

import hybridep
from hybridep.commands.common import emit, verb
from hybridep.errors import UserError
from hybridep.launch.host import child_environment

EXPERIMENTS = Path(hybridep.__file__).resolve().parent.parent / "experiments"


@verb(name="reproduce", context_settings={"ignore_unknown_options": True})
@click.argument("claim", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(claim: str | None, arguments: tuple[str, ...], as_json: bool) -> int:
    """Run the experiment behind CLAIM with ARGUMENTS, or list the claims. Needs a source checkout."""
    claims = find_claims(EXPERIMENTS)
    if not claims:
        raise UserError(f"no experiments at {EXPERIMENTS}: they are in a source checkout, not in the installed package")
    if claim is None:
        if as_json:
            emit({"claims": claims})
        else:
            for name, title in claims.items():
                click.echo(f"{name:24} {title}")
        return 0
    if claim not in claims:
        raise UserError(f"{claim}: no such claim; there are {', '.join(claims)}")
    command_line = [sys.executable, str(EXPERIMENTS / claim / "run.py"), *arguments]
    done = subprocess.run(command_line, env=child_environment(), stdout=sys.stderr if as_json else None, check=False)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    if as_json:
        emit({"claim": claim, "exit": code, "folder": str(EXPERIMENTS / claim)})
    return code


def find_claims(folder: Path) -> dict[str, str]:
    """Name -> first line of its README, for every experiment in ``folder``."""
    claims = {}
    for script in sorted(folder.glob("*/run.py")):
        readme = script.parent / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        claims[script.parent.name] = lines[0].lstrip("# ") if lines else ""
    return claims
