"""One simulated training step: when everything happened, what each link carried, and the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridep.arrays import BoolArray, FloatArray
from hybridep.pipeline import AnyPlan
from hybridep.plan import Plan
from hybridep.routing import Routing
from hybridep.timeline import Span
from hybridep.units import format_seconds
from simulator.collective import Changes, Execution, Operation, Program, Progress, execute
from simulator.conditions import Conditions, LinkFactors
from simulator.critical_path import seconds_by_label
from simulator.engine import Engine
from simulator.errors import CutLinkError, StuckError
from simulator.fabric import Fabric
from simulator.fabric_file import FabricFile
from simulator.precision import EXACTLY, Precision
from simulator.symmetry import Symmetry
from simulator.token_exchange import TokenExchange
from simulator.training import step_program
from simulator.wiring import wiring

_SHOWN_SITES = 32
"""Datacenters in a timeline; browsers open no more at ease."""


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """What one link did during the step."""

    name: str
    size_bytes: float
    load: float
    """Share of what the link could have carried in the step: its bytes over (capacity x step time), the capacity as it was."""
    busy_s: float
    """Seconds with at least one transfer on it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one step of a plan."""

    plan: AnyPlan
    program: Program
    execution: Execution
    """Of one rank of each kind, as the program."""
    symmetry: Symmetry
    """Which ranks are of which kind."""
    link_bytes: FloatArray
    """[links] of the wiring."""
    link_busy_s: FloatArray
    """[links]"""
    offered_bytes: FloatArray
    """[links]: what each could have carried in the step."""
    largest_cut: float
    """Every time is exact for transfers that differ by at most this share each; a rounding error unless a tolerance was given."""

    @property
    def step_s(self) -> float:
        """Until the last rank has finished its optimizer step."""
        return self.execution.makespan_s

    @cached_property
    def load(self) -> FloatArray:
        """[links]: share of what each could have carried in the step."""
        offered = self.offered_bytes
        return np.divide(self.link_bytes, offered, out=np.zeros(offered.size), where=offered > 0)

    def link(self, number: int) -> LinkLoad:
        """One link by its number."""
        return LinkLoad(
            name=self.symmetry.wiring.link_name(number),
            size_bytes=float(self.link_bytes[number]),
            load=float(self.load[number]),
            busy_s=float(self.link_busy_s[number]),
        )

    @property
    def links(self) -> tuple[LinkLoad, ...]:
        """Every link: those of the cluster's link table first, in its order, then those of the fabric; circuits if used."""
        is_circuit = self.symmetry.wiring.is_circuit
        return tuple(
            self.link(number) for number, size in enumerate(self.link_bytes.tolist()) if size > 0 or not is_circuit(number)
        )

    @property
    def busiest_link(self) -> LinkLoad:
        """The link that comes nearest to its capacity; the first of equals."""
        return self.link(int(self.load.argmax()))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by kind of operation along the critical path: hidden work counts only as far as it shows; the parts sum
        to the step."""
        return seconds_by_label(self.program, self.execution)

    def spans(self) -> Iterator[Span]:
        """The timeline: a process per datacenter with rows for computation, its up and down link, and each level inside.

        A span reaches from when the datacenter's first rank entered an operation to when its last rank left it.
        """
        cluster = self.plan.cluster
        shown = _shown_sites(self.symmetry)
        kinds = self.symmetry.kind.reshape(cluster.sizes[0], -1)
        for position, operation in enumerate(self.program.operations):
            rows = _rows(self.plan, operation, self.program.num_ranks)
            for place, name in shown:
                here = np.unique(kinds[place])
                for row, ranks in rows:
                    inside = here[ranks[here]]
                    if not inside.size:
                        continue
                    start_s = float(self.execution.start_s[position, inside].min())
                    yield Span(
                        name=f"{operation.label} ({operation.name})" if operation.name else operation.label,
                        category=operation.label,
                        process=name,
                        thread=row,
                        start_s=start_s,
                        duration_s=float(self.execution.end_s[position, inside].max()) - start_s,
                    )


def _shown_sites(symmetry: Symmetry) -> list[tuple[int, str]]:
    """Datacenters, with their names, in a timeline: all where they are few, else one of each kind."""
    cluster = symmetry.cluster
    num_sites = cluster.sizes[0]
    if num_sites <= _SHOWN_SITES:
        return list(enumerate(cluster.site_names))
    kinds = np.sort(symmetry.kind.reshape(num_sites, -1), axis=1)
    _, first, alike = np.unique(kinds, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)[:_SHOWN_SITES]
    return [(int(first[i]), f"{cluster.site_name(int(first[i]))}, 1 of {alike[i]} alike") for i in order]


def _rows(plan: AnyPlan, operation: Operation, num_ranks: int) -> list[tuple[str, BoolArray]]:
    """Rows of the timeline that an operation is drawn in, and the program's ranks that take part in each."""
    if operation.flows is None:
        takes_part = np.ones(num_ranks, dtype=np.bool_) if operation.ranks is None else operation.ranks
        return [] if operation.pause else [("beside" if operation.beside else "compute", takes_part)]
    sends = np.bincount(operation.flows.source, minlength=num_ranks) > 0
    receives = np.bincount(operation.flows.destination, minlength=num_ranks) > 0
    if operation.level == 0:
        return [("up", sends), ("down", receives)]
    inside = "inside" if operation.level is None else f"between {plan.cluster.levels[operation.level].name}s"
    return [(inside, sends | receives)]


