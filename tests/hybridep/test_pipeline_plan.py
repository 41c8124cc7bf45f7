"""Pipeline plans: files, what is wrong in them, who passes what to whom, and the bytes on every link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError, PlanMismatchError
from hybridep.pipeline import (
    PipelinePlan,
    is_pipeline,
    load_any_plan,
    order_of_passes,
    pipeline_link_bytes,
    possible_micro_batches,
)
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.traffic import link_bytes, step_traffic


def data_of(**changes: Any) -> dict[str, Any]:
    """Four sites of two ranks in stages of one, two and one of them."""
    placed = [{"first_layer": 0, "num_layers": 1, "domains": {"dc": 1, "gpu": 1}, "migration": {}}]
    sites: list[dict[str, Any]] = [{"name": name} for name in "abcd"]
    return {
        "schema_version": 1,
        "cluster": {
            "name": "four",
            "levels": [
                {"name": "dc", "size": 4, "bandwidth": "1 Gbps", "latency": "2 ms"},
                {"name": "gpu", "size": 2, "bandwidth": "100 Gbps", "latency": "0.01 ms"},
            ],
            "gpu": {"throughput": "1 TFLOPS", "memory": "8 GiB", "memory_bandwidth": "1 TB/s"},
            "sites": sites,
        },
        "workload": {
            "name": "small",
            "model": {
                "num_layers": 4,
                "hidden_size": 16,
                "num_heads": 2,
                "vocab_size": 256,
                "num_experts": 4,
                "top_k": 2,
                "expert_ffn_size": 16,
                "num_dense_layers": 1,
                "dense_ffn_size": 32,
            },
            "training": {"sequence_length": 8, "micro_batch_size": 2, "micro_batches": 2, "dtype": "fp32"},
        },
        "micro_batches": 4,
        "stages": [
            {"sites": ["c"], "num_layers": 2, "layers": placed},
            {"sites": ["d", "a"], "num_layers": 1, "layers": placed},
            {"sites": ["b"], "num_layers": 1, "layers": placed},
        ],
        **changes,
    }


def plan_of(**changes: Any) -> PipelinePlan:
    return build(PipelinePlan, data_of(**changes), "test")


def test_stages_are_plans_for_their_sites_and_layers() -> None:
    plan = plan_of()
    first, middle, last = plan.plans
    assert [site.name for site in middle.cluster.sites] == ["a", "d"]
    assert [one.workload.training.micro_batch_size for one in plan.plans] == [4, 2, 4]
    assert all(one.workload.training.micro_batches == 4 for one in plan.plans)
    models = [one.workload.model for one in plan.plans]
    assert [model.num_dense_layers for model in models] == [1, 0, 0]
    assert [model.part and model.part.first_layer for model in models] == [0, 2, 3]
    assert [model.part and model.part.first_moe_layer for model in models] == [0, 1, 2]
    assert sum(model.total_params for model in models) == plan.workload.model.total_params
    # The first stage has the dense layer, the last the projection.
    tokens = [one.workload.training.tokens for one in plan.plans]
    assert middle.workload.head_flops == 0 and last.workload.head_flops == tokens[2] * 2 * 256 * 16
    whole = plan.workload
    assert first.workload.head_flops / tokens[0] + 2 * 256 * 16 == pytest.approx(whole.head_flops / whole.training.tokens)
    assert [ranks.tolist() for ranks in plan.ranks] == [[4, 5], [0, 1, 6, 7], [2, 3]]
    assert [plan.seat(rank) for rank in range(8)] == [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (1, 2), (1, 3)]
    with pytest.raises(ValueError, match="rank 8: four has ranks 0 to 7"):
        plan.seat(8)


def test_sequences_pass_to_whoever_goes_on_with_them() -> None:
    plan = plan_of()
    ways = plan.ways(0)
    assert ways.source.tolist() == [4, 4, 5, 5] and ways.destination.tolist() == [0, 6, 1, 7]
    assert ways.first.tolist() == [0, 2, 4, 6] and ways.number.tolist() == [2, 2, 2, 2]
    ways = plan.ways(1)
    assert ways.source.tolist() == [0, 6, 1, 7] and ways.destination.tolist() == [2, 2, 3, 3]
    sizes = plan_of(micro_batches=1)
    assert sizes.sequences(0).tolist() == [16] * 2 and sizes.sequences(1).tolist() == [8] * 4


def test_sites_of_a_stage_take_as_many_sequences_but_for_one() -> None:
    placed = [{"first_layer": 0, "num_layers": 1, "domains": {}, "migration": {}}]
    stages = [
        {"sites": ["b"], "num_layers": 2, "layers": placed},
        {"sites": ["d", "a", "c"], "num_layers": 2, "layers": [placed[0] | {"num_layers": 2}]},
    ]
    plan = plan_of(stages=stages, micro_batches=2)
    # 16 sequences of a micro-batch, for two ranks each of one site and of three.
    assert plan.sequences(0).tolist() == [8, 8] and plan.sequences(1).tolist() == [3, 3, 3, 3, 2, 2]
    assert plan.plans[1].workload.training.tokens == 16 / 6 * 8
    ways = plan.ways(0)
    assert ways.source.tolist() == [2, 2, 2, 3, 3, 3] and ways.destination.tolist() == [0, 4, 6, 1, 5, 7]
    assert ways.first.tolist() == [0, 3, 6, 8, 11, 14] and ways.number.tolist() == [3, 3, 2, 3, 3, 2]
    assert [one.workload.training.micro_batches for one in plan.plans] == [2, 2]


@pytest.mark.parametrize("pairs", [False, True])
def test_every_link_carries_what_stages_send_inside_and_between(pairs: bool) -> None:
    data = data_of()
    if pairs:
        data["cluster"]["links"] = [
            {"src": src, "dst": dst, "bandwidth": "1 Gbps", "latency": "1 ms"} for src in "abcd" for dst in "abcd" if src != dst
        ]
    plan = build(PipelinePlan, data, "test")
    loads = dict(zip((link.name for link in plan.cluster.link_table), pipeline_link_bytes(plan), strict=True))
    passed = 4 * 2 * 4 * 8 * 16 * 4  # micro-batches, ranks, sequences of each, tokens, hidden size, bytes
    middle = plan.plans[1]
    inside = dict(
        zip((link.name for link in middle.cluster.link_table), link_bytes(middle.cluster, step_traffic(middle)), strict=True)
    )
    assert loads["c up"] == loads["c down"] == passed
    assert loads["b up"] == passed
    # Half of what comes goes on, and half of the gradients back, beside what the stage's sites exchange.
    assert inside["a up"] > 0 and loads["a up"] == pytest.approx(inside["a up"] + passed)
    assert loads["c/gpu0 up"] == pytest.approx(passed / 2 + link_bytes(plan.plans[0].cluster, step_traffic(plan.plans[0]))[2])
    if pairs:
        assert loads["c -> a"] == loads["a -> c"] == loads["d -> b"] == passed / 2
        assert loads["c -> b"] == loads["b -> c"] == 0 and loads["a -> d"] == pytest.approx(inside["a -> d"])


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    plan, path = plan_of(ahead=2), tmp_path / "plan.yaml"
    plan.save(path)
    loaded = load_any_plan(path, cluster=plan.cluster, workload=plan.workload)
    assert loaded == plan and loaded.digest == plan.digest != plan_of().digest
    slower = load_any_plan(path, overrides=["cluster.levels.0.bandwidth=0.5 Gbps", "ahead=3"])
    assert isinstance(slower, PipelinePlan) and slower.ahead == 3 and slower.digest != plan.digest
    with pytest.raises(PlanMismatchError, match=r"cluster\.levels\.0\.bandwidth"):
        load_any_plan(path, cluster=slower.cluster)
    with pytest.raises(ConfigError, match="aheda"):
        load_any_plan(path, overrides=["aheda=3"])
    path.write_text(path.read_text().replace("schema_version: 1", "schema_version: 7"))
    with pytest.raises(ConfigError, match="schema 1"):
        load_any_plan(path)
    plan.plans[0].save(path)
    assert isinstance(load_any_plan(path), Plan) and not is_pipeline({"layers": [], "schema_version": 1})


def stages_with(place: int, **changes: Any) -> dict[str, Any]:
    stages = data_of()["stages"]
    stages[place] |= changes
    return {"stages": stages}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (stages_with(0, sites=["x"]), "no site 'x' in four; it has a, b, c, d"),
        (stages_with(0, sites=["a"]), "site a is in 2 stages"),
        (stages_with(1, sites=["a"]), "site d is in 0 stages"),
        (stages_with(0, num_layers=3), "5 layers together, the model has 4"),
        (stages_with(0, num_layers=1) | {}, "3 layers together, the model has 4"),
        (stages_with(1, layers=[]), "layers"),
        ({"micro_batches": 5}, "32 sequences of a step in 5 micro-batches leave 6.4 for 1 x 2 ranks"),
        ({"micro_batches": 16}, "leave 2 for 2 x 2 ranks"),
        ({"ahead": 0}, "ahead"),
        ({"schedule": {"prefetch": 1}}, "neither prefetch nor chunks"),
        ({"schedule": {"chunks": 2}}, "neither prefetch nor chunks"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(**changes)


def test_a_stage_needs_experts_and_a_model_two_ends() -> None:
    stages = data_of()["stages"]
    stages[0]["num_layers"], stages[1]["num_layers"] = 1, 2
    with pytest.raises(ConfigError, match="1 layers, 1 of them without experts; each needs one with experts"):
        plan_of(stages=stages)
    data = data_of()
    data["workload"]["model"]["tie_embeddings"] = True
    with pytest.raises(ConfigError, match="tie_embeddings"):
        build(PipelinePlan, data, "test")
    data = data_of()
    data["cluster"]["sites"][1]["experts"] = 0
    with pytest.raises(ConfigError, match=r"stages\.2: no experts live at b .*another site, too"):
        build(PipelinePlan, data, "test")


def test_sites_of_a_stage_share_by_their_weights() -> None:
    """Of four sequences for a rank of each site and stage one site takes three and has no experts, the other one."""
    data = data_of()
    data["cluster"]["sites"][0] |= {"tokens": 3, "experts": 0}
    plan = build(PipelinePlan, data, "test")
    assert [plan.sequences(stage).tolist() for stage in range(3)] == [[4, 4], [3, 3, 1, 1], [4, 4]]
    assert plan.plans[1].home_experts.tolist() == [0, 0, 2, 2]
    ways = plan.ways(0)
    assert list(zip(ways.source, ways.destination, ways.number, strict=True)) == [(4, 0, 3), (4, 6, 1), (5, 1, 3), (5, 7, 1)]
    assert plan.groups == ((2,), (0, 3), (1,))
    every = [(0, 3), (1, 2)]
    # Of 16 sequences; of two together neither site of the first stage can have three quarters.
    assert possible_micro_batches(plan.workload, plan.cluster, every) == [1, 2, 4]
    data["micro_batches"] = 8
    with pytest.raises(ConfigError, match=r"stages\.1: .* leave 4 for 2 x 2 ranks, and those of a site take whole ones each, by"):
        build(PipelinePlan, data, "test")


def test_micro_batches_that_all_stages_can_share() -> None:
    plan = plan_of()
    assert possible_micro_batches(plan.workload, plan.cluster, [(0,), (1, 2), (3,)]) == [1, 2, 4, 8]
    assert possible_micro_batches(plan.workload, plan.cluster, [(0, 1, 2), (3,)]) == [1, 2, 4]
    assert possible_micro_batches(plan.workload, plan.cluster, [(0,), (1,), (2,), (3,)]) == [1, 2, 4, 8, 16]


def test_as_many_micro_batches_are_in_flight_as_the_order_says() -> None:
    for ahead in (1, 2, 5):
        plan = plan_of(ahead=ahead)
        for stage in range(3):
            kept = np.cumsum([1 if forward else -1 for forward, _ in order_of_passes(stage, 3, 4, ahead)])
            assert plan.in_flight(stage) == kept.max() and kept[-1] == 0


def test_stages_that_must_take_the_same_time_are_alike() -> None:
    first, middle, last = plan_of().plans
    data = data_of()
    data["cluster"]["sites"][2] |= {"name": "elsewhere", "up": "2 Gbps"}
    data["stages"][0]["sites"] = ["elsewhere"]
    renamed = build(PipelinePlan, data, "test").plans
    # A site by itself sends nothing over its access link.
    assert first.alike == renamed[0].alike
    assert first.alike != last.alike and middle.alike != last.alike
    faster = data_of()
    faster["cluster"]["sites"][0] |= {"up": "2 Gbps"}
    assert middle.alike != build(PipelinePlan, faster, "test").plans[1].alike
    assert isinstance(middle.cluster, Cluster)
