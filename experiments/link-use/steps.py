"""One rank of whole steps under several prefetch depths, in turn. Computation is emulated: each rank waits for as long as the
cluster file says that it computes, as if on a device of its own, because the ranks share the cores of one machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridep.config import build
from hybridep.plan import Plan, Schedule
from hybridep.run import Data, Run
from runtime.mesh import Mesh, join_store, open_process_group
from runtime.trainer import RankTrainer


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    torch.set_num_threads(1)
    store = join_store(settings["host"], settings["port"], timeout_s=60.0)
    open_process_group(store, rank=rank, world_size=settings["num_ranks"], timeout_s=60.0)
    plan = build(Plan, settings["plan"], "plan")
    described = {"name": "link-use", "cluster": "lab", "workload": "lab", "output": Path("unused"), "steps": 1}
    run = Run.model_validate({**described, "data": Data(path=Path(__file__)), "exchange_timeout": "60 s"})
    for turn in range(settings["turns"]):
        for depth in settings["depths"]:
            scheduled = plan.model_copy(update={"schedule": Schedule(prefetch=depth)})
            trainer = RankTrainer(run, Mesh(plan=scheduled, rank=rank))
            emulate_computation(trainer, plan)
            for step in range(1, settings["steps"] + 1):
                begin = time.monotonic()
                trainer.step(step)
                print("took", json.dumps([turn, depth, step, begin, time.monotonic()]), flush=True)
            trainer.close()
    os._exit(0)


def emulate_computation(trainer: RankTrainer, plan: Plan) -> None:
    """Forward and backward of every part last as the cost model says."""
    workload, gpu = plan.workload, plan.cluster.gpu
    training = workload.training
    pre_s = workload.pre_expert_flops / gpu.throughput + gpu.block_overhead
    expert_s = training.tokens * workload.model.top_k * workload.expert_flops_per_row / gpu.throughput
    head_s = workload.head_flops / gpu.throughput
    transformer = trainer.model.transformer
    attention = [layer.get_submodule("attention") for layer in transformer.layers.values()]
    for module, seconds in [*((each, pre_s) for each in attention), (transformer.get_submodule("head"), head_s)]:
        module.register_forward_hook(lambda *_, seconds=seconds: time.sleep(seconds))
        module.register_full_backward_hook(lambda *_, seconds=seconds: time.sleep(2 * seconds))
    for experts in trainer.model.routed:
        experts.compute = _slow(experts.compute, expert_s)  # type: ignore[method-assign]
        experts.gradients = _slow(experts.gradients, 2 * expert_s)  # type: ignore[method-assign]


def _slow(compute: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*inputs: Any) -> Any:
        found = compute(*inputs)
        time.sleep(seconds)
        return found

    return slow


if __name__ == "__main__":
    main()
