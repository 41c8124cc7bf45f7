"""Which sites pay: against all subsets where those can be tried, and in cases that a person can tell."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from stage_cases import KINDS, layered_workload, sites_cluster, with_shares

from hybridep.config import build
from hybridep.errors import HybridEPError, InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Objective
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from planner import Constraints, Goal, StageWishes, alone, least_of_any, plan_pipeline, sites_that_pay
from planner.stages import fewer
from planner.stages.fewer import _Search

pytestmark = pytest.mark.timeout(120)


def made(rates: list[str], throughput: str, **more: Any) -> Cluster:
    data = {
        "name": "sites",
        "levels": [
            {"name": "dc", "size": len(rates), "bandwidth": "1 Gbps", "latency": "1 ms"},
            {"name": "gpu", "size": 1, "bandwidth": "100 Gbps", "latency": "0.01 ms"},
        ],
        "gpu": {"throughput": throughput, "memory": "80 GiB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": f"s{number}", "up": rate, "down": rate} for number, rate in enumerate(rates)],
    }
    return build(Cluster, data | more, "sites")


def step_s(cluster: Cluster, sites: tuple[str, ...]) -> float:
    """The step of the best that is known of these sites; infinite where nothing is."""
    workload = layered_workload(4, micro_batch_size=6)
    try:
        one, work = on_sites(cluster, workload, sites)
        found = alone(cluster, workload) if len(sites) == 1 else plan_pipeline(one, work, time_limit_s=1)
    except HybridEPError:
        return np.inf
    assert found is not None and found.prediction is not None
    return found.prediction.expected_s


FEW = [(3, "access", "0.3 TFLOPS"), (3, "pairs", "1 TFLOPS"), (3, "even", "0.05 TFLOPS"), (3, "shares", "0.3 TFLOPS")]
MORE = [(4, kind, throughput) for kind in KINDS for throughput in ("0.05 TFLOPS", "0.3 TFLOPS", "1 TFLOPS", "30 TFLOPS")]


def test_all_sites_where_short_searches_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last search, which says why there is no plan, has more time than those before."""
    monkeypatch.setattr(_Search, "_try", lambda *_, **__: False)
    monkeypatch.setattr(_Search, "_keep_alone", lambda _: None)
    cluster = sites_cluster(np.random.default_rng(4), 3, 1, "even")
    assert sites_that_pay(cluster, layered_workload(4), time_limit_s=3).sites == ("s0", "s1", "s2")


@pytest.mark.turns(4)
@pytest.mark.parametrize(("size", "kind", "throughput"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)])
def test_no_other_sites_are_better(size: int, kind: str, throughput: str) -> None:
    rng = np.random.default_rng(4)
    cluster = sites_cluster(rng, size, 1, "access" if kind == "shares" else kind, throughput=throughput)
    if kind == "shares":
        cluster = with_shares(rng, cluster)
        assert len({*cluster.token_weights}) > 1 and not cluster.home_weights.all()
    names = tuple(f"s{site}" for site in range(size))
    steps_s = {sites: step_s(cluster, sites) for number in range(1, size + 1) for sites in combinations(names, number)}
    found = sites_that_pay(cluster, layered_workload(4, micro_batch_size=6), time_limit_s=2 * size).sites
    # Sites are left out where that saves a tenth.
    assert steps_s[found] <= min(steps_s.values()) * (1.02 if found != names else 1.12)


@pytest.mark.turns(2)
def test_links_that_are_too_slow_for_what_there_is_to_compute() -> None:
    workload = layered_workload(4, micro_batch_size=6)
    assert len(sites_that_pay(made(["1 Mbps"] * 4, "30 TFLOPS"), workload, time_limit_s=1).sites) == 1
    assert len(sites_that_pay(made(["100 Gbps"] * 4, "0.01 TFLOPS"), workload, time_limit_s=1).sites) == 4
    # One that nobody can reach in time.
    found = sites_that_pay(made(["100 Gbps", "0.1 Mbps", "100 Gbps"], "0.01 TFLOPS"), workload, time_limit_s=1).sites
    assert found == ("s0", "s2")
    # Where one site has no room, two may.
    small = made(["1 Mbps"] * 4, "30 TFLOPS").gpu.model_copy(update={"memory": 6e7})
    tight = made(["1 Mbps"] * 4, "30 TFLOPS").model_copy(update={"gpu": small})
    assert alone(tight, workload) is None
    assert len(sites_that_pay(tight, workload, time_limit_s=1).sites) >= 2


