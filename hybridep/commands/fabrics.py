"""Fabrics as the command line and scenarios name them, and what plans know of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hybridep.commands.inputs import Kind, find, load_cluster, sort_overrides
from hybridep.config import load
from hybridep.errors import HybridEPError, UserError
from hybridep.topology import Cluster

if TYPE_CHECKING:
    from simulator.fabric_file import FabricFile
    from simulator.scenario import Scenario

MADE_NOW = ("auto", "stages")
"""Plans that a planner makes when a scenario is simulated."""


def fabric_of(text: str | None) -> FabricFile | None:
    """A fabric by its shipped name or its path."""
    if text is None:
        return None
    from simulator.fabric_file import FabricFile

    return load(FabricFile, find(Kind.FABRIC, text))


def on_fabric(cluster: Cluster, name: str) -> Cluster:
    """The cluster over the trunks of a fabric, for a plan file. Raises UserError where a plan cannot know all of it, or would
    hold too many routes, and FabricError where the two do not fit."""
    from simulator.routes import MOST_SITES, with_fabric

    found, sites = fabric_of(name), cluster.sizes[0]
    if found is None or found.wan is None or found.inside.model_fields_set:
        raise UserError(
            f"--fabric {name}: plans know what joins sites (wan), and nothing of what is inside them; simulate the rest"
        )
    if sites > MOST_SITES:
        raise UserError(
            f"--fabric {name}: routes between {sites} sites are too many for a plan file; up to {MOST_SITES} are planned with"
        )
    return with_fabric(cluster, found.wan)


def unknown_to_plans(scenarios: Iterable[Scenario]) -> list[str]:
    """In words, what plans that are made now do not know of the scenarios' fabrics, each once. Nothing of a scenario whose files
    cannot be read, which its simulation says."""
    named = {(one.cluster, one.overrides, one.fabric) for one in scenarios if one.fabric is not None and one.plan in MADE_NOW}
    return sorted({words for each in named for words in _unknown(*each)})


def _unknown(cluster: str | None, overrides: Sequence[str], name: str | None) -> Iterator[str]:
    from simulator.routes import MOST_SITES

    try:
        fabric = fabric_of(name)
        sites = load_cluster(cluster or "", sort_overrides(overrides, (Kind.CLUSTER, Kind.WORKLOAD))[Kind.CLUSTER]).sizes[0]
    except HybridEPError:
        return
    assert fabric is not None
    if fabric.wan is not None and sites > MOST_SITES:
        yield f"the trunks of {name} between {sites} sites, over {MOST_SITES}"
    if fabric.inside.model_fields_set:
        yield f"what {name} has inside sites"
