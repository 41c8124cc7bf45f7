"""``hybridep plan``: cluster and model -> plan file, with the reasons; or two plan files side by side."""

from __future__ import annotations

import time
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import emit, set_option, verb
from hybridep.errors import QuantityError, UserError

if TYPE_CHECKING:
    from hybridep.commands.plan_choice import SimulatedChoice
    from hybridep.plan import Plan, Schedule
    from hybridep.routing import RoutingRecord
    from hybridep.topology import Cluster
    from planner import PooledPlan, RobustPlan
    from planner.goal import Goal


@verb(name="plan")
@click.argument("cluster")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("plan.yaml"), show_default=True, help="Plan file.")
@click.option("--solver", type=click.Choice(["highs", "cbc"]), default="highs", show_default=True)
@click.option(
    "--compare",
    is_flag=True,
    help="With two plan files in place of CLUSTER and MODEL: how they differ, and from which bandwidth on the other one is the "
    "faster. Else: also cost what other planners would do.",
)
@click.option("--explain", "whole", is_flag=True, help="Every group of sites, and why each alternative was rejected.")
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="Different plans, one file each.")
@click.option(
    "--simulate/--no-simulate",
    default=None,
    help="Of several plans, choose the one whose simulated step is shortest. Without --top: of 48, simulated for two layers, of "
    "those that cost no more than what any other planner would do, within the time limit; so also without this option where up "
    "to 64 sites differ, since where links rule and ranks fall out of step a simulation knows more than the cost that is "
    "minimised. Where much computation shares processors it knows less. With --top: of these plans, all of the step; with "
    "--compare of those that cost no more than any other planner's (without --routing, which those know nothing of).",
)
@click.option("--constraints", type=click.Path(path_type=Path), help="YAML file with rules that the plan must keep.")
@click.option("--figure", type=click.Path(path_type=Path), help="PNG: who computes for whom, who copies from whom, link loads.")
@click.option("--upgrades", is_flag=True, help="Which link, or how much memory, to buy next, and what it brings.")
@click.option("--scenario", "scenarios", multiple=True, metavar="CLUSTER", help="Other rates of the same sites. Repeatable.")
@click.option("--within", type=click.FloatRange(0, 1, max_open=True), help="Rates between sites may be off by this share.")
@click.option(
    "--pool",
    type=click.FloatRange(min=1, min_open=True),
    metavar="FACTOR",
    help="Plans for links between sites up to this many times slower and faster, one file each, and from where on each pays.",
)
@click.option("--quantile", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Of the scenarios.")
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    help="What `hybridep train` recorded (routing.npz): how popular each expert is; and with --simulate, what tokens chose in "
    "the steps whose every choice is in it.",
)
@click.option("--time-limit", "time_limit_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="LEVEL.KIND=CODEC",
    help="Code a level's payloads, for example dc.experts=change-int8 or dc.experts_keep=0.05; exact without. Repeatable.",
)
@click.option(
    "--fabric", metavar="FILE|NAME", help="What joins the sites (see docs/scenarios.md): its trunks become the cluster's."
)
@click.option(
    "--max-loss",
    metavar="SHARE",
    help="Choose codecs between sites whose measured losses add up to at most this, for example 0.5%; exact without.",
)
@click.option(
    "--prefetch", is_flag=True, help="Also try copies that set out blocks ahead and give way to tokens; alike sites only."
)
@click.option(
    "--streams",
    multiple=True,
    metavar="LEVEL=NUMBER",
    help="Connections per pair of ranks, for example dc=4; chosen where the level has a window, else one. Repeatable.",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "dollars"]),
    default="time",
    show_default=True,
    help="The fastest plan, or the cheapest.",
)
@click.option("--budget", metavar="PRICE", help="The fastest plan that costs at most this per step, for example '0.50 $'.")
@set_option
def command(
    cluster: str,
    model: str,
    output: Path,
    solver: str,
    compare: bool,
    routing: Path | None,
    whole: bool,
    top: int,
    simulate: bool | None,
    constraints: Path | None,
    figure: Path | None,
    upgrades: bool,
    scenarios: tuple[str, ...],
    within: float | None,
    pool: float | None,
    quantile: float,
    time_limit_s: float,
    codecs: tuple[str, ...],
    fabric: str | None,
    max_loss: str | None,
    prefetch: bool,
    streams: tuple[str, ...],
    objective: str,
    budget: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Plan the training of MODEL on CLUSTER: which experts travel to the tokens, and which tokens to the experts.

    CLUSTER is a shipped config's name, a YAML file, or a CSV matrix with the columns src,dst,gbps,rtt_ms. MODEL is a shipped
    config's name or a YAML file. Ctrl-C ends the search with the best plan so far.
    """
    import planner
    from hybridep.commands import plan_choice, plan_text
    from hybridep.commands.codecs import codec_lines, lossy_codecs, read_codecs, read_max_loss
    from hybridep.commands.inputs import cluster_and_workload, load_cluster
    from hybridep.commands.plan_progress import PlanProgress
    from hybridep.routing import load_routing

    if compare and _are_plans(cluster, model):
        _compare(cluster, model, as_json)
        return
    site, work = cluster_and_workload(cluster, model, overrides)
    if fabric is not None:
        site = _on_fabric(site, fabric)
    rules = planner.load_constraints(constraints) if constraints else None
    popularity: tuple[tuple[float, ...], ...] = ()
    record: RoutingRecord | None = None
    if routing is not None:
        record = load_routing(routing)
        record.require_model(work, routing)
        popularity = record.popularity()
    coded = read_codecs(codecs, [level.name for level in site.levels])
    schedule = _schedule(streams, [level.name for level in site.levels])
    robust: RobustPlan | None = None
    made: list[Plan]
    goal = _goal(objective, budget)
    permitted_loss = read_max_loss(max_loss)
    if permitted_loss is not None and (top > 1 or scenarios or within is not None):
        raise UserError("--max-loss: makes one plan, for known rates; leave --top, --scenario and --within out")
    if (scenarios or within is not None) and prefetch:
        raise UserError("--prefetch with --scenario or --within: plans for scenarios know no copies ahead; leave one out")
    if (scenarios or within is not None) and goal.needs_prices:
        raise UserError("--objective and --budget with --scenario or --within: plans for scenarios know time only; leave one out")
    if pool is not None and (top > 1 or scenarios or within is not None or permitted_loss is not None or goal.needs_prices):
        raise UserError(
            "--pool: plans for one rate after the other, by time; leave --top, --scenario, --within, --max-loss, --objective and "
            "--budget out"
        )
    by_time = not (scenarios or within is not None or goal.needs_prices or pool is not None or permitted_loss is not None)
    if simulate and not by_time:
        raise UserError("--simulate: orders plans by time, for known rates; leave it, or other rates, prices and --max-loss, out")
    if simulate is None:
        simulate = by_time and top == 1 and not prefetch and not popularity and plan_choice.decides(site)
    among_more = simulate and top == 1
    started_s = time.monotonic()
    pooled: list[PooledPlan] = []
    if scenarios or within is not None:
        others = [load_cluster(one) for one in scenarios]
        others += planner.interval_scenarios(site, within) if within is not None else []
        robust = planner.plan_for_scenarios(
            site,
            work,
            others,
            quantile=quantile,
            time_limit_s=time_limit_s,
            schedule=schedule,
            constraints=rules,
            codecs=coded,
        )
        made = [robust.plan]
    else:
        with PlanProgress() as progress:
            wishes: dict[str, Any] = {
                "solver": solver,
                "time_limit_s": time_limit_s * (plan_choice.SEARCHED if among_more else 1),
                "schedule": schedule,
                "constraints": rules,
                "popularity": popularity,
                "ahead": prefetch,
                "codecs": coded,
                "goal": goal,
                "report": progress,
            }
            if pool is not None:
                wishes |= {"report": None}

                def plan_on(one: Cluster, limit_s: float) -> Plan:
                    return planner.plan(one, work, **(wishes | {"time_limit_s": limit_s}))

                pooled = planner.plan_pool(plan_on, site, widest=pool, time_limit_s=time_limit_s)
                made = [one.plan for one in pooled]
            elif permitted_loss is None:
                made = planner.plans(site, work, plan_choice.CANDIDATES if among_more else top, **wishes)
            else:
                made = [planner.plan(site, work, max_loss=permitted_loss, **wishes)]
    simulated_s: list[float] = []
    choice: SimulatedChoice | None = None
    if simulate and record is not None:
        record.require(made[0], Path(str(routing)))
    if among_more:
        until_s = plan_choice.ends_s(started_s, time_limit_s)
        choice = plan_choice.choose(made, rules, record.steps(work) if record is not None else [], until_s)
        made = [choice.plan]
    elif simulate:
        # What others would do is costed with experts that are equally popular.
        most_s = plan_choice.least_of_others_s(made[0], rules) if compare and record is None else inf
        first = made[0]
        made, simulated_s = plan_choice.by_simulation(made, record.steps(work) if record is not None else [], most_s)
        made[0] = plan_choice.reported(made[0], first)
    best = next((one.plan for one in pooled if one.pays_from <= 1 <= one.pays_to), made[0])
    files = [output, *(output.with_stem(f"{output.stem}-{number}") for number in range(2, len(made) + 1))]
    for one, path in zip(made, files, strict=True):
        one.save(path)
    if figure is not None:
        from hybridep.commands.plots import plot_plan

        plot_plan(figure, planner.plan_matrices(best))
    explanation = planner.explain(best, rules)
    known = planner.compare_planners(best, rules) if compare else {}
    bought = planner.upgrades(best, constraints=rules) if upgrades else []
    if as_json:
        more: dict[str, Any] = {"planners": {name: asdict(other) for name, other in known.items()}} if compare else {}
        if choice is not None:
            more["choice"] = choice.to_json()
        if top > 1:
            more["plans"] = [
                {"step_s": one.prediction and one.prediction.step, "output": str(path)}
                for one, path in zip(made, files, strict=True)
            ]
            for entry, step_s in zip(more["plans"], simulated_s, strict=False):
                entry["simulated_s"] = step_s
        if pooled:
            more["pool"] = [one.to_json() | {"output": str(path)} for one, path in zip(pooled, files, strict=True)]
        if upgrades:
            more["upgrades"] = [one.to_json() for one in bought]
        if robust is not None:
            more["robust"] = {
                "quantile": quantile,
                "step_s": robust.step_s,
                "bound_s": robust.bound_s,
                "gap": robust.gap,
                "steps_s": robust.steps_s,
                "nominal_step_s": robust.nominal_step_s,
                "nominal_steps_s": robust.nominal_steps_s,
            }
        summary = {**planner.summary(best), "lossy_codecs": lossy_codecs(best)}
        emit({**summary, **more, "explanation": explanation.to_json(), "digest": best.digest, "output": str(output)})
        return
    plan_text.show(best, explanation, whole=whole)
    for line in codec_lines(best):
        click.echo(line)
    plan_text.show_others(known)
    if choice is not None:
        plan_text.show_choice(choice)
    if top > 1:
        plan_text.show_top(made, simulated_s)
    if pooled:
        plan_text.show_pool(pooled, files)
    if upgrades:
        plan_text.show_upgrades(bought, explanation.plan.step_s)
    if robust is not None:
        plan_text.show_robust(robust)
    click.echo(f"\nplan written to {', '.join(str(path) for path in files)}")


def _on_fabric(cluster: Cluster, name: str) -> Cluster:
    from hybridep.commands.scenarios import fabric_of
    from simulator.routes import with_fabric

    found = fabric_of(name)
    if found is None or found.wan is None or found.inside.model_fields_set:
        raise UserError(
            f"--fabric {name}: plans know what joins sites (wan), and nothing of what is inside them; simulate the rest"
        )
    return with_fabric(cluster, found.wan)


def _schedule(streams: tuple[str, ...], levels: list[str]) -> Schedule | None:
    from hybridep.plan import Schedule

    given: dict[str, int] = {}
    for option in streams:
        name, _, number = option.partition("=")
        if name not in levels or not number.isdecimal() or int(number) < 1:
            raise UserError(
                f"--streams {option}: write it as LEVEL=NUMBER, with a level of {', '.join(levels)} and at least one connection"
            )
        given[name] = int(number)
    return Schedule(streams=given) if given else None


def _goal(objective: str, budget: str | None) -> Goal:
    from hybridep.plan import Objective
    from hybridep.units import Dimension, parse
    from planner.goal import Goal

    try:
        budget_usd = None if budget is None else parse(budget, Dimension.PRICE)
    except QuantityError as error:
        raise UserError(f"--budget {budget}: {error}") from None
    return Goal(objective=Objective(objective), budget_usd=budget_usd)


def _are_plans(first: str, second: str) -> bool:
    """Both name files that hold plans."""
    from hybridep.config import read_yaml

    paths = [Path(first), Path(second)]
    return all(path.is_file() and path.suffix in (".yaml", ".yml") and "layers" in read_yaml(path) for path in paths)


def _compare(first: str, second: str, as_json: bool) -> None:
    """Two plan files side by side."""
    from hybridep.commands.plan_text import show_difference
    from hybridep.plan import load_plan
    from planner import compare_plans

    difference = compare_plans(load_plan(Path(first)), load_plan(Path(second)))
    if as_json:
        emit(difference.to_json())
    else:
        show_difference((Path(first).name, Path(second).name), difference)
