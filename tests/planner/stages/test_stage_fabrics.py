"""Pipelines over trunks that sites share: predicted, simulated, and found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.config import build
from hybridep.pipeline import between_sites_bytes, pipeline_link_bytes
from planner import StageWishes, plan_pipeline
from planner.stages.bound import least_s
from planner.stages.costs import costed
from simulator import Conditions
from simulator.errors import PipelineError
from simulator.fabric_file import FabricFile
from simulator.pipeline import fastest_pipeline, simulate_any, simulate_pipeline
from simulator.routes import with_fabric

WANS: dict[str, dict[str, Any]] = {
    "ring": {"ring": {"bandwidth": "500 Mbps", "routing": "ecmp"}},
    "ring one way": {"ring": {"bandwidth": "300 Mbps", "latency": "3 ms"}},
    "hub": {"hub": {"bandwidth": "400 Mbps"}},
    "hub at a site": {"hub": {"bandwidth": "500 Mbps", "at": "s1", "latency": "4 ms"}},
}


def fabric_of(name: str) -> FabricFile:
    return build(FabricFile, {"name": "test", "wan": WANS[name]}, name)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", WANS)
@pytest.mark.parametrize("seed", range(6))
def test_expected_and_simulated_over_a_fabric(seed: int, name: str) -> None:
    plan, fabric = random_pipeline(seed, least_stages=2), fabric_of(name)
    assert fabric.wan is not None
    over = plan.at_rates(with_fabric(plan.cluster, fabric.wan))
    found, bare = simulate_pipeline(over), simulate_pipeline(plan, fabric=fabric)
    # The fabric itself, on the cluster without trunks, is the same network, for stages by themselves, too.
    assert bare.step_s == pytest.approx(found.step_s, rel=1e-9) and bare.work_s == pytest.approx(found.work_s, rel=1e-9)
    expected = costed(over).times
    assert expected.step_s == pytest.approx(found.step_s, rel=0.1)
    assert expected.step_s >= least_s(over.cluster, over.workload, len(over.stages)) * (1 - 1e-9)
    loaded = {link.name: link.size_bytes for link in found.result.links}
    for link, size_bytes in zip(over.cluster.link_table, pipeline_link_bytes(over), strict=True):
        assert loaded[link.name] == pytest.approx(size_bytes, rel=1e-9), link.name


def test_activations_over_a_hub_by_hand() -> None:
    every = (random_pipeline(seed, least_stages=3) for seed in range(100))
    plan, fabric = next(one for one in every if len(one.stages) == one.cluster.sizes[0] > 3), fabric_of("hub")
    assert fabric.wan is not None
    over = plan.at_rates(with_fabric(plan.cluster, fabric.wan))
    between = between_sites_bytes(over)
    loads = dict(zip([link.name for link in over.cluster.link_table], pipeline_link_bytes(over), strict=True))
    # Stages of one site exchange dense gradients with none, so a trunk carries what passes between stages.
    for site, name in enumerate(over.cluster.site_names):
        assert loads[f"trunk {name} -> hub"] == pytest.approx(between[site].sum())
        assert loads[f"trunk hub -> {name}"] == pytest.approx(between[:, site].sum())
    busiest_s = max(float(between.sum(axis=way).max()) for way in (0, 1)) / (400e6 / 8)
    assert costed(over).times.busiest_link_s >= busiest_s * (1 - 1e-9)


def test_the_search_knows_trunks() -> None:
    """Two pairs of sites and one narrow cable between the pairs, of which access links alone tell nothing."""
    cluster, workload = sites_cluster(np.random.default_rng(0), 4, 2, "even"), layered_workload(6)
    crossing = [f"s{a} -> s{b}" for a in (0, 2) for b in (1, 3)]
    back = [" -> ".join(reversed(pair.split(" -> "))) for pair in crossing]
    trunks = [
        {"name": f"trunk {way}", "bandwidth": "50 Mbps", "carries": dict.fromkeys(pairs, 1.0)}
        for way, pairs in (("out", crossing), ("back", back))
    ]
    narrow = build(type(cluster), cluster.model_dump(mode="json", exclude_none=True) | {"trunks": trunks}, "narrow")
    wishes = StageWishes(stages=4)
    aware, blind = (plan_pipeline(one, workload, wishes, time_limit_s=0.5) for one in (narrow, cluster))
    unaware = blind.at_rates(narrow)
    assert aware.predicted.step < 0.9 * costed(unaware).times.step_s
    assert simulate_any(aware).step_s < 0.9 * simulate_any(unaware).step_s


def test_what_is_inside_sites_and_what_is_not_simulated() -> None:
    plan = random_pipeline(5, least_stages=2)
    bare_s = simulate_any(plan).step_s
    switch = {rate: {"nvlink": {"domain": 2, "bandwidth": rate}} for rate in ("100 Gbps", "1 Mbps")}
    wide, narrow = (build(FabricFile, {"name": "switch", "inside": inside}, "switch") for inside in switch.values())
    assert simulate_any(plan, fabric=wide).step_s == pytest.approx(bare_s, rel=1e-9)
    slow = simulate_pipeline(plan, fabric=narrow)
    assert slow.step_s > 1.1 * bare_s and slow.work_s > 1.1 * simulate_pipeline(plan).work_s
    # By the fabric's own names.
    conditions = build(Conditions, {"changes": [{"links": "s0 -> hub", "factor": 0.01}]}, "conditions")
    as_it_is, slowed = (simulate_any(plan, conditions=one, fabric=fabric_of("hub")) for one in (None, conditions))
    assert slowed.step_s > 1.5 * as_it_is.step_s
    optics = build(FabricFile, {"name": "optics", "inside": {"mixnet": {}}}, "optics")
    for simulated in (simulate_any, simulate_pipeline):
        with pytest.raises(PipelineError, match="MixNet inside sites"):
            simulated(plan, fabric=optics)
    with pytest.raises(PipelineError, match="MixNet inside sites"):
        fastest_pipeline(plan.plans[0], fabric=optics)
