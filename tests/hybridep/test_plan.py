import pytest

from hybridep.codecs import EXACT, Codecs, TokenCodec
from hybridep.config import build
from hybridep.errors import ConfigError, PlanMismatchError
from hybridep.pipeline import load_any_plan
from hybridep.plan import LayerGroup, Plan, Residency
from hybridep.recompute import ALL, Recompute
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload

CLUSTER = {
    "name": "c",
    "levels": [
        {"name": "dc", "size": 4, "bandwidth": "200 Mbps", "latency": "0.1 ms"},
        {"name": "gpu", "size": 2, "bandwidth": "8 Gbps", "latency": "10 us"},
    ],
    "gpu": {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"},
}
MODEL = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "vocab_size": 256,
    "num_experts": 16,
    "top_k": 2,
    "expert_ffn_size": 64,
}
WORKLOAD = {"name": "w", "model": MODEL, "training": {"sequence_length": 64, "micro_batch_size": 2}}


def cluster(**changes):
    return build(Cluster, CLUSTER | changes, "c")


def workload(**changes):
    return build(Workload, WORKLOAD | changes, "w")


def plan():
    groups = (
        LayerGroup(first_layer=0, num_layers=2, domains={"dc": 2, "gpu": 2}, migration={"dc": 0.5}),
        LayerGroup(first_layer=2, num_layers=1, domains={"dc": 1}, migration={}, residency=Residency.MICROBATCH),
    )
    return Plan(cluster=cluster(), workload=workload(), layers=groups)


def test_a_plan_survives_its_file(tmp_path):
    plan().save(tmp_path / "plan.yaml")
    loaded = load_any_plan(tmp_path / "plan.yaml", cluster=cluster(), workload=workload())
    assert loaded == plan()
    assert loaded.digest == plan().digest
    assert [layer for layer, _, _ in loaded.each_layer()] == [0, 1, 2]


def test_a_changed_copy_computes_what_it_had_anew():
    made = plan()
    assert len(made.home_experts) == 8 and made.level_codecs == (EXACT, EXACT) and len(made.placed) == 2
    wide = made.model_copy(update={"cluster": cluster(levels=[CLUSTER["levels"][0], CLUSTER["levels"][1] | {"size": 4}])})
    assert len(wide.home_experts) == 16 and wide.placements[0].sizes == (4, 4)
    more = made.model_copy(update={"workload": workload(model=MODEL | {"num_experts": 32})})
    assert more.home_experts.sum() == 3 * 32 and more.placements[0].num_experts == 32
    alone = made.layers[0].model_copy(update={"num_layers": 3, "domains": {}, "migration": {}})
    assert [layers.group for layers in made.model_copy(update={"layers": (alone,)}).placed] == [alone]
    coded = Codecs(tokens=TokenCodec.FP8)
    assert made.model_copy(update={"codecs": {"dc": coded}}).level_codecs == (coded, EXACT)
    assert len(made.home_experts) == 8 and made.level_codecs == (EXACT, EXACT) and len(made.placed) == 2


def test_another_cluster_or_model_is_named(tmp_path):
    plan().save(tmp_path / "plan.yaml")
    levels = [CLUSTER["levels"][0] | {"bandwidth": "100 Mbps"}, CLUSTER["levels"][1]]
    with pytest.raises(PlanMismatchError, match=r"cluster\.levels\.0\.bandwidth: plan has 0\.2 Gbps, here it is 0\.1 Gbps"):
        load_any_plan(tmp_path / "plan.yaml", cluster=cluster(levels=levels))
    assert "d; and 2 more. Make" in str(PlanMismatchError("plan.yaml", "abcdef"))
    with pytest.raises(PlanMismatchError, match=r"workload\.model\.top_k: plan has 2, here it is 4"):
        load_any_plan(tmp_path / "plan.yaml", workload=workload(model=MODEL | {"top_k": 4}))


