"""Plans with coded payloads: searched, costed and simulated on the bytes that travel."""

import pytest

from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.plan import Plan, Residency
from planner import memory_use, plan, step_cost
from simulator.step import simulate_step

SMALL = ("model.num_layers=3", "model.vocab_size=256", "training.micro_batches=2")
CODECS = {
    "change": Codecs(experts=ExpertCodec.CHANGE_INT8, gradients=GradientCodec.INT8),
    "sr": Codecs(experts=ExpertCodec.SHARED_RESIDUAL, gradients=GradientCodec.TOP_K),
    "tokens": Codecs(tokens=TokenCodec.INT8),
}


@pytest.mark.parametrize("name", CODECS)
def test_a_coded_plan_is_searched_with_its_bytes(name: str) -> None:
    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny", SMALL)
    exact, coded = plan(cluster, workload), plan(cluster, workload, codecs={"dc": CODECS[name]})
    assert coded.codecs == {"dc": CODECS[name]}
    assert coded.prediction is not None and exact.prediction is not None and coded.solver is not None
    assert coded.prediction.step == pytest.approx(step_cost(coded).step_s)
    assert coded.prediction.step == pytest.approx(coded.solver.objective)
    assert coded.prediction.step < exact.prediction.step
    assert simulate_step(coded).step_s == pytest.approx(step_cost(coded).step_s, rel=1e-9)
    # Exact bytes under the same placement take longer; what codecs keep takes memory.
    plain = Plan.model_validate({**coded.model_dump(), "codecs": {}})
    assert step_cost(plain).step_s > step_cost(coded).step_s
    if name != "tokens":
        assert all(group.residency is Residency.STEP for group in coded.layers) or name == "sr"
        assert memory_use(coded).parts_bytes["codec_state"] > 0


@pytest.mark.turns(2)
def test_change_coding_needs_copies_that_stay() -> None:
    # Memory at which exact copies of some layers would be gathered anew per micro-batch.
    cluster, workload = load_cluster("lab-4dc", ["gpu.memory=25.4 MB"]), load_workload("tiny", SMALL)
    assert Residency.MICROBATCH in {group.residency for group in plan(cluster, workload).layers}
    made = plan(cluster, workload, codecs={"dc": CODECS["change"]})
    assert all(group.residency is Residency.STEP for group in made.layers)
