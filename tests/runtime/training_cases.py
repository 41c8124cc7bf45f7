"""Tiny training runs over every kind of plan, how to run one on a rank, and how to compare it with the reference."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rank_pool import ADDRESS

from hybridep.codecs import Codecs
from hybridep.config import build
from hybridep.homes import homes_text
from hybridep.pipeline import AnyPlan
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.run import Data, Device, Optimizer, Run, StepReport
from hybridep.serving import ServingGroup, serving_groups
from hybridep.topology import Cluster
from hybridep.traffic import step_traffic
from hybridep.workload import Workload

STEPS = 6
"""Past the rise of the rate; what is wrong shows in the first few."""
TOLERANCE = 1e-10
LEVELS = {2: ("dc", "gpu"), 3: ("dc", "node", "gpu")}

PLAIN = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 256,
    "num_experts": 8,
    "top_k": 2,
    "expert_ffn_size": 8,
}
LATENT = {"query_rank": 6, "kv_rank": 5, "nope_head_dim": 4, "rope_head_dim": 2, "value_head_dim": 3}
DEEPSEEK_GATE: dict[str, Any] = {
    "score_function": "sigmoid",
    "routed_scaling_factor": 1.5,
    "expert_groups": 4,
    "groups_per_token": 2,
    # Scores here differ by about so much: the bias changes choices from the second step on.
    "expert_bias_update_rate": 0.01,
}
"""Of a model with 16 experts, of which tokens choose four."""
MODELS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "top1-gelu-shared": PLAIN
    | {"top_k": 1, "ffn": "gelu", "shared_ffn_size": 8, "qk_norm": True, "qk_norm_full_width": True, "num_kv_heads": 1},
    "top4-tied-gqa": PLAIN
    | {"top_k": 4, "tie_embeddings": True, "num_kv_heads": 1, "partial_rotary_factor": 0.5, "num_experts": 16}
    | DEEPSEEK_GATE,
    "dense-first-uneven": PLAIN
    | {"num_layers": 3, "num_dense_layers": 1, "dense_ffn_size": 12, "num_experts": 11, "latent_attention": LATENT},
    "qwen2": PLAIN
    | {"top_k": 3, "norm_topk_prob": False, "attention_bias": True, "shared_ffn_size": 8, "shared_expert_gate": True},
    "qwen3": PLAIN | {"num_kv_heads": 1, "head_dim": 4, "qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-5},
}
CROSS = {
    f"top{top_k}{'-shared' if shared else ''}": PLAIN | {"top_k": top_k, "shared_ffn_size": shared}
    for top_k in (1, 2, 4)
    for shared in (0, 8)
}
"""For the complete cross of factors, which takes too long for every run."""
CAPACITY = {
    "drop-probs": PLAIN | {"capacity_factor": 1.0, "expert_bias_update_rate": 0.004},
    "drop-position": PLAIN | {"capacity_factor": 0.7, "token_drop_policy": "position", "top_k": 3},
    "drop-padded": PLAIN
    | {"capacity_factor": 1.2, "pad_expert_input_to_capacity": True, "num_experts": 11, "shared_ffn_size": 8},
}
"""Models whose experts take only so many tokens."""
WILD = ("plain", "dense-first-uneven", *CAPACITY)
"""Models that meet random placements."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan for one model."""

    sizes: tuple[int, ...]
    domains: tuple[int, ...]
    model: str = "plain"
    migration: tuple[float, ...] = ()
    residency: Residency = Residency.STEP
    recompute: Recompute = Recompute.NOTHING
    micro_batches: int = 1
    overlap: bool = True
    prefetch: int = 0
    chunks: int = 1
    streams: int = 1
    """Of the outermost level."""
    dtype: str = "fp64"
    codecs: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    """Level -> (kind, codec) pairs; exact where absent."""
    random_serving: int | None = None
    """Seed of a serving table that sends each outermost worker's tokens anywhere, in place of its domain size."""
    tokens: tuple[float, ...] = ()
    """Of each outermost worker's ranks; all alike where absent."""
    pods: tuple[int, ...] = ()
    """Of each site, as many as ``sizes`` has outermost workers; every one of those a site where absent."""
    wild: int | None = None
    """Seed of homes, domains or serving tables, ratios and residency that differ in every layer, and of the popularity by which
    partial migration copies; in place of what is said above."""

    def __str__(self) -> str:
        if self.wild is not None:
            return f"{'x'.join(map(str, self.sizes))}-wild{self.wild}-{self.model}-m{self.micro_batches}"
        text = f"{'x'.join(map(str, self.sizes))}-domains{'x'.join(map(str, self.domains))}-{self.model}"
        text += f"-r{self.migration}" if self.migration else ""
        text += "".join(f"-{level}-{'-'.join(str(value) for _, value in pairs)}" for level, pairs in self.codecs)
        text += f"-random{self.random_serving}" if self.random_serving is not None else ""
        text += f"-{self.residency.value}-m{self.micro_batches}"
        text += "-again-" + "-".join(self.recompute.names) if self.recompute else ""
        text += f"-t{self.tokens}" if self.tokens else ""
        text += f"-pods{self.pods}" if self.pods else ""
        text += f"-s{self.streams}" if self.streams > 1 else ""
        text += f"-c{self.chunks}" if self.chunks > 1 else ""
        return f"{text}{'' if self.overlap else '-serial'}{f'-d{self.prefetch}' if self.prefetch else ''}"

    @property
    def num_ranks(self) -> int:
        return int(np.prod(self.sizes))

    def plan(self) -> Plan:
        names = LEVELS[len(self.sizes)]
        levels = [
            {"name": name, "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"}
            for name, size in zip(names, self.sizes, strict=True)
        ]
        gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
        sites = [{"name": f"s{dc}", "tokens": weight} for dc, weight in enumerate(self.tokens)]
        if self.pods:
            sites = [{"name": f"s{dc}", "pods": number} for dc, number in enumerate(self.pods)]
            levels[0] |= {"size": len(self.pods), "pods": {"bandwidth": "10 Gbps", "latency": "0.1 ms"}}
        cluster = build(Cluster, {"name": "test", "levels": levels, "gpu": gpu, "sites": sites}, "cluster")
        training = {"sequence_length": 6, "micro_batch_size": 2, "micro_batches": self.micro_batches, "dtype": self.dtype}
        workload = build(
            Workload, {"name": "test", "model": (MODELS | CROSS | CAPACITY)[self.model], "training": training}, "workload"
        )
        if self.wild is not None:
            return wild_plan(cluster, workload, self.wild, Schedule(overlap=self.overlap, chunks=self.chunks))
        domains = dict(zip(names, self.domains, strict=True))
        serving: tuple[ServingGroup, ...] = ()
        if self.random_serving is not None:
            del domains[names[0]]
            rng = np.random.default_rng(self.random_serving)
            serving = serving_groups(cluster, rng.integers(self.sizes[0], size=(self.sizes[0], workload.model.num_experts)))
        group = LayerGroup(
            first_layer=0,
            num_layers=workload.model.num_moe_layers,
            domains=domains,
            migration=dict(zip(names, self.migration, strict=False)),
            residency=self.residency,
            recompute=self.recompute,
            serving=serving,
        )
        codecs = {level: build(Codecs, dict(pairs), "codecs") for level, pairs in self.codecs}
        streams = {names[0]: self.streams}
        schedule = Schedule(overlap=self.overlap, prefetch=self.prefetch, chunks=self.chunks, streams=streams)
        return Plan(cluster=cluster, workload=workload, layers=(group,), codecs=codecs, schedule=schedule)


