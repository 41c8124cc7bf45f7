"""Rules in pipelines: kept inside stages and between them, at little more than they must cost, and named where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import numpy as np
import pytest
from stage_cases import KINDS, all_groups, layered_workload, sites_cluster

from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan, possible_micro_batches
from hybridep.recompute import Recompute
from hybridep.serving import parse_experts
from planner import Constraints, StageWishes, plan_pipeline
from planner.stages.candidates import AHEAD, Candidates
from planner.stages.costs import costed
from planner.stages.inside import Room, Store, of_alike, searched, with_fewest_again
from planner.stages.rules import StageRules

pytestmark = pytest.mark.timeout(120)

EXPERTS = 8


def rules_of(*rules: dict[str, Any]) -> Constraints:
    named = [{"name": f"rule-{number}"} | rule for number, rule in enumerate(rules)]
    return build(Constraints, {"rules": named}, "rules")


def random_rules(rng: np.random.Generator, num_sites: int) -> Constraints:
    """One to three of all kinds but those of tokens that stay."""
    made = []
    for _ in range(int(rng.integers(1, 4))):
        some = [f"s{site}" for site in rng.permutation(num_sites)]
        first = int(rng.integers(EXPERTS - 1))
        experts = f"{first}-{rng.integers(first, EXPERTS)}"
        kind = str(rng.choice(["forbid", "pin", "no_link"]))
        # Where rules leave little, mostly nothing is possible.
        number = num_sites - 1 if kind == "pin" else 1
        rule: dict[str, Any] = {"kind": kind, "sites": some[:number]}
        if kind == "no_link":
            rule["to"] = [f"s{rng.integers(num_sites)}"]
        made.append(rule | ({} if kind == "no_link" else {"experts": experts}))
    return rules_of(*made)


def broken(plan: PipelinePlan, constraints: Constraints) -> list[str]:
    """What breaks a rule, read from the plan's own tables."""
    found = []
    inside = plan.cluster.ranks_per_site

    def met(names: tuple[str, ...], site: str) -> bool:
        return any(fnmatchcase(site, name) for name in names)

    def joined(a: str, b: str, rule: Any) -> bool:
        return a != b and any(
            met(rule.sites, x) and (met(rule.to, y) if rule.to else not met(rule.sites, y)) for x, y in ((a, b), (b, a))
        )

    for rule in constraints.rules:
        experts = parse_experts(rule.experts, EXPERTS) if rule.experts else range(EXPERTS)
        for stage in plan.plans:
            names = stage.cluster.site_names
            for layers in stage.placed:
                table, homes = layers.placement.serve[0], layers.placement.home // inside
                for (site, expert), holder in np.ndenumerate(table):
                    where = f"{rule.name}: expert {expert} of {names[site]} at {names[holder]}"
                    if rule.kind.value in ("forbid", "pin") and expert in experts:
                        if met(rule.sites, names[holder]) == (rule.kind.value == "forbid"):
                            found.append(where)
                    elif rule.kind.value == "no_link" and (
                        joined(names[site], names[holder], rule) or joined(names[holder], names[homes[expert]], rule)
                    ):
                        found.append(where)
        for number in range(len(plan.stages) - 1):
            ways = plan.ways(number)
            for source, destination in zip(ways.source // inside, ways.destination // inside, strict=True):
                a, b = plan.cluster.site_name(int(source)), plan.cluster.site_name(int(destination))
                if rule.kind.value == "no_link" and joined(a, b, rule):
                    found.append(f"{rule.name}: activations from {a} to {b}")
    return found


def best_step_s(num_sites: int, seed: int, constraints: Constraints) -> tuple[float, float]:
    """(step of the search's plan, of the best of all partitions, orders, layers, micro-batches and `AHEAD` with placements that
    need no search); infinite where there is none."""
    rng = np.random.default_rng(seed)
    cluster = sites_cluster(rng, num_sites, 1, KINDS[seed % len(KINDS)])
    workload = layered_workload(num_sites, ffn=int(rng.choice([64, 1024])), micro_batch_size=2, micro_batches=2)
    wishes = StageWishes(constraints=constraints)
    rules = StageRules(cluster, EXPERTS, constraints)
    ep = baseline_plan(cluster, workload, Baseline.EP)
    candidates = Candidates(cluster, workload, ep.schedule, wishes, rules)
    best = np.inf
    for groups in all_groups(num_sites):
        if len(groups) == 1 or not all(rules.possible(group) for group in groups):
            continue
        for layers in product(range(1, num_sites + 1), repeat=len(groups)):
            if sum(layers) != num_sites:
                continue
            for micro_batches in possible_micro_batches(workload, cluster, groups):
                made = candidates.of(groups, layers, micro_batches)
                if made is None:
                    continue
                assert not broken(made.plan, constraints)
                for ahead in AHEAD:
                    plan = made.plan.model_copy(update={"ahead": ahead})
                    best = min(best, costed(plan, made.inside).times.step_s)
    try:
        found = plan_pipeline(cluster, workload, wishes, time_limit_s=20)
    except InfeasibleError:
        return np.inf, best
    assert not broken(found, constraints) and found.prediction is not None
    return found.prediction.step, best


NEAR = [(3, 2), (3, 9), (3, 14), (3, 23), (4, 1), (4, 15)]
"""(sites, seed): of even sites, uneven links and links per pair; in the first nothing is possible."""


@pytest.mark.turns(6)
@pytest.mark.parametrize(("num_sites", "seed"), NEAR)
def test_a_pipeline_keeps_random_rules_and_is_near_the_best_that_does(num_sites: int, seed: int) -> None:
    found_s, best_s = best_step_s(num_sites, seed, random_rules(np.random.default_rng(seed), num_sites))
    if (num_sites, seed) == NEAR[0]:
        assert found_s == best_s == np.inf
    else:
        # Plans inside stages may be better than those that need no search.
        assert found_s <= best_s * 1.01 < np.inf


@pytest.mark.turns(2)
def test_sites_that_cannot_be_a_stage_by_themselves_go_together_with_others() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(3), 6, 2, "pairs"), layered_workload(6)
    constraints = rules_of(
        {"kind": "forbid", "sites": ["s0", "s3"], "experts": "0-2"},
        {"kind": "no_link", "sites": ["s2"], "to": ["s4", "s5"]},
        {"kind": "pin", "sites": ["s1", "s4", "s2"], "experts": "7"},
    )
    plan = plan_pipeline(cluster, workload, StageWishes(constraints=constraints), time_limit_s=1.5)
    assert not broken(plan, constraints)
    free = plan_pipeline(cluster, workload, time_limit_s=1.5)
    # The rules are not kept by chance.
    assert broken(free, constraints)
    rules = StageRules(cluster, EXPERTS, constraints)
    mended = rules.mended(((0,), (1,), (2, 3, 4, 5)))
    assert mended is not None and all(map(rules.possible, mended)) and sorted(sum(mended, ())) == list(range(6))
    assert rules.mended(((0,), (1,), (2,), (3,), (4,), (5,))) is None


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            [{"kind": "keep_tokens", "sites": ["s0"]}],
            "rule 'rule-0' cannot be kept in stages: .* every stage computes all tokens",
        ),
        ([{"kind": "pin", "sites": ["s1"], "experts": "5"}], "in a stage of .*, rule 'rule-0' cannot be kept: expert 5"),
        (
            [{"kind": "no_link", "sites": ["s0"]}],
            r"no order was found in which none passes tokens where rules \('rule-0'\) forbid",
        ),
    ],
)
def test_rules_that_no_stages_can_keep_are_named(rules: list[dict[str, Any]], words: str) -> None:
    cluster = sites_cluster(np.random.default_rng(4), 4, 1, "even")
    with pytest.raises(InfeasibleError, match=words):
        plan_pipeline(cluster, layered_workload(4), StageWishes(constraints=rules_of(*rules)), time_limit_s=5)


