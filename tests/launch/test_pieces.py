"""The launcher's small parts: reports over pipes, the host, shaping, jobs."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from errno import ENOSPC
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_cases import CONFIGS, make_job

from hybridep.config import load
from hybridep.errors import ConfigError, DataError, LabUnavailableError, TransportError, UserError, WorkerLostError
from hybridep.launch import host, lab_init, ray_nodes
from hybridep.launch.host import child_environment, free_port, interface_of
from hybridep.launch.lab import Lab, LabSite, LabSpec
from hybridep.launch.machine import PROCESS_BYTES, memory_bytes, require_room
from hybridep.launch.reports import Rendezvous, Report, ReportReader, ReportWriter, decode, encode
from hybridep.launch.shaping import lab_for, lab_spec, why_not_in_lab
from hybridep.launch.worker import Job, failure_of, run_rank
from hybridep.launch.worker_group import DcLost, Failed, FailureKind, Finished, Started, Stepped
from hybridep.plan import Plan
from hybridep.run import Checkpoints, Device, Run, StepReport
from hybridep.topology import Cluster
from planner import memory_use

REPORTS: list[Report] = [
    Started(rank=1, dc="a", address="10.0.0.1", pid=7),
    Stepped(report=StepReport(rank=0, step=3, loss_sum=1.5, balance_loss=0.1, tokens=9, step_s=0.2, sent_bytes={"x@dc": 4})),
    Finished(rank=2),
    Finished(rank=2, result={"levels": [1.0]}),
    Failed(rank=0, kind=FailureKind.PEER, why='said "no"\nand left', peer=3),
    DcLost(dc="b", why="gone"),
    Rendezvous(address="10.0.0.1", port=4242),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_survive_a_pipe(report: Report) -> None:
    assert "\n" not in encode(report) and decode(encode(report)) == report


def test_a_reader_tells_senders_apart_and_when_they_end() -> None:
    reader = ReportReader()
    writers = []
    for sender in range(2):
        read_end, write_end = os.pipe()
        reader.add(sender, read_end)
        writers.append(ReportWriter(write_end))
    writers[1](REPORTS[0])
    writers[1](REPORTS[2])
    assert list(reader.read(1.0)) == [(1, REPORTS[0]), (1, REPORTS[2])]
    del writers[1]
    assert list(reader.read(1.0)) == [(1, None)]
    assert list(reader.read(0.0)) == []
    reader.close()
    reader.close()


def test_a_process_that_cannot_be_started_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        ReportReader().start(0, [str(tmp_path / "none")], [], tmp_path / "log")
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_interfaces_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9")
    with pytest.raises(UserError, match="no network interface here has the address 192"):
        interface_of("192.0.2.1")
    with monkeypatch.context() as patch:
        addresses = [SimpleNamespace(family=socket.AF_INET, address=one) for one in ("10.1.0.5", "192.0.2.1")]
        patch.setattr(host.psutil, "net_if_addrs", lambda: {"eth0": addresses})
        assert interface_of("10.1.0.5") == "eth0"
        with pytest.raises(
            UserError, match=r"eth0 has the address 10\.1\.0\.5 before 192\.0\.2\.1, .* --node-ip-address=10\.1\.0\.5"
        ):
            interface_of("192.0.2.1")
    assert 0 < free_port("127.0.0.1") < 65536
    assert child_environment({"X": "1"})["X"] == "1"
    assert (Path(child_environment()["PYTHONPATH"].split(os.pathsep)[0]) / "hybridep").is_dir()


@pytest.mark.turns(4)
def test_products_of_ever_new_shapes_do_not_fill_a_ranks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16, for which oneDNN compiles on processors that know it; in one thread."""
    script = """
import psutil, torch
def held(): return psutil.Process().memory_info().rss / 1e6
x, w = torch.ones(400, 256, dtype=torch.bfloat16), torch.ones(256, 512, dtype=torch.bfloat16)
before = x[:7] @ w, held()
for rows in range(20, 400): x[:rows].T @ (x[:rows] @ w)
print(held() - before[1])
"""
    for name in ("OMP_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True, check=True)
    assert float(done.stdout) < 80


def test_what_the_lab_emulates() -> None:
    cluster = load(Cluster, CONFIGS / "clusters" / "aws-9.yaml")
    spec = lab_spec(cluster)
    assert [dc.name for dc in spec.dcs] == list(cluster.site_names) == [site.name for site in cluster.sites]
    assert [dc.up_bytes_per_s for dc in spec.dcs] == [site.up for site in cluster.sites]
    reason = why_not_in_lab(cluster)
    assert reason is not None and "72 ranks are more than the 16" in reason
    fast = load(Cluster, CONFIGS / "clusters" / "lab-4dc.yaml", ["levels.dc.bandwidth=100 Gbps"])
    assert "must be 1 to" in str(why_not_in_lab(fast))


def test_a_lab_must_hold_the_clusters_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load(Cluster, CONFIGS / "clusters" / "lab-4dc.yaml")
    sites = tuple(LabSite(name=name, namespace="/x", address="10.0.0.1", port="p") for name in ("dc0", "dc1", "other"))
    monkeypatch.setenv("HYBRIDEP_LAB", Lab(sites=sites, driver_address="10.0.0.9").to_json())
    with pytest.raises(LabUnavailableError, match=r"no datacenter dc2 \(it has dc0, dc1, other\)"):
        lab_for(cluster)


def test_what_interrupts_a_lab_before_its_command_runs_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    spec = LabSpec.uniform(["a"], 1e6)
    monkeypatch.setattr(sys, "argv", ["lab_init", "1", spec.to_json(), "true"])
    monkeypatch.setattr(lab_init, "build", interrupted)
    assert lab_init.main() == 130
    monkeypatch.setattr(sys, "argv", ["ray_nodes", "1", "true"])
    monkeypatch.setattr(Lab, "current", lambda: Lab(sites=(), driver_address="127.0.0.1"))
    monkeypatch.setattr(ray_nodes.RayNodes, "__enter__", interrupted)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            ray_nodes.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 130


def test_jobs_survive_the_way_to_their_ranks(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    again = Job.from_json(job.to_json())
    assert again == job and again.plan.digest == job.plan.digest
    assert job.dcs == ("dc0", "dc0", "dc1", "dc1", "dc2", "dc2", "dc3", "dc3")


def test_ranks_that_this_machine_has_no_memory_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes count, and what the plan keeps in the machine's memory, rank by rank."""
    job = make_job(tmp_path)
    plan_bytes = float(memory_use(job.plan).total_bytes.sum()) if isinstance(job.plan, Plan) else 0.0
    held = SimpleNamespace(total=8 * PROCESS_BYTES + 1.01 * plan_bytes)
    monkeypatch.setattr("psutil.virtual_memory", lambda: held)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=0))
    require_room(job)
    held.total -= 0.02 * plan_bytes
    with pytest.raises(UserError, match="8 ranks on this machine take at least"):
        require_room(job)
    # Where ranks only measure, or are on GPUs, the plan takes none of it.
    require_room(replace(job, probe_s=1.0))
    monkeypatch.setattr("hybridep.launch.machine.torch_facts", lambda: SimpleNamespace(cuda_devices=("one",)))
    require_room(replace(job, run=job.run.model_copy(update={"device": Device.AUTO})))
    held.total = 7 * PROCESS_BYTES
    with pytest.raises(UserError, match="take at least"):
        require_room(replace(job, probe_s=1.0))


