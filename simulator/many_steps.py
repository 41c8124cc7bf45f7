"""A run of many steps under conditions that change: sites that are lost, checkpoints, and new plans where they pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from hybridep.config import Duration, Strict, build
from hybridep.errors import UserError
from hybridep.pipeline import AnyPlan, build_plan
from hybridep.routing import Routing
from hybridep.topology import Cluster, by_themselves, cluster_data, data_with_sites
from hybridep.units import Dimension, exact, format_seconds
from simulator.conditions import Conditions, LinkFactors
from simulator.errors import FabricError, SimulationError, StuckError
from simulator.fabric_file import FabricFile
from simulator.pipeline import simulate_any
from simulator.precision import EXACTLY, Precision
from simulator.routes import TRUNK, planned_over
from simulator.wiring import wiring

Planning = Callable[[Cluster], AnyPlan]
"""Makes a plan of the run's workload for a cluster as it is at the moment."""

RoutingOfStep = Callable[[AnyPlan, int], Routing | None]
"""(plan, step) -> what tokens choose; None for what the plan's popularity of experts lets expect, uniform without one."""

_LEAST_FACTOR = 1e-3
"""Planning takes a link that is cut as one of this part of its bandwidth."""


class SiteLoss(Strict):
    """A datacenter that is gone from then on, or until it is back, or one pod of it."""

    site: str
    at: Duration
    back: Duration | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SiteLoss:
        if self.back is not None and self.back <= self.at:
            raise ValueError(f"back: {self.back} s is not after at, {self.at} s")
        return self

    @property
    def back_s(self) -> float:
        """Infinite where it does not come back."""
        return math.inf if self.back is None else self.back


