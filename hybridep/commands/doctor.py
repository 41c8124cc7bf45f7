"""``hybridep doctor``: what this machine can do, and how to fix what it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum

import click

from hybridep.commands.common import emit, verb


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
    fix: str = ""


@verb(name="doctor")
def command(as_json: bool) -> int:
    """Check Python, torch, processors, Ray, emulated datacenters and the solvers. Exit code 2 when something is broken."""
    checks = list(run_checks())
    broken = any(check.verdict is Verdict.BROKEN for check in checks)
    if as_json:
        emit({"ok": not broken, "checks": [{**asdict(check), "verdict": check.verdict.value} for check in checks]})
    else:
        for check in checks:
            click.echo(f"{check.verdict.value:8} {check.name:14} {check.found}")
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
    from importlib import metadata

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