def test_copies_that_checkpoints_are_written_from_take_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and two moments in fp32: of all experts once, of dense parameters once a site. Also beside GPUs."""
    job = make_job(tmp_path)
    run, model = job.run.model_copy(update={"checkpoints": Checkpoints(async_save=True)}), job.plan.workload.model
    dense = 4 * (model.total_params - model.num_moe_layers * model.num_experts * model.expert_params)
    copied = 12.0 * (model.num_moe_layers * model.num_experts * model.expert_params + dense)
    plan_bytes = float(memory_use(job.plan).total_bytes.sum()) if isinstance(job.plan, Plan) else 0.0
    held = SimpleNamespace(total=8 * PROCESS_BYTES + plan_bytes + 1.01 * copied)
    monkeypatch.setattr("psutil.virtual_memory", lambda: held)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=0))
    require_room(replace(job, run=run))
    held.total -= 0.02 * copied
    require_room(job)
    with pytest.raises(UserError, match=r"of memory \(\d.* of it for checkpoints.async_save\), and may have"):
        require_room(replace(job, run=run))
    monkeypatch.setattr("hybridep.launch.machine.torch_facts", lambda: SimpleNamespace(cuda_devices=("one",)))
    held.total = 8 * PROCESS_BYTES + 0.99 * copied
    with pytest.raises(UserError, match="async_save"):
        require_room(replace(job, run=run.model_copy(update={"device": Device.AUTO})))
    # Nothing is saved where ranks only measure.
    require_room(replace(job, run=run, probe_s=1.0))
    require_room(replace(job, run=run.model_copy(update={"device": Device.AUTO}), trials=(job.plan,)))


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, 130.0),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "60"}, 90.0),
        # In a container the name may be the host's, and the outermost folder its own.
        ("0::/docker/x", {"memory.max": "60", "memory.swap.max": "0"}, 60.0),
        ("0::/a", {"a/memory.max": "500", "a/memory.swap.max": "10"}, 110.0),
        ("7:cpu:/\n4:memory:/c\n0::/", {"memory/c/memory.limit_in_bytes": "60"}, 90.0),
        ("4:memory:/c", {"memory/memory.limit_in_bytes": "60", "memory/c/memory.memsw.limit_in_bytes": "70"}, 70.0),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 130.0),
    ],
)
def test_control_groups_limit_memory(
    own: str, limits: dict[str, str], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=100))
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=30))
    (tmp_path / "own").write_text(f"{own}\n", encoding="utf-8")
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    assert memory_bytes(tmp_path / "own", tmp_path) == expected


def test_what_a_rank_says_of_its_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    peer = failure_of(1, TransportError("rank 3", "rank 1 waited"), log)
    assert (peer.kind, peer.peer, peer.why) == (FailureKind.PEER, 3, "rank 1 waited")
    assert failure_of(1, TransportError("rendezvous at x", "refused"), log).peer is None
    assert failure_of(1, DataError("data.path: x"), log).exit_code == 2
    assert failure_of(1, WorkerLostError("x", "y"), log).exit_code == 5
    bug = failure_of(1, ZeroDivisionError("by zero"), log)
    assert (bug.kind, bug.exit_code) == (FailureKind.ERROR, 1) and "ZeroDivisionError: by zero" in bug.why


def test_an_unknown_key_in_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: r\ncluster: c\nworkload: w\noutput: o\nsteps: 3\nsedd: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml:6: sedd: unknown key; did you mean 'seed'"):
        load(Run, path)


def test_a_rank_says_what_ended_it_though_its_log_is_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(StringIO):
        def write(self, _: str) -> int:
            raise OSError(ENOSPC, "No space left on device")

    job, reports = make_job(tmp_path), list[Report]()
    job.log(0).parent.mkdir()
    job.log(0).symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full())
        run_rank(job, 0, dc="", address="192.0.2.1", report=reports.append, meet=lambda: Rendezvous(address="", port=0))
    [failed] = reports
    assert isinstance(failed, Failed) and failed.why.startswith("no network interface here has the address 192.0.2.1")