class Course(Strict):
    """How long a run is, and what it does besides steps."""

    steps: int = Field(default=1, ge=1)
    losses: tuple[SiteLoss, ...] = ()
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps; 0 for at the end only: a loss then throws the run back to its beginning. One is written at the end in any case."""
    checkpoint: Duration = 0.0
    """What writing one takes."""
    restart: Duration = 0.0
    """From the loss of a site to the next step: notice, start, read the checkpoint. Also from the checkpoint at which a site is
    taken up again."""
    replan_every: int = Field(default=0, ge=0)
    """Steps between looks at whether a new plan pays; 0 for never."""
    switch: Duration = 0.0
    """What changing to a new plan takes."""

    @property
    def in_order(self) -> list[SiteLoss]:
        """Losses as they happen."""
        return sorted(self.losses, key=lambda loss: loss.at)

    def require(self, cluster: Cluster, fabric: FabricFile | None = None) -> None:
        """Raises UserError for losses that cannot be: of sites that are not there, or not at that time, of the last site or the
        last that may hold experts, or of one that a fabric needs; and for sites that no checkpoint takes up again."""
        hub = fabric.wan.hub.at if fabric is not None and fabric.wan is not None and fabric.wan.hub is not None else None
        without_experts = {site.name for site in cluster.sites if site.experts == 0}
        back_s = dict.fromkeys(cluster.site_names, -math.inf)
        for loss in self.in_order:
            left = [name for name in back_s if back_s[name] <= loss.at]
            lost = [name for name in sites_called(cluster, loss.site) if name in left]
            if not lost:
                raise UserError(f"losses: no site {loss.site!r} at {format_seconds(loss.at)}; there are {', '.join(left)}")
            if len(lost) == len(left):
                raise UserError(f"losses: {loss.site} is the last site at {format_seconds(loss.at)}")
            if not set(left) - set(lost) - without_experts:
                at = f"{loss.site} is the last site with experts at {format_seconds(loss.at)}"
                raise UserError(f"losses: {at}; sites.*.experts is 0 at the others")
            if any(hub in cluster.site_labels(cluster.site_names.index(name)) for name in lost):
                raise FabricError(f"losses: {loss.site} is the fabric's hub (wan.hub.at), which must remain")
            if math.isfinite(loss.back_s) and loss.back_s > loss.at + self.restart and not self.checkpoint_every:
                raise UserError(
                    f"losses: {loss.site} is back at {format_seconds(loss.back_s)}, and sites are taken up again at checkpoints; "
                    "give checkpoint_every, or leave out back"
                )
            back_s |= {name: max(back_s[name], loss.back_s) for name in sites_called(cluster, loss.site)}


class Happening(Enum):
    """What a stretch of a run's time went into."""

    STEP = "step"
    CHECKPOINT = "checkpoint"
    REPLAN = "replan"
    LOSS = "loss"
    RETURN = "return"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of a run."""

    what: Happening
    start_s: float
    duration_s: float
    step: int
    """Steps that were done, and not lost since, at its start."""
    plan: str
    """Digest of the plan in force at its end."""
    sites: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """All that happened in a run."""

    stretches: tuple[Stretch, ...]
    plans: tuple[str, ...]
    """Digests of the plans that were in force, in order."""
    simulated_steps: int
    """Steps that were simulated; others are under the same plan and conditions as one of these."""

    @property
    def total_s(self) -> float:
        """Until the last step is done."""
        return self.stretches[-1].start_s + self.stretches[-1].duration_s

    def seconds(self, what: Happening) -> float:
        """All stretches of a kind together."""
        return sum(stretch.duration_s for stretch in self.stretches if stretch.what is what)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        steps = [stretch.duration_s for stretch in self.stretches if stretch.what is Happening.STEP]
        return {
            "total_s": self.total_s,
            "steps_run": len(steps),
            "step_s": {"median": float(np.median(steps)), "min": min(steps), "max": max(steps)},
            **{f"{what.value}_total_s": self.seconds(what) for what in Happening},
            "plans": list(self.plans),
            "simulated_steps": self.simulated_steps,
        }


def simulate_run(
    plan: AnyPlan,
    course: Course,
    conditions: Conditions | None = None,
    routing: RoutingOfStep | None = None,
    planning: Planning | None = None,
    precision: Precision = EXACTLY,
    fabric: FabricFile | None = None,
) -> RunResult:
    """Simulate a run of many steps, over the cluster's own links or a fabric.

    Steps under the same plan, conditions and choices are simulated once. A site that is lost ends the step at hand, and all
    since the last checkpoint is done again, under a plan for those that remain; so it does while a checkpoint is written or plans
    are changed, which then counts for nothing. A site that is back is taken up by the next restart that ends after it, or else by
    one after the next checkpoint; with all sites the first plan is in force again. A new plan pays, and is taken up, when a step
    of it under the conditions of the moment saves more over the steps that remain than the change costs.
    `planning` gets to know the links between sites as they are at the moment, and a fabric's trunks as the cluster's own
    (`simulator.routes.planned_over`). A ring closes where a site is lost, and of a graph the trunks of the site remain.
    Raises SimulationError when a plan is needed and no `planning` given, StuckError for a step that cannot end and no loss ends,
    UserError for links or workers that are not there, and for losses that cannot be.
    """
    return _Run(plan, course, conditions or Conditions(), routing, planning, precision, fabric).run()


class _Run:
    def __init__(
        self,
        plan: AnyPlan,
        course: Course,
        conditions: Conditions,
        routing: RoutingOfStep | None,
        planning: Planning | None,
        precision: Precision,
        fabric: FabricFile | None,
    ) -> None:
        self._plan, self._course, self._conditions = plan, course, conditions
        self._routing, self._planning, self._precision, self._fabric = routing, planning, precision, fabric
        self._factors_under: dict[str, LinkFactors] = {}
        self._now_s, self._step, self._saved = 0.0, 0, 0
        self._planned_at = 0
        """Step of the last plan, or of the last look at whether a new one pays."""
        self._losses = course.in_order
        self._whole = plan
        self._back_s: dict[str, float] = {}
        """Site that the plan in force is without -> when it is back."""
        self._plans = {plan.digest: None}
        self._stretches: list[Stretch] = []
        self._known: dict[tuple[object, ...], float] = {}
        self._simulated = 0
        self._conditions.require(plan.cluster, wiring(plan.cluster, fabric).link_names)
        course.require(plan.cluster, fabric)
        if (course.losses or course.replan_every) and planning is None:
            raise SimulationError("a run that loses sites or plans anew needs a planner")

    def run(self) -> RunResult:
        course = self._course
        while self._step < course.steps:
            if not self._ends(Happening.STEP, self._step_s(self._plan)):
                continue
            self._step += 1
            is_last = self._step == course.steps
            if is_last or (course.checkpoint_every and self._step % course.checkpoint_every == 0):
                if not self._ends(Happening.CHECKPOINT, course.checkpoint):
                    continue
                self._saved = self._step
                if not is_last and min(self._back_s.values(), default=math.inf) <= self._now_s:
                    self._planned_at = self._step
                    self._plan_with(self._now_s)
                    if not self._ends(Happening.RETURN, course.restart):
                        continue
            if course.replan_every and self._step - self._planned_at >= course.replan_every and self._step < course.steps:
                self._planned_at = self._step
                self._replan()
        return RunResult(stretches=tuple(self._stretches), plans=tuple(self._plans), simulated_steps=self._simulated)

    def _ends(self, what: Happening, duration_s: float) -> bool:
        """Go on by that long, and say so; or to the next loss where that comes first, and back to the last checkpoint."""
        while self._losses and self._losses[0].at <= self._now_s + duration_s:
            loss = self._losses.pop(0)
            lost = set(sites_called(self._whole.cluster, loss.site))
            takes_part = not lost <= set(self._back_s)
            self._back_s |= {site: max(self._back_s.get(site, 0.0), loss.back_s) for site in lost}
            if takes_part:
                self._lose(loss)
                self._step = self._planned_at = self._saved
                return False
        if math.isinf(duration_s):
            return False
        self._pass(what, duration_s)
        return True

    def _pass(self, what: Happening, duration_s: float) -> None:
        self._stretches.append(
            Stretch(
                what=what,
                start_s=self._now_s,
                duration_s=duration_s,
                step=self._step,
                plan=self._plan.digest,
                sites=self._plan.cluster.sizes[0],
            )
        )
        self._now_s += duration_s

    def _step_s(self, plan: AnyPlan) -> float:
        """Of one step that begins now."""
        routing = self._routing(plan, self._step) if self._routing is not None else None
        known, factors = self._state(plan) if routing is None and not self._conditions.compute_jitter else (None, None)
        if known is not None and factors is not None and known in self._known:
            step_s = self._known[known]
            if factors.next_s(self._now_s) >= self._now_s + step_s:
                return step_s
        self._simulated += 1
        try:
            step_s = simulate_any(plan, routing, self._precision, self._conditions, self._now_s, self._fabric).step_s
        except StuckError:
            if not self._losses:
                raise
            # A loss will end it.
            return math.inf
        if known is not None and factors is not None and factors.next_s(self._now_s) >= self._now_s + step_s:
            self._known[known] = step_s
        return step_s

    def _state(self, plan: AnyPlan) -> tuple[tuple[object, ...], LinkFactors]:
        """All that the time of a step without changes depends on."""
        factors = self._factors(plan)
        slowdown = self._conditions.slowdown(plan.cluster, self._now_s)
        return (plan.digest, factors.at(self._now_s).tobytes(), slowdown.tobytes()), factors

    def _factors(self, plan: AnyPlan) -> LinkFactors:
        if plan.digest not in self._factors_under:
            names = wiring(plan.cluster, self._fabric).link_names
            self._factors_under[plan.digest] = LinkFactors(self._conditions, names)
        return self._factors_under[plan.digest]

    def _lose(self, loss: SiteLoss) -> None:
        ends_s = max(loss.at, self._now_s) + self._course.restart
        self._plan_with(ends_s)
        if self._losses:
            # The next one may come before the restart is done, which then begins anew.
            ends_s = min(ends_s, max(self._losses[0].at, self._now_s))
        self._pass(Happening.LOSS, ends_s - self._now_s)

    def _plan_with(self, now_s: float) -> None:
        """A plan for all sites that are there then."""
        assert self._planning is not None
        self._back_s = {site: back_s for site, back_s in self._back_s.items() if back_s > now_s}
        whole = self._whole.cluster
        left = set(whole.site_names) - set(self._back_s)
        self._plan = self._planning(planned_over(by_themselves(whole, left), self._fabric)) if self._back_s else self._whole
        self._plans[self._plan.digest] = None

    def _replan(self) -> None:
        assert self._planning is not None
        made = self._planning(self._at_present())
        decided = made.model_dump(mode="json", exclude={"prediction", "solver"})
        found = build_plan(decided | {"cluster": cluster_data(self._plan.cluster)}, "plan")
        if found.digest == self._plan.digest:
            return
        saves_s = self._step_s(self._plan) - self._step_s(found)
        if saves_s * (self._course.steps - self._step) > self._course.switch:
            self._plan = found
            if self._ends(Happening.REPLAN, self._course.switch):
                self._plans[found.digest] = None

    def _at_present(self) -> Cluster:
        """The cluster of the plan in force, for which to plan anew."""
        cluster = self._plan.cluster
        known = planned_over(cluster, self._fabric)
        names, factor = wiring(cluster, self._fabric).link_names, self._factors(self._plan).at(self._now_s)
        present = dict(zip(names, factor.tolist(), strict=True))
        links = [link.name for link in known.link_table]
        if known is not cluster:
            pairs = known.pair_links
            # A pair's link is there for its latency, and as wide as its source's access link.
            links[pairs] = [f"{name.partition(' -> ')[0]} up" for name in links[pairs]]
            links[pairs.stop :] = [name.removeprefix(TRUNK) for name in links[pairs.stop :]]
        return cluster_at_present(known, [present.get(name, 1.0) for name in links])


def sites_called(cluster: Cluster, label: str) -> list[str]:
    """Names of a site, or of all its pods."""
    return [name for site, name in enumerate(cluster.site_names) if label in cluster.site_labels(site)]


def cluster_at_present(cluster: Cluster, factor: Sequence[float]) -> Cluster:
    """The cluster with links between sites as they are: `factor` [links] of their bandwidth. Inside sites all is as before."""
    data = data_with_sites(cluster)
    bandwidth = [
        exact(link.bandwidth_bytes_per_s * max(part, _LEAST_FACTOR), Dimension.BANDWIDTH)
        for link, part in zip(cluster.link_table, factor, strict=True)
    ]
    for site, each in enumerate(data["sites"]):
        each["up"], each["down"] = bandwidth[cluster.up_link(0, site)], bandwidth[cluster.down_link(0, site)]
    if data["links"]:
        places = {(each["src"], each["dst"]): each for each in data["links"]}
        pairs = cluster.pair_links
        for link, now in zip(cluster.link_table[pairs], bandwidth[pairs], strict=True):
            src, _, dst = link.name.partition(" -> ")
            places[src, dst]["bandwidth"] = now
    for trunk, now in zip(data["trunks"], bandwidth[cluster.pair_links.stop :], strict=True):
        trunk["bandwidth"] = now
    return build(Cluster, data, cluster.name)
