"""Codecs on the command line: ``--codec dc.experts=change-int8``, and what the lossy codecs of a plan cost as far as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridep.codecs import KINDS, Codecs
from hybridep.config import apply_override, build
from hybridep.errors import UserError
from hybridep.plan import Plan


def read_codecs(options: Sequence[str], levels: Sequence[str]) -> dict[str, Codecs]:
    """``LEVEL.KIND=CODEC`` texts by level. Raises UserError and ConfigError."""
    given: dict[str, Any] = {}
    for option in options:
        level, dot, _ = option.partition("=")[0].partition(".")
        if not dot or level not in levels:
            raise UserError(f"--codec {option}: write it as LEVEL.KIND=CODEC with a level of {', '.join(levels)}")
        apply_override(given, option)
    return {level: build(Codecs, values, f"--codec {level}") for level, values in given.items()}


def codec_lines(plan: Plan) -> list[str]:
    """A line per lossy codec of a plan; none for an exact one."""
    lines = []
    for level, codecs in plan.codecs.items():
        for kind in KINDS:
            if kind in codecs.lossy:
                gate = codecs.gates.get(kind)
                cost = "not measured" if gate is None else f"{gate.relative:+.2%} ({gate.source})"
                lines.append(f"lossy on {level}: {kind} {codecs.lossy[kind]}; final loss {cost}")
    return lines
