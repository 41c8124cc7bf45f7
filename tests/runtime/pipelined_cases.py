"""Small pipelines that train: on CPU, and on GPUs where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rank_pool import ADDRESS
from training_cases import MODELS, PLAIN, STEPS, training_run

from hybridep.config import build
from hybridep.pipeline import ACTIVATIONS, GRADIENTS, PipelinePlan
from hybridep.plan import LayerGroup, Residency, Schedule
from hybridep.recompute import ALL, Recompute
from hybridep.run import Device
from hybridep.topology import Cluster
from hybridep.workload import Workload

DEEP = {
    "deep": PLAIN | {"num_layers": 5, "expert_bias_update_rate": 0.004},
    "deep-dense": MODELS["dense-first-uneven"] | {"num_layers": 5, "num_dense_layers": 2},
    "deep-gelu-shared": MODELS["top1-gelu-shared"] | {"num_layers": 5},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Stages over a small cluster."""

    sizes: tuple[int, int]
    stages: tuple[tuple[int, ...], ...]
    """Sites by number."""
    layers: tuple[int, ...]
    domains: tuple[dict[str, int], ...]
    """Of each stage, where they are not 1."""
    micro_batches: int
    model: str = "deep"
    training_micro_batches: int = 1
    ahead: int = 1
    migration: float = 1.0
    residency: Residency = Residency.STEP
    recompute: tuple[Recompute, ...] = ()
    """Of each stage; nothing where absent."""
    overlap: bool = True
    streams: int = 1
    codecs: tuple[tuple[str, str], ...] = ()
    """Between sites."""
    tokens: tuple[float, ...] = ()
    """How much of a micro-batch each site takes, against others of its stage; all alike where absent."""
    experts: tuple[float, ...] = ()
    """How many experts live at each site, likewise."""
    dtype: str = "fp64"

    def __str__(self) -> str:
        again = "".join(str(one.value) for one in self.recompute)
        stages = "_".join("".join(map(str, sites)) for sites in self.stages) + (f"-again{again}" if again else "")
        return f"{self.sizes[0]}x{self.sizes[1]}-{stages}-{self.model}-n{self.micro_batches}-a{self.ahead}-{self.residency.value}"

    def plan(self) -> PipelinePlan:
        levels = [
            {"name": name, "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"}
            for name, size in zip(("dc", "gpu"), self.sizes, strict=True)
        ]
        gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
        sites: list[dict[str, Any]] = [{"name": f"s{dc}"} for dc in range(self.sizes[0])]
        for key, weights in (("tokens", self.tokens), ("experts", self.experts)):
            for site, weight in zip(sites, weights, strict=False):
                site[key] = weight
        cluster = build(Cluster, {"name": "test", "levels": levels, "gpu": gpu, "sites": sites}, "cluster")
        training = {
            "sequence_length": 6,
            "micro_batch_size": 2,
            "micro_batches": self.training_micro_batches,
            "dtype": self.dtype,
        }
        model = (MODELS | DEEP)[self.model]
        workload = build(Workload, {"name": "test", "model": model, "training": training}, "workload")
        stages, first = [], 0
        for stage, (members, layers, domains) in enumerate(zip(self.stages, self.layers, self.domains, strict=True)):
            dense = min(max(workload.model.num_dense_layers - first, 0), layers)
            group = LayerGroup(
                first_layer=0,
                num_layers=layers - dense,
                domains={"dc": 1, "gpu": 1} | domains,
                migration=dict.fromkeys(domains, self.migration),
                residency=self.residency,
                recompute=self.recompute[stage] if self.recompute else Recompute.NOTHING,
            )
            stages.append({"sites": [f"s{dc}" for dc in members], "num_layers": layers, "layers": (group,)})
            first += layers
        data = {
            "cluster": cluster,
            "workload": workload,
            "micro_batches": self.micro_batches,
            "ahead": self.ahead,
            "stages": stages,
            "schedule": Schedule(overlap=self.overlap, streams={"dc": self.streams}),
            "codecs": {"dc": dict(self.codecs)},
        }
        return build(PipelinePlan, data, "plan")


