"""Codecs on the command line: ``--codec dc.experts=change-int8``, and what the lossy codecs of a plan cost as far as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridep.codec_losses import with_gates
from hybridep.codecs import PAYLOADS, Codecs
from hybridep.config import apply_override, build
from hybridep.errors import QuantityError, UserError
from hybridep.pipeline import AnyPlan
from hybridep.units import parse_share


def read_codecs(options: Sequence[str], levels: Sequence[str], *, in_stages: bool = False) -> dict[str, Codecs]:
    """``LEVEL.KIND=CODEC`` texts by level; of activations at the outermost level of plans ``in_stages`` only. Raises UserError
    and ConfigError."""
    given: dict[str, Any] = {}
    for option in options:
        key, equals, _ = option.partition("=")
        level, _, kind = key.partition(".")
        if not (kind and equals) or level not in levels:
            raise UserError(f"--codec {option}: write it as LEVEL.KIND=CODEC with a level of {', '.join(levels)}")
        try:
            apply_override(given, option)
        except UserError as error:
            raise UserError(str(error).replace("--set", "--codec", 1)) from None
        if option.startswith(f"{level}.activations=") and not (in_stages and level == levels[0]):
            raise UserError(
                f"--codec {option}: activations pass between pipeline stages; give {levels[0]}.activations, and --stages"
            )
    found = {level: with_gates(build(Codecs, values, f"--codec {level}")) for level, values in given.items()}
    for level, codecs in found.items():
        if codecs.lossless and level != levels[0]:
            kind = codecs.lossless[0]
            raise UserError(f"--codec {level}.{kind}=lossless: it is for links between sites; give {levels[0]}.{kind}")
    return found


def read_max_loss(text: str | None) -> float | None:
    """``0.5%`` -> 0.005, and ``0`` is none. Raises UserError."""
    try:
        share = None if text is None else parse_share("0%" if text.strip() == "0" else text)
    except QuantityError as error:
        raise UserError(f"--max-loss {text}: {error}") from None
    if share is not None and share < 0:
        raise UserError(f"--max-loss {text}: must be at least zero")
    return share


def lossy_codecs(plan: AnyPlan) -> list[dict[str, Any]]:
    """Level, kind, codec, and what it cost in final loss (None where that was not measured), of each lossy codec of a plan."""
    return [
        {
            "level": level,
            "kind": kind,
            "codec": codecs.lossy[kind],
            "final_loss": gate.relative if (gate := codecs.gates.get(kind)) else None,
            "source": gate.source if gate else None,
        }
        for level, codecs in plan.codecs.items()
        for kind in PAYLOADS
        if kind in codecs.lossy
    ]


def codecs_json(plan: AnyPlan) -> dict[str, Any]:
    """``lossy_codecs``, and the kinds of payload that are lossless in fewer bytes, by level."""
    return {
        "lossy_codecs": lossy_codecs(plan),
        "lossless": {level: codecs.lossless for level, codecs in plan.codecs.items() if codecs.lossless},
    }


def codecs_text(plans: Sequence[AnyPlan], plan: AnyPlan) -> str:
    """``dc: tokens int8, experts bf16``, or ``exact``: how one of several plans codes payloads; nothing where all are exact."""
    if not any(codecs.coded for one in plans for codecs in one.codecs.values()):
        return ""
    levels = {level: ", ".join(f"{kind} {codec}" for kind, codec in one.coded.items()) for level, one in plan.codecs.items()}
    return "; ".join(f"{level}: {text}" for level, text in levels.items() if text) or "exact"


def codec_lines(plan: AnyPlan) -> list[str]:
    """A line per lossy codec of a plan, and one for what travels without loss in fewer bytes; none for an exact one."""
    lines = []
    for level, codecs in plan.codecs.items():
        if codecs.lossless:
            lines.append(f"lossless on {level}: {', '.join(codecs.lossless)}")
    for one in lossy_codecs(plan):
        cost = "not measured" if one["final_loss"] is None else f"{one['final_loss']:+.2%} ({one['source']})"
        lines.append(f"lossy on {one['level']}: {one['kind']} {one['codec']}; final loss {cost}")
    return lines
