"""The lab that emulates a cluster: one emulated datacenter per site, at the rates of its access link."""

from __future__ import annotations

from hybridep.errors import ConfigError, LabUnavailableError
from hybridep.launch.lab import Lab, LabDatacenter, LabSpec, probe_lab
from hybridep.topology import Cluster

MAX_EMULATED_RANKS = 16
"""More processes than this train too slowly on one machine to start them unasked."""


def lab_spec(cluster: Cluster) -> LabSpec:
    """Access rates of the cluster's sites. Links per pair and latencies cannot be emulated and are left out. Raises
    ConfigError for rates or numbers that the lab cannot carry, and where pods share the access link of a site."""
    for site in cluster.sites:
        if site.part_of is not None:
            raise ConfigError("lab", f"sites.{site.part_of}.pods", "access links that pods share cannot be emulated")
    rates = zip(cluster.site_names, *cluster.access_bytes_per_s.tolist(), strict=True)
    return LabSpec(dcs=tuple(LabDatacenter(name=name, up_bytes_per_s=up, down_bytes_per_s=down) for name, up, down in rates))


def why_not_in_lab(cluster: Cluster) -> str | None:
    """None when a lab for this cluster can be entered here, else the reason in one line."""
    if cluster.num_gpus > MAX_EMULATED_RANKS:
        return f"{cluster.num_gpus} ranks are more than the {MAX_EMULATED_RANKS} that are emulated unasked"
    try:
        lab_spec(cluster)
    except ConfigError as error:
        return str(error)
    return probe_lab()


def lab_for(cluster: Cluster) -> Lab:
    """The lab that this process runs in. Raises LabUnavailableError when it lacks a site of the cluster."""
    lab = Lab.current()
    missing = sorted(set(cluster.site_names) - {site.name for site in lab.sites})
    if missing:
        there = ", ".join(site.name for site in lab.sites)
        raise LabUnavailableError(f"cluster {cluster.name}: the lab has no datacenter {missing[0]} (it has {there})")
    return lab
