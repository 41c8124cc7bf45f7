"""A pipeline as matrices over sites, in the order of its stages: who has which layers, who sends to whom, how busy links are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.pipeline import PipelinePlan, between_sites_bytes, pipeline_link_s
from hybridep.traffic import step_traffic


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMatrices:
    """Sites stand in the order of the stages, [D]."""

    sites: tuple[str, ...]
    stage: IntArray
    """[D]: the stage that a site is in."""
    layers: FloatArray
    """[D, layers of the model]: share of all sequences for which the site computes the layer."""
    sent_bytes: FloatArray
    """[D, D]: what the row's site sends to the column's in a step, inside stages and between them."""
    up_s: FloatArray
    """[D]: seconds of a step that a site's up link is busy."""
    down_s: FloatArray
    """[D]."""
    pair_s: FloatArray | None
    """[D, D] from row to column; None where only access links limit."""


def stage_matrices(plan: PipelinePlan) -> StageMatrices:
    """Of any pipeline."""
    cluster, size = plan.cluster, plan.cluster.sizes[0]
    places = [own[:: cluster.ranks_per_site] // cluster.ranks_per_site for own in plan.ranks]
    order, sent = np.concatenate(places), between_sites_bytes(plan)
    layers, first = np.zeros((size, plan.workload.model.num_layers)), 0
    for number, (stage, sites) in enumerate(zip(plan.stages, places, strict=True)):
        own = plan.sequences(number)[:: cluster.ranks_per_site]
        layers[sites, first : first + stage.num_layers] = (own / own.sum())[:, None]
        first += stage.num_layers
        for (_, level), rows in step_traffic(plan.plans[number]).items():
            if level == 0:
                sent[np.ix_(sites, sites)] += rows.reshape(len(sites), -1, len(sites)).sum(axis=1)
    busy_s, pair_s = pipeline_link_s(plan), None
    if cluster.links:
        pairs = np.zeros((size, size))
        pairs[~np.eye(size, dtype=np.bool_)] = busy_s[cluster.pair_links]
        pair_s = pairs[np.ix_(order, order)]
    return StageMatrices(
        sites=tuple(cluster.site_names[site] for site in order),
        stage=np.repeat(np.arange(len(places)), [len(sites) for sites in places]),
        layers=layers[order],
        sent_bytes=sent[np.ix_(order, order)],
        up_s=busy_s[: 2 * size : 2][order],
        down_s=busy_s[1 : 2 * size : 2][order],
        pair_s=pair_s,
    )
