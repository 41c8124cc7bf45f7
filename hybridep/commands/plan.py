"""``hybridep plan``: cluster and model -> plan file, with the reasons; or two plan files side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import OUTPUT, Finite, emit, plan_files, require_figure, require_place, set_option, verb
from hybridep.errors import InfeasibleError, QuantityError, UserError

if TYPE_CHECKING:
    from hybridep.commands.plan_request import MadePlans
    from hybridep.commands.stage_hint import StageHint
    from hybridep.plan import Plan, Schedule
    from hybridep.topology import Cluster
    from planner.explain import Explanation
    from planner.goal import Goal
    from planner.sensitivity import Upgrade
    from planner.sites.compare import OtherPlan


@verb(name="plan")
@click.argument("cluster")
@click.argument("model")
@click.option("-o", "--output", type=OUTPUT, default=Path("plan.yaml"), show_default=True, help="Plan file.")
@click.option(
    "--solver",
    type=click.Choice(["highs", "cbc"]),
    default="highs",
    show_default=True,
    help="Of the integer program of equal domains.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="With two plan files in place of CLUSTER and MODEL: how they differ, and from which bandwidth on the other one is the "
    "faster. Else: also cost what other planners would do.",
)
@click.option(
    "--explain",
    "whole",
    is_flag=True,
    help="Every group of sites, and why each alternative was rejected; of a plan in stages also what else it could have been.",
)
@click.option("--top", type=click.IntRange(min=1), default=1, show_default=True, help="Different plans, one file each.")
@click.option(
    "--simulate/--no-simulate",
    default=None,
    help="Of several plans, choose the one whose simulated step is shortest. Without --top: of 48, simulated for two layers, of "
    "those that cost no more than what any other planner would do, within the time limit; so also without this option where up "
    "to 64 sites differ (with at most 1600 micro-batches of nine of them, 36 of sixty), since where links rule and ranks fall "
    "out of step a simulation knows more than the cost that is minimised. Where much computation shares processors it knows "
    "less. With --top: of these plans, all of the step; with --compare of those that cost no more than any other planner's "
    "(without --routing, which those know nothing of).",
)
@click.option("--constraints", type=click.Path(path_type=Path), help="YAML file with rules that the plan must keep.")
@click.option("--figure", type=OUTPUT, help="PNG, PDF or SVG: who computes for whom, who copies from whom, link loads.")
@click.option("--upgrades", is_flag=True, help="Which link, or how much memory, to buy next, and what it brings.")
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    metavar="CLUSTER",
    help="Other rates between the same sites; all else is as in the given CLUSTER. Repeatable.",
)
@click.option("--within", type=Finite(0, 1, max_open=True), help="Rates between sites may be off by this share.")
@click.option(
    "--pool",
    type=Finite(min=1, min_open=True),
    metavar="FACTOR",
    help="Plans for links between sites up to this many times slower and faster, one file each, and from where on each pays. A "
    "switch moves no weights: with --stages all keep the same sites and layers in each.",
)
@click.option("--quantile", type=Finite(0, 1, min_open=True), default=1.0, show_default=True, help="Of the scenarios.")
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    help="What `hybridep train` recorded (routing.npz): how popular each expert is; and with --simulate, what tokens chose in "
    "the steps whose every choice is in it.",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=Finite(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for all searches, which then end with the best plan so far.",
)
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
    help="Choose codecs between sites whose measured losses add up to at most this, for example 0.5%; 0 for lossless ones; "
    "messages as they are without. With --top plans may differ in codecs.",
)
@click.option("--prefetch", is_flag=True, help="Also try copies that set out blocks ahead and give way to tokens.")
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="MOST",
    help="Also try tokens that travel in up to so many parts, computed while others are on the links.",
)
@click.option(
    "--stages",
    metavar="auto|NUMBER",
    help="Plan a pipeline: sites in stages that hold some of the layers each, with a plan inside every stage. auto: in as many "
    "stages as are fastest, or in none.",
)
@click.option(
    "--fewer-sites",
    "fewer",
    is_flag=True,
    help="With --stages: leave out sites that make others send more than they do for them; the same global batch for the rest.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="SITE",
    help="Plan for the other sites, as when this one is lost or not wanted: the same global batch for them. Repeatable.",
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
    chunks: int,
    stages: str | None,
    fewer: bool,
    without: tuple[str, ...],
    streams: tuple[str, ...],
    objective: str,
    budget: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Plan the training of MODEL on CLUSTER: which experts travel to the tokens, and which tokens to the experts.

    CLUSTER is a shipped config's name, a YAML file, or a CSV matrix with the columns src,dst,gbps,rtt_ms. MODEL is a shipped
    config's name, a YAML file, or the folder of a public model as Hugging Face keeps it. Ctrl-C and SIGTERM end the search with
    the best plan so far.
    """
    import planner
    from hybridep.commands import plan_options
    from hybridep.commands.codecs import read_codecs, read_max_loss
    from hybridep.commands.fabrics import on_fabric
    from hybridep.commands.inputs import cluster_and_workload, without_sites
    from hybridep.commands.interrupts import hurried_by_interrupts
    from hybridep.commands.plan_request import PlanRequest, make
    from hybridep.commands.stage_hint import stage_hint, with_hint
    from hybridep.commands.stages import StagesRequest, write_in_stages
    from hybridep.plan import CHUNKS_ALLOWED
    from hybridep.routing import load_routing

    given = plan_options.given_options()
    if compare and _are_plans(cluster, model):
        plan_options.require_plain_comparison(given)
        _compare(cluster, model, as_json)
        return
    plan_options.require_together(given)
    require_place("--output", output)
    if figure is not None:
        require_figure(figure)
    site, work = cluster_and_workload(cluster, model, overrides)
    rules = planner.load_constraints(constraints) if constraints else None
    if without:
        all_sites, (site, work) = site, without_sites(site, work, without)
        rules = planner.constraints_among(all_sites, rules, site.site_names) if rules else None
    plan_options.require_sites(given, site.name, site.sizes[0])
    if fabric is not None:
        site = on_fabric(site, fabric)
    record = load_routing(routing) if routing is not None else None
    if record is not None:
        record.require_model(work, Path(str(routing)))
    levels = [level.name for level in site.levels]
    rates = _scenarios(site, scenarios, without, within, fabric)
    schedule, goal = _schedule(streams, levels), _goal(objective, budget)
    if chunks > CHUNKS_ALLOWED:
        raise UserError(f"--chunks {chunks}: tokens travel in at most {CHUNKS_ALLOWED} parts")
    if stages is not None:
        wishes = planner.StageWishes(
            solver=solver,
            schedule=schedule,
            popularity=() if record is None else record.popularity(),
            codecs=read_codecs(codecs, levels, in_stages=True),
            max_loss=read_max_loss(max_loss),
            goal=goal,
            constraints=rules,
        )
        in_stages = StagesRequest(
            cluster=site,
            workload=work,
            wishes=wishes,
            text=stages,
            fewer=fewer,
            time_limit_s=time_limit_s,
            top=top,
            output=output,
            figure=figure,
            upgrades=upgrades,
            compare=compare,
            scenarios=rates,
            quantile=quantile,
            pool=pool,
            explain=whole,
            as_json=as_json,
        )
        with hurried_by_interrupts():
            write_in_stages(in_stages)
        return
    request = PlanRequest(
        cluster=site,
        workload=work,
        solver=solver,
        time_limit_s=time_limit_s,
        codecs=read_codecs(codecs, levels),
        schedule=schedule,
        rules=rules,
        goal=goal,
        max_loss=read_max_loss(max_loss),
        prefetch=prefetch,
        most_chunks=chunks,
        top=top,
        simulate=simulate,
        compare=compare,
        scenarios=rates,
        quantile=quantile,
        pool=pool,
        record=record,
        record_path=routing,
    )
    with hurried_by_interrupts():
        try:
            made = make(request)
        except InfeasibleError as error:
            raise with_hint(error, request) from None
    best = made.best
    files = plan_files(output, len(made.plans), next(at for at, one in enumerate(made.plans) if one is best))
    # Before anything is written: what is asked of a plan may have no answer.
    try:
        report = PlanReport(
            made=made,
            files=files,
            output=output,
            explanation=planner.explain(best, rules),
            hint=stage_hint(request),
            several=top > 1,
            others=planner.compare_planners(best, rules) if compare else None,
            upgrades=planner.upgrades(best, constraints=rules, streams=schedule.streams if schedule else {})
            if upgrades
            else None,
        )
    except (KeyboardInterrupt, SystemExit):
        _write(made.plans, files)
        click.echo(f"interrupted; plan written to {output}", err=True)
        raise
    _write(made.plans, files)
    if figure is not None:
        from hybridep.commands.plots import draw

        draw(figure, best)
    if as_json:
        emit(report.to_json())
    else:
        report.show(whole=whole)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Plans that were written, and what is told of them."""

    made: MadePlans
    files: list[Path]
    """Of all plans, in their order."""
    output: Path
    """That of the best one."""
    explanation: Explanation
    hint: StageHint | None
    several: bool
    """More than one plan was asked for."""
    others: dict[str, OtherPlan] | None
    """Name of another planner -> what its plan takes; None unless asked for."""
    upgrades: list[Upgrade] | None
    """What to buy next, the most useful first; None unless asked for."""

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        import planner
        from hybridep.commands import pools
        from hybridep.commands.codecs import codecs_json

        made, best = self.made, self.made.best
        entries: dict[str, Any] = {**planner.summary(best), **codecs_json(best)}
        if self.others is not None:
            entries["planners"] = {name: asdict(other) for name, other in self.others.items()}
        if made.choice is not None:
            entries["choice"] = made.choice.to_json()
        if self.several:
            entries["plans"] = [
                {"step_s": one.predicted.step, **codecs_json(one), "output": str(path)}
                for one, path in zip(made.plans, self.files, strict=True)
            ]
            for entry, step_s in zip(entries["plans"], made.simulated_s, strict=False):
                entry["simulated_s"] = step_s
        if made.pooled:
            entries["pool"] = pools.to_json(made.pooled, made.plans, self.files)
        if self.upgrades is not None:
            entries["upgrades"] = [one.to_json() for one in self.upgrades]
        if made.robust is not None:
            entries["robust"] = made.robust.to_json()
        entries["in_stages"] = None if self.hint is None else self.hint.to_json()
        return {**entries, "explanation": self.explanation.to_json(), "digest": best.digest, "output": str(self.output)}

    def show(self, *, whole: bool) -> None:
        """Prints it for people; the ``whole`` explanation, or what matters most of it."""
        from hybridep.commands import plan_text, pools

        made = self.made
        plan_text.show(made.best, self.explanation, self.hint, whole=whole)
        plan_text.show_others(self.others or {})
        if made.choice is not None:
            plan_text.show_choice(made.choice)
        if self.several:
            plan_text.show_top(made.plans, made.simulated_s)
        if made.pooled:
            pools.show(made.pooled, made.plans, self.files)
        if self.upgrades is not None:
            plan_text.show_upgrades(self.upgrades)
        if made.robust is not None:
            plan_text.show_robust(made.robust)
        click.echo(f"\nplan written to {', '.join(str(path) for path in self.files)}")


def _write(plans: Sequence[Plan], files: Sequence[Path]) -> None:
    for one, path in zip(plans, files, strict=True):
        one.save(path)


def _scenarios(
    cluster: Cluster, paths: Sequence[str], without: Sequence[str], within: float | None, fabric: str | None
) -> tuple[Cluster, ...]:
    """The cluster at the rates of each file, which may have sites that are left out, and at such as are ``within`` that share of
    its own."""
    import planner

    drawn = [] if within is None else planner.interval_scenarios(cluster, within)
    return (*(_scenario(cluster, path, without, fabric) for path in paths), *drawn)


def _scenario(cluster: Cluster, path: str, without: Sequence[str], fabric: str | None) -> Cluster:
    """The cluster at another file's rates, over the same fabric."""
    from hybridep.commands.fabrics import on_fabric
    from hybridep.commands.inputs import load_cluster, sites_left
    from hybridep.topology import by_themselves
    from planner.difference import with_rates_of

    other = load_cluster(path)
    left = sites_left(other, without)
    try:
        if left and len(left) < other.sizes[0]:
            other = by_themselves(other, left)
        return with_rates_of(cluster, other if fabric is None else on_fabric(other, fabric))
    except UserError as error:
        raise UserError(f"--scenario {path}: {error}") from None


