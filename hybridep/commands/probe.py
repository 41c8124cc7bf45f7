"""``hybridep probe``: measured links and computation -> cluster file."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from hybridep.commands.common import OUTPUT, again_in_lab, emit, set_option, verb
from hybridep.commands.probe_text import show, show_pairs
from hybridep.run import Device

if TYPE_CHECKING:
    from hybridep.codecs import Speeds
    from hybridep.sites import ClusterFile
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from runtime.probe import Probe
    from runtime.probe_compute import ComputeProbe
    from runtime.probe_links import PairProbe

AnyCluster = TypeVar("AnyCluster", bound="ClusterFile")

AT_ADDRESS = "ray"
"""In place of a cluster file: what the Ray cluster at RAY_ADDRESS has."""
PAIRS_DIFFER = 0.2
"""Share of the median by which a pair's bandwidth or latency may differ before all pairs get links of their own, or a site's
access rate before all sites get theirs."""
GPUS_DIFFER = 0.2
"""Share of the slowest site's rates by which another's may be higher before all sites get their own."""
SHARED = 1.5
"""From so many ranks at a time on a processor on, what they take is much by chance."""


@verb(name="probe")
@click.argument("cluster", default="lab-4dc")
@click.argument("model", default="tiny")
@click.option("-o", "--output", type=OUTPUT, help="Cluster file to write.  [default: CLUSTER-measured.yaml]")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=0.3, show_default=True, help="Per measurement.")
@click.option(
    "--thorough",
    is_flag=True,
    help="Measure every ordered pair of sites by itself, by message size and number of connections, what one connection may have "
    "under way where several are faster, what leaves and enters each site, what its GPUs take, and how much computation and "
    "exchanges slow each other, too; some seconds per pair.  [always where sites have pods or GPUs of their own]",
)
@click.option(
    "--links/--no-links",
    default=None,
    help="Write a link per pair (with --thorough).  [default: where the file has them or pairs differ by more than 20 %]",
)
@click.option(
    "--device",
    type=click.Choice([device.value for device in Device]),
    default=Device.AUTO.value,
    show_default=True,
    help="Where ranks compute: on GPUs where torch sees some that the kernels run on, or on CPU.",
)
@set_option
def command(
    cluster: str,
    model: str,
    output: Path | None,
    seconds: float,
    thorough: bool,
    links: bool | None,
    device: str,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Measure each level's latency and bandwidth, and the computation and codecs of MODEL, with as many ranks as CLUSTER has
    (lab-4dc and tiny where left out).

    With RAY_ADDRESS set: on that Ray cluster, and with `ray` as CLUSTER no file is needed: sites, machines and GPUs are those of
    its nodes. Without: with processes on this machine, in emulated datacenters where the kernel allows it (then the outermost
    level comes out as it is shaped). Sites are copied, and so are links per pair and access rates unless --thorough.
    """
    from hybridep.commands.inputs import Kind, load_cluster_file, load_workload, sort_overrides
    from hybridep.config import require_writable, write_yaml
    from hybridep.launch.backends import in_lab
    from hybridep.topology import Cluster, cluster_data

    sorted_out = sort_overrides(overrides, (Kind.CLUSTER, Kind.WORKLOAD))
    workload = load_workload(model, sorted_out[Kind.WORKLOAD])
    # As it is written: with pods that are no sites yet.
    own = sorted_out[Kind.CLUSTER]
    given = at_address(Device(device), own) if cluster == AT_ADDRESS else load_cluster_file(cluster, own)
    whole = Cluster.model_validate(cluster_data(given))
    path = output or Path(f"{given.name}-measured.yaml")
    require_writable("--output", path.parent)
    if not in_lab() and not os.environ.get("RAY_ADDRESS"):
        words = [cluster, model, "--seconds", str(seconds), "--device", device, *["--thorough"] * thorough]
        words += ["--output", str(output)] if output else []
        words += [] if links is None else ["--links" if links else "--no-links"]
        code = again_in_lab("probe", words, whole, overrides, as_json)
        if code is not None:
            return code
    found = measure(whole, workload, seconds, thorough=thorough, device=Device(device))
    measured = with_pairs(with_access(with_gpus(with_measurements(given, found), found), found), found, links)
    write_yaml(path, measured.model_dump(mode="json", exclude_none=True))
    if as_json:
        answer = {"output": str(path), "shaped": in_lab(), "cluster": measured.model_dump(mode="json")}
        if found.pairs:
            answer["pairs"] = [
                {**asdict(pair), "src": whole.site_name(pair.src), "dst": whole.site_name(pair.dst)} for pair in found.pairs
            ]
            answer["access"] = [asdict(site) for site in found.access]
            answer["contention"] = found.contention and asdict(found.contention)
        emit(answer)
    else:
        show(given, measured)
        if found.pairs:
            show_pairs(whole, found)
        click.echo(f"cluster written to {path}")
    return 0


