"""Serving tables: the paper's communication counts, who holds what, and how copies get there."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import PlacementError
from hybridep.gating import Gating
from hybridep.placement import LevelChoice, Placement, expert_homes, place
from hybridep.topology import Cluster
from hybridep.traffic import expected_rows


def cluster(*sizes: int) -> Cluster:
    levels = [{"name": f"l{i}", "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"} for i, size in enumerate(sizes)]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "100 GB/s"}
    return build(Cluster, {"name": "test", "levels": levels, "gpu": gpu}, "test")


def placements(*sizes: int, num_experts: int, ratios: tuple[float, ...] = (1.0,)) -> list[Placement]:
    """Every combination of domain sizes, with each ratio at all levels."""
    options = [[d for d in range(1, size + 1) if size % d == 0] for size in sizes]
    return [
        place(
            cluster(*sizes),
            num_experts,
            {f"l{i}": LevelChoice(domain_size=d, migration_ratio=ratio) for i, d in enumerate(chosen)},
        )
        for chosen in product(*options)
        for ratio in ratios
    ]


MANY = [
    placement
    for sizes, num_experts in [((4, 2), 8), ((2, 2, 3), 24), ((6,), 4), ((3, 4), 25), ((4, 2), 32)]
    for placement in placements(*sizes, num_experts=num_experts, ratios=(0.0, 0.4, 1.0))
]

# HybridEP, Table VII: number of GPU-to-GPU communications, (G, S) -> (A2A, AG).
TABLE_VII = {
    (8, 1): (56, 0),
    (8, 2): (24, 8),
    (8, 4): (8, 24),
    (8, 8): (0, 56),
    (16, 1): (240, 0),
    (16, 2): (112, 16),
    (16, 4): (48, 48),
    (16, 8): (16, 112),
    (16, 16): (0, 240),
    (32, 1): (992, 0),
    (32, 2): (480, 32),
    (32, 4): (224, 96),
    (32, 8): (96, 224),
    (32, 16): (32, 480),
    (32, 32): (0, 992),
}


@pytest.mark.parametrize(("shape", "counts"), TABLE_VII.items(), ids=lambda value: f"{value[0]}-{value[1]}")
def test_communications_of_the_paper(shape: tuple[int, int], counts: tuple[int, int]) -> None:
    """Ordered pairs with token traffic and with gather moves, on one level with one expert per GPU."""
    gpus, domain = shape
    placed = place(cluster(gpus), gpus, {"l0": LevelChoice(domain_size=domain)})
    (rows,) = expected_rows(placed, Gating(num_experts=placed.num_experts, top_k=2, sequence_length=16, sequences=(1,)))
    assert (np.count_nonzero(rows), len(placed.moves)) == counts


def test_homes_are_balanced_and_contiguous() -> None:
    for num_experts, gpus in product((1, 3, 8, 25, 64), (1, 4, 8, 9)):
        homes = expert_homes(num_experts, gpus)
        held = np.bincount(homes, minlength=gpus)
        assert (np.diff(homes) >= 0).all()
        assert held.max() - held.min() <= 1


@pytest.mark.parametrize("placed", MANY)
def test_an_expert_is_served_where_it_is_held(placed: Placement) -> None:
    experts = np.arange(placed.num_experts)
    assert placed.holds[placed.home, experts].all()
    assert placed.holds[placed.serving_rank, experts[None, :]].all()
    # The home computes its own experts for its own tokens.
    assert (placed.serving_rank[placed.home, experts] == placed.home).all()


@pytest.mark.parametrize("placed", MANY)
def test_moves_bring_every_copy_exactly_once_outermost_first(placed: Placement) -> None:
    have = np.zeros((placed.num_gpus, placed.num_experts), dtype=bool)
    have[placed.home, np.arange(placed.num_experts)] = True
    assert [move.level for move in placed.moves] == sorted(move.level for move in placed.moves)
    for level in range(len(placed.sizes)):
        before = have.copy()
        for move in placed.moves:
            if move.level == level:
                experts = list(move.experts)
                assert before[move.src, experts].all(), "sent before it arrived"
                assert not have[move.dst, experts].any(), "sent twice"
                have[move.dst, experts] = True
                different = placed.coordinates[move.src] != placed.coordinates[move.dst]
                assert np.flatnonzero(different).tolist() == [level]
    assert (have == placed.holds).all()


@pytest.mark.parametrize("placed", MANY)
def test_numbers_of_moved_experts_are_those_of_the_moves(placed: Placement) -> None:
    for level, moved in enumerate(placed.num_moved):
        listed = np.zeros_like(moved)
        for move in placed.moves:
            if move.level == level:
                listed[move.src, placed.coordinates[move.dst, level]] += len(move.experts)
        assert (moved == listed).all()


@pytest.mark.parametrize("placed", MANY)
def test_an_expert_enters_each_outer_worker_once(placed: Placement) -> None:
    """Copies cross the outermost level once per coordinate, then fan out inside."""
    arrivals = np.zeros((placed.sizes[0], placed.num_experts), dtype=int)
    for move in placed.moves:
        if move.level == 0:
            arrivals[placed.coordinates[move.dst, 0], list(move.experts)] += 1
    assert arrivals.max(initial=0) <= 1


@pytest.mark.parametrize("placed", MANY)
def test_token_peers_and_sources_mirror_each_other(placed: Placement) -> None:
    for level, size in enumerate(placed.sizes):
        for rank in range(placed.num_gpus):
            own = int(placed.coordinates[rank, level])
            stride = int(np.prod(placed.sizes[level + 1 :]))
            peers = placed.token_peers(rank, level)
            assert own not in peers and set(peers) <= set(range(size))
            assert set(peers) == set(placed.serve[level][own].tolist()) - {own}
            for coordinate in peers:
                assert own in placed.token_sources(rank + (coordinate - own) * stride, level)


def test_partial_migration_copies_the_hottest_of_each_home() -> None:
    hotness = [1, 5, 2, 9, 0, 0, 3, 4]
    placed = place(cluster(2), 8, {"l0": LevelChoice(domain_size=2, migration_ratio=0.5)}, hotness=hotness)
    copied = {move.src: move.experts for move in placed.moves}
    assert copied == {0: (1, 3), 1: (6, 7)}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"l0": LevelChoice(domain_size=3)}, "domains.l0: size 3 must divide the level's size 4; use 1, 2, 4"),
        ({"l0": LevelChoice(domain_size=0)}, "must divide"),
        ({"l1": LevelChoice(domain_size=2, migration_ratio=1.5)}, "migration.l1: ratio 1.5 must lie between 0 and 1"),
        ({"node": LevelChoice()}, "no level 'node' in cluster test; it has l0, l1"),
    ],
)
def test_impossible_choices_are_named(choices: dict[str, LevelChoice], words: str) -> None:
    with pytest.raises(PlacementError, match=words.replace("(", r"\(")):
        place(cluster(4, 2), 8, choices)