NONE: dict[str, int] = {}
TWO, COPIED = {"dc": 2}, {"gpu": 2}
CASES = [
    Case(sizes=(2, 2), stages=((0,), (1,)), layers=(3, 2), domains=(NONE, NONE), micro_batches=2),
    Case(
        sizes=(2, 2),
        stages=((1,), (0,)),
        layers=(3, 2),
        domains=(COPIED, NONE),
        micro_batches=4,
        model="deep-dense",
        ahead=2,
        recompute=(ALL, Recompute.ATTENTION),
    ),
    Case(sizes=(4, 1), stages=((0,), (2,), (1,), (3,)), layers=(2, 1, 1, 1), domains=(NONE,) * 4, micro_batches=8, ahead=2),
    Case(sizes=(4, 1), stages=((0, 2), (3, 1)), layers=(2, 3), domains=(TWO, NONE), micro_batches=4, migration=0.5, streams=2),
    Case(
        sizes=(4, 1),
        stages=((0, 1), (2, 3)),
        layers=(3, 2),
        domains=(TWO, TWO),
        micro_batches=4,
        model="deep-gelu-shared",
        residency=Residency.MICROBATCH,
        recompute=(Recompute.EXPERTS, ALL),
        ahead=3,
    ),
    Case(
        sizes=(4, 1),
        stages=((0,), (1, 2, 3)),
        layers=(1, 4),
        domains=(NONE, {"dc": 3}),
        # Two sequences of a micro-batch for the first of three sites, one each for the others.
        micro_batches=2,
        overlap=False,
    ),
    Case(sizes=(4, 1), stages=((3, 1, 0), (2,)), layers=(4, 1), domains=(NONE, NONE), micro_batches=1),
    # Three sequences of a micro-batch and one; six of eight experts and two, or none.
    Case(
        sizes=(4, 1),
        stages=((0, 3), (1, 2)),
        layers=(3, 2),
        domains=(NONE, TWO),
        micro_batches=2,
        tokens=(3, 1, 2.6, 1),
        experts=(1, 3, 0.5, 0),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank ends with."""

    losses: list[float]
    tokens: int
    parameters: dict[str, NDArray[np.float64]]
    sent_bytes: dict[tuple[str, int], int]
    wan_bytes: int


def train_case(rank: int, port: int, case: Case, device: Device = Device.CPU) -> Outcome:
    from runtime.between import process_groups
    from runtime.device import choose_device
    from runtime.mesh import join_store, mesh_of
    from runtime.trainer import RankTrainer

    mesh = mesh_of(case.plan(), rank, choose_device(device, rank))
    with process_groups(mesh, join_store(ADDRESS, port, timeout_s=30), 60.0) as groups:
        trainer = RankTrainer(training_run(), mesh, groups)
        try:
            reports, between = [], trainer._between
            assert between is not None
            for step in range(1, STEPS + 1):
                before = Counter(between.sent_bytes)
                reports.append(trainer.step(step))
            sent = dict(between.sent_bytes - before)
        finally:
            trainer.close()
    parameters = {**trainer.dense, **trainer.model.transformer.expert_biases(), **trainer.model.home_parameters()}
    return Outcome(
        losses=[report.loss_sum for report in reports],
        tokens=reports[0].tokens,
        parameters={name: p.detach().double().cpu().numpy().copy() for name, p in parameters.items()},
        sent_bytes=sent,
        wan_bytes=reports[-1].wan_bytes,
    )


def reference(case: Case) -> tuple[list[float], dict[str, NDArray[np.float64]]]:
    from runtime.reference import ReferenceTrainer

    trainer = ReferenceTrainer(training_run(), case.plan())
    losses = [trainer.step(step) for step in range(1, STEPS + 1)]
    return losses, {name: p.double().numpy() for name, p in trainer.parameters().items()}


def check_same_model(case: Case, outcomes: Sequence[Outcome], losses_within: float, within: float) -> None:
    """Losses and every parameter are those of the single process; relative, parameters to the largest of their tensor."""
    plan = case.plan()
    losses, parameters = reference(case)
    check_losses(case, outcomes, losses, losses_within)
    seen = set()
    for stage, (members, one) in enumerate(zip(plan.ranks, plan.plans, strict=True)):
        part = one.workload.model.part
        assert part is not None
        for layer, _, placement in one.each_layer():
            name = f"layer{part.first_moe_layer + layer}.experts"
            seen.add(name)
            found = np.concatenate([outcomes[rank].parameters[name] for rank in members])
            order = np.argsort(np.argsort(placement.home, kind="stable"))
            scale = np.abs(parameters[name]).max()
            np.testing.assert_allclose(found[order], parameters[name], rtol=0, atol=within * scale)
        for rank in members:
            for name, mine in outcomes[rank].parameters.items():
                if not name.endswith(".experts"):
                    seen.add(name)
                    scale = np.abs(parameters[name]).max()
                    np.testing.assert_allclose(mine, parameters[name], rtol=0, atol=within * scale, err_msg=f"{name} {stage}")
    assert seen == set(parameters)


def check_losses(case: Case, outcomes: Sequence[Outcome], losses: Sequence[float], within: float) -> None:
    """Every token counts once, and the mean losses are ``losses``."""
    tokens = sum(outcome.tokens for outcome in outcomes)
    assert tokens == 4 * 2 * 6 * case.training_micro_batches
    np.testing.assert_allclose(np.sum([one.losses for one in outcomes], axis=0) / tokens, losses, rtol=within)


def check_bytes(plan: PipelinePlan, outcomes: Sequence[Outcome]) -> None:
    """Between stages each rank sends what the plan says, to the byte."""
    expected: Counter[tuple[str, int, int]] = Counter()
    for stage in range(len(plan.stages) - 1):
        ways = plan.ways(stage)
        for source, destination, number in zip(ways.source, ways.destination, ways.number, strict=True):
            size = int(number) * plan.sequence_bytes * plan.micro_batches
            expected[f"{ACTIVATIONS}@dc", int(source), int(destination)] += size
            expected[f"{GRADIENTS}@dc", int(destination), int(source)] += size
    found = {(label, rank, peer): number for rank, one in enumerate(outcomes) for (label, peer), number in one.sent_bytes.items()}
    assert found == dict(expected)
