"""What a pipeline would take, for those who plan without stages: told beside the plan, or where none fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hybridep.commands.plan_choice import MOST_SITES
from hybridep.errors import HybridEPError, InfeasibleError

if TYPE_CHECKING:
    from hybridep.commands.plan_request import PlanRequest

_LIMIT_S = 3.0
"""Or half of the time limit, if that is less; most looks take a fraction of a second."""
_PATIENT_S = 30.0
"""Where no plan is known otherwise."""


@dataclass(frozen=True, kw_only=True)
class StageHint:
    """The best of a few pipelines; a search (``--stages auto``) finds better ones."""

    num_stages: int
    step_s: float
    """As expected."""
    step_usd: float | None
    """What a step costs; None where nothing has a price."""
    wan_bytes: float
    memory_bytes: float
    """Of the fullest rank."""

    @property
    def name(self) -> str:
        """``4 stages (--stages auto)``."""
        return f"{self.num_stages} stages (--stages auto)"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def stage_hint(request: PlanRequest, patience_s: float = _LIMIT_S) -> StageHint | None:
    """What a pipeline takes that is as the request wants its plan, looked for up to ``patience_s``. None where none is known
    to be possible, for one site, or many, and where several plans or codecs are asked for, which a short look leaves alone."""
    from planner import StageWishes, glance
    from planner.stages.costs import predicted

    sites, several = request.cluster.sizes[0], request.for_scenarios or request.pool is not None
    if not 2 <= sites <= MOST_SITES or several or request.max_loss is not None:
        return None
    wishes = StageWishes(
        schedule=request.schedule,
        popularity=() if request.record is None else request.record.popularity(),
        codecs=request.codecs,
        goal=request.goal,
        constraints=request.rules,
    )
    try:
        limit_s, patience_s = (min(one, request.time_limit_s / 2) for one in (_LIMIT_S, patience_s))
        found = glance(request.cluster, request.workload, wishes, limit_s=limit_s, patience_s=patience_s)
    except HybridEPError:
        return None
    if request.goal.overdraft(found.step_usd):
        return None
    said = predicted(found, {})
    return StageHint(
        num_stages=len(found.plan.stages),
        step_s=found.times.step_s,
        step_usd=found.step_usd if request.cluster.has_prices else None,
        wan_bytes=said.wan_bytes,
        memory_bytes=said.memory_bytes,
    )


def with_hint(error: InfeasibleError, request: PlanRequest) -> InfeasibleError:
    """The error of a request that no plan answers, with what a pipeline would take, if one does."""
    from hybridep.units import format_seconds

    hint = stage_hint(request, _PATIENT_S)
    if hint is None:
        return error
    found = f"a short look finds a step of {format_seconds(hint.step_s)}"
    return InfeasibleError(f"{error}. In stages it is possible: {found}, --stages auto searches for the best")
