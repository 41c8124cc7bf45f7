"""Pipelines over sites: times that a person can add up, what a stage holds, and that the best of the choices counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from simulated_plans import PLANS, RATES_GBPS, make_plan

from hybridep.baselines import Baseline, baseline_plan
from hybridep.codecs import Codecs, Speeds, TokenCodec
from hybridep.config import build
from hybridep.pipeline import PipelinePlan, order_of_passes, pipeline_link_bytes
from hybridep.plan import Plan, Schedule
from hybridep.routing import Routing
from hybridep.shares import owners
from hybridep.topology import Cluster
from simulator.collective import Operation
from simulator.conditions import Conditions
from simulator.errors import PipelineError, SimulationError
from simulator.fabric_file import FabricFile
from simulator.many_steps import Course, Happening, simulate_run
from simulator.pipeline import (
    AHEAD,
    INSIDE,
    PipelineStep,
    fastest_pipeline,
    simulate_pipeline,
)
from simulator.report import simulate
from simulator.stages import Stage, cut, routing_of, time_stages
from simulator.stages_apart import run_stages
from simulator.step import StepResult, simulate_step
from simulator.systems import System, system_step

ACTIVATION_BYTES = 64 * 64 * 4
"""Of a rank's tokens in one micro-batch."""
TRANSFER_S = ACTIVATION_BYTES / (RATES_GBPS["dc"] * 1e9 / 8)
"""Over a site's link, alone."""


def made_up(plan: Plan, times_s: list[tuple[float, float]], ahead: int = 1, **conditions: Any) -> PipelineStep:
    """Stages of one site each with these seconds forward and backward, put together apart."""
    pipeline = cut(plan, len(times_s), Baseline.EP).running_ahead(ahead)
    number = pipeline.micro_batches
    stages = [
        Stage(plan=one, gather_s=0.0, forward_s=np.full(number, forward), backward_s=np.full(number, backward), last=())
        for one, (forward, backward) in zip(pipeline.plans, times_s, strict=True)
    ]
    apart = SimpleNamespace(step_s=run_stages(pipeline, stages, conditions=Conditions(**conditions)))
    return PipelineStep(plan=pipeline, result=cast(StepResult, apart), by_themselves=lambda: stages)


def pipeline_step(plan: Plan, stages: int, inside: Baseline = Baseline.EP, ahead: int = 1, **simulated: Any) -> PipelineStep:
    """The plan's workload in so many stages of sites in a row."""
    return simulate_pipeline(cut(plan, stages, inside).running_ahead(ahead), **simulated)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (2, 4), (4, 1), (4, 3)])
def test_equal_stages_take_as_many_passes_as_micro_batches_and_the_bubble(stages: int, micro_batches: int, ahead: int) -> None:
    found = made_up(make_plan(stages, num_layers=9, micro_batches=micro_batches), [(1.0, 2.0)] * stages, ahead)
    passes = micro_batches * stages
    assert found.without_transfers_s == pytest.approx((passes + stages - 1) * 3.0, rel=1e-12)
    assert found.bubble_s == pytest.approx((stages - 1) * 3.0, rel=1e-12)
    assert found.step_s == pytest.approx(found.without_transfers_s, rel=1e-3)
    # Each micro-batch at most once between each two stages, and back.
    most_s = 2 * (stages - 1) * passes * TRANSFER_S
    assert 0 <= found.transfers_s <= most_s + 1e-9 and (stages == 1) == (found.transfers_s < 1e-12)
    assert found.work_s + found.bubble_s + found.transfers_s == pytest.approx(found.step_s)


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_a_slow_stage_sets_the_pace(slow: int) -> None:
    times_s = [(1.0, 2.0)] * 4
    times_s[slow] = (4.0, 8.0)
    found = made_up(make_plan(4, num_layers=9, micro_batches=5), times_s)
    # It begins when the stages before it have done the first, and they end after it.
    assert found.without_transfers_s == pytest.approx(slow * 1.0 + 20 * 12.0 + slow * 2.0, rel=1e-12)
    assert found.work_s == pytest.approx(240.0)


