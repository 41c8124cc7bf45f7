"""Codecs of pipelines chosen by what they were measured to cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.codec_losses import permitted, shortest, worthwhile
from hybridep.codecs import PAYLOADS, Codecs, ExpertCodec, GradientCodec, Speed, Speeds, TokenCodec, Wire
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Residency
from hybridep.topology import Cluster
from planner import StageWishes, plan_pipeline, plan_pipelines
from planner.goal import Goal
from planner.stages.bound import least_s
from planner.stages.candidates import Candidates
from planner.stages.costs import Costed, costed
from planner.stages.fewer import least_of_any, sites_that_pay
from planner.stages.upgrades import searched_on
from planner.stages.within_loss import pipelines_within_loss

INT8 = Codecs(tokens=TokenCodec.INT8)


def with_speeds(cluster: Cluster, rng: np.random.Generator) -> Cluster:
    """Some codecs take time, each its own."""

    def drawn() -> Speed:
        return build(Speed, {way: f"{10 ** rng.uniform(-1, 2):.3f} GB/s" for way in ("encode", "decode")}, "speed")

    def some(codecs: Iterable[Any]) -> dict[Any, Speed]:
        return {codec: drawn() for codec in codecs if codec.value not in ("exact", "lossless") and rng.random() < 0.7}

    tokens, experts, gradients = some(TokenCodec), some(ExpertCodec), some(GradientCodec)
    # Those last that came last: the others are as they were.
    tokens[TokenCodec.LOSSLESS], experts[ExpertCodec.LOSSLESS] = drawn(), drawn()
    coding = Speeds(tokens=tokens, experts=experts, gradients=gradients)
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"coding": coding})})


def steps_s(plan: PipelinePlan, choices: list[Codecs]) -> list[float]:
    """With each of the choices between sites that is possible."""
    lasting = all(group.residency is Residency.STEP for stage in plan.stages for group in stage.layers)
    made = [costed(plan.coded({"dc": codecs})) for codecs in choices if lasting or not codecs.experts.is_change]
    return [one.times.step_s for one in made if one.fits]


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(4))
def test_codecs_that_are_not_looked_at_are_never_better(seed: int) -> None:
    rng, plan = np.random.default_rng(seed), random_pipeline(seed, least_stages=2)
    plan = plan.at_rates(with_speeds(plan.cluster, rng))
    every = permitted(0.08, PAYLOADS)
    kept = worthwhile(every, plan.workload, plan.cluster.gpu.coding)
    assert 1 < len(kept) < len(every)
    some = [every[place] for place in rng.choice(len(every), 40, replace=False)]
    assert min(steps_s(plan, kept)) <= min(steps_s(plan, some)) * (1 + 1e-12)


def test_what_loses_more_for_nothing_is_not_looked_at() -> None:
    workload = layered_workload(4)
    # In bf16 the codec of that name is as long as exact messages, and int8 as long as fp8.
    for codec in (TokenCodec.BF16, TokenCodec.EXACT, TokenCodec.FP8, TokenCodec.INT8):
        kept = worthwhile([Codecs(), Codecs(tokens=codec)], workload, None)
        assert kept == [Codecs() if codec in (TokenCodec.BF16, TokenCodec.EXACT) else Codecs(tokens=codec)]
    slow = Speeds(tokens={TokenCodec.INT8: build(Speed, {"encode": "1 GB/s", "decode": "1 GB/s"}, "speed")})
    assert worthwhile([Codecs(), INT8], workload, slow) == [Codecs(), INT8]
    # Sums of coded gradients take room, and changes are kept.
    for more in (Codecs(gradients=GradientCodec.INT8), Codecs(experts=ExpertCodec.CHANGE_INT8)):
        assert worthwhile([Codecs(), more], workload, None) == [Codecs(), more]


def test_shortest_messages_of_each_kind() -> None:
    workload, every = layered_workload(4), permitted(1.0, PAYLOADS)
    least = Wire(workload=workload, codecs=shortest(every, workload))
    for codecs in every:
        wire = Wire(workload=workload, codecs=codecs)
        for what in ("row_there_bytes", "row_back_bytes", "expert_bytes", "expert_gradient_bytes", "activation_row_bytes"):
            assert getattr(least, what) <= getattr(wire, what), what
    assert least.expert_bytes < least.expert_gradient_bytes < 2 * workload.model.expert_params


@pytest.mark.turns(6)
@pytest.mark.parametrize(("seed", "kind"), [(1, "pairs"), (3, "even"), (5, "access")])
def test_a_search_with_codecs_to_choose_does_as_well_as_one_with_any(seed: int, kind: str) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(seed), 4, 2, kind), layered_workload(6)
    cluster = with_speeds(cluster, np.random.default_rng(seed))
    made = plan_pipelines(cluster, workload, StageWishes(max_loss=0.005), 3, time_limit_s=4)
    best = made[0]
    chosen = best.codecs["dc"]
    assert sum(max(gate.relative, 0.0) for gate in chosen.gates.values()) <= 0.005 and set(chosen.gates) == set(chosen.lossy)
    assert best.predicted.step == pytest.approx(costed(build(PipelinePlan, best.model_dump(mode="json"), "plan")).times.step_s)
    # Each of its codecs brings something.
    for kind_of in chosen.coded:
        assert costed(best.coded({"dc": chosen.without(kind_of)})).times.step_s > best.predicted.step * (1 + 1e-9)
    each = []
    for codecs in worthwhile(permitted(0.005, PAYLOADS), workload, cluster.gpu.coding):
        each.append(plan_pipeline(cluster, workload, StageWishes(codecs={"dc": codecs}), time_limit_s=0.3))
    steps = [one.predicted.step for one in each]
    assert best.predicted.step <= min(steps) * 1.001
    assert best.solver is not None
    assert best.solver.bound <= min(one.solver.bound for one in each if one.solver is not None) * (1 + 1e-9)
    assert best.predicted.step < plan_pipeline(cluster, workload, time_limit_s=0.3).predicted.step


def test_no_loss_is_an_exact_plan_in_fewer_bytes() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 3, 2, "pairs"), layered_workload(6)
    exact, other = (plan_pipeline(cluster, workload, StageWishes(max_loss=loss), time_limit_s=1) for loss in (None, 0.0))
    assert not other.codecs["dc"].lossy and "activations" in other.codecs["dc"].lossless
    assert other.predicted.step < exact.predicted.step
    assert exact.solver is not None and other.solver is not None and other.solver.bound <= exact.solver.bound


def test_changes_of_experts_need_copies_that_stay() -> None:
    plan, change = random_pipeline(2, least_stages=2), {"dc": Codecs(experts=ExpertCodec.CHANGE_INT4)}
    lasting = [tuple(group.model_copy(update={"residency": Residency.STEP}) for group in stage.layers) for stage in plan.stages]
    plan = plan.with_layers(lasting)
    assert [one.codecs for one in plan.coded(change).plans] == [change] * len(plan.stages)
    short = [
        tuple(group.model_copy(update={"residency": Residency.MICROBATCH}) for group in stage.layers) for stage in plan.stages
    ]
    with pytest.raises(ValueError, match="residency: step"):
        plan.with_layers(short).coded(change)


@pytest.mark.turns(2)
def test_fewer_sites_within_a_loss() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(5), 3, 2, "pairs", throughput="1 TFLOPS"), layered_workload(6)
    wishes = StageWishes(max_loss=0.005)
    paying = sites_that_pay(cluster, workload, wishes, time_limit_s=2)
    assert paying.sites and least_of_any(cluster, workload, wishes) <= least_of_any(cluster, workload, StageWishes())
    # Where all that is coded takes long nothing is, but it might be.
    slow = build(Speed, {"encode": "1 kB/s", "decode": "1 kB/s"}, "speed")
    coding = Speeds(tokens={codec: slow for codec in TokenCodec if codec is not TokenCodec.EXACT})
    cluster = sites_cluster(np.random.default_rng(5), 3, 2, "access", throughput="1000 TFLOPS")
    cluster = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"coding": coding})})
    fewer = sites_that_pay(cluster, workload, replace(wishes, stages=2), time_limit_s=2).fewer
    assert isinstance(fewer, PipelinePlan) and fewer.solver is not None and fewer.activation_codec is TokenCodec.EXACT
    least = shortest(permitted(0.005, PAYLOADS), fewer.workload)
    bounds_s = [least_s(fewer.cluster, fewer.workload, 2, codecs) for codecs in (least, Codecs())]
    assert fewer.solver.bound == pytest.approx(bounds_s[0]) and bounds_s[0] < bounds_s[1]
    assert fewer.solver.objective == pytest.approx(fewer.predicted.step)


def test_what_does_not_go_with_it() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 3, 2, "pairs"), layered_workload(6)
    with pytest.raises(UserError, match="leave one of them out"):
        plan_pipeline(cluster, workload, StageWishes(max_loss=0.1, codecs={"dc": INT8}))
    with pytest.raises(UserError, match="at least zero"):
        plan_pipeline(cluster, workload, StageWishes(max_loss=-0.1))
    tight = sites_cluster(np.random.default_rng(1), 2, 1, "pairs", memory="1 MB")
    with pytest.raises(InfeasibleError, match=r"raise gpu\.memory"):
        plan_pipeline(tight, workload, StageWishes(max_loss=0.005), time_limit_s=0.2)


def test_an_interrupt_leaves_what_the_look_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 3, 2, "pairs"), layered_workload(6)
    made, calls = Candidates.made, list[int]()

    def interrupted(mine: Candidates, numbers: Sequence[int], *more: Any) -> Any:
        # A search begins with all numbers of stages.
        calls.extend([0] if len(numbers) > 1 else [])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(mine, numbers, *more)

    monkeypatch.setattr(Candidates, "made", interrupted)
    found = plan_pipeline(cluster, workload, StageWishes(max_loss=0.005), time_limit_s=0.5)
    assert len(calls) == 2 and found.codecs["dc"].coded and found.prediction is not None
    # While codecs are weighed, too.
    monkeypatch.setattr(Candidates, "made", made)
    monkeypatch.setattr("planner.stages.within_loss.without_useless", _interrupt)
    assert plan_pipeline(cluster, workload, StageWishes(max_loss=0.005), time_limit_s=0.5).codecs["dc"].coded


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_budget_for_any_codec_is_what_is_told() -> None:
    """Copies of one micro-batch, which codecs that send changes do not go with, though their messages are shortest."""
    plan = random_pipeline(2, least_stages=2)
    short = [tuple(one.model_copy(update={"residency": Residency.MICROBATCH}) for one in stage.layers) for stage in plan.stages]
    data = plan.cluster.model_dump(mode="json", exclude_none=True)
    data["gpu"]["price"] = "2 $/h"
    plan = plan.with_layers(short).at_rates(build(Cluster, data, "priced"))
    wishes = StageWishes(max_loss=0.005, goal=Goal(budget_usd=1e-9))

    def make(asked: StageWishes, *_: float) -> list[Costed]:
        if any(one.experts.is_change for one in asked.codecs.values()):
            raise InfeasibleError("copies do not stay")
        return [costed(plan.coded(asked.codecs))]

    [found] = pipelines_within_loss(make, plan.cluster, plan.workload, wishes, 1.0)
    every = [costed(plan.coded({"dc": one})) for one in permitted(0.005, PAYLOADS) if not one.experts.is_change]
    assert found.step_usd == pytest.approx(min(one.step_usd for one in every))


def test_what_never_fits_is_not_looked_for_with_every_codec() -> None:
    plan = random_pipeline(2, least_stages=2)
    cluster, tries = with_speeds(plan.cluster, np.random.default_rng(3)), list[StageWishes]()

    def make(asked: StageWishes, *_: float) -> list[Costed]:
        tries.append(asked)
        raise InfeasibleError("none")

    for limit_s, most in ((1e-9, 1), (100.0, 5)):
        tries.clear()
        with pytest.raises(InfeasibleError, match="none"):
            pipelines_within_loss(make, cluster, plan.workload, StageWishes(max_loss=0.005), limit_s)
        assert len(tries) == most < len(worthwhile(permitted(0.005, PAYLOADS), plan.workload, cluster.gpu.coding))


def test_what_is_searched_on_for_upgrades_has_a_bound_for_all_that_is_permitted() -> None:
    plan, wishes = random_pipeline(3, least_stages=2), StageWishes(max_loss=0.005)
    better = searched_on(plan, wishes).better
    assert better is not None and better.solver is not None and not better.codecs
    cluster, workload = plan.cluster, plan.workload
    least, exact_s = least_s(cluster, workload, 2, wishes.shortest(cluster, workload)), least_s(cluster, workload, 2)
    assert least < 0.9 * exact_s
    assert better.solver.bound == pytest.approx(least)
