"""Training in pipeline stages equals training in one process, whatever the stages and the plans inside them, and sends between
stages what the plan says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipelined_cases import CASES, Case, Outcome, check_bytes, check_same_model, reference, train_case
from rank_pool import RankFailed, RankPool
from training_cases import TOLERANCE, losses_of, train_run, training_run

from hybridep.baselines import Baseline, baseline_plan
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan
from hybridep.routing import load_routing
from hybridep.run import Run

pytestmark = pytest.mark.timeout(180)


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_train_the_same_model(ranks: RankPool, case: Case) -> None:
    outcomes: Sequence[Outcome] = ranks.run_with_store(train_case, case)
    check_same_model(case, outcomes, TOLERANCE, TOLERANCE)
    check_bytes(case.plan(), outcomes)


CODED = [
    # int8 is in the last one, too; each takes seven seconds and more.
    *(
        pytest.param(replace(CASES[2], codecs=(("activations", codec),)), marks=pytest.mark.slow if codec != "fp8" else ())
        for codec in ("int8", "bf16", "fp8")
    ),
    replace(CASES[5], overlap=True, codecs=(("activations", "int8"), ("experts", "change-int8"))),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", CODED, ids=lambda case: "-".join(codec for _, codec in case.codecs))
def test_coded_activations_are_those_of_one_process_that_codes_them(ranks: RankPool, case: Case) -> None:
    outcomes: Sequence[Outcome] = ranks.run_with_store(train_case, case)
    check_bytes(case.plan(), outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    found = np.sum([one.losses for one in outcomes], axis=0) / tokens
    exact = np.array(reference(replace(case, codecs=()))[0])
    # Lossy, but little: not the exact losses, and near them.
    assert (found != exact).all() and np.abs(found / exact - 1).max() < 0.02
    if len(case.codecs) == 1:
        coded = np.array(reference(case)[0])
        # Gradients are summed in another order, and a value at the edge of two codes may then take the other one.
        assert np.abs(found / coded - 1)[:4].max() < 1e-6 < np.abs(found / exact - 1).max()


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_what_is_announced_takes_what_plans_count(codec: str) -> None:
    from runtime.between import Neighbours
    from runtime.mesh import mesh_of

    class Noted:
        """A transport that takes notes of where messages are to arrive."""

        def __init__(self) -> None:
            self.rooms: dict[int, int] = {}

        def post(self, receives: dict[int, Any], label: str) -> None:
            for room in receives.values():
                storage = room.untyped_storage()
                self.rooms[storage.data_ptr()] = storage.nbytes()

    case = replace(CASES[4], codecs=(("activations", codec),))
    plan, noted = case.plan(), Noted()
    neighbours = Neighbours(mesh_of(plan, 0), noted)  # type: ignore[arg-type]
    try:
        neighbours.begin()
    finally:
        neighbours.close()
    [waiting] = [coming for coming in neighbours._coming.values() if coming]
    assert len(waiting) == plan.ahead + 1 and sum(noted.rooms.values()) == len(waiting) * plan.sequence_bytes * int(
        plan.sequences(0)[0]
    )
    assert all((one.rows is None) == (codec == "int8") for one in waiting)


def plain(plan: PipelinePlan) -> Plan:
    """The same training without stages."""
    return baseline_plan(plan.cluster, plan.workload, Baseline.EP_IN_DC)


@pytest.mark.turns(3)
@pytest.mark.parametrize("then", ["the same", "other stages", "no stages"])
def test_a_checkpoint_goes_on_under_any_plan(ranks: RankPool, tmp_path: Path, then: str) -> None:
    case = CASES[3]
    others = {"the same": case.plan(), "other stages": CASES[2].plan(), "no stages": plain(case.plan())}
    run = training_run(tmp_path, steps=3)
    first = losses_of(ranks.run_with_store(train_run, run, case.plan()))
    later = losses_of(ranks.run_with_store(train_run, training_run(tmp_path, steps=5), others[then], True))
    expected, _ = reference(case)
    np.testing.assert_allclose(first + later, expected[:5], rtol=TOLERANCE)


def test_a_checkpoint_without_stages_goes_on_in_stages(ranks: RankPool, tmp_path: Path) -> None:
    case = CASES[3]
    first = losses_of(ranks.run_with_store(train_run, training_run(tmp_path, steps=2), plain(case.plan())))
    later = losses_of(ranks.run_with_store(train_run, training_run(tmp_path, steps=4), case.plan(), True))
    np.testing.assert_allclose(first + later, reference(case)[0][:4], rtol=TOLERANCE)


def test_what_a_run_in_stages_writes(ranks: RankPool, tmp_path: Path) -> None:
    plan = CASES[3].plan()
    reports = ranks.run_with_store(train_run, training_run(tmp_path, steps=2, trace_step=2), plan)
    assert [report.rank for [report, _] in reports] == [0, 1, 2, 3]
    # Stages of the first two and the last two sites; the later one has the losses.
    assert [report.tokens for [report, _] in reports] == [0, 24, 0, 24]
    for rank, (report, _) in enumerate(reports):
        stage, _ = plan.seat(rank)
        assert report.wan_bytes == sum(sent for label, sent in report.sent_bytes.items() if label.endswith("@dc")) > 0
        sends = {label for label in report.sent_bytes if label.startswith("activ")}
        assert sends == ({"activations@dc"} if stage == 0 else {"activation_gradients@dc"})
    record = load_routing(tmp_path / "routing.npz")
    tokens = 4 * 2 * 6
    assert (record.chosen.sum(axis=1) == 2 * tokens * plan.workload.model.top_k).all() and not record.choices
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"rank {rank} compute" for rank in range(4)} <= rows
    names = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"activations", "activation_gradients", "expert", "head", "token_dispatch"} <= names


@pytest.mark.turns(2)
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_lost_rank_of_a_stage_is_named_by_its_number_in_the_run(tmp_path: Path, fault: str) -> None:
    # Rank 3 is the second of its stage.
    run = training_run(tmp_path, steps=3, exchange_timeout="3 s")
    with RankPool(4, join=False) as pool, pytest.raises((RankFailed, EOFError), match="rank 3" if fault == "hang" else None):
        pool.run_with_store(train_run, run, CASES[4].plan(), False, f"{fault}:rank=3,step=2")


def test_backwards_announced_in_the_order_of_forwards_only(tmp_path: Path) -> None:
    """Told of the last forward in place of the first, ranks await other numbers of rows than come."""
    with pytest.raises((RankFailed, EOFError)), RankPool(4, join=False) as pool:
        pool.run_with_store(mutated_run, training_run(tmp_path, steps=3, exchange_timeout="3 s"), CASES[3].plan())


def mutated_run(rank: int, port: int, run: Run, plan: AnyPlan) -> None:
    from runtime.routed import DistributedExperts

    def last_first(self: Any) -> None:
        for over in self._overs.pop() if self._overs else ():
            self.dispatcher.announce_backward(*over)

    DistributedExperts.announce_backward = last_first  # type: ignore[method-assign]
    train_run(rank, port, run, plan)