def _schedule(streams: tuple[str, ...], levels: list[str]) -> Schedule | None:
    """With the connections that were asked for."""
    from hybridep.plan import STREAMS_ALLOWED, Schedule

    given: dict[str, int] = {}
    for option in streams:
        name, _, number = option.partition("=")
        if name not in levels or not number.isdecimal() or not 1 <= int(number) <= STREAMS_ALLOWED:
            raise UserError(
                f"--streams {option}: write it as LEVEL=NUMBER, with a level of {', '.join(levels)} and 1 to {STREAMS_ALLOWED} "
                "connections"
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
    """Both name files that hold plans, in stages or not. Raises UserError where only one does: as clusters or models others would
    not be plans."""
    from hybridep.config import read_yaml
    from hybridep.pipeline import is_pipeline

    def is_plan(path: str) -> bool:
        if not os.path.isfile(path) or Path(path).suffix not in (".yaml", ".yml"):
            return False  # a shipped config's name, or a matrix, or no such file
        data = read_yaml(Path(path))
        return "layers" in data or is_pipeline(data)

    plans = [is_plan(path) for path in (first, second)]
    if plans[0] != plans[1]:
        one, other = (first, second) if plans[0] else (second, first)
        if Path(other).suffix in (".yaml", ".yml") and not os.path.exists(other):
            raise UserError(f"--compare {other}: no such file")
        raise UserError(f"--compare {other}: holds no plan, as {one} does; give two plan files, or a cluster and a model")
    return plans[0]


def _compare(first: str, second: str, as_json: bool) -> None:
    """Two plan files side by side."""
    from hybridep.commands.plan_text import show_difference
    from hybridep.commands.stage_explain_text import show_pipeline_difference
    from hybridep.pipeline import PipelinePlan, load_any_plan
    from planner import compare_pipelines, compare_plans

    one, other = (load_any_plan(Path(path)) for path in (first, second))
    names = Path(first).name, Path(second).name
    are_for_same = one.cluster.site_names == other.cluster.site_names
    if isinstance(one, PipelinePlan) or isinstance(other, PipelinePlan) or not are_for_same:
        in_stages = compare_pipelines(one, other)
        data, show = in_stages.to_json(), partial(show_pipeline_difference, names, in_stages)
    else:
        difference = compare_plans(one, other)
        data, show = difference.to_json(), partial(show_difference, names, difference)
    if as_json:
        emit(data)
    else:
        show()
