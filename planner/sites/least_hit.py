"""How often tokens need one of n experts at least, whichever they are, where that depends on which: for bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.gating import Gating
from hybridep.group_choice import GroupChoice

_MOST_WORK = 10_000_000
"""Numbers of experts of each of a token's groups that are all looked at, times states of ``GroupChoice``; a second or two."""
_ROUNDING = 1e-14


def least_hit(chosen: Gating, kept: IntArray) -> FloatArray:
    """[len(kept) + 1], concave: no more than the probability that a token needs at least one of any n of the experts ``kept``,
    the least popular first."""
    if chosen.counts_decide:
        return chosen.hit_by_count[: len(kept) + 1]
    if chosen.capacity is None and chosen.popularity is None and chosen.groups is not None:
        return _of_any(chosen.groups)[: len(kept) + 1]
    number = np.arange(1, len(kept) + 1)
    if chosen.capacity is None and chosen.groups is None:
        # None of n experts is chosen with the largest probability where they have the smallest ones of being drawn.
        member = np.zeros((len(kept), chosen.num_experts), dtype=np.bool_)
        member[:, kept] = np.tri(len(kept), dtype=np.bool_)
        least = np.asarray(chosen.hit(member))
    else:
        # Drops differ, or groups count; any set has at least the tokens of its least chosen expert.
        least = np.full(len(kept), float((chosen.chosen * chosen.kept)[kept].min()))
    # The highest line through zero below it as far as n, and from there on no steeper than before.
    below = number * np.minimum.accumulate(least / number)
    return np.concatenate(([0.0], np.cumsum(np.minimum.accumulate(np.diff(below, prepend=0.0)))))


@lru_cache(maxsize=16)
def _of_any(choice: GroupChoice) -> FloatArray:
    """[E + 1], concave: of any n experts, where all are equally popular.

    A token's groups are any ``per_token`` of all, so what it misses is no more than the mean, over all ways to take so many
    groups, of a convex function of how many of the n experts these have. Such a mean is largest where the n experts are in as
    few groups as possible (it is Schur-convex; Marshall, Olkin and Arnold, Inequalities, 2011, chapter 11).
    """
    most = _most_missed(choice)
    least = np.zeros(choice.groups * choice.size + 1)
    for number in range(1, len(least)):
        full, rest = divmod(number, choice.size)
        others = choice.groups - full - (rest > 0)
        missed = 0.0
        for partly in (0, 1) if rest else (0,):
            for some in range(min(full, choice.per_token - partly) + 1):
                ways = comb(full, some) * comb(others, choice.per_token - partly - some)
                missed += ways * float(most[some * choice.size + partly * rest])
        least[number] = 1 - missed / comb(choice.groups, choice.per_token)
    # Concave in each group, not beyond: as it is for the first few experts, then straight from whole groups to whole groups.
    whole = np.arange(0, len(least), choice.size)
    for few in range(choice.size, -1, -1):
        known = np.union1d(np.arange(few), whole)
        below = np.interp(np.arange(len(least)), known, least[known])
        if (np.diff(below, n=2) <= _ROUNDING).all():
            return np.minimum(below, least).clip(0.0)
    return np.arange(len(least)) / len(least)


def _most_missed(choice: GroupChoice) -> FloatArray:
    """[experts of a token's groups + 1], convex: tokens whose groups have so many of some experts miss all of these no more
    often, wherever in the groups they are."""
    total, number = choice.per_token * choice.size, comb(choice.per_token + choice.size, choice.per_token)
    # A token's first choices are those that it would make of fewer.
    while number * choice.num_states > _MOST_WORK and choice.top_k > 1:
        choice = replace(choice, top_k=choice.top_k - 1)
    if number > _MOST_WORK:
        return np.asarray(1 - np.arange(total + 1) / total)  # of the first choice alone
    sets = np.array(list(combinations_with_replacement(range(choice.size + 1), choice.per_token)))
    most = np.zeros(total + 1)
    np.maximum.at(most, sets.sum(axis=1), choice.missed_of_counts(sets))
    for number in range(total - 2, -1, -1):
        most[number] = max(most[number], 2 * most[number + 1] - most[number + 2])
    return most
