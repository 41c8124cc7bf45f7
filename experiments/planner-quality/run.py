"""Plans on measured site-to-site profiles against those of other planners, under the cost model and the simulator.

    .venv/bin/python experiments/planner-quality/run.py --input skyplane=throughput.csv --input dtfm=pairs.csv

One row per profile, model and planner in ``results/quality.csv``; rows that are there are not computed again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from hybridep.arrays import IntArray
from hybridep.commands.plan_choice import SEARCHED, by_simulation, choose, most_simulated
from hybridep.commands.tables import read_rows, write_rows
from hybridep.config import build, load
from hybridep.placement import divisors
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import expected_s, plans
from planner.clock import now_s
from planner.sites.evaluate import home_of
from planner.sites.grouping import Groups, Share, groups_of, shared_table
from planner.sites.others import OTHERS, other_plan, rank_order_domains
from planner.sites.plans import table_plan
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import Found, Search
from planner.sites.strategy import group_starts
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent.parent / "configs" / "models"
COLUMNS = (
    *("profile", "sites", "model", "planner", "step_s", "gain", "fits", "simulated_s", "simulated_gain"),
    *("expected_s", "off", "bound_s", "gap", "plan_cpu_s", "others_same_homes"),
)
SWAPS = 600
"""Tables that the search for domains may try after its starts."""


def cluster_of(name: str, recipe: Mapping[str, Any], site: Mapping[str, Any], table: Path) -> Cluster:
    """A site's access rate is the largest of its pairs."""
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            src, dst = row["src"], row["dst"]
            if src != dst and src.startswith(recipe["prefix"]) and dst.startswith(recipe["prefix"]):
                pairs[src, dst] = float(row[recipe["bandwidth_column"]]), float(row[recipe["rtt_column"]]) / 2
                if not recipe["ordered"]:
                    pairs[dst, src] = pairs[src, dst]
    names = sorted({src for src, _ in pairs})
    missing = [pair for pair in permutations(names, 2) if pair not in pairs]
    if missing:
        raise click.ClickException(f"{table}: no row for {missing[0][0]} -> {missing[0][1]} ({len(missing)} missing)")
    rates = {pair: value[0] for pair, value in pairs.items()}
    data = {
        "name": name,
        "levels": [
            {"name": "dc", "size": len(names), "bandwidth": "1 Gbps", "latency": "0 s"},
            {"name": "gpu", "size": site["ranks"], "bandwidth": site["bandwidth"], "latency": site["latency"]},
        ],
        "gpu": {key: site[key] for key in ("throughput", "memory", "memory_bandwidth")},
        "sites": [
            {
                "name": one,
                "up": f"{max(rates[one, other] for other in names if other != one)} Gbps",
                "down": f"{max(rates[other, one] for other in names if other != one)} Gbps",
            }
            for one in names
        ],
        "links": [
            {"src": a, "dst": b, "bandwidth": f"{pairs[a, b][0]} Gbps", "latency": f"{pairs[a, b][1]} ms"}
            for a, b in permutations(names, 2)
        ],
    }
    return build(Cluster, data, str(table))


def searched_domains(problem: SiteProblem) -> Found:
    """Domains whose members are searched, experts spread evenly among the sites that a token can reach: what HybridEP's scheme
    gains from knowing the links, without sites of unequal parts. As many groups of such sites as divide the sites, which begin
    equally large; the search may make them unequal."""
    search = Search(problem=problem)
    for table in rank_order_domains(problem):
        search.evaluate(table)
    even, ranked = Share(), []
    for groups, _ in group_starts(problem, divisors(problem.num_sites), (even,)):
        table = shared_table(problem, groups, even)
        ranked.append((search.evaluate(table).rank, groups))
    for _, groups in sorted(ranked)[:2]:
        search.max_evaluations = search.evaluations + SWAPS // 2
        improve_groups(search, groups, even, np.random.default_rng(0))
    assert search.best is not None
    return search.best


def improve_groups(search: Search, groups: Groups, share: Share, rng: np.random.Generator) -> Found:
    """Move a site to another group, or swap two, while it helps."""
    problem = search.problem
    size = problem.num_sites
    label = np.empty(size, dtype=np.int64)
    for number, members in enumerate(groups):
        label[list(members)] = number

    def evaluated(labels: IntArray) -> Found:
        return search.evaluate(shared_table(problem, groups_of(labels), share))

    here = evaluated(label)
    patience = 0
    while patience < 8 * size and not search.over:
        trial = label.copy()
        if rng.random() < 0.5:
            trial[rng.integers(size)] = rng.integers(label.max() + 2)
        else:
            a, b = rng.integers(size, size=2)
            trial[a], trial[b] = label[b], label[a]
        there = evaluated(trial)
        patience = 0 if there.rank < here.rank else patience + 1
        if there.rank <= here.rank:
            label, here = trial, there
    return here


