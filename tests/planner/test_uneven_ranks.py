"""Sites whose ranks differ: the slowest counts in every phase, and each rank's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload
from site_cases import run

import planner
from hybridep.config import build
from hybridep.errors import InfeasibleError
from hybridep.plan import LayerGroup, Plan
from hybridep.shares import on_sites, site_sequences
from hybridep.topology import Cluster
from planner.check import CheckError
from planner.cost import step_cost
from planner.memory import memory_use
from planner.sites.bound import prove
from planner.sites.cost import fixed_cost, site_cost
from planner.sites.oracle import best_table
from planner.sites.others import rank_order_domains
from planner.sites.problem import site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Search
from simulator.step import simulate_step


def with_sites(cluster: Cluster, *changes: dict[str, Any]) -> Cluster:
    sites = [{"name": f"s{at}"} | change for at, change in enumerate(changes)]
    return build(Cluster, cluster.model_dump(mode="json", exclude_none=True) | {"sites": sites}, "test")


def ep(cluster: Cluster, **workload: int) -> Plan:
    return Plan(
        cluster=cluster,
        workload=make_workload(**workload),
        layers=(LayerGroup(first_layer=0, num_layers=workload["layers"], domains={}, migration={}),),
    )


def test_each_phase_takes_as_long_as_its_slowest_rank() -> None:
    """The second site is slow at everything but the optimizer, which is slow at the third."""
    cluster = with_sites(
        make_cluster(3, 2),
        {},
        {"gpu": {"throughput": "0.25 TFLOPS", "block_overhead": "3 ms", "pass_overhead": "1 ms"}},
        {"gpu": {"memory_bandwidth": "0.1 TB/s"}},
    )
    plan = ep(cluster, layers=2, experts=12)
    even, cost = step_cost(ep(make_cluster(3, 2), layers=2, experts=12)), step_cost(plan)
    assert cost.parts_s["pre_expert"] == pytest.approx(4 * even.parts_s["pre_expert"])
    assert cost.parts_s["block_overhead"] == pytest.approx(3 * 2 * 3e-3)
    assert cost.parts_s["experts"] == pytest.approx(4 * even.parts_s["experts"])
    assert cost.parts_s["head"] == pytest.approx(4 * even.parts_s["head"] + 3e-3)
    assert cost.parts_s["optimizer"] == pytest.approx(10 * even.parts_s["optimizer"])
    # No rank is slow at both, so computation alone could be shorter than the phases together.
    computation_s = sum(cost.parts_s[name] for name in ("pre_expert", "block_overhead", "experts", "head"))
    assert cost.compute_s == pytest.approx(computation_s + even.parts_s["optimizer"])


def test_tokens_weigh_on_computation_memory_and_traffic() -> None:
    even = with_sites(make_cluster(2, 2), {}, {})
    uneven = with_sites(make_cluster(2, 2), {"tokens": 3}, {})
    plan, same = (
        Plan(
            cluster=cluster,
            workload=build_batch(make_workload(layers=2)),
            layers=(LayerGroup(first_layer=0, num_layers=2, domains={}, migration={}),),
        )
        for cluster in (uneven, even)
    )
    assert site_sequences(uneven, plan.workload) == (6, 2)
    cost, flat = step_cost(plan), step_cost(same)
    assert cost.parts_s["pre_expert"] == pytest.approx(1.5 * flat.parts_s["pre_expert"])
    assert cost.parts_s["head"] == pytest.approx(1.5 * flat.parts_s["head"])
    # All tokens together are as many as before, and go to the same homes.
    assert cost.parts_s["experts"] == pytest.approx(flat.parts_s["experts"])
    assert cost.wan_bytes == pytest.approx(flat.wan_bytes)
    assert cost.parts_s["token_dispatch"] > 1.4 * flat.parts_s["token_dispatch"]
    needs = memory_use(plan).total_bytes
    assert needs[0] == needs[1] > memory_use(same).total_bytes[0] > needs[2] == needs[3]


def build_batch(workload: Any) -> Any:
    training = workload.training.model_copy(update={"micro_batch_size": 4})
    return workload.model_copy(update={"training": training})


@pytest.mark.turns(2)
@pytest.mark.parametrize("inner", [(2,), (2, 2)], ids=["by site", "by level"])
def test_a_rank_that_is_too_small_is_named_with_what_it_lacks(inner: tuple[int, ...]) -> None:
    workload = make_workload(layers=2, experts=4)
    roomy = make_cluster(2, *inner)
    need = planner.memory_use(planner.baseline(roomy, workload, "ep")).fullest_bytes
    fitting = with_sites(roomy, {}, {"gpu": {"memory": f"{1.2 * need:.0f} B"}})
    made = planner.plan(fitting, workload, time_limit_s=1)
    use = planner.memory_use(made)
    assert use.fits and use.fullest_name.startswith("s1/") and use.capacity_bytes == pytest.approx(1.2 * need, abs=1)
    planner.check(made)

    small = with_sites(roomy, {}, {"gpu": {"memory": "600 kB"}})
    with pytest.raises(InfeasibleError) as caught:
        planner.plan(small, workload, time_limit_s=1)
    text = str(caught.value)
    assert "no plan fits: s1/" in text and "has 600 kB" in text and "are missing" in text, text
    assert "Raise sites.s1.gpu.memory" in text and "lower sites.s1.experts, sites.s1.tokens, " in text, text

    # The same plan on the small site: the check finds the rank, too.
    with pytest.raises(CheckError, match=r"s1/.* has 600 kB: .* raise sites\.s1\.gpu\.memory"):
        planner.check(made.model_copy(update={"cluster": small}))


def test_fewer_experts_at_home_need_less_memory() -> None:
    workload, ranks = make_workload(layers=2, experts=12), slice(2, 4)
    even, fewer = make_cluster(3, 2), with_sites(make_cluster(3, 2), {}, {"experts": 0.5}, {})
    needs = [planner.memory_use(planner.baseline(cluster, workload, "ep")) for cluster in (even, fewer)]
    state_bytes = 2 * workload.model.expert_params * 16  # both layers' weights, gradients and moments
    assert (needs[0].total_bytes[ranks] - needs[1].total_bytes[ranks] >= state_bytes * 0.99).all()
    # 5, 2 and 5 experts: others need more for that.
    assert planner.baseline(fewer, workload, "ep").home_experts.tolist() == [6, 4, 2, 2, 6, 4]
    tight = {"gpu": {"memory": f"{0.5 * (needs[0].total_bytes[2] + needs[1].total_bytes[2]):.0f} B"}}
    for experts, fits in ((1.0, False), (0.5, True)):
        cluster = with_sites(make_cluster(3, 2), {}, tight | {"experts": experts}, {})
        assert planner.memory_use(planner.baseline(cluster, workload, "ep")).fits is fits


def test_slow_sites_are_given_less_to_compute() -> None:
    """Fast links: a plan is as good as it shares out the experts' work."""
    cluster = make_cluster(3, 1, bandwidths=["40 Gbps", "400 Gbps"], latencies=["0 ms", "0 ms"])
    cluster = with_sites(cluster, {}, {"gpu": {"throughput": "0.1 TFLOPS"}}, {})
    problem = site_problem(cluster, make_workload(layers=2, experts=12, hidden=64, ffn=1024, tokens=512))
    search = Search(problem=problem, max_evaluations=300)
    run(search)
    assert search.best is not None and search.best.cost is not None
    ends = [site_cost(problem, table, problem.configurations()[0]).step_s for table in rank_order_domains(problem)]
    assert search.best.cost.step_s < 0.8 * min(ends)
    served = np.bincount(search.best.table.ravel(), minlength=3)
    assert served[1] < served[0] / 2 and served[1] < served[2] / 2
    proof = prove(Relaxation(problem=problem), search.best.cost.step_s, max_boxes=20)
    assert 0.7 * search.best.cost.step_s < proof.bound_s <= search.best.cost.step_s


