"""How long is a training step over a long link, where latency rules?

    .venv/bin/python experiments/long-link/steps.py

Two ranks at the ends of a delay line (run.py) train a model whose tokens cross at every layer. Beside the step: what the planner
expects, which counts half a round trip for each exchange. Needs the right to make network namespaces and TUN devices.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from run import DelayLine

from hybridep.config import build, write_text
from hybridep.plan import LayerGroup, Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import expected_s

HERE = Path(__file__).resolve().parent
COLUMNS = ["round_trip_ms", "step_s", "least_s", "most_s", "expected_s"]
_RANK = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.run import Run
from runtime.trials import run_trials
rank, address, port, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
given = json.load(open(path))
store = dist.TCPStore(address, port, None, rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False)
for trial in run_trials(build(Run, given["run"], "steps"), [build(Plan, given["plan"], "steps")], rank=rank, store=store):
    print(json.dumps(trial.step_s))
"""


def main() -> int:
    config = yaml.safe_load((HERE / "config.yaml").read_text())["steps"]
    rows = []
    for number, round_trip_s in enumerate(config["round_trips_s"]):
        plan = plan_of(config, round_trip_s)
        taken = steps(plan, config["steps"], round_trip_s, port=21_000 + number)
        values = [round_trip_s * 1e3, statistics.median(taken), min(taken), max(taken), expected_s(plan)]
        rows.append([f"{value:.4g}" for value in values])
        print(", ".join(f"{name} {value}" for name, value in zip(COLUMNS, rows[-1], strict=True)), flush=True)
    write_text(HERE / "results" / "steps.csv", "\n".join([",".join(COLUMNS), *(",".join(row) for row in rows)]) + "\n")
    return 0


def plan_of(config: dict[str, Any], round_trip_s: float) -> Plan:
    """Expert parallelism over two sites of one rank."""
    level = {"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": f"{round_trip_s / 2} s"}
    cluster = build(Cluster, {"name": "two ends", "levels": [level], "gpu": config["gpu"]}, "config.yaml")
    fields = {"name": "steps", "model": config["model"], "training": config["training"]}
    workload = build(Workload, fields, "config.yaml")
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={}, migration={})
    return Plan(cluster=cluster, workload=workload, layers=(group,))


def steps(plan: Plan, number: int, round_trip_s: float, port: int) -> list[float]:
    """Seconds of each but the first, of the slower rank."""
    with tempfile.TemporaryDirectory(prefix="hybridep-") as folder:
        run = {"name": "steps", "cluster": "two ends", "workload": "steps", "output": folder, "steps": number}
        path = Path(folder) / "given.json"
        path.write_text(json.dumps({"run": run, "plan": plan.model_dump(mode="json", exclude_none=True)}))
        line = DelayLine(round_trip_s / 2, 4 << 20)
        try:
            outputs = line.run_ranks(_RANK, port, path)
        finally:
            line.close()
    return [max(both) for both in zip(*(json.loads(output.splitlines()[-1]) for output in outputs), strict=True)][1:]


if __name__ == "__main__":
    sys.exit(main())
