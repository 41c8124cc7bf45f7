"""What ``hybridep probe`` tells people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridep.commands.common import stdout_console

if TYPE_CHECKING:
    from hybridep.sites import ClusterFile
    from hybridep.topology import Cluster
    from runtime.probe import Probe


def show(given: ClusterFile, measured: ClusterFile) -> None:
    """What the file says beside what was measured."""
    from rich.table import Table

    from hybridep.codecs import KINDS
    from hybridep.units import format_bandwidth, format_bytes, format_seconds, format_throughput

    table = Table("", "in the file", "measured", box=None, pad_edge=False)
    for before, after in zip(given.levels, measured.levels, strict=True):
        table.add_row(f"{before.name} bandwidth", format_bandwidth(before.bandwidth), format_bandwidth(after.bandwidth))
        table.add_row(f"{before.name} latency", format_seconds(before.latency), format_seconds(after.latency))
        if before.window is not None or after.window is not None:
            windows = ("" if level.window is None else format_bytes(level.window) for level in (before, after))
            table.add_row(f"{before.name} window of a connection", *windows)
        if before.pods and after.pods:
            links = before.pods, after.pods
            table.add_row(f"{before.name} pods bandwidth", *(format_bandwidth(link.bandwidth) for link in links))
            table.add_row(f"{before.name} pods latency", *(format_seconds(link.latency) for link in links))
    old = {site.name: site for site in given.sites}
    for site in measured.sites:
        for name in ("up", "down"):
            rates = [one and getattr(one, name) for one in (old.get(site.name), site)]
            if any(rates):
                table.add_row(f"{site.name} {name}", *(format_bandwidth(rate) if rate else "" for rate in rates))
        for name in ("throughput", "expert throughput", "memory bandwidth"):
            speeds = [one and one.gpu and getattr(one.gpu, name.replace(" ", "_")) for one in (old.get(site.name), site)]
            if any(speeds):
                in_words = format_bandwidth if name.endswith("bandwidth") else format_throughput
                table.add_row(f"{site.name} {name}", *(in_words(speed) if speed else "" for speed in speeds))
    gpus = given.gpu, measured.gpu
    table.add_row("throughput", *(format_throughput(gpu.throughput) for gpu in gpus))
    table.add_row("expert throughput", *(format_throughput(gpu.expert_throughput or gpu.throughput) for gpu in gpus))
    table.add_row("memory bandwidth", *(format_bandwidth(gpu.memory_bandwidth) for gpu in gpus))
    table.add_row("ranks per processor", *(f"{gpu.sharing:.3g}" for gpu in gpus))
    for name in ("block overhead", "message overhead", "pass overhead", "jitter", "expert overhead"):
        table.add_row(name, *(format_seconds(getattr(gpu, name.replace(" ", "_"))) for gpu in gpus))
    codings = [gpu.coding for gpu in gpus]
    for kind in KINDS:
        for codec in getattr(codings[1] or codings[0], kind, {}):
            both = (speeds and getattr(speeds, kind).get(codec) for speeds in codings)
            shown = (f"{format_bandwidth(one.encode)} + {format_bandwidth(one.decode)}" if one else "" for one in both)
            table.add_row(f"{kind} {codec.value}, code + decode", *shown)
    stdout_console().print(table)


def show_pairs(cluster: Cluster, found: Probe) -> None:
    """What each pair of sites gets, and how much computation and exchanges slow each other."""
    from rich.table import Table

    from hybridep.units import format_bandwidth, format_bytes, format_seconds

    sizes = sorted({point.size_bytes for pair in found.pairs for point in pair.points})
    columns = ["pair", "latency", "streams", *(format_bytes(size) for size in sizes)]
    table = Table(*columns, box=None, pad_edge=False)
    for pair in found.pairs:
        name, latency = f"{cluster.site_name(pair.src)} -> {cluster.site_name(pair.dst)}", format_seconds(pair.latency_s)
        for streams in sorted({point.streams for point in pair.points}):
            rates = {point.size_bytes: point.bytes_per_s for point in pair.points if point.streams == streams}
            table.add_row(name, latency, str(streams), *(format_bandwidth(rates[size]) for size in sizes))
            name = latency = ""
    console = stdout_console()
    console.print(table)
    if (both := found.contention) is not None:
        slower = both.products_per_s_beside / both.products_per_s, both.bytes_per_s_beside / both.bytes_per_s
        console.print(
            f"computation keeps {slower[0]:.0%} of its speed beside exchanges between sites, which keep {slower[1]:.0%} of "
            f"{format_bandwidth(both.bytes_per_s)} per rank beside computation"
        )
