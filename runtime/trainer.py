"""One rank's training loop."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridep.checkpoint_folders import put_aside
from hybridep.config import require_writable
from hybridep.errors import DataError, UserError
from hybridep.pipeline import ACTIVATIONS, GRADIENTS, PipelinePlan, order_of_passes
from hybridep.plan import Plan
from hybridep.routing import load_routing
from hybridep.run import Run, StepReport
from hybridep.shares import batch_sequences, first_sequence, site_sequences
from hybridep.traffic import Op
from runtime.barrier import PATIENCE_S, Barrier
from runtime.between import Neighbours, between_transport, process_groups
from runtime.build import build_rank_model
from runtime.checkpoint import load_checkpoint, load_chosen, load_expert_bias, rank_state
from runtime.checkpoint_files import changed_settings
from runtime.checkpoint_saver import CheckpointSaver
from runtime.checkpoint_search import bring, last_checkpoint, shared_folder
from runtime.codec_state import codec_state, restore_codecs
from runtime.data import Batches, training_batches, validation_batches
from runtime.dense_reduce import DenseReduce
from runtime.dense_shard import SHARD, DenseShard
from runtime.device import choose_device, peak_bytes, settle
from runtime.device_links import device_links
from runtime.expert_bias import ExpertBias, count_label, sum_over_ranks
from runtime.expert_exchange import CopyStream
from runtime.initial_weights import initial_weights
from runtime.mesh import Mesh, join_timeout_s, mesh_of
from runtime.optimizer import HomeOptimizer, clip_scale
from runtime.recorder import RoutingRecorder
from runtime.seeds import seeded
from runtime.spans import BACKWARD, HEAD, OPTIMIZER, SpanRecorder, save_trace
from runtime.testing import Fault, fault_from_environment
from runtime.transport import Transport, Urgency

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TRACE_FILE = "trace.json"
ROUTING_FILE = "routing.npz"


class Forward(NamedTuple):
    """What backward needs of a micro-batch."""

    x: Tensor
    """Tokens, or what came from the stage before."""
    output: Tensor
    """The sum of the token losses, or what the stage after goes on with."""
    balance: Tensor
    """The unweighted load-balancing loss, summed."""


class RankTrainer:
    """Model, data and optimizer of one rank. Needs the process group; state changes only in ``step`` and ``restore``."""

    def __init__(self, run: Run, mesh: Mesh, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """``groups``: what joins the stages of a pipeline (``runtime.between``)."""
        self.run, self.mesh = run, mesh
        self._training, self._model_config = mesh.plan.workload.training, mesh.plan.workload.model
        cluster, workload = mesh.plan.cluster, mesh.plan.workload
        sequences = site_sequences(cluster, workload)
        self._num_sequences = sequences[mesh.location[0]]
        self._first_sequence = first_sequence(cluster, workload, mesh.rank)
        self._batches, self._held_out = training_batches(run, workload), validation_batches(run, workload)
        self._remarks: list[str] = []
        self._attempt = 0
        self.spans = SpanRecorder(mesh)
        urgency = Urgency(run.exchange_timeout)
        self.transport = Transport(
            timeout_s=run.exchange_timeout,
            on_span=self.spans.transfer,
            streams=mesh.plan.schedule.streams,
            device_links=device_links(mesh, timeout_s=run.exchange_timeout),
            names=mesh.run_ranks,
            numbers=mesh.label_numbers,
            urgency=urgency,
        )
        self._between: Transport | None = None
        self._neighbours: Neighbours | None = None
        if mesh.pipeline is not None:
            self._between = between_transport(mesh, groups, run.exchange_timeout, self.spans.transfer, urgency)
            self._neighbours = Neighbours(mesh, self._between)
        size = mesh.whole.cluster.num_gpus
        self._barrier = Barrier(rank=mesh.run_rank, world_size=size, groups=groups)
        self._files = Transport(timeout_s=PATIENCE_S, streams=mesh.plan.schedule.streams, groups=groups, urgency=urgency)
        saving = Barrier(rank=mesh.run_rank, world_size=size, groups=groups, name="checkpoint")
        self._batch_sequences = batch_sequences(cluster, workload)
        global_sequences = self._batch_sequences * self._training.micro_batches
        self._settings = run.settings(batch=global_sequences, sequence_length=self._training.sequence_length)
        self._saver = CheckpointSaver(run, mesh, saving, self._files, self._settings)
        self.stream = CopyStream(overlap=mesh.plan.schedule.overlap, prefetch=mesh.plan.schedule.prefetch)
        weights = initial_weights(run, mesh.whole.workload)
        self.model = build_rank_model(mesh, self.transport, self.stream, self.spans, weights)
        if self._model_config.has_head:
            self.model.transformer.norm.register_forward_pre_hook(lambda *_: self.spans.begin(HEAD))
        self.dense = self.model.transformer.dense_parameters()
        self.dense_reduce = DenseReduce(mesh, self.transport.exchange)
        self.shard = DenseShard(self.dense, self.dense_reduce, mesh.gradient_dtype)
        self.expert_bias = self._make_expert_bias(urgency)
        model = mesh.whole.workload.model
        self.recorder = RoutingRecorder(
            self.model.transformer.moe_blocks(),
            num_layers=model.num_moe_layers,
            num_experts=model.num_experts,
            most_tokens=max(sequences) * self._training.sequence_length,
            device=mesh.device,
        )
        self._global_tokens = global_sequences * self._training.sequence_length
        self._balance_weight = self._model_config.balance_loss_weight / global_sequences
        parameters = {SHARD: self.shard.parameter, **self.model.home_parameters()}
        self.optimizer = HomeOptimizer(run.optimizer, parameters, gradient_dtype=mesh.gradient_dtype)

    def step(self, step: int) -> StepReport:
        """One optimizer step. Raises TransportError when a peer is gone, and what went wrong beside it when a checkpoint was
        written."""
        self._saver.check()
        started_s, before = time.perf_counter(), Counter(self.transport.sent_bytes)
        before_between = Counter(self._between.sent_bytes) if self._between is not None else Counter()
        loss_sum, balance = self.gradients(step)
        for experts in self.model.routed:
            experts.exchange.finish_return()
            experts.exchange.expire()
        self.shard.reduce()
        most, norm, scale = self.run.optimizer.max_gradient_norm, None, 1.0
        if most is not None:
            norm = self._gradient_norm(step)
            scale = clip_scale(most, norm)
        self.spans.begin(OPTIMIZER)
        self.optimizer.step(step, scale)
        self.spans.end()
        self.shard.gather()
        self.expert_bias.update()
        settle(self.mesh.device)
        step_s = time.perf_counter() - started_s
        sent: Counter[str] = Counter()
        outermost, wan_bytes = {self.mesh.label(op, 0) for op in Op}, 0
        for (label, peer), number in (self.transport.sent_bytes - before).items():
            sent[label] += number
            if label in outermost and not self._in_my_site(self.mesh.run_ranks[peer]):
                wan_bytes += number
        if self._between is not None:
            for (label, peer), number in (self._between.sent_bytes - before_between).items():
                sent[label] += number
                wan_bytes += 0 if self._in_my_site(peer) else number
        model = self._model_config
        remarks, self._remarks = self._remarks, []
        return StepReport(
            rank=self.mesh.run_rank,
            step=step,
            loss_sum=loss_sum,
            balance_loss=balance,
            # Of a pipeline the last stage alone counts them: it has their losses.
            tokens=self._num_sequences * self._training.sequence_length * self._training.micro_batches * model.has_head,
            step_s=step_s,
            gradient_norm=norm,
            sent_bytes=dict(sent),
            wan_bytes=wan_bytes,
            peak_bytes=peak_bytes(self.mesh.device),
            remarks=remarks,
            checkpoint=self._saver.complete,
        )

    def _make_expert_bias(self, urgency: Urgency) -> ExpertBias:
        mesh = self.mesh
        # Not among an exchange's bytes: plans do not count them, as they do not count what agrees on a gradient's norm.
        first, levels = len(mesh.label_numbers), [level.name for level in mesh.plan.cluster.levels]
        counts = Transport(
            timeout_s=self.run.exchange_timeout,
            on_span=self.spans.transfer,
            names=mesh.run_ranks,
            numbers={count_label(level): first + number for number, level in enumerate(levels)},
            urgency=urgency,
        )
        rate = self._model_config.expert_bias_update_rate
        return ExpertBias(self.model.transformer.moe_blocks(), rate, sum_over_ranks(mesh, counts))

    def _gradient_norm(self, step: int) -> float:
        """Of all parameters of the run; all ranks call it. Raises UserError where it is not finite, before a weight changes."""
        # All workers of a stage's outermost level have the same sums of dense gradients.
        names = [name for name in self.optimizer.parameters if name != SHARD or self.mesh.location[0] == 0]
        norm = math.sqrt(self._barrier.total(self.optimizer.squared_norm(names)))
        if not math.isfinite(norm):
            self._saver.wait()  # as all ranks do
            raise UserError(
                f"the gradient of step {step} is not finite; resume from the last checkpoint with a lower optimizer.learning_rate"
            )
        return norm

    def _in_my_site(self, peer: int) -> bool:
        cluster = self.mesh.whole.cluster
        return cluster.in_one_site(*(cluster.location(rank)[0] for rank in (self.mesh.run_rank, peer)))

    def gradients(self, step: int) -> tuple[float, float]:
        """Forward and backward of all micro-batches: (sum of token losses, weighted load-balancing loss) of this rank."""
        number, mesh = self._training.micro_batches, self.mesh
        ahead = mesh.pipeline.ahead if mesh.pipeline is not None else 1
        loss_sum = balance_sum = 0.0
        if self._neighbours is not None:
            self._neighbours.begin()
        self.model.start_step()
        forwards: deque[Forward] = deque()
        for forward, micro_batch in order_of_passes(mesh.stage, mesh.num_stages, number, ahead):
            if forward:
                done = self._forward(self._batches, step, micro_batch)
                forwards.append(done)
                if self._model_config.has_head:
                    loss_sum += done.output.item()
                balance_sum += self._balance_weight * done.balance.item()
            else:
                for experts in self.model.routed:
                    experts.exchange.last_micro_batch = micro_batch == number - 1
                self._backward(forwards.popleft())
        if self._neighbours is not None:
            self._neighbours.finish()
        return loss_sum, balance_sum

    @torch.no_grad()
    def validate(self, report: StepReport) -> StepReport:
        """With the loss of the held-out batches, by the weights after the step; all ranks call it."""
        assert self.run.validation is not None and self._held_out is not None
        loss_sum, batches, number = 0.0, self.run.validation.batches, self._training.micro_batches
        for batch in range(1, batches + 1):
            if self._neighbours is not None:
                self._neighbours.begin([ACTIVATIONS])
            self.model.start_step()
            for micro_batch in range(number):
                done = self._forward(self._held_out, batch, micro_batch)
                if self._model_config.has_head:
                    loss_sum += done.output.item()
            if self._neighbours is not None:
                self._neighbours.finish()
        for experts in self.model.routed:
            experts.exchange.expire()
        return replace(report, validation_loss_sum=loss_sum, validation_tokens=report.tokens * batches)

    def _forward(self, batches: Batches, step: int, micro_batch: int) -> Forward:
        model = self._model_config
        first = micro_batch * self._batch_sequences + self._first_sequence
        x = targets = None
        if model.has_embedding or model.has_head:
            x, targets = (part.to(self.mesh.device) for part in batches(step, first, self._num_sequences))
        if not model.has_embedding:
            assert self._neighbours is not None
            x = self._neighbours.receive(ACTIVATIONS).requires_grad_()
        assert x is not None
        done = Forward(x, *self.model.transformer(x, targets))
        if not model.has_head:
            assert self._neighbours is not None
            self._neighbours.send(ACTIVATIONS, done.output.detach())
        return done

    def _backward(self, done: Forward) -> None:
        model, balance = self._model_config, self._balance_weight * done.balance
        gradient = None
        if not model.has_head:
            assert self._neighbours is not None
            gradient = self._neighbours.receive(GRADIENTS)
        self.model.start_backward()
        if gradient is None:
            self.spans.begin(HEAD + BACKWARD)
            (done.output / self._global_tokens + balance).backward()  # type: ignore[no-untyped-call]
        else:
            seeded([done.output, balance], [gradient, torch.ones_like(balance)]).backward()  # type: ignore[no-untyped-call]
        self.spans.end()
        if not model.has_embedding:
            assert self._neighbours is not None and done.x.grad is not None
            self._neighbours.send(GRADIENTS, done.x.grad)

    def save(self, step: int) -> None:
        """Write a checkpoint, beside the next steps where the run says so; all ranks call it. Raises UserError where a weight is
        not finite, or the checkpoint before could not be written."""
        # Of two there is never room.
        self._saver.wait()
        if self._barrier.most([not self.optimizer.is_finite()])[0]:
            raise UserError(
                f"the weights after step {step} are not finite, so no checkpoint holds them; resume from the last one with a "
                "lower optimizer.learning_rate, or set optimizer.max_gradient_norm"
            )
        codecs, chosen = codec_state(self.model.routed, self.dense_reduce), self.recorder.chosen_by_all(self._barrier)
        model = self.mesh.whole.workload.model
        bias = self.expert_bias.of_all_layers(self._barrier, model.num_moe_layers, model.num_experts)
        state = rank_state(self.shard, self.optimizer, codecs, chosen, bias, apart=self._saver.is_beside_steps)
        self._saver.save(step, state, self._attempt)

    def finish_before_end(self, must_end: bool) -> None:
        """A checkpoint under way is completed first where a rank must end the run; all ranks call it after each step."""
        if self._saver.has_begun and self._barrier.most([must_end])[0]:
            self._saver.wait()
            if not must_end:
                self._barrier.wait()  # for the rank that ends the run

    def finish_saving(self) -> None:
        """Until all checkpoints are complete; all ranks call it. Raises UserError where one could not be written."""
        self._saver.wait()

    def begin(self) -> None:
        """From the start: what earlier runs left of checkpoints is put aside, in every folder; all ranks call it."""
        with shared_folder(self.run.checkpoint_folder, self.mesh.run_rank, self._barrier) as folder:
            if self.mesh.run_rank == folder.leader:
                put_aside(folder.path)
        self._attempt = self._started(0)

    def _started(self, after: int) -> int:
        """Seconds since 1970, the same at all ranks: what the run writes from now on comes after what it wrote before."""
        return int(self._barrier.agree(max(time.time(), after + 1.0)))

    def require_alike(self) -> None:
        """Raises DataError where ranks do not read the same data; all ranks call it. That some compute on GPUs and others do not
        is remarked."""
        read = {"data": self._batches, "validation.data": self._held_out}
        mine = {key: batches.fingerprint() for key, batches in read.items() if batches is not None}
        everyone, problem = self._barrier.gather_json([mine, self.mesh.device.type]), ""
        if everyone is not None:
            sites = self.mesh.whole.cluster.rank_datacenters
            first, (_, own) = f"rank 0 in {sites[0]}", everyone[0]
            for rank, (theirs, device) in reversed(list(enumerate(everyone))):
                for key in mine:
                    if theirs[key] != mine[key]:
                        problem = (
                            f"{key}.path: rank {rank} in {sites[rank]} does not read what {first} does "
                            f"({theirs[key][0]} and {mine[key][0]} tokens); it must be the same on all machines"
                        )
                if device != own:
                    self._remarks = [f"rank {rank} in {sites[rank]} computes on {device}, {first} on {own} (run.device)"]
        if problem := self._barrier.share_json(problem):
            raise DataError(problem)

    def restore(self, *, or_begin: bool = False) -> int:
        """Continue from the last checkpoint that is whole, wherever its files are; returns the number of its steps; all ranks
        call it. Where there is none, ``or_begin`` with the weights as they are, else it raises UserError."""
        mesh, barrier = self.mesh, self._barrier
        with shared_folder(self.run.checkpoint_folder, mesh.run_rank, barrier) as folder:
            found = last_checkpoint(folder, mesh.run_rank, barrier, plan=mesh.whole.digest, required=not or_begin)
            if found is None:
                self._attempt = self._started(0)
                return 0
            brought = bring(found, folder, mesh=mesh, shard=self.shard, barrier=barrier, transport=self._files)
        path, self._attempt = found.path, self._started(found.manifest["attempt"])
        self._remarks += found.remarks + brought + changed_settings(path, found.manifest, self._settings)
        if self.run.trace_step is not None and self.run.trace_step <= found.manifest["step"]:
            self._remarks.append(f"no timeline, since trace_step {self.run.trace_step} was made before")
        step = load_checkpoint(path, mesh=mesh, shard=self.shard, optimizer=self.optimizer)
        # Ranks read at different speeds, and exchanges wait for seconds only.
        barrier.wait()
        self.shard.gather()
        self.expert_bias.restore(load_expert_bias(path, mesh.whole.workload.model))
        restore_codecs(path, self.mesh, self.model.routed, self.dense_reduce)
        if self.mesh.run_rank == 0:
            self.recorder.go_on_from(load_chosen(path))
        barrier.wait()
        return step

    def save_trace(self) -> None:
        """Write what was recorded of ``run.trace_step`` as one trace of all ranks; all ranks call it."""
        dumped = self._barrier.gather_bytes(self.spans.dump())
        if dumped is not None:
            save_trace(dumped, self.run.output / TRACE_FILE)

    def save_routing(self, *, resumed: bool) -> None:
        """Write what the gates chose in all steps made; all ranks call it. A resumed run that was to record no step in full keeps
        what the file has of them."""
        record, path = self.recorder.collect(self._barrier), self.run.output / ROUTING_FILE
        if record is None:
            return
        if resumed and path.exists() and not record.choices:
            with suppress(UserError):  # those made under another plan may not go with this one
                before = load_routing(path)
                before.require(self.mesh.whole, path)
                record = replace(record, choices=before.choices)
        record.save(path)

    def close(self) -> None:
        """End the background threads."""
        if self._neighbours is not None:
            self._neighbours.close()
        self.transport.close()
        self._saver.close()
        self.stream.close()
        self.model.close()


def train(
    run: Run,
    plan: Plan | PipelinePlan,
    *,
    rank: int,
    store: Store,
    on_step: Callable[[StepReport], None],
    resume: bool = False,
    or_begin: bool = False,
) -> None:
    """Train ``run`` as rank ``rank`` of ``plan``'s cluster; returns when all its steps are made and saved. ``resume`` goes on
    from the last checkpoint, ``or_begin`` from the start where there is none.

    ``store`` is the rendezvous (``mesh.host_store`` at rank 0, ``mesh.join_store`` elsewhere); ``on_step`` gets a report
    after each step. The process group is opened and closed here. Raises UserError for input that cannot be trained
    and TransportError when a peer is gone.
    """
    # Now rather than after the steps up to the first checkpoint.
    require_writable("checkpoints.folder", run.checkpoint_folder)
    # One thread per rank: ranks on one machine share its cores, and results do not depend on how many there are.
    torch.set_num_threads(1)
    if resume and not or_begin:
        # A checkpoint's take their place at once.
        run = run.model_copy(update={"weights": None})
    mesh = mesh_of(plan, rank, choose_device(run.device, rank))
    fault = fault_from_environment()
    with process_groups(mesh, store, join_timeout_s(plan.cluster)) as groups:
        trainer = RankTrainer(run, mesh, groups)
        try:
            trainer.require_alike()
            if not resume:
                trainer.begin()
            _steps(trainer, trainer.restore(or_begin=or_begin) if resume else 0, fault, on_step)
        finally:
            trainer.close()


def _steps(trainer: RankTrainer, done: int, fault: Fault | None, on_step: Callable[[StepReport], None]) -> None:
    run = trainer.run
    every = run.checkpoints.every_steps
    for step in range(done + 1, run.steps + 1):
        if fault is not None:
            fault.strike(trainer.mesh.run_rank, step)
        trainer.spans.active = step == run.trace_step
        # Micro-batches of stages have other ranks in each: their choices would not fit together.
        is_whole = trainer.mesh.pipeline is None
        trainer.recorder.whole = is_whole and run.trace_step is not None and 0 <= step - run.trace_step < run.choice_steps
        report = trainer.step(step)
        trainer.spans.active = trainer.recorder.whole = False
        if run.validation is not None and (step == run.steps or step % run.validation.every_steps == 0):
            report = trainer.validate(report)
        on_step(report)
        is_finite = math.isfinite(report.loss_sum + report.balance_loss)
        trainer.finish_before_end(not is_finite)
        if not is_finite:
            raise UserError(
                f"the loss of step {step} is not finite (rank {report.rank}: {report.loss_sum:g}, for balance "
                f"{report.balance_loss:g}); resume from the last checkpoint with a lower optimizer.learning_rate"
            )
        if step == run.steps or (every and step % every == 0):
            trainer.save(step)
    if run.trace_step is not None and done < run.trace_step <= run.steps:
        trainer.save_trace()
    if done < run.steps:
        trainer.save_routing(resumed=done > 0)
    trainer.finish_saving()