def _changes(fabric: Fabric, conditions: Conditions | None, start_s: float) -> Changes:
    """The capacities of kinds of links at the start of a step, and whenever they change."""
    if conditions is None:
        return
    factors = LinkFactors(conditions, fabric.symmetry.wiring.link_names)
    full_bytes_per_s = fabric.network.link_capacity_bytes_per_s.copy()
    one_of_each = np.unique(fabric.symmetry.link_kind, return_index=True)[1]
    now_s = start_s
    while math.isfinite(now_s):
        yield now_s - start_s, full_bytes_per_s * factors.at(now_s)[one_of_each], now_s < factors.settled_s
        now_s = factors.next_s(now_s)


def simulate_step(
    plan: Plan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    fabric: FabricFile | None = None,
    exchange: TokenExchange | None = None,
    progress: Progress | None = None,
) -> StepResult:
    """Simulate one training step of a plan. Without `routing`, tokens choose experts as often as the plan's measured popularity
    says (uniformly where it has none); without `fabric`, the cluster's own links are all there is; without `exchange`, tokens
    travel as in the runtime.

    precision: what may be given up for speed at thousands of different datacenters; `largest_cut` says by how much transfers
    differed.
    conditions: what links and workers meet, in a step that begins `start_s` into the run.
    progress: told how much of the step is simulated.
    """
    engine = Engine()
    program, made = step_program(plan, engine, wiring(plan.cluster, fabric), routing, precision, conditions, start_s, exchange)
    return run(plan, program, engine, made, conditions, start_s, progress)


def run(
    plan: AnyPlan,
    program: Program,
    engine: Engine,
    fabric: Fabric,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    progress: Progress | None = None,
) -> StepResult:
    """What a program comes to; arguments as `simulate_step`."""
    try:
        execution = execute(program, engine, fabric.network, _changes(fabric, conditions, start_s), progress)
    except StuckError:
        factors = LinkFactors(conditions or Conditions(), fabric.symmetry.wiring.link_names)
        cut = "; ".join(factors.cuts(start_s + engine.now_s))
        began = f"the step that began {format_seconds(start_s)} into the run"
        if cut:
            raise CutLinkError(f"{began} cannot end, it waits for a cut link: {cut}") from None
        raise
    kind = fabric.symmetry.link_kind
    return StepResult(
        plan=plan,
        program=program,
        execution=execution,
        symmetry=fabric.symmetry,
        link_bytes=fabric.network.link_bytes[kind],
        link_busy_s=fabric.network.link_busy_s[kind],
        offered_bytes=fabric.network.offered_bytes(execution.makespan_s)[kind],
        largest_cut=fabric.network.largest_cut,
    )
