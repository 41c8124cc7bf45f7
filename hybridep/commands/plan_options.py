"""Which options of ``hybridep plan`` do not go together, checked before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hybridep.errors import UserError

_RATES, _PRICES = ("--scenario", "--within"), ("--objective", "--budget")
NOT_TOGETHER: tuple[tuple[Sequence[str], Sequence[str], str], ...] = (
    (("--simulate", "--no-simulate", "--prefetch", "--chunks"), ("--stages",), ""),
    (("--compare",), ("--fewer-sites",), "other planners choose no sites"),
    (("--fewer-sites",), (*_RATES, "--upgrades"), "which sites pay changes with their links"),
    (("--top", "--pool", "--simulate"), _RATES, "plans for scenarios are one plan, not for known rates"),
    (("--prefetch",), _RATES, "plans for scenarios know no copies ahead"),
    (("--chunks",), _RATES, "plans for scenarios know no tokens in parts"),
    (("--routing",), _RATES, "plans for scenarios know no popularity of experts"),
    (_PRICES, (*_RATES, "--pool", "--simulate", "--upgrades"), "that goes by time only"),
    (("--chunks",), ("--prefetch",), "a schedule has tokens in parts or copies ahead"),
    (("--prefetch",), ("--max-loss",), "copies ahead are planned for exact bytes"),
    (("--codec",), ("--max-loss",), "codecs are given, or chosen by their loss"),
    (("--top", "--simulate"), ("--pool",), "that makes one plan for each of several rates"),
    (
        ("--prefetch", "--routing"),
        ("--upgrades",),
        "links are priced for copies that set out with their blocks, and equal experts",
    ),
)
"""Any of the first with any of the second: why not."""
_BETWEEN_SITES = ("--compare", "--pool", "--upgrades")
"""What has no answer for one site."""
_OF_PLANS = ("--compare", "--json")
"""What is read where two plans are compared."""


def given_options() -> list[str]:
    """Those of the command that is being run which are not as they are when left out, by their names."""
    context = click.get_current_context()
    given = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if isinstance(option, click.Option) and value not in (None, ()) and value != option.get_default(context):
            given.append(option.secondary_opts[0] if option.secondary_opts and value is False else option.opts[-1])
    return given


def require_together(given: Sequence[str]) -> None:
    """Raises UserError for options that no plan has together, or that mean nothing without others."""
    for some, others, reason in NOT_TOGETHER:
        for one in some:
            for other in others:
                if one in given and other in given:
                    raise UserError(f"{one}: not with {other}{reason and ': '}{reason}; leave one of them out")
    if "--fewer-sites" in given and "--stages" not in given:
        raise UserError("--fewer-sites: give --stages, too; which sites pay is asked of pipelines")
    if "--quantile" in given and not set(_RATES) & set(given):
        raise UserError("--quantile: of the scenarios; give --scenario or --within, too")


def require_sites(given: Sequence[str], cluster: str, sites: int) -> None:
    """Raises UserError where there is one site only and something is asked about what joins sites."""
    for one in _BETWEEN_SITES if sites < 2 else ():
        if one in given:
            raise UserError(f"{one}: needs two sites or more, and cluster {cluster} has one; leave it out")


def require_plain_comparison(given: Sequence[str]) -> None:
    """Raises UserError for options beside ``--compare`` that mean nothing for two plan files."""
    for one in given:
        if one not in _OF_PLANS:
            raise UserError(f"{one}: not where --compare is given two plan files, which are compared as they are; leave it out")