def test_rules_that_mean_nothing_here_are_errors() -> None:
    cluster = sites_cluster(np.random.default_rng(4), 4, 1, "even")
    with pytest.raises(UserError, match=r"no site is called 'eu-.'"):
        StageRules(cluster, EXPERTS, rules_of({"kind": "forbid", "sites": ["eu-*"]}))
    with pytest.raises(UserError, match=r"rule rule-0: .*below 8"):
        StageRules(cluster, EXPERTS, rules_of({"kind": "forbid", "sites": ["s0"], "experts": "3-9"}))
    popularity = ((1 / EXPERTS,) * EXPERTS,) * 4
    wishes = StageWishes(constraints=rules_of({"kind": "forbid", "sites": ["s0"], "experts": "3"}), popularity=popularity)
    with pytest.raises(UserError, match=r"--stages: measured popularity \(--routing\) with rules"):
        plan_pipeline(cluster, layered_workload(4), wishes)
    everywhere = rules_of({"kind": "keep_tokens", "sites": ["s*"]})
    assert StageRules(cluster, EXPERTS, everywhere).permitted(cluster) is None


def test_what_is_found_of_a_stage_is_told_to_one_that_is_alike_by_its_own_sites() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(8), 3, 2, "access"), layered_workload(3, ffn=1024)
    stage, room = baseline_plan(cluster, workload, Baseline.EP), Room(in_flight=1, beside_bytes=0.0)
    constraints = rules_of({"kind": "forbid", "sites": ["s1"], "experts": "0-4"})
    found = searched(stage, room, solver="highs", time_limit_s=3, constraints=constraints)
    assert found is not None and found.layers[0].serving
    renamed = [site.model_copy(update={"name": f"t{number}"}) for number, site in enumerate(cluster.sites)]
    other = baseline_plan(cluster.model_copy(update={"sites": tuple(renamed)}), workload, Baseline.EP)
    assert stage.alike == other.alike
    told = of_alike(found, other, stage)
    tables = [one.layers[0].placement(plan.cluster, EXPERTS).serve[0] for one, plan in ((found, stage), (told, other))]
    assert (tables[0] == tables[1]).all() and of_alike(found, stage, stage) is found
    assert replace(told, layers=found.layers) == found
    again = replace(told, layers=tuple(group.recomputing(Recompute.EXPERTS) for group in told.layers))
    fewest = with_fewest_again(other, again, Store())
    assert [group.recompute for group in fewest.layers] == [Recompute.EXPERTS, Recompute.NOTHING] and fewest.memory.fits
    # What just fits does not with less room, whatever was found before.
    store, lacking = Store(), 1.001 * fewest.memory.capacity_bytes - fewest.memory.fullest_bytes
    assert with_fewest_again(other, again, store).layers == fewest.layers
    assert with_fewest_again(other, replace(again, room=replace(room, beside_bytes=lacking)), store).layers != fewest.layers
    with pytest.raises(ValueError, match="no site 't"):
        with_fewest_again(stage, again, Store())
