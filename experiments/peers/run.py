"""DeepSpeed's and torchtitan's MoE beside ours in the lab: same model, data, weights and links.

Per setting: one lab at that rate. Ours runs plain expert parallelism and what the planner chooses; each peer runs stock (its own
collectives over gloo) and with its All-to-All and the gradients' all-reduce on our transport, which tells what the transport
brings from what the placement brings. Rows that are already in ``results/rows.csv`` are not measured again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.lab_settings import run_script_in_lab
from hybridep.commands.probe import measured_cluster
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build, write_text
from hybridep.launch.backends import backend_for
from hybridep.launch.lab import Lab
from hybridep.launch.session import STEPS_FILE, train
from hybridep.launch.worker import Job
from hybridep.plan import Plan
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import baseline, plan

HERE = Path(__file__).resolve().parent
COLUMNS = ["setting", "system", "transport", "median_s", "min_s", "max_s", "wan_mb", "first_loss", "last_loss"]
LEFT_OUT = 2
RUN_TIMEOUT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", help="only these")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    if given.inside:
        measure(config, given.inside, given.results)
        return 0
    missing = [name for name in config["peers"] if importlib.util.find_spec(name) is None]
    if missing:
        wanted = HERE / "requirements.txt"
        print(f"peers: {', '.join(missing)} not installed; DS_BUILD_OPS=0 pip install --no-deps -r {wanted}", file=sys.stderr)
        return 2
    for name in given.settings or config["settings"]:
        cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={config['settings'][name]['rate']}"])
        if code := run_script_in_lab(cluster, __file__, "--inside", name, "--results", str(given.results.resolve())):
            return code
    return summarise(read_rows(given.results / "rows.csv"))


def measure(config: dict[str, Any], name: str, results: Path) -> None:
    setting = dict(config["settings"][name])
    cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={setting.pop('rate')}"])
    model = {**config["model"], "expert_ffn_size": setting.pop("expert_ffn_size")}
    workload = build(Workload, {"name": name, "model": model, "training": setting}, "config.yaml")
    rows, steps = read_rows(results / "rows.csv"), config["steps"]
    done = {(row["system"], row["transport"]) for row in rows if row["setting"] == name}
    if ("hybridep plan", "ours") not in done:
        chosen = plan(measured_cluster(cluster, workload, config["seconds"]), workload)
        for system, made in (("hybridep ep", baseline(cluster, workload, "ep")), ("hybridep plan", chosen)):
            if (system, "ours") not in done:
                add(results, rows, name, system, "ours", *ours(made, steps))
    for peer in config["peers"]:
        for transport in config["transports"]:
            if (peer, transport) not in done:
                add(results, rows, name, peer, transport, *theirs(peer, transport, cluster, workload, steps))


def ours(made: Plan, steps: int) -> tuple[list[float], list[float], float | None]:
    """(seconds, loss) of each step, and bytes over the WAN per step."""
    with tempfile.TemporaryDirectory(prefix="hybridep-") as folder:
        run = Run(
            name="peers", cluster="lab", workload=made.workload.name, output=Path(folder), steps=steps, exchange_timeout="120 s"
        )
        job = Job(run=run, plan=made)
        with backend_for(job, local=True) as backend:
            summary = train(job, backend, lambda record: None)
        lines = [json.loads(line) for line in (Path(folder) / STEPS_FILE).read_text().splitlines()]
    return [line["step_s"] for line in lines], [line["loss"] for line in lines], summary["wan_bytes_per_step"]


def theirs(
    peer: str, transport: str, cluster: Cluster, workload: Workload, steps: int
) -> tuple[list[float], list[float], float | None]:
    """As ``ours``, of a peer; its bytes are counted where they travel over our transport."""
    lab = Lab.current()
    with tempfile.TemporaryDirectory(prefix="hybridep-peer-") as text:
        folder = Path(text)
        fields: dict[str, Any] = {"peer": peer, "transport": transport, "steps": steps, "folder": text}
        fields |= {"cluster": cluster.model_dump(mode="json", exclude_none=True)}
        fields |= {"workload": workload.model_dump(mode="json", exclude_none=True)}
        write_text(folder / "job.json", json.dumps(fields))
        processes = []
        try:
            for rank, location in enumerate(cluster.coordinates):
                dc = cluster.site_name(int(location[0]))
                words = [sys.executable, str(HERE / "rank.py"), str(folder / "job.json"), str(rank), lab.site(dc).address]
                with (folder / f"rank-{rank}.log").open("wb") as log:
                    processes.append(lab.spawn(dc, words, env=dict(os.environ), stdout=log, stderr=log))
            psutil.wait_procs([psutil.Process(p.pid) for p in processes], timeout=RUN_TIMEOUT_S)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not (folder / "done.json").exists():
            logs = "".join((folder / f"rank-{rank}.log").read_text()[-1500:] for rank in range(len(codes)))
            raise SystemExit(f"peers: {peer} on {transport} transport ended with {codes}:\n{logs}")
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        wan_bytes = json.loads((folder / "done.json").read_text())["wan_bytes_per_step"]
    return [line["step_s"] for line in lines], [line["loss"] for line in lines], wan_bytes


def add(
    results: Path, rows: list[dict[str, str]], setting: str, system: str, transport: str,
    steps_s: list[float], losses: list[float], wan_bytes: float | None,
) -> None:  # fmt: skip
    kept = steps_s[LEFT_OUT:]
    row = {
        "setting": setting,
        "system": system,
        "transport": transport,
        "median_s": f"{statistics.median(kept):.4f}",
        "min_s": f"{min(kept):.4f}",
        "max_s": f"{max(kept):.4f}",
        "wan_mb": "" if wan_bytes is None else f"{wan_bytes / 1e6:.3f}",
        "first_loss": f"{losses[0]:.6f}",
        "last_loss": f"{losses[-1]:.6f}",
    }
    rows.append(row)
    write_rows(results / "rows.csv", rows, COLUMNS)
    write_provenance(results)
    print(f"{setting}: {system} on {transport} transport {row['median_s']} s", file=sys.stderr)


def summarise(rows: list[dict[str, str]]) -> int:
    """Per setting and peer the gain, split in transport and placement; 1 when a peer is ahead, or trains something else."""
    failed = False
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = {(row["system"], row["transport"]): row for row in rows if row["setting"] == setting}
        chosen, ep = mine["hybridep plan", "ours"], mine["hybridep ep", "ours"]
        for peer in dict.fromkeys(system for system, _ in mine if not system.startswith("hybridep")):
            stock, moved = mine[peer, "stock"], mine[peer, "ours"]
            gain, by_transport, by_exchange, by_placement = (
                float(slow["median_s"]) / float(fast["median_s"])
                for slow, fast in ((stock, chosen), (stock, moved), (moved, ep), (ep, chosen))
            )
            apart = max(abs(float(row["first_loss"]) - float(ep["first_loss"])) for row in (stock, moved))
            print(
                f"{setting:22} {peer:11} {gain:5.2f} x slower than the plan = transport {by_transport:.2f} x two-hop exchange "
                f"{by_exchange:.2f} x placement {by_placement:.2f}; first losses apart by {apart:.1e}"
            )
            failed |= gain < 1 or apart > 1e-4
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
