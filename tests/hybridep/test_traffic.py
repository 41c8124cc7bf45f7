"""Bytes of a step: links, expectation against sampled routing, and conservation."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import comb

import numpy as np
import pytest

from hybridep.config import build
from hybridep.gating import Gating, gating
from hybridep.placement import LevelChoice, Placement, place
from hybridep.plan import LayerGroup, Plan, Residency
from hybridep.topology import Cluster
from hybridep.traffic import (
    Op,
    OpLevel,
    Traffic,
    arriving_rows,
    copy_traffic,
    dense_traffic,
    expected_rows,
    link_bytes,
    reverse,
    routed_rows,
    served_copies,
    split_sizes,
    step_traffic,
    token_traffic,
    wan_bytes,
)
from hybridep.workload import Workload


def cluster(*sizes: int, pairs: bool = False) -> Cluster:
    levels = [{"name": f"l{i}", "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"} for i, size in enumerate(sizes)]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "100 GB/s"}
    data: dict[str, object] = {"name": "test", "levels": levels, "gpu": gpu}
    if pairs:
        names = [f"s{i}" for i in range(sizes[0])]
        data["sites"] = [{"name": name} for name in names]
        data["links"] = [
            {"src": a, "dst": b, "bandwidth": f"{100 + 10 * i} Mbps", "latency": "1 ms"}
            for i, (a, b) in enumerate(permutations(names, 2))
        ]
    return build(Cluster, data, "test")


def workload(num_experts: int = 16, top_k: int = 4, micro_batches: int = 1) -> Workload:
    model = {
        "num_layers": 3,
        "hidden_size": 8,
        "num_heads": 2,
        "vocab_size": 32,
        "num_experts": num_experts,
        "top_k": top_k,
        "expert_ffn_size": 12,
    }
    training = {"sequence_length": 16, "micro_batch_size": 2, "micro_batches": micro_batches}
    return build(Workload, {"name": "test", "model": model, "training": training}, "test")


def even(placed: Placement, tokens: int, top_k: int) -> Gating:
    return Gating(num_experts=placed.num_experts, top_k=top_k, sequence_length=tokens, sequences=(1,))


def choose(rng: np.random.Generator, gpus: int, tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """[G, T, K]: distinct experts, uniformly."""
    return rng.permuted(np.broadcast_to(np.arange(num_experts), (gpus, tokens, num_experts)), axis=2)[:, :, :top_k]


CASES = [
    ((4, 2), {"l0": LevelChoice(domain_size=2), "l1": LevelChoice()}),
    ((4, 2), {"l0": LevelChoice(domain_size=4, migration_ratio=0.5), "l1": LevelChoice(domain_size=2)}),
    ((4, 2), {}),
    ((2, 2, 2), {"l0": LevelChoice(domain_size=2), "l1": LevelChoice(domain_size=2, migration_ratio=0.5), "l2": LevelChoice()}),
    ((6,), {"l0": LevelChoice(domain_size=3)}),
    ((1, 4), {"l1": LevelChoice(domain_size=2)}),
]


@pytest.mark.parametrize("pairs", [False, True], ids=["levels", "pairs"])
@pytest.mark.parametrize(("sizes", "choices"), CASES)
def test_link_bytes_follow_the_paths(sizes: tuple[int, ...], choices: dict[str, LevelChoice], pairs: bool) -> None:
    net = cluster(*sizes, pairs=pairs and sizes[0] > 1)
    placed = place(net, 16, choices)
    traffic = token_traffic(placed, workload(), expected_rows(placed, even(placed, 32, 4))) | copy_traffic(placed, workload())
    expected = np.zeros(len(net.link_table))
    for key, sent in traffic.items():
        for rank, coordinate in np.argwhere(sent):
            for link in net.path(int(rank), net.peer(int(rank), key.level, int(coordinate))):
                expected[link] += sent[rank, coordinate]
    np.testing.assert_allclose(link_bytes(net, traffic), expected, rtol=1e-12)


@pytest.mark.parametrize(("sizes", "choices"), CASES)
def test_expected_rows_are_the_mean_of_sampled_ones(
    sizes: tuple[int, ...], choices: dict[str, LevelChoice], rng: np.random.Generator
) -> None:
    tokens, top_k, num_experts = 4000, 3, 12
    placed = place(cluster(*sizes), num_experts, choices)
    routing = choose(rng, placed.num_gpus, tokens, num_experts, top_k)
    for expected, sampled in zip(expected_rows(placed, even(placed, tokens, top_k)), routed_rows(placed, routing), strict=True):
        # A coordinate gets rows of at most all ranks below it: five standard deviations of that many coin flips.
        assert np.abs(expected - sampled).max() <= 5 * np.sqrt(tokens * placed.num_gpus) / 2
        assert ((expected > 0) == (sampled > 0)).all()
    copies = served_copies(placed, even(placed, tokens, top_k))
    sampled_copies = served_copies(placed, even(placed, tokens, top_k), routing)
    assert np.abs(copies - sampled_copies).max() <= 5 * np.sqrt(tokens * placed.num_gpus) / 2


@pytest.mark.parametrize(("sizes", "choices"), CASES)
@pytest.mark.parametrize("popular", [False, True])
def test_rows_are_the_same_however_places_are_counted(
    sizes: tuple[int, ...], choices: dict[str, LevelChoice], popular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = place(cluster(*sizes), 12, choices)
    shares = tuple(np.arange(1, 13) / 78) if popular else None
    chosen = replace(even(placed, 100, 3), popularity=shares)
    monkeypatch.setattr("hybridep.traffic._REMEMBERED", 0)
    counted = [rows.tolist() for rows in expected_rows(placed, chosen)]
    monkeypatch.setattr("hybridep.traffic._EVERYWHERE", 0)
    assert [rows.tolist() for rows in expected_rows(placed, chosen)] == counted


def test_rows_that_are_remembered_are_those_of_the_tables_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Placement, Gating]] = []
    for sizes, choices in CASES:
        for home in (None, np.repeat(np.arange(2), 6)):
            placed = place(cluster(*sizes), 12, choices, home=home)
            asked += [(placed, even(placed, tokens, top_k)) for tokens, top_k in ((100, 3), (100, 2), (50, 3))]

    def found() -> list[list[object]]:
        told = []
        for placed, chosen in asked:
            every = [expected_rows(placed, chosen), expected_rows(placed, chosen, per_choice=True)]
            every += [[arriving_rows(placed, chosen, hops) for hops in (None, 1)]]
            told.append([[rows.tolist() for rows in one] for one in every])
        return told

    remembered = [found(), found()]
    monkeypatch.setattr("hybridep.traffic._REMEMBERED", 0)
    assert remembered == [found()] * 2
    placed, chosen = asked[0]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="read-only"):
        expected_rows(placed, chosen)[0][0] += 1.0


@pytest.mark.parametrize(("sizes", "choices"), CASES)
def test_routed_rows_walk_every_token(sizes: tuple[int, ...], choices: dict[str, LevelChoice], rng: np.random.Generator) -> None:
    """Against a plain walk: per token, level and distinct destination one row."""
    placed = place(cluster(*sizes), 12, choices)
    routing = choose(rng, placed.num_gpus, 7, 12, 3)
    routing[:, 0, 1] = -1  # a token that chose fewer experts
    rows = [np.zeros((placed.num_gpus, size)) for size in sizes]
    for origin in range(placed.num_gpus):
        for chosen in routing[origin]:
            here = {origin: [int(e) for e in chosen if e >= 0]}
            for level in range(len(sizes)):
                after: dict[int, list[int]] = {}
                for rank, experts in here.items():
                    own = placed.coordinates[rank].copy()
                    x = placed.coordinates[origin, level]
                    for coordinate in sorted({int(placed.serve[level][x, e]) for e in experts}):
                        stay = [e for e in experts if placed.serve[level][x, e] == coordinate]
                        if coordinate != own[level]:
                            rows[level][rank, coordinate] += 1
                        place_after = own.copy()
                        place_after[level] = coordinate
                        after[int(np.ravel_multi_index(tuple(place_after), placed.sizes))] = stay
                here = after
            for rank, experts in here.items():
                assert all(placed.serving_rank[origin, e] == rank for e in experts)
    for walked, counted in zip(rows, routed_rows(placed, routing), strict=True):
        np.testing.assert_array_equal(walked, counted)


@pytest.mark.parametrize(("sizes", "choices"), CASES)
def test_what_goes_comes_back(sizes: tuple[int, ...], choices: dict[str, LevelChoice]) -> None:
    placed, load = place(cluster(*sizes), 16, choices), workload()
    traffic = token_traffic(placed, load, expected_rows(placed, even(placed, 32, 4))) | copy_traffic(placed, load)
    for level in range(len(sizes)):
        if sizes[level] == 1:
            assert not any(key.level == level for key in traffic)
            continue

        def of(op: Op, level: int = level) -> np.ndarray:
            return traffic[OpLevel(op, level)]

        np.testing.assert_allclose(reverse(placed, level, of(Op.TOKEN_COMBINE)), of(Op.COMBINE_BACKWARD))
        np.testing.assert_allclose(reverse(placed, level, of(Op.GRADIENT_RETURN)), of(Op.EXPERT_GATHER))
        rows = of(Op.TOKEN_DISPATCH) / load.dispatch_row_bytes
        np.testing.assert_allclose(rows * load.combine_row_bytes, of(Op.COMBINE_BACKWARD))
        back = reverse(placed, level, of(Op.DISPATCH_BACKWARD))
        np.testing.assert_allclose(back, rows * load.dispatch_gradient_row_bytes)
        # Rows only go where a count announced them.
        assert not (rows[of(Op.TOKEN_COUNTS) == 0]).any()
    copies = placed.holds.sum() - placed.num_experts
    gathered = sum(sent.sum() for key, sent in traffic.items() if key.op is Op.EXPERT_GATHER)
    assert gathered == copies * load.expert_bytes


def test_every_copy_of_a_token_is_served_once(rng: np.random.Generator) -> None:
    placed = place(cluster(4, 2), 16, CASES[1][1])
    routing = choose(rng, 8, 50, 16, 4)
    for given in (None, routing):
        copies = served_copies(placed, even(placed, 50, 4), given)
        assert copies.sum() == pytest.approx(8 * 50 * 4)
        assert not copies[~placed.holds].any()


def everything(placed: Placement, load: Workload) -> Traffic:
    return token_traffic(placed, load, expected_rows(placed, gating(load)))


def test_no_token_travels_with_full_domains_and_no_expert_with_single_ones() -> None:
    net, load = cluster(4, 2), workload()
    full = place(net, 16, {"l0": LevelChoice(domain_size=4), "l1": LevelChoice(domain_size=2)})
    assert all(sent.sum() == 0 for sent in everything(full, load).values())
    assert all(sent.sum() == 0 for sent in copy_traffic(place(net, 16, {}), load).values())


def test_expected_rows_of_the_formula_for_distinct_groups() -> None:
    """Each token needs N (1 - C(E - E/N, K) / C(E, K)) of N domains, its own among them with the same probability."""
    placed = place(cluster(8), 16, {"l0": LevelChoice(domain_size=2)})
    (rows,) = expected_rows(placed, even(placed, 10, 4))
    groups = 4
    hit = 1 - comb(16 - 16 // groups, 4) / comb(16, 4)
    np.testing.assert_allclose(rows.sum(axis=1), 10 * (groups - 1) * hit)


def test_step_traffic_counts_micro_batches_layers_and_residency() -> None:
    net, batches = cluster(4, 2), 3
    choices = {"domains": {"l0": 2, "l1": 2}, "migration": {}}
    load = workload(micro_batches=batches)
    sums = {}
    for residency in Residency:
        plan = Plan(
            cluster=net,
            workload=load,
            layers=(
                LayerGroup(first_layer=0, num_layers=2, residency=residency, **choices),
                LayerGroup(first_layer=2, num_layers=1, domains={}, migration={}),
            ),
        )
        sums[residency] = {key: sent.sum() for key, sent in step_traffic(plan).items()}
        first, last = plan.placements
        dispatch = OpLevel(Op.TOKEN_DISPATCH, 0)
        assert sums[residency][dispatch] == pytest.approx(
            batches * (2 * everything(first, load)[dispatch].sum() + everything(last, load)[dispatch].sum())
        )
        assert wan_bytes(step_traffic(plan)) == pytest.approx(sum(v for key, v in sums[residency].items() if key.level == 0))
    gather, returned = OpLevel(Op.EXPERT_GATHER, 0), OpLevel(Op.GRADIENT_RETURN, 0)
    step, each = sums[Residency.STEP], sums[Residency.MICROBATCH]
    assert each[gather] == 2 * batches * step[gather]
    assert each[returned] == batches * step[returned]
    assert step[gather] == step[returned]


def test_step_traffic_with_routing_is_the_sum_of_its_dispatches(rng: np.random.Generator) -> None:
    net, load = cluster(4, 2), workload(micro_batches=2)
    plan = Plan(cluster=net, workload=load, layers=(LayerGroup(first_layer=0, num_layers=3, domains={"l0": 2}, migration={}),))
    routing = {(layer, batch): choose(rng, 8, 32, 16, 4) for layer in range(3) for batch in range(2)}
    total = step_traffic(plan, routing)[OpLevel(Op.TOKEN_DISPATCH, 0)]
    rows = sum(routed_rows(plan.placements[0], chosen)[0] for chosen in routing.values())
    np.testing.assert_array_equal(total, rows * load.dispatch_row_bytes)


def test_dense_all_reduce_moves_each_element_as_often_as_it_must() -> None:
    """Reduce-scatter over n workers: each sends all but its own part; at the next level only its shard."""
    net, load = cluster(4, 2), workload()
    traffic = dense_traffic(place(net, 16, {}), load)
    size = load.model.dense_params * load.training.dtype.num_bytes
    inner = traffic[OpLevel(Op.DENSE_REDUCE_SCATTER, 1)]
    outer = traffic[OpLevel(Op.DENSE_REDUCE_SCATTER, 0)]
    assert inner.sum() == 4 * 2 * size / 2
    assert outer.sum() == 4 * 3 * size / 4
    for level in (0, 1):
        scatter, gather = (traffic[OpLevel(op, level)] for op in (Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER))
        np.testing.assert_array_equal(reverse(place(net, 16, {}), level, scatter), gather)


def test_split_sizes_cover_the_whole() -> None:
    assert split_sizes(10, 4) == [3, 3, 2, 2]
    assert split_sizes(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize(("dcs", "saved"), [(2, 4.0), (4, 2.19)])
def test_deduplication_cuts_what_top_8_sends_between_datacenters(dcs: int, saved: float, rng: np.random.Generator) -> None:
    """Rows instead of one message per choice: as expected within the sampling error, by the factor of the closed form."""
    placed = place(cluster(dcs, 2), 64, {})
    routing = choose(rng, placed.num_gpus, 2000, 64, 8)
    sent = routed_rows(placed, routing)[0].sum()
    site = placed.coordinates[:, 0]
    choices_away = (placed.serve[0][site[:, None, None], routing] != site[:, None, None]).sum()
    expected = expected_rows(placed, even(placed, 2000, 8))[0].sum()
    tokens = placed.num_gpus * 2000
    assert sent == pytest.approx(expected, abs=5 * 0.5 * np.sqrt(tokens * (dcs - 1)))
    assert expected == pytest.approx(tokens * (dcs - 1) * (1 - comb(64 - 64 // dcs, 8) / comb(64, 8)))
    assert choices_away / sent == pytest.approx(saved, rel=0.01)
    wan = wan_bytes(token_traffic(placed, workload(64, 8), routed_rows(placed, routing)))
    load = workload(64, 8)
    counts = placed.num_gpus * (dcs - 1) * 8
    assert wan == counts + sent * (load.dispatch_row_bytes + 2 * load.combine_row_bytes + load.dispatch_gradient_row_bytes)
