"""Routed experts whose tokens travel in parts: what has come is computed while other parts are on the links.

A micro-batch's tokens are cut in ``chunks`` equal parts. All exchanges of tokens run on one thread, all dispatches before all
combines (backward likewise), which is the order on every rank; the experts of a part are computed as soon as it is there. Each
token meets the same experts as in one piece, so only sums over tokens are made in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.dispatch import Counts, Hop
from runtime.routed import Computed, DistributedExperts, Over
from runtime.spans import BACKWARD, EXPERT
from runtime.worker import Worker


class ChunkedExperts(DistributedExperts):
    """One layer's experts on one rank. Copies do not set out ahead of their blocks (``Schedule.prefetch`` 0)."""

    def __init__(self, *arguments: Any, chunks: int, tokens: Worker, **named: Any) -> None:
        """``tokens``: the thread of all layers' token exchanges; the rest as ``DistributedExperts``."""
        super().__init__(*arguments, **named)
        self.chunks, self.tokens = chunks, tokens
        self._counts_ahead: list[list[Counts]] | None = None

    def announce_counts(self) -> None:
        self._counts_ahead = [self.dispatcher.announce_counts() for _ in range(self.chunks)]

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """[T, H]."""
        self.spans.end()
        self.exchange.copies()
        if x_TH.requires_grad:
            x_TH.register_hook(self._dispatch_returned)  # type: ignore[no-untyped-call]
        combined: Tensor = _Chunks.apply(x_TH, weights_TK, self.learning_home, ids_TK, self)  # type: ignore[no-untyped-call]
        if combined.requires_grad:
            combined.register_hook(self._backward_starts)  # type: ignore[no-untyped-call]
        return combined

    def counts_ahead(self) -> list[list[Counts]]:
        """One for each part, announced by now."""
        if self._counts_ahead is None:
            self.announce_counts()
        assert self._counts_ahead is not None
        counts, self._counts_ahead = self._counts_ahead, None
        return counts

    @torch.no_grad()
    def dispatch(
        self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, counts: Sequence[Counts]
    ) -> tuple[Tensor, Tensor, Tensor, list[Hop]]:
        """Of one part; without a graph, as all that follows."""
        return self.dispatcher.dispatch(x_NH, weights_NK, ids_NK, counts)

    @torch.no_grad()
    def combine(self, y_NH: Tensor, hops: Sequence[Hop]) -> Tensor:
        """Of one part."""
        return self.dispatcher.combine(y_NH, hops)


class _Part(NamedTuple):
    """What backward needs of one part: of the experts, and where rows came from."""

    computed: Computed
    hops: list[Hop]


class _Chunks(torch.autograd.Function):
    """Dispatch, experts and combine of all parts in one function, because autograd by itself would run one after the other."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_TK: Tensor, home_nP: Tensor, ids_TK: Tensor, layer: ChunkedExperts) -> Tensor:
        cut = [tensor.detach().tensor_split(layer.chunks) for tensor in (x_TH, weights_TK, ids_TK)]
        arriving = [
            layer.tokens.submit(partial(layer.dispatch, x, weights, ids, counts))
            for x, weights, ids, counts in zip(*cut, layer.counts_ahead(), strict=True)
        ]
        copies, learns = layer.exchange.copies(), any(ctx.needs_input_grad)
        parts, leaving, overs = [], [], []
        for number, arrival in enumerate(arriving, start=1):
            x_NH, weights_NK, ids_NK, hops = arrival.result()
            overs.append(Over.of(hops, x_NH, weights_NK))
            if number == layer.chunks:
                layer.arrived(overs if learns else [])
            layer.spans.begin(EXPERT, layer.name)
            if learns:
                y_NH, computed = layer.compute(x_NH, weights_NK, ids_NK, home_nP, copies)
                parts.append(_Part(computed, hops))
            else:
                y_NH = layer.weighted(ids_NK, x_NH, weights_NK, home_nP, copies)
            layer.spans.end()
            leaving.append(layer.tokens.submit(partial(layer.combine, y_NH, hops)))
        layer.exchange.release()
        ctx.parts, ctx.layer = parts, layer
        return torch.cat([result.result() for result in leaving])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer: ChunkedExperts = ctx.layer
        parts: list[_Part] = ctx.parts
        ctx.parts = None
        exchange, dispatcher = layer.exchange, layer.dispatcher
        arriving = [
            layer.tokens.submit(partial(dispatcher.combine_backward, gradient, part.hops))
            for gradient, part in zip(gradients[0].tensor_split(layer.chunks), parts, strict=True)
        ]
        exchange.copies()
        if layer.below is not None:
            layer.below.announce_backward()
        leaving, shared = [], None
        for arrival in arriving:
            computed, hops = parts.pop(0)
            arrived_NH = arrival.result()
            layer.spans.begin(EXPERT + BACKWARD, layer.name)
            x, weights, *held = layer.gradients(computed, arrived_NH)
            del computed, arrived_NH
            if shared is None:
                shared = held
            else:
                for total, more in zip(shared, held, strict=True):
                    total += more
            layer.spans.end()
            leaving.append(layer.tokens.submit(partial(dispatcher.dispatch_backward, x, weights, hops)))
        assert shared is not None, "a layer has at least one part"
        home, copies = shared
        exchange.release()
        exchange.return_gradient(copies)
        xs, weight_gradients = zip(*(result.result() for result in leaving), strict=True)
        return torch.cat(xs), torch.cat(weight_gradients), layer.left_to_autograd(home), None, None
