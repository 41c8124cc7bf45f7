"""Why this plan: the choice beside its alternatives, what binds, and the busiest links, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hybridep.baselines import baseline_group
from hybridep.codecs import codecs_for_others
from hybridep.pipeline import codecs_inside
from hybridep.placement import LevelChoice, divisors
from hybridep.plan import LayerGroup, Objective, Plan, Residency
from hybridep.recompute import Recompute
from planner.alone import alone
from planner.constraints import Constraints, keeps
from planner.cost import StepCost
from planner.domains import layer_group
from planner.evaluate import MOST_RANKS, evaluate, expected_s
from planner.lossless import lossless_like
from planner.memory import MemoryUse
from planner.plans import BASELINES, goal_of

NUM_LINKS = 5


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One plan that could be: its configuration, time and memory."""

    name: str
    """``plan``, ``ep``, ``full_gather``, or what differs from the plan, as in ``dc 4`` or ``copies per microbatch``."""
    domains: dict[str, int]
    """Level name -> domain size, of the group with most layers."""
    migration: dict[str, float]
    """Level name -> share of each home's experts that is copied, where anything is."""
    residency: str
    step_s: float
    parts_s: dict[str, float]
    """Seconds of the step by kind."""
    wan_bytes: float
    step_usd: float | None
    """What a step costs; None where nothing has a price."""
    memory_bytes: float
    """Of the fullest rank."""
    fits: bool
    allowed: bool
    """Keeps the rules that the plan was made with."""
    copies_per_rank: float
    """Experts copied to a rank, one layer, on average."""


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """One link in one step."""

    name: str
    total_bytes: float
    busy_s: float
    """Bytes over bandwidth."""
    share: float
    """Of the step."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that ``hybridep plan`` shows about a choice."""

    plan: Alternative
    baselines: tuple[Alternative, ...]
    neighbours: tuple[Alternative, ...]
    """The next smaller and larger domain of each level, full migration where it is partial, the other residency, homes as the
    cluster has them where the plan's are others, activations kept where some are computed again, tokens in parts or not, copies
    ahead of their blocks or not, fewer bytes without loss."""
    alone: Alternative | None
    """One site by itself, with the whole global batch (``planner.alone``), named after it; None where none has room or keeps the
    rules, and where sites' shares differ."""
    binds: str
    """What keeps the step from being shorter: ``memory of <rank>`` when a neighbour or a baseline would be faster but does
    not fit; else what the lower bound comes from: the name of the busiest link, or ``computation``."""
    expected_s: float
    """Of the chosen plan's step where ranks that are done go on."""
    lower_bound_s: float
    """No schedule of the chosen plan is faster."""
    lower_bound_by: str
    """The busiest link's name, or ``computation``."""
    egress_usd: float
    """Of the step's price, what bytes between sites cost; all ranks' rent is the rest."""
    parts_s: dict[str, float]
    """Seconds of the step by kind; they add up to it."""
    hidden_s: dict[str, float]
    """Seconds of transfers beside computation, by kind."""
    links: tuple[LinkLoad, ...]
    """The busiest first."""
    memory_parts_bytes: dict[str, float]
    """Of the fullest rank."""
    fullest_rank: str
    memory_capacity_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers."""
        return asdict(self)


def explain(plan: Plan, constraints: Constraints | None = None, *, one_site: Plan | None = None) -> Explanation:
    """Costs and memory of a plan, the baselines and the plan's neighbours, and which of them break the rules. ``one_site``: the
    plan for one alone, where it is one of more sites than the plan has."""
    cost, memory = evaluate(plan)
    chosen = _alternative("plan", plan, cost, memory, constraints)
    others = [(name.value, baseline_group(plan.cluster, plan.workload, name)) for name in BASELINES]
    like = plan.model_copy(update={"codecs": codecs_inside(codecs_for_others(plan.codecs))})
    baselines = tuple(_of_group(name, like, group, constraints) for name, group in others)
    neighbours = tuple(_of_group(name, like, group, constraints) for name, group in _neighbours(like))
    scheduled = tuple(_alternative(name, one, *evaluate(one), constraints) for name, one in _schedules(plan))
    goal = goal_of(plan.solver)
    one = one_site or alone(plan.cluster, plan.workload, popularity=plan.popularity, goal=goal, constraints=constraints)
    blocked = [other for other in (*baselines, *neighbours) if not other.fits and other.allowed and other.step_s < chosen.step_s]
    order = sorted(range(len(cost.link_s)), key=lambda link: -cost.link_s[link])[:NUM_LINKS]
    return Explanation(
        plan=chosen,
        baselines=baselines,
        neighbours=neighbours + scheduled,
        alone=None if one is None else _alternative(f"{one.cluster.site_name(0)} alone", one, *evaluate(one), None),
        binds=f"memory of {memory.fullest_name}" if blocked else cost.bound_by,
        expected_s=expected_s(plan, cost),
        lower_bound_s=cost.bound_s,
        lower_bound_by=cost.bound_by,
        egress_usd=cost.egress_usd,
        parts_s=cost.parts_s,
        hidden_s=cost.hidden_s,
        links=tuple(
            LinkLoad(
                name=plan.cluster.link_table[link].name,
                total_bytes=float(cost.link_bytes[link]),
                busy_s=float(cost.link_s[link]),
                share=float(cost.link_s[link]) / cost.step_s,
            )
            for link in order
        ),
        memory_parts_bytes=memory.parts_bytes,
        fullest_rank=memory.fullest_name,
        memory_capacity_bytes=memory.capacity_bytes,
    )


def summary(plan: Plan) -> dict[str, Any]:
    """What ``hybridep plan --json`` prints. A plan without a solver's report (a baseline) has status ``feasible`` or
    ``infeasible`` by its memory, and the cost model's lower bound."""
    cost, memory = evaluate(plan)
    report, prediction = plan.solver, plan.prediction
    objective_s = report.objective if report else cost.step_s
    bound_s = report.bound if report else cost.bound_s
    groups = [group.model_dump(mode="json") for group in plan.layers]
    baselines = prediction.baselines if prediction else {}
    return {
        "status": report.status.value if report else ("feasible" if memory.fits else "infeasible"),
        "objective_s": objective_s,
        "bound_s": bound_s,
        "gap": report.gap if report else (objective_s - bound_s) / objective_s,
        "solve_s": report.solve if report else 0.0,
        "domains": _domains(plan) if len(groups) == 1 else groups,
        "baselines": dict(baselines),
        "memory_bytes": memory.fullest_bytes,
        "step_s": cost.step_s,
        "expected_s": expected_s(plan, cost),
        "step_usd": cost.step_usd if plan.cluster.has_prices else None,
        "minimised": report.minimised.value if report else Objective.TIME.value,
        "cost_bound_usd": report.cost_bound if report else None,
        "lower_bound_s": cost.bound_s,
        "wan_bytes": cost.wan_bytes,
        "layers": groups,
        "streams": dict(plan.schedule.streams),
        "chunks": plan.schedule.chunks,
        "fullest_rank": memory.fullest_name,
        "solver": report.solver if report else None,
    }


