"""Codecs chosen by what they were measured to cost."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import pytest

import planner
from hybridep.codec_losses import MeasuredLoss, measured_losses, permitted, with_gates
from hybridep.codecs import KINDS, Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.config import build
from hybridep.errors import InfeasibleError, NoSolutionError, UserError
from hybridep.plan import Plan, copies_last
from planner.check import check
from planner.evaluate import evaluate
from planner.goal import Goal
from planner.stages.bound import least_s
from planner.within_loss import plans_within_loss

REFERENCE = Path(__file__).resolve().parents[2] / "experiments" / "codec-loss" / "reference.csv"
SMALL = ("model.num_layers=3", "model.vocab_size=256", "training.micro_batches=2")


def test_the_table_is_what_the_experiment_measured() -> None:
    lines = [line for line in REFERENCE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = {row["codec"]: row for row in csv.DictReader(lines) if row["codec"] != "exact"}
    bytes_of = {0.0133: "sr-50x", 0.0667: "sr-10x"}
    found = {f"{one.kind}-{bytes_of.get(one.keep or 0, one.codec)}": one for one in measured_losses().losses}
    assert set(found) == set(rows)
    for name, one in found.items():
        row = rows[name]
        assert one.relative == float(row["relative_mean"]) and one.seeds == int(row["seeds"]), name
        assert one.range == (float(row["relative_min"]), float(row["relative_max"])), name


def test_gates_are_given_to_what_was_measured_only() -> None:
    coded = with_gates(Codecs(experts=ExpertCodec.CHANGE_INT8, gradients=GradientCodec.TOP_K, gradients_keep=0.5))
    assert set(coded.gates) == {"experts"} and coded.gates["experts"].relative == 0.00105
    sparse = {keep: with_gates(Codecs(experts=ExpertCodec.SHARED_RESIDUAL, experts_keep=keep)).gates for keep in (0.0133, 0.02)}
    assert sparse[0.0133]["experts"].relative == 0.09028 and not sparse[0.02]


@pytest.mark.parametrize("max_loss", [0.0, 0.002, 0.005, 0.0056, 0.08, 1.0])
def test_permitted_codecs_against_all_combinations(max_loss: float) -> None:
    # What passes between pipeline stages is no part of a plan without them.
    table = [one for one in measured_losses().losses if one.kind in KINDS]
    assert len(table) < len(measured_losses().losses)
    table = table if max_loss else []
    lossless = [MeasuredLoss(kind=kind, codec="lossless", relative=0.0, range=(0.0, 0.0), seeds=1) for kind in KINDS]
    table += lossless if not max_loss else [one for one in lossless if one.kind == "experts"]
    wanted = set()
    for chosen in product([False, True], repeat=len(table)):
        used = [one for one, taken in zip(table, chosen, strict=True) if taken]
        if len({one.kind for one in used}) == len(used) and sum(max(one.relative, 0) for one in used) <= max_loss:
            wanted.add(frozenset((one.kind, one.codec, one.keep) for one in used))
    found = permitted(max_loss)
    assert len(found) == len(wanted) and not found[0].coded
    for codecs in found:
        assert set(codecs.gates) == set(codecs.lossy)
        assert sum(max(gate.relative, 0) for gate in codecs.gates.values()) <= max_loss


@pytest.mark.turns(2)
def test_the_planner_takes_the_best_that_is_permitted() -> None:
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", SMALL)
    steps = []
    for max_loss in (0.0, 0.005):
        made = planner.plan(cluster, workload, max_loss=max_loss)
        check(made)
        each = [
            planner.plan(cluster, workload, codecs={"dc": codecs} if codecs.coded else None) for codecs in permitted(max_loss)
        ]
        assert made.prediction is not None and made.solver is not None
        best_s = min(one.prediction.step for one in each if one.prediction is not None)
        assert made.prediction.step == pytest.approx(best_s, rel=1e-12)
        assert made.solver.bound <= min(one.solver.bound for one in each if one.solver is not None) * (1 + 1e-12)
        steps.append(made.prediction.step)
        assert bool(made.codecs["dc"].lossy) == (max_loss > 0)
    assert steps[0] > steps[1]
    # With a limit that is over after the exact search, that plan with the codecs that suit it.
    short = planner.plan(cluster, workload, max_loss=0.005, time_limit_s=1e-3)
    check(short)
    assert short.codecs and short.prediction is not None and short.solver is not None
    assert steps[1] <= short.prediction.step * (1 + 1e-9) < steps[0]
    assert short.solver.bound == pytest.approx(least_s(cluster, workload, 1)) and short.solver.bound < steps[1]
    several = planner.plans(cluster, workload, 3, max_loss=0.005, time_limit_s=1e-3)
    # The next ones of the exact search may be better with those codecs; of these there may be fewer by then.
    assert several[0].predicted.step <= short.prediction.step * (1 + 1e-9)
    assert 1 < len(several) == len({one.digest for one in several})
    assert several[0].solver is not None and several[0].solver.bound == short.solver.bound
    with pytest.raises(UserError, match="leave one of them out"):
        planner.plan(cluster, workload, max_loss=0.1, codecs={"dc": Codecs(tokens=TokenCodec.INT8)})
    with pytest.raises(UserError, match="at least zero"):
        planner.plan(cluster, workload, max_loss=-0.1)


@pytest.mark.turns(4)
@pytest.mark.parametrize("max_loss", [0.0, 0.0008])
def test_the_next_best_of_equal_sites_against_all_there_are(max_loss: float) -> None:
    """Every placement that all layers share with every choice of codecs: first those of least step, without such as bring it
    nothing."""
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", SMALL)
    made = planner.plans(cluster, workload, 12, max_loss=max_loss)
    steps_s = [one.predicted.step for one in made]
    assert len(made) == 12 and steps_s == sorted(steps_s) and len({one.digest for one in made}) == 12
    placed = {str(one.layers): one for one in planner.plans(cluster, workload, 1000) if len(one.layers) == 1}
    every: dict[str, list[float]] = {}
    for layers, one in placed.items():
        for codecs in permitted(max_loss):
            if copies_last(one.layers, codecs):
                cost, memory = evaluate(one.model_copy(update={"codecs": {"dc": codecs} if codecs.coded else {}}))
                assert memory.fits
                every.setdefault(layers, []).append(cost.step_s)
    best_s = sorted(min(steps) for steps in every.values())
    assert len(best_s) > 12 and steps_s[0] == pytest.approx(best_s[0], rel=1e-9)
    assert all(ours_s <= other_s * (1 + 1e-9) for ours_s, other_s in zip(steps_s, best_s, strict=False))
    # With other codecs a placement may come twice, and none is left out for it.
    assert steps_s[-1] < best_s[11] * (1 - 1e-9) and len({str(one.layers) for one in made}) < 12
    for one in made:
        check(one)
        codecs = one.codecs.get("dc", Codecs())
        assert sum(max(gate.relative, 0.0) for gate in codecs.gates.values()) <= max_loss
        for kind in codecs.coded:
            assert evaluate(one.model_copy(update={"codecs": {"dc": codecs.without(kind)}}))[0].step_s > one.predicted.step
    assert [one.solver is None for one in made] == [False, *[True] * 11]
    assert made[0].predicted.step == planner.plan(cluster, workload, max_loss=max_loss).predicted.step


def test_codecs_that_need_copies_that_stay_are_not_given_to_others() -> None:
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", SMALL)
    found = planner.plan(cluster, workload, time_limit_s=1)
    short = {"first_layer": 0, "num_layers": 3, "domains": {"dc": 4, "gpu": 2}, "migration": {}, "residency": "microbatch"}
    data = found.model_dump(mode="json") | {"layers": [short]}

    def make(codecs: dict[str, Codecs], time_limit_s: float) -> list[Plan]:
        return [build(Plan, data | {"codecs": codecs}, "plan")]

    [chosen] = plans_within_loss(make, cluster, workload, 1, max_loss=0.005, time_limit_s=1e-9)
    # A quarter of the bytes, were it not for that.
    assert chosen.codecs["dc"].experts is ExpertCodec.BF16
    build(Plan, chosen.model_dump(mode="json"), "plan")


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), NoSolutionError("in time")])
def test_a_search_that_ends_without_a_plan_leaves_those_before(ended: BaseException) -> None:
    cluster, workload, calls = load_cluster("lab-4dc"), load_workload("tiny", SMALL), list[Plan]()

    def make(codecs: dict[str, Codecs], time_limit_s: float) -> list[Plan]:
        if calls:
            raise ended
        calls.append(planner.plan(cluster, workload, codecs=codecs, time_limit_s=time_limit_s))
        return calls

    [made] = plans_within_loss(make, cluster, workload, 1, max_loss=0.005, time_limit_s=20.0)
    check(made)
    assert made.predicted.step <= calls[0].predicted.step
    # Nothing is proven of codecs for which nothing was searched.
    assert made.solver is not None and made.solver.bound == pytest.approx(least_s(cluster, workload, 1))
    with pytest.raises(type(ended)):
        plans_within_loss(make, cluster, workload, 1, max_loss=0.005, time_limit_s=20.0)


def test_that_nothing_is_within_a_budget_is_not_proven() -> None:
    """Codecs with which no plan was found that is cheap enough count in the bound, those with which none has room do not."""
    workload, bounds_s = load_workload("tiny", SMALL), []
    cluster = load_cluster("lab-4dc", ["gpu.price=2 $/h"])
    for goal in (Goal(), Goal(budget_usd=1.0)):
        found = [planner.plan(cluster, workload, goal=goal, time_limit_s=1)]

        def make(codecs: dict[str, Codecs], time_limit_s: float, left: list[Plan] = found) -> list[Plan]:
            if not left:
                raise InfeasibleError("too dear, or too large")
            return [left.pop()]

        solver = plans_within_loss(make, cluster, workload, 1, max_loss=0.005, time_limit_s=60)[0].solver
        assert solver is not None
        bounds_s.append(solver.bound)
    assert bounds_s[1] == pytest.approx(least_s(cluster, workload, 1)) and bounds_s[1] < bounds_s[0]
