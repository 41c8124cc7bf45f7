"""Exchanges between real processes over gloo: contents, byte counts, order, concurrency, failures, and speed in the lab."""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import forking
from torch._C._distributed_c10d import HashStore
from training_cases import Case

from hybridep.config import build
from hybridep.launch.lab import LabSpec, run_in_lab
from hybridep.plan import LayerGroup, Plan
from hybridep.topology import Cluster
from hybridep.traffic import Op
from runtime.barrier import MEETING, NUMBERS, SAVING, Barrier
from runtime.channels import NUMBERED, Channels
from runtime.mesh import Mesh
from runtime.transport import _reason

pytestmark = pytest.mark.timeout(90)

PRELUDE = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch, torch.distributed as dist
from hybridep.errors import TransportError
from runtime.transport import Transport
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, world = dist.get_rank(), dist.get_world_size()
peers = [peer for peer in range(world) if peer != rank]

def message(source, to, size):
    return torch.arange(size, dtype=torch.int64) * 1000 + source * 10 + to

def start(transport, sends, receives, label):
    return ThreadPoolExecutor(1).submit(transport.post(receives, label).begin(sends))
"""


def _environment(rank: int, world: int, address: str, port: str, interface: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": interface,
    }


def _be_rank(rank: int, environment: dict[str, str], script: Path) -> None:
    os.environ.update(environment)
    output = os.open(script.with_name(f"out.{rank}"), os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    exec(compile(script.read_text(), str(script), "exec"), {})


def run_ranks(program: str, world: int, tmp_path: Path) -> list[tuple[int | None, str]]:
    """Run ``program`` on ``world`` ranks; (exit code, output) of each."""
    script = tmp_path / "rank.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environments = [_environment(rank, world, "127.0.0.1", port, "lo") for rank in range(world)]
    ranks = [forking().Process(target=_be_rank, args=(rank, of_it, script)) for rank, of_it in enumerate(environments)]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [(code, (tmp_path / f"out.{rank}").read_text()) for rank, code in enumerate(codes)]


def all_end_well(program: str, world: int, tmp_path: Path) -> None:
    for code, output in run_ranks(program, world, tmp_path):
        assert code == 0, output


def test_messages_arrive_and_are_counted(tmp_path: Path) -> None:
    program = """
        transport = Transport(timeout_s=20, on_span=lambda label, start, end: spans.append((label, end >= start)))
        spans = []
        # Of each pair only one direction carries bytes, of a size of its own: nothing is sent for the empty side.
        size = lambda source, to: (source + 1) * (to + 2) if source < to else 0
        for turn in range(3):
            sends = {peer: message(rank, peer, size(rank, peer)) + turn for peer in peers}
            receives = {peer: torch.zeros(size(peer, rank), dtype=torch.int64) for peer in peers}
            transport.exchange(sends, receives, "uneven")
            for peer in peers:
                assert torch.equal(receives[peer], message(peer, rank, size(peer, rank)) + turn)
        assert {key: value for key, value in transport.sent_bytes.items()} == {
            ("uneven", peer): 3 * 8 * size(rank, peer) for peer in peers if rank < peer
        }
        assert spans == [("uneven", True)] * 3

        # Longer than one piece, and of uneven lengths.
        long = lambda source: 300_000 * (source + 1)
        receives = {peer: torch.zeros(long(peer), dtype=torch.int64) for peer in peers}
        transport.exchange({peer: message(rank, peer, long(rank)) for peer in peers}, receives, "long")
        assert all(torch.equal(receives[peer], message(peer, rank, long(peer))) for peer in peers)
        assert all(transport.sent_bytes["long", peer] == 8 * long(rank) for peer in peers)

        # Any element type and shape, and a subset of the ranks.
        if rank < 2:
            got = torch.zeros(2, 3, dtype=torch.bfloat16)
            transport.exchange({1 - rank: torch.full((2, 3), rank + 0.5).bfloat16()}, {1 - rank: got}, "pair")
            assert torch.equal(got, torch.full((2, 3), 1.5 - rank).bfloat16())
            assert transport.sent_bytes["pair", 1 - rank] == 12
    """
    all_end_well(program, 3, tmp_path)


@pytest.mark.turns(2)
def test_streams_share_a_message(tmp_path: Path) -> None:
    program = """
        used = set()
        transport = Transport(timeout_s=20, streams={"far": 3})
        class Counted:
            def __init__(self, group):
                self.recv, self._group = group.recv, group
            def send(self, tensors, peer, tag):
                used.add((label, peer, self._group))
                return self._group.send(tensors, peer, tag)
        from runtime.channels import stream_groups
        groups = stream_groups(3)
        transport._channels._groups = [Counted(group) for group in groups]
        # Of one piece, of one piece per stream, and of many pieces; uneven, and in the background.
        for label, send in (("near@near", transport.exchange), ("far@far", transport.exchange),
                            ("copies@far", transport.exchange_in_background)):
            for size in (5, 40_000, 1_200_001):
                receives = {peer: torch.zeros(size + peer, dtype=torch.int64) for peer in peers}
                send({peer: message(rank, peer, size + rank) for peer in peers}, receives, label)
                assert all(torch.equal(receives[peer], message(peer, rank, size + peer)) for peer in peers)
            assert all(transport.sent_bytes[label, peer] == 8 * (1_240_006 + 3 * rank) for peer in peers)
            for peer in peers:
                assert len({group for name, to, group in used if (name, to) == (label, peer)}) == (1 if "near" in label else 3)
        # Another transport of this process group finds the same connections.
        assert Transport(timeout_s=20, streams={"far": 2})._channels._groups[1] is groups[1]
    """
    all_end_well(program, 3, tmp_path)


def test_a_message_leaves_when_its_receive_is_posted(tmp_path: Path) -> None:
    """Though the receiver's exchange begins only when the sender says that its own is over."""
    program = """
        transport = Transport(timeout_s=20)
        size, note = 1_000_000, torch.zeros(1)
        if rank == 0:
            received = {1: torch.zeros(size, dtype=torch.int64)}
            posted = transport.post(received, "early")
            dist.recv(note, 1, tag=7)
            posted.exchange({})
            assert torch.equal(received[1], message(1, 0, size))
        else:
            transport.exchange({0: message(1, 0, size)}, {}, "early")
            dist.send(note, 0, tag=7)
    """
    all_end_well(program, 2, tmp_path)


