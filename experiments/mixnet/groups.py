"""One expert-parallel group of one pipeline stage, simulated, and what an iteration of all GPUs takes from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.units import gbps_to_bytes_per_s
from hybridep.workload import Workload
from simulator.fabric_file import FabricFile
from simulator.step import StepResult, simulate_step


@dataclass(frozen=True, kw_only=True)
class Group:
    """A model's expert-parallel group. A rank is a tensor-parallel group of GPUs, computes and has links as all of them."""

    name: str
    config: dict[str, Any]

    def __getitem__(self, key: str) -> int:
        return int(self.config["models"][self.name][key])

    @property
    def ranks_per_node(self) -> int:
        return int(self.config["gpus_per_node"]) // self["tp"]

    def cluster(self, rate_gbps: float) -> Cluster:
        """The group's nodes as the one site of a cluster, each GPU with an interface of this rate."""
        config, tp = self.config, self["tp"]
        throughput, memory, nvswitch = (float(config[key].split()[0]) for key in ("throughput", "memory_bandwidth", "nvswitch"))
        levels = [
            {"name": "dc", "size": 1, "bandwidth": "1 Gbps"},
            {
                "name": "node",
                "size": self["ep"] // self.ranks_per_node,
                "bandwidth": f"{config['gpus_per_node'] * rate_gbps} Gbps",
            },
            {"name": "gpu", "size": self.ranks_per_node, "bandwidth": f"{tp * nvswitch} Gbps"},
        ]
        gpu = {
            "throughput": f"{tp * throughput} TFLOPS",
            "memory": "80 GiB",
            "memory_bandwidth": f"{tp * memory} TB/s",
            "block_overhead": f"{self.tensor_parallel_s!r} s",
        }
        latency = {"latency": config["latency"]}
        return build(Cluster, {"name": self.name, "levels": [level | latency for level in levels], "gpu": gpu}, self.name)

    @property
    def tokens(self) -> int:
        """Of a rank in a micro-batch."""
        return int(self.config["sequence_length"] * self.config["micro_batch_size"])

    @property
    def tensor_parallel_s(self) -> float:
        """Of a block's forward: a ring all-reduce of activations after attention, over the NVSwitch; experts' after theirs."""
        tp, hidden = self["tp"], self.config["models"][self.name]["model"]["hidden_size"]
        size_bytes = 2 * self.tokens * hidden * 2.0
        rate = gbps_to_bytes_per_s(float(self.config["nvswitch"].split()[0]))
        return 2 * size_bytes * (tp - 1) / tp / rate

    def workload(self, micro_batches: int) -> Workload:
        """An inner pipeline stage: its share of the layers, next to no vocabulary."""
        model = dict(self.config["models"][self.name]["model"])
        model |= {"num_layers": model["num_layers"] // self["pp"], "vocab_size": 2}
        training = {
            "sequence_length": self.config["sequence_length"],
            "micro_batch_size": self.config["micro_batch_size"],
            "micro_batches": micro_batches,
        }
        return build(Workload, {"name": self.name, "model": model, "training": training | {"dtype": "bf16"}}, self.name)

    def plan(self, rate_gbps: float, micro_batches: int) -> Plan:
        """Expert parallelism, with uneven experts."""
        workload = self.workload(micro_batches)
        plan = baseline_plan(self.cluster(rate_gbps), workload, Baseline.EP)
        return plan.with_popularity(popularity(workload, self.config["exponent"], self.config["seed"]))

    def iteration_s(self, rate_gbps: float, inside: dict[str, Any]) -> dict[str, float]:
        """Seconds of an iteration, and of its parts: a pipeline of stages that are alike, then gradients across replicas.

        The first micro-batch (with what comes once a step) and each further one are told apart by two simulations; of the
        pipeline's further ones there are (micro-batches - 1) and the bubble's (stages - 1).
        """
        first, both = (self.simulate(rate_gbps, inside, number) for number in (1, 2))
        each_s = both.step_s - first.step_s
        pipeline_s = first.step_s + (self.config["micro_batches"] + self["pp"] - 2) * each_s
        replicas_s = self.replicas_s(rate_gbps, inside)
        exchanged = sum(both.parts.get(part, 0.0) - first.parts.get(part, 0.0) for part in both.parts if "token" in part)
        exchanged += sum(
            both.parts.get(part, 0.0) - first.parts.get(part, 0.0) for part in ("combine_backward", "dispatch_backward")
        )
        changing = both.parts.get("reconfiguration", 0.0) - first.parts.get("reconfiguration", 0.0)
        return {
            "iteration_s": pipeline_s + replicas_s,
            "micro_batch_s": each_s,
            "exchanges_s": exchanged,
            "reconfiguration_s": changing,
            "replicas_s": replicas_s,
        }

    def simulate(self, rate_gbps: float, inside: dict[str, Any], micro_batches: int) -> StepResult:
        fabric = build(FabricFile, {"name": "inside", "inside": inside}, "fabrics") if inside else None
        return simulate_step(self.plan(rate_gbps, micro_batches), fabric=fabric)

    def replicas_s(self, rate_gbps: float, inside: dict[str, Any]) -> float:
        """Ring all-reduce of a rank's gradients with its peers in other groups of the same stage, over the packet network: of
        its experts, and of its share of the dense ones, which are reduced within the group before."""
        workload = self.workload(1)
        replicas = self.config["gpus"] // (self["ep"] * self["tp"] * self["pp"])
        experts = workload.model.num_experts / self["ep"] * workload.model.expert_params * workload.model.num_layers
        size_bytes = 2.0 * (experts + workload.model.dense_params / self["ep"])
        settings = inside.get("mixnet")
        share = 1.0
        if settings is not None:
            packet, optical = settings.get("packet", 2), settings.get("optical", 6)
            share = packet / (packet + optical)
        rate = share * self["tp"] * gbps_to_bytes_per_s(rate_gbps)
        return 2 * (replicas - 1) / replicas * size_bytes / rate


def popularity(workload: Workload, exponent: float, seed: int) -> tuple[tuple[float, ...], ...]:
    """Per layer the share of each expert: falling with its rank, which is drawn anew for every layer."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, workload.model.num_experts + 1) ** -float(exponent)
    shares /= shares.sum()
    return tuple(tuple(rng.permutation(shares).tolist()) for _ in range(workload.model.num_moe_layers))
