"""The oracle: the whole model in one process, without any exchange, as plainly as it can be written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridep.plan import Plan
from hybridep.run import Run
from hybridep.workload import Ffn, Model
from runtime.data import Batches, read_text
from runtime.mesh import TORCH_DTYPE, check_trainable
from runtime.moe import RoutedExperts
from runtime.optimizer import HomeOptimizer
from runtime.transformer import Transformer, initial_expert


class LocalExperts(RoutedExperts):
    """All experts of a layer, one after the other over all tokens."""

    def __init__(self, model: Model, layer: int, *, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._model = model
        rows = [initial_expert(seed, layer, expert, model.expert_params) for expert in range(model.num_experts)]
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


class ReferenceTrainer:
    """Trains what ``runtime.trainer`` trains over ``plan``'s ranks, in one process: same data, same initial values."""

    def __init__(self, run: Run, plan: Plan) -> None:
        check_trainable(plan)
        self._workload, self._num_ranks = plan.workload, plan.cluster.num_gpus
        dtype = TORCH_DTYPE[plan.workload.training.dtype]
        model = plan.workload.model
        self.transformer = Transformer(
            plan.workload, lambda layer: LocalExperts(model, layer, seed=run.seed, dtype=dtype), dtype=dtype
        )
        self.transformer.initialise(run.seed)
        self.optimizer = HomeOptimizer(run.optimizer, dict(self.transformer.named_parameters()))
        length = plan.workload.training.sequence_length
        self._batches = Batches(read_text(run.data), length=length, seed=run.seed)

    def step(self, step: int) -> float:
        """One optimizer step over the global batch; returns its mean token loss."""
        training = self._workload.training
        num_sequences = training.micro_batch_size * training.micro_batches * self._num_ranks
        num_tokens = num_sequences * training.sequence_length
        total = 0.0
        for first in range(0, num_sequences, training.micro_batch_size):
            tokens, targets = self._batches(step, first, training.micro_batch_size)
            loss, balance = self.transformer(tokens, targets)
            (loss / num_tokens + self._workload.model.balance_loss_weight * balance / num_sequences).backward()
            total += loss.item()
        self.optimizer.step(step)
        return total / num_tokens

    def parameters(self) -> dict[str, Tensor]:
        """Dense parameters by name, and ``layer{l}.experts`` [E, P]."""
        dense: dict[str, Tensor] = {name: p.detach() for name, p in self.transformer.dense_parameters().items()}
        for block in self.transformer.moe_blocks():
            assert isinstance(block.routed, LocalExperts)
            dense[f"layer{block.layer}.experts"] = block.routed.weights_EP.detach()
        return dense
