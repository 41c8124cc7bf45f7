"""Plans to switch between, and where a switch pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planner_cases import make_cluster, mixing_case

import planner
from hybridep.codecs import Codecs, ExpertCodec
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel, step_traffic
from planner.difference import scaled, step_at
from planner.pool import PLANNED_AT, PooledPlan, factors, spans, worth_having


def pool_of(widest: float, max_loss: float | None = None) -> list[PooledPlan[Plan]]:
    cluster, workload = mixing_case()

    def make(one: Cluster, limit_s: float) -> Plan:
        return planner.plan(one, workload, max_loss=max_loss, time_limit_s=limit_s)

    return planner.plan_pool(make, cluster, widest=widest, time_limit_s=8)


def test_each_plan_is_the_fastest_of_the_pool_in_its_range() -> None:
    pool = pool_of(16.0)
    assert 2 <= len(pool) <= PLANNED_AT
    assert pool[0].pays_from == pytest.approx(1 / 16) and pool[-1].pays_to == pytest.approx(16)
    for before, after in pairwise(pool):
        at = before.pays_to
        assert at == after.pays_from
        assert step_at(before.plan, at) == pytest.approx(step_at(after.plan, at), rel=1e-5)
        assert step_at(before.plan, at * 0.9) < step_at(after.plan, at * 0.9)
        assert step_at(before.plan, at * 1.1) > step_at(after.plan, at * 1.1)
    cluster, workload = mixing_case()
    here = next(one for one in pool if one.pays_from <= 1 <= one.pays_to)
    made = planner.plan(cluster, workload)
    assert made.prediction is not None and here.plan.cluster == cluster
    assert here.step_s == pytest.approx(made.prediction.step, rel=1e-9)
    assert here.plan.prediction is not None and here.plan.prediction.step == pytest.approx(here.step_s)
    assert all(one.memory_bytes <= cluster.gpu.memory for one in pool)
    # What was made for links that slow is in the pool.
    slow = planner.plan(scaled(cluster, 1 / 16), workload)
    assert slow.layers == pool[0].plan.layers


def test_a_pool_needs_links_between_sites() -> None:
    cluster, workload = make_cluster(1, 4), mixing_case()[1]
    with pytest.raises(UserError, match="two sites"):
        planner.plan_pool(lambda one, _: planner.plan(one, workload), cluster, widest=4, time_limit_s=5)


@pytest.mark.turns(2)
def test_codecs_of_each_plan_are_those_that_are_best_within_the_loss() -> None:
    exact, pool = pool_of(16.0), pool_of(16.0, max_loss=0.005)
    cluster, workload = mixing_case()
    for factor in factors(16.0, PLANNED_AT)[::2]:
        own = next(one.plan for one in pool if one.pays_from <= factor <= one.pays_to)
        best = planner.plan(scaled(cluster, factor), workload, max_loss=0.005)
        assert step_at(own, factor) <= best.predicted.step * (1 + 1e-9)
        assert step_at(own, factor) < min(step_at(one.plan, factor) for one in exact)
    for one in pool:
        gates = [gate for codecs in one.plan.codecs.values() for gate in codecs.gates.values()]
        assert gates and sum(max(gate.relative, 0.0) for gate in gates) <= 0.005
        assert one.memory_bytes <= cluster.gpu.memory


def test_what_a_switch_to_changes_begins_with() -> None:
    """Exact copies, once: as many bytes as exact plans gather in every step."""
    cluster, workload = make_cluster(2, 2), mixing_case()[1]
    exact = planner.baseline(cluster, workload, "full_gather")
    coded = exact.model_copy(update={"codecs": {"l0": Codecs(experts=ExpertCodec.CHANGE_INT8)}})
    gathered = step_traffic(exact)[OpLevel(Op.EXPERT_GATHER, 0)].sum()
    found = [PooledPlan(plan=one, pays_from=0.5, pays_to=2.0, step_s=1.0, memory_bytes=1.0) for one in (exact, coded)]
    assert [one.begins_bytes for one in found] == [0.0, gathered] and gathered > 0


def test_few_plans_are_worth_having() -> None:
    looked = factors(4.0, 5)
    steps_at = [lambda f: 1.0, lambda f: 0.995, lambda f: 2.0 / f, lambda f: 1.9 / f, lambda f: 0.9 + 0.1 * f]
    assert looked == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0]) and looked[2] == 1.0
    assert worth_having(steps_at, looked, 0.01) == [0, 3, 4]
    assert worth_having(steps_at, looked, 0.001) == [0, 1, 3, 4]
    found = spans([steps_at[place] for place in (0, 3, 4)], factors(4.0, 17))
    assert [span.place for span in found] == [2, 0, 1]
    assert [span.pays_to for span in found] == pytest.approx([1.0, 1.9, 4.0])
    # One that is the fastest at both ends pays there.
    assert [span.place for span in spans([lambda f: 1.0, lambda f: 0.75 + 0.5 * abs(f - 1.0)], looked)] == [0, 1, 0]
