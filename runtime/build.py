"""The model of one rank: a transformer whose routed experts are spread over the ranks of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from hybridep.plan import Residency
from hybridep.recompute import Recompute
from hybridep.traffic import served_copies
from runtime.checkpoint_files import expert_name
from runtime.chunked import ChunkedExperts
from runtime.dispatch import Dispatcher
from runtime.expert_exchange import CopyStream, ExpertExchange
from runtime.initial_weights import InitialWeights
from runtime.mesh import Mesh
from runtime.moe import RoutedExperts
from runtime.routed import DistributedExperts
from runtime.spans import SpanRecorder
from runtime.transformer import Transformer
from runtime.transport import Transport
from runtime.worker import Worker


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A rank's transformer and the exchanges inside it, by MoE layer."""

    transformer: Transformer
    routed: tuple[DistributedExperts, ...]
    tokens: Worker | None
    """The thread on which they travel, where they do so in parts."""
    first_moe_layer: int = 0
    """MoE layers of the whole model before these."""

    def start_backward(self) -> None:
        """Backward begins, of the micro-batch that is longest here: the first copies that it needs again may set out."""
        self.routed[-1].announce_backward()
        for exchange in self.routed[-1].ahead_backward[: self.routed[-1].exchange.prefetch]:
            exchange.start_gather()

    def start_step(self) -> None:
        """A step begins. Where micro-batches come from another stage, copies travel while the first one is awaited."""
        for experts in self.routed:
            if experts.gathers_early:
                experts.exchange.start_gather()

    def close(self) -> None:
        """End the thread."""
        if self.tokens is not None:
            self.tokens.close()

    def home_parameters(self) -> dict[str, nn.Parameter]:
        """[n_home, P] per layer: the experts whose master weights this rank keeps."""
        return {expert_name(self.first_moe_layer + layer): experts.home for layer, experts in enumerate(self.routed)}


def build_rank_model(
    mesh: Mesh, transport: Transport, stream: CopyStream, spans: SpanRecorder, weights: InitialWeights
) -> RankModel:
    """Build and initialise."""
    workload = mesh.plan.workload
    model = workload.model
    placed = {layers.first_layer + offset: layers for layers in mesh.plan.placed for offset in range(layers.num_layers)}
    dispatchers = {id(placement): Dispatcher(mesh, placement, transport) for placement in mesh.plan.placements}
    routed: list[DistributedExperts] = []
    tokens = Worker("tokens") if mesh.plan.schedule.chunks > 1 else None

    def make(layer: int) -> RoutedExperts:
        layers = placed[layer]
        group, placement = layers.group, layers.placement

        def first_weights(expert: int) -> torch.Tensor:
            return weights.expert(mesh.first_moe_layer + layer, expert)

        experts = np.flatnonzero(placement.home == mesh.rank).tolist()
        home = nn.Parameter(torch.empty(len(experts), model.expert_params, dtype=mesh.dtype, device=mesh.device))
        with torch.no_grad():
            for row, expert in enumerate(experts):
                home[row] = first_weights(expert)
        exchange = ExpertExchange(mesh, placement, transport, stream, home_nP=home, residency=group.residency)
        exchange.prime(first_weights)
        padded = None
        if model.pad_expert_input_to_capacity:
            padded = torch.from_numpy(served_copies(placement, layers.gating)[mesh.rank].astype(np.int64)).to(mesh.device)
        parts, again = (model, home, exchange, dispatchers[id(placement)], spans), Recompute.EXPERTS in group.recompute
        if tokens is not None:
            chunks = mesh.plan.schedule.chunks
            routed.append(ChunkedExperts(*parts, layer=layer, recompute=again, chunks=chunks, tokens=tokens))
        else:
            routed.append(DistributedExperts(*parts, layer=layer, recompute=again, padded_E=padded))
        return routed[-1]

    transformer = Transformer(workload, make, dtype=mesh.dtype)
    transformer.initialise(weights)
    # In place: the experts are there already, and exchanges hold their parameters.
    transformer.to(mesh.device)
    for below, above in pairwise(routed):
        above.below, below.above = below, above
    _look_ahead(routed, mesh.plan.schedule.prefetch, [group.residency for _, group, _ in mesh.plan.each_layer()])
    training = workload.training
    for experts, (_, group, _) in zip(routed, mesh.plan.each_layer(), strict=True):
        lasts = mesh.stage > 0 and group.residency is Residency.STEP
        experts.gathers_early, experts.returns_late = lasts, lasts and training.micro_batches > 1
    # Only at the end of a pipeline does the backward of a micro-batch follow its forward at once.
    routed[-1].backward_follows = model.has_head
    return RankModel(transformer=transformer, routed=tuple(routed), tokens=tokens, first_moe_layer=mesh.first_moe_layer)


def _look_ahead(routed: Sequence[DistributedExperts], prefetch: int, residencies: Sequence[Residency]) -> None:
    """Tell each layer which others' copies set out with it."""
    exchanges = [experts.exchange for experts in routed]
    for layer, experts in enumerate(routed):
        experts.ahead = tuple(exchanges[layer : layer + prefetch + 1])
        experts.ahead_backward = tuple(exchanges[max(layer - prefetch, 0) : layer + 1][::-1])
        after = layer + prefetch + 1
        if prefetch and after < len(routed) and residencies[after] is Residency.MICROBATCH:
            experts.returned_by_now = exchanges[after]
