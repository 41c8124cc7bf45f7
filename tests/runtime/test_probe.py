"""The probe on a few ranks of this machine: plausible numbers, and the same formula as the cost model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import permutations, product

import pytest
from rank_pool import ADDRESS, RankPool
from torch import Tensor
from training_cases import Case

from hybridep.codecs import KINDS, Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.probe import with_access, with_gpus, with_measurements, with_pairs
from hybridep.config import build
from hybridep.gpus import SiteGpu
from hybridep.sites import ClusterFile
from hybridep.topology import Cluster
from runtime import probe as probe_module
from runtime import probe_links
from runtime.barrier import PATIENCE_S
from runtime.probe import LevelProbe, Probe, probe_of, summarise
from runtime.probe_codecs import CodecProbe
from runtime.probe_compute import ComputeProbe
from runtime.probe_links import SIZES_BYTES, STREAMS, AccessProbe, Contention, PairPoint, PairProbe, window
from runtime.transport import Transport

pytestmark = pytest.mark.timeout(90)


def probe_job(rank: int, port: int, case: Case) -> Probe:
    from runtime.mesh import join_store
    from runtime.probe import probe

    plan = case.plan()
    store = join_store(ADDRESS, port, timeout_s=30)
    return probe(plan.cluster, plan.workload, rank=rank, store=store, seconds=0.02, thorough=True)


def test_all_ranks_measure_plausible_numbers() -> None:
    from runtime.mesh import host_store

    # More rows than the few experts that are measured would be padded to.
    case = Case(sizes=(2, 2), domains=(1, 1), dtype="fp32", model="drop-padded")
    store = host_store(ADDRESS, timeout_s=30)
    with RankPool(4, join=False) as pool:
        probes = pool.run(probe_job, store.port, case)
    found = summarise(probes, case.plan().cluster.rank_datacenters)
    assert probes[0].compute == probes[1].compute != probes[2].compute == probes[3].compute
    assert dict(found.site_compute) == {"dc0": probes[0].compute, "dc1": probes[2].compute}
    assert found.compute in dict(found.site_compute).values()
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
    assert [(pair.src, pair.dst) for pair in found.pairs] == [(0, 1), (1, 0)]
    for pair in found.pairs:
        assert 1e-6 < pair.latency_s < 0.5 and 1e6 < pair.bandwidth_bytes_per_s < 1e12
        assert {(point.size_bytes, point.streams) for point in pair.points} == set(product(SIZES_BYTES, STREAMS))
        assert all(1e3 < point.bytes_per_s < 1e12 for point in pair.points)
        assert pair.window_bytes is None or 0 < pair.window_bytes < 1e9
    assert [one.site for one in found.access] == ["dc0", "dc1"]
    for one in found.access:
        assert one.up_bytes_per_s is not None and 1e6 < one.up_bytes_per_s < 1e12
        assert one.down_bytes_per_s is not None and 1e6 < one.down_bytes_per_s < 1e12 and one.pod_bytes_per_s is None
    assert found.several is not None and 1e6 < found.several.bandwidth_bytes_per_s < 1e12
    both = found.contention
    assert both is not None and all(0 < value < 1e12 for value in asdict(both).values())
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


LEVEL = LevelProbe(name="dc", latency_s=1.0, bandwidth_bytes_per_s=10.0)
COMPUTE = ComputeProbe(
    throughput_flops_per_s=5.0,
    block_overhead_s=0.1,
    pass_overhead_s=0.1,
    expert_throughput_flops_per_s=4.0,
    expert_overhead_s=0.01,
    memory_bandwidth_bytes_per_s=7.0,
    sharing=1.0,
)
CODEC = CodecProbe(kind="tokens", codec="int8", encode_bytes_per_s=3.0, decode_bytes_per_s=2.0)
USUAL = Probe(levels=(LEVEL,), message_overhead_s=0.2, jitter_s=0.3, compute=COMPUTE, codecs=(CODEC,))


def test_ranks_wait_for_the_slowest_pair_that_can_be_measured() -> None:
    """Whose largest messages take as long as an exchange may, one to warm up and one to measure over each number of streams."""
    largest = len(STREAMS) * 2 * probe_module._TIMEOUT_S
    others = largest * sum(size / SIZES_BYTES[-1] for size in SIZES_BYTES[:-1])
    assert largest + others < PATIENCE_S


def test_one_slow_rank_does_not_decide() -> None:
    slow = Probe(
        levels=(replace(LEVEL, latency_s=99.0),),
        message_overhead_s=9.0,
        jitter_s=9.0,
        compute=replace(COMPUTE, throughput_flops_per_s=0.01),
        codecs=(replace(CODEC, encode_bytes_per_s=0.1, decode_bytes_per_s=99.0),),
    )
    assert summarise([USUAL, slow, USUAL]) == USUAL
    pair = PairProbe(
        src=0, dst=1, latency_s=0.1, bandwidth_bytes_per_s=9.0, points=(PairPoint(size_bytes=8, streams=2, bytes_per_s=3.0),)
    )
    both = Contention(products_per_s=1.0, products_per_s_beside=2.0, bytes_per_s=3.0, bytes_per_s_beside=4.0)
    access = (AccessProbe(site="a", up_bytes_per_s=1.0, down_bytes_per_s=2.0, pod_bytes_per_s=None),)
    for probe in (USUAL, replace(USUAL, pairs=(pair,), access=access, several=LEVEL, contention=both)):
        assert probe_of(asdict(probe)) == summarise([probe]) == probe
    assert summarise([replace(USUAL, pairs=(pair,), access=access), USUAL]).pairs == (pair,)


@pytest.mark.parametrize("late", [0, 9, 10])
def test_pings_that_wait_for_a_processor_make_no_link_fast(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of 1 GB/s and 2 ms each way; so many of ten pings take 10 ms more, which is what the largest message takes."""
    now_s, pings = 0.0, 0

    class Link(Transport):
        def __init__(self) -> None:
            pass

        def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> None:
            nonlocal now_s, pings
            size_bytes = sends[1].nbytes
            if "orders" not in label:
                now_s += 4e-3 + size_bytes / 1e9
                if size_bytes == 8:
                    pings += 1
                    now_s += 1e-2 * (1 < pings <= 1 + late)  # the first opens the connection

    monkeypatch.setattr(probe_links.time, "perf_counter", lambda: now_s)
    found = probe_links._source(Link(), 0, 1, 1, seconds=0.02)
    if not late:
        assert (found.latency_s, found.bandwidth_bytes_per_s) == pytest.approx((2e-3, 1e9), rel=1e-5)
    assert 1e9 / 2 < found.bandwidth_bytes_per_s < 2.01e9


