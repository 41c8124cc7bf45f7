"""``hybridep lab``: a command inside emulated datacenters."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import click

from hybridep.commands.common import emit, note, set_option, verb
from hybridep.errors import LabUnavailableError


@verb(name="lab", context_settings={"ignore_unknown_options": True})
@click.option("--cluster", default="lab-4dc", show_default=True, help="Name or path of the cluster to emulate.")
@click.option(
    "--ray/--no-ray",
    default=True,
    show_default=True,
    help="A Ray node in each datacenter; CMD runs in the first one, with RAY_ADDRESS. Without: on the bridge between them.",
)
@set_option
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED)
def command(cluster: str, ray: bool, overrides: tuple[str, ...], cmd: tuple[str, ...], as_json: bool) -> int:
    """Run CMD where each site of a cluster is a network namespace, with its access link shaped to the site's rates.

    Ends with CMD's exit code. Inside, HYBRIDEP_LAB describes the lab, `hybridep train` starts each rank in its datacenter, and
    CMD reaches every datacenter. Rootless; whatever CMD leaves behind ends with it. Latency and links per pair are not emulated.
    """
    from hybridep.commands.inputs import Kind, load_cluster, sort_overrides
    from hybridep.launch.lab import probe_lab, run_in_lab
    from hybridep.launch.shaping import lab_spec

    emulated = load_cluster(cluster, sort_overrides(overrides, (Kind.CLUSTER,))[Kind.CLUSTER])
    argv = list(cmd)
    if ray:
        argv = [sys.executable, "-m", "hybridep.launch.ray_nodes", str(emulated.ranks_per_site), *argv]
    spec = lab_spec(emulated)
    reason = probe_lab()
    if reason is not None:
        raise LabUnavailableError(reason)
    if not as_json:
        note(f"hybridep lab: {', '.join(dc.name for dc in spec.dcs)}" + (", a Ray node in each" if ray else ""))
    if not as_json:
        return run_in_lab(argv, spec)
    # CMD may print what it likes; stdout is for the one object.
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        code = run_in_lab(argv, spec)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    emit({"exit": code, "datacenters": [asdict(dc) for dc in spec.dcs], "ray": ray})
    return code
