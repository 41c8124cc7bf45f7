"""The probe on a few ranks of this machine: plausible numbers, and the same formula as the cost model's."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from rank_pool import ADDRESS, RankPool
from training_cases import Case

from hybridep.codecs import KINDS, Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.probe import with_measurements
from hybridep.config import build
from hybridep.topology import Cluster
from runtime.probe import LevelProbe, Probe, probe_of, summarise
from runtime.probe_codecs import CodecProbe
from runtime.probe_compute import ComputeProbe

pytestmark = pytest.mark.timeout(90)


def probe_job(rank: int, port: int, case: Case) -> Probe:
    from runtime.mesh import join_store
    from runtime.probe import probe

    plan = case.plan()
    store = join_store(ADDRESS, port, timeout_s=30)
    return probe(plan.cluster, plan.workload, rank=rank, store=store, seconds=0.02)


def test_all_ranks_measure_plausible_numbers() -> None:
    from runtime.mesh import host_store

    case = Case(sizes=(2, 2), domains=(1, 1), dtype="fp32")
    store = host_store(ADDRESS, timeout_s=30)
    with RankPool(4, join=False) as pool:
        probes = pool.run(probe_job, store.port, case)
    found = summarise(probes)
    assert [level.name for level in found.levels] == ["dc", "gpu"]
    for level in found.levels:
        assert 1e-6 < level.latency_s < 0.5
        assert 1e6 < level.bandwidth_bytes_per_s < 1e12
    compute = found.compute
    assert 1e6 < compute.throughput_flops_per_s < 1e13
    assert 1e6 < compute.expert_throughput_flops_per_s < 1e13
    assert 0 <= compute.block_overhead_s < 1
    assert 0 <= compute.expert_overhead_s < 1
    assert 0 <= compute.pass_overhead_s < 1
    assert 0 <= found.jitter_s < 0.5
    assert 1 <= compute.sharing < 20
    assert 0 <= found.message_overhead_s < 0.5
    assert 1e5 < compute.memory_bandwidth_bytes_per_s < 1e12
    measured = {(one.kind, one.codec) for one in found.codecs}
    enums = zip(KINDS, (TokenCodec, ExpertCodec, GradientCodec), strict=True)
    assert measured == {(kind, codec.value) for kind, enum in enums for codec in enum if codec.value != "exact"}
    for one in found.codecs:
        assert 1e5 < one.encode_bytes_per_s < 1e12 and 1e5 < one.decode_bytes_per_s < 1e12, one
    cluster = with_measurements(case.plan().cluster, found)
    assert cluster.gpu.coding is not None
    assert build(Cluster, cluster.model_dump(mode="json", exclude_none=True), "written") == cluster
    speed = cluster.gpu.coding.of("experts", Codecs(experts=ExpertCodec.CHANGE_INT4))
    [same] = [one for one in found.codecs if one.codec == "change-int4"]
    assert speed is not None and speed.decode == pytest.approx(same.decode_bytes_per_s, rel=1e-3)


def test_one_slow_rank_does_not_decide() -> None:
    level = LevelProbe(name="dc", latency_s=1.0, bandwidth_bytes_per_s=10.0)
    compute = ComputeProbe(
        throughput_flops_per_s=5.0,
        block_overhead_s=0.1,
        pass_overhead_s=0.1,
        expert_throughput_flops_per_s=4.0,
        expert_overhead_s=0.01,
        memory_bandwidth_bytes_per_s=7.0,
        sharing=2.0,
    )
    codec = CodecProbe(kind="tokens", codec="int8", encode_bytes_per_s=3.0, decode_bytes_per_s=2.0)
    usual = Probe(levels=(level,), message_overhead_s=0.2, jitter_s=0.3, compute=compute, codecs=(codec,))
    slow = Probe(
        levels=(replace(level, latency_s=99.0),),
        message_overhead_s=9.0,
        jitter_s=9.0,
        compute=replace(compute, throughput_flops_per_s=0.01),
        codecs=(replace(codec, encode_bytes_per_s=0.1, decode_bytes_per_s=99.0),),
    )
    assert summarise([usual, slow, usual]) == usual
    assert probe_of(asdict(usual)) == usual