def _domains(plan: Plan) -> dict[str, Any]:
    """Level name -> size; for the outermost level of a plan with a serving table, its groups of sites."""
    group = plan.layers[0]
    serving = [{"sites": list(one.sites), "holders": dict(one.holders)} for one in group.serving]
    return ({plan.cluster.levels[0].name: serving} if serving else {}) | dict(group.domains)


def _neighbours(plan: Plan) -> Iterator[tuple[str, LayerGroup]]:
    """All layers in one configuration that is one move away from that of the largest group."""
    base = max(plan.layers, key=lambda group: group.num_layers)
    layers = plan.workload.model.num_moe_layers

    def like(choices: dict[str, LevelChoice]) -> LayerGroup:
        return layer_group(0, layers, choices, base.residency, recompute=base.recompute)

    if len(plan.layers) > 1:
        yield "same in all layers", base.model_copy(update={"first_layer": 0, "num_layers": layers})
    if base.serving:
        inside = {name: choice for name, choice in base.choices.items() if name != plan.cluster.levels[0].name}
        for size in divisors(plan.cluster.levels[0].size):
            choices = {plan.cluster.levels[0].name: LevelChoice(domain_size=size)} | inside
            yield f"{plan.cluster.levels[0].name} {size} in rank order", like(choices)
    for level in plan.cluster.levels if not base.serving else ():
        sizes = divisors(level.size)
        here = sizes.index(base.choices.get(level.name, LevelChoice()).domain_size)
        for place in (here - 1, here + 1):
            if 0 <= place < len(sizes):
                choices = base.choices | {level.name: LevelChoice(domain_size=sizes[place])}
                yield f"{level.name} {sizes[place]}", like(choices)
    partial = {name: ratio for name, ratio in base.migration.items() if ratio < 1 and base.domains[name] > 1}
    for name in partial:
        choices = base.choices | {name: LevelChoice(domain_size=base.domains[name])}
        yield f"{name} {base.domains[name]}, all experts", like(choices)
    changes = any(codecs.experts.is_change for codecs in plan.codecs.values())  # those need copies that stay
    if (base.serving or any(size > 1 for size in base.domains.values())) and not changes:
        other = Residency.MICROBATCH if base.residency is Residency.STEP else Residency.STEP
        yield f"copies per {other.value}", base.model_copy(update={"first_layer": 0, "num_layers": layers, "residency": other})
    if base.homes:
        yield "experts in even blocks", base.model_copy(update={"first_layer": 0, "num_layers": layers, "homes": {}})
    if base.recompute:
        yield "activations kept", base.model_copy(update={"first_layer": 0, "num_layers": layers, "recompute": Recompute.NOTHING})


