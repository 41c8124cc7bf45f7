"""One rank's training loop."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable

import torch

from hybridep.plan import Plan
from hybridep.run import Run, StepReport
from hybridep.traffic import Op
from runtime.build import build_rank_model
from runtime.data import Batches, read_text
from runtime.dense_reduce import all_reduce, flatten_gradients
from runtime.expert_exchange import CopyStream
from runtime.mesh import Mesh
from runtime.optimizer import HomeOptimizer
from runtime.wire import Transport


class RankTrainer:
    """Model, data and optimizer of one rank; the process group must exist."""

    def __init__(self, run: Run, mesh: Mesh, transport: Transport) -> None:
        self.run, self.mesh, self.transport = run, mesh, transport
        self._workload = mesh.plan.workload
        text = read_text(run.data)
        self._batches = Batches(text, length=self._workload.training.sequence_length, seed=run.seed)
        self.stream = CopyStream(overlap=mesh.plan.schedule.overlap)
        self.model = build_rank_model(mesh, transport, self.stream, seed=run.seed)
        self.dense = self.model.transformer.dense_parameters()
        self.optimizer = HomeOptimizer(run.optimizer, {**self.dense, **self.model.home_parameters()})

    def step(self, step: int) -> StepReport:
        """One optimizer step. Raises TransportError when a peer is gone."""
        started = time.perf_counter()
        before = Counter(self.transport.sent_bytes)
        training, exchanges = self._workload.training, [experts.exchange for experts in self.model.routed]
        num_sequences = training.micro_batch_size * training.micro_batches * self.mesh.world_size
        num_tokens = num_sequences * training.sequence_length
        weight = self._workload.model.balance_loss_weight / num_sequences
        loss_sum = balance_sum = 0.0
        for micro_batch in range(training.micro_batches):
            for exchange in exchanges:
                exchange.last_micro_batch = micro_batch == training.micro_batches - 1
            first = (micro_batch * self.mesh.world_size + self.mesh.rank) * training.micro_batch_size
            loss, balance = self.model.transformer(*self._batches(step, first, training.micro_batch_size))
            (loss / num_tokens + weight * balance).backward()
            loss_sum += loss.item()
            balance_sum += weight * balance.item()
        all_reduce(self.mesh, self.transport, flatten_gradients(list(self.dense.values())))
        for exchange in exchanges:
            exchange.finish_return()
            exchange.expire()
        self.optimizer.step(step)
        return self._report(step, loss_sum, balance_sum, time.perf_counter() - started, before)

    def _report(self, step: int, loss_sum: float, balance: float, step_s: float, before: Counter[tuple[str, int]]) -> StepReport:
        sent: Counter[str] = Counter()
        for (label, _), number in (self.transport.sent_bytes - before).items():
            sent[label] += number
        outermost = {self.mesh.label(op, 0) for op in Op}
        training = self._workload.training
        return StepReport(
            rank=self.mesh.rank,
            step=step,
            loss_sum=loss_sum,
            balance_loss=balance,
            tokens=training.tokens * training.micro_batches,
            step_s=step_s,
            sent_bytes=dict(sent),
            wan_bytes=sum(number for label, number in sent.items() if label in outermost),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def close(self) -> None:
        """End the background thread."""
        self.stream.close()


def train(run: Run, plan: Plan, *, rank: int, on_step: Callable[[StepReport], None]) -> None:
    """Train ``run`` as rank ``rank`` of ``plan`` in an existing process group; ``on_step`` gets a report after each step."""
    torch.set_num_threads(1)
    mesh = Mesh(plan=plan, rank=rank)
    trainer = RankTrainer(run, mesh, Transport(timeout_s=run.exchange_timeout))
    try:
        for step in range(1, run.steps + 1):
            on_step(trainer.step(step))
    finally:
        trainer.close()