@pytest.mark.turns(4)
def test_all_sites_pay_where_no_stages_are_possible_or_those_found_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = made(["100 Gbps"] * 4, "0.01 TFLOPS"), layered_workload(4, micro_batch_size=6)
    tied = workload.model_copy(update={"model": workload.model.model_copy(update={"tie_embeddings": True})})
    for one in (layered_workload(1, micro_batch_size=6), tied):
        assert len(sites_that_pay(cluster, one, time_limit_s=1).sites) == 4
        with pytest.raises(HybridEPError):
            sites_that_pay(cluster, one, StageWishes(stages=2), time_limit_s=1)
    found_by = fewer.plan_pipeline

    def found_late(one: Cluster, *asked: Any, **limits: Any) -> PipelinePlan:
        found = found_by(one, *asked, **limits)
        longer_s = found.predicted.step * (10 if one.sizes[0] > 2 else 1)
        return found.model_copy(update={"prediction": found.predicted.model_copy(update={"step": longer_s})})

    monkeypatch.setattr(fewer, "plan_pipeline", found_late)
    assert len(sites_that_pay(cluster, workload, time_limit_s=4).sites) == 4
    assert len(sites_that_pay(cluster, workload, StageWishes(stages=2), time_limit_s=4).sites) == 2


def test_the_cheapest_sites_are_few() -> None:
    prices = {"gpu": {"throughput": "0.01 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "1 TB/s", "price": "2 $/h"}}
    cluster, workload = made(["20 Mbps"] * 4, "0.01 TFLOPS", **prices), layered_workload(4, micro_batch_size=6)
    goal = Goal(objective=Objective.DOLLARS)
    one = alone(cluster, workload, goal=goal)
    assert one is not None and one.prediction is not None and one.prediction.cost is not None
    cheapest = sites_that_pay(cluster, workload, StageWishes(goal=goal), time_limit_s=1).sites
    # Ranks that wait are paid for: one that computes all the time by itself costs least, though several are faster.
    assert len(cheapest) == 1 < len(sites_that_pay(cluster, workload, time_limit_s=1).sites)


def test_as_many_stages_as_are_asked_for_need_as_many_sites() -> None:
    cluster, workload = made(["1 Mbps"] * 4, "30 TFLOPS"), layered_workload(4, micro_batch_size=6)
    assert len(sites_that_pay(cluster, workload, StageWishes(stages=3), time_limit_s=1).sites) >= 3


@pytest.mark.turns(4)
def test_rules_hold_among_those_that_are_left() -> None:
    slow, fast = made(["1 Mbps"] * 4, "30 TFLOPS"), made(["100 Gbps"] * 4, "0.01 TFLOPS")
    workload = layered_workload(4, micro_batch_size=6)

    def paying(cluster: Cluster, **rule: Any) -> tuple[str, ...]:
        rules = build(Constraints, {"rules": [{"name": "rule"} | rule]}, "rules")
        return sites_that_pay(cluster, workload, StageWishes(constraints=rules), time_limit_s=8).sites

    # One alone is best: the one that may have all experts.
    assert paying(slow, kind="forbid", sites=["s0", "s1", "s3"], experts="0") == ("s2",)
    assert paying(slow, kind="pin", sites=["s3"], experts="1-2") == ("s3",)
    # All are best, but one that may not be reached.
    assert paying(fast, kind="no_link", sites=["s1"]) == ("s0", "s2", "s3")
    with pytest.raises(InfeasibleError, match="'rule' cannot be kept in stages"):
        paying(fast, kind="keep_tokens", sites=["s0"])
    stay, no_expert = (
        build(Constraints, {"rules": [{"name": "rule"} | rule]}, "rules")
        for rule in ({"kind": "keep_tokens", "sites": ["s0"]}, {"kind": "forbid", "sites": ["s*"], "experts": "3"})
    )
    assert alone(slow, workload, constraints=stay) is None and alone(slow, workload, constraints=no_expert) is None


@pytest.mark.turns(4)
def test_no_choice_is_below_the_bound_and_one_site_meets_it() -> None:
    workload = layered_workload(4, ffn=1024, micro_batch_size=6)
    for rates, throughput in ((["1 Mbps"] * 4, "0.3 TFLOPS"), (["100 Gbps"] * 4, "0.01 TFLOPS"), (["1 Gbps"] * 4, "1 TFLOPS")):
        cluster = made(rates, throughput)
        least_s = least_of_any(cluster, workload, StageWishes())
        found = sites_that_pay(cluster, workload, time_limit_s=1).sites
        one, work = on_sites(cluster, workload, found)
        plan = alone(cluster, workload) if len(found) == 1 else plan_pipeline(one, work, time_limit_s=1)
        assert plan is not None and plan.prediction is not None
        assert (0.9 if len(found) == 1 else 0.3) < least_s / plan.prediction.expected_s <= 1


def test_a_budget_without_prices_is_an_error() -> None:
    cluster, workload = made(["1 Gbps"] * 4, "30 TFLOPS"), layered_workload(4)
    with pytest.raises(UserError, match="nothing has a price"):
        sites_that_pay(cluster, workload, StageWishes(goal=Goal(budget_usd=1.0)))


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    cluster, workload = made(["1 Mbps"] * 4, "30 TFLOPS"), layered_workload(4, micro_batch_size=6)

    def interrupt(what: str, seconds: float) -> None:
        raise KeyboardInterrupt

    assert len(sites_that_pay(cluster, workload, report=interrupt).sites) == 1
