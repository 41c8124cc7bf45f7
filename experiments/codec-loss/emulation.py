"""Sites that train one model with coded exchanges, one after the other in one process, with the codecs of the runtime.

Every site runs its own sequences forward and backward, so that all that would travel exists and passes through the same coders,
in the same order, as in a distributed run; tests/runtime/codecs/test_emulated_sites.py compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridep.codecs import Codecs, ExpertCodec
from hybridep.placement import expert_homes
from hybridep.plan import Plan
from hybridep.run import Run
from hybridep.traffic import split_sizes
from runtime.codecs import RowCoder, expert_coder, gradient_coder, row_coder
from runtime.codecs.experts import ChangeCoder
from runtime.data import training_batches
from runtime.dense_reduce import flat_gradients
from runtime.experts import grouped_feed_forward
from runtime.initial_weights import Seeded
from runtime.mesh import TORCH_DTYPE
from runtime.moe import RoutedExperts
from runtime.optimizer import HomeOptimizer
from runtime.transformer import Transformer


class EmulatedSites:
    """Trains ``plan``, whose cluster is one level of sites with one rank each and which either copies all experts everywhere or
    none."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._workload, self._num_sites = plan.workload, plan.cluster.num_gpus
        codecs = plan.level_codecs[0]
        dtype = TORCH_DTYPE[plan.workload.training.dtype]
        copies = plan.layers[0].domains.get(plan.cluster.levels[0].name, 1) == self._num_sites
        weights = Seeded(plan.workload.model, run.seed)
        self.layers: list[SiteExperts] = []

        def make(layer: int) -> RoutedExperts:
            self.layers.append(SiteExperts(plan, codecs, partial(weights.expert, layer), copies=copies))
            return self.layers[-1]

        self.transformer = Transformer(plan.workload, make, dtype=dtype)
        self.transformer.initialise(weights)
        self.dense = self.transformer.dense_parameters()
        self.optimizer = HomeOptimizer(run.optimizer, dict(self.transformer.named_parameters()))
        self._dense_gradient = flat_gradients(list(self.dense.values()), dtype)
        self._batches = training_batches(run, plan.workload)
        self._coders = [gradient_coder(codecs, dtype) for _ in range(self._num_sites)]

    def step(self, step: int) -> float:
        """One optimizer step; returns the mean token loss of the global batch."""
        training = self._workload.training
        num_sequences = training.micro_batch_size * self._num_sites
        num_tokens = num_sequences * training.sequence_length
        weight = self._workload.model.balance_loss_weight / num_sequences
        for layer in self.layers:
            layer.gather()
        total, dense = 0.0, []
        for site in range(self._num_sites):
            for layer in self.layers:
                layer.site = site
            loss, balance = self.transformer(*self._batches(step, site * training.micro_batch_size, training.micro_batch_size))
            (loss / num_tokens + weight * balance).backward()
            total += loss.item()
            dense.append(self._dense_gradient.clone())
            self._dense_gradient.zero_()
        self._dense_gradient.copy_(self._reduce(dense))
        for layer in self.layers:
            layer.return_gradients()
        self.optimizer.step(step)
        return total / num_tokens

    def _reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """[D]: what ``runtime.dense_reduce`` makes of the sites' gradients."""
        sizes = split_sizes(len(gradients[0]), self._num_sites)
        parts = [torch.split(gradient, sizes) for gradient in gradients]
        summed = []
        for owner, length in enumerate(sizes):
            total = torch.zeros_like(parts[owner][owner])
            for site, coder in enumerate(self._coders):
                part = parts[site][owner]
                if coder is not None and site != owner:
                    part = coder.decode(coder.encode(f"part{owner}", part), length, part.dtype)
                total += part
            coder = self._coders[owner]
            summed.append(total if coder is None else coder.decode(coder.encode("sum", total), length, total.dtype))
        return torch.cat(summed)


