"""Plans by layer for measured popularity, against the enumeration of all of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from planner_cases import dense_workload, make_cluster, make_workload, two_sites

import planner
from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.inputs import cluster_and_workload
from hybridep.placement import home_blocks
from hybridep.plan import Plan, Schedule, Status
from hybridep.recompute import Recompute
from planner.check import check
from planner.choose import plan, plans
from planner.cost import step_cost
from planner.domains import layer_group
from planner.measured import balanced_homes
from planner.memory import memory_use
from planner.problem import Problem, build_problem, ways_again
from simulator.step import simulate_step


def shares(layers: int, experts: int, concentration: float, seed: int) -> tuple[tuple[float, ...], ...]:
    drawn = np.random.default_rng(seed).dirichlet(np.full(experts, concentration), size=layers)
    drawn = np.minimum(drawn, 0.4)
    return tuple(tuple(float(share) for share in row / row.sum()) for row in drawn)


LOSSY = Codecs(tokens=TokenCodec.INT8, experts=ExpertCodec.CHANGE_INT8, gradients=GradientCodec.INT8)


@pytest.mark.turns(2)
@pytest.mark.parametrize("codecs", [{}, {"l0": LOSSY}], ids=["exact", "lossy"])
def test_no_choice_of_configurations_is_faster(codecs: dict[str, Codecs]) -> None:
    cluster = make_cluster(2, 2, bandwidths=("1 Gbps", "10 Gbps"))
    workload = make_workload(layers=2, experts=8, top_k=2)
    popularity = (shares(1, 8, 0.5, 1)[0], shares(1, 8, 50.0, 2)[0])
    made = plan(cluster, workload, popularity=popularity, codecs=codecs)
    assert made.codecs == codecs and made.solver is not None and made.solver.status is Status.OPTIMAL
    candidates = build_problem(cluster, workload, Schedule(), codecs=codecs).candidates
    best = min(
        step_cost(
            Plan(
                cluster=cluster,
                workload=workload,
                layers=tuple(layer_group(i, 1, candidates[c].choices, candidates[c].residency) for i, c in enumerate(chosen)),
                codecs=codecs,
                popularity=popularity,
            )
        ).step_s
        for chosen in product(range(len(candidates)), repeat=2)
    )
    assert made.solver.objective == pytest.approx(best, rel=1e-9)
    check(made)


def test_balanced_homes() -> None:
    cluster, shares = make_cluster(2, 2), np.array([0.3, 0.3, 0.15, 0.15, 0.04, 0.03, 0.02, 0.01])
    blocks = home_blocks(cluster, 8)
    assert balanced_homes(cluster, shares, blocks).tolist() == [0, 2, 1, 3, 1, 3, 2, 0]
    # Each at its site.
    assert balanced_homes(cluster, shares, blocks, blocks // 2).tolist() == [0, 1, 0, 1, 2, 3, 3, 2]
    # Where nothing is gained nobody moves.
    assert balanced_homes(cluster, np.full(8, 1 / 8), blocks).tolist() == blocks.tolist()
    first_even = np.array([0.2, 0.1, 0.1, 0.2, 0.2, 0.15, 0.03, 0.02])
    assert balanced_homes(cluster, first_even, blocks, blocks // 2).tolist() == [0, 0, 1, 1, 2, 3, 3, 2]


def test_popular_experts_are_spread() -> None:
    """Over sites and ranks, in each layer by itself where that is better than blocks: no choice of both is faster."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ("model.num_layers=2",))
    popularity = (tuple([0.15] * 4 + [0.4 / 12] * 12), (1 / 16,) * 16)
    blocks = home_blocks(cluster, 16)
    spread = [balanced_homes(cluster, np.array(one), blocks) for one in popularity]
    even, made = (plan(cluster, workload, popularity=popularity, free_homes=free) for free in (False, True))
    assert step_s(made) < 0.97 * step_s(even) and simulate_step(made).step_s < 0.97 * simulate_step(even).step_s
    check(made)
    both = [
        build_problem(cluster, workload, Schedule(), shares, home=home)
        for shares, own in zip(popularity, spread, strict=True)
        for home in (blocks, own)
    ]
    least_s = [min(both[layer].layer_s.min(), both[layer + 1].layer_s.min()) for layer in (0, 2)]
    assert step_s(made) == pytest.approx(both[0].fixed_s + sum(least_s), rel=1e-9)
    assert made.solver is not None and made.solver.status is Status.OPTIMAL
    # Where experts are alike they stay.
    assert made.layers[0].homes and not made.layers[-1].homes
    given = np.array([placement.home for placement in made.placements])[::-1]
    again = plan(cluster, workload, popularity=popularity, home=given)
    assert [placement.home.tolist() for placement in again.placements] == given.tolist() and step_s(again) > step_s(made)


def step_s(one: Plan) -> float:
    return one.predicted.step


