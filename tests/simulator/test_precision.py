"""The ranks of a site taken for alike: what that keeps, and where it cannot be."""

from typing import Any

import numpy as np
import pytest
from simulated_plans import PLANS, make_plan

from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from simulator.conditions import Conditions
from simulator.precision import Precision, busiest_inside, mean_between_sites, most_of_site
from simulator.routing import zipf_routing
from simulator.step import simulate_step
from simulator.token_exchange import Route, TokenExchange

ONE_EACH = Precision(one_rank_per_site=True)
SITES = [{"name": f"s{i}", "up": f"{rate} Gbps", "down": f"{rate + 0.3} Gbps"} for i, rate in enumerate((1, 0.25, 0.7, 0.5))]
UNEVEN = {
    "experts that do not divide": make_plan(4, 4, sites=SITES, num_experts=24, domains={"dc": 2}),
    "nodes": make_plan(4, 2, 4, sites=SITES, num_experts=24, domains={"dc": 2, "gpu": 2}),
}


def cluster_of(*sizes: int) -> Cluster:
    return make_plan(*sizes).cluster


@pytest.mark.turns(2)
@pytest.mark.parametrize("plan", [pytest.param(plan, id=name) for name, plan in (PLANS | UNEVEN).items()])
def test_each_site_is_one_kind_and_links_between_sites_carry_the_same(plan: Plan) -> None:
    exact, merged = simulate_step(plan), simulate_step(plan, precision=ONE_EACH)
    sites = plan.cluster.sizes[0]
    kind = merged.symmetry.kind.reshape(sites, -1)
    assert (kind == kind[:, :1]).all() and merged.symmetry.num_kinds <= exact.symmetry.num_kinds
    for between in (slice(0, 2 * sites), plan.cluster.pair_links):
        np.testing.assert_allclose(merged.link_bytes[between], exact.link_bytes[between], rtol=1e-12)
    assert merged.step_s == pytest.approx(exact.step_s, rel=1e-3)


def test_plans_whose_ranks_differ_are_among_them() -> None:
    assert simulate_step(UNEVEN["nodes"]).symmetry.num_kinds == 16


def test_between_sites_each_rank_sends_the_mean() -> None:
    sent = np.array([[0, 6, 1], [0, 0, 3], [2, 0, 4], [6, 0, 0], [0, 1, 0], [0, 1, 0]], dtype=np.float64)
    mean = mean_between_sites(cluster_of(3, 2), sent)
    np.testing.assert_array_equal(mean, [[0, 3, 2], [0, 3, 2], [4, 0, 2], [4, 0, 2], [0, 1, 0], [0, 1, 0]])


def test_inside_every_rank_sends_what_the_busiest_worker_of_the_site_does() -> None:
    cluster = cluster_of(2, 3, 2)
    sent = np.zeros((12, 3))
    # Node 0 of site 0 sends 12 and 6 bytes, its node 2 gets all but 2 of these; site 1 moves nothing but what stays at home.
    sent[0] = [5, 2, 10]
    sent[1] = [0, 0, 6]
    sent[6:, :] = np.repeat(np.eye(3), 2, axis=0) * 7
    spread = busiest_inside(cluster, 1, sent)
    # 18 bytes, by two ranks, to two other nodes.
    np.testing.assert_allclose(spread[:6], 4.5 * (1 - np.repeat(np.eye(3), 2, axis=0)))
    np.testing.assert_array_equal(spread[6:], 0)
    # What one node gets may be more than any sends.
    many_to_one = np.zeros((12, 3))
    many_to_one[[0, 1, 2, 3], 2] = 4.0
    np.testing.assert_allclose(busiest_inside(cluster, 1, many_to_one)[0], [0, 4, 4])
    np.testing.assert_array_equal(busiest_inside(cluster_of(4, 1), 1, np.ones((4, 1))), 0)


def test_a_site_computes_for_as_long_as_its_busiest_rank() -> None:
    np.testing.assert_array_equal(most_of_site(cluster_of(2, 2), np.array([1.0, 3.0, 2.0, 0.5])), [3, 3, 2, 2])
    straggler = Conditions.model_validate({"stragglers": [{"worker": "dc1/gpu0", "slowdown": 2}]})
    plan = make_plan(2, 2, throughput=1e10)
    exact, merged = (simulate_step(plan, precision=one, conditions=straggler) for one in (Precision(), ONE_EACH))
    assert simulate_step(plan).step_s < exact.step_s <= merged.step_s


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"routing": zipf_routing(UNEVEN["nodes"], exponent=1.0, seed=0)}, id="routing"),
        pytest.param({"conditions": Conditions(compute_jitter=0.1)}, id="jitter"),
        pytest.param({"exchange": TokenExchange(route=Route.DIRECT, per_choice=True)}, id="direct"),
    ],
)
def test_what_tells_ranks_apart_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="one_rank_per_site: only where tokens go as expected"):
        simulate_step(UNEVEN["nodes"], precision=ONE_EACH, **asked)


def test_windows_are_refused_where_a_site_has_several_ranks() -> None:
    window = Conditions.model_validate({"window": "1 KB"})
    with pytest.raises(UserError, match=r"one_rank_per_site: not where a window holds transfers \(level dc\)"):
        simulate_step(make_plan(2, 2, latency_s=1e-3), precision=ONE_EACH, conditions=window)
    alone = make_plan(4, sites=SITES, latency_s=1e-3)
    exact, merged = (simulate_step(alone, precision=one, conditions=window).step_s for one in (Precision(), ONE_EACH))
    assert merged == pytest.approx(exact)


def test_ranks_that_share_processors_are_refused() -> None:
    data = UNEVEN["nodes"].model_dump(mode="json", exclude_none=True)
    data["cluster"]["gpu"]["sharing"] = 2
    with pytest.raises(UserError, match="one_rank_per_site"):
        simulate_step(build(Plan, data, "plan"), precision=ONE_EACH)
