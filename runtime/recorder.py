"""Keeps what the gates choose while a rank trains, and brings all ranks' records together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.routing import RoutingRecord
from runtime.barrier import Barrier
from runtime.gate import Gated
from runtime.moe import MoeBlock


class RoutingRecorder:
    """Counts every choice of one rank; while ``whole`` is set, keeps the choices themselves too."""

    def __init__(
        self, blocks: Iterable[MoeBlock], *, num_layers: int, num_experts: int, most_tokens: int, device: torch.device
    ) -> None:
        """``most_tokens``: of any rank in one micro-batch; records of ranks with fewer are filled up with -1."""
        self.whole, self._most_tokens = False, most_tokens
        self._chosen_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._choices: dict[tuple[int, int], Tensor] = {}
        self._seen: Counter[int] = Counter()
        for block in blocks:
            block.routing_hook = self._see

    def _see(self, layer: int, gated: Gated) -> None:
        if not torch.is_grad_enabled():
            return  # of a validation
        # On a GPU nothing waits: bincount would, for its length.
        chosen = gated.chosen_TK.flatten()
        self._chosen_LE[layer].index_add_(0, chosen, torch.ones_like(chosen))
        if self.whole:
            ids_TK = gated.ids_TK.detach().to(torch.int32, copy=True)
            self._choices[layer, self._seen[layer]] = F.pad(ids_TK, (0, 0, 0, self._most_tokens - len(ids_TK)), value=-1)
            self._seen[layer] += 1

    @property
    def chosen(self) -> Tensor:
        """[MoE layers, E]: how often this rank's tokens chose each expert so far."""
        return self._chosen_LE

    def chosen_by_all(self, barrier: Barrier) -> Tensor | None:
        """At rank 0 the sum of all ranks' ``chosen``; all ranks call it."""
        counts = barrier.gather(self._chosen_LE.cpu())
        return None if counts is None else torch.stack(counts).sum(dim=0)

    def go_on_from(self, chosen_LE: Tensor | None) -> None:
        """This rank counts what all had chosen before the run was resumed, where that is known."""
        if chosen_LE is not None:
            self._chosen_LE += chosen_LE.to(self._chosen_LE.device)

    def collect(self, barrier: Barrier) -> RoutingRecord | None:
        """At rank 0 the record of all ranks; all ranks call it, with the same choices kept."""
        chosen_LE = self.chosen_by_all(barrier)
        choices = {key: barrier.gather(ids.cpu()) for key, ids in sorted(self._choices.items())}
        if chosen_LE is None:
            return None
        return RoutingRecord(
            chosen=chosen_LE.numpy(),
            choices={key: np.stack([ids.numpy() for ids in found]).astype(np.int64) for key, found in choices.items() if found},
        )