def _schedules(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same placement with what ``planner.plan`` chooses only if asked for copies ahead, tokens in parts or fewer bytes, or
    without it."""
    copies = any(one.serving or any(size > 1 for size in one.domains.values()) for one in plan.layers)
    lossy = any(one.coded for one in plan.codecs.values())
    possible = plan.schedule.overlap and plan.cluster.num_gpus <= MOST_RANKS
    chunks = plan.schedule.chunks
    if not plan.schedule.prefetch and not plan.workload.model.pad_expert_input_to_capacity:
        name, number = ("tokens in one piece", 1) if chunks > 1 else ("tokens in 2 parts (--chunks)", 2)
        yield name, plan.with_schedule(chunks=number)
    if copies and possible and not plan.popularity and not lossy and chunks == 1:
        name, depth = ("copies with their blocks", 0) if plan.schedule.prefetch else ("copies ahead (--prefetch)", 1)
        yield name, plan.with_schedule(prefetch=depth)
    if isinstance(other := lossless_like(plan), Plan):
        yield "lossless (--max-loss 0)", other


def _of_group(name: str, plan: Plan, group: LayerGroup, constraints: Constraints | None) -> Alternative:
    other = plan.with_layers(group)
    return _alternative(name, other, *evaluate(other), constraints)


def _alternative(name: str, plan: Plan, cost: StepCost, memory: MemoryUse, constraints: Constraints | None) -> Alternative:
    index = max(range(len(plan.layers)), key=lambda i: plan.layers[i].num_layers)
    group, placement = plan.layers[index], plan.placements[index]
    return Alternative(
        name=name,
        domains=dict(group.domains),
        migration=dict(group.migration),
        residency=group.residency.value,
        step_s=cost.step_s,
        parts_s=cost.parts_s,
        wan_bytes=cost.wan_bytes,
        step_usd=cost.step_usd if plan.cluster.has_prices else None,
        memory_bytes=memory.fullest_bytes,
        fits=memory.fits,
        allowed=keeps(plan, constraints),
        copies_per_rank=(int(placement.holds.sum()) - placement.num_experts) / placement.num_gpus,
    )
