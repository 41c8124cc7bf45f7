"""What ``hybridep plan`` is asked for, and the plans that answer it: one kind of search for each kind of wish."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridep.codecs import Codecs
    from hybridep.commands.plan_choice import SimulatedChoice
    from hybridep.plan import Plan, Schedule
    from hybridep.routing import Routing, RoutingRecord
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import Constraints, PooledPlan, RobustPlan
    from planner.goal import Goal


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of ``hybridep plan`` that decide which plans are made, read and named as there."""

    cluster: Cluster
    workload: Workload
    solver: str
    time_limit_s: float
    schedule: Schedule | None
    rules: Constraints | None
    codecs: dict[str, Codecs]
    goal: Goal
    prefetch: bool
    most_chunks: int
    top: int
    simulate: bool | None
    """None leaves it to ``plan_choice.decides``."""
    compare: bool
    scenarios: tuple[Cluster, ...]
    """The cluster at other rates, where these are not known."""
    quantile: float
    pool: float | None
    max_loss: float | None
    record: RoutingRecord | None
    record_path: Path | None

    @property
    def for_scenarios(self) -> bool:
        """Rates are not known."""
        return bool(self.scenarios)

    @property
    def _by_time(self) -> bool:
        others = self.for_scenarios or self.goal.needs_prices
        return not (others or self.pool is not None or self.max_loss is not None)

    @property
    def is_simulated(self) -> bool:
        """Simulations choose."""
        from hybridep.commands import plan_choice

        if self.simulate is not None:
            return self.simulate
        return self._by_time and self.top == 1 and plan_choice.decides(self.cluster, self.workload)

    def recorded(self) -> Sequence[Routing]:
        """Steps whose every choice is known, where simulations are asked for; else these have the popularity that plans have."""
        return self.record.steps(self.workload) if self.record is not None and self.simulate else []

    def searched(self, time_limit_s: float, report: Any = None) -> dict[str, Any]:
        """Arguments of ``planner.plan`` and ``planner.plans``."""
        return {
            "solver": self.solver,
            "time_limit_s": time_limit_s,
            "schedule": self.schedule,
            "constraints": self.rules,
            "popularity": () if self.record is None else self.record.popularity(),
            "ahead": self.prefetch,
            "most_chunks": self.most_chunks,
            "codecs": self.codecs,
            "max_loss": self.max_loss,
            "goal": self.goal,
            "free_homes": True,
            "report": report,
        }


@dataclass(frozen=True, kw_only=True)
class MadePlans:
    """What was planned for a request."""

    plans: Sequence[Plan]
    """The best one first, but where they are for links of different speed."""
    choice: SimulatedChoice | None = None
    """What a simulation chose, where more plans were made than asked for."""
    simulated_s: Sequence[float] = ()
    """Steps of the plans, where they are ordered by these."""
    pooled: Sequence[PooledPlan[Plan]] = ()
    robust: RobustPlan | None = None
    best: Plan = field(init=False)
    """The best plan for the links as they are."""

    def __post_init__(self) -> None:
        from hybridep.commands import pools

        object.__setattr__(self, "best", pools.now(self.pooled) if self.pooled else self.plans[0])


def make(request: PlanRequest) -> MadePlans:
    """Raises what the planner raises, also for wishes that no search has together."""
    import planner
    from hybridep.commands.plan_progress import PlanProgress

    if request.for_scenarios:
        return _for_scenarios(request)
    if request.is_simulated:
        return _chosen_by_simulation(request) if request.top == 1 else _ordered_by_simulation(request)
    if request.pool is not None:
        return _pooled(request)
    with PlanProgress() as progress:
        wishes = request.searched(request.time_limit_s, progress)
        return MadePlans(plans=planner.plans(request.cluster, request.workload, request.top, **wishes))


def _for_scenarios(request: PlanRequest) -> MadePlans:
    import planner

    robust = planner.plan_for_scenarios(
        request.cluster,
        request.workload,
        request.scenarios,
        quantile=request.quantile,
        time_limit_s=request.time_limit_s,
        schedule=request.schedule,
        constraints=request.rules,
        codecs=request.codecs,
        max_loss=request.max_loss,
        free_homes=True,
    )
    return MadePlans(plans=[robust.plan], robust=robust)


def _pooled(request: PlanRequest) -> MadePlans:
    import planner
    from hybridep.commands import pools
    from planner.pool import PLANNED_AT, require_range

    assert request.pool is not None
    require_range(request.cluster, request.pool)
    first_s = request.time_limit_s / (1 + PLANNED_AT)
    first = planner.plan(request.cluster, request.workload, **request.searched(first_s))
    homes = pools.homes_of(first)

    def plan_on(cluster: Cluster, limit_s: float) -> Plan:
        return planner.plan(cluster, request.workload, **request.searched(limit_s) | homes)

    left_s = request.time_limit_s - first_s
    pooled = planner.plan_pool(plan_on, request.cluster, widest=request.pool, time_limit_s=left_s, known=[first])
    return MadePlans(plans=pools.plans_of(pooled), pooled=pooled)


def _chosen_by_simulation(request: PlanRequest) -> MadePlans:
    """One plan, which a simulation chooses from more than were asked for; on KeyboardInterrupt before that the one that costs
    least."""
    from hybridep.commands import plan_choice
    from planner.clock import now_s

    started_s, limit_s = now_s(), request.time_limit_s
    plans = _several(request, plan_choice.CANDIDATES, plan_choice.SEARCHED * limit_s)
    try:
        choice = plan_choice.choose(
            plans,
            request.rules,
            request.recorded(),
            until_s=started_s + limit_s,
            most=plan_choice.most_simulated(plans, limit_s),
        )
    except KeyboardInterrupt:
        return MadePlans(plans=plans[:1])
    return MadePlans(plans=[choice.plan], choice=choice)


def _ordered_by_simulation(request: PlanRequest) -> MadePlans:
    """As many plans as were asked for, ordered by their simulated steps; on KeyboardInterrupt before there is one by cost."""
    from hybridep.commands import plan_choice

    plans = _several(request, request.top, request.time_limit_s)
    # Others know nothing of what was recorded.
    known = request.compare and request.record is None
    try:
        most_s = plan_choice.least_of_others_s(plans[0], request.rules) if known else inf
        ordered, simulated_s = plan_choice.by_simulation(plans, request.recorded(), most_s)
    except KeyboardInterrupt:
        return MadePlans(plans=plans)
    return MadePlans(plans=[plan_choice.reported(ordered[0], plans[0]), *ordered[1:]], simulated_s=simulated_s)


def _several(request: PlanRequest, count: int, time_limit_s: float) -> list[Plan]:
    """Plans to be simulated, ``count`` at most; a record must fit them where its steps are."""
    import planner
    from hybridep.commands.plan_progress import PlanProgress

    with PlanProgress() as progress:
        plans = planner.plans(request.cluster, request.workload, count, **request.searched(time_limit_s, progress))
    if request.record is not None and request.simulate:
        request.record.require(plans[0], Path(str(request.record_path)))
    return plans
