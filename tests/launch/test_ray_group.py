"""Ranks over Ray: those of one machine are forked from one process there, and have the GPUs that Ray gives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from launch_cases import left_running, make_job

from hybridep.config import build
from hybridep.launch import host, ray_backend
from hybridep.launch.host import child_environment
from hybridep.launch.ray_group import RayGroup
from hybridep.launch.ray_nodes import NodePlace, RayNodes
from hybridep.launch.ray_placing import Share
from hybridep.launch.ray_profile import profile
from hybridep.launch.ray_sites import nodes_of, sites_at_hand
from hybridep.launch.reports import Rendezvous
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import Event, Failed, Started
from hybridep.plan import LayerGroup, Plan
from hybridep.sites import ClusterFile
from hybridep.topology import Cluster

pytestmark = [pytest.mark.timeout(150), pytest.mark.turns(3)]


class NodesWithGpus(RayNodes):
    """Each says that it has four GPUs, which Ray believes."""

    def _start_node(self, index: int, options: list[str]) -> subprocess.Popen[bytes]:
        return super()._start_node(index, [*options, "--num-gpus=4"])


def job_of_pods(folder: Path) -> Job:
    job = make_job(folder, resume=False)
    link = {"bandwidth": "8 Gbps", "latency": "0.1 ms"}
    levels = [{"name": "dc", "size": 2, "pods": link} | link, {"name": "gpu", "size": 2} | link]
    gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
    sites = [{"name": "oslo", "pods": 2}, {"name": "rome", "pods": 2}]
    cluster = build(Cluster, {"name": "two", "levels": levels, "gpu": gpu, "sites": sites}, "cluster")
    workload, domains = job.plan.workload, {"dc": 1, "gpu": 1}
    layers = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains=domains, migration={})
    run = job.run.model_copy(update={"steps": 100_000})
    return replace(job, run=run, plan=Plan(cluster=cluster, workload=workload, layers=(layers,)))


def events_until(group: RayGroup, enough: Callable[[list[Event]], bool]) -> list[Event]:
    found, deadline = list[Event](), time.monotonic() + 90
    while not enough(found) and time.monotonic() < deadline:
        found += group.poll(0.2)
    return found


class Actor:
    """Takes note of what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.meet, self.poll = SimpleNamespace(remote=self.told.append), SimpleNamespace(remote=object)


@pytest.mark.turns(1)
def test_ranks_that_start_late_are_told_where_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And early ones not before they are there, since an actor's calls may overtake each other."""
    monkeypatch.setattr(ray_backend.ray, "get", lambda reports: reports)
    driver = ray_backend.Driver(job_of_pods(tmp_path), lambda report: None)
    driver._shares = [Share(dc="oslo", ranks=(first, first + 1), gpus=0) for first in (0, 2, 4)]
    actors = driver._actors = [Actor(), Actor(), Actor()]
    place = Rendezvous(address="127.0.0.2", port=7)
    driver._take([], 0)
    driver._take([], 1)
    assert [actor.told for actor in actors] == [[], [], []]
    driver._take([place], 0)
    assert [actor.told for actor in actors] == [[place], [place], []]
    driver._take([], 2)
    assert [actor.told for actor in actors] == [[place], [place], [place]]