def at_address(device: Device, overrides: Sequence[str]) -> ClusterFile:
    """What the Ray cluster at RAY_ADDRESS has, with ``--set`` applied; nothing of it is measured yet. Raises UserError."""
    from hybridep.commands.inputs import build_with
    from hybridep.errors import UserError
    from hybridep.launch.ray_profile import profile
    from hybridep.launch.ray_sites import nodes_of
    from hybridep.sites import ClusterFile

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise UserError(
            f"cluster {AT_ADDRESS!r}: RAY_ADDRESS is not set; set it to the address of a Ray cluster, or name a cluster file"
        )
    fields = profile(nodes_of(address), use_gpus=device is not Device.CPU)
    return build_with(ClusterFile, fields, f"RAY_ADDRESS={address}", overrides)


def measured_cluster(cluster: Cluster, workload: Workload, seconds: float = 0.3) -> Cluster:
    """Measure with all ranks of ``cluster``: on the Ray cluster at RAY_ADDRESS, else local processes, in the lab where inside
    one. Returns the cluster with measured levels and computation; what was not measured stays."""
    return with_measurements(cluster, measure(cluster, workload, seconds))


def measure(
    cluster: Cluster, workload: Workload, seconds: float, *, thorough: bool = False, device: Device = Device.AUTO
) -> Probe:
    """What all ranks of ``cluster`` find together; see ``measured_cluster``. Sites with pods or GPUs of their own imply
    ``thorough``."""
    from hybridep.launch.backends import results_of
    from hybridep.launch.folders import scratch_folder
    from hybridep.launch.worker import Job
    from hybridep.run import Run
    from planner import baseline
    from runtime.probe import probe_of, summarise

    thorough |= any(site.part_of or site.gpu for site in cluster.sites)
    with scratch_folder() as folder:
        run = Run(name="probe", cluster=cluster.name, workload=workload.name, output=folder, steps=1, device=device)
        job = Job(run=run, plan=baseline(cluster, workload, "ep"), probe_s=seconds, thorough=thorough)
        probes = [probe_of(fields) for fields in results_of(job, local=not os.environ.get("RAY_ADDRESS"))]
    return summarise(probes, cluster.rank_datacenters if thorough else ())


def with_measurements(cluster: AnyCluster, found: Probe) -> AnyCluster:
    """The cluster with what was measured in place of what its file says."""
    by_name = {level.name: level for level in found.levels}
    window_bytes = found.window_bytes
    if window_bytes is not None and found.several is not None:
        # Over one connection per pair of ranks the level's rate was that of the windows.
        fastest = max(by_name[found.several.name], found.several, key=lambda level: level.bandwidth_bytes_per_s)
        by_name[fastest.name] = replace(by_name[fastest.name], bandwidth_bytes_per_s=fastest.bandwidth_bytes_per_s)
    levels = tuple(
        level.model_copy(
            update={
                "latency": _rounded(by_name[level.name].latency_s),
                "bandwidth": _rounded(by_name[level.name].bandwidth_bytes_per_s),
            }
            if level.name in by_name
            else {}
        )
        for level in cluster.levels
    )
    if found.pairs:
        outer = levels[0].model_copy(update={"window": None if window_bytes is None else _rounded(window_bytes)})
        levels = (outer, *levels[1:])
    gpu = cluster.gpu.model_copy(
        update=_of_gpu(found.compute)
        | {
            "sharing": _rounded(found.compute.sharing),
            "jitter": _rounded(found.jitter_s),
            "message_overhead": _rounded(found.message_overhead_s),
            "coding": _speeds(found),
        }
    )
    return cluster.model_copy(update={"levels": levels, "gpu": gpu})


def with_gpus(cluster: AnyCluster, found: Probe) -> AnyCluster:
    """The cluster with what each site's ranks take to compute, if sites have GPUs of their own or, where ranks share no
    processors, one's throughput or memory bandwidth is further than ``GPUS_DIFFER`` from the slowest site's."""
    from hybridep.gpus import SiteGpu

    measured = dict(found.site_compute)
    rates = [
        tuple(getattr(one, name) for one in measured.values())
        for name in ("throughput_flops_per_s", "expert_throughput_flops_per_s", "memory_bandwidth_bytes_per_s")
    ]
    differ = found.compute.sharing < SHARED and any(max(same) > (1 + GPUS_DIFFER) * min(same) for same in rates if same)
    if not measured or not (differ or any(site.gpu for site in cluster.sites)):
        return cluster
    sites = []
    for site in cluster.named_sites:
        own = _of_gpu(measured[site.name])
        sites.append(site.model_copy(update={"gpu": (site.gpu or SiteGpu()).model_copy(update=own)}))
    return cluster.model_copy(update={"sites": tuple(sites)})


