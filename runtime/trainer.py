"""One rank's training loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hybridep.plan import Plan
from hybridep.run import Run, StepReport
from hybridep.shares import first_sequence, site_sequences
from hybridep.traffic import Op
from runtime.barrier import Barrier
from runtime.build import build_rank_model
from runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.codec_state import codec_state, restore_codecs
from runtime.data import Batches, read_text
from runtime.dense_reduce import DenseReduce, flat_gradients
from runtime.device import choose_device, peak_bytes, settle
from runtime.device_links import device_links
from runtime.expert_exchange import CopyStream
from runtime.mesh import JOIN_TIMEOUT_S, Mesh, close_process_group, open_process_group
from runtime.optimizer import HomeOptimizer
from runtime.recorder import RoutingRecorder
from runtime.spans import BACKWARD, HEAD, OPTIMIZER, SpanRecorder, merge
from runtime.testing import Fault, fault_from_environment
from runtime.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TRACE_FILE = "trace.json"
ROUTING_FILE = "routing.npz"
_BARRIER_TIMEOUT_S = 600.0
"""Ranks write checkpoints at different speeds; a rank that dies meanwhile is noticed at once all the same."""


class RankTrainer:
    """Model, data and optimizer of one rank. Needs the process group; state changes only in ``step`` and ``restore``."""

    def __init__(self, run: Run, mesh: Mesh) -> None:
        self.run, self.mesh = run, mesh
        self._training, self._model_config = mesh.plan.workload.training, mesh.plan.workload.model
        cluster, workload = mesh.plan.cluster, mesh.plan.workload
        sequences = site_sequences(cluster, workload)
        self._num_sequences = sequences[mesh.location[0]]
        self._first_sequence = first_sequence(cluster, workload, mesh.rank)
        text = read_text(run.data)
        self._batches = Batches(text, length=self._training.sequence_length, seed=run.seed)
        self.spans = SpanRecorder(mesh)
        self.transport = Transport(
            timeout_s=run.exchange_timeout,
            on_span=self.spans.transfer,
            streams=mesh.plan.schedule.streams,
            device_links=device_links(mesh, timeout_s=run.exchange_timeout),
        )
        self._barrier = Barrier(rank=mesh.rank, world_size=mesh.world_size, timeout_s=_BARRIER_TIMEOUT_S)
        self.stream = CopyStream(overlap=mesh.plan.schedule.overlap, prefetch=mesh.plan.schedule.prefetch)
        self.model = build_rank_model(mesh, self.transport, self.stream, self.spans, seed=run.seed)
        self.model.transformer.norm.register_forward_pre_hook(lambda *_: self.spans.begin(HEAD))
        self.dense = self.model.transformer.dense_parameters()
        self._dense_gradient = flat_gradients(list(self.dense.values()))
        self.dense_reduce = DenseReduce(mesh, self.transport.exchange)
        model = self._model_config
        self.recorder = RoutingRecorder(
            self.model.transformer.moe_blocks(),
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            most_tokens=max(sequences) * self._training.sequence_length,
            device=mesh.device,
        )
        self.optimizer = HomeOptimizer(run.optimizer, {**self.dense, **self.model.home_parameters()})

    def step(self, step: int) -> StepReport:
        """One optimizer step. Raises TransportError when a peer is gone."""
        started_s, before = time.perf_counter(), Counter(self.transport.sent_bytes)
        loss_sum, balance = self._gradients(step)
        for experts in self.model.routed:
            experts.exchange.finish_return()
            experts.exchange.expire()
        self.dense_reduce(self._dense_gradient)
        self.spans.begin(OPTIMIZER)
        self.optimizer.step(step)
        self.spans.end()
        settle(self.mesh.device)
        step_s = time.perf_counter() - started_s
        sent: Counter[str] = Counter()
        outermost, wan_bytes = {self.mesh.label(op, 0) for op in Op}, 0
        for (label, peer), number in (self.transport.sent_bytes - before).items():
            sent[label] += number
            if label in outermost and not self._in_my_site(peer):
                wan_bytes += number
        return StepReport(
            rank=self.mesh.rank,
            step=step,
            loss_sum=loss_sum,
            balance_loss=balance,
            tokens=self._num_sequences * self._training.sequence_length * self._training.micro_batches,
            step_s=step_s,
            sent_bytes=dict(sent),
            wan_bytes=wan_bytes,
            peak_bytes=peak_bytes(self.mesh.device),
        )

    def _in_my_site(self, peer: int) -> bool:
        cluster = self.mesh.plan.cluster
        return cluster.in_one_site(self.mesh.location[0], cluster.location(peer)[0])

    def _gradients(self, step: int) -> tuple[float, float]:
        """Forward and backward of all micro-batches: (sum of token losses, weighted load-balancing loss) of this rank."""
        num_micro_batches = self._training.micro_batches
        of_micro_batch = self._training.micro_batch_size * self.mesh.world_size
        global_sequences = of_micro_batch * num_micro_batches
        global_tokens = global_sequences * self._training.sequence_length
        weight = self._model_config.balance_loss_weight / global_sequences
        loss_sum = balance_sum = 0.0
        for micro_batch in range(num_micro_batches):
            for experts in self.model.routed:
                experts.exchange.last_micro_batch = micro_batch == num_micro_batches - 1
            first = micro_batch * of_micro_batch + self._first_sequence
            tokens, targets = (part.to(self.mesh.device) for part in self._batches(step, first, self._num_sequences))
            loss, balance = self.model.transformer(tokens, targets)
            self.model.start_backward()
            self.spans.begin(HEAD + BACKWARD)
            (loss / global_tokens + weight * balance).backward()
            self.spans.end()
            loss_sum += loss.item()
            balance_sum += weight * balance.item()
        return loss_sum, balance_sum

    def save(self, step: int) -> None:
        """Write a checkpoint; all ranks call it."""
        folder = self.run.checkpoint_folder
        save_checkpoint(
            folder,
            step,
            mesh=self.mesh,
            dense=list(self.dense),
            optimizer=self.optimizer,
            codecs=codec_state(self.model.routed, self.dense_reduce),
            barrier=self._barrier.wait,
        )

    def restore(self) -> int:
        """Continue from the last complete checkpoint; returns the number of steps it has."""
        path = latest_checkpoint(self.run.checkpoint_folder)
        step = load_checkpoint(path, mesh=self.mesh, dense=list(self.dense), optimizer=self.optimizer)
        restore_codecs(path, self.mesh, self.model.routed, self.dense_reduce)
        return step

    def save_trace(self) -> None:
        """Write what was recorded of ``run.trace_step`` as one trace of all ranks; all ranks call it."""
        self.spans.save(self.run.output)
        self._barrier.wait()
        if self.mesh.rank == 0:
            merge(self.run.output, self.mesh.world_size, self.run.output / TRACE_FILE)

    def save_routing(self) -> None:
        """Write what the gates chose in all steps made; all ranks call it."""
        record = self.recorder.collect(self._barrier)
        if record is not None:
            record.save(self.run.output / ROUTING_FILE)

    def close(self) -> None:
        """End the background threads."""
        self.transport.close()
        self.stream.close()
        self.model.close()


def train(run: Run, plan: Plan, *, rank: int, store: Store, on_step: Callable[[StepReport], None], resume: bool = False) -> None:
    """Train ``run`` as global rank ``rank`` of ``plan``; returns when all its steps are made and saved.

    ``store`` is the rendezvous (``mesh.host_store`` at rank 0, ``mesh.join_store`` elsewhere); ``on_step`` gets a report
    after each step. The process group is opened and closed here. Raises UserError for input that cannot be trained
    and TransportError when a peer is gone.
    """
    # One thread per rank: ranks on one machine share its cores, and results do not depend on how many there are.
    torch.set_num_threads(1)
    mesh = Mesh(plan=plan, rank=rank, device=choose_device(run.device, rank))
    fault = fault_from_environment()
    open_process_group(store, rank=rank, world_size=mesh.world_size, timeout_s=JOIN_TIMEOUT_S)
    try:
        trainer = RankTrainer(run, mesh)
        try:
            _steps(trainer, trainer.restore() if resume else 0, fault, on_step)
        finally:
            trainer.close()
    finally:
        close_process_group()


def _steps(trainer: RankTrainer, done: int, fault: Fault | None, on_step: Callable[[StepReport], None]) -> None:
    run = trainer.run
    every = run.checkpoints.every_steps
    for step in range(done + 1, run.steps + 1):
        if fault is not None:
            fault.strike(trainer.mesh.rank, step)
        trainer.spans.active = step == run.trace_step
        trainer.recorder.whole = run.trace_step is not None and 0 <= step - run.trace_step < run.choice_steps
        on_step(trainer.step(step))
        trainer.spans.active = trainer.recorder.whole = False
        if step == run.steps or (every and step % every == 0):
            trainer.save(step)
    if run.trace_step is not None and done < run.trace_step <= run.steps:
        trainer.save_trace()
    trainer.save_routing()
