"""Bytes of coded payloads, and what a plan says of its codecs."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec, Wire, kept
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.plan import Plan, Residency
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel, step_traffic
from hybridep.workload import Workload

MODEL = {
    "num_layers": 3,
    "hidden_size": 200,
    "num_heads": 2,
    "vocab_size": 256,
    "num_experts": 8,
    "top_k": 2,
    "expert_ffn_size": 9,
}
P = 3 * 200 * 9


def workload(dtype: str = "fp32") -> Workload:
    return build(
        Workload, {"name": "w", "model": MODEL, "training": {"sequence_length": 8, "micro_batch_size": 1, "dtype": dtype}}, "w"
    )


def plan(codecs: dict[str, object], **group: object) -> Plan:
    levels = [{"name": name, "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"} for name, size in (("dc", 2), ("gpu", 2))]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
    cluster = build(Cluster, {"name": "c", "levels": levels, "gpu": gpu}, "c")
    layers = [{"first_layer": 0, "num_layers": 3, "domains": {"dc": 2, "gpu": 2}, "migration": {}, **group}]
    return build(Plan, {"cluster": cluster, "workload": workload(), "layers": layers, "codecs": codecs}, "plan")


@pytest.mark.parametrize(
    ("codec", "row"),
    [
        (TokenCodec.EXACT, 200 * 4),
        (TokenCodec.BF16, 200 * 2),
        (TokenCodec.FP8, 200 + 2 * 4),
        (TokenCodec.INT8, 200 + 2 * 4),
    ],
)
def test_rows(codec: TokenCodec, row: int) -> None:
    wire = Wire(workload=workload(), codecs=Codecs(tokens=codec))
    assert wire.combine_row_bytes == row
    assert wire.dispatch_row_bytes == row + 2 * 4 + 2 * 4  # weights and ids stay exact
    assert wire.dispatch_gradient_row_bytes == row + 2 * 4


@pytest.mark.parametrize(
    ("codecs", "expert"),
    [
        (Codecs(), P * 4),
        (Codecs(experts=ExpertCodec.BF16), P * 2),
        (Codecs(experts=ExpertCodec.CHANGE_INT8), P + 43 * 4),
        (Codecs(experts=ExpertCodec.CHANGE_INT4), P // 2 + 169 * 4),
        (Codecs(experts=ExpertCodec.SHARED_RESIDUAL, experts_keep=0.02), 108 * (4 + 2) + 3 * 4),
    ],
)
def test_experts(codecs: Codecs, expert: int) -> None:
    assert Wire(workload=workload(), codecs=codecs).expert_bytes == expert


@pytest.mark.parametrize(
    ("codecs", "sizes"),
    [
        (Codecs(), {0: 0, 1: 4, 4097: 4 * 4097}),
        (Codecs(gradients=GradientCodec.BF16), {0: 0, 1: 2, 4097: 2 * 4097}),
        (Codecs(gradients=GradientCodec.INT8), {0: 0, 1: 4 + 4, 4097: 4100 + 33 * 4}),
        (Codecs(gradients=GradientCodec.TOP_K, gradients_keep=0.01), {0: 0, 1: 6 + 2 * 4, 4097: 41 * 6 + 3 * 4}),
    ],
)
def test_gradients(codecs: Codecs, sizes: dict[int, int]) -> None:
    found = Wire(workload=workload(), codecs=codecs).dense_bytes(np.array([list(sizes), list(sizes)]))
    np.testing.assert_array_equal(found, [list(sizes.values())] * 2)


def test_a_sparse_message_keeps_at_least_one_element() -> None:
    assert [kept(length, 0.01) for length in (0, 1, 100, 101)] == [0, 1, 1, 2]


def test_each_level_has_its_own_codecs() -> None:
    exact, coded = (step_traffic(plan(codecs)) for codecs in ({}, {"dc": {"experts": "change-int8", "gradients": "int8"}}))
    assert exact.keys() == coded.keys()
    for key, sent in exact.items():
        ratio = {Op.EXPERT_GATHER: (P + 43 * 4) / (4 * P), Op.GRADIENT_RETURN: (P + 43 * 4) / (4 * P)}.get(key.op, 1.0)
        if key.level == 0 and key.op in (Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER):
            assert 0.25 < coded[key].sum() / sent.sum() < 0.27
        else:
            np.testing.assert_allclose(coded[key], sent * (ratio if key.level == 0 else 1.0))


def test_the_shared_expert_costs_an_all_reduce_per_layer_and_step() -> None:
    traffic = step_traffic(plan({"dc": {"experts": "sr"}}))
    inner, outer = (traffic[OpLevel(Op.SHARED_REDUCE_SCATTER, level)].sum() for level in (1, 0))
    assert inner == 3 * 2 * P * 4  # 2 sites, each GPU sends half
    assert outer == 3 * 2 * P * 4 / 2 * 2 / 2
    assert traffic[OpLevel(Op.SHARED_ALL_GATHER, 0)].sum() == outer
    no_copies = step_traffic(plan({"dc": {"experts": "sr"}}, domains={"dc": 1, "gpu": 2}))
    assert OpLevel(Op.SHARED_REDUCE_SCATTER, 0) not in no_copies


@pytest.mark.parametrize(
    ("codecs", "group", "message"),
    [
        ({"wan": {}}, {}, "no such level"),
        ({"dc": {"experts": "change-int8"}}, {"residency": Residency.MICROBATCH.value}, "residency: step"),
        ({"dc": {"gates": {"token": {"relative": 0.1, "source": "s"}}}}, {}, "tokens, experts, gradients"),
        ({"dc": {"experts_keep": 0}}, {}, "greater than 0"),
        ({"dc": {"tokens": "int7"}}, {}, "'int8'"),
    ],
)
def test_refused(codecs: dict[str, object], group: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(codecs, **group)


def test_lossy_codecs_are_named_with_their_share() -> None:
    assert Codecs().lossy == {}
    codecs = Codecs(
        tokens=TokenCodec.BF16, experts=ExpertCodec.SHARED_RESIDUAL, gradients=GradientCodec.TOP_K, gradients_keep=0.1
    )
    assert codecs.lossy == {"tokens": "bf16", "experts": "sr, keep 0.02", "gradients": "top-k, keep 0.1"}