def test_slow_links_carry_all_activations_one_after_the_other() -> None:
    found = made_up(make_plan(2, num_layers=9, micro_batches=6), [(0.0, 0.0)] * 2)
    # Gradients of the last follow its activations.
    assert found.step_s == pytest.approx((12 + 1) * TRANSFER_S, rel=1e-6)
    # A stage in the middle sends activations on and gradients back over the same link.
    found = made_up(make_plan(3, num_layers=9, micro_batches=20), [(0.0, 0.0)] * 3, ahead=3)
    assert 60 * 2 * TRANSFER_S < found.step_s < 64 * 2 * TRANSFER_S
    half = made_up(make_plan(3, num_layers=9, micro_batches=20), [(0.0, 0.0)] * 3, ahead=3, goodput=0.5)
    assert half.step_s == pytest.approx(2 * found.step_s, rel=1e-6)


@pytest.mark.parametrize("latency_s", [0.1, 0.7])
def test_running_further_ahead_hides_the_way_there_and_back(latency_s: float) -> None:
    plan = make_plan(2, num_layers=9, micro_batches=4, latency_s=latency_s)
    found = [made_up(plan, [(1.0, 2.0)] * 2, ahead) for ahead in (1, 3)]
    # 1F1B waits for one way for each micro-batch (twice for every other one), plans ahead only to fill and to drain.
    waits_s = [latency_s + TRANSFER_S, latency_s + TRANSFER_S]
    assert found[0].step_s == pytest.approx(9 * 3.0 + 8 * waits_s[0], rel=1e-6)
    assert found[1].step_s == pytest.approx(9 * 3.0 + 2 * waits_s[1], rel=1e-6)
    plans = [cut(plan, 2, Baseline.EP).running_ahead(ahead) for ahead in (1, 3)]
    assert [one.in_flight(0) for one in plans] == [2, 4] and plans[1].in_flight(1) == 1


def test_latency_does_not_keep_links_idle() -> None:
    plan = make_plan(2, num_layers=9, micro_batches=20, latency_s=TRANSFER_S)
    found = made_up(plan, [(0.0, 0.0)] * 2, ahead=8)
    assert found.step_s == pytest.approx((40 + 1) * TRANSFER_S + 2 * TRANSFER_S, rel=1e-3)


def test_each_pair_of_sites_has_its_own_link() -> None:
    plan = make_plan(3, num_layers=9, micro_batches=20, pairs=True, num_experts=18)
    rates = {(link.src, link.dst): link.bandwidth for link in plan.cluster.links}
    found = made_up(plan, [(0.0, 0.0)] * 3, ahead=30)
    slowest_s = max(ACTIVATION_BYTES / rates[pair] for pair in [("s0", "s1"), ("s1", "s2"), ("s2", "s1"), ("s1", "s0")])
    assert 60 * slowest_s < found.step_s < 60 * slowest_s + 0.018


def test_connections_with_windows_count_between_stages_and_inside() -> None:
    plan = make_plan(4, num_layers=5, latency_s=0.01)

    def times_s(window_bytes: float, streams: int) -> list[float]:
        level = plan.cluster.levels[0].model_copy(update={"window": window_bytes})
        cluster, schedule = plan.cluster.model_copy(update={"levels": (level,)}), Schedule(streams={"dc": streams})
        held = plan.model_copy(update={"cluster": cluster, "schedule": schedule})
        return [pipeline_step(held, 2).step_s, made_up(held, [(0.0, 0.0)] * 2).step_s]

    assert times_s(1e3, 4) == pytest.approx(times_s(4e3, 1))
    assert all(few > 1.5 * many for few, many in zip(times_s(1e3, 1), times_s(4e3, 1), strict=True))


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("shape", [{}, {"latency_s": 1e-3, "throughput": 1e9}], ids=["plain", "slow"])
def test_one_stage_is_the_placement_inside(shape: dict[str, float], micro_batches: int, inside: Baseline) -> None:
    plan = make_plan(4, 2, micro_batches=micro_batches, **shape)  # type: ignore[arg-type]
    same = baseline_plan(plan.cluster, plan.workload, inside)
    found = pipeline_step(plan, 1, inside)
    assert found.step_s == pytest.approx(simulate_step(same).step_s, rel=1e-9)
    assert found.bubble_s == pytest.approx(0.0, abs=1e-9) and found.activation_bytes == 0