def rows_of(name: str, cluster: Cluster, model: str, workload: Workload, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per planner, ours first: the plan with the shortest step; of the best ones the one whose simulated step is
    shortest; and the one that ``hybridep plan`` chooses within its limit, whose simulated step is the shortest among those whose
    step is no longer than any other planner's (searched domains aside).

    ``gain`` is a step over the first's, ``simulated_gain`` a simulated step over the second's, ``off`` the simulated step over
    the expected one - 1; ``others_same_homes`` the shortest step of all other planners (searched domains, too) if experts lived
    where the first's do, over the first's.
    """
    problem = site_problem(cluster, workload)
    started, until_s = time.process_time(), now_s() + config["time_limit_s"]
    best = plans(cluster, workload, config["top"], time_limit_s=SEARCHED * config["time_limit_s"], free_homes=True)
    plan_s = time.process_time() - started
    choice = choose(best, None, until_s=until_s, most=most_simulated(best, config["time_limit_s"]))
    found = {other: other_plan(problem, other) for other in OTHERS} | {"searched_domains": searched_domains(problem)}
    ours, (chosen, simulated_s) = best[0], by_simulation(best, [])
    least_s = simulated_s[0]
    assert ours.solver is not None and ours.prediction is not None
    cost_s = ours.prediction.step

    def row(planner: str, step_s: float, fits: bool, its_simulated_s: float, its_expected_s: float) -> dict[str, Any]:
        return {
            "profile": name,
            "sites": problem.num_sites,
            "model": model,
            "planner": planner,
            "step_s": f"{step_s:.6g}",
            "gain": f"{step_s / cost_s:.4f}",
            "fits": fits,
            "simulated_s": f"{its_simulated_s:.6g}",
            "simulated_gain": f"{its_simulated_s / least_s:.4f}",
            "expected_s": f"{its_expected_s:.6g}",
            "off": f"{its_simulated_s / its_expected_s - 1:+.4f}",
        }

    rows = []
    digests = [one.digest for one in chosen]
    places = {"hybridep": digests.index(ours.digest), "hybridep_simulated": 0, "hybridep_both": digests.index(choice.plan.digest)}
    for planner, place in places.items():
        prediction = chosen[place].prediction
        assert prediction is not None
        rows.append(row(planner, prediction.step, True, simulated_s[place], prediction.expected_s))
    report = ours.solver
    rows[0] |= {"bound_s": f"{report.bound:.6g}", "gap": f"{report.gap:.4f}", "plan_cpu_s": f"{plan_s:.1f}"}
    alike = site_problem(cluster, workload, home=home_of(ours))
    alike_s = min(searched_domains(alike).rank, *(other_plan(alike, other).rank for other in OTHERS))[1]
    rows[0] |= {"others_same_homes": f"{alike_s / cost_s:.4f}"}
    known: dict[bytes, tuple[float, float]] = {}
    for other, one in found.items():
        assert one.configuration is not None
        key = one.table.tobytes() + str(one.configuration).encode()
        if key not in known:
            its_plan = table_plan(problem, one.table, one.configuration)
            known[key] = simulate_step(its_plan).step_s, expected_s(its_plan)
        rows.append(row(other, one.rank[1], one.rank[0] == 0, *known[key]))
    return rows


@click.command(help=__doc__)
@click.option("--input", "inputs", multiple=True, required=True, metavar="NAME=CSV", help="A table.")
@click.option("--only", default="", help="Profiles, comma separated.")
@click.option("--time-limit", "time_limit_s", type=float, help="Seconds of wall time for a plan, in place of the config's.")
def main(inputs: tuple[str, ...], only: str, time_limit_s: float | None) -> None:
    tables = dict(entry.split("=", 1) for entry in inputs)
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    config |= {} if time_limit_s is None else {"time_limit_s": time_limit_s}
    out = HERE / "results" / "quality.csv"
    every: list[dict[str, Any]] = [*read_rows(out)]
    done = {(row["profile"], row["model"]) for row in every}
    for name, recipe in config["profiles"].items():
        if recipe["input"] not in tables or (only and name not in only.split(",")):
            continue
        cluster = cluster_of(name, recipe, config["site"], Path(tables[recipe["input"]]))
        for model, layers in config["models"].items():
            if (name, model) in done:
                click.echo(f"{name}, {model}: in {out} already", err=True)
                continue
            overrides = [f"model.num_layers={layers}", "model.num_dense_layers=0"]
            workload = load(Workload, MODELS / f"{model}.yaml", overrides)
            rows = rows_of(name, cluster, model, workload, config)
            write_rows(out, every := [*every, *rows], COLUMNS)
            for row in rows:
                click.echo("  ".join(f"{key} {row[key]}" for key in COLUMNS if row.get(key) not in (None, "")))


if __name__ == "__main__":
    main()
