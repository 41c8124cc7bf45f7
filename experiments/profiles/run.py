"""Turn tables of measured site pairs into cluster files.

    .venv/bin/python experiments/profiles/run.py --input skyplane=throughput.csv --input dtfm=pairs.csv --input egress=costs.csv

A table is a CSV file with the columns ``src``, ``dst``, a bandwidth in Gbit/s and a round-trip time in milliseconds;
the names of the last two, the sites to take and the text above the file are in ``config.yaml``. A table of prices has the
columns ``src``, ``dst`` and ``cost`` in dollars per gigabyte.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.config import load
from hybridep.topology import Cluster

HERE = Path(__file__).resolve().parent
CLUSTERS = HERE.parent.parent / "configs" / "clusters"

GPUS_PER_SITE = 8
# An A100 of 80 GB: 312 TFLOPS bf16 peak at about 48 % utilisation, NVLink 3 at 300 GB/s each way.
INSIDE = f"""\
  - {{name: gpu, size: {GPUS_PER_SITE}, bandwidth: 2400 Gbps, latency: 5 us}}
gpu: {{throughput: 150 TFLOPS, memory: 80 GiB, memory_bandwidth: 2 TB/s}}
"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    bandwidth_gbps: float
    latency_ms: float
    """One way: half the measured round trip."""


def read_pairs(table: Path, recipe: Mapping[str, Any]) -> dict[tuple[str, str], Pair]:
    """Ordered pair of sites -> what was measured; raises ClickException when a pair is missing."""
    prefix, wanted = recipe["prefix"], set(recipe["sites"])
    pairs: dict[tuple[str, str], Pair] = {}
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if not (row["src"].startswith(prefix) and row["dst"].startswith(prefix)):
                continue
            source, destination = row["src"].removeprefix(prefix), row["dst"].removeprefix(prefix)
            if source == destination or not {source, destination} <= wanted:
                continue
            pair = Pair(
                bandwidth_gbps=float(row[recipe["bandwidth_column"]]),
                latency_ms=float(row[recipe["rtt_column"]]) / 2,
            )
            pairs[source, destination] = pair
            if not recipe["ordered"]:
                pairs[destination, source] = pair
    missing = [(a, b) for a in recipe["sites"] for b in recipe["sites"] if a != b and (a, b) not in pairs]
    if missing:
        raise click.ClickException(f"{table}: no row for {missing[0][0]} -> {missing[0][1]} ({len(missing)} pairs missing)")
    return pairs


def read_prices(table: Path, sites: list[str]) -> dict[str, str]:
    """Site -> what a gigabyte costs that leaves it; raises ClickException where that depends on where it goes."""
    prices: dict[str, set[str]] = {site: set() for site in sites}
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row["src"] in prices and row["dst"] in prices and row["src"] != row["dst"]:
                prices[row["src"]].add(row["cost"])
    for site, found in prices.items():
        if len(found) != 1:
            raise click.ClickException(f"{table}: {site} has the prices {sorted(found)}; one is needed")
    return {site: found.pop() for site, found in prices.items()}


def cluster_lines(
    name: str, recipe: Mapping[str, Any], pairs: Mapping[tuple[str, str], Pair], prices: Mapping[str, str]
) -> Iterator[str]:
    """The lines of the cluster file."""
    sites = recipe["sites"]
    yield from (f"# {line}" for line in recipe["comment"].splitlines())
    yield "# Written by experiments/profiles/run.py."
    yield f"name: {name}"
    yield "levels:"
    yield "  # Medians, for reading only: every site has its own access link and every pair its own link (below)."
    median = statistics.median
    yield (
        f"  - {{name: dc, size: {len(sites)}, bandwidth: {median(p.bandwidth_gbps for p in pairs.values()):g} Gbps,"
        f" latency: {median(p.latency_ms for p in pairs.values()):g} ms}}"
    )
    rent = f", price: {recipe['gpu_price']}" if "gpu_price" in recipe else ""
    yield from INSIDE.replace("2 TB/s}", f"2 TB/s{rent}}}").splitlines()
    yield "sites:"
    for site in sites:
        up = max(pair.bandwidth_gbps for (source, _), pair in pairs.items() if source == site)
        down = max(pair.bandwidth_gbps for (_, destination), pair in pairs.items() if destination == site)
        price = f", egress: {prices[site]} $/GB" if site in prices else ""
        yield f"  - {{name: {site}, up: {up:g} Gbps, down: {down:g} Gbps{price}}}"
    yield "links:"
    for source in sites:
        for destination in sites:
            if source != destination:
                pair = pairs[source, destination]
                yield (
                    f"  - {{src: {source}, dst: {destination}, bandwidth: {pair.bandwidth_gbps:g} Gbps,"
                    f" latency: {round(pair.latency_ms, 4):.7g} ms}}"
                )


@click.command(help=__doc__)
@click.option("--input", "inputs", multiple=True, required=True, metavar="NAME=CSV", help="A table.")
@click.option("--output", default=CLUSTERS, type=click.Path(path_type=Path), show_default="configs/clusters")
def main(inputs: tuple[str, ...], output: Path) -> None:
    tables = dict(entry.split("=", 1) for entry in inputs)
    recipes = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    for name, recipe in recipes.items():
        if recipe["input"] not in tables:
            click.echo(f"{name}: skipped, no --input {recipe['input']}=CSV")
            continue
        pairs = read_pairs(Path(tables[recipe["input"]]), recipe)
        if recipe.get("prices", recipe["input"]) not in tables:
            raise click.ClickException(f"{name}: its prices need --input {recipe['prices']}=CSV")
        prices = read_prices(Path(tables[recipe["prices"]]), recipe["sites"]) if "prices" in recipe else {}
        path = output / f"{name}.yaml"
        path.write_text("\n".join(cluster_lines(name, recipe, pairs, prices)) + "\n", encoding="utf-8")
        load(Cluster, path)
        bandwidths = [pair.bandwidth_gbps for pair in pairs.values()]
        click.echo(f"{path}: {len(pairs)} ordered pairs, {min(bandwidths):g} to {max(bandwidths):g} Gbps")


if __name__ == "__main__":
    main()
