"""Plans to switch between, and where a switch pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planner_cases import make_cluster, mixing_case

import planner
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from planner.difference import scaled, step_at
from planner.pool import PLANNED_AT, PooledPlan


def pool_of(widest: float) -> list[PooledPlan]:
    cluster, workload = mixing_case()

    def make(one: Cluster, limit_s: float) -> Plan:
        return planner.plan(one, workload, time_limit_s=limit_s)

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
