"""Choices from some groups of experts, against all orders of a few experts' scores, and against gates as DeepSeek-V3 has them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import permutations
from math import comb, prod

import numpy as np
import pytest

from hybridep.gating import Gating
from hybridep.group_choice import GroupChoice

SHAPES = [(4, 2, 2, 3), (4, 2, 3, 3), (2, 4, 1, 3), (8, 1, 2, 2), (3, 2, 2, 4)]
"""Groups, experts of each, groups of a token, and experts that it chooses."""


@cache
def sets_of(groups: int, size: int, per_token: int, top_k: int) -> dict[tuple[int, ...], float]:
    """How likely each set is, from all orders of the scores."""
    found: Counter[tuple[int, ...]] = Counter()
    for order in permutations(range(groups * size)):
        own = list(dict.fromkeys(expert // size for expert in order))[:per_token]
        found[tuple(sorted([expert for expert in order if expert // size in own][:top_k]))] += 1
    return {chosen: count / found.total() for chosen, count in found.items()}


def gate(groups: int, size: int, per_token: int, top_k: int, **changes: object) -> Gating:
    choice = GroupChoice(groups=groups, size=size, per_token=per_token, top_k=top_k)
    known = {"num_experts": groups * size, "top_k": top_k, "sequence_length": 64, "sequences": (1,), "groups": choice}
    return Gating(**(known | changes))  # type: ignore[arg-type]


def all_members(experts: int) -> np.ndarray:
    return np.asarray((np.arange(2**experts)[:, None] >> np.arange(experts)) % 2 == 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_hits_are_those_of_all_orders(shape: tuple[int, int, int, int]) -> None:
    gating, members = gate(*shape), all_members(shape[0] * shape[1])
    sets = sets_of(*shape)
    expected = [sum(p for chosen, p in sets.items() if member[list(chosen)].any()) for member in members]
    assert not gating.counts_decide and gating.groups is not None
    np.testing.assert_allclose(gating.hit(members), expected, atol=1e-12)
    np.testing.assert_allclose(1 - gating.groups.missed(1.0 - members), expected, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_s_own_groups_alone(shape: tuple[int, int, int, int]) -> None:
    """Given that the first groups are the token's."""
    groups, size, per_token, top_k = shape
    choice, own = GroupChoice(groups=groups, size=size, per_token=per_token, top_k=top_k), range(per_token * size)
    # Sets of other groups count for any ways to complete their own.
    inside = {}
    for chosen, p in sets_of(*shape).items():
        used = {expert // size for expert in chosen}
        if used <= set(range(per_token)):
            inside[chosen] = p * comb(groups, len(used)) / comb(per_token, len(used))
    assert sum(inside.values()) == pytest.approx(1.0)
    for member in all_members(len(own)):
        counts = member.reshape(1, per_token, size).sum(axis=2)
        missed = sum(p for chosen, p in inside.items() if not member[list(chosen)].any())
        assert choice.missed_of_counts(counts)[0] == pytest.approx(missed, abs=1e-12)


@pytest.mark.parametrize("last_dropped", [False, True])
def test_drops_leave_out_what_they_leave_out(last_dropped: bool) -> None:
    shape = (4, 2, 2, 3)
    gating, members = gate(*shape, capacity=20, last_dropped=last_dropped), all_members(8)
    assert 0.7 < gating.kept[0] < 0.99
    turned_away, sets = 1 - gating.kept_along[:, 0], sets_of(*shape).items()
    expected = [sum(p * (1 - np.mean(turned_away ** member[list(chosen)].sum())) for chosen, p in sets) for member in members]
    np.testing.assert_allclose(gating.hit(members), expected, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_measured_popularity_is_what_is_chosen(shape: tuple[int, int, int, int]) -> None:
    """Every set in proportion to what it was and the product of its experts' odds."""
    experts = shape[0] * shape[1]
    drawn, sets = np.random.default_rng(3).uniform(0.2, 3, experts), sets_of(*shape)
    shares = np.zeros(experts)
    for chosen, p in sets.items():
        shares[list(chosen)] += p * np.prod(drawn[list(chosen)])
    gating, members = gate(*shape, popularity=tuple((shares / shares.sum()).tolist())), all_members(experts)
    odds = gating._odds_in_groups
    assert odds / odds[0] == pytest.approx(drawn / drawn[0], rel=1e-6)
    weights = {chosen: p * prod(odds[list(chosen)].tolist()) for chosen, p in sets.items()}
    total = sum(weights.values())
    expected = [sum(w for chosen, w in weights.items() if member[list(chosen)].any()) / total for member in members]
    np.testing.assert_allclose(gating.hit(members), expected, atol=1e-9)
    np.testing.assert_allclose(gating.hit(np.eye(experts, dtype=bool)), shape[3] * shares / shares.sum(), atol=1e-9)


def test_all_groups_are_no_limit() -> None:
    """With as many groups as there are, all sets are equally likely."""
    choice, counts = GroupChoice(groups=4, size=8, per_token=4, top_k=5), np.array([[3, 0, 8, 1], [0, 0, 0, 0], [8, 8, 8, 8]])
    expected = [comb(32 - number, 5) / comb(32, 5) for number in counts.sum(axis=1).tolist()]
    np.testing.assert_allclose(choice.missed_of_counts(counts), expected, atol=1e-12)
    assert sum(choice.patterns.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("best", [1, 2])
def test_tokens_reach_as_many_groups_as_those_of_a_gate(best: int) -> None:
    """DeepSeek-V3's shape and, with the best two of each group, its rule; without groups a third more would be expected."""
    experts, groups, per_token, top_k, tokens = 256, 8, 4, 8, 20_000
    scores = np.random.default_rng(0).standard_normal((tokens, groups, experts // groups))
    of_group = np.sort(scores, axis=2)[:, :, -best:].sum(axis=2)
    own = of_group >= np.sort(of_group, axis=1)[:, -per_token, None]
    chosen = np.argsort(-np.where(own[:, :, None], scores, -np.inf).reshape(tokens, -1), axis=1)[:, :top_k]
    reached = np.mean([len(set(row)) for row in (chosen // (experts // groups)).tolist()])
    gating = gate(groups, experts // groups, per_token, top_k)
    expected = gating.hit(np.repeat(np.eye(groups, dtype=bool), experts // groups, axis=1)).sum()
    assert expected == pytest.approx(reached, rel=0.002 if best == 1 else 0.007)
    assert groups * (1 - comb(experts - experts // groups, top_k) / comb(experts, top_k)) > 1.3 * reached
