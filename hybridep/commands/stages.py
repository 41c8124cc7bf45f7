"""Pipeline plans on the command line: ``hybridep plan --stages``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import emit, note, plan_files
from hybridep.errors import UserError
from hybridep.plan import Objective
from planner.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridep.commands.sites_choice import Asked, Staged, Tell
    from hybridep.commands.stage_choice import StageChoice
    from hybridep.pipeline import AnyPlan
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import (
        Explanation,
        Goal,
        OtherPlan,
        PipelineExplanation,
        PooledPlan,
        RobustPipeline,
        RobustPlan,
        SearchedOn,
        StageWishes,
        Upgrade,
    )

AUTO = "auto"
_HELD = 0.6
"""Share of the time limit for the plan at the given rates, whose stages all of a pool keep."""


@dataclass(frozen=True, kw_only=True)
class StagesRequest:
    """What is asked of a plan in stages, and how it is told."""

    cluster: Cluster
    workload: Workload
    wishes: StageWishes
    text: str
    """``auto``, or how many stages."""
    fewer: bool
    """For the sites that pay only."""
    time_limit_s: float
    top: int
    """How many plans."""
    output: Path
    """Plan file of the best one."""
    figure: Path | None
    upgrades: bool
    """Also what to buy next."""
    compare: bool
    """Also what other planners would do."""
    scenarios: Sequence[Cluster]
    """The cluster at other rates, where these are not known."""
    quantile: float
    """Of these."""
    pool: float | None
    """Plans for links up to this many times slower and faster, too."""
    explain: bool
    """Also why each alternative was rejected."""
    as_json: bool

    @property
    def asked(self) -> Asked:
        """What is planned for. Raises UserError for a number of stages that is none."""
        from hybridep.commands.sites_choice import Asked

        wishes = replace(self.wishes, stages=_read_stages(self.text))
        return Asked(cluster=self.cluster, workload=self.workload, wishes=wishes)


def write_in_stages(request: StagesRequest) -> None:
    """The pipeline is written and shown, or a plan without stages where that is better and no number was asked for."""
    import planner
    from hybridep.commands import pools
    from hybridep.commands.sites_choice import Staged, plan_sites, search_on
    from hybridep.commands.stage_choice import StageChoice

    def tell(words: str) -> None:
        note(f"hybridep plan: {words}")

    cluster, workload, asked, began_s = request.cluster, request.workload, request.asked, now_s()
    robust = _for_scenarios(request, asked, tell) if request.scenarios else None
    if robust is None:
        made = plan_sites(
            asked,
            or_without=request.text == AUTO,
            fewer=request.fewer,
            time_limit_s=(1.0 if request.pool is None else _HELD) * request.time_limit_s,
            tell=tell,
            shown=True,
            top=request.top,
        )
    else:
        made = Staged(asked=asked, chosen=StageChoice(plan=robust.plan), without=None)
    top = made.top(request.top)
    pool: list[PooledPlan[AnyPlan]] = []
    left_s = max(request.time_limit_s - (now_s() - began_s), (1 - _HELD) * request.time_limit_s)

    def save() -> list[Path]:
        plans = pools.plans_of(pool) or [one.plan for one in top]
        files = plan_files(request.output, len(plans), next(at for at, one in enumerate(plans) if one is made.best))
        for one, path in zip(plans, files, strict=True):
            one.save(path)
        return files

    present, least, alone, upgrades, others, wishes = None, None, None, None, None, asked.wishes
    try:
        # Before anything is written: of a plan without stages there may be no answer.
        if request.upgrades and robust is None:
            # What is best for scenarios need not be for the given rates.
            made, present = search_on(made, tell, request.time_limit_s)
            top = made.top(request.top)
        if request.pool is not None:
            made, pool = pools.of_stages(made, request.pool, left_s, tell)
        if request.upgrades:
            upgrades = _upgrades(made.best, wishes, present)
            if request.text == AUTO:
                upgrades = planner.of_either_kind(made.best, upgrades, wishes)
        if request.compare:
            others = planner.compare_planners(made.best, wishes.constraints)
        files = save()
        if request.fewer and len(asked.sites) > 1:
            least = planner.least_of_any(cluster, workload, wishes)
        if len(made.asked.sites) > 1:
            # Of all sites and their micro-batches: what fewer sites have are smaller, and would slow it down.
            alone = planner.alone(
                cluster, workload, popularity=wishes.popularity, goal=wishes.goal, constraints=wishes.constraints
            )
        explanation = _explained(request, made, alone)
    except KeyboardInterrupt:
        save()
        note(f"hybridep plan: interrupted; plan written to {request.output}")
        raise
    if request.figure is not None:
        from hybridep.commands.plots import draw

        draw(request.figure, made.best)
    told = _Told(
        made=made,
        top=top,
        files=files,
        several=request.top > 1,
        alone=alone,
        least=least,
        goal=wishes.goal,
        explanation=explanation,
        upgrades=upgrades,
        others=others,
        robust=robust,
        pool=pool,
    )
    if request.as_json:
        emit(told.to_json() | {"output": str(request.output)})
    else:
        told.show(whole=request.explain)


def _explained(request: StagesRequest, made: Staged, alone: Plan | None) -> Explanation | PipelineExplanation | None:
    """Why the best plan; of a pipeline, for which it may take seconds, only if asked for. ``alone``: the plan for one site."""
    import planner
    from hybridep.pipeline import PipelinePlan

    rules = made.asked.wishes.constraints
    if isinstance(made.best, PipelinePlan):
        return planner.explain_pipeline(made.best, rules) if request.explain else None
    return planner.explain(made.best, rules, one_site=alone) if request.explain or not request.as_json else None


def _for_scenarios(request: StagesRequest, asked: Asked, tell: Tell) -> RobustPipeline | RobustPlan:
    """The best plan for rates that are not known, without stages only where no number was asked for."""
    import planner
    from hybridep.commands.plan_progress import PlanProgress

    what = (asked.cluster, asked.workload, request.scenarios, asked.wishes)
    how: dict[str, Any] = {"quantile": request.quantile, "time_limit_s": request.time_limit_s}
    with PlanProgress() as progress:
        if request.text == AUTO:
            return planner.staged_for_scenarios(*what, **how, free_homes=True, report=progress, tell=tell)
        return planner.pipeline_for_scenarios(*what, **how, report=progress)


def _upgrades(plan: AnyPlan, wishes: StageWishes, present: SearchedOn | None) -> list[Upgrade]:
    """What to buy next for it; ``present``: what was found without an upgrade, if that was searched for."""
    import planner
    from hybridep.pipeline import PipelinePlan

    if isinstance(plan, PipelinePlan):
        return planner.pipeline_upgrades(plan, wishes, present=present)
    streams = {} if wishes.schedule is None else wishes.schedule.streams
    return planner.upgrades(plan, constraints=wishes.constraints, streams=streams)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What was planned, and what is told of it."""

    made: Staged
    top: list[StageChoice]
    """The best plan, and the next ones that were asked for."""
    files: list[Path]
    """Of these."""
    several: bool
    """More than one plan was asked for."""
    alone: Plan | None
    """One site by itself; None where that is not possible, or all there is."""
    least: float | None
    """What no choice of sites is better than, in as many stages as were asked for, or more; None unless sites may be left out.
    Seconds, or dollars where the goal is these."""
    goal: Goal
    """Of all sites: those that were chosen may have no prices."""
    upgrades: list[Upgrade] | None
    """What to buy next, the most useful first; None unless asked for."""
    others: dict[str, OtherPlan] | None
    """Name of another planner -> what its plan takes; None unless asked for."""
    robust: RobustPipeline | RobustPlan | None
    """How the plan does over scenarios; None for known rates."""
    explanation: Explanation | PipelineExplanation | None
    """Why the best plan, as far as that is told."""
    pool: Sequence[PooledPlan[AnyPlan]]
    """Plans for slower and faster links, whose ``files`` are then told; empty unless asked for."""

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        import planner
        from hybridep.commands import pools
        from hybridep.commands.codecs import codecs_json
        from hybridep.pipeline import PipelinePlan

        made, best = self.made, self.made.best
        more: dict[str, Any] = {"left_out": list(made.left_out), "alone_s": _expected_s(self.alone)}
        if self.least is not None:
            more[f"least_of_any_sites_{'usd' if self.goal.objective is Objective.DOLLARS else 's'}"] = self.least
        if self.several:
            more["plans"] = [
                {
                    "step_s": one.plan.predicted.expected_s,
                    "simulated_s": one.simulated_s,
                    **codecs_json(one.plan),
                    "output": str(path),
                }
                for one, path in zip(self.top, self.files, strict=True)
            ]
        if self.pool:
            more["pool"] = pools.to_json(self.pool, pools.plans_of(self.pool), self.files)
        if self.upgrades is not None:
            more["upgrades"] = [one.to_json() for one in self.upgrades]
        if self.others is not None:
            more["planners"] = {name: asdict(other) for name, other in self.others.items()}
        if self.robust is not None:
            more["robust"] = self.robust.to_json()
        if self.explanation is not None:
            more["explanation"] = self.explanation.to_json()
        if not isinstance(best, PipelinePlan):
            return {**planner.summary(best), "stages": [], "digest": best.digest, **more, **codecs_json(best)}
        more |= {"without_stages_s": _expected_s(made.without), "simulated_s": made.chosen.simulated_s}
        return {**planner.pipeline_summary(best), **more, **codecs_json(best)}

    def show(self, *, whole: bool) -> None:
        """Prints it for people; of a plan without stages the ``whole`` explanation, or what matters most of it."""
        import planner
        from hybridep.commands import plan_text, stage_explain_text, stage_text
        from hybridep.pipeline import PipelinePlan
        from hybridep.units import format_dollars

        made, best = self.made, self.made.best
        if not isinstance(best, PipelinePlan):
            assert isinstance(self.explanation, planner.Explanation)
            plan_text.show(best, self.explanation, whole=whole)
            self._show_least()
            self._show_rest(", without stages")
            return
        others_s = {"without stages": _expected_s(made.without)}
        if self.alone is not None:
            others_s[f"{self.alone.cluster.site_name(0)} alone"] = _expected_s(self.alone)
        if (lossless := planner.lossless_like(best)) is not None:
            others_s["lossless (--max-loss 0)"] = planner.expected_over(lossless, best.cluster)
        stage_text.show_pipeline(best, made.chosen, {name: other_s for name, other_s in others_s.items() if other_s is not None})
        self._show_least()
        if self.alone is not None and made.asked.worth(self.alone) < made.worth:
            dollars = made.asked.wishes.goal.objective is Objective.DOLLARS
            better = f"cheaper ({format_dollars(self.alone.predicted.cost_usd)})" if dollars else "faster"
            click.echo(f"{self.alone.cluster.site_name(0)} alone is {better}: the other sites do not pay {plan_text.FEWER}")
        if isinstance(self.explanation, planner.PipelineExplanation):
            stage_explain_text.show_explanation(self.explanation)
        self._show_rest("")

    def _show_rest(self, what: str) -> None:
        from hybridep.commands import plan_text, pools, stage_text
        from hybridep.pipeline import PipelinePlan

        plan_text.show_others(self.others or {}, ", without stages")
        if self.upgrades is not None:
            plan_text.show_upgrades(self.upgrades)
        if self.robust is not None:
            plan_text.show_robust(self.robust, "pipeline" if isinstance(self.made.best, PipelinePlan) else "plan")
        if self.several:
            stage_text.show_top(self.top, self.files)
        if self.pool:
            pools.show(self.pool, pools.plans_of(self.pool), self.files)
        click.echo(f"\nplan written to {', '.join(map(str, self.files))}{what}")

    def _show_least(self) -> None:
        from hybridep.units import format_dollars, format_seconds

        if self.least is None:
            return
        best, least, dollars = self.made.best, self.least, self.goal.objective is Objective.DOLLARS
        value = self.goal.value(best.predicted.expected_s, best.predicted.cost_usd)
        text = f"cheaper than {format_dollars(least)}" if dollars else f"faster than {format_seconds(least)}"
        # One site may cost nothing where only bytes have a price.
        gap = 1 - least / value if value > 0 else 0.0
        # Of a number of stages that was asked for the seconds hold for pipelines only: one site alone may be faster.
        stages = None if dollars else self.made.asked.wishes.stages
        what = "plan" if stages is None else f"pipeline of {stages} stages or more"
        click.echo(f"no {what} for any of the sites is {text} (gap {gap:.0%})")


def _expected_s(plan: AnyPlan | None) -> float | None:
    return None if plan is None or plan.prediction is None else plan.prediction.expected_s


def _read_stages(text: str) -> int | None:
    """A number of stages from 2, or ``auto`` (None). Raises UserError."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--stages {text}: write auto, or a number from 2")
    return int(text)
