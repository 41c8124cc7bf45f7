"""``hybridep doctor``: what this machine, and the Ray cluster at RAY_ADDRESS, can do, and how to fix what they cannot."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING

import click

from hybridep.commands.common import emit, verb

if TYPE_CHECKING:
    from hybridep.launch.ray_sites import Node


class Verdict(Enum):
    """Outcome of a check."""

    GOOD = "good"
    LIMITED = "limited"
    """Something optional is missing; the rest works."""
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that this machine has or lacks."""

    name: str
    verdict: Verdict
    found: str
    """Lines."""
    fix: str = ""


@verb(name="doctor")
def command(as_json: bool) -> int:
    """Check Python, torch, processors, Ray, emulated datacenters and the solvers; with RAY_ADDRESS set, also what the nodes of
    that cluster have installed, and whether they reach each other. Exit code 2 when something is broken."""
    checks = [*run_checks(), *cluster_checks(os.environ.get("RAY_ADDRESS"))]
    broken = any(check.verdict is Verdict.BROKEN for check in checks)
    if as_json:
        emit({"ok": not broken, "checks": [{**asdict(check), "verdict": check.verdict.value} for check in checks]})
    else:
        for check in checks:
            first, *others = check.found.splitlines()
            click.echo(f"{check.verdict.value:8} {check.name:14} {first}")
            for line in others:
                click.echo(f"{'':23} {line}")
            if check.fix:
                click.echo(f"{'':23} fix: {check.fix}")
    return 2 if broken else 0


def run_checks() -> Iterator[Check]:
    """Every check; one that raises is broken by what it raised."""
    for name, examine in _CHECKS.items():
        try:
            yield examine(name)
        except Exception as error:
            line = " ".join(str(error).split())
            yield Check(
                name=name, verdict=Verdict.BROKEN, found=f"{type(error).__name__}: {line}", fix="pip install hybridep again"
            )


def _python(name: str) -> Check:
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    fix = "" if good else "use Python 3.11 or 3.12"
    return Check(name=name, verdict=Verdict.GOOD if good else Verdict.BROKEN, found=platform.python_version(), fix=fix)


def _torch(name: str) -> Check:
    from hybridep.launch.machine import torch_facts

    facts = torch_facts()
    if not facts.has_gloo:
        fix = "install a torch build for Linux (pip install torch)"
        return Check(name=name, verdict=Verdict.BROKEN, found=f"{facts.version} without gloo", fix=fix)
    return Check(name=name, verdict=Verdict.GOOD, found=f"{facts.version} with gloo")


def _processors(name: str) -> Check:
    from hybridep.launch.machine import memory_bytes, torch_facts
    from hybridep.units import counted, format_bytes

    found = f"{counted(os.cpu_count() or 1, 'core')}, {format_bytes(memory_bytes())} of memory, swap included"
    devices = torch_facts().cuda_devices
    if devices:
        return Check(name=name, verdict=Verdict.GOOD, found=f"{found}, {len(devices)} x {devices[0]}")
    fix = "none needed to plan, simulate or emulate; for CUDA kernels a GPU and a CUDA build of torch"
    return Check(name=name, verdict=Verdict.LIMITED, found=f"{found}, no CUDA device", fix=fix)


def _ray(name: str) -> Check:
    address = os.environ.get("RAY_ADDRESS")
    where = f"RAY_ADDRESS={address}" if address else "RAY_ADDRESS not set: nodes are started on this machine"
    return Check(name=name, verdict=Verdict.GOOD, found=f"{metadata.version('ray')}, {where}")


def _shared_memory(name: str) -> Check:
    from hybridep.units import format_bytes

    free_bytes = shutil.disk_usage("/dev/shm").free
    enough = free_bytes > 500_000_000
    fix = "" if enough else "Ray keeps 80 MB per emulated datacenter there: docker run --shm-size=2g"
    return Check(
        name=name, verdict=Verdict.GOOD if enough else Verdict.LIMITED, found=f"{format_bytes(free_bytes)} free", fix=fix
    )


def _lab(name: str) -> Check:
    from hybridep.launch.lab import probe_lab

    reason = probe_lab()
    if reason is None:
        return Check(name=name, verdict=Verdict.GOOD, found="datacenters can be emulated with shaped links")
    fix = "train and demo go on with links unshaped; or allow user namespaces (sysctl user.max_user_namespaces=10000)"
    return Check(name=name, verdict=Verdict.LIMITED, found=reason, fix=fix)


