"""Bytes that tokens leave on a rank from forward to backward: of attention, gate, experts and the head."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.recompute import Recompute
from hybridep.workload import LOSS_PART, LOSS_PARTS, Ffn, Model, Training, Workload


def dense_layers_bytes(workload: Workload, recompute: Recompute) -> float:
    """Kept for backward of layers without experts by a rank with the mean number of tokens, one micro-batch; their inputs where
    attention does ``recompute``."""
    model, width = workload.model, workload.training.dtype.num_bytes
    elements = model.hidden_size
    if Recompute.ATTENTION not in recompute:
        elements += _attention_block_elements(model) + inner_width(workload, model.dense_ffn_size)
    return float(workload.training.tokens * model.num_dense_layers * elements * width)


def dense_layer_again_bytes(workload: Workload, recompute: Recompute) -> float:
    """Of such a layer while it runs backward, where it computes again."""
    model = workload.model
    if not model.num_dense_layers or Recompute.ATTENTION not in recompute:
        return 0.0
    elements = _with_gradients(_attention_block_elements(model), inner_width(workload, model.dense_ffn_size))
    return float(workload.training.tokens * elements * workload.training.dtype.num_bytes)


def _with_gradients(attention: float, inner: float) -> float:
    """The most that is held of what attention and a feed-forward keep while it runs backward: first with the feed-forward's
    gradients, of which there are as much, then with half as much of attention's."""
    return max(attention + 2 * inner, 1.5 * attention)


def _attention_block_elements(model: Model) -> int:
    """Kept of a token by attention and its two norms, of which the layer's input is one input."""
    # The inputs of two norms and the output of the first.
    return 3 * model.hidden_size + attention_elements(model)


def attention_elements(model: Model) -> int:
    """Kept of a token by one attention, without its input: query, key, value and what it finds, before and after its heads are
    joined."""
    sizes = model.latent_attention
    if sizes is None:
        return 3 * model.attention_width + 2 * model.kv_width + model.qk_norm * (model.attention_width + model.kv_width)
    # Heads are as wide for values as for keys (``runtime.attention``). And before and after each norm.
    heads = 4 * max(model.attention_width, model.value_width) + model.value_width
    return heads + 2 * sizes.norm_params + sizes.rope_head_dim


class Held(NamedTuple):
    """Bytes of one layer's routed tokens, or of its shared expert."""

    kept: FloatArray
    """Until backward."""
    again: FloatArray
    """Made again in backward, and held while it runs; nothing where all is kept. Before routed experts with gradients."""


def pre_expert_bytes(workload: Workload, share: FloatArray, recompute: Recompute) -> Held:
    """Of attention, norms, gate and shared expert of one layer with experts; ``share``: each rank's tokens as a multiple of the
    mean."""
    model, width = workload.model, workload.training.dtype.num_bytes
    wide = max(width, 4)
    # The gate keeps its input, which is a shared expert's, too, the scores and what it chose.
    chosen = model.top_k * (8 + 2 * wide)
    gate = model.hidden_size * width + model.num_experts * wide + chosen
    attention = _attention_block_elements(model) * width + gate
    # Its inner widths and, where it has a gate, its output and what the gate says.
    shared = (inner_width(workload, model.shared_ffn_size) + model.shared_expert_gate * (model.hidden_size + 1)) * width
    kept, again = attention + shared, 0.0
    if Recompute.ATTENTION in recompute:
        kept = model.hidden_size * width + chosen
        again = _with_gradients(attention - kept, shared)
    elif Recompute.EXPERTS in recompute:
        kept, again = attention, _with_gradients(0, shared)
    tokens = share * float(workload.training.tokens)
    return Held(tokens * kept, tokens * again)


def routed_bytes(workload: Workload, served: FloatArray, arrived: FloatArray, recompute: Recompute) -> Held:
    """Of each of ``served`` rows the experts' input, what enters their activation, a weight and two indices, and ids and weights
    of ``arrived`` rows. Where experts ``recompute`` the rows that arrived are kept in place of all that is of served ones; then
    backward has their sums, too."""
    model, width = workload.model, workload.training.dtype.num_bytes
    row, chosen = model.hidden_size * width, model.top_k * (width + 4)
    made = served * float(row + (inner_width(workload, model.expert_ffn_size) + 1) * width + 16)
    if Recompute.EXPERTS in recompute:
        return Held(arrived * float(row + chosen), arrived * float(row) + made)
    return Held(arrived * float(chosen) + made, np.zeros_like(made))


def routed_backward_bytes(workload: Workload) -> float:
    """Of one served row while its experts run backward, beside what is kept: its gradient and, made again, what comes out of the
    activation, with the gradient of that and the product of both; then, when what enters the activation is gone, gradients of the
    row from each matrix, and their sum. Of all experts at once, as grouped products have it; a CPU's loop over experts takes
    less."""
    model = workload.model
    elements = max(model.hidden_size + 3 * model.expert_ffn_size, 3 * model.hidden_size)
    return float(elements * workload.training.dtype.num_bytes)


def head_bytes(workload: Workload, share: FloatArray) -> FloatArray:
    """Of ranks with this share of the mean number of tokens: the logits, which become their own gradient
    (``runtime.token_loss``), with two parts of them in fp32 at least; and then the gradients of the head's weights and input."""
    model, width = workload.model, workload.training.dtype.num_bytes
    tokens = share * float(workload.training.tokens * model.has_head)
    logits = tokens * model.vocab_size
    parts = 2 * np.minimum(logits, np.maximum(LOSS_PART, logits / LOSS_PARTS)) * max(width, 4)
    weights = model.vocab_size * model.hidden_size * float(model.has_head)
    gradients = (tokens * model.hidden_size + weights) * width
    held = logits * width + np.maximum(parts, gradients)
    # Logits are gone when autograd makes the weights' wider, where sums are.
    return np.asarray(np.maximum(held, gradients + weights * _widened_bytes(workload.training)))


def _widened_bytes(training: Training) -> int:
    """Of one parameter's gradient that is to be added to sums that are wider."""
    return training.gradient_dtype.num_bytes if training.gradient_dtype is not training.dtype else 0


def inner_width(workload: Workload, ffn_size: int) -> int:
    """Elements per token kept between a feed-forward's matrices: what enters the activation (``runtime.activation``)."""
    return (1 if workload.model.ffn is Ffn.GELU else 2) * ffn_size