def test_background_messages_need_no_answers(tmp_path: Path) -> None:
    """All of one leaves while its receiver waits for something else: on a long link no piece waits for a round trip."""
    program = """
        transport = Transport(timeout_s=20)
        size, note = 1_000_000, torch.zeros(1)
        if rank == 0:
            wait, told = transport._wait, []
            def wait_late(*given):
                if not told:
                    dist.recv(note, 1, tag=7)
                    told.append(True)
                wait(*given)
            transport._wait = wait_late
            received = {1: torch.zeros(size, dtype=torch.int64)}
            transport.exchange_in_background({}, received, "copies@dc")
            assert told and torch.equal(received[1], message(1, 0, size))
        else:
            transport.exchange_in_background({0: message(1, 0, size)}, {}, "copies@dc")
            dist.send(note, 0, tag=7)
    """
    all_end_well(program, 2, tmp_path)


def test_exchanges_in_flight_do_not_mix(tmp_path: Path) -> None:
    program = """
        transport = Transport(timeout_s=20)
        def begin(label, factor):
            receives = {peer: torch.zeros(50_000, dtype=torch.int64) for peer in peers}
            sends = {peer: message(rank, peer, 50_000) * factor for peer in peers}
            return start(transport, sends, receives, label), sends, receives, factor
        # Two under one label in the same order everywhere; the labels themselves in another order on each rank.
        labels = ["gather", "tokens", "return"]
        begun = []
        for turn in range(2):
            for label in labels[rank % 3:] + labels[:rank % 3]:
                begun.append(begin(label, labels.index(label) + 3 * turn + 2))
        now = torch.zeros(1, dtype=torch.int64)
        right, left = (rank + 1) % world, (rank - 1) % world
        transport.exchange({right: torch.tensor([rank])}, {left: now}, "meanwhile")
        assert now.item() == left
        for future, _, receives, factor in reversed(begun):
            future.result()
            for peer in peers:
                assert torch.equal(receives[peer], message(peer, rank, 50_000) * factor)
    """
    all_end_well(program, 3, tmp_path)


