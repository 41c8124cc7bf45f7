"""Is the planner's memory figure what ranks take? Each plan is trained for a few steps; every rank's peak is measured.

The peak is the largest resident memory of a rank's process during training, less what the process had after importing torch and
a step of a tiny model. Blocks are filled when they are allocated (torch.use_deterministic_algorithms): on a device they would
count from then on, on a CPU only when they are first written to, receives that are posted ahead only when the message comes. The
figure is that of the plan with the popularity of experts that the run measured; the learning rate is so small that the gate stays
as it is. Large blocks go straight to the system (MALLOC_MMAP_THRESHOLD_), so that memory that is given back counts as given back.
Cases that are already in ``results/rows.csv`` are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridep.commands.tables import read_rows, write_rows
from hybridep.config import build
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import LayerGroup, Plan, Schedule
from hybridep.routing import RoutingRecord
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.memory import memory_use
from planner.stages.costs import rooms

HERE = Path(__file__).resolve().parent
COLUMNS = ["case", "rank", "measured_mb", "planned_mb", "error"]
ADDRESS = "127.0.0.1"
TIMEOUT_S = 600.0
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Of ranks. With a processor's bf16 instructions oneDNN would keep code for every number of rows that it meets."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help="only these")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    if given.rank is not None:
        print(json.dumps(peak_of_rank(config, given.cases[0], given.rank, given.port)))
        return 0
    table = given.results / "rows.csv"
    rows: list[dict[str, Any]] = [*read_rows(table)]
    for name in given.cases or config["cases"]:
        if not any(row["case"] == name for row in rows):
            rows += measure(config, name)
            write_rows(table, rows, COLUMNS)
    return summarise([row for row in rows if row["case"] in (given.cases or config["cases"])], config["tolerance"])


def plan_of(config: dict[str, Any], name: str) -> AnyPlan:
    """With ``pipeline`` a stage for each site, all with the case's placement."""
    case = dict(config["cases"][name])
    order = case.pop("pipeline", None)
    model, training = config["model"] | case.pop("model", {}), config["training"] | case.pop("training", {})
    workload = build(Workload, {"name": name, "model": model, "training": training}, "config.yaml")
    schedule = build(Schedule, case.pop("schedule", {}), f"config.yaml: {name}")
    cluster = build(Cluster, config["cluster"], "config.yaml")
    stages = 1 if order is None else cluster.sizes[0]
    case = {"first_layer": 0, "num_layers": workload.model.num_moe_layers // stages, "migration": {}} | case
    group = build(LayerGroup, case, f"config.yaml: {name}")
    if order is None:
        return Plan(cluster=cluster, workload=workload, layers=(group,), schedule=schedule)
    layers = workload.model.num_layers // stages
    made = [{"sites": [cluster.site_name(stage)], "num_layers": layers, "layers": [group]} for stage in range(stages)]
    return build(PipelinePlan, {"cluster": cluster, "workload": workload, "stages": made, **order}, f"config.yaml: {name}")


def planned_bytes(plan: AnyPlan, popularity: tuple[tuple[float, ...], ...]) -> list[float]:
    """Of each rank, with experts as popular as they were."""
    if isinstance(plan, Plan):
        return [float(figure) for figure in memory_use(plan.with_popularity(popularity)).total_bytes]
    known = build(PipelinePlan, plan.model_dump(mode="json") | {"popularity": popularity}, "plan")
    found = [0.0] * plan.cluster.num_gpus
    for stage, ranks, room in zip(known.plans, known.ranks, rooms(known), strict=True):
        total_bytes = memory_use(stage, room.in_flight, room.beside_bytes).total_bytes
        for rank, figure in zip(ranks, total_bytes, strict=True):
            found[int(rank)] = float(figure)
    return found


def measure(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """One row per rank."""
    from runtime.mesh import host_store

    plan = plan_of(config, name)
    store = host_store(ADDRESS, timeout_s=TIMEOUT_S)
    command = [sys.executable, __file__, "--cases", name, "--port", str(store.port), "--rank"]
    environment = os.environ | ENVIRONMENT
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment) for rank in range(plan.cluster.num_gpus)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{name}: a rank failed; its error is above")
        found = [json.loads(output) for output in outputs]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    record = RoutingRecord(chosen=np.sum([one["chosen"] for one in found], axis=0))
    planned = planned_bytes(plan, record.popularity())
    return [
        {
            "case": name,
            "rank": rank,
            "measured_mb": round(peak / 1e6, 1),
            "planned_mb": round(figure / 1e6, 1),
            "error": round(figure / peak - 1, 3),
        }
        for rank, (peak, figure) in enumerate(zip((one["peak_bytes"] for one in found), planned, strict=True))
    ]


def peak_of_rank(config: dict[str, Any], name: str, rank: int, port: int) -> dict[str, Any]:
    """Bytes beyond what the process needs before it has a model, and how often each expert was chosen."""
    import torch
    from torch._C._distributed_c10d import PrefixStore

    from runtime.between import process_groups
    from runtime.mesh import join_store, mesh_of
    from runtime.trainer import RankTrainer

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    plan = plan_of(config, name)
    store = join_store(ADDRESS, port, timeout_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_bytes(np.random.default_rng(0).integers(1, 256, 100_000, dtype=np.uint8).tobytes())

        def run(steps: int) -> Run:
            values: dict[str, Any] = {
                "cluster": "",
                "workload": "",
                "output": folder,
                "data": {"path": text},
                "exchange_timeout": "300 s",
            }
            values["optimizer"] = {"learning_rate": 1e-9}
            return build(Run, {"name": name, "steps": steps, **values}, "run")

        def train(plan: AnyPlan, steps: int) -> dict[str, Any]:
            mesh = mesh_of(plan, rank)
            with process_groups(mesh, PrefixStore(f"{steps}", store), TIMEOUT_S) as groups:
                trainer = RankTrainer(run(steps), mesh, groups)
                try:
                    for step in range(1, steps + 1):
                        trainer.step(step)
                    peak = resident("VmHWM")
                    return {"peak_bytes": peak, "chosen": trainer.recorder.chosen.tolist()}
                finally:
                    trainer.close()

        # What is loaded at first use (kernels, threads, connections) is no model's memory.
        layers = len(plan.stages) if isinstance(plan, PipelinePlan) else 1
        tiny = {"hidden_size": 16, "expert_ffn_size": 16, "vocab_size": 256, "num_layers": layers, "shared_ffn_size": 0}
        shrunk = config | {"model": config["model"] | tiny, "training": config["training"] | {"sequence_length": 8}}
        case = {key: value for key, value in config["cases"][name].items() if key in ("domains", "pipeline")}
        batches = config["cases"][name].get("training", {}).get("micro_batches", 1)
        shrunk = shrunk | {"cases": {name: case | {"training": {"micro_batches": batches}}}}
        train(plan_of(shrunk, name), 1)
        before = resident("VmRSS")
        # Forgets the largest resident size so far.
        Path("/proc/self/clear_refs").write_text("5")
        found = train(plan, config["steps"])
    return found | {"peak_bytes": found["peak_bytes"] - before}


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def summarise(rows: list[dict[str, Any]], tolerance: float) -> int:
    """1 when a rank's peak is farther from the plan's figure than ``tolerance``."""
    worst = 0.0
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        found = ", ".join(f"{row['measured_mb']} ({float(row['error']):+.1%})" for row in mine)
        print(f"{name:36} {found}")
        worst = max(worst, *(abs(float(row["error"])) for row in mine))
    print(f"largest error {worst:.1%}")
    return int(worst > tolerance)


if __name__ == "__main__":
    sys.exit(main())
