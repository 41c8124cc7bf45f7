"""One simulated training step: when everything happened, what each link carried, and the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridep.plan import Plan
from hybridep.timeline import Span
from simulator.collective import Execution, Operation, Program, execute
from simulator.critical_path import seconds_by_label
from simulator.engine import Engine
from simulator.fabric import Fabric
from simulator.flow import FloatArray
from simulator.network import BoolArray
from simulator.training import Routing, step_program


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """What one link did during the step."""

    name: str
    size_bytes: float
    load: float
    """Share of what the link could have carried in the step: its bytes over (capacity x step time)."""
    busy_s: float
    """Seconds with at least one transfer on it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of one step of a plan."""

    plan: Plan
    program: Program
    execution: Execution
    link_bytes: FloatArray
    """[links], in the order of the cluster's link table."""
    link_busy_s: FloatArray
    """[links]"""

    @property
    def step_s(self) -> float:
        """Until the last rank has finished its optimizer step."""
        return self.execution.makespan_s

    @property
    def links(self) -> tuple[LinkLoad, ...]:
        """Every link, in the order of the cluster's link table."""
        return tuple(
            LinkLoad(
                name=link.name,
                size_bytes=float(size_bytes),
                load=float(size_bytes / (link.bandwidth_bytes_per_s * self.step_s)) if self.step_s else 0.0,
                busy_s=float(busy_s),
            )
            for link, size_bytes, busy_s in zip(self.plan.cluster.link_table, self.link_bytes, self.link_busy_s, strict=True)
        )

    @property
    def busiest_link(self) -> LinkLoad:
        """The link that comes nearest to its capacity; the first of equals."""
        return max(self.links, key=lambda link: link.load)

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
        dc = cluster.coordinates[:, 0]
        for position, operation in enumerate(self.program.operations):
            rows = _rows(self.plan, operation)
            for place in range(cluster.sizes[0]):
                here = dc == place
                for row, ranks in rows:
                    inside = here & ranks
                    if not inside.any():
                        continue
                    start_s = float(self.execution.start_s[position, inside].min())
                    yield Span(
                        name=f"{operation.label} ({operation.name})" if operation.name else operation.label,
                        category=operation.label,
                        process=cluster.site_name(place),
                        thread=row,
                        start_s=start_s,
                        duration_s=float(self.execution.end_s[position, inside].max()) - start_s,
                    )


def _rows(plan: Plan, operation: Operation) -> list[tuple[str, BoolArray]]:
    """Rows of the timeline that an operation is drawn in, and the ranks [G] that take part in each."""
    num_ranks = plan.cluster.num_gpus
    if operation.flows is None:
        return [("compute", np.ones(num_ranks, dtype=np.bool_))]
    sends = np.bincount(operation.flows.source, minlength=num_ranks) > 0
    receives = np.bincount(operation.flows.destination, minlength=num_ranks) > 0
    if operation.level == 0:
        return [("up", sends), ("down", receives)]
    inside = "inside" if operation.level is None else f"between {plan.cluster.levels[operation.level].name}s"
    return [(inside, sends | receives)]


def simulate_step(plan: Plan, routing: Routing | None = None) -> StepResult:
    """Simulate one training step of a plan. Without `routing`, tokens choose experts uniformly."""
    engine = Engine()
    fabric = Fabric(engine, plan.cluster)
    program = step_program(plan, fabric, routing)
    execution = execute(program, engine, fabric.network)
    return StepResult(
        plan=plan,
        program=program,
        execution=execution,
        link_bytes=fabric.network.link_bytes,
        link_busy_s=fabric.network.link_busy_s,
    )
