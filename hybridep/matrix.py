"""Clusters from a CSV matrix: a row per pair of sites, with its bandwidth and round trip."""

from __future__ import annotations

from itertools import permutations
from operator import ge, gt
from pathlib import Path
from typing import Any

from hybridep.config import read_csv
from hybridep.errors import ConfigError
from hybridep.units import Dimension, exact, gbps_to_bytes_per_s, ms_to_s


def matrix_profile(path: Path) -> dict[str, Any]:
    """Cluster data from a CSV matrix with the columns src,dst,gbps,rtt_ms (one row per pair: all pairs both ways, or each once,
    which then holds both ways). A site's access rate is the largest of its pairs. What a matrix cannot say is assumed: 8 GPUs per
    site joined at 400 Gbps, 300 TFLOPS and 80 GiB each; change it with ``--set``. Raises ConfigError with the line."""
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    for line, row in read_csv(path, ("src", "dst", "gbps", "rtt_ms")):
        for column, limit, keeps in (("gbps", "above zero", gt), ("rtt_ms", "at least zero", ge)):
            try:
                good = keeps(float(row[column]), 0) and float(row[column]) < float("inf")
            except ValueError:
                good = False
            if not good:
                raise ConfigError(f"{path}:{line}", column, f"must be a number {limit} (found {row[column]!r})")
        src, dst = row["src"].strip(), row["dst"].strip()
        if not src or not dst or src == dst or (src, dst) in pairs:
            raise ConfigError(f"{path}:{line}", "src,dst", f"{src!r} -> {dst!r} is empty, a loop, or given before")
        pairs[src, dst] = gbps_to_bytes_per_s(float(row["gbps"])), ms_to_s(float(row["rtt_ms"])) / 2
    one_way = [pair for pair in pairs if pair[::-1] not in pairs]
    if 0 < len(one_way) < len(pairs):
        src, dst = one_way[0]
        raise ConfigError(
            str(path), "src,dst", f"{src} -> {dst} has a row and the reverse has none; give all pairs both ways, or each once"
        )
    for src, dst in one_way:
        pairs[dst, src] = pairs[src, dst]
    sites = list(dict.fromkeys(name for pair in pairs for name in pair))
    for pair in permutations(sites, 2):
        if pair not in pairs:
            raise ConfigError(str(path), "src,dst", f"no row for {pair[0]} -> {pair[1]} nor the reverse; add one")

    def rate(value: float) -> str:
        return exact(value, Dimension.BANDWIDTH)

    fastest = max(bandwidth for bandwidth, _ in pairs.values())
    return {
        "name": path.stem,
        "levels": [
            {"name": "dc", "size": len(sites), "bandwidth": rate(fastest), "latency": "0 s"},
            {"name": "gpu", "size": 8, "bandwidth": "400 Gbps", "latency": "10 us"},
        ],
        "gpu": {"throughput": "300 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "2 TB/s"},
        "sites": [
            {
                "name": site,
                "up": rate(max(pairs[pair][0] for pair in pairs if pair[0] == site)),
                "down": rate(max(pairs[pair][0] for pair in pairs if pair[1] == site)),
            }
            for site in sites
        ],
        "links": [
            {"src": src, "dst": dst, "bandwidth": rate(bandwidth), "latency": exact(latency, Dimension.TIME)}
            for (src, dst), (bandwidth, latency) in pairs.items()
        ],
    }