def test_the_bound_holds_where_few_tokens_travel() -> None:
    """The second site has one of eight tokens and no room for copies: it sends them away. Taken for a mean site it could not."""
    workload = make_workload(layers=1, experts=2, top_k=1, hidden=16, ffn=512, tokens=64, micro_batches=32)
    cluster = make_cluster(2, 1, bandwidths=["100 Mbps", "10 Gbps"], latencies=["0 ms", "0 ms"])
    roomy = site_problem(with_sites(cluster, {"tokens": 7}, {}), build_batch(workload))
    tight = f"{1.7 * fixed_cost(roomy).lasting_bytes[1, 0]:.0f} B"
    problem = site_problem(with_sites(cluster, {"tokens": 7}, {"gpu": {"memory": tight}}), build_batch(workload))
    best = best_table(problem)
    assert best is not None and best[0].tolist() == [[0, 0], [0, 0]]
    relaxation = Relaxation(problem=problem)
    assert 0.5 * best[2] < prove(relaxation, best[2], max_boxes=40).bound_s <= best[2] * (1 + 1e-9)
    wrong = Relaxation(problem=problem)
    wrong.__dict__["rows"] = float(problem.tokens.mean())
    assert prove(wrong, 2 * best[2], max_boxes=40).bound_s > 1.2 * best[2]


def test_sites_of_which_one_has_a_sequence_more_are_not_taken_for_alike() -> None:
    """Two of three equal sites share out three sequences: the first has two. Much is computed, and links are fast."""
    cluster = make_cluster(3, 2, bandwidths=["40 Gbps", "400 Gbps"], latencies=["0 ms", "0 ms"], throughput="10 GFLOPS")
    workload = make_workload(layers=2, experts=4, tokens=64)
    some, work = on_sites(with_sites(cluster, {}, {}, {}), workload, ["s0", "s1"])
    assert site_sequences(some, work) == (2, 1)
    made = planner.plan(some, work, time_limit_s=1.5)
    cost = step_cost(made)
    assert made.prediction is not None and made.solver is not None and made.prediction.step == pytest.approx(cost.step_s)
    best = best_table(site_problem(some, work))
    assert best is not None and made.solver.bound <= best[2] * (1 + 1e-9) and cost.step_s <= best[2] * (1 + 1e-9)
    # Attention of the first site is twice the others', in every phase.
    assert cost.parts_s["pre_expert"] == pytest.approx(
        2 * step_cost(ep(cluster, layers=2, experts=4, tokens=64)).parts_s["pre_expert"]
    )
    ends = memory_use(planner.baseline(some, work, "ep")).total_bytes
    assert ends[0] == ends[1] > 1.01 * ends[2] and simulate_step(made).step_s == pytest.approx(cost.step_s, rel=0.1)


def test_prediction_and_simulation_agree_where_links_hardly_count() -> None:
    cluster = make_cluster(3, 2, bandwidths=["40 Tbps", "400 Tbps"], latencies=["0 ms", "0 ms"], throughput="10 GFLOPS")
    cluster = with_sites(cluster, {"tokens": 2}, {"gpu": {"throughput": "4 GFLOPS", "block_overhead": "1 ms"}}, {})
    plan = ep(cluster, layers=3, experts=12, micro_batches=2)
    plan = plan.model_copy(update={"workload": build_batch(plan.workload)})
    plan = build(Plan, plan.model_dump(mode="json"), "plan")
    assert simulate_step(plan).step_s == pytest.approx(step_cost(plan).step_s, rel=1e-4)