def _solvers(name: str) -> Check:
    from hybridep.commands.inputs import load_cluster, load_workload
    from planner import plan

    cluster, workload = load_cluster("lab-4dc"), load_workload("tiny")
    failed: dict[str, str] = {}
    for solver in ("highs", "cbc"):
        try:
            plan(cluster, workload, solver=solver)
        except Exception as error:  # a broken solver raises whatever it likes
            failed[solver] = " ".join(str(error).split())
    if not failed:
        return Check(name=name, verdict=Verdict.GOOD, found="highs and cbc solve a small plan")
    verdict = Verdict.BROKEN if len(failed) == 2 else Verdict.LIMITED
    found = "; ".join(f"{solver} fails: {why}" for solver, why in failed.items())
    return Check(name=name, verdict=verdict, found=found, fix="pip install --force-reinstall highspy pulp")


_CHECKS: dict[str, Callable[[str], Check]] = {
    "python": _python,
    "torch": _torch,
    "processors": _processors,
    "ray": _ray,
    "shared memory": _shared_memory,
    "lab": _lab,
    "solvers": _solvers,
}


def cluster_checks(address: str | None) -> list[Check]:
    """Of the Ray cluster there: its sites, what their nodes have installed, and the ways between them."""
    from hybridep.errors import UserError
    from hybridep.launch.ray_sites import nodes_of

    if not address:
        return []
    try:
        nodes = sorted(nodes_of(address), key=lambda node: (node.dc or "", node.address))
    except UserError as error:
        fix = "ray start on this machine, too, or unset RAY_ADDRESS"
        return [Check(name="ray cluster", verdict=Verdict.BROKEN, found=str(error), fix=fix)]
    return [_sites(nodes), _software(nodes), _connections(nodes)]


def _sites(nodes: Sequence[Node]) -> Check:
    from hybridep.units import counted

    of_sites = dict[str, list[str]]()
    for node in nodes:
        if node.dc:
            gpus = f" and {counted(node.gpus, 'GPU')}" if node.gpus else ""
            of_sites.setdefault(node.dc, []).append(f"{node.address} with {counted(node.cpus, 'CPU')}{gpus}")
    lines = [f"{dc}: {', '.join(machines)}" for dc, machines in of_sites.items()] or ["no node has a site"]
    verdict, fix = Verdict.GOOD, ""
    if strangers := [node.address for node in nodes if not node.dc]:
        lines.append(f"without a site: {', '.join(strangers)}")
        verdict, fix = Verdict.LIMITED, "start nodes that are to train with --labels=dc=SITE"
    if silent := [f"{_name(node)}: {node.error}" for node in nodes if node.error]:
        return Check(name="ray cluster", verdict=Verdict.BROKEN, found="\n".join(lines + silent), fix="ray start there again")
    return Check(name="ray cluster", verdict=verdict, found="\n".join(lines), fix=fix)


def _software(nodes: Sequence[Node]) -> Check:
    from hybridep.units import counted

    here = {package: metadata.version(package) for package in ("hybridep", "torch")}
    python, other, unseen = platform.python_version(), list[str](), list[str]()
    for node in nodes:
        if node.error:
            continue
        if node.python.split(".")[:2] != python.split(".")[:2]:
            other.append(f"{_name(node)}: Python {node.python}, here {python}")
        for package, found in (("hybridep", node.hybridep), ("torch", node.torch)):
            # CPU and CUDA builds of one version go together.
            if found is None or found.split("+")[0] != here[package].split("+")[0]:
                other.append(f"{_name(node)}: {package} {found or 'is not installed'}, here {here[package]}")
        if node.torch and len(node.devices) != node.gpus:
            unseen.append(f"{_name(node)}: Ray counts {counted(node.gpus, 'GPU')}, torch {node.torch} sees {len(node.devices)}")
    if other:
        return Check(
            name="node software",
            verdict=Verdict.BROKEN,
            found="\n".join(other + unseen),
            fix="install the same versions everywhere, in the environment that `ray start` runs in",
        )
    if unseen:
        fix = "a CUDA build of torch there, or ray start --num-gpus=NUMBER"
        return Check(name="node software", verdict=Verdict.LIMITED, found="\n".join(unseen), fix=fix)
    same = ", ".join(f"{package} {version}" for package, version in here.items())
    return Check(name="node software", verdict=Verdict.GOOD, found=f"{same}, on all that answer")


def _connections(nodes: Sequence[Node]) -> Check:
    from hybridep.units import counted

    answered = [node for node in nodes if not node.error]
    names = {node.address: _name(node) for node in answered}
    shut = [f"{_name(node)} -> {names[other]}: {why}" for node in answered for other, why in (node.unreachable or {}).items()]
    if shut:
        fix = "open all TCP ports between the nodes, at the addresses shown (ray start --node-ip-address=...)"
        return Check(name="connections", verdict=Verdict.BROKEN, found="\n".join(shut), fix=fix)
    return Check(
        name="connections", verdict=Verdict.GOOD, found=f"open both ways between all of {counted(len(answered), 'node')}"
    )


def _name(node: Node) -> str:
    return f"{node.dc or 'no site'} ({node.address})"
