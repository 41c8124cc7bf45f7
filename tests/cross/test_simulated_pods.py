"""Sites of several pods: predicted and simulated agree, and what else must know them does."""

from __future__ import annotations

import pytest

import planner
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.launch.shaping import lab_spec
from hybridep.topology import Cluster, only_sites
from planner.check import check
from simulator.conditions import Conditions
from simulator.errors import FabricError
from simulator.fabric_file import Wan
from simulator.many_steps import sites_called
from simulator.routes import with_fabric
from simulator.step import simulate_step


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("pods-4dc", ["levels.gpu.size=2"])


@pytest.mark.parametrize("which", ["plan", "ep", "full_gather"])
def test_predicted_and_simulated_steps_agree_within_a_tenth(cluster: Cluster, which: str) -> None:
    sets = ["model.num_layers=2", "model.num_experts=16", "model.vocab_size=256", "training.micro_batches=2"]
    workload = load_workload("gpt-medium", sets)
    made = planner.plan(cluster, workload, time_limit_s=0.5) if which == "plan" else planner.baseline(cluster, workload, which)
    check(made)
    simulated = simulate_step(made)
    assert simulated.step_s == pytest.approx(made.predicted.step, rel=0.1)
    loads = {link.name: link.size_bytes for link in simulated.links}
    wan = sum(loads[name] for name in ("large up", "middle up", "small-a up", "small-b up"))
    assert wan == pytest.approx(made.predicted.wan_bytes, rel=1e-9)


def test_a_site_is_lost_with_all_its_pods(cluster: Cluster) -> None:
    left = only_sites(cluster, set(cluster.site_names) - set(sites_called(cluster, "large")))
    assert [site.name for site in left.sites] == ["middle-pod0", "middle-pod1", "small-a", "small-b"]
    assert [trunk.name for trunk in left.trunks] == ["middle up", "middle down"]
    assert sites_called(cluster, "large-pod3") == ["large-pod3"]


def test_a_straggler_may_be_a_site_of_several_pods(cluster: Cluster) -> None:
    slow = Conditions.model_validate({"stragglers": [{"worker": "middle", "slowdown": 3}]})
    slow.require(cluster)
    middle = [site.part_of == "middle" for site in cluster.sites]
    assert slow.slowdown(cluster, 0.0).tolist() == [3.0 if one else 1.0 for one in middle for _ in range(2)]


def test_what_cannot_know_pods_says_so(cluster: Cluster) -> None:
    with pytest.raises(FabricError, match="several pods"):
        with_fabric(cluster, build(Wan, {"hub": {"bandwidth": "1 Gbps"}}, "hub"))
    with pytest.raises(ConfigError, match=r"sites.large.pods: .* cannot be emulated"):
        lab_spec(cluster)
