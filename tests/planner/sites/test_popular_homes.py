"""Homes of experts whose popularity was measured: others in each layer, for which figures and bounds hold."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import access_cluster, uneven_cluster
from test_popular import at_home, bad_plan, best_mixture_s, bounded_problems, skewed, step_s, workload_of

import planner
from hybridep.arrays import IntArray
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.cost import step_cost
from planner.evaluate import evaluate
from planner.measured import plans_measured
from planner.sites.plans import table_plan
from planner.sites.popular_bound import least_s
from planner.sites.problem import site_problem
from simulator.step import simulate_step

pytestmark = pytest.mark.timeout(120)


def a_case() -> tuple[Cluster, Workload]:
    """Five sites, of which the first two are slow; eight experts."""
    rates = np.array([[2.0, 3.0], [3.0, 2.0], [12.0, 6.0], [8.0, 14.0], [16.0, 16.0]])
    model = {"num_layers": 3, "hidden_size": 512, "num_heads": 8, "vocab_size": 64, "num_experts": 8, "top_k": 2}
    training = {"sequence_length": 512, "micro_batch_size": 4, "micro_batches": 2}
    data = {"name": "large", "model": model | {"expert_ffn_size": 4096}, "training": training}
    return access_cluster(5, rates), build(Workload, data, "test")


def homes(plan: Plan) -> IntArray:
    """[layers, E]"""
    return np.array([placement.home for placement in plan.placements])


@pytest.mark.turns(2)
@pytest.mark.parametrize("concentration", [0.7, 5.0])
def test_plans_are_shorter_and_their_figures_hold(concentration: float) -> None:
    cluster, work = a_case()
    popularity = skewed(3, 3, 8, 2, concentration)
    even, made = (planner.plan(cluster, work, popularity=popularity, time_limit_s=4, free_homes=free) for free in (False, True))
    assert not any(group.homes for group in even.layers)
    assert step_s(made) < 0.93 * step_s(even) and simulate_step(made).step_s < 0.9 * simulate_step(even).step_s
    assert step_cost(made).step_s == step_s(made) and evaluate(made)[1].fits
    assert made.solver is not None and made.solver.bound <= step_s(made)
    planner.check(made)
    # As many at each site in all layers, of which others are popular.
    found = homes(made)
    assert (np.sort(found, axis=1) == np.sort(found[0])).all() and (found != found[0]).any()


@pytest.mark.turns(2)
def test_given_homes_stay() -> None:
    """Which ones in each layer, also where nobody would choose them."""
    cluster, work = a_case()
    popularity, rng = skewed(4, 3, 8, 2), np.random.default_rng(0)
    given = np.array([rng.permutation([0, 0, 1, 2, 2, 2, 3, 3]) for _ in range(3)])
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=2, home=given)
    assert homes(made).tolist() == given.tolist()
    planner.check(made)
    given[1, given[1] == 0] = 4
    with pytest.raises(UserError, match="homes: other numbers of experts live on ranks in layer 1 than in layer 0"):
        planner.plan(cluster, work, popularity=popularity, time_limit_s=2, home=given)


@pytest.mark.turns(2)
def test_equal_domains_take_part_with_given_homes() -> None:
    """Where memory is short they may copy less in some layers."""
    gpu = {"throughput": "100 TFLOPS", "memory": "15 MB", "memory_bandwidth": "100 GB/s"}
    levels = [{"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": "1 ms"}]
    sites = [
        {"name": "a", "up": "520 Mbps", "down": "750 Mbps"},
        {"name": "b", "up": "950 Mbps", "down": "3.7 Gbps", "tokens": 3},
    ]
    cluster = build(Cluster, {"name": "two", "levels": levels, "gpu": gpu, "sites": sites}, "test")
    model = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 64, "num_experts": 6, "top_k": 2}
    training = {"sequence_length": 64, "micro_batch_size": 4, "micro_batches": 4, "dtype": "fp32"}
    work = build(Workload, {"name": "w", "model": model | {"expert_ffn_size": 256}, "training": training}, "test")
    popularity = skewed(0, 3, 6, 2)
    given = np.array([[0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 1]])
    [domains] = plans_measured(cluster, work, popularity, home=given)
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=4, home=given)
    assert homes(made).tolist() == homes(domains).tolist() == given.tolist() and not domains.layers[0].serving
    assert step_s(made) <= step_s(domains) * (1 + 1e-9)
    planner.check(made)


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_no_mixture_of_tables_is_faster_than_the_bound_for_its_homes(seed: int) -> None:
    cluster, work = uneven_cluster(np.random.default_rng(seed), 2, 1, pairs=bool(seed % 2)), workload_of(seed, 3, 2)
    popularity, rng = skewed(seed, 2, 3, 2, 1.0), np.random.default_rng(seed)
    owner = np.array([rng.permutation([0, 0, 1]) for _ in range(2)])
    problem = site_problem(cluster, work, home=np.sort(owner[0]))
    best_s, plan = best_mixture_s(problem, popularity, owner), at_home(bad_plan(problem, popularity), popularity, owner)
    assert 0.1 * best_s < least_s(problem, plan, np.inf) <= best_s * (1 + 1e-9)
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=2, home=owner)
    assert made.solver is not None and made.solver.bound <= best_s * (1 + 1e-9) <= step_s(made) * (1 + 3e-9)
    assert step_s(made) <= best_s * 1.3


def test_each_layer_is_bounded_with_its_own_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the experts that are not left out."""
    cluster, work = a_case()
    problem, popularity = site_problem(cluster, work), skewed(4, 3, 8, 2)
    owner = np.array([np.random.default_rng(layer).permutation(problem.home) for layer in range(3)])
    alike = table_plan(problem, np.tile(problem.home_site, (5, 1)), problem.configurations()[0])
    plan = at_home(alike, popularity, owner)
    bounded = bounded_problems(monkeypatch, 5)
    monkeypatch.setattr("planner.sites.popular_bound.LEFT_OUT", (0.5,))
    least_s(problem, plan, np.inf)
    together, *layers = [one.home.tolist() for one in (bounded[0], *bounded[1::2])]
    assert together == problem.home.tolist() and len(layers) == 3
    for found, shares, home in zip(layers, popularity, owner, strict=True):
        assert found == sorted(home[np.argsort(shares)[4:]])
