"""Plans made in place of others: where experts live then, and what of the others stays."""

from __future__ import annotations

import pytest

import planner
from hybridep.commands.named_plans import named_plan
from hybridep.config import build
from hybridep.errors import InfeasibleError
from hybridep.plan import Plan, Popularity
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.memory import memory_use


def small_site() -> tuple[Cluster, Workload]:
    """Four sites, of which the slow first one has little memory."""
    rates = {"a": (20, 20), "b": (200, 200), "c": (100, 50), "d": (10, 40)}
    sites = [{"name": name, "up": f"{up} Mbps", "down": f"{down} Mbps"} for name, (up, down) in rates.items()]
    sites[0] |= {"gpu": {"memory": "5 MB"}}
    levels = [
        {"name": "dc", "size": 4, "bandwidth": "20 Mbps", "latency": "1 ms"},
        {"name": "gpu", "size": 2, "bandwidth": "1 Gbps", "latency": "0.1 ms"},
    ]
    gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
    model = {"num_layers": 4, "num_dense_layers": 1, "dense_ffn_size": 64, "hidden_size": 32, "num_heads": 2, "vocab_size": 256}
    model |= {"num_experts": 10, "top_k": 2, "expert_ffn_size": 256}
    training = {"sequence_length": 32, "micro_batch_size": 2, "micro_batches": 2, "dtype": "fp64"}
    cluster = build(Cluster, {"name": "four", "levels": levels, "gpu": gpu, "sites": sites}, "test")
    return cluster, build(Workload, {"name": "mini", "model": model, "training": training}, "test")


POPULAR = ((0.5, *[0.5 / 9] * 9), (*[0.5 / 9] * 9, 0.5), (0.1,) * 10)


@pytest.mark.parametrize("popularity", [(), POPULAR])
def test_new_plans_leave_experts_where_they_are(popularity: Popularity) -> None:
    """For the same sites; without some of them experts live where there is room, and what is popular counts."""
    cluster, workload = small_site()
    before = planner.plan(cluster, workload, popularity=popularity, free_homes=True, time_limit_s=2)
    assert all(group.homes for group in before.layers)
    slower = cluster.model_copy(update={"sites": (*cluster.sites[:3], cluster.sites[3].model_copy(update={"up": 2e5}))})
    made = named_plan("auto", slower, workload, before=before, time_limit_s=2)
    assert made.popularity == popularity and isinstance(made, Plan) and memory_use(made).fits
    assert [layers.placement.home.tolist() for layers in made.placed] == [one.placement.home.tolist() for one in before.placed]
    left = on_sites(cluster, workload, {"a", "b", "c"})
    with pytest.raises(InfeasibleError, match="a/gpu0 needs"):
        planner.plan(*left, time_limit_s=1)
    made = named_plan("auto", *left, before=before, time_limit_s=2)
    assert made.popularity == popularity and isinstance(made, Plan) and memory_use(made).fits
