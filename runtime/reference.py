"""The oracle: the whole model in one process, without any exchange, as plainly as it can be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridep.codecs import TokenCodec
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.run import Run
from hybridep.shares import batch_sequences
from hybridep.workload import Ffn, Model
from runtime.codecs import RowCoder, row_coder
from runtime.data import training_batches, validation_batches
from runtime.expert_bias import ExpertBias
from runtime.initial_weights import InitialWeights, initial_weights
from runtime.mesh import TORCH_DTYPE
from runtime.moe import RoutedExperts
from runtime.optimizer import HomeOptimizer
from runtime.trainable import check_trainable
from runtime.transformer import Transformer


class LocalExperts(RoutedExperts):
    """All experts of a layer, one after the other over all tokens."""

    def __init__(self, model: Model, layer: int, weights: InitialWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self._model = model
        rows = [weights.expert(layer, expert) for expert in range(model.num_experts)]
        self.weights_EP = nn.Parameter(torch.stack(rows).to(dtype))

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """[T, H]."""
        y_TH = torch.zeros_like(x_TH)
        for expert, row_P in enumerate(self.weights_EP.unbind(0)):
            share_T = (weights_TK * (ids_TK == expert)).sum(dim=1)
            tokens = (ids_TK == expert).any(dim=1).nonzero().squeeze(1)
            y_TH = y_TH.index_add(0, tokens, self._expert(x_TH[tokens], row_P) * share_T[tokens, None])
        return y_TH

    def _expert(self, x_NH: Tensor, row_P: Tensor) -> Tensor:
        hidden, width = self._model.hidden_size, self._model.expert_ffn_size
        if self._model.ffn is Ffn.GELU:
            return F.gelu(x_NH @ row_P[: width * hidden].view(width, hidden).T) @ row_P[width * hidden :].view(hidden, width).T
        gate, up, down = row_P.view(3, width * hidden)
        inner = F.silu(x_NH @ gate.view(width, hidden).T) * (x_NH @ up.view(width, hidden).T)
        y_NH: Tensor = inner @ down.view(hidden, width).T
        return y_NH


def code_activations(transformer: Transformer, layers: Sequence[int], codec: TokenCodec) -> None:
    """From now on what enters these layers, and its gradient, is what a pipeline stage that begins there would be sent."""
    coder = row_coder(codec)

    def coded(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        result: Tensor = _Coded.apply(inputs[0], coder)  # type: ignore[no-untyped-call]
        return result

    for layer in layers:
        transformer.layers[str(layer)].register_forward_pre_hook(coded)


class _Coded(torch.autograd.Function):
    """Coded and decoded, forward and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coder: RowCoder) -> Tensor:
        ctx.coder = coder
        return _through(x, coder)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _through(gradients[0], ctx.coder), None


def _through(x: Tensor, coder: RowCoder) -> Tensor:
    return coder.through(x.reshape(-1, x.shape[-1])).view_as(x)


class ReferenceTrainer:
    """Trains what ``runtime.trainer`` trains over ``plan``'s ranks, in one process: same data, same initial values; and what
    passes between stages coded, where a pipeline's does."""

    def __init__(self, run: Run, plan: AnyPlan) -> None:
        for one in plan.plans if isinstance(plan, PipelinePlan) else (plan,):
            check_trainable(one.workload)
        self._workload, self._batch_sequences = plan.workload, batch_sequences(plan.cluster, plan.workload)
        dtype = TORCH_DTYPE[plan.workload.training.dtype]
        model, weights = plan.workload.model, initial_weights(run, plan.workload)
        self.transformer = Transformer(plan.workload, lambda layer: LocalExperts(model, layer, weights, dtype), dtype=dtype)
        self.transformer.initialise(weights)
        self._max_gradient_norm = run.optimizer.max_gradient_norm
        parameters, gradient_dtype = dict(self.transformer.named_parameters()), TORCH_DTYPE[plan.workload.training.gradient_dtype]
        self.optimizer = HomeOptimizer(run.optimizer, parameters, gradient_dtype=gradient_dtype)
        self._expert_bias = ExpertBias(self.transformer.moe_blocks(), model.expert_bias_update_rate)
        if isinstance(plan, PipelinePlan):
            begins = np.cumsum([stage.num_layers for stage in plan.stages])[:-1].tolist()
            code_activations(self.transformer, begins, plan.activation_codec)
        self._batches, self._held_out = training_batches(run, plan.workload), validation_batches(run, plan.workload)

    def step(self, step: int) -> float:
        """One optimizer step over the global batch; returns its mean token loss."""
        training = self._workload.training
        num_sequences = self._batch_sequences * training.micro_batches
        num_tokens = num_sequences * training.sequence_length
        total = 0.0
        together = int(training.micro_batch_size)
        for first in range(0, num_sequences, together):
            tokens, targets = self._batches(step, first, min(together, num_sequences - first))
            loss, balance = self.transformer(tokens, targets)
            (loss / num_tokens + self._workload.model.balance_loss_weight * balance / num_sequences).backward()
            total += loss.item()
        if (most := self._max_gradient_norm) is not None:
            nn.utils.clip_grad_norm_(self.transformer.parameters(), most)
        self.optimizer.step(step)
        self._expert_bias.update()
        return total / num_tokens

    @torch.no_grad()
    def validation_loss(self, batches: int) -> float:
        """Mean token loss of the held-out batches."""
        assert self._held_out is not None
        training, total = self._workload.training, 0.0
        number = self._batch_sequences * training.micro_batches
        for batch in range(1, batches + 1):
            total += float(self.transformer(*self._held_out(batch, 0, number))[0])
        return total / (batches * number * training.sequence_length)

    def parameters(self) -> dict[str, Tensor]:
        """Dense parameters and gates' biases by name, and ``layer{l}.experts`` [E, P]."""
        transformer = self.transformer
        dense: dict[str, Tensor] = {name: p.detach() for name, p in transformer.dense_parameters().items()}
        dense |= transformer.expert_biases()
        for block in transformer.moe_blocks():
            assert isinstance(block.routed, LocalExperts)
            dense[f"layer{block.layer}.experts"] = block.routed.weights_EP.detach()
        return dense
