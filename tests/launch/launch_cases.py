"""Small runs: one of two sites with one rank each and what is left of it, and the job of a larger one."""

from __future__ import annotations

from pathlib import Path

import psutil

from hybridep.config import build, load
from hybridep.launch.worker import Job
from hybridep.plan import LayerGroup, Plan
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLUSTER = """\
name: two
levels:
- {name: dc, size: 2, bandwidth: 40 Mbps, latency: 0.2 ms}
- {name: gpu, size: 1, bandwidth: 8 Gbps, latency: 0.1 ms}
gpu: {throughput: 10 GFLOPS, memory: 1 GiB, memory_bandwidth: 5 GB/s}
sites: [{name: oslo}, {name: rome}]
"""
WORKLOAD = """\
name: small
model: {num_layers: 2, hidden_size: 16, num_heads: 2, vocab_size: 256, num_experts: 4, top_k: 2, expert_ffn_size: 16}
training: {sequence_length: 16, micro_batch_size: 1}
"""
RUN = """\
name: trial
cluster: {folder}/cluster.yaml
workload: {folder}/workload.yaml
plan: ep
output: {folder}/output
steps: 6
device: cpu
exchange_timeout: 15 s
"""


def write_run(folder: Path) -> Path:
    """Cluster, model and run files; returns the run's."""
    (folder / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    (folder / "workload.yaml").write_text(WORKLOAD, encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder), encoding="utf-8")
    return path


def left_running(run_file: Path) -> list[psutil.Process]:
    """Processes whose command line names the run's folder."""
    folder = str(run_file.parent)
    return [p for p in psutil.process_iter(["cmdline"]) if any(folder in word for word in p.info["cmdline"] or [])]


def make_job(folder: Path, *, resume: bool = True) -> Job:
    """Three steps of four sites with two ranks each."""
    cluster, workload = load(Cluster, CONFIGS / "clusters" / "lab-4dc.yaml"), load(Workload, CONFIGS / "models" / "tiny.yaml")
    group = LayerGroup(
        first_layer=0, num_layers=workload.model.num_moe_layers, domains={"dc": 2, "gpu": 1}, migration={"dc": 0.5}
    )
    run = build(Run, {"name": "r", "cluster": "c", "workload": "w", "output": str(folder), "steps": 3}, "run")
    return Job(run=run, plan=Plan(cluster=cluster, workload=workload, layers=(group,)), resume=resume)
