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
    if not workload.model.num_dense_layers:
        return 0.0
    kept = dense_layers_bytes(workload, Recompute.NOTHING) - dense_layers_bytes(workload, recompute)
    return kept / workload.model.num_dense_layers


def _attention_block_elements(model: Model) -> int:
    """Kept of a token by attention and its two norms, of which the layer's input is one input."""
    # The inputs of two norms and the output of the first.
    return 3 * model.hidden_size + attention_elements(model)


def attention_elements(model: Model) -> int:
    """Kept of a token by one attention, without its input: query, key, value (for all query heads) and what it finds, before and
    after its heads are joined."""
    sizes = model.latent_attention
    if sizes is None:
        return 5 * model.attention_width + model.qk_norm * (model.attention_width + model.kv_width)
    # Heads are as wide for values as for keys (``runtime.attention``). And before and after each norm.
    heads = 4 * max(model.attention_width, model.value_width) + model.value_width
    return heads + 2 * sizes.norm_params + sizes.rope_head_dim


class Held(NamedTuple):
    """Bytes of one layer's routed tokens, or of its shared expert."""

    kept: FloatArray
    """Until backward."""
    again: FloatArray
    """Made again in backward, and held while it runs; nothing where all is kept."""


def pre_expert_bytes(workload: Workload, share: FloatArray, recompute: Recompute) -> Held:
    """Of attention, norms, gate and shared expert of one layer with experts; ``share``: each rank's tokens as a multiple of the
    mean."""
    model, width = workload.model, workload.training.dtype.num_bytes
    wide = max(width, 4)
    # The gate keeps its input, the scores and what it chose.
    chosen = model.top_k * (8 + 2 * wide)
    gate = (model.hidden_size + model.num_experts) * wide + chosen
    shared_input = model.hidden_size * width if model.shared_ffn_size and width < wide else 0
    attention = _attention_block_elements(model) * width + gate + shared_input
    # Its inner widths and, where it has a gate, its output and what the gate says.
    shared = (inner_width(workload, model.shared_ffn_size) + model.shared_expert_gate * (model.hidden_size + 1)) * width
    kept = attention + shared
    if Recompute.ATTENTION in recompute:
        kept = model.hidden_size * width + chosen
    elif Recompute.EXPERTS in recompute:
        kept = attention
    tokens = share * float(workload.training.tokens)
    return Held(tokens * kept, tokens * (attention + shared - kept))


def routed_bytes(workload: Workload, served: FloatArray, arrived: FloatArray, recompute: Recompute) -> Held:
    """Of ``arrived`` rows with their weights and ids, and the sums that go back; of each of ``served`` rows the experts' input,
    inner widths and output, and two indices. Where experts ``recompute``, what arrived is kept and nothing else."""
    model, width = workload.model, workload.training.dtype.num_bytes
    row = model.hidden_size * width
    per_served = 2 * row + inner_width(workload, model.expert_ffn_size) * width + 16
    came, made = arrived * (row + model.top_k * (width + 4)), arrived * row + served * per_served
    return Held(came, made) if Recompute.EXPERTS in recompute else Held(came + made, np.zeros_like(made))


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
    """Elements per token kept between a feed-forward's matrices: what enters the activation and what comes out; SwiGLU also keeps
    the other factor and the product."""
    return (2 if workload.model.ffn is Ffn.GELU else 4) * ffn_size
