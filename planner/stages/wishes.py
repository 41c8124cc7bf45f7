"""What is asked of a pipeline beside its cluster and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridep.codecs import Codecs
from hybridep.errors import UserError
from hybridep.plan import Popularity, Schedule
from hybridep.topology import Cluster
from planner.constraints import Constraints
from planner.goal import FASTEST, Goal


@dataclass(frozen=True, kw_only=True)
class StageWishes:
    """What a pipeline is to be; each wish may be left out."""

    stages: int | None = None
    """How many stages; None for any number from 2."""
    solver: str = "highs"
    """Solver that searches inside stages use."""
    schedule: Schedule | None = None
    popularity: Popularity = ()
    """How often each expert was measured to be chosen; all alike without."""
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    """Level name -> how payloads are coded there; exact without."""
    goal: Goal = FASTEST
    constraints: Constraints | None = None
    """Rules that hold inside stages and along the ways between them (``planner.stages.rules``)."""

    def check(self, cluster: Cluster) -> None:
        """Raises UserError for what does not go together."""
        self.goal.require_prices(cluster)
        if self.popularity and self.goal.needs_prices:
            raise UserError(
                "--stages: prices (--objective, --budget) with measured popularity (--routing): searches inside stages know time "
                "only; leave one of them out"
            )
        if self.popularity and self.constraints is not None:
            raise UserError(
                "--stages: measured popularity (--routing) with rules (--constraints): plans layer by layer keep none; leave one "
                "of them out"
            )
