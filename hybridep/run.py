"""A training run: what ``hybridep train RUN`` reads, and what each rank reports after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import cos, pi
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from hybridep.config import Duration, Strict

_LONGEST_EXCHANGE_S = 86400.0
"""A day: what waits for several of them must still be a time that gloo can count."""


_LARGEST, _LEAST_EPSILON = 1e9, 1e-30
"""Of the optimizer's numbers, which it computes with in fp32: products and quotients of these are finite there."""


LOCAL_RANK = "LOCAL_RANK"
"""Environment variable that numbers a machine's ranks, as torchrun has it."""


class Device(Enum):
    """Where ranks compute."""

    AUTO = "auto"
    """On GPUs that the CUDA kernels run on, where torch sees some; else on CPU."""
    CPU = "cpu"
    CUDA = "cuda"


class Data(Strict):
    """What is trained on."""

    path: Path | None = None
    """Token ids, as ``numpy.save`` writes an array of integers (a name that ends in .npy; it stays on disk, so it may be larger
    than memory); or a text file or a folder of them, read as bytes (vocabulary of 256). On every machine that has ranks. The
    Python standard library's own sources when absent."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md")
    """Texts of a folder that are read."""


class Validation(Strict):
    """Held-out data, whose loss is computed now and then."""

    data: Data
    """As those that are trained on."""
    every_steps: int = Field(ge=1)
    batches: int = Field(default=1, ge=1)
    """Batches of a step's size, the same sequences each time."""


class Optimizer(Strict):
    """AdamW (Loshchilov and Hutter), run at each parameter's home."""

    learning_rate: float = Field(default=1e-3, gt=0, le=_LARGEST)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, ge=_LEAST_EPSILON, le=_LARGEST)
    weight_decay: float = Field(default=0.1, ge=0, le=_LARGEST)
    max_gradient_norm: float | None = Field(default=None, gt=0)
    """Where the gradient of all parameters together is longer it is scaled down to this length; absent: never. Ranks then wait
    for each other once more in a step: one round trip."""
    warmup_steps: int = Field(default=0, ge=0)
    """The rate rises in even steps to ``learning_rate``."""
    decay_steps: int = Field(default=0, ge=0)
    """Step at which the rate has fallen, along half a cosine from the end of the warm-up, to ``final_learning_rate``; it stays
    there. 0: it does not fall."""
    final_learning_rate: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _decays_after_warming_up(self) -> Optimizer:
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} must come after warmup_steps {self.warmup_steps}; 0 turns the decay off"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g} must not exceed learning_rate {self.learning_rate:g}"
            )
        return self

    def rate_at(self, step: int) -> float:
        """Learning rate of a step; steps count from 1."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if not self.decay_steps:
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * (1 + cos(pi * done)) / 2


class Checkpoints(Strict):
    """Where and how often state is saved; ``--resume`` continues from the last complete one."""

    folder: Path | None = None
    """Inside the run's output folder when absent."""
    every_steps: int = Field(default=0, ge=0)
    """0: only at the end."""
    keep: int | None = Field(default=None, ge=1)
    """So many of the last ones stay; all when absent."""
    copies: int = Field(default=0, ge=0)
    """So many other sites keep a copy of what a site writes, where sites share no file system: that many may be lost for good."""
    async_save: bool = False
    """Checkpoints are written, and copied to other sites, while the next steps are made, from a copy in the machine's memory."""


class Run(Strict):
    """One training run."""

    name: str
    cluster: str
    """Name of a cluster config, or path of a cluster file or CSV matrix."""
    workload: str
    """Name of a model config, or path of a workload file."""
    plan: str = "auto"
    """``auto`` (the planner's choice), ``stages`` (its choice of a pipeline), ``ep``, ``full_gather``, or a plan file's path."""
    overrides: tuple[str, ...] = ()
    """``cluster.key=value`` and ``workload.key=value``, applied before planning."""
    output: Path
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    device: Device = Device.AUTO
    weights: Path | None = None
    """Folder of a public model to begin with (``config.json`` and safetensors files, as Hugging Face keeps them), on every
    machine that has ranks; random ones from the seed when absent."""
    data: Data = Data()
    validation: Validation | None = None
    optimizer: Optimizer = Optimizer()
    checkpoints: Checkpoints = Checkpoints()
    exchange_timeout: Duration = Field(default=20.0, gt=0, le=_LONGEST_EXCHANGE_S)
    """A transfer that takes longer means that a link or a peer is gone; between stages, four times as long for each stage."""
    trace_step: int | None = Field(default=None, ge=1)
    """Step whose timeline, and whose every choice of an expert, all ranks record; the popularity of experts over all steps is
    recorded in any case."""
    choice_steps: int = Field(default=1, ge=1)
    """Steps, from ``trace_step`` on, of which every choice is recorded. The more, the better is known what a step takes where
    experts are popular by turns."""

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.checkpoints.folder or self.output / "checkpoints"

    def settings(self, *, batch: int, sequence_length: int) -> dict[str, Any]:
        """What decides, with the model, which weights each step ends with, in the words of files. ``batch``: sequences of all
        sites in a step, however they are shared out."""
        kept = self.model_dump(mode="json", include={"seed", "data", "optimizer"})
        parts = {f"{part}.{key}": value for part in ("data", "optimizer") for key, value in kept[part].items()}
        return {
            "seed": self.seed,
            "training.sequence_length": sequence_length,
            "sequences of all sites in a step": batch,
            **parts,
        }


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank tells the launcher after an optimizer step."""

    rank: int
    step: int
    """Counted from 1."""
    loss_sum: float
    """Sum of this rank's token losses (cross entropy) over the step; the run's loss is the sum over ranks / tokens."""
    balance_loss: float
    """This rank's share of the load-balancing loss, already weighted; the shares of all ranks add up."""
    tokens: int
    step_s: float
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """``operation@level`` -> payload bytes that this rank sent, for example ``token_dispatch@dc``."""
    wan_bytes: int = 0
    """Bytes of it to other sites."""
    peak_bytes: int = 0
    """Largest memory so far: resident, or of tensors on a GPU."""
    gradient_norm: float | None = None
    """Of all ranks together, before it was scaled down; None without ``max_gradient_norm``."""
    validation_loss_sum: float | None = None
    """Sum of this rank's token losses over the held-out batches, with the weights after the step; None where none was due."""
    validation_tokens: int = 0
    checkpoint: int | None = None
    """Steps of the last checkpoint that was complete by then, of those written since the run was last started."""
    remarks: list[str] = field(default_factory=list)
    """Before the first step of a resumed run: what this rank found wrong with checkpoints, and what was brought of one."""
