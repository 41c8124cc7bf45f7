"""Chooses where the ranks of a run start, and brings up what they need there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridep.launch.controller import Controller
from hybridep.launch.lab import DC_VARIABLE, LAB_VARIABLE
from hybridep.launch.local_backend import LocalGroup
from hybridep.launch.machine import require_room
from hybridep.launch.policies import Patience
from hybridep.launch.ray_group import RayGroup
from hybridep.launch.ray_nodes import RayNodes, places_in_lab, places_on_loopback, require_labels
from hybridep.launch.session import Backend
from hybridep.launch.shaping import lab_for
from hybridep.launch.worker import Job

# Ray needs some missed health checks to tell that a node is gone; its neighbours complain at once.
RAY_PATIENCE = Patience(complaint_s=9.0)


def in_lab() -> bool:
    """Whether this process runs inside a lab."""
    return LAB_VARIABLE in os.environ


def results_of(job: Job, *, local: bool) -> list[dict[str, Any]]:
    """Run a job that measures; what each rank found, in their order. Raises what ``backend_for`` and ``Controller.run`` raise."""
    with backend_for(job, local=local) as backend:
        controller = Controller(backend.group, job.dcs, on_step=lambda record: None, patience=backend.patience)
        controller.run()
    return [controller.results[rank] for rank in sorted(controller.results)]


@contextmanager
def backend_for(job: Job, *, local: bool) -> Iterator[Backend]:
    """Local processes when ``local``; actors on the Ray cluster at RAY_ADDRESS; else actors on Ray nodes that live as long
    as the context. Inside a lab every rank starts in its datacenter. Raises LabUnavailableError when the lab lacks a site
    of the cluster, UserError when this machine has too little memory for ranks that are to start on it, and RayStartError."""
    cluster = job.plan.cluster
    lab = lab_for(cluster) if in_lab() else None
    address = os.environ.get("RAY_ADDRESS")
    if local or lab or not address:
        require_room(job)
    if local:
        yield Backend(name="local", group=LocalGroup(job, lab), shaped=lab is not None)
    elif address:
        require_labels(cluster.datacenters)
        own_dc = os.environ.get(DC_VARIABLE, "the driver's datacenter")
        yield Backend(name="ray", group=RayGroup(job, address, own_dc), shaped=lab is not None, patience=RAY_PATIENCE)
    else:
        places = places_in_lab(lab) if lab else places_on_loopback(cluster.datacenters)
        wanted = set(cluster.datacenters)
        places = [place for place in places if place.dc in wanted]
        with RayNodes(places, cluster.ranks_per_site) as nodes:
            head = places[0]
            group = RayGroup(job, nodes.address, head.dc, prefix=head.prefix)
            yield Backend(name="ray", group=group, shaped=lab is not None, patience=RAY_PATIENCE)