@pytest.mark.turns(2)
def test_background_exchanges_give_way(tmp_path: Path) -> None:
    program = """
        import threading
        transport = Transport(timeout_s=20, on_span=lambda label, start, end: ends.append((label, time.monotonic())))
        ends = []
        size = 400_000  # elements: several pieces
        def background(label):
            receives = {peer: torch.zeros(size, dtype=torch.int64) for peer in peers}
            transport.exchange_in_background({peer: message(rank, peer, size) for peer in peers}, receives, label)
            for peer in peers:
                assert torch.equal(receives[peer], message(peer, rank, size))
                assert transport.sent_bytes[label, peer] == 8 * size
        background("alone@dc")

        # Rank 0 has tokens for rank 1, which takes them late. Its copies of that level wait, those of another do not.
        dist.barrier()
        threads, got = [], torch.zeros(size, dtype=torch.int64)
        if rank == 1:
            time.sleep(1.5)
            transport.exchange({}, {0: got}, "tokens@dc")
            assert torch.equal(got, message(0, 1, size))
        if rank == 0:
            tokens = start(transport, {1: message(0, 1, size)}, {}, "tokens@dc")
            while not transport._urgency.sending["dc"]:
                time.sleep(0.01)
        if rank != 1:
            peers = [2 - rank]
            threads = [threading.Thread(target=background, args=(label,)) for label in ("copies@dc", "copies@gpu")]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        if rank == 0:
            tokens.result()
            assert [label for label, _ in ends] == ["alone@dc", "copies@gpu", "tokens@dc", "copies@dc"], ends
        dist.barrier()

        # It only waits for tokens now: they keep nothing that leaves back.
        del ends[:]
        if rank == 1:
            time.sleep(1.5)
            transport.exchange({0: message(1, 0, size)}, {}, "tokens@dc")
        if rank == 0:
            tokens = start(transport, {}, {1: got}, "tokens@dc")
        if rank != 1:
            background("others@dc")
        if rank == 0:
            tokens.result()
            assert torch.equal(got, message(1, 0, size))
            assert [label for label, _ in ends] == ["others@dc", "tokens@dc"], ends
        dist.barrier()

        # Closed while it gives way: it ends at once.
        if rank == 0:
            tokens = start(transport, {1: got}, {}, "tokens@dc")
            while not transport._urgency.sending["dc"]:
                time.sleep(0.01)
            threading.Timer(0.3, transport.close).start()
            try:
                transport.exchange_in_background({2: torch.zeros(9)}, {}, "copies@dc")
                raise SystemExit("it did not end")
            except TransportError as error:
                assert "closed" in error.why
        if rank == 1:
            time.sleep(1)
            transport.exchange({}, {0: got}, "tokens@dc")
        dist.barrier()
    """
    all_end_well(program, 3, tmp_path)


def test_a_silent_and_a_dead_peer_are_named(tmp_path: Path) -> None:
    program = """
        transport = Transport(timeout_s=1.0)
        if rank == 2:
            time.sleep(1.5)  # takes part in nothing, then dies
            os._exit(9)
        try:
            if rank == 0:
                transport.exchange({}, {2: torch.zeros(4)}, "tokens")
            else:
                start(transport, {}, {2: torch.zeros(4)}, "tokens").result()
        except TransportError as error:
            print(f"{error.who} | {error.why}")
        time.sleep(1)
        begin = time.monotonic()
        try:
            transport.exchange({2: torch.zeros(1000)}, {}, "gather")
        except TransportError as error:
            print(error.who, "dead", "'gather'" in error.why, time.monotonic() - begin < 0.9)
        os._exit(0)
    """
    results = run_ranks(program, 3, tmp_path)
    assert results[2][0] == 9
    for rank in (0, 1):
        code, output = results[rank]
        assert code == 0, output
        assert f"rank 2 | rank {rank} could not receive from it in 'tokens', 1.0 s after start" in output
        assert "rank 2 dead True True" in output


def test_labels_that_would_share_a_tag_are_refused() -> None:
    channels = Channels([], {})
    assert channels.of("a") is channels.of("a")
    with pytest.raises(ValueError, match="share a tag"):
        for number in range(10_000):
            channels.of(f"label {number}")


def test_names_of_levels_cannot_meet_in_a_tag() -> None:
    """By checksum alone ``city`` and ``pcie`` would."""
    level = {"size": 2, "bandwidth": "1 Gbps", "latency": "1 ms"}
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 GB/s"}
    cluster = build(Cluster, {"name": "c", "levels": [{"name": name, **level} for name in ("city", "pcie")], "gpu": gpu}, "c")
    workload = Case(sizes=(4, 1), domains=(1, 1)).plan().workload
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={}, migration={})
    mesh = Mesh(plan=Plan(cluster=cluster, workload=workload, layers=(group,)), rank=0)
    channels = Channels([], {}, numbers=mesh.label_numbers)
    labels = [mesh.label(op, level) for op in Op for level in range(2)]
    labels += ["barrier", "gather at rank 0"]
    tags = {channels.of(label)._first_tag for label in labels}
    assert len(tags) == len(labels) and max(tags) < 1 << 31


