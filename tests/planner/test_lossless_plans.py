"""Plans whose messages are shortened without loss, beside others that are."""

from __future__ import annotations

import numpy as np
import pytest

import planner
from hybridep.baselines import Baseline, baseline_like, baseline_plan
from hybridep.codecs import EXACT, KINDS, LOSSLESS, Codecs, TokenCodec, codecs_for_others
from hybridep.commands.inputs import load_cluster, load_workload
from planner import StageWishes, plan_pipeline
from planner.evaluate import evaluate
from planner.explain import explain
from planner.lossless import lossless_like
from planner.stages.neighbours import Neighbours

FP64 = "training.dtype=fp64"
WIDE = ("model.num_layers=3", "model.hidden_size=256", "training.dtype=bf16")


def test_others_are_as_lossless_as_the_plan() -> None:
    """Of a plan that codes what travels under it alone; else expert parallelism would look worse than it is."""
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", WIDE)
    exact, made = (planner.plan(cluster, workload, max_loss=loss) for loss in (None, 0.0))
    assert made.codecs["dc"].lossless and not made.codecs["dc"].lossy
    assert made.predicted.step < exact.predicted.step
    every = {"dc": LOSSLESS.without("activations")}
    for name in Baseline:
        if name.value in made.predicted.baselines:
            alone = baseline_plan(cluster, workload, name, codecs=every)
            assert made.predicted.baselines[name.value] == pytest.approx(evaluate(alone)[0].step_s, rel=1e-12)
            assert made.predicted.baselines[name.value] < exact.predicted.baselines[name.value]
    shown = explain(made)
    assert {one.name: one.step_s for one in shown.baselines} == pytest.approx(dict(made.predicted.baselines))
    assert all(one.step_s >= shown.plan.step_s * (1 - 1e-9) for one in shown.neighbours if one.name.startswith(("dc", "gpu")))
    assert baseline_like(exact, Baseline.EP).codecs == {}
    # The plan without codecs tells what it would take; one that has them does not tell it again.
    [hint] = [one for one in explain(exact).neighbours if one.name.startswith("lossless")]
    assert made.predicted.step * (1 - 1e-9) <= hint.step_s < exact.predicted.step
    assert not [one for one in shown.neighbours if one.name.startswith("lossless")]
    assert lossless_like(made) is None and lossless_like(planner.plan(cluster, load_workload("tiny", (*WIDE[:2], FP64)))) is None


def test_others_have_what_is_lossy_as_it_is() -> None:
    lossy = {"dc": Codecs(tokens=TokenCodec.INT8), "gpu": EXACT}
    assert codecs_for_others(lossy) == lossy
    mixed = codecs_for_others({"dc": LOSSLESS.model_copy(update={"tokens": TokenCodec.INT8, "gradients": EXACT.gradients})})["dc"]
    assert mixed.tokens is TokenCodec.INT8 and mixed.lossless == [kind for kind in (*KINDS, "activations") if kind != "tokens"]


def test_pipelines_and_their_neighbours() -> None:
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", (*WIDE, "training.micro_batches=4"))
    exact, made = (plan_pipeline(cluster, workload, StageWishes(max_loss=loss), time_limit_s=1) for loss in (None, 0.0))
    assert made.codecs["dc"].lossless and made.predicted.step < exact.predicted.step
    assert np.all([made.predicted.baselines[name] < step_s for name, step_s in exact.predicted.baselines.items()])
    hint = lossless_like(exact)
    assert hint is not None and exact.predicted.bound < planner.expected_over(hint, cluster) < exact.predicted.step
    neighbours = Neighbours(made)
    assert neighbours.itself.costed.times.step_s <= made.predicted.step * (1 + 1e-9)
    assert all(one.plan.codecs["dc"].lossless == [*KINDS, "activations"] for one in neighbours.found())
