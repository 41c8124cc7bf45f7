"""How the tokens of a block travel to their experts and back: as the runtime has it, or as other systems do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from simulator.errors import SimulationError


class Route(Enum):
    """Which way a row takes."""

    HOPS = "hops"
    """One exchange per level, outermost first (with rows per choice: Tutel's two-dimensional hierarchical All-to-All, which
    takes the levels the other way round; on equal workers each level carries the same)."""
    DIRECT = "direct"
    """Straight to the rank that serves the expert, all destinations at once (a plain All-to-All, as NCCL's)."""


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """The exchanges around the experts of one block, forward and backward alike."""

    route: Route = Route.HOPS
    per_choice: bool = False
    """A row per chosen expert, its gate weight left at home; or a row per destination, weighted and summed there."""
    chunks: int | None = None
    """Pipelining degree, None: the plan's. Tokens move in so many equal parts, and a part is computed while others are on the
    links. A rank's exchanges keep one order, all dispatches before all combines. Every part pays the latencies and the experts'
    fixed overheads anew."""

    def __post_init__(self) -> None:
        if self.chunks is not None and self.chunks < 1:
            raise SimulationError(f"chunks: {self.chunks} must be at least 1")
        if self.route is Route.DIRECT and not self.per_choice:
            raise SimulationError("route direct: has rows per choice only")

    @property
    def text(self) -> str:
        """In few words: ``hops, a row per choice, degree 2``."""
        rows = "a row per choice" if self.per_choice else "a row per destination"
        return f"{self.route.value}, {rows}, degree {self.chunks or 'of the plan'}"