@pytest.mark.parametrize("name", [MEETING, SAVING])
def test_no_name_of_a_level_gives_checkpoints_a_tag_of_a_barrier(name: str) -> None:
    """By checksum alone six names of 32768 would: of each of a barrier's labels one such name is tried. Nor do barriers and
    transfers of a step, which have numbers, meet."""
    group: Any = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5))
    barrier = Barrier(rank=0, world_size=1, groups=[group], name=name)
    labels = [name, f"{name}: gather at rank 0", f"{name}: share of rank 0"]
    own = {barrier._transport._channels.of(label)._first_tag for label in labels}
    wanted, candidates = {zlib.crc32(label.encode()) % NUMBERED: label for label in labels}, 0
    while wanted:
        level, candidates = f"dc{candidates}", candidates + 1
        if wanted.pop(zlib.crc32(f"checkpoint@{level}".encode()) % NUMBERED, None):
            assert Channels([group], {}).of(f"checkpoint@{level}")._first_tag not in own
    other = NUMBERS.keys() - set(labels)
    assert len(own) == len(labels) == len(other)
    assert own.isdisjoint(Channels([group], {}, numbers=NUMBERS).of(label)._first_tag for label in other)
    mesh = Mesh(plan=Case(sizes=(4, 2), domains=(1, 1)).plan(), rank=0)
    assert max(mesh.label_numbers.values()) < min(NUMBERS.values())


LAB_RANK = """
    transport = Transport(timeout_s=30)
    size = 2_000_000
    sends = {peer: torch.full((size,), rank, dtype=torch.uint8) for peer in peers}
    receives = {peer: torch.zeros(size, dtype=torch.uint8) for peer in peers}
    for turn in range(TURNS):
        dist.barrier()
        begin = time.monotonic()
        transport.exchange(sends, receives, "all")
        print("took", begin, time.monotonic())
"""
LAB_DRIVER = """
import json, os, subprocess, sys
from hybridep.launch.lab import Lab
lab = Lab.current()
before = [lab.sent_bytes(site.name) for site in lab.sites]
ranks = [
    lab.spawn(
        site.name, [sys.executable, sys.argv[1]], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RANK": str(rank), "MASTER_ADDR": lab.sites[0].address},
    )
    for rank, site in enumerate(lab.sites)
]
outputs = [rank.communicate()[0] for rank in ranks]
assert not any(rank.returncode for rank in ranks)
times = [[line.split()[1:] for line in output.splitlines() if line.startswith("took")] for output in outputs]
took = [max(float(t[1]) for t in turn) - min(float(t[0]) for t in turn) for turn in zip(*times)]
sent = [lab.sent_bytes(site.name) - start for site, start in zip(lab.sites, before)]
json.dump({"took_s": took, "sent_bytes": sent}, open(sys.argv[2], "w"))
"""


@pytest.mark.turns(4)
@pytest.mark.lab
def test_shaped_links_are_used_well(tmp_path: Path) -> None:
    # Slow links, so that processors with other work keep up; two lots a turn, to two others.
    rate_bytes_per_s, payload_bytes, turns = 10e6, 2 * 2_000_000, 8
    rank_script, driver, result = tmp_path / "rank.py", tmp_path / "driver.py", tmp_path / "result.json"
    rank_script.write_text(PRELUDE + textwrap.dedent(LAB_RANK).replace("TURNS", str(turns)))
    driver.write_text(LAB_DRIVER)
    command = [sys.executable, str(driver), str(rank_script), str(result)]
    environment = _environment(0, 3, "", "29500", "uplink")  # the port is free: every datacenter has its own network
    assert run_in_lab(command, LabSpec.uniform(["a", "b", "c"], rate_bytes_per_s), environment) == 0
    measured = json.loads(result.read_text())
    ideal_s = payload_bytes / rate_bytes_per_s
    # The best turn, since other work on the machine only ever adds time.
    assert ideal_s < min(measured["took_s"]) < 1.25 * ideal_s, measured
    # Headers: 66 bytes per piece that TCP hands over, of one packet (1448 bytes) at least, and acknowledgements.
    for sent in measured["sent_bytes"]:
        assert turns * payload_bytes <= sent < (1 + 66 / 1448 + 0.01) * turns * payload_bytes


def test_of_gloo_errors_only_the_reason_is_told() -> None:
    error = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:16107. This is "
        "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
    )
    assert _reason(RuntimeError(error)) == "Connection closed by peer [127.0.0.1]:16107"
    assert _reason(RuntimeError("Socket Timeout\nmore")) == "Socket Timeout" and _reason(RuntimeError()) == "no reason given"
