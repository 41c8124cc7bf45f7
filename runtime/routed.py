"""Routed experts spread over ranks: dispatch, experts at their servers, combine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridep.recompute import Recompute
from hybridep.workload import Model
from runtime.dispatch import Counts, Dispatcher, Hop
from runtime.expert_exchange import ExpertExchange
from runtime.kernels.local import weighted_experts
from runtime.moe import RoutedExperts
from runtime.seeds import entering, seeded
from runtime.spans import BACKWARD, EXPERT, PRE_EXPERT, SpanRecorder


class Over(NamedTuple):
    """What a forward went over."""

    hops: list[Hop]
    like_NH: Tensor
    """No elements: type and width of rows is what counts, and of their weights."""
    like_NK: Tensor

    @classmethod
    def of(cls, hops: list[Hop], x_NH: Tensor, weights_NK: Tensor) -> Over:
        """Without a view of what came, which would keep it."""
        return cls(hops, x_NH.new_empty(0, x_NH.shape[1]), weights_NK.new_empty(0, weights_NK.shape[1]))


class Computed(NamedTuple):
    """What the experts' backward needs."""

    inputs: list[Tensor]
    """Leaves of rows, weights, experts at home and copies; of the first two without memory, unless experts compute again."""
    ids_NK: Tensor
    output: Tensor | None
    """A scalar whose backward begins with ``seeds``; None where experts compute again."""
    seeds: list[Tensor]


class DistributedExperts(RoutedExperts):
    """One layer's experts on one rank. ``home`` [n_home, P] are the experts whose master weights live here."""

    def __init__(
        self,
        model: Model,
        home: nn.Parameter,
        exchange: ExpertExchange,
        dispatcher: Dispatcher,
        spans: SpanRecorder,
        *,
        layer: int,
        recompute: Recompute = Recompute.NOTHING,
        padded_E: Tensor | None = None,
    ) -> None:
        """``recompute``: as ``LayerGroup.recompute``. ``padded_E``: how many rows each expert computes here, whatever arrives;
        None: those that arrive."""
        super().__init__()
        self.spans, self.name = spans, f"layer {layer}"
        self.home = home
        self.exchange, self.dispatcher = exchange, dispatcher
        self.ahead: tuple[ExpertExchange, ...] = (exchange,)
        """Whose copies may set out with this layer's forward: its own, then those of layers that follow."""
        self.ahead_backward: tuple[ExpertExchange, ...] = (exchange,)
        """With its backward, where copies live for one micro-batch: its own, then those of layers before it."""
        self.returned_by_now: ExpertExchange | None = None
        """Whose gradients must be home before this layer makes new ones: with copies per micro-batch, memory is short."""
        self.below: DistributedExperts | None = None
        """The layer whose backward follows; None for the lowest."""
        self.above: DistributedExperts | None = None
        """The layer whose forward follows; None for the topmost."""
        self._counts: list[Counts] | None = None
        self.gathers_early = False
        """Copies set out when the step begins, not with their block."""
        self.returns_late = False
        """Copies' gradients of a step wait until the step's last backward is through: in a pipeline the stage before waits for
        that."""
        self.backward_follows = True
        """Of the topmost layer: its backward comes next after its forward, of the same micro-batch."""
        self._overs: deque[Sequence[Over]] = deque()
        """Of each forward, in order, until its backward is announced."""
        self._ffn, self._padded_E = model.ffn, padded_E
        self.recompute, self._again = recompute, Recompute.EXPERTS in recompute
        place_E = torch.full((model.num_experts,), -1, dtype=torch.int32)
        place_E[torch.tensor(exchange.held, dtype=torch.int64)] = torch.arange(len(exchange.held), dtype=torch.int32)
        self._place_E = place_E.to(home.device)

    def prepare(self) -> None:
        """Copies set out while attention and gate compute."""
        self.spans.begin(PRE_EXPERT, self.name)
        for exchange in self.ahead:
            exchange.start_gather()

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """[T, H]."""
        self.spans.end()
        if not self.exchange.prefetch:
            self.exchange.copies()
        if x_TH.requires_grad:
            x_TH.register_hook(self._dispatch_returned)  # type: ignore[no-untyped-call]
        counts, self._counts = self._counts, None
        x_NH, weights_NK, ids_NK, hops = self.dispatcher.dispatch(x_TH, weights_TK, ids_TK, counts)
        self.arrived([Over.of(hops, x_NH, weights_NK)] if x_NH.requires_grad else [])
        y_NH = _Experts.apply(x_NH, weights_NK, self.learning_home, ids_NK, self)  # type: ignore[no-untyped-call]
        combined = self.dispatcher.combine(y_NH, hops)
        if combined.requires_grad:
            combined.register_hook(self._backward_starts)  # type: ignore[no-untyped-call]
        return combined

    @property
    def learning_home(self) -> Tensor:
        """[n_home, P]: so that nothing is kept for a backward where there is none."""
        return self.home if torch.is_grad_enabled() else self.home.detach()

    def arrived(self, overs: Sequence[Over]) -> None:
        """All rows of a dispatch are here: peers hear of what is awaited after the combine before the combine itself. ``overs``:
        what backward will go over, if there is one."""
        if self.above is not None:
            self.above.announce_counts()
        if overs:
            self._overs.append(overs)
        if self.above is None and self.backward_follows:
            self.announce_backward()

    def announce_counts(self) -> None:
        """Other ranks hear that the counts of this layer's next dispatch are awaited."""
        self._counts = self.dispatcher.announce_counts()

    def announce_backward(self) -> None:
        """Other ranks hear that the gradients of this layer's combine and dispatch are awaited: of the first forward that
        they know nothing of."""
        for over in self._overs.popleft() if self._overs else ():
            self.dispatcher.announce_backward(*over)

    def _backward_starts(self, _: Tensor) -> None:
        self.spans.end()
        if not self.exchange.prefetch:
            self.exchange.wait_for_returns()
        # With microbatch residency the copies are needed again: they travel beside the combine's gradients.
        for exchange in self.ahead_backward:
            exchange.start_gather()

    def _dispatch_returned(self, _: Tensor) -> None:
        if not self.returns_late:
            self.exchange.start_return()
        self.spans.begin(PRE_EXPERT + BACKWARD, self.name)

    def compute(
        self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, home_nP: Tensor, copies_mP: Tensor
    ) -> tuple[Tensor, Computed]:
        """[N, H]: for each row the weighted sum over its experts that are served here; and what ``gradients`` needs, with a small
        graph of its own, so that forward can free the copies' memory and backward can fetch them again."""
        # The copies' storage is emptied and refilled between forward and backward; ``data`` has a version of its own, so autograd
        # does not take the refill for a change of saved values.
        stores = [tensor.detach().requires_grad_() for tensor in (home_nP, copies_mP.data)]
        if self._again:
            inputs = [tensor.detach().requires_grad_() for tensor in (x_NH, weights_NK)] + stores
            with torch.no_grad():
                return self.weighted(ids_NK, *inputs), Computed(inputs, ids_NK, None, [])
        # Rows that came and sums that go back are gone by backward, which needs neither.
        (x_leaf, x_NH), (weights_leaf, weights_NK) = entering(x_NH), entering(weights_NK)
        seeds = list[Tensor]()
        with torch.enable_grad():
            y_NH = self.weighted(ids_NK, x_NH, weights_NK, *stores)
        return y_NH.detach(), Computed([x_leaf, weights_leaf, *stores], ids_NK, seeded([y_NH], seeds), seeds)

    def gradients(self, computed: Computed, gradient_NH: Tensor) -> tuple[Tensor, ...]:
        """Of rows, weights, experts at home and copies."""
        inputs, ids_NK, output, seeds = computed
        seeds.append(gradient_NH)
        if output is None:
            with torch.enable_grad():
                output = seeded([self.weighted(ids_NK, *inputs)], seeds)
        return torch.autograd.grad(output, inputs, allow_unused=True, materialize_grads=True)

    def left_to_autograd(self, gradient_nP: Tensor) -> Tensor | None:
        """Of the experts at home, unless the sum over micro-batches is wider: then it is added here, one expert after the other,
        since autograd would make it all wide at once."""
        total_nP = self.home.grad
        if total_nP is None or total_nP.dtype is gradient_nP.dtype:
            return gradient_nP
        for total, gradient in zip(total_nP, gradient_nP, strict=True):
            total += gradient
        return None

    def weighted(self, ids_NK: Tensor, x_NH: Tensor, weights_NK: Tensor, home: Tensor, copies: Tensor) -> Tensor:
        """[N, H], in whatever graph is open."""
        if self._padded_E is None:
            return weighted_experts(x_NH, weights_NK, ids_NK, self._place_E, home, copies, ffn=self._ffn)
        number = len(x_NH)
        x_NH, weights_NK, ids_NK = _padded(x_NH, weights_NK, ids_NK, self._padded_E)
        return weighted_experts(x_NH, weights_NK, ids_NK, self._place_E, home, copies, ffn=self._ffn)[:number]