def test_a_plan_for_some_of_the_sites_is_for_the_cluster_that_has_them(tmp_path):
    named = [{"name": name} for name in ("a", "b", "c", "d")]
    every, path = cluster(sites=named), tmp_path / "plan.yaml"
    some, work = on_sites(every, workload(), ["b", "d"])
    group = LayerGroup(first_layer=0, num_layers=3, domains={"dc": 2}, migration={})
    Plan(cluster=some, workload=work, layers=(group,)).save(path)
    assert load_any_plan(path, cluster=every, workload=workload()).cluster == some
    with pytest.raises(PlanMismatchError, match=r"training\.micro_batches: plan has 2, here it is 4"):
        load_any_plan(path, cluster=every, workload=workload(training=WORKLOAD["training"] | {"micro_batches": 2}))
    with pytest.raises(PlanMismatchError, match=r"model\.top_k: plan has 2, here it is 4"):
        load_any_plan(path, cluster=every, workload=workload(model=MODEL | {"top_k": 4}))
    with pytest.raises(PlanMismatchError, match=r"cluster\.levels\.0\.size|cluster\.sites"):
        load_any_plan(path, cluster=cluster(sites=[*named[:3], {"name": "e"}]), workload=workload())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version: 1", "schema_version: 9", "schema_version.*found 9"),
        ("domains: {dc: 2, gpu: 2}", "domains: {dc: 3, gpu: 2}", r"size 3 must divide the level's size 4; use 1, 2, 4"),
        ("domains: {dc: 2, gpu: 2}", "domains: {rack: 2}", "no level 'rack'"),
        ("migration: {dc: 0.5}", "migration: {dc: 1.5}", "between 0 and 1"),
        ("first_layer: 2", "first_layer: 1", "first_layer 1 should be 2"),
        ("residency: microbatch", "residency: forever", "residency"),
        ("num_layers: 2\n", "num_layerz: 2\n", "did you mean 'num_layers'"),
    ],
)
def test_a_broken_plan_is_one_line(tmp_path, old, new, message):
    path = tmp_path / "plan.yaml"
    plan().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        load_any_plan(path)
    assert str(path) in str(caught.value)


def test_a_truncated_plan_is_refused_at_any_length(tmp_path):
    path = tmp_path / "plan.yaml"
    plan().save(path)
    text = path.read_text()
    for length in range(0, text.index("residency: microbatch"), 97):
        path.write_text(text[:length])
        with pytest.raises(ConfigError):
            load_any_plan(path)


def test_overrides_ask_what_the_same_placement_would_do_elsewhere(tmp_path):
    path = tmp_path / "plan.yaml"
    plan().save(path)
    faster = load_any_plan(path, overrides=["cluster.levels.dc.bandwidth=1 Gbps"])
    assert faster.cluster.levels[0].bandwidth == 1.25e8
    assert faster.layers == plan().layers
    with pytest.raises(ConfigError, match=r"cluster\.levels\.0\.bandwith.*did you mean 'bandwidth'"):
        load_any_plan(path, overrides=["cluster.levels.dc.bandwith=1 Gbps"])


@pytest.mark.parametrize(
    ("streams", "message"), [({"wan": 2}, "no such level"), ({"dc": 0}, "at least 1"), ({"dc": 65}, "at most 64")]
)
def test_streams_are_of_levels(streams, message):
    made = plan().model_dump(mode="json")
    assert build(Plan, made | {"schedule": {"streams": {"dc": 4}}}, "plan").schedule.streams == {"dc": 4}
    with pytest.raises(ConfigError, match=message):
        build(Plan, made | {"schedule": {"streams": streams}}, "plan")
    with pytest.raises(ConfigError, match="chunks"):
        build(Plan, made | {"schedule": {"chunks": 10**30}}, "plan")


GROUP = {"first_layer": 0, "num_layers": 3, "domains": {"dc": 1, "gpu": 1}, "migration": {}}


@pytest.mark.parametrize(
    ("written", "read", "again"),
    [
        ([], Recompute.NOTHING, []),
        (["experts", "attention"], ALL, ["attention", "experts"]),
        # Of plans from when only experts did.
        (True, Recompute.EXPERTS, ["experts"]),
        (False, Recompute.NOTHING, []),
    ],
)
def test_files_name_what_is_computed_again(written, read, again):
    group = build(LayerGroup, GROUP | {"recompute": written}, "group")
    assert group.recompute is read and group.model_dump(mode="json")["recompute"] == again


@pytest.mark.parametrize("wrong", ["attention", ["gate"], 1, None, {"experts": True}])
def test_files_that_name_anything_else_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"recompute.* is no list of attention and experts"):
        build(LayerGroup, GROUP | {"recompute": wrong}, "group")
