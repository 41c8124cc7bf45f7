"""Between sites that differ, what does it bring to plan for experts whose popularity is known, layer by layer?

The plan that ``hybridep plan --routing`` makes for it is set beside the best equal domains chosen for it layer by layer, and
beside the plan made as if all experts were alike, which then meets them as they are; by cost and simulated. What the same search
finds with experts at home in even blocks, and what one site alone takes, stand beside them; and what the same
plans take once popularity has changed (``changed.csv``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import planner
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.commands.plan_choice import planned
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.plan import Plan, Popularity
from hybridep.workload import Workload
from planner.measured import plans_measured
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
OTHERS = ("domains", "unknown")
COLUMNS = (
    *("cluster", "concentration", "largest_share", "plan_s", "domains_s", "unknown_s", "even_s", "gap"),
    *("simulated_plan_s", "simulated_domains_s", "simulated_unknown_s", "simulated_even_s", "simulated_alone_s"),
)
CHANGED = ("cluster", "concentration", "changed", "plan_s", "unknown_s", "simulated_plan_s", "simulated_unknown_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--cluster", action="append", default=[], help="further clusters, for example a CSV matrix")
    parser.add_argument("--smoke", action="store_true", help="one case in little time, no verdict: does it run?")
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    folder = given.results.resolve() / ("smoke" if given.smoke else "")
    rows: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    for name in (*config["clusters"], *given.cluster):
        for concentration in config["concentrations"]:
            row, after = rows_of(config, name, concentration)
            rows.append(row)
            changed += after
            write_rows(folder / "rows.csv", rows, COLUMNS)
            write_rows(folder / "changed.csv", changed, CHANGED)
    write_provenance(folder)
    return 0 if given.smoke else summarise(rows)


def rows_of(config: dict[str, Any], name: str, concentration: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of both tables."""
    cluster, workload, limit_s = load_cluster(name), load_workload(config["model"]), config["time_limit_s"]
    popularity = drawn(workload, concentration, config["seed"])
    made, even = (planned(cluster, workload, limit_s, popularity=popularity, free_homes=free) for free in (True, False))
    [domains] = plans_measured(cluster, workload, popularity)
    unknown = planned(cluster, workload, limit_s).with_popularity(popularity)
    case = {"cluster": Path(name).stem, "concentration": concentration}
    row = case | {"largest_share": f"{max(map(max, popularity)):.3f}"}
    row |= seconds({"plan": made, "domains": domains, "unknown": unknown, "even": even})
    one = planner.alone(cluster, workload, popularity=popularity)
    row["simulated_alone_s"] = f"{simulate_step(one).step_s:.4g}" if one is not None else ""
    print({**row, "gap": _gap(made)}, file=sys.stderr, flush=True)
    changed = []
    for share in config["changed"]:
        other = mixed(popularity, drawn(workload, concentration, config["seed"] + 1), share)
        changed.append(
            case | {"changed": share} | seconds({"plan": made.with_popularity(other), "unknown": unknown.with_popularity(other)})
        )
    return row | {"gap": _gap(made)}, changed


def seconds(plans: Mapping[str, Plan]) -> dict[str, str]:
    """Steps by cost and simulated, by the plan's name."""
    return {
        key: f"{value:.4g}"
        for kind, plan in plans.items()
        for key, value in ((f"{kind}_s", planner.step_cost(plan).step_s), (f"simulated_{kind}_s", simulate_step(plan).step_s))
    }


def mixed(popularity: Popularity, other: Popularity, share: float) -> Popularity:
    """So much of it the other one."""
    made = (1 - share) * np.array(popularity) + share * np.array(other)
    return tuple(tuple((row / row.sum()).tolist()) for row in made)


def drawn(workload: Workload, concentration: float, seed: int) -> tuple[tuple[float, ...], ...]:
    """[MoE layers][E] shares; no expert is chosen by all tokens, none by nearly nobody."""
    model = workload.model
    shares = np.random.default_rng(seed).dirichlet(np.full(model.num_experts, concentration), size=model.num_moe_layers) + 1e-3
    for _ in range(50):
        shares = np.minimum(shares / shares.sum(axis=1, keepdims=True), 0.99 / model.top_k)
    return tuple(tuple(float(share) for share in row / row.sum()) for row in shares)


def _gap(made: Plan) -> str:
    assert made.solver is not None
    return f"{made.solver.gap:.3f}"


def summarise(rows: list[dict[str, Any]]) -> int:
    """1 where another one is shorter, by cost or simulated."""
    behind = False
    for row in rows:
        by_cost, simulated = ([float(row[f"{way}{kind}_s"]) for kind in ("plan", *OTHERS)] for way in ("", "simulated_"))
        ratios = ", ".join(
            f"{kind} x {cost / by_cost[0]:.3f} by cost, x {step_s / simulated[0]:.3f} simulated"
            for kind, cost, step_s in zip(OTHERS, by_cost[1:], simulated[1:], strict=True)
        )
        print(
            f"{row['cluster']}, concentration {row['concentration']:g}: {by_cost[0]:g} s, {simulated[0]:g} s simulated; {ratios}"
        )
        behind |= by_cost[0] > min(by_cost) or simulated[0] > min(simulated)
    return int(behind)


if __name__ == "__main__":
    sys.exit(main())
