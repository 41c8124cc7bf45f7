"""Measures the step time of many plans with one start of the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridep.arrays import IntArray
from hybridep.config import build
from hybridep.launch.backends import results_of
from hybridep.launch.folders import scratch_folder
from hybridep.launch.worker import Job
from hybridep.pipeline import AnyPlan
from hybridep.routing import RoutingRecord
from hybridep.run import Run

if TYPE_CHECKING:
    from runtime.probe import Probe

_EXCHANGE_TIMEOUT = "60 s"
_WARMUP_STEPS = 2000
"""Steps over which the learning rate rises: gates hardly move in a few, so every trial and every step of it routes alike."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One plan's steps, all ranks together."""

    step_s: tuple[float, ...]
    """[timed steps]: seconds of the slowest rank; untimed ones pay for memory and connections that later ones reuse."""
    wan_bytes: float
    """Payload bytes between sites in a step, all ranks together."""
    parts_s: dict[str, tuple[float, ...]]
    """Operation and level -> [ranks] seconds in the last step."""
    popularity: tuple[tuple[tuple[float, ...], ...], ...]
    """[steps][MoE layers][experts]: share of each expert in all choices of a step (``Plan.popularity``). It begins with the steps
    that ``step_s`` leaves out."""
    routing: RoutingRecord
    """Popularity of experts, and what tokens chose in the recorded steps."""

    @property
    def median_s(self) -> float:
        """Median of ``step_s``."""
        return statistics.median(self.step_s)


def measure(
    plans: Sequence[AnyPlan],
    *,
    steps: int,
    untimed: int = 1,
    recorded_steps: int = 0,
    probe_s: float | None = None,
) -> tuple[list[Measured], list[Probe]]:
    """Train every plan (of one cluster) for ``steps`` steps, the first ``untimed`` of which are not timed, in this order and
    with one start of the ranks: as processes of this machine, inside a lab in its datacenters.
    With ``probe_s`` links and computation are measured before the first plan of each workload, too, for about that long each:
    one probe per workload. Every choice of the first ``recorded_steps`` is kept.
    Raises what ``Controller.run`` raises."""
    from runtime.probe import probe_of, summarise

    with scratch_folder() as folder:
        fields = {
            "name": "trials",
            "cluster": plans[0].cluster.name,
            "workload": plans[0].workload.name,
            "output": str(folder),
            "steps": steps,
            "exchange_timeout": _EXCHANGE_TIMEOUT,
            "optimizer": {"warmup_steps": _WARMUP_STEPS},
        }
        run = build(Run, fields, "trials")
        job = Job(run=run, plan=plans[0], trials=tuple(plans), probe_s=probe_s, recorded_steps=recorded_steps)
        ranks = results_of(job, local=True)
    measured = [_together(one, untimed, recorded_steps) for one in zip(*(rank["trials"] for rank in ranks), strict=True)]
    probes = [summarise([probe_of(one) for one in same]) for same in zip(*(rank["probes"] for rank in ranks), strict=True)]
    return measured, probes


def _together(ranks: Sequence[dict[str, Any]], untimed: int, recorded_steps: int) -> Measured:
    steps = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    names = sorted({name for rank in ranks for name in rank["parts_s"]})
    chosen_RSLE = np.array([rank["choices"] for rank in ranks])
    popularity = [RoutingRecord(chosen=chosen_LE).popularity() for chosen_LE in chosen_RSLE.sum(axis=0)]
    choices: dict[tuple[int, int], IntArray] = {}
    num_layers = chosen_RSLE.shape[2]
    for step in range(recorded_steps):
        micro_batches = len(ranks[0]["ids"][step]) // num_layers
        for place in range(micro_batches * num_layers):
            micro_batch, layer = divmod(place, num_layers)
            found = np.array([rank["ids"][step][place] for rank in ranks])
            choices[layer, step * micro_batches + micro_batch] = found
    return Measured(
        step_s=tuple(steps[untimed:]),
        wan_bytes=float(sum(rank["wan_bytes"] for rank in ranks)),
        parts_s={name: tuple(rank["parts_s"].get(name, 0.0) for rank in ranks) for name in names},
        popularity=tuple(popularity),
        routing=RoutingRecord(chosen=chosen_RSLE[:, :recorded_steps].sum(axis=(0, 1)), choices=choices),
    )