def test_a_window_is_what_holds_one_connection_and_not_several() -> None:
    assert window({1: 2e6, 2: 3.9e6, 4: 7e6}, 0.1) == pytest.approx(2e5)
    assert window({1: 2e6, 2: 3e6, 4: 3.1e6}, 0.1) == pytest.approx(2e5)  # then the link is full
    for rates in ({1: 2e6, 2: 2.1e6, 4: 2.0e6}, {1: 2e6, 2: 1.9e6, 4: 4e6}, {1: 2e6, 2: 2.6e6, 4: 2.9e6}):
        assert window(rates, 0.1) is None


def test_windows_are_written_where_they_hold() -> None:
    cluster = Case(sizes=(2, 2), domains=(1, 1)).plan().cluster

    def pair(src: int, window_bytes: float | None) -> PairProbe:
        rate = 1e6 if window_bytes is None else 4e6
        return PairProbe(src=src, dst=1 - src, latency_s=0.1, bandwidth_bytes_per_s=rate, points=(), window_bytes=window_bytes)

    levels = (replace(LEVEL, latency_s=0.1, bandwidth_bytes_per_s=1e6), replace(LEVEL, name="gpu"))
    several = replace(levels[0], bandwidth_bytes_per_s=5e6)
    held = replace(USUAL, levels=levels, several=several, pairs=(pair(0, 2.0004e5), pair(1, None)))
    found = with_measurements(cluster, held)
    assert (found.levels[0].window, found.levels[1].window) == (pytest.approx(2e5), None)
    assert found.levels[0].bandwidth == pytest.approx(5e6) and found.levels[0].latency == pytest.approx(0.1)
    assert build(Cluster, found.model_dump(mode="json", exclude_none=True), "written") == found
    # Measured again: what no longer holds goes, and what was not measured stays.
    free = replace(held, pairs=(pair(0, None), pair(1, None)))
    assert with_measurements(found, free).levels[0].window is None
    assert with_measurements(found, free).levels[0].bandwidth == pytest.approx(1e6)
    assert with_measurements(found, replace(USUAL, levels=levels)).levels[0].window == pytest.approx(2e5)