def test_neighbours_share_a_machine_and_have_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As nodes that users start: there Ray chooses the number of threads.
    monkeypatch.setattr(host, "_OF_RANKS", {})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    places = [NodePlace(dc=dc, address=f"127.0.0.{number}") for dc, number in (("oslo", 2), ("oslo", 3), ("rome", 4))]
    with NodesWithGpus(places, 4) as nodes:
        found = sorted(nodes_of(nodes.address), key=lambda one: one.address)
        assert [(one.dc, one.address, one.cpus, one.gpus) for one in found] == [(one.dc, one.address, 4, 4) for one in places]
        assert {(one.error, one.torch, str(one.unreachable)) for one in found} == {("", metadata.version("torch"), "{}")}
        shape = build(ClusterFile, profile(found), "nodes")
        assert [(level.name, level.size) for level in shape.levels] == [("dc", 2), ("gpu", 4)]
        assert [(site.name, site.pods) for site in shape.sites] == [("oslo", 2), ("rome", 1)]
        job = job_of_pods(tmp_path)
        assert sites_at_hand(nodes.address, job.plan.cluster, use_gpus=True) == set(job.plan.cluster.site_names)
        group = RayGroup(job, nodes.address, "oslo")
        group.start()
        try:
            events = events_until(group, lambda found: sum(isinstance(one, Started) for one in found) == 8)
            begun = {one.rank: one for one in events if isinstance(one, Started)}
            assert sorted(begun) == list(range(8)), events
            assert tuple(begun[rank].dc for rank in range(8)) == job.dcs == ("oslo",) * 4 + ("rome",) * 4
            # Two pods of a site are two machines, where it has them.
            where = [begun[rank].address for rank in range(8)]
            assert where[0] == where[1] != where[2] == where[3] and set(where[:4]) == {"127.0.0.2", "127.0.0.3"}
            assert set(where[4:]) == {"127.0.0.4"}
            environments = [psutil.Process(begun[rank].pid).environ() for rank in range(8)]
            gpus = [one["CUDA_VISIBLE_DEVICES"] for one in environments]
            assert gpus == ["0,1"] * 4 + ["0,1,2,3"] * 4
            assert {one["OMP_NUM_THREADS"] for one in environments} == {"1"}
            os.kill(begun[3].pid, signal.SIGTERM)
            events = events_until(group, lambda found: any(isinstance(one, Failed) and one.rank == 3 for one in found))
            [why] = [one.why for one in events if isinstance(one, Failed) and one.rank == 3]
            assert why.startswith(f"process {begun[3].pid} was ended by SIGTERM (its output: {tmp_path}/logs/rank-3.log")
        finally:
            group.abort()
        group = RayGroup(job, nodes.address, "oslo")
        group.start()
        try:
            events = events_until(group, lambda found: sum(isinstance(one, Started) for one in found) == 8)
            there = {one.rank for one in events if isinstance(one, Started) and one.address == "127.0.0.3"}
            nodes._nodes[1].kill()
            gone = "its Ray node at 127.0.0.3 is gone or does not answer"
            events = events_until(group, lambda found: any(isinstance(one, Failed) and one.why == gone for one in found))
            lost = {one.rank for one in events if isinstance(one, Failed) and one.why == gone}
            assert lost and lost <= there, [one for one in events if isinstance(one, Failed)]
        finally:
            group.abort()
        deadline = time.monotonic() + 10
        while left_running(tmp_path / "x") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_running(tmp_path / "x") == []


@pytest.mark.timeout(300)
@pytest.mark.turns(8)
def test_a_site_goes_on_with_the_machines_that_are_left(run_file: Path) -> None:
    """Of one with two pods; and takes another machine in the place of the lost one, with the losses of an unbroken run."""
    cluster = run_file.with_name("cluster.yaml")
    text = cluster.read_text().replace("latency: 0.2 ms}", "latency: 0.2 ms, pods: {bandwidth: 1 Gbps, latency: 0.1 ms}}", 1)
    cluster.write_text(text.replace("{name: oslo}", "{name: oslo, pods: 2}"), encoding="utf-8")
    command = [sys.executable, "-m", "hybridep.cli", "train", str(run_file), "--set", "workload.training.dtype=fp64"]
    command += ["--set", "checkpoints.every_steps=10", "--set", "checkpoints.keep=2"]
    places = [NodePlace(dc=dc, address=f"127.0.0.{number}") for dc, number in (("oslo", 2), ("oslo", 3), ("rome", 4))]
    folder = run_file.with_name("output")
    with RayNodes(places, 1) as nodes:
        environment = child_environment({"RAY_ADDRESS": nodes.address})
        words = [*command, "--set", "steps=100000", "--max-restarts", "1"]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            said = list[str]()

            def until(what: str) -> None:
                assert process.stderr is not None
                for line in process.stderr:
                    said.append(line)
                    if what in line:
                        return
                pytest.fail(f"it never said {what!r}: {said}")

            try:
                until("3 ranks, ray")
                until("step ")
                while len(steps_of(folder)) < 25:
                    time.sleep(0.1)
                nodes._nodes[1].kill()
                until("goes on without oslo-pod1")
                until("2 ranks, ray")
                until("step ")
                nodes._places.append(NodePlace(dc="oslo", address="127.0.0.5"))
                nodes._nodes.append(nodes._start_node(3, [f"--address={nodes.address}"]))
                until("lost sites are back")
                until("3 ranks, ray")
                until("step ")
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
            finally:
                process.kill()
    made = {one["step"]: one["loss"] for one in steps_of(folder)}
    assert list(made) == sorted(made) and len(made) > 60
    unbroken = [*command, "--local", "--set", "steps=60", "--set", f"run.output={folder}-unbroken"]
    subprocess.run(unbroken, env=child_environment(), check=True, capture_output=True, timeout=100)
    expected = {one["step"]: one["loss"] for one in steps_of(Path(f"{folder}-unbroken"))}
    # Without those whose reports the lost machine took along.
    assert {step: loss for step, loss in expected.items() if step in made} == {
        step: pytest.approx(loss, rel=1e-7) for step, loss in made.items() if step <= 60
    }
    assert left_running(run_file) == []


def steps_of(folder: Path) -> list[dict[str, Any]]:
    log = folder / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
