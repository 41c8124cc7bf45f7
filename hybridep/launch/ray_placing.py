"""Which ranks go to one machine of a Ray cluster: those of one worker of the plan's innermost level, as far as it has room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a Ray node offers in all."""

    cpus: int
    gpus: int

    def room(self, per_gpu: int) -> int:
        """Ranks that it takes, so many on each GPU (``ranks_per_gpu``), one on each CPU."""
        return min(self.cpus, self.gpus * per_gpu) if per_gpu else self.cpus


@dataclass(frozen=True, kw_only=True)
class Share:
    """Ranks of one site on one machine; Ray reserves a CPU for each, and this many GPUs."""

    dc: str
    ranks: tuple[int, ...]
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": float(len(self.ranks))} | ({"GPU": float(self.gpus)} if self.gpus else {})


def ranks_per_gpu(ranks: int, gpus: int) -> int:
    """Of a site: 1 where there are enough; 0 where there are none, and none is shared."""
    return math.ceil(ranks / gpus) if gpus else 0


def shares_of(dc: str, ranks: Sequence[int], group: int, machines: Sequence[Machine], *, use_gpus: bool) -> list[Share] | None:
    """How the ranks of a site, ``group`` of which are neighbours on its innermost level, go to its machines; None where
    these have too little room. Each rank has a GPU of its own where there are enough of them, or none where there are none;
    otherwise as many share one everywhere."""
    per_gpu = ranks_per_gpu(len(ranks), sum(machine.gpus for machine in machines) if use_gpus else 0)
    room = [machine.room(per_gpu) for machine in machines]
    held: list[list[int]] = [[] for _ in machines]
    for first in range(0, len(ranks), group):
        left = ranks[first : first + group]
        while left:
            at = max(range(len(room)), key=room.__getitem__, default=None)
            if at is None or room[at] < 1:
                return None
            here, left = left[: room[at]], left[room[at] :]
            held[at] += here
            room[at] -= len(here)
    return [Share(dc=dc, ranks=tuple(here), gpus=math.ceil(len(here) / per_gpu) if per_gpu else 0) for here in held if here]