def test_one_stage_between_uneven_sites_and_with_recorded_choices(rng: np.random.Generator) -> None:
    plan = make_plan(3, 2, micro_batches=3, pairs=True, num_experts=18)
    ep = baseline_plan(plan.cluster, plan.workload, Baseline.EP)
    assert pipeline_step(plan, 1).step_s == pytest.approx(simulate_step(ep).step_s, rel=1e-9)
    routing = choices(plan, rng)
    assert pipeline_step(plan, 1, routing=routing).step_s == pytest.approx(simulate_step(ep, routing).step_s, rel=1e-9)


def choices(plan: Plan, rng: np.random.Generator) -> Routing:
    model, training = plan.workload.model, plan.workload.training
    shape = (plan.cluster.num_gpus, training.tokens, model.num_experts)
    return {
        (layer, number): np.argsort(rng.random(shape), axis=2)[..., : model.top_k]
        for layer in range(model.num_moe_layers)
        for number in range(training.micro_batches)
    }


def test_stages_are_steps_of_their_own() -> None:
    """Their passes add up to what simulating them says, and each holds its share of the model."""
    plan = make_plan(4, 2, num_layers=10, micro_batches=2)
    found = pipeline_step(plan, 4)
    models = [stage.plan.workload.model for stage in found.stages]
    assert [model.num_layers for model in models] == [3, 3, 2, 2]
    assert [model.num_dense_layers for model in models] == [1, 0, 0, 0]
    assert [(model.has_embedding, model.has_head) for model in models] == [
        (True, False),
        (False,) * 2,
        (False,) * 2,
        (False, True),
    ]
    assert sum(model.total_params for model in models) == plan.workload.model.total_params
    for stage in found.stages[1:]:
        few = stage.plan.workload.training.model_copy(update={"micro_batches": 3})
        alone = stage.plan.model_copy(update={"workload": stage.plan.workload.model_copy(update={"training": few})})
        same = baseline_plan(alone.cluster, alone.workload, Baseline.EP)
        third_s = simulate_step(same).step_s
        middle_s = float(stage.forward_s[1] + stage.backward_s[1])
        assert stage.busy_s == pytest.approx(third_s + (8 - 3) * middle_s, rel=1e-9)
    # The first has an embedding to update and to reduce, and no projection to compute.
    first, last = found.stages[0], found.stages[3]
    blocks_s = [stage.forward_s[0] - stage.plan.workload.head_flops / plan.cluster.gpu.throughput for stage in (first, last)]
    assert blocks_s[0] == pytest.approx(blocks_s[1], rel=1e-9)
    ranks = plan.cluster.ranks_per_site
    updated = [8 * model.num_moe_layers * model.expert_params + -(-model.dense_params // ranks) for model in models[:2]]
    optimizer_s = [dict(stage.last)["optimizer"] for stage in found.stages[:2]]
    assert optimizer_s[0] / optimizer_s[1] == pytest.approx(updated[0] / updated[1], rel=1e-6)


def test_copies_come_and_return_while_stages_wait_for_others() -> None:
    plan = make_plan(4, 2, num_layers=9, micro_batches=2)
    found = pipeline_step(plan, 2, Baseline.EP_IN_DC)
    for stage in found.stages:
        assert stage.gather_s > 0
        np.testing.assert_allclose(stage.forward_s, stage.forward_s[0], rtol=1e-9)
        np.testing.assert_allclose(stage.backward_s, stage.backward_s[0], rtol=1e-9)
        assert stage.last[0][0] == "stage_return" and stage.last[0][1] > 0
    program, execution = found.result.program, found.result.execution
    ranks = [np.unique(found.result.symmetry.kind[of]) for of in found.plan.ranks]

    def when_s(label: str, stage: int, ends: bool) -> list[float]:
        times_s = execution.end_s if ends else execution.start_s
        mine = [place for place, one in enumerate(program.operations) if one.label == label and _takes_part(one, ranks[stage])]
        return [float(times_s[place, ranks[stage]].max()) for place in mine]

    # A later stage's copies set out when the step begins, and their gradients leave after its last backward.
    first_s, waited_s = when_s("expert_gather", 1, ends=False), when_s("stage_wait", 1, ends=False)
    assert first_s[0] == 0.0 and first_s[-1] < waited_s[0] + found.stages[1].gather_s
    assert min(when_s("gradient_return", 1, ends=False)) >= max(when_s("pre_expert_backward", 1, ends=True))
    assert min(when_s("gradient_return", 0, ends=False)) < max(when_s("pre_expert_backward", 0, ends=True))


def test_choices_of_experts_that_all_have_change_nothing(rng: np.random.Generator) -> None:
    plan = make_plan(4, 2, num_layers=9, micro_batches=2)
    found, chosen = (pipeline_step(plan, 2, Baseline.FULL_GATHER, routing=one) for one in (None, choices(plan, rng)))
    assert chosen.step_s == pytest.approx(found.step_s, rel=1e-9) and found.stages[1].gather_s > 0
    assert (chosen.work_s, chosen.bubble_s) == pytest.approx((found.work_s, found.bubble_s), rel=1e-9)


def _takes_part(operation: Operation, ranks: np.ndarray) -> bool:
    return operation.ranks is not None and bool(operation.ranks[ranks].all())


@pytest.mark.parametrize("seed", range(6))
def test_stages_of_one_rank_are_as_apart(seed: int) -> None:
    """Nothing but what passes between them is on the links then."""
    plan = make_plan(4, 1, num_layers=9, micro_batches=3, latency_s=1e-3 * (seed % 2), pairs=seed > 3, num_experts=12)
    pipeline = cut(plan, 4, Baseline.EP).running_ahead(1 + seed % 3)
    apart_s = run_stages(pipeline, time_stages(pipeline))
    assert simulate_pipeline(pipeline).step_s == pytest.approx(apart_s, rel=1e-6)


def test_tokens_copies_and_activations_share_links() -> None:
    """Two stages of two sites: what is exchanged inside takes all of the links, and activations have to go over the same."""
    plan = make_plan(4, 1, num_layers=3, micro_batches=8, num_experts=8)
    cluster = plan.cluster.model_copy(update={"gpu": plan.cluster.gpu.model_copy(update={"block_overhead": 0.0})})
    pipeline = cut(plan.model_copy(update={"cluster": cluster}), 2, Baseline.EP).running_ahead(8)
    apart_s, found = run_stages(pipeline, time_stages(pipeline)), simulate_pipeline(pipeline)
    up_s = pipeline_link_bytes(pipeline)[0] / (RATES_GBPS["dc"] * 1e9 / 8)
    assert apart_s < 0.97 * found.step_s and up_s < found.step_s


def test_more_moments_than_memory_holds_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.pipeline._MOST_MOMENTS", 1000)
    pipeline = cut(make_plan(4, 2, num_layers=9, micro_batches=8), 2, Baseline.EP)
    with pytest.raises(PipelineError, match=r"ranks that differ and 16 micro-batches .* give --one-rank-per-site"):
        simulate_pipeline(pipeline)


def test_stages_take_turns_on_processors_that_they_share() -> None:
    plan = make_plan(4, 1, num_layers=9, micro_batches=4, throughput=1e6)
    shared = plan.cluster.model_copy(update={"gpu": plan.cluster.gpu.model_copy(update={"sharing": 2.0})})
    pipeline = cut(plan.model_copy(update={"cluster": shared}), 4, Baseline.EP)
    own = cut(plan, 4, Baseline.EP)
    # As fast as they are while all four compute on two processors, they do as much as four with their own; but while a pipeline
    # fills and drains fewer compute, and each is faster.
    both_s = [simulate_pipeline(one).step_s for one in (own, pipeline)]
    computed_s = sum(float((stage.forward_s + stage.backward_s).sum()) for stage in time_stages(own))
    assert computed_s / 4 < both_s[1] < 0.95 * both_s[0]


def test_tokens_keep_their_choices(rng: np.random.Generator) -> None:
    """Stage by stage, also where sites take a sequence more than others."""
    plan = make_plan(4, 2, num_layers=6, micro_batches=2)
    routing, length = choices(plan, rng), plan.workload.training.sequence_length
    drawn = owners(plan.cluster, plan.workload)
    uneven = cut(plan, 2, Baseline.EP).model_dump(mode="json") | {"micro_batches": 2}
    for stage, sites in zip(uneven["stages"], (["dc0"], ["dc1", "dc2", "dc3"]), strict=True):
        stage["sites"] = sites
    for pipeline in (cut(plan, 2, Baseline.EP), cut(plan, 4, Baseline.EP), build(PipelinePlan, uneven, "pipeline")):
        first = 0
        for number, one in enumerate(pipeline.plans):
            part = routing_of(pipeline, routing, number)
            assert part is not None
            model, (rank, own) = one.workload.model, owners(one.cluster, one.workload)
            assert len(part) == model.num_moe_layers * pipeline.micro_batches
            assert {chosen.shape[0] for chosen in part.values()} == {one.cluster.num_gpus}
            for layer in range(model.num_moe_layers):
                mine = [
                    part[layer, batch].reshape(one.cluster.num_gpus, -1, length, model.top_k)
                    for batch in range(pipeline.micro_batches)
                ]
                every = [routing[first + layer, batch].reshape(8, -1, length, model.top_k)[drawn] for batch in range(2)]
                np.testing.assert_array_equal(np.concatenate([batch[rank, own] for batch in mine]), np.concatenate(every))
                lacking = np.bincount(rank)[:, None] <= np.arange(mine[0].shape[1])
                assert all((batch[lacking] == -1).all() for batch in mine)
            first += model.num_moe_layers
        assert first == 5
    even, routed = (simulate_pipeline(build(PipelinePlan, uneven, "pipeline"), one).step_s for one in (None, routing))
    assert 0.5 * even < routed < 2 * even
    assert fastest_pipeline(plan, routing).step_s > 0


def test_sites_that_differ_are_stages_that_differ() -> None:
    slow = [{"name": "a"}, {"name": "b"}, {"name": "c", "up": "0.1 Gbps"}, {"name": "d"}]
    even, uneven = (pipeline_step(make_plan(4, 2, num_layers=9, micro_batches=2, sites=sites), 2) for sites in (None, slow))
    assert uneven.stages[0].busy_s == pytest.approx(even.stages[0].busy_s, rel=1e-9)
    assert uneven.stages[1].busy_s > 3 * even.stages[1].busy_s
    faster: list[dict[str, Any]] = [{"name": "a", "gpu": {"throughput": "4 GFLOPS"}}, *({"name": name} for name in "bcd")]
    found = pipeline_step(make_plan(4, 2, num_layers=9, throughput=1e9, sites=faster), 4)
    assert found.stages[0].busy_s < 0.5 * found.stages[1].busy_s
    straggler = Conditions.model_validate({"stragglers": [{"worker": "dc2/gpu1", "slowdown": 2}]})
    found = pipeline_step(make_plan(4, 2, num_layers=9, throughput=1e9), 4, conditions=straggler)
    busy_s = [stage.busy_s for stage in found.stages]
    assert busy_s[2] > 1.5 * busy_s[1]


@pytest.mark.parametrize(("slow", "times"), [(None, 3), (0, 8), (1, 9)])
def test_coding_activations_is_computation(slow: int | None, times: int) -> None:
    """Of two micro-batches in two stages of one rank; next to nothing else takes time. The second stage codes the first
    micro-batch's gradients before it decodes the second one. A straggler codes four times as slowly."""
    plan = make_plan(2, num_layers=9, throughput=1e18)
    speeds = {"tokens": {"int8": {"encode": "20 kB/s", "decode": "50 kB/s"}}}
    gpu = plan.cluster.gpu.model_copy(update={"coding": build(Speeds, speeds, "speeds"), "block_overhead": 0.0})
    cluster = plan.cluster.model_copy(update={"gpu": gpu})
    coded = plan.model_copy(update={"cluster": cluster, "codecs": {"dc": Codecs(activations=TokenCodec.INT8)}})
    slower = [] if slow is None else [{"worker": f"dc{slow}", "slowdown": 4}]
    found = simulate_pipeline(cut(coded, 2, Baseline.EP), conditions=Conditions.model_validate({"stragglers": slower}))
    assert found.step_s == pytest.approx(times * (ACTIVATION_BYTES / 20e3 + ACTIVATION_BYTES / 50e3), rel=1e-3)


@pytest.mark.turns(2)
def test_links_and_computation_may_vary_within_a_step() -> None:
    plan = make_plan(4, 2, num_layers=9, micro_batches=2)
    pipeline = cut(plan, 2, Baseline.EP)
    even_s = simulate_pipeline(pipeline).step_s

    def step_s(**conditions: Any) -> float:
        return simulate_pipeline(pipeline, conditions=Conditions.model_validate(conditions)).step_s

    level = plan.cluster.levels[0]
    slower = plan.cluster.model_copy(
        update={"levels": (level.model_copy(update={"bandwidth": level.bandwidth / 2}), *plan.cluster.levels[1:])}
    )
    half = cut(baseline_plan(slower, plan.workload, Baseline.EP), 2, Baseline.EP)
    between = {"links": "dc? *", "factor": 0.5}
    half_s = step_s(changes=[between])
    assert half_s == pytest.approx(simulate_pipeline(half).step_s, rel=1e-9) and half_s > 1.2 * even_s
    # From the middle of the step on, and not at all in a step that is over by then.
    later_s = step_s(changes=[between | {"start": f"{even_s / 2} s"}])
    assert 1.05 * even_s < later_s < 0.95 * half_s
    late = Conditions.model_validate({"changes": [between | {"end": f"{2 * even_s} s"}]})
    assert simulate_pipeline(pipeline, conditions=late, start_s=2 * even_s).step_s == pytest.approx(even_s, rel=1e-9)
    found = simulate_pipeline(pipeline, conditions=Conditions.model_validate({"changes": [between]}))
    # Stages by themselves are told of with links as they are without changes.
    assert found.stages[0].busy_s == pytest.approx(simulate_pipeline(pipeline).stages[0].busy_s, rel=1e-9)
    jittered = [step_s(compute_jitter=0.3, seed=seed) for seed in (0, 0, 1)]
    assert jittered[0] == jittered[1] != jittered[2] and jittered[0] != even_s
    assert fastest_pipeline(plan, conditions=Conditions.model_validate({"changes": [between]})).step_s > 0


def test_a_run_in_stages_goes_on_when_a_site_is_lost() -> None:
    plan = make_plan(4, 2, num_layers=9, micro_batches=2)
    pipeline = cut(plan, 2, Baseline.EP)
    step_s = simulate_pipeline(pipeline).step_s
    course = Course.model_validate({"steps": 3, "losses": [{"site": "dc3", "at": f"{1.5 * step_s} s"}], "checkpoint_every": 1})

    def anew(cluster: Cluster) -> PipelinePlan:
        return cut(baseline_plan(cluster, plan.workload, Baseline.EP), cluster.sizes[0], Baseline.EP)

    run = simulate_run(pipeline, course, planning=anew)
    assert [stretch.sites for stretch in run.stretches if stretch.what is Happening.STEP] == [4, 3, 3]
    assert run.stretches[0].duration_s == step_s and len(run.as_dict()["plans"]) == 2
    # A stage a site is what pays here, and is taken up after the first step; the last two are known by then.
    moved = simulate_run(pipeline, Course.model_validate({"steps": 4, "replan_every": 1}), planning=anew)
    assert simulate_pipeline(anew(plan.cluster)).step_s < step_s
    assert moved.as_dict()["plans"] == [pipeline.digest, anew(plan.cluster).digest] and moved.simulated_steps == 2


@pytest.mark.turns(4)
def test_the_fastest_of_all_choices_counts() -> None:
    for latency_s in (0.0, 0.02):
        plan = make_plan(4, 2, num_layers=9, micro_batches=2, latency_s=latency_s)
        steps = [pipeline_step(plan, stages, inside, ahead).step_s for stages in (2, 4) for inside in INSIDE for ahead in AHEAD]
        found = fastest_pipeline(plan)
        assert min(steps) <= found.step_s <= min(steps) * 1.001
        assert found.plan.ahead > 1 or not latency_s
    report = simulate(plan, [Baseline.EP, System.PIPELINE])
    assert report.baselines["pipeline"] == pytest.approx(found.step_s) and report.choices["pipeline"] == found.choice
    assert (
        f"{len(found.stages)} stages of {4 // len(found.stages)} sites, {found.plan.provenance['baseline']} in each"
        in found.choice
    )


def test_as_all_systems_it_runs_without_copies_ahead() -> None:
    plain = PLANS["ahead"].model_copy(update={"schedule": PLANS["ep"].schedule})
    assert fastest_pipeline(PLANS["ahead"]).step_s == fastest_pipeline(plain).step_s


def test_a_stage_keeps_as_many_micro_batches_as_it_runs_ahead() -> None:
    for stage in range(4):
        kept = np.cumsum([1 if forward else -1 for forward, _ in order_of_passes(stage, 4, 6)])
        assert kept.max() == 4 - stage and kept[-1] == 0
    assert [number for forward, number in order_of_passes(0, 4, 6) if not forward] == list(range(6))
    assert list(order_of_passes(3, 4, 2)) == [(True, 0), (False, 0), (True, 1), (False, 1)]


def test_what_does_not_go_together_is_an_error() -> None:
    plan = make_plan(4, 2)
    for stages in (0, 3, 8):
        with pytest.raises(PipelineError, match=f"{stages} stages must divide the 4 sites"):
            pipeline_step(plan, stages)
    # Of three layers the first has no experts.
    with pytest.raises(PipelineError, match="each needs one with experts"):
        pipeline_step(plan, 4)
    assert len(fastest_pipeline(plan).stages) == 2
    with pytest.raises(PipelineError, match="one site"):
        fastest_pipeline(make_plan(1))
    with pytest.raises(PipelineError, match="no number of stages"):
        fastest_pipeline(make_plan(3, num_layers=2))
    sites: list[dict[str, Any]] = [{"name": "a", "experts": 0}, {"name": "b", "experts": 0}, {"name": "c"}, {"name": "d"}]
    with pytest.raises(PipelineError, match=r"stages\.0: no experts live at a "):
        fastest_pipeline(make_plan(4, 2, num_layers=9, sites=sites))
    with pytest.raises(ValueError, match="ahead 0 must be at least 1"):
        pipeline_step(plan, 2, ahead=0)
    optics = build(FabricFile, {"name": "optics", "inside": {"mixnet": {}}}, "test")
    with pytest.raises(PipelineError, match="MixNet inside sites"):
        simulate(cut(plan, 2, Baseline.EP), fabric=optics)
    mesh = build(FabricFile, {"name": "m", "wan": {"mesh": {"bandwidth": "10 Mbps"}}}, "test")
    narrow, wide = (simulate(plan, [System.PIPELINE], fabric=one).baselines["pipeline"] for one in (mesh, None))
    assert narrow > wide
    with pytest.raises(SimulationError, match="fastest_pipeline"):
        system_step(plan, System.PIPELINE, lambda one, _: simulate_step(one))
