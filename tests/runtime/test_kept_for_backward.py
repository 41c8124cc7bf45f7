"""What a layer's parts keep for backward is what the planner counts, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybridep.config import build
from hybridep.recompute import Recompute
from hybridep.workload import Ffn, Workload
from planner.activations import attention_elements, inner_width, routed_bytes
from runtime.attention import Attention, LatentAttention
from runtime.gate import Gate
from runtime.kernels.local import in_plain_torch, with_kernels
from runtime.moe import FeedForward
from runtime.routed import DistributedExperts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = 96
LATENT = {"query_rank": 24, "kv_rank": 16, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 24}


def workload(dtype: str, **model: Any) -> Workload:
    sizes = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 64,
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn_size": 80,
    }
    training = {"sequence_length": TOKENS, "micro_batch_size": 1, "dtype": dtype}
    return build(Workload, {"name": "kept", "model": sizes | model, "training": training}, "kept")


def kept_bytes(compute: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Of all storages that autograd keeps, but for the parameters'."""
    found: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()  # whose graph keeps the storages apart until they are counted
    assert result.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("form", [in_plain_torch, with_kernels])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("ffn", list(Ffn))
def test_routed_experts(ffn: Ffn, dtype: str, form: Callable[..., Tensor]) -> None:
    """Of a served row its input, what enters the activation and a weight; nothing that comes out. Ids and weights of rows that
    arrived are the caller's."""
    work, draw = workload(dtype, ffn=ffn.value), torch.Generator().manual_seed(1)
    x, weights, experts = (
        torch.randn(*shape, generator=draw).to(DTYPES[dtype]).requires_grad_()
        for shape in ((TOKENS, 64), (TOKENS, 2), (8, work.model.expert_params))
    )
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(TOKENS)]).int()
    place = torch.arange(8, dtype=torch.int32)
    found = kept_bytes(lambda: form(x, weights, ids, place, experts, experts[:0], ffn=ffn), [x, weights, experts])
    expected = routed_bytes(work, np.array([2.0 * TOKENS]), np.zeros(1), Recompute.NOTHING).kept.item()
    # Grouped products have rows of each expert in whole eights.
    padded = 8 * 7 * (64 + inner_width(work, 80)) * work.training.dtype.num_bytes if form is with_kernels else 0
    assert 0.98 * expected < found < 1.02 * expected + padded


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("ffn", list(Ffn))
def test_single_feed_forwards(ffn: Ffn, dtype: str) -> None:
    work = workload(dtype, ffn=ffn.value)
    part = FeedForward(hidden_size=64, ffn_size=80, ffn=ffn, dtype=DTYPES[dtype])
    nn.init.normal_(part.row)
    x = torch.ones(1, TOKENS, 64, dtype=DTYPES[dtype], requires_grad=True)
    found = kept_bytes(lambda: part(x), [*part.parameters(), x])
    assert found == TOKENS * inner_width(work, 80) * work.training.dtype.num_bytes


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "model", [{}, {"num_kv_heads": 1}, {"qk_norm": True, "num_kv_heads": 2}, {"latent_attention": LATENT}], ids=str
)
def test_attention(model: dict[str, Any], dtype: str) -> None:
    """Keys and values that heads share are kept once."""
    work = workload(dtype, **model)
    made = Attention if work.model.latent_attention is None else LatentAttention
    part = made(work.model, DTYPES[dtype])
    x = torch.ones(1, TOKENS, 64, dtype=DTYPES[dtype], requires_grad=True)
    found = kept_bytes(lambda: part(x), [*part.parameters(), x])
    # Beside it a number for each row of a norm and of scores, and angles, which here are much of so small a model.
    angles = 4 * TOKENS * part.rotary._width * DTYPES[dtype].itemsize
    expected = TOKENS * attention_elements(work.model) * work.training.dtype.num_bytes
    assert expected <= found <= expected + angles + 4 * TOKENS * (3 * work.model.num_heads + 2)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_gate_keeps_its_input_as_it_is(dtype: str) -> None:
    """Though it multiplies it in fp32."""
    gate = Gate(hidden_size=512, num_experts=8, top_k=2, dtype=DTYPES[dtype])
    nn.init.normal_(gate.weight)
    x = torch.ones(1, TOKENS, 512, dtype=DTYPES[dtype], requires_grad=True)
    found = kept_bytes(lambda: gate(x).weights_TK, [*gate.parameters()])
    assert x.nbytes <= found <= x.nbytes + TOKENS * (4 * 8 * 4 + 2 * (8 + 3 * 4))


@pytest.mark.parametrize("recompute", [Recompute.NOTHING, Recompute.EXPERTS], ids=lambda one: one.phrase)
def test_what_came_and_what_goes_back_is_let_go(recompute: Recompute) -> None:
    """Experts that compute again keep what came, and nothing else."""
    layer, draw = DistributedExperts.__new__(DistributedExperts), torch.Generator().manual_seed(1)
    nn.Module.__init__(layer)
    layer._ffn, layer._padded_E, layer._again = Ffn.SWIGLU, None, Recompute.EXPERTS in recompute
    layer._place_E = torch.arange(8, dtype=torch.int32)
    x, weights, home, gradient = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((5, 6), (5, 2), (8, 3 * 6 * 4), (5, 6))
    )
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(5)]).int()
    leaves = [one.clone().requires_grad_() for one in (x, weights, home)]
    expected = torch.autograd.grad(layer.weighted(ids, *leaves, home[:0]), leaves, gradient)
    y, computed = layer.compute(x, weights, ids, home, home[:0])
    came, back = (StorageWeakRef(one.untyped_storage()) for one in (x, y))
    del x, y
    assert came.expired() == (recompute is Recompute.NOTHING) and back.expired()
    for found, wanted in zip(layer.gradients(computed, gradient), expected, strict=False):
        assert torch.equal(found, wanted)