def test_links_are_written_where_pairs_differ() -> None:
    cluster = Case(sizes=(3, 1), domains=(1, 1)).plan().cluster

    def pairs(slow: float) -> Probe:
        found = [
            PairProbe(
                src=src, dst=dst, latency_s=0.01, bandwidth_bytes_per_s=slow if (src, dst) == (2, 0) else 1.23456e8, points=()
            )
            for src, dst in permutations(range(3), 2)
        ]
        return replace(USUAL, pairs=tuple(found))

    alike, uneven = pairs(1.1e8), pairs(0.9e8)
    assert with_pairs(cluster, USUAL, True) == cluster
    assert with_pairs(cluster, alike) == cluster and not with_pairs(cluster, uneven, False).links
    for linked in (with_pairs(cluster, alike, True), with_pairs(cluster, uneven)):
        assert [site.name for site in linked.sites] == ["dc0", "dc1", "dc2"] and len(linked.links) == 6
        assert linked.links[0].bandwidth == pytest.approx(1.235e8) and linked.links[0].latency == pytest.approx(0.01)
    # Measured again: links stay links, and keep what was not measured.
    priced = linked.model_copy(update={"links": tuple(link.model_copy(update={"egress": 1e-11}) for link in linked.links)})
    again = with_pairs(priced, alike)
    slow = next(link for link in again.links if (link.src, link.dst) == ("dc2", "dc0"))
    assert slow.bandwidth == pytest.approx(1.1e8) and slow.egress == pytest.approx(1e-11)


def access(site: str, up: float, down: float, pod: float | None = None) -> AccessProbe:
    return AccessProbe(site=site, up_bytes_per_s=up, down_bytes_per_s=down, pod_bytes_per_s=pod)


def test_access_rates_are_written_where_sites_differ() -> None:
    cluster = Case(sizes=(2, 1), domains=(1, 1)).plan().cluster
    alike = replace(USUAL, access=(access("dc0", 1e8, 1.1e8), access("dc1", 1.05e8, 1e8)))
    uneven = replace(USUAL, access=(access("dc0", 1e8, 1.1e8), access("dc1", 1.05e8, 2e8)))
    assert with_access(cluster, USUAL) == cluster == with_access(cluster, alike)
    written = with_access(cluster, uneven)
    assert [(site.name, site.up, site.down) for site in written.sites] == [
        ("dc0", pytest.approx(1e8), pytest.approx(1.1e8)),
        ("dc1", pytest.approx(1.05e8), pytest.approx(2e8)),
    ]
    # Measured again, rates stay rates.
    assert with_access(written, alike).sites[1].down == pytest.approx(1e8)


