"""Shares of the global batch: whole sequences, none lost, in proportion to what sites are given."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError, PlacementError
from hybridep.shares import (
    alike_ranks,
    batch_sequences,
    crowding,
    first_sequence,
    on_sites,
    owners,
    parts,
    site_sequences,
    site_shares,
)
from hybridep.topology import Cluster
from hybridep.workload import Training, Workload


def inputs(weights: list[float | None], micro_batch_size: int, inside: int = 2) -> tuple[Cluster, Workload]:
    cluster = {
        "name": "c",
        "levels": [
            {"name": "dc", "size": len(weights), "bandwidth": "1 Gbps", "latency": "1 ms"},
            {"name": "gpu", "size": inside, "bandwidth": "8 Gbps", "latency": "0 s"},
        ],
        "gpu": {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": f"s{at}", "tokens": weight} for at, weight in enumerate(weights)],
    }
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8, "num_experts": 2, "top_k": 1}
    workload = {
        "name": "w",
        "model": model | {"expert_ffn_size": 8},
        "training": {"sequence_length": 4, "micro_batch_size": micro_batch_size},
    }
    return build(Cluster, cluster, "c"), build(Workload, workload, "w")


@pytest.mark.parametrize(
    ("weights", "micro_batch_size", "expected"),
    [
        ([None, None, None], 5, (5, 5, 5)),
        ([2.0, 2.0], 3, (3, 3)),
        ([3.0, 1.0], 4, (6, 2)),
        ([2.0, None, None], 4, (6, 3, 3)),
        ([2.0, 1.0], 2, (3, 1)),
        ([1.0, 2.5, 1.0], 2, (2, 3, 1)),
    ],
)
def test_shares_are_whole_and_in_proportion(
    weights: list[float | None], micro_batch_size: int, expected: tuple[int, ...]
) -> None:
    cluster, workload = inputs(weights, micro_batch_size)
    assert site_sequences(cluster, workload) == expected
    assert site_shares(cluster, workload).mean() == pytest.approx(1.0)


def test_any_weights_keep_the_global_batch(rng: np.random.Generator) -> None:
    for _ in range(50):
        weights = rng.uniform(0.5, 4, int(rng.integers(1, 7))).tolist()
        cluster, workload = inputs(weights, int(rng.integers(8, 40)), inside=int(rng.integers(1, 4)))
        sequences = np.array(site_sequences(cluster, workload))
        mean = workload.training.micro_batch_size
        assert sequences.sum() == mean * len(weights)
        assert np.abs(sequences - mean * len(weights) * np.array(weights) / sum(weights)).max() < 1
        # All have an owner, and each rank's follow each other.
        rank, own = owners(cluster, workload)
        assert len(rank) == batch_sequences(cluster, workload) == mean * cluster.num_gpus
        inside = cluster.num_gpus // len(weights)
        np.testing.assert_array_equal(np.bincount(rank), np.repeat(sequences, inside))
        firsts = np.array([first_sequence(cluster, workload, one) for one in range(cluster.num_gpus)])
        np.testing.assert_array_equal(firsts[rank] + own, np.arange(len(rank)))
        # First ranks of the sites before second ones.
        assert (np.diff(rank % inside) >= 0).all()


def test_a_site_without_a_sequence_is_an_error_with_its_knobs() -> None:
    with pytest.raises(
        PlacementError, match=r"sites\.s1\.tokens: 0\.1 is 0\.36 sequences per rank.*micro_batch_size \(2, the mean\)"
    ):
        site_sequences(*inputs([1.0, 0.1], 2))


def test_a_mean_of_sites_that_is_no_whole_number_is_shared_but_for_one(rng: np.random.Generator) -> None:
    for _ in range(50):
        sites, inside = int(rng.integers(2, 7)), int(rng.integers(1, 4))
        total = int(rng.integers(sites, 6 * sites))
        cluster, workload = inputs([None] * sites, 1, inside)
        training = build(Training, workload.training.model_dump(mode="json") | {"micro_batch_size": total / sites}, "t")
        workload = workload.model_copy(update={"training": training})
        sequences = site_sequences(cluster, workload)
        assert sum(sequences) == total and max(sequences) - min(sequences) == (total % sites > 0)
        assert list(sequences) == sorted(sequences, reverse=True)
        assert batch_sequences(cluster, workload) == total * inside
        assert alike_ranks(cluster, workload) == (total % sites == 0)
        assert site_shares(cluster, workload).mean() == pytest.approx(1.0)
    with pytest.raises(PlacementError, match=r"micro_batch_size: 1\.3 on average are 5\.2 for 4 ranks, one of each site of c"):
        cluster, workload = inputs([None] * 4, 1)
        site_sequences(
            cluster, workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batch_size": 1.3})})
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [("many", "must be a number"), (None, "must be a number"), (float("nan"), "must be finite"), (0.5, "equal to 1")],
)
def test_a_mean_that_is_no_number_of_sequences_is_named_by_its_key(given: object, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"t: micro_batch_size: .*{words}"):
        build(Training, {"sequence_length": 4, "micro_batch_size": given}, "t")
    assert [build(Training, {"sequence_length": 4, "micro_batch_size": one}, "t").micro_batch_size for one in (2, 2.0, 2.5)] == [
        2,
        2,
        2.5,
    ]


def test_some_of_the_sites_share_out_the_same_batch(rng: np.random.Generator) -> None:
    uneven = 0
    for _ in range(200):
        sites, micro_batch_size, inside = (int(rng.integers(low, high)) for low, high in ((2, 7), (1, 9), (1, 4)))
        cluster, workload = inputs([None] * sites, micro_batch_size, inside)
        kept = [f"s{site}" for site in rng.permutation(sites)[: int(rng.integers(1, sites + 1))]]
        batch = micro_batch_size * sites * inside
        one, work = on_sites(cluster, workload, kept)
        training = work.training
        assert list(one.site_names) == sorted(kept)
        assert batch_sequences(one, work) * training.micro_batches == batch
        sequences, even = site_sequences(one, work), batch % one.num_gpus == 0
        assert (max(sequences) == min(sequences) or not even) and max(sequences) - min(sequences) <= 1
        # Some batches cannot be cut into smaller parts: seven sequences are seven, or one.
        of_place = micro_batch_size * sites
        possible = any(
            of_place % part == 0 and len(kept) <= part <= micro_batch_size * len(kept) for part in range(1, of_place + 1)
        )
        assert max(sequences) <= micro_batch_size or not possible
        assert training.sequence_length == workload.training.sequence_length and work.model == workload.model
        uneven += max(sequences) > min(sequences)
        assert on_sites(one, work, kept)[1] == work, "nothing is left out, so nothing changes"
    assert uneven > 30


def test_some_of_the_sites_share_out_the_batch_by_their_weights(rng: np.random.Generator) -> None:
    """In whole sequences, of which no rank has more than it had where that is possible, and as few micro-batches as suit it."""
    smaller = 0
    for _ in range(200):
        sites, inside = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        weights = rng.choice([1.0, 2.0, 3.0], sites)
        cluster, workload = inputs(weights.tolist(), int(rng.integers(3, 9)), inside)
        training = workload.training.model_copy(update={"micro_batches": int(rng.integers(1, 5))})
        workload = workload.model_copy(update={"training": training})
        kept = sorted(rng.permutation(sites)[: int(rng.integers(1, sites + 1))].tolist())
        one, work = on_sites(cluster, workload, [f"s{site}" for site in kept])
        assert (
            batch_sequences(one, work) * work.training.micro_batches
            == batch_sequences(cluster, workload) * training.micro_batches
        )
        together, own = sum(site_sequences(one, work)), tuple(weights[kept].tolist())
        assert site_sequences(one, work) == parts(together, own)
        if len(kept) == sites:
            assert (one, work) == (cluster, workload)
            continue
        of_place = batch_sequences(cluster, workload) * training.micro_batches // inside
        before = np.array(site_sequences(cluster, workload))[kept]
        others = [number for number in range(len(kept), of_place + 1) if of_place % number == 0 and min(parts(number, own))]
        if any((np.array(parts(number, own)) <= before).all() for number in others):
            assert (np.array(site_sequences(one, work)) <= before + 1).all()
            smaller += 1
        # Nothing that is as small is larger, and shared out as well.
        assert not any(
            number > together
            and crowding(number, own) <= crowding(together, own)
            and (np.array(parts(number, own)) <= before).all()
            for number in others
        )
        assert on_sites(one, work, one.site_names)[1] == work
    assert smaller > 50


def test_sites_without_a_sequence_or_an_expert_are_named() -> None:
    cluster, workload = inputs([4.34, 0.36, 1.3], 2, 1)
    assert site_sequences(cluster, workload) == (4, 1, 1), "the largest remainder"
    given = cluster.model_dump(mode="json", exclude_none=True)
    for tokens, kept, words in (
        ((4.34, 0.36, 1.3), ["s0", "s1"], r"^c: 6 sequences of a step for a rank of each site leave one of s0, s1 without any"),
        ((1, 1, 1), ["s0", "s1"], r"^c: no experts live at s0, s1 \(sites\.\*\.experts\); leave fewer sites out"),
    ):
        for site, weight, experts in zip(given["sites"], tokens, (0, 0, 1), strict=True):
            site |= {"tokens": weight} | ({"experts": experts} if weight == 1 else {})
        with pytest.raises(PlacementError, match=words):
            on_sites(build(Cluster, given, "c"), workload, kept)