class SiteExperts(RoutedExperts):
    """One layer's experts at all sites; ``site`` says whose tokens pass. All sites' copies are the same, so there is one."""

    def __init__(self, plan: Plan, codecs: Codecs, initial: Any, *, copies: bool) -> None:
        super().__init__()
        model = plan.workload.model
        dtype = TORCH_DTYPE[plan.workload.training.dtype]
        self._ffn, self._num_sites = model.ffn, plan.cluster.num_gpus
        self.home = torch.from_numpy(expert_homes(model.num_experts, self._num_sites))
        rows = [initial(expert) for expert in range(model.num_experts)]
        self.weights_EP = nn.Parameter(torch.stack(rows).to(dtype))
        self.site = 0
        self._copies_travel = copies
        self._rows = row_coder(codecs.tokens)
        self._shared = self.weights_EP.detach().mean(dim=0)
        self._renews_shared = codecs.experts is ExpertCodec.SHARED_RESIDUAL
        self._coder = expert_coder(codecs, model.expert_params, dtype, lambda: self._shared)
        if isinstance(self._coder, ChangeCoder):
            self._coder.sent = {expert: row.clone() for expert, row in enumerate(self.weights_EP.detach())}
        self._gradients = [gradient_coder(codecs, dtype) for _ in range(self._num_sites)]
        self.copies_EP = self.weights_EP.detach().clone()
        self._used: list[Tensor] = []

    def gather(self) -> None:
        """The copies of this step."""
        weights = self.weights_EP.detach()
        if self._coder is None:
            self.copies_EP.copy_(weights)
        elif self._copies_travel:
            for expert, row in enumerate(weights):
                self._coder.decode(self._coder.encode(expert, row), self.copies_EP[expert])
        self._used = [self.copies_EP.clone().requires_grad_() for _ in range(self._num_sites)]

    def return_gradients(self) -> None:
        """Gradients of the copies, coded, go home."""
        if self._copies_travel:
            assert self.weights_EP.grad is not None
            length = self.weights_EP.shape[1]
            for site, used in enumerate(self._used):
                assert used.grad is not None
                for expert, home in enumerate(self.home.tolist()):
                    if home != site:
                        gradient, coder = used.grad[expert], self._gradients[site]
                        if coder is not None:
                            gradient = coder.decode(coder.encode(expert, gradient), length, gradient.dtype)
                        self.weights_EP.grad[expert] += gradient
        if self._renews_shared:
            self._shared = self.weights_EP.detach().mean(dim=0)

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """[T, H]."""
        if self._copies_travel:
            at_home = (self.home == self.site)[:, None]
            return self._compute(x_TH, weights_TK, ids_TK, torch.where(at_home, self.weights_EP, self._used[self.site]))
        y_TH = torch.zeros_like(x_TH)
        for server in range(self._num_sites):
            there_TK = self.home[ids_TK] == server
            rows = there_TK.any(dim=1).nonzero().squeeze(1)
            ids = torch.where(there_TK[rows], ids_TK[rows], -1)
            x, weights = x_TH[rows], weights_TK[rows]
            if server == self.site:
                y = self._compute(x, weights, ids, self.weights_EP)
            else:
                coded = _CodedBothWays.apply(x, self._rows)  # type: ignore[no-untyped-call]
                y = self._compute(coded, weights, ids, self.weights_EP)
                y = _CodedBothWays.apply(y, self._rows)  # type: ignore[no-untyped-call]
            y_TH = y_TH.index_add(0, rows, y)
        return y_TH

    def _compute(self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, experts_EP: Tensor) -> Tensor:
        """As ``runtime.routed``."""
        row, slot = (ids_NK >= 0).nonzero(as_tuple=True)
        expert = ids_NK[row, slot]
        order = expert.argsort(stable=True)
        row, slot = row[order], slot[order]
        counts = torch.bincount(expert, minlength=len(experts_EP)).tolist()
        y = grouped_feed_forward(x_NH[row], counts, experts_EP.unbind(0), ffn=self._ffn) * weights_NK[row, slot, None]
        return torch.zeros_like(x_NH).index_add(0, row, y)


class _CodedBothWays(torch.autograd.Function):
    """Rows on their way there, their gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, coder: RowCoder) -> Tensor:
        ctx.coder = coder
        return coder.through(x_NH).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NH = gradients[0]
        return ctx.coder.through(x_NH), None
