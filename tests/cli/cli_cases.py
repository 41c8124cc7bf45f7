"""Small inputs on disk, and how a command ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridep.launch.host import child_environment

CLUSTER = """\
name: two
levels:
- {name: dc, size: 2, bandwidth: 100 Mbps, latency: 0.2 ms}
- {name: gpu, size: 1, bandwidth: 8 Gbps, latency: 0.1 ms}
gpu: {throughput: 10 GFLOPS, memory: 1 GiB, memory_bandwidth: 5 GB/s}
"""
FIVE_SITES = CLUSTER.replace("size: 2", "size: 5").replace("10 GFLOPS", "1 TFLOPS") + (
    "sites: [{name: a, up: 30 Mbps, down: 50 Mbps}, {name: b, up: 20 Mbps}, {name: c}, {name: d}, {name: e}]\n"
)
WORKLOAD = """\
name: small
model: {num_layers: 2, hidden_size: 16, num_heads: 2, vocab_size: 256, num_experts: 4, top_k: 2, expert_ffn_size: 16}
training: {sequence_length: 16, micro_batch_size: 1}
"""


class Inputs:
    """A folder with a cluster of two sites, a small model and a run of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = self.write("cluster.yaml", CLUSTER)
        self.workload = self.write("workload.yaml", WORKLOAD)
        self.text = self.write("text.txt", "the quick brown fox jumps over the lazy dog. " * 200)
        self.output = folder / "output"
        self.run = self.write(
            "run.yaml",
            f"name: trial\ncluster: {self.cluster}\nworkload: {self.workload}\nplan: ep\noutput: {self.output}\n"
            f"steps: 4\ndevice: cpu\ndata: {{path: {self.text}}}\nexchange_timeout: 5 s\n",
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path


class Result:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Call = Callable[..., Result]
"""Runs a verb in this process (the fixture ``call``)."""


def shell(*arguments: object, environment: dict[str, str] | None = None, timeout_s: float = 100.0) -> Result:
    """Run a verb in a process of its own."""
    command = [sys.executable, "-m", "hybridep.cli", *(str(argument) for argument in arguments)]
    done = subprocess.run(command, env=child_environment(environment), capture_output=True, text=True, timeout=timeout_s)
    return Result(done.returncode, done.stdout, done.stderr)


SLOW = CLUSTER.replace("100 Mbps", "1 Mbps")


def in_stages(inputs: Inputs, call: Call, *more: str, cluster: str = SLOW) -> tuple[Path, Result]:
    path = inputs.folder / "stages.yaml"
    site = inputs.write("slow.yaml", cluster)
    return path, call("plan", site, inputs.workload, "-o", path, "--time-limit", "5", *more)