def test_sites_with_pods_get_what_joins_pods_and_what_joins_sites() -> None:
    link = {"bandwidth": "1 Gbps", "latency": "1 ms"}
    levels = [{"name": "dc", "size": 2, "pods": link} | link, {"name": "gpu", "size": 2} | link]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 GB/s"}
    sites = [{"name": "oslo", "pods": 2}, {"name": "rome"}]
    given = build(ClusterFile, {"name": "two", "levels": levels, "gpu": gpu, "sites": sites}, "given")
    paths = {(0, 1): (9e8, 1e-4), (0, 2): (1e8, 0.01), (1, 2): (1.1e8, 0.012), (2, 0): (3e8, 0.03), (2, 1): (3.2e8, 0.032)}
    pairs = tuple(
        PairProbe(src=src, dst=dst, latency_s=latency_s, bandwidth_bytes_per_s=rate, points=())
        for (src, dst), (rate, latency_s) in (paths | {(1, 0): (7e8, 3e-4)}).items()
    )
    found = replace(USUAL, levels=(), pairs=pairs, access=(access("oslo", 1e8, 3e8, 8e8), access("rome", 3e8, 1e8)))
    measured = with_pairs(with_access(given, found), found)
    assert measured.levels[0].pods is not None
    assert (measured.levels[0].pods.bandwidth, measured.levels[0].pods.latency) == (pytest.approx(8e8), pytest.approx(2e-4))
    assert (measured.levels[0].bandwidth, measured.levels[0].latency) == (pytest.approx(2e8), pytest.approx(0.021))
    assert [(site.name, site.up, site.down, site.pods) for site in measured.sites] == [
        ("oslo", pytest.approx(1e8), pytest.approx(3e8), 2),
        ("rome", pytest.approx(3e8), pytest.approx(1e8), None),
    ]
    assert [(one.src, one.dst, one.bandwidth, one.latency) for one in measured.links] == [
        ("oslo", "rome", pytest.approx(1.05e8), pytest.approx(0.011)),
        ("rome", "oslo", pytest.approx(3.1e8), pytest.approx(0.031)),
    ]
    # It loads, with pods as sites.
    whole = build(Cluster, measured.model_dump(mode="json", exclude_none=True), "written")
    assert whole.sizes == (3, 2) and whole.datacenters == measured.datacenters == ("oslo", "oslo", "rome")


def test_gpus_are_written_where_sites_differ() -> None:
    cluster = Case(sizes=(2, 1), domains=(1, 1)).plan().cluster
    fast = replace(COMPUTE, throughput_flops_per_s=8.0, expert_throughput_flops_per_s=7.0, block_overhead_s=0.02)
    sites = cluster.rank_datacenters

    def found(first: ComputeProbe) -> Probe:
        return summarise([replace(USUAL, compute=first), USUAL], sites)

    assert with_gpus(cluster, summarise([replace(USUAL, compute=fast), USUAL])) == cluster
    assert with_gpus(cluster, found(replace(COMPUTE, throughput_flops_per_s=5.9))) == cluster
    assert with_gpus(cluster, replace(found(fast), compute=replace(COMPUTE, sharing=2.0))) == cluster
    # What holds for all is the slowest site's.
    assert found(fast).compute == COMPUTE and with_measurements(cluster, replace(found(fast), levels=())).gpu.throughput == 5.0
    written = with_gpus(cluster, found(fast))
    gpus = [site.gpu for site in written.sites]
    assert [one and (one.throughput, one.expert_throughput, one.block_overhead) for one in gpus] == [
        (8.0, 7.0, 0.02),
        (5.0, 4.0, 0.1),
    ]
    # Measured again: what is not measured stays.
    given = SiteGpu.model_validate({"memory": "9 GiB", "price": "2 $/h"})
    priced = written.model_copy(update={"sites": tuple(site.model_copy(update={"gpu": given}) for site in written.sites)})
    again = with_gpus(priced, found(COMPUTE)).sites[0].gpu
    assert again is not None and (again.memory, again.price, again.throughput) == (given.memory, given.price, 5.0)
