"""What tokens are expected to choose, against sampled choices and sums over all sets."""

from __future__ import annotations

from itertools import combinations
from math import ceil, comb, prod

import numpy as np
import pytest

from hybridep.gating import Gating


def skewed(num_experts: int, exponent: float, seed: int = 0) -> tuple[float, ...]:
    share = np.arange(1, num_experts + 1) ** -exponent
    return tuple(np.random.default_rng(seed).permutation(share / share.sum()))


def gate(num_experts: int = 8, top_k: int = 3, tokens: int = 64, **changes: object) -> Gating:
    return Gating(num_experts=num_experts, top_k=top_k, sequence_length=tokens, sequences=(2,), **changes)  # type: ignore[arg-type]


def draw(gating: Gating, number: int, rng: np.random.Generator) -> np.ndarray:
    """[number, K]: sets drawn with replacement from the list of all, each with the product of its experts' odds."""
    sets = np.array(list(combinations(range(gating.num_experts), gating.top_k)))
    drawn = gating._drawn if gating.popularity is not None else np.full(gating.num_experts, 0.5)
    weight = np.prod((drawn / (1 - drawn))[sets], axis=1)
    return sets[rng.choice(len(sets), size=number, p=weight / weight.sum())]


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_even_popularity_is_the_closed_form(top_k: int) -> None:
    even, measured = gate(top_k=top_k), gate(top_k=top_k, popularity=(1 / 8,) * 8)
    members = np.arange(8)[None, :] < np.arange(9)[:, None]
    expected = [1 - comb(8 - n, top_k) / comb(8, top_k) for n in range(9)]
    np.testing.assert_allclose(even.hit_by_count, expected, atol=1e-12)
    np.testing.assert_allclose(even.hit(members), expected, atol=1e-12)
    np.testing.assert_allclose(measured.hit(members), expected, atol=1e-6)


def test_the_popularity_given_is_the_popularity_drawn(rng: np.random.Generator) -> None:
    gating = gate(popularity=skewed(8, 0.8))
    counts = np.bincount(draw(gating, 100_000, rng).ravel(), minlength=8) / 100_000
    np.testing.assert_allclose(counts, gating.chosen, atol=5 * 0.5 / np.sqrt(100_000))
    assert gating.chosen.sum() == pytest.approx(3)


def test_hits_are_the_sum_over_all_sets(rng: np.random.Generator) -> None:
    gating = gate(popularity=skewed(8, 0.8))
    members = rng.random((20, 8)) < 0.4
    odds = gating._drawn / (1 - gating._drawn)
    sets = list(combinations(range(8), 3))
    weights = [prod(odds[e] for e in chosen) for chosen in sets]
    for member, hit in zip(members, gating.hit(members), strict=True):
        met = sum(w for w, chosen in zip(weights, sets, strict=True) if member[list(chosen)].any())
        assert hit == pytest.approx(met / sum(weights), abs=1e-9)


@pytest.mark.parametrize("num_experts", [7, 64, 65, 256])
def test_sets_that_occur_often_are_told_apart(num_experts: int, rng: np.random.Generator) -> None:
    """However many bytes their members take."""
    gating = gate(num_experts=num_experts, popularity=skewed(num_experts, 0.5))
    members = (rng.random((6, num_experts)) < 0.4)[rng.integers(6, size=40)]
    alone = [float(gating.hit(member[None])[0]) for member in members]
    assert gating.hit(members).tolist() == alone and len(set(alone)) > 3


def test_large_skewed_gates_are_solved() -> None:
    """256 experts, top-8, the hottest in nearly every token, some never seen."""
    share = np.arange(1, 257) ** -1.1
    share[200:] = 0
    for _ in range(50):
        share = np.minimum(share / share.sum(), 1 / 8)
    gating = gate(256, 8, popularity=tuple(share / share.sum()))
    single = np.eye(256, dtype=bool)
    np.testing.assert_allclose(gating.hit(single), gating.chosen, atol=1e-6)
    assert gating.hit(np.ones((1, 256), dtype=bool))[0] == pytest.approx(1)


@pytest.mark.parametrize("last_dropped", [False, True], ids=["probs", "position"])
@pytest.mark.parametrize("popularity", [None, skewed(8, 0.6)], ids=["even", "skewed"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_drops_are_those_of_sampled_sequences(
    factor: float, popularity: tuple[float, ...] | None, last_dropped: bool, rng: np.random.Generator
) -> None:
    tokens, sequences = 64, 1000
    gating = gate(tokens=tokens, popularity=popularity, capacity=ceil(factor * tokens * 3 / 8), last_dropped=last_dropped)
    chosen = np.zeros((sequences, tokens, 8), dtype=bool)
    np.put_along_axis(chosen, draw(gating, tokens * sequences, rng).reshape(sequences, tokens, 3), True, axis=2)
    score = np.broadcast_to(-np.arange(tokens)[:, None], chosen.shape) if last_dropped else rng.random(chosen.shape)
    place = np.argsort(np.argsort(np.where(chosen, -score, np.inf), axis=1), axis=1)
    kept = chosen & (place < gating.capacity)
    # Tokens of a sequence are not independent: sequences are.
    spread = 5 * kept.mean(axis=1).std() / np.sqrt(sequences)
    np.testing.assert_allclose(kept.mean(axis=(0, 1)), gating.chosen * gating.kept, atol=spread)
    np.testing.assert_allclose(gating.kept_along.mean(axis=0), gating.kept, atol=0.01)
    np.testing.assert_allclose(gating.rows, tokens * gating.chosen * gating.kept)
    members = rng.random((20, 8)) < 0.4
    for member, hit in zip(members, gating.hit(members), strict=True):
        assert kept[:, :, member].any(axis=2).mean() == pytest.approx(hit, abs=0.01)


def test_padded_experts_compute_their_capacity() -> None:
    assert gate(capacity=7, padded=True).rows.tolist() == [7.0] * 8
    assert gate(tokens=100, capacity=100).kept.tolist() == [1.0] * 8
