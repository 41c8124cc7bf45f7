"""What is asked of a pipeline beside its cluster and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridep.codec_losses import permitted, shortest
from hybridep.codecs import EXACT, PAYLOADS, Codecs
from hybridep.errors import UserError
from hybridep.plan import Popularity, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
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
    max_loss: float | None = None
    """Choose codecs between sites whose measured losses add up to at most this, in place of ``codecs``."""
    goal: Goal = FASTEST
    constraints: Constraints | None = None
    """Rules that hold inside stages and along the ways between them (``planner.stages.rules``)."""

    def shortest(self, cluster: Cluster, workload: Workload) -> Codecs:
        """Codecs between sites: those that were given, or, where they are to be chosen, of each kind of payload those whose
        messages are shortest."""
        if self.max_loss is None:
            return self.codecs.get(cluster.levels[0].name, EXACT)
        return shortest(permitted(self.max_loss, PAYLOADS), workload)

    def check(self, cluster: Cluster) -> None:
        """Raises UserError for what does not go together."""
        if self.max_loss is not None and self.codecs:
            raise UserError("codecs given and codecs to be chosen by their loss: leave one of them out")
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
