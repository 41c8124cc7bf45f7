import numpy as np
import pytest

from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import build
from hybridep.plan import Plan, Residency
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel, step_traffic
from hybridep.workload import Workload

WORKLOAD = build(
    Workload,
    {
        "name": "test",
        "model": {
            "num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 10,
            "num_experts": 24, "top_k": 2, "expert_ffn_size": 8,
        },
        "training": {"sequence_length": 8, "micro_batch_size": 1},
    },
    "test",
)  # fmt: skip


def plan_of(baseline: Baseline, *sizes: int) -> Plan:
    levels = [{"name": f"l{at}", "size": size, "bandwidth": "1 Gbps", "latency": "0 s"} for at, size in enumerate(sizes)]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"}
    cluster = build(Cluster, {"name": "test", "levels": levels, "gpu": gpu}, "test")
    return baseline_plan(cluster, WORKLOAD, baseline)


@pytest.mark.parametrize(
    ("baseline", "tokens_move", "copies_move"),
    [
        (Baseline.EP, {0, 1, 2}, set()),
        (Baseline.FULL_GATHER, set(), {0, 1, 2}),
        (Baseline.EP_IN_DC, {1, 2}, {0}),
        (Baseline.EP_IN_NODE, {2}, {0, 1}),
    ],
)
def test_what_moves_at_which_level(baseline: Baseline, tokens_move: set[int], copies_move: set[int]) -> None:
    made = plan_of(baseline, 3, 2, 4)
    traffic = step_traffic(made)
    for level in range(3):
        assert (traffic[OpLevel(Op.TOKEN_DISPATCH, level)].sum() > 0) == (level in tokens_move)
        assert (traffic[OpLevel(Op.EXPERT_GATHER, level)].sum() > 0) == (level in copies_move)
    assert made.layers[0].residency is Residency.STEP
    assert made.provenance == {"baseline": baseline.value}


def test_data_parallel_sites_exchange_what_a_hierarchical_all_reduce_would() -> None:
    """Every site gets all experts that it does not own once, and returns as many gradients."""
    made = plan_of(Baseline.EP_IN_DC, 3, 4)
    traffic = step_traffic(made)
    per_site = WORKLOAD.model.num_moe_layers * WORKLOAD.expert_bytes * 24 / 3
    for op in (Op.EXPERT_GATHER, Op.GRADIENT_RETURN):
        sent = traffic[OpLevel(op, 0)].reshape(3, 4, 3).sum(axis=1)
        np.testing.assert_array_equal(sent, per_site * (1 - np.eye(3)))


@pytest.mark.parametrize("baseline", Baseline)
def test_one_level(baseline: Baseline) -> None:
    assert plan_of(baseline, 4).layers[0].domains == {"l0": 1 if baseline is Baseline.EP else 4}
