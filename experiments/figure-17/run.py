"""HybridEP's Fig. 17, up to 1000 datacenters: the gain over expert parallelism with a fixed domain size, with a fixed share p,
and with what the planner chooses, against bandwidth and number of datacenters.

    .venv/bin/python experiments/figure-17/run.py [--smoke]

results/paper.csv has the paper's own model (Eq. 10) over everything that the paper leaves open; results/steps.csv whole simulated
steps; results/gains.csv and figure-17.png what the two say. Rows that are there are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import yaml
from schemes import Setting, schemes
from summary import draw, gains

from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.units import Dimension, parse
from planner.paper import latency_s, share_of_domain

HERE = Path(__file__).resolve().parent
Row = dict[str, str]


def paper_rows(config: dict[str, Any]) -> Iterator[Row]:
    """Gains by Eq. 10: over bandwidths, the least and the greatest of each setting."""
    for sites, data, expert, ratio, before in product(
        *(config[key] for key in ("sites", "data", "expert", "compression", "pre_expert"))
    ):
        sizes = {f"S={size}": share_of_domain(sites, size) for size in config["domains"] if size <= sites}
        for name, share in (sizes | {f"p={share}": share for share in config["shares"]}).items():
            found = []
            for bandwidth in config["bandwidth"]:
                terms = {
                    "data_bytes": parse(data, Dimension.SIZE),
                    "num_gpus": sites,
                    "bandwidth_bytes_per_s": parse(bandwidth, Dimension.BANDWIDTH),
                    "pre_expert_s": parse(before, Dimension.TIME),
                }
                plain_s = latency_s(1.0, expert_bytes=parse(expert, Dimension.SIZE), **terms)
                found.append(plain_s / latency_s(share, expert_bytes=parse(expert, Dimension.SIZE) / ratio, **terms))
            yield {
                "sites": str(sites),
                "fixed": name,
                "data": data,
                "expert": expert,
                "compression": str(ratio),
                "pre_expert": before,
                "least_gain": f"{min(found):.4f}",
                "most_gain": f"{max(found):.4f}",
            }


def settings(config: dict[str, Any]) -> Iterator[Setting]:
    for name, recipe in config["workloads"].items():
        for sites, bandwidth in product(config["sites"], config["bandwidth"]):
            yield Setting(name=name, recipe=recipe, sites=sites, bandwidth=bandwidth, config=config)


@click.command(help=__doc__)
@click.option("--smoke", is_flag=True, help="8 sites, one bandwidth, one workload: does it run?")
@click.option("--most-sites", type=int, help="Leave out larger settings.")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(smoke: bool, most_sites: int | None, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    steps = config["steps"]
    if smoke:
        small = config["smoke"]
        steps |= small | {"workloads": {name: steps["workloads"][name] for name in small["workloads"]}}
    results = results / "smoke" if smoke else results
    results.mkdir(parents=True, exist_ok=True)
    write_rows(results / "paper.csv", list(paper_rows(config["paper"])))
    rows = read_rows(results / "steps.csv")
    done = {(row["workload"], row["sites"], row["bandwidth"], row["scheme"]) for row in rows}
    for setting in settings(steps):
        if most_sites is not None and setting.sites > most_sites:
            continue
        for name, scheme in schemes(setting).items():
            if (*setting.key, name) in done:
                continue
            step, choice = scheme()
            rows.append(
                {
                    **dict(zip(("workload", "sites", "bandwidth"), setting.key, strict=True)),
                    "scheme": name,
                    "step_s": f"{step.step_s:.6g}",
                    "wan_gb": f"{setting.sent_gb(step):.6g}",
                    "choice": choice,
                }
            )
            write_rows(results / "steps.csv", rows)
        click.echo("  ".join(setting.key), err=True)
    found = gains(rows)
    write_rows(results / "gains.csv", found)
    for row in found:
        click.echo("  ".join(f"{key} {value}" for key, value in row.items()))
    draw(results / "figure-17.png", read_rows(results / "paper.csv"), found)
    write_provenance(results)


if __name__ == "__main__":
    main()
