"""What one layer's copies need to travel coded: a coder per level and direction, and what both ends keep between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from torch import Tensor

from hybridep.codecs import EXACT, ExpertCodec
from hybridep.placement import Placement
from hybridep.traffic import SHARED
from runtime.codecs import expert_coder, gradient_coder
from runtime.codecs.experts import ChangeCoder
from runtime.codecs.gradients import TopKCoder
from runtime.dense_reduce import DenseReduce, Exchange
from runtime.mesh import Mesh


class CopyCodecs:
    """Of one layer on one rank. ``home_nP`` are its experts at home; lists are by level, None where nothing is coded."""

    def __init__(self, mesh: Mesh, exchange: Exchange, placement: Placement, home_nP: Tensor) -> None:
        in_use = {move.level for move in placement.moves}
        by_level = [codecs if level in in_use else EXACT for level, codecs in enumerate(mesh.plan.level_codecs)]
        length, dtype = home_nP.shape[1], home_nP.dtype
        self.experts = [expert_coder(codecs, length, dtype, self._the_shared) for codecs in by_level]
        self.gradients = [gradient_coder(codecs, dtype) for codecs in by_level]
        self.shared: Tensor | None = None
        """[P]: mean of the layer's experts as they were before the last optimizer step, the same on all ranks; kept only
        where something is coded against it."""
        if any(codecs.experts is ExpertCodec.SHARED_RESIDUAL for codecs in by_level):
            self.shared = home_nP.new_zeros(length)
        self._home, self._num_experts = home_nP, placement.num_experts
        self._sent = {(move.level, expert) for move in placement.moves if move.src == mesh.rank for expert in move.experts}
        self._sum = DenseReduce(mesh, exchange, ops=SHARED, coded=False)

    @property
    def keep_copies(self) -> bool:
        """Both ends go on from the copies of the last step."""
        return any(isinstance(coder, ChangeCoder) for coder in self.experts)

    def prime(self, expert_P: Callable[[int], Tensor]) -> None:
        """``expert_P`` gives what any expert is by now; receivers must begin with the same copies."""
        if self.shared is not None:
            self.shared.zero_()
            for expert in range(self._num_experts):
                self.shared += expert_P(expert).to(self.shared) / self._num_experts
        for level, expert in self._sent:
            coder = self.experts[level]
            if isinstance(coder, ChangeCoder):
                coder.sent[expert] = expert_P(expert).to(self._home, copy=True)

    def renew_shared(self) -> None:
        """Bring the shared expert up to the present experts. All ranks call it."""
        assert self.shared is not None
        mean = self._home.sum(dim=0) / self._num_experts
        self._sum(mean)
        self.shared.copy_(mean)

    def state(self) -> dict[str, Tensor]:
        """By name; empty where nothing is kept."""
        state = {} if self.shared is None else {"shared": self.shared}
        for kind, level, kept in self._kept():
            state |= {f"{kind}.{level}.{expert}": value for expert, value in kept.items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        if self.shared is not None:
            self.shared.copy_(state["shared"])
        for kind, level, kept in self._kept():
            for name, value in state.items():
                if name.startswith(f"{kind}.{level}."):
                    kept[int(name.rpartition(".")[2])] = value.to(self._home.device, copy=True)

    def _the_shared(self) -> Tensor:
        assert self.shared is not None
        return self.shared

    def _kept(self) -> list[tuple[str, int, dict[Hashable, Tensor]]]:
        """(name, level, expert -> tensor) of everything that coders keep."""
        found: list[tuple[str, int, dict[Hashable, Tensor]]] = []
        for level, coder in enumerate(self.experts):
            if isinstance(coder, ChangeCoder):
                found.append(("sent", level, coder.sent))
        for level, gradients in enumerate(self.gradients):
            if isinstance(gradients, TopKCoder):
                found.append(("unsent", level, gradients.unsent))
        return found