def wild_plan(cluster: Cluster, workload: Workload, seed: int, schedule: Schedule) -> Plan:
    """A plan that is different in every layer and everywhere uneven."""
    rng = np.random.default_rng(seed)
    num_experts, groups = workload.model.num_experts, []
    for layer in range(workload.model.num_moe_layers):
        domains = {level.name: int(rng.choice(divisors(level.size))) for level in cluster.levels}
        serving: tuple[ServingGroup, ...] = ()
        if rng.random() < 0.4:
            del domains[cluster.levels[0].name]
            serving = serving_groups(cluster, rng.integers(cluster.sizes[0], size=(cluster.sizes[0], num_experts)))
        groups.append(
            LayerGroup(
                first_layer=layer,
                num_layers=1,
                domains=domains,
                migration={name: float(rng.choice([0.3, 0.5, 0.7, 1.0])) for name in domains},
                residency=Residency(rng.choice([residency.value for residency in Residency])),
                recompute=Recompute((seed + layer) % 4),
                serving=serving,
                # Some ranks own much, some nothing.
                homes=homes_text(cluster, rng.integers(cluster.num_gpus, size=num_experts)),
            )
        )
    shares = rng.dirichlet(np.full(num_experts, 3.0), size=len(groups)) / 2 + 0.5 / num_experts
    shares = np.minimum(shares, 1 / workload.model.top_k)
    popularity = tuple(tuple(float(share) for share in row / row.sum()) for row in shares)
    return Plan(cluster=cluster, workload=workload, layers=tuple(groups), popularity=popularity, schedule=schedule)


