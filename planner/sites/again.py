"""Walks where memory is short: as layers are, and with what all of them may compute again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from hybridep.recompute import Recompute
from planner.sites.search import Search
from planner.sites.strategy import APART, walk

STARTS = 32
"""Tables that are looked at once more for each way to compute again: the best that fit, and as many of the best of all."""


def walk_in_ways(search: Search, ways: Sequence[Recompute]) -> Iterator[Search]:
    """Walks from the tables that ``search`` has looked at; where memory is short, or layers compute again already, also in
    the one of these ``ways`` to compute again in which they are best, the better of both first. Each search before it walks."""
    tried = [search]
    if search.is_short or search.problem.recompute:
        others = [other for one in ways if (other := search.once_more(one, STARTS, APART)).best is not None]
        tried += sorted(others, key=rank)[:1]
    for one in sorted(tried, key=rank):
        yield one
        walk(one)


def rank(search: Search) -> tuple[float, float]:
    """That of the best table; the last of all where none was looked at."""
    return (inf, inf) if search.best is None else search.best.rank
