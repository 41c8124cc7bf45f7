"""Shares of the global batch: whole sequences, none lost, in proportion to what sites are given."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError, PlacementError
from hybridep.shares import alike_ranks, batch_sequences, first_sequence, of_sites, on_sites, owners, site_sequences, site_shares
from hybridep.topology import Cluster, only_sites
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
    with pytest.raises(PlacementError, match="of which none can be left out"):
        on_sites(*inputs([2.0, None], 2), ["s0"])


@pytest.mark.parametrize(
    ("weights", "left", "mean", "expected"), [([2.0, None, None], (0, 1), 4.5, (6, 3)), ([2.0, None, None], (1, 2), 3, (3, 3))]
)
def test_sites_that_are_left_keep_their_sequences(
    weights: list[float | None], left: tuple[int, ...], mean: float, expected: tuple[int, ...]
) -> None:
    cluster, workload = inputs(weights, 4)
    names = [cluster.site_name(site) for site in left]
    found = of_sites(cluster, workload, names)
    assert found.training.micro_batch_size == mean and isinstance(found.training.micro_batch_size, type(mean))
    assert site_sequences(only_sites(cluster, names), found) == expected