def test_the_next_best_are_the_same_in_all_layers() -> None:
    cluster = make_cluster(2, 2, bandwidths=("1 Gbps", "10 Gbps"))
    workload = make_workload(layers=2, experts=8, top_k=2)
    popularity = (shares(1, 8, 0.5, 1)[0], shares(1, 8, 50.0, 2)[0])
    found = plans(cluster, workload, 4, popularity=popularity)
    assert len(found) == 4 and len({one.digest for one in found}) == 4
    assert found[0].digest == plan(cluster, workload, popularity=popularity).digest
    assert all(one.popularity == popularity and len(one.layers) == 1 for one in found[1:])
    candidates = build_problem(cluster, workload, Schedule()).candidates
    alike = [
        Plan(
            cluster=cluster,
            workload=workload,
            layers=(layer_group(0, 2, one.choices, one.residency),),
            popularity=popularity,
        )
        for one in candidates
    ]
    best_s = sorted(step_cost(one).step_s for one in alike if one.digest != found[0].digest)[:3]
    assert [step_cost(one).step_s for one in found[1:]] == pytest.approx(best_s, rel=1e-9)
    for one in found:
        check(one)


def test_even_popularity_changes_nothing() -> None:
    cluster, workload = make_cluster(2, 2, bandwidths=("1 Gbps", "10 Gbps")), make_workload(layers=2, experts=8, top_k=2)
    even = plan(cluster, workload, popularity=((1 / 8,) * 8,) * 2)
    known = plan(cluster, workload)
    assert even.prediction is not None and known.prediction is not None
    assert even.prediction.step == pytest.approx(known.prediction.step, rel=1e-6)


def test_bound_holds_where_layers_without_experts_do_not_compute_again() -> None:
    workload = dense_workload(1024)
    most = memory_use(planner.plan_domains(two_sites(1e12), workload)).total_bytes.max()
    found = planner.plan(two_sites(0.98 * most), workload, popularity=((1 / 8,) * 8,) * 5)
    (group,) = found.layers
    one = group.model_copy(update={"num_layers": 1, "recompute": Recompute.EXPERTS})
    rest = group.model_copy(update={"first_layer": 1, "num_layers": 4, "recompute": Recompute.NOTHING})
    other = found.with_layers(one, rest)
    assert memory_use(other).fits and found.solver is not None
    assert found.solver.bound <= step_cost(other).step_s * (1 + 1e-9)


@pytest.mark.parametrize(("memory_share", "ways"), [(1.0, 1), (0.98, 3)])
def test_no_problem_is_built_twice(memory_share: float, ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all of the time, which a limit counts on."""
    workload, built = dense_workload(1024), list[object]()
    most = memory_use(planner.plan_domains(two_sites(1e12), workload)).total_bytes.max()
    make = planner.problem._problem

    def count(*given: object) -> Problem:
        built.append(given)
        return make(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("planner.problem._problem", count)
    planner.plan(two_sites(memory_share * 1.001 * most), workload, popularity=((1 / 8,) * 8,) * 5)
    assert len(built) == 5 * ways


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("memory_share", "layers", "sequences", "gain"),
    [(0.01, 2, 1, 0.13), (0.02, 3, 1, 0.3), (0.05, 3, 8, 0.004), (0.01, 3, 8, 0.0)],
)
def test_short_of_memory_layers_differ_as_in_the_best_of_all_mixtures(
    memory_share: float, layers: int, sequences: int, gain: float
) -> None:
    """Of all choices layer by layer, computing again or not; one configuration in all layers takes ``gain`` longer at least."""
    cluster = make_cluster(2, 2, bandwidths=("1 Gbps", "10 Gbps"))
    workload = make_workload(layers=layers, experts=8, top_k=2)
    workload = workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batch_size": sequences})})
    popularity = tuple(shares(1, 8, 10.0**layer, 30 + layer)[0] for layer in range(layers))

    def problems(memory_bytes: float) -> list[Problem]:
        gpu = cluster.gpu.model_copy(update={"memory": memory_bytes})
        here = cluster.model_copy(update={"gpu": gpu})
        ways = ways_again(workload.model)[-1]
        return [build_problem(here, workload, Schedule(), each, recompute=ways) for each in popularity]

    roomy = problems(1e15)
    needs = [float(roomy[0].memory_bytes(roomy[0].uniform(c)).max()) for c in range(len(roomy[0].candidates))]
    memory_bytes = 1.02 * float(np.quantile(needs, memory_share))
    every = np.array(list(product(range(len(needs)), repeat=layers)))
    lasting = sum((one.lasting_bytes[every[:, place]] for place, one in enumerate(roomy)), start=np.zeros(4))
    passing = np.maximum.reduce([one.passing_bytes[every[:, place]] for place, one in enumerate(roomy)])
    used = roomy[0].fixed_lasting_bytes + lasting + np.maximum(passing, roomy[0].fixed_passing_bytes)
    steps_s = roomy[0].fixed_s + sum(one.layer_s[every[:, place]] for place, one in enumerate(roomy))
    steps_s = np.where((used <= memory_bytes).all(axis=1), steps_s, np.inf)
    alike_s = steps_s[(every == every[:, :1]).all(axis=1)].min()

    made = plan(problems(memory_bytes)[0].cluster, workload, popularity=popularity)
    assert memory_use(made).fits and made.solver is not None
    assert step_cost(made).step_s == pytest.approx(steps_s.min(), rel=1e-9)
    assert alike_s > (1 + gain) * steps_s.min() * (1 - 1e-9)
    assert made.solver.bound <= steps_s.min() * (1 + 1e-9)
    check(made)
