"""Other systems' schedules, in this simulator's terms: what a plan is compared with beside placements.

Each is a placement and a way for tokens to travel, and where the system chooses, every choice is simulated and the fastest
counts: its own search is taken to be perfect. Not modelled of any of them: kernels, padding to capacity, the time of choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.baselines import Baseline, baseline_like
from hybridep.homes import homes_text
from hybridep.placement import home_blocks
from hybridep.plan import Plan, Schedule
from hybridep.routing import Routing
from hybridep.serving import serving_groups
from hybridep.shares import spread
from hybridep.topology import Cluster
from hybridep.units import counted
from simulator.errors import SimulationError
from simulator.step import StepResult
from simulator.token_exchange import Route, TokenExchange

DEGREES = (1, 2, 4, 8)
"""Pipelining degrees tried."""


class System(Enum):
    """A published system's core, as far as it decides how long a step over several sites takes."""

    FLAT_EP = "flat_ep"
    """Expert parallelism with one plain All-to-All over all ranks (GShard, Lepikhin et al., ICLR 2021; DeepSpeed-MoE): a row per
    choice, straight to the expert's rank, nothing beside it."""
    TUTEL = "tutel"
    """Tutel (Hwang et al., MLSys 2023): expert parallelism whose All-to-All, plain or two-dimensional hierarchical, is split into
    parts that run beside the experts; algorithm and degree are the fastest pair. Its other parallel mode, data parallelism
    (``adaptive:0``), is the baseline ``full_gather``."""
    FASTER_MOE = "faster_moe"
    """FasterMoE (He et al., PPoPP 2022): copies of the hottest experts ("shadows") for everybody, as many as make the step
    fastest, and a pipelined All-to-All for the others. Shadows are fetched once per site and step, where the original sends them
    to every worker in every iteration: here it is as good as it could be. Its exchange by groups of workers is taken as equal
    parts of the tokens. Not modelled: its topology-aware gate, which changes the model."""
    SMART_MOE = "smart_moe"
    """SmartMoE (Zhai et al., USENIX ATC 2023): experts assigned anew to the same number of places, so that popular ones do not
    meet on one worker, and a pipelined All-to-All. Without measured popularity the places stay as they are. Not modelled:
    moving experts from place to place, and its pool of other parallelisms."""
    PIPELINE = "pipeline"
    """Pipeline parallelism across sites, expert parallelism inside each stage (Narayanan et al., Megatron-LM, SC 2021); number of
    stages, placement inside and how far stages run ahead are the fastest. See ``simulator.pipeline``, which simulates it."""


Simulate = Callable[[Plan, TokenExchange], StepResult]
"""Simulates one step under conditions that are settled."""


@dataclass(frozen=True, kw_only=True)
class SystemStep:
    """The fastest of a system's choices."""

    step: StepResult
    choice: str
    """In few words."""


def system_step(plan: Plan, system: System, simulate: Simulate, popularity: Sequence[FloatArray] = ()) -> SystemStep:
    """One step as the system has it, with the plan's cluster, workload, codecs and connections per pair of ranks. ``popularity``:
    how often each expert is chosen ([MoE layers][E]); all alike without it."""
    ep = baseline_like(plan, Baseline.EP).model_copy(update={"schedule": Schedule(streams=plan.schedule.streams)})
    match system:
        case System.FLAT_EP:
            return _fastest(simulate, [("", ep)], [TokenExchange(route=Route.DIRECT, per_choice=True)])
        case System.TUTEL:
            return _fastest(simulate, [("", ep)], _pipelined(*Route))
        case System.SMART_MOE:
            spread = _with_groups(ep, [_spread(ep, loads) for loads in popularity]) if len(popularity) else ep
            return _fastest(simulate, [("", spread)], _pipelined(Route.DIRECT))
        case System.PIPELINE:
            raise SimulationError("pipeline: its stages are plans of their own; use simulator.pipeline.fastest_pipeline")
    # The number of shadows is chosen first, as the original does, whose latency model knows no schedule.
    shadowed = list(_shadowed(ep, popularity))
    first = _fastest(simulate, shadowed, _pipelined(Route.DIRECT)[:1]).step.plan
    return _fastest(simulate, [entry for entry in shadowed if entry[1] is first], _pipelined(Route.DIRECT))


def popularity_of(routing: Routing, num_experts: int) -> list[FloatArray]:
    """[MoE layers][E]: how often each expert is chosen."""
    layers = sorted({layer for layer, _ in routing})
    counts = [np.zeros(num_experts) for _ in layers]
    for (layer, _), choices in routing.items():
        counts[layers.index(layer)] += np.bincount(choices[choices >= 0].ravel(), minlength=num_experts)
    return counts


def _pipelined(*ways: Route) -> list[TokenExchange]:
    return [TokenExchange(route=route, per_choice=True, chunks=degree) for route in ways for degree in DEGREES]


def _fastest(simulate: Simulate, plans: Sequence[tuple[str, Plan]], exchanges: Sequence[TokenExchange]) -> SystemStep:
    """The first of equals."""
    found: SystemStep | None = None
    for text, plan in plans:
        for exchange in exchanges:
            step = simulate(plan, exchange)
            if found is None or step.step_s < found.step.step_s:
                found = SystemStep(step=step, choice=text + exchange.text)
    assert found is not None
    return found


def _with_groups(plan: Plan, groups: Sequence[dict[str, object]]) -> Plan:
    """One layer group per entry, over all layers where there is one."""
    layers = plan.workload.model.num_moe_layers // len(groups)
    base = plan.layers[0].model_copy(update={"num_layers": layers})
    made = (base.model_copy(update={"first_layer": number * layers, **update}) for number, update in enumerate(groups))
    return plan.with_layers(*made)


def _shadowed(plan: Plan, popularity: Sequence[FloatArray]) -> Iterator[tuple[str, Plan]]:
    """The plan with more and more shadows in every layer, the hottest first."""
    experts = plan.workload.model.num_experts
    sites = plan.cluster.sizes[0]
    inner = {level.name: 1 for level in plan.cluster.levels[1:]}
    home = home_blocks(plan.cluster, experts) // plan.cluster.ranks_per_site
    orders = [np.argsort(-loads, kind="stable") for loads in popularity] or [np.arange(experts)]
    yield "no shadows, ", plan
    counts = [1 << power for power in range(experts.bit_length()) if 1 << power < experts]
    for count in [*counts, experts] if sites > 1 else []:
        groups: list[dict[str, object]] = []
        for order in orders:
            table = np.tile(home, (sites, 1))
            table[:, order[:count]] = np.arange(sites)[:, None]
            groups.append({"domains": inner, "migration": {}, "serving": serving_groups(plan.cluster, table)})
        yield f"{counted(count, 'shadow')}, ", _with_groups(plan, groups)


def _spread(plan: Plan, loads: FloatArray) -> dict[str, object]:
    return {"homes": homes_text(plan.cluster, spread_homes(plan.cluster, loads))}


def spread_homes(cluster: Cluster, loads: FloatArray) -> IntArray:
    """[E]: the hottest expert first, each to the least loaded rank that has room (then site, then order); as many places per
    rank as with homes in blocks. loads: [E]."""
    room = np.bincount(home_blocks(cluster, loads.size), minlength=cluster.num_gpus)
    return spread(loads, room, np.arange(cluster.num_gpus) // cluster.ranks_per_site)