def _of_gpu(found: ComputeProbe) -> dict[str, float]:
    """The fields of ``gpus.SiteGpu`` that are measured."""
    return {
        "throughput": _rounded(found.throughput_flops_per_s),
        "memory_bandwidth": _rounded(found.memory_bandwidth_bytes_per_s),
        "block_overhead": _rounded(found.block_overhead_s),
        "expert_throughput": _rounded(found.expert_throughput_flops_per_s),
        "expert_overhead": _rounded(found.expert_overhead_s),
        "pass_overhead": _rounded(found.pass_overhead_s),
    }


def with_pairs(cluster: AnyCluster, found: Probe, links: bool | None = None) -> AnyCluster:
    """The cluster with a link for each measured pair of sites where ``links`` says so; where it says nothing, if the cluster has
    links or a pair is further than ``PAIRS_DIFFER`` from the median one. Of sites with pods the median pair of pods counts."""
    from hybridep.topology import data_with_sites

    of_sites = _of_sites(cluster, found)
    between = [path for (src, dst), path in of_sites.items() if src != dst]
    if not between or links is False:
        return cluster
    if links is None and not cluster.links and not any(_differ(values) for values in zip(*between, strict=True)):
        return cluster
    given = {(link.src, link.dst): link for link in cluster.links}
    fields = data_with_sites(cluster)
    fields["links"] = []
    for (src, dst), (bandwidth, latency) in of_sites.items():
        if src != dst:
            kept = given[src, dst].model_dump(mode="json", exclude_none=True) if (src, dst) in given else {}
            fields["links"].append({**kept, "src": src, "dst": dst, "bandwidth": _rate(bandwidth), "latency": _time(latency)})
    return type(cluster).model_validate(fields)


def with_access(cluster: AnyCluster, found: Probe) -> AnyCluster:
    """The cluster with the measured access rates of each site, if it has such rates, or sites with pods, or one is further than
    ``PAIRS_DIFFER`` from the median; and with what joins the pods of sites."""
    from hybridep.topology import data_with_sites

    rates = {site.site: (site.up_bytes_per_s, site.down_bytes_per_s) for site in found.access}
    all_rates = [rate for both in rates.values() for rate in both if rate is not None]
    pods = [site.pod_bytes_per_s for site in found.access if site.pod_bytes_per_s is not None]
    if not (pods or any(site.up or site.down for site in cluster.sites) or (all_rates and _differ(all_rates))):
        return cluster
    fields = data_with_sites(cluster)
    for site in fields["sites"]:
        site |= {name: _rate(rate) for name, rate in zip(("up", "down"), rates[site["name"]], strict=True) if rate is not None}
    outer, of_sites = fields["levels"][0], _of_sites(cluster, found)
    if pods:
        latencies = {same: [s for (src, dst), (_, s) in of_sites.items() if (src == dst) is same] for same in (True, False)}
        outer["pods"] = {"bandwidth": _rate(statistics.median(pods)), "latency": _time(statistics.median(latencies[True]))}
        if all_rates:
            outer |= {"bandwidth": _rate(statistics.median(all_rates)), "latency": _time(statistics.median(latencies[False]))}
    return type(cluster).model_validate(fields)


def _of_sites(cluster: ClusterFile, found: Probe) -> dict[tuple[str, str], tuple[float, float]]:
    """Bandwidth and latency of the way from one site to another, and between pods of one: of the median pair of pods."""
    pairs: dict[tuple[str, str], list[PairProbe]] = {}
    for pair in found.pairs:
        pairs.setdefault((cluster.datacenters[pair.src], cluster.datacenters[pair.dst]), []).append(pair)
    return {
        way: (statistics.median(pair.bandwidth_bytes_per_s for pair in same), statistics.median(pair.latency_s for pair in same))
        for way, same in pairs.items()
    }


def _rate(bytes_per_s: float) -> str:
    return f"{_rounded(bytes_per_s):.10g} B/s"


def _time(seconds: float) -> str:
    return f"{_rounded(seconds):.10g} s"


def _differ(values: Sequence[float]) -> bool:
    median = statistics.median(values)
    return any(abs(value - median) > PAIRS_DIFFER * median for value in values)


def _speeds(found: Probe) -> Speeds | None:
    from hybridep.codecs import Speeds

    speeds: dict[str, dict[str, dict[str, str]]] = {}
    for one in found.codecs:
        rates = {"encode": one.encode_bytes_per_s, "decode": one.decode_bytes_per_s}
        speeds.setdefault(one.kind, {})[one.codec] = {name: f"{_rounded(rate):.10g} B/s" for name, rate in rates.items()}
    return Speeds.model_validate(speeds) if speeds else None


def _rounded(value: float) -> float:
    # Further digits would only be noise in a file for people.
    return float(f"{value:.4g}")