def _padded(x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, rows_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of zeros behind the others, so that each expert is chosen ``rows_E`` times."""
    chosen_E = torch.bincount(ids_NK[ids_NK >= 0].long(), minlength=len(rows_E))
    expert_M = torch.arange(len(rows_E), dtype=ids_NK.dtype, device=ids_NK.device).repeat_interleave(rows_E - chosen_E)
    ids_MK = torch.full((len(expert_M), ids_NK.shape[1]), -1, dtype=ids_NK.dtype, device=ids_NK.device)
    ids_MK[:, 0] = expert_M
    x_MH, weights_MK = x_NH.new_zeros(len(expert_M), x_NH.shape[1]), weights_NK.new_zeros(ids_MK.shape)
    return torch.cat([x_NH, x_MH]), torch.cat([weights_NK, weights_MK]), torch.cat([ids_NK, ids_MK])


class _Experts(torch.autograd.Function):
    """The experts' computation, whose backward hands over the copies' gradient the moment it is complete."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weights_NK: Tensor, home_nP: Tensor, ids_NK: Tensor, layer: DistributedExperts) -> Tensor:
        copies = layer.exchange.copies()
        layer.spans.begin(EXPERT, layer.name)
        if not any(ctx.needs_input_grad):
            y_NH = layer.weighted(ids_NK, x_NH, weights_NK, home_nP, copies)
        else:
            y_NH, ctx.computed = layer.compute(x_NH, weights_NK, ids_NK, home_nP, copies)
            ctx.layer = layer
        layer.spans.end()
        layer.exchange.release()
        return y_NH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, spans = ctx.layer.exchange, ctx.layer.spans
        if ctx.layer.returned_by_now is not None:
            ctx.layer.returned_by_now.finish_return()
        exchange.copies()
        if ctx.layer.below is not None:
            ctx.layer.below.announce_backward()
        spans.begin(EXPERT + BACKWARD, ctx.layer.name)
        x, weights, home, copies = ctx.layer.gradients(ctx.computed, gradients[0])
        ctx.computed = None
        spans.end()
        exchange.release()
        exchange.return_gradient(copies)
        return x, weights, ctx.layer.left_to_autograd(home), None, None
