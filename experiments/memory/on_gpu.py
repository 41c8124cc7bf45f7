"""Is the planner's memory figure what a rank takes on a GPU? One rank trains each case of ``config.yaml``'s ``on_gpu`` for three
steps; its peak is that of all tensors, less what there was before. Weights are drawn on the CPU: half a minute a case.

    .venv/bin/python experiments/memory/on_gpu.py
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import yaml
from torch._C._distributed_c10d import PrefixStore

from hybridep.commands.tables import write_rows
from hybridep.config import build
from hybridep.plan import LayerGroup, Plan
from hybridep.routing import RoutingRecord
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.memory import memory_use
from runtime.between import process_groups
from runtime.device import choose_device
from runtime.mesh import host_store, mesh_of
from runtime.trainer import RankTrainer

HERE = Path(__file__).resolve().parent
STEPS, TOKENS = 3, 1 << 18
COLUMNS = ("case", "device", "measured_gb", "planned_gb", "error")


def plan_of(config: dict[str, Any], name: str) -> Plan:
    """On one rank."""
    case = dict(config["cases"][name])
    model, training = config["model"] | case.pop("model", {}), config["training"] | case.pop("training", {})
    workload = build(Workload, {"name": name, "model": model, "training": training}, "config.yaml")
    group = {"first_layer": 0, "num_layers": workload.model.num_moe_layers, "domains": {}, "migration": {}} | case
    cluster = build(Cluster, config["cluster"], "config.yaml")
    return Plan(cluster=cluster, workload=workload, layers=(build(LayerGroup, group, f"config.yaml: {name}"),))


def measured(plan: Plan, store: Any, folder: Path) -> tuple[int, RoutingRecord]:
    """Bytes at the peak, and what the gates chose."""
    data = folder / "tokens.npy"
    np.save(data, np.random.default_rng(0).integers(plan.workload.model.vocab_size, size=TOKENS).astype(np.uint32))
    values = {"cluster": "", "workload": "", "output": str(folder), "steps": STEPS, "data": {"path": str(data)}}
    # So low that the gate stays as it is.
    run = build(Run, {"name": "gpu", "device": "cuda", "optimizer": {"learning_rate": 1e-9}, **values}, "run")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mesh = mesh_of(plan, 0, choose_device(run.device, 0))
    with process_groups(mesh, PrefixStore(plan.workload.name, store), 60.0) as groups:
        trainer = RankTrainer(run, mesh, groups)
        try:
            for step in range(1, STEPS + 1):
                trainer.step(step)
            return torch.cuda.max_memory_allocated() - before, RoutingRecord(chosen=trainer.recorder.chosen)
        finally:
            trainer.close()


@click.command(help=__doc__)
def main() -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))["on_gpu"]
    store, rows = host_store("127.0.0.1", timeout_s=60.0), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in config["cases"]:
            plan = plan_of(config, name)
            peak, record = measured(plan, store, Path(folder))
            planned = float(memory_use(plan.with_popularity(record.popularity())).total_bytes.max())
            row = {"case": name, "device": torch.cuda.get_device_name(), "error": f"{planned / peak - 1:+.4f}"}
            rows.append(row | {"measured_gb": f"{peak / 1e9:.3f}", "planned_gb": f"{planned / 1e9:.3f}"})
            click.echo("  ".join(f"{key} {rows[-1][key]}" for key in COLUMNS))
    write_rows(HERE / "results" / "on_gpu.csv", rows, COLUMNS)


if __name__ == "__main__":
    main()