def wild_cases(number: int) -> list[Case]:
    """Random placements on clusters of four and eight ranks; residency and capacity vary too."""
    shapes = [(2, 2), (4, 1), (4, 2), (2, 2, 2)]
    return [
        Case(
            sizes=(sizes := shapes[seed * len(shapes) // number]),
            domains=(1,) * len(sizes),
            model=WILD[seed % len(WILD)],
            micro_batches=1 + seed % 2,
            overlap=seed % 7 != 0,
            wild=seed,
        )
        for seed in range(number)
    ]


TEXT = Path(__file__).parents[2] / "LICENSE"


def training_run(output: Path = Path("unused"), **changes: Any) -> Run:
    """A run over a text that no edit of the code changes."""
    values: dict[str, Any] = {
        "name": "test",
        "cluster": "test",
        "workload": "test",
        "output": output,
        "steps": STEPS,
        "seed": 7,
        # Also where there is a GPU: these runs are compared to the last bits.
        "device": Device.CPU,
        "data": Data(path=TEXT),
        # Tests share their cores with others: a rank that waits this long has lost its peer, not its turn.
        "exchange_timeout": "60 s",
        "optimizer": Optimizer(learning_rate=3e-3, warmup_steps=3),
    }
    return Run(**(values | changes))


def train_run(
    rank: int, port: int, run: Run, plan: AnyPlan, resume: bool = False, fault: str = "", or_begin: bool = False
) -> list[StepReport] | None:
    """A whole run as one rank; None where the plan has fewer ranks."""
    from runtime.mesh import join_store
    from runtime.trainer import train

    if rank >= plan.cluster.num_gpus:
        return None
    os.environ["HYBRIDEP_FAULT"] = fault
    reports: list[StepReport] = []
    store = join_store(ADDRESS, port, timeout_s=30)
    train(run, plan, rank=rank, store=store, on_step=reports.append, resume=resume, or_begin=or_begin)
    return reports


def run_apart(rank: int, port: int, run: Run, plan: AnyPlan, *arguments: Any) -> list[StepReport] | None:
    """With a folder of its own for each site."""
    output = run.output / f"site{rank // plan.cluster.ranks_per_site}"
    own = run.model_copy(update={"output": output, "checkpoints": run.checkpoints.model_copy(update={"folder": output})})
    return train_run(rank, port, own, plan, *arguments)


def losses_of(reports: Sequence[Sequence[StepReport]]) -> list[float]:
    """Of each step, given all ranks' reports."""
    return [sum(step.loss_sum for step in steps) / sum(step.tokens for step in steps) for steps in zip(*reports, strict=True)]


def divisors(size: int) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0]


def cases(sizes: tuple[int, ...], repeats: int) -> list[Case]:
    """Every domain choice ``repeats`` times; residency, accumulation, model, partial migration, overlap and prefetch take
    turns in cycles of different length, so that they meet in many combinations."""
    models, ratios = list(MODELS), cycle([(), (0.5,), (1.0, 0.5), (0.5, 0.5), ()])
    turns = cycle(product((1, 2), (Residency.STEP, Residency.MICROBATCH)))
    schedules = cycle([(True, 0), (True, 1), (True, 2), (True, 0), (True, 1), (True, 1), (False, 0)])
    found = []
    for domains in product(*(divisors(size) for size in sizes)):
        for _ in range(repeats):
            micro_batches, residency = next(turns)
            overlap, prefetch = next(schedules)
            found.append(
                Case(
                    sizes=sizes,
                    domains=domains,
                    # One step ahead after every round, so that a model meets other turns each time.
                    model=models[(len(found) + len(found) // len(models)) % len(models)],
                    migration=next(ratios),
                    residency=residency,
                    micro_batches=micro_batches,
                    overlap=overlap,
                    prefetch=prefetch,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank ends with."""

    losses: list[float]
    parameters: dict[str, NDArray[np.float64]]
    sent_bytes: dict[tuple[str, int], int]
    """(operation@level, peer) -> bytes of the last step."""
    routing: dict[tuple[int, int], NDArray[np.int64]]
    """(layer, micro-batch) -> [T, K] of the last step."""


def train_case(
    rank: int, case: Case, prepare: Callable[[Any], None] | None = None, device: Device = Device.CPU, steps: int = STEPS
) -> Outcome:
    """Run a case as one rank; ``prepare`` may tamper with the trainer."""
    from runtime.device import choose_device
    from runtime.gate import Gated
    from runtime.mesh import Mesh
    from runtime.trainer import RankTrainer

    trainer = RankTrainer(training_run(), Mesh(plan=case.plan(), rank=rank, device=choose_device(device, rank)))
    if prepare is not None:
        prepare(trainer)
    routing: dict[tuple[int, int], NDArray[np.int64]] = {}
    seen: Counter[int] = Counter()

    def record(layer: int, gated: Gated) -> None:
        routing[layer, seen[layer]] = gated.ids_TK.cpu().numpy().copy()
        seen[layer] += 1

    for block in trainer.model.transformer.moe_blocks():
        block.routing_hook = record
    try:
        losses = []
        for step in range(1, steps + 1):
            seen.clear()
            before = Counter(trainer.transport.sent_bytes)
            losses.append(trainer.step(step).loss_sum)
        sent = dict(trainer.transport.sent_bytes - before)
    finally:
        trainer.close()
    parameters = {**trainer.dense, **trainer.model.transformer.expert_biases(), **trainer.model.home_parameters()}
    arrays = {name: p.detach().double().cpu().numpy().copy() for name, p in parameters.items()}
    return Outcome(losses=losses, parameters=arrays, sent_bytes=sent, routing=routing)


def order_of_copies(rank: int, case: Case) -> list[str]:
    """What one step does with copies, and the attentions' forwards and backwards, in order."""
    from runtime.mesh import Mesh
    from runtime.trainer import RankTrainer

    trainer = RankTrainer(training_run(), Mesh(plan=case.plan(), rank=rank))
    found: list[str] = []
    layers = {id(block.routed.exchange): block.layer for block in trainer.model.transformer.moe_blocks()}
    for layer in trainer.model.transformer.layers.values():
        number = layer.feed_forward.layer
        layer.attention.register_forward_hook(lambda *_, number=number: found.append(f"forward {number}"))
        layer.attention.register_full_backward_hook(lambda *_, number=number: found.append(f"backward {number}"))
    ended = threading.Event()
    trainer.model.transformer.layers["0"].attention.register_full_backward_hook(lambda *_: ended.set())
    submit = trainer.stream.submit

    def noted(work: Any) -> Any:
        name = f"{work.__name__} {layers[id(work.__self__)]}"
        found.append(name)
        if name != "_return 1" or not case.prefetch:
            return submit(work)

        def late() -> Any:
            # Until the backward of the block below is over: nothing before the end of the step may wait for it.
            found.append(f"held {ended.wait(20.0)}")
            return work()

        return submit(late)

    trainer.stream.submit = noted
    try:
        trainer.step(1)
    finally:
        trainer.close()
    return found


@cache
def reference(
    num_ranks: int, model: str, micro_batches: int, dtype: str = "fp64", steps: int = STEPS
) -> tuple[list[float], dict[str, NDArray[np.float64]]]:
    """(losses, parameters) of the single process; domains and residency make no difference to it."""
    import torch

    from runtime.reference import ReferenceTrainer

    torch.set_num_threads(1)
    case = Case(sizes=(num_ranks, 1), domains=(1, 1), model=model, micro_batches=micro_batches, dtype=dtype)
    trainer = ReferenceTrainer(training_run(), case.plan())
    losses = [trainer.step(step) for step in range(1, steps + 1)]
    return losses, {name: p.double().numpy() for name, p in trainer.parameters().items()}


def reference_of(case: Case, outcomes: Sequence[Outcome]) -> tuple[list[float], dict[str, NDArray[np.float64]]]:
    """After as many steps as the outcomes'."""
    return reference(case.num_ranks, case.model, case.micro_batches, case.dtype, len(outcomes[0].losses))


def check_losses(case: Case, outcomes: Sequence[Outcome], tolerance: float) -> None:
    """Every step's loss equals the reference's."""
    expected, _ = reference_of(case, outcomes)
    training = case.plan().workload.training
    num_tokens = training.tokens * training.micro_batches * case.num_ranks
    losses = np.sum([outcome.losses for outcome in outcomes], axis=0) / num_tokens
    np.testing.assert_allclose(losses, expected, rtol=tolerance, atol=0)


def check_fidelity(case: Case, outcomes: Sequence[Outcome], tolerance: float = TOLERANCE) -> None:
    """Every loss and every parameter of every rank equals the reference."""
    check_losses(case, outcomes, tolerance)
    _, expected = reference_of(case, outcomes)
    homes = [placement.home for _, _, placement in case.plan().each_layer()]
    for name, values in expected.items():
        scale = np.abs(values).max()
        if name.endswith(".experts"):
            home = homes[int(name.removeprefix("layer").removesuffix(".experts"))]
            stacked = np.concatenate([outcome.parameters[name] for outcome in outcomes])
            # Each rank has its own in ascending order.
            found = [stacked[np.argsort(np.argsort(home, kind="stable"))]]
        else:
            found = [outcome.parameters[name] for outcome in outcomes]
        for mine in found:
            np.testing.assert_allclose(mine, values, rtol=0, atol=tolerance * scale, err_msg=name)


def check_bytes(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Every rank sent to every peer, in every operation, exactly the bytes that the traffic function says."""
    plan = case.plan()
    keys = outcomes[0].routing.keys()
    most = max(len(ids) for outcome in outcomes for ids in outcome.routing.values())
    routing = {
        # Ranks with fewer tokens than others choose nothing for those that they lack.
        key: np.stack(
            [np.pad(one.routing[key], ((0, most - len(one.routing[key])), (0, 0)), constant_values=-1) for one in outcomes]
        )
        for key in keys
    }
    expected: dict[tuple[int, str, int], int] = {}
    for (op, level), sent in step_traffic(plan, routing).items():
        for rank, coordinate in zip(*np.nonzero(sent), strict=True):
            label = f"{op.value}@{plan.cluster.levels[level].name}"
            peer = plan.cluster.peer(int(rank), level, int(coordinate))
            expected[int(rank), label, peer] = int(sent[rank, coordinate])
    found = {(rank, *key): number for rank, outcome in enumerate(outcomes) for key, number in outcome.sent_bytes.items()}
    assert found == expected
