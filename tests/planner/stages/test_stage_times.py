"""A pipeline's expected step: as its simulation has it, and as closed forms have it where there are some."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.config import build
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from planner import step_cost
from planner.memory import ACTIVATIONS, memory_use
from planner.stages import schedule
from planner.stages.bound import least_s
from planner.stages.costs import BUBBLE, activation_bytes, costed, predicted, rooms
from planner.stages.schedule import (
    PipelineTimes,
    balanced_layers,
    busiest_link_s,
    least_step_s,
    paced_s,
    stage_links,
    ways_of,
)
from planner.stages.walk import Sent, StageLinks, Way, walked_s
from planner.staggered import PassTimes, pass_times, staggered_s
from simulator.pipeline import simulate_pipeline, time_stages


def one_way(seconds: float, latency_s: float = 0.0, link: int = 0, messages: int = 1) -> list[Sent]:
    return [Sent(Way(latency_s, ((link, seconds, messages),), 0.0), (0,))]


def walked(stages: int, batches: int, ahead: int, seconds: float, latency_s: float = 0.0) -> float:
    """Passes of one second forward and two back; every way has a link of its own."""
    each = [PassTimes(0.0, 1.0, 2.0, 0.0, 0.0)] * stages
    forth = [one_way(seconds, latency_s, 2 * stage) for stage in range(stages - 1)]
    back = [one_way(seconds, latency_s, 2 * stage + 1) for stage in range(stages - 1)]
    return walked_s(batches, ahead, each, forth, back)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_without_ways_there_is_the_bubble_only(stages: int, batches: int) -> None:
    assert walked(stages, batches, 1, 0.0) == pytest.approx((batches + stages - 1) * 3.0)


def test_1f1b_waits_for_each_way_and_running_ahead_does_not() -> None:
    # As in the simulator's tests: one way for each micro-batch, twice for every other one.
    assert walked(2, 8, 1, 0.0, latency_s=0.7) == pytest.approx(9 * 3.0 + 8 * 0.7)
    assert walked(2, 8, 3, 0.0, latency_s=0.7) == pytest.approx(9 * 3.0 + 2 * 0.7)


def test_slow_links_set_the_pace() -> None:
    assert walked(2, 10, 10, 5.0) == pytest.approx(1 + 10 * 5.0 + 3.0 + 5.0 + 2.0)
    # Activations and gradients over one link.
    each, shared = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0)] * 2, [one_way(5.0)]
    assert walked_s(10, 10, each, shared, shared) == pytest.approx(2 * 10 * 5.0)


def test_ways_share_a_link_by_messages_and_leave_what_they_cannot_take() -> None:
    each = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0)] * 2
    # Both begin when the first micro-batch has come; of the second link only a tenth is taken by what the first holds up.
    forth, back = [[Sent(Way(0.0, ((0, 1.0, 1), (1, 10.0, 1)), 0.0), (0,))]], [one_way(1.0)]
    # 10 s, then 10 s of the second one beside one second of gradients, which has 0.9 of the link.
    assert walked_s(2, 2, each, forth, back) == pytest.approx(20.0 + 1.0)


@pytest.mark.parametrize(("forth", "back", "seconds"), [(1, 1, 2.0), (1, 3, 4.0), (3, 1, 4 / 3)])
def test_messages_have_even_shares(forth: int, back: int, seconds: float) -> None:
    # On one link the second micro-batch's activations (1 s) meet the first one's gradients (3 s). What the last stage does in the
    # end takes so long that their arrival decides.
    each = [PassTimes(0.0, 0.0, 0.0, 0.0, after_s) for after_s in (0.0, 100.0)]
    ways = [one_way(1.0, messages=forth)], [one_way(3.0, messages=back)]
    assert walked_s(2, 2, each, *ways) == pytest.approx(1.0 + seconds + 100.0)


def test_small_messages_leave_no_room_to_large_ones() -> None:
    """Two sites send gradients of one and of two seconds into one link, two of each at once."""
    each = [PassTimes(0.0, 0.0, 4.0, 0.0, 0.0), PassTimes(0.0, 0.0, 0.0, 0.0, 0.0)]
    forth = [Sent(Way(0.0, (), 0.0), (0, 1))]
    back = [Sent(Way(0.0, ((0, seconds, 1),), 0.0), (0,)) for seconds in (1.0, 2.0)]
    # Half of the link each for four seconds; then both of the small ones and one of the large ones are there.
    assert walked_s(2, 2, each, [forth], [back]) == pytest.approx(4.0 + 2 * 4.0)


def test_copies_of_a_step_share_links_and_the_first_forward_waits_for_them() -> None:
    """Ten seconds of copies into the second stage and five of activations share a link: they end after 15 and 10."""
    each = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0), PassTimes(10.0, 4.0, 0.0, 0.0, 0.0, layers=2, early_s=10.0)]
    alone, shared = (StageLinks(gathered=Way(0.0, ((link, 10.0, 1),), 0.0)) for link in (9, 0))
    forth, back = [one_way(5.0)], [one_way(0.0, link=1)]
    # The second of two layers is computed when the last copy has come: 2 s more.
    assert walked_s(1, 1, each, forth, back, [StageLinks(), alone]) == pytest.approx(10.0 + 2.0)
    assert walked_s(1, 1, each, forth, back, [StageLinks(), shared]) == pytest.approx(15.0 + 2.0)
    # A forward that ends after them does not notice.
    longer = [each[0], each[1]._replace(forward_s=40.0)]
    assert walked_s(1, 1, longer, forth, back, [StageLinks(), alone]) == pytest.approx(5.0 + 40.0)


def test_gradients_of_copies_leave_after_the_last_pass_beside_what_goes_back() -> None:
    # Four seconds of them and two of the second micro-batch's gradients on one link; then three of the dense parts.
    each = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0), PassTimes(0.0, 0.0, 1.0, 4.0, 5.0, late_s=4.0)]
    once = StageLinks(returned=Way(0.0, ((1, 4.0, 1),), 0.0), dense=Way(0.0, ((1, 3.0, 1),), 0.0))
    forth, back = [one_way(0.0)], [one_way(2.0, link=1)]
    # Backwards end at 1 and 2. From 1 to 9 the link is busy with two seconds for each micro-batch and four of the copies.
    assert walked_s(2, 2, each, forth, back, [StageLinks(), once]) == pytest.approx(9.0 + 3.0 + 2.0)
    # With one micro-batch they leave before it goes back, beside the dense gradients.
    assert walked_s(1, 1, each, forth, back, [StageLinks(), once]) == pytest.approx(1.0 + 4.0 + (2.0 + 3.0) + 2.0)


def test_sites_that_exchange_no_tokens_wait_for_their_own_sequences_only() -> None:
    each = [PassTimes(0.0, 1.0, 0.0, 0.0, 0.0)] * 3
    # Two sites in each stage; what one of the second stage is sent takes 50 s, and each goes on to its like.
    apart = [Sent(Way(0.0, ((link, seconds, 1),), 0.0), (link,)) for link, seconds in ((0, 0.0), (1, 50.0))]
    at_once = [Sent(Way(0.0, (), 0.0), (lane,)) for lane in (0, 1)]
    slow_last = [Sent(Way(0.0, ((link, seconds, 1),), 0.0), (link,)) for link, seconds in ((0, 50.0), (1, 0.0))]
    assert walked_s(1, 1, each, [apart, at_once], [at_once] * 2) == pytest.approx(50.0 + 3.0)
    # The other one is sent on slowly: each waits 50 s once.
    assert walked_s(1, 1, each, [apart, slow_last], [at_once] * 2) == pytest.approx(50.0 + 3.0)
    # All together they wait for both.
    together = [Sent(Way(0.0, ((0, 50.0, 1),), 0.0), (0,))]
    assert walked_s(1, 1, each, [together, together], [one_way(0.0)] * 2) == pytest.approx(2 * 50.0 + 3.0)


@pytest.mark.parametrize(("seed", "longer"), [(205, 0.09), (263, 0.03)])
def test_sites_that_only_copy_experts_are_lanes(seed: int, longer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_pipeline(seed, least_stages=2)
    simulated_s = simulate_pipeline(plan).step_s
    assert costed(plan).times.step_s == pytest.approx(simulated_s, rel=3e-3)
    monkeypatch.setattr(schedule, "lanes_of", lambda sites, inside: [np.zeros(len(own), dtype=np.int64) for own in sites])
    assert costed(plan).times.step_s == pytest.approx((1 + longer) * simulated_s, rel=5e-3)


@pytest.mark.parametrize(("late_s", "step_s"), [(0.0, 9.0), (10.0, 10.0 + 6.0)])
def test_a_stages_sites_share_processors_with_what_computes_beside_them(late_s: float, step_s: float) -> None:
    """Passes of three sites, 3 and 6 s where all of them compute: of three ranks to a processor one alone takes a third of that,
    two take two thirds."""
    each = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0), PassTimes(0.0, 3.0, 6.0, 0.0, 0.0)]
    forth = [Sent(Way(0.0, (), 0.0), (0,)), Sent(Way(late_s, (), 0.0), (1, 2))]
    back = [Sent(Way(0.0, (), 0.0), (0, 1)) for _ in range(3)]
    assert walked_s(1, 1, each, [forth], [back], crowding=(1.0, 3.0)) == pytest.approx(step_s)


def test_no_more_micro_batches_leave_than_the_next_stage_has_announced() -> None:
    # The first stage has three micro-batches in flight, and two are announced: the third leaves when the first is begun, at 11.
    each = [PassTimes(0.0, 1.0, 1.0, 0.0, 0.0)] * 3
    forth, back = [one_way(0.0, 10.0, 0), one_way(0.0, 0.0, 1)], [one_way(0.0, link=2), one_way(0.0, link=3)]
    # It comes at 21, when all else has long been done, and passes three stages forth and two back.
    assert walked_s(3, 1, each, forth, back) == pytest.approx(21.0 + 5.0)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(40))
def test_expected_steps_are_those_of_simulations(seed: int) -> None:
    plan = random_pipeline(seed)
    found, simulated = costed(plan), simulate_pipeline(plan)
    assert found.times.step_s == pytest.approx(simulated.step_s, rel=0.06)
    assert found.times.work_s == pytest.approx(simulated.work_s, rel=0.08)
    if max(len(stage.sites) for stage in plan.stages) == 1:
        assert found.times.work_s == pytest.approx(simulated.work_s, rel=1e-3)
    parts = found.times.work_s + found.times.bubble_s + found.times.activations_s
    assert parts == pytest.approx(found.times.step_s) and min(found.times.bubble_s, found.times.activations_s) >= 0
    assert least_step_s(plan, [one.times for one in found.inside]) <= found.times.step_s * (1 + 1e-9)
    assert least_s(plan.cluster, plan.workload, len(plan.stages)) <= min(found.times.step_s, simulated.step_s) * (1 + 1e-9)


def test_most_expected_steps_are_simulated_to_a_thousandth() -> None:
    ratios = []
    for seed in range(100, 130):
        plan = random_pipeline(seed)
        ratios.append(costed(plan).times.step_s / simulate_pipeline(plan).step_s)
    assert np.median(np.abs(np.array(ratios) - 1)) < 1e-3


@pytest.mark.parametrize("seed", [300, 304, 307])
def test_ranks_that_pass_on_to_several_sites_send_so_many_messages(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    gpu = plan.cluster.gpu.model_copy(update={"message_overhead": 5e-3})
    slow = plan.at_rates(plan.cluster.model_copy(update={"gpu": gpu}))
    assert len({len(stage.sites) for stage in slow.stages}) > 1
    assert costed(slow).times.step_s == pytest.approx(simulate_pipeline(slow).step_s, rel=2e-3)


@pytest.mark.parametrize("seed", range(200, 208))
def test_of_many_micro_batches_the_last_ones_stand_for_the_rest(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    stages = [pass_times(one) for one in plan.plans]
    number = len(stages)
    long = plan.model_copy(update={"micro_batches": 40 * number})
    inside = stage_links(plan, stages)
    # The same ways: what passes with one micro-batch stays as it is.
    forth, back = ways_of(plan, inside)
    whole_s = walked_s(long.micro_batches, plan.ahead, stages, forth, back, inside)
    assert paced_s(long.micro_batches, plan.ahead, stages, forth, back, inside) == pytest.approx(whole_s, rel=2e-3)
    assert long.in_flight(0) == plan.ahead * (number - 1) + 1


@pytest.mark.parametrize(("stages", "ahead"), [(2, 1), (2, 2), (2, 6), (3, 3), (4, 2)])
@pytest.mark.parametrize("batches", [50, 64, 101])
def test_behind_long_ways_micro_batches_come_in_rounds(stages: int, ahead: int, batches: int) -> None:
    """As many as are in flight, then none for as long as the ways take."""
    each, ways = [PassTimes(0.0, 1e-3, 2e-3, 0.0, 0.0)] * stages, [one_way(1e-3, 1.0, link) for link in range(2 * stages - 2)]
    forth, back, inside = ways[: stages - 1], ways[stages - 1 :], [StageLinks()] * stages
    whole_s = walked_s(batches, ahead, each, forth, back)
    assert paced_s(batches, ahead, each, forth, back, inside) == pytest.approx(whole_s, rel=1e-3)
    rounds = -(-batches // (1 + ahead * (stages - 1)))
    assert stages > 2 or whole_s == pytest.approx(rounds * 2.0, rel=0.05)


@pytest.mark.parametrize("seed", [0, 3, 5, 11])
def test_passes_add_up_to_the_step_of_a_plan_by_itself(seed: int) -> None:
    plan = random_pipeline(seed)
    for stage in plan.plans:
        times, whole_s = pass_times(stage), staggered_s(stage, step_cost(stage))
        batches = stage.workload.training.micro_batches
        # A pass ends when its last rank does, and the next may begin before.
        assert whole_s <= times.busy_s(batches) * (1 + 1e-9)
        assert whole_s == pytest.approx(times.busy_s(batches), rel=0.06)


def test_a_stage_is_timed_as_its_simulation() -> None:
    plan = random_pipeline(7, least_stages=2)
    for times, simulated in zip([pass_times(one) for one in plan.plans], time_stages(plan), strict=True):
        assert times.forward_s == pytest.approx(simulated.forward_s[0], rel=0.02)
        assert times.backward_s == pytest.approx(simulated.backward_s[0], rel=0.02)


def test_the_steady_pace_is_that_of_the_busiest_link() -> None:
    rng = np.random.default_rng(0)
    cluster = sites_cluster(rng, 3, 2, "even")
    workload = layered_workload(3, micro_batches=3)
    stage = {"num_layers": 1, "layers": [{"first_layer": 0, "num_layers": 1, "domains": {}, "migration": {}}]}
    data = {
        "cluster": cluster,
        "workload": workload,
        "micro_batches": 9,
        "ahead": 9,
        "stages": [stage | {"sites": [f"s{site}"]} for site in (2, 0, 1)],
    }
    plan = build(PipelinePlan, data, "pipeline")
    batch_bytes = int(plan.sequences(0).sum()) * plan.sequence_bytes
    # The middle stage's site sends activations on and gradients back over one access link.
    nothing = [PassTimes(0.0, 0.0, 0.0, 0.0, 0.0)] * 3
    inside = stage_links(plan, nothing)
    busiest_s = busiest_link_s(plan.micro_batches, *ways_of(plan, inside), inside)
    assert busiest_s == pytest.approx(9 * 2 * batch_bytes / 125e6)
    assert activation_bytes(plan) == pytest.approx(2 * 2 * 9 * batch_bytes)
    times = PipelineTimes(plan=plan, stages=nothing)
    pace_s, latency_s = 2 * batch_bytes / 125e6, cluster.levels[0].latency
    assert 9 * pace_s <= times.step_s <= 11 * pace_s + 4 * latency_s + 1e-9


def test_memory_has_room_for_what_is_in_flight() -> None:
    plan = random_pipeline(4, least_stages=3).model_copy(update={"ahead": 2})
    for number, (stage, room) in enumerate(zip(plan.plans, rooms(plan), strict=True)):
        alone, kept = memory_use(stage), memory_use(stage, room.in_flight, room.beside_bytes)
        more = (room.in_flight - 1) * alone.parts_bytes[ACTIVATIONS] + room.beside_bytes
        assert kept.parts_bytes[ACTIVATIONS] == pytest.approx(alone.parts_bytes[ACTIVATIONS] + more)
        assert room.in_flight == plan.in_flight(number)
        last = number == len(plan.stages) - 1
        assert (room.in_flight == 1) == last


def test_predictions_say_what_is_sent_and_kept() -> None:
    plan = random_pipeline(9, least_stages=2)
    found = costed(plan)
    told = predicted(found, {"ep": 3.0})
    assert told.baselines == {"ep": 3.0}
    inside = sum(step_cost(stage).wan_bytes for stage in plan.plans)
    assert told.wan_bytes == pytest.approx(inside + activation_bytes(plan))
    assert sum(told.parts.values()) == pytest.approx(told.step) and told.parts[BUBBLE] == pytest.approx(found.times.bubble_s)
    assert told.bound <= told.step and told.memory_bytes == max(one.memory.fullest_bytes for one in found.inside)


def test_one_stage_is_a_plan_without_stages() -> None:
    every = map(random_pipeline, count())
    plan = next(one for one in every if len(one.stages) == 1 and one.micro_batches == one.workload.training.micro_batches)
    stage = plan.plans[0]
    model = plan.workload.model
    assert stage.workload.model.dense_params == model.dense_params and stage.workload.head_flops == plan.workload.head_flops
    same = Plan(cluster=stage.cluster, workload=plan.workload, layers=stage.layers)
    assert costed(plan).times.step_s == pytest.approx(staggered_s(same, step_cost(same)), rel=0.06)


def test_layers_go_where_they_take_least() -> None:
    assert balanced_layers([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 7, [1, 1, 1]) == [3, 2, 2]
    assert balanced_layers([1.0, 3.0], [0.0, 0.0], 8, [1, 1]) == [6, 2]
    assert balanced_layers([1.0, 1.0], [0.0, 4.0], 8, [1, 1]) == [6, 2]
    assert balanced_layers([1.0, 1.0], [0.0, 0.0], 8, [7, 1]) == [7, 1]
    with pytest.raises(ValueError, match="4 layers for 2 stages, which need 5"):
        balanced_layers([1.0, 1.0], [0.0, 0.0], 4, [4, 1])
