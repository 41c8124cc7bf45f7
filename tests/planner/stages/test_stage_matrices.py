"""Pipelines as matrices over sites."""

from __future__ import annotations

import numpy as np
import pytest
from stage_cases import random_pipeline

from hybridep.pipeline import pipeline_link_bytes
from planner import stage_matrices


@pytest.mark.parametrize("seed", range(12))
def test_bytes_and_layers_are_those_of_the_plan(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    found, cluster = stage_matrices(plan), plan.cluster
    assert [found.sites[at] for at in np.argsort(found.stage, kind="stable")] == list(found.sites)
    written = [(number, name) for number, stage in enumerate(plan.stages) for name in stage.sites]
    assert {*zip(found.stage.tolist(), found.sites, strict=True)} == set(written)
    # What access links and links of pairs carry, counted another way.
    loads, sent = pipeline_link_bytes(plan), found.sent_bytes
    places = [cluster.site_names.index(name) for name in found.sites]
    assert sent.diagonal().max() == 0
    assert sent.sum(axis=1) == pytest.approx(loads[[2 * place for place in places]])
    assert sent.sum(axis=0) == pytest.approx(loads[[2 * place + 1 for place in places]])
    rates = np.array([link.bandwidth_bytes_per_s for link in cluster.link_table])
    assert found.up_s == pytest.approx((loads / rates)[[2 * place for place in places]])
    if cluster.links:
        assert found.pair_s is not None
        for row, src in enumerate(places):
            for column, dst in enumerate(places):
                wanted = sent[row, column] / rates[cluster.pair_link(src, dst)] if src != dst else 0.0
                assert found.pair_s[row, column] == pytest.approx(wanted)
    else:
        assert found.pair_s is None
    # All sites of a stage share out the batch, and every layer is computed once.
    assert found.layers.sum(axis=0) == pytest.approx(np.ones(plan.workload.model.num_layers))
    held = (found.layers > 0).sum(axis=1)
    assert [plan.stages[stage].num_layers for stage in found.stage] == held.tolist()
