"""One rank of a peer's run: our transformer with the MoE exchange of DeepSpeed or torchtitan in place of ours.

python rank.py JOB_FILE RANK ADDRESS

Everything but the exchange is alike: attention, gate, expert computation, data, loss, optimizer and initial weights are ours, so
the losses must agree with ours and the step times differ by the exchange alone. With transport ``ours`` the peer's own
All-to-All and the gradients' all-reduce run over ``runtime.transport``, with the very bytes that the peer would send.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridep.config import build, write_text
from hybridep.launch.host import interface_of
from hybridep.recompute import Recompute
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import baseline
from runtime.data import training_batches
from runtime.dense_reduce import DenseReduce, flat_gradients
from runtime.experts import feed_forward, grouped_feed_forward
from runtime.initial_weights import Seeded, initial_expert
from runtime.mesh import Mesh, host_store, join_store, open_process_group
from runtime.moe import MoeBlock, RoutedExperts
from runtime.optimizer import HomeOptimizer
from runtime.transformer import Transformer
from runtime.transport import Transport

AllToAll = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], None]
"""(output, input, rows to each rank, rows from each rank)."""


def all_to_all_over(transport: Transport) -> AllToAll:
    """``all_to_all_single`` as direct messages of our transport."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchange(output: Tensor, given: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        outgoing, incoming = torch.split(given, list(sent)), torch.split(output, list(received))
        others = [peer for peer in range(size) if peer != rank]
        incoming[rank].copy_(outgoing[rank])
        transport.exchange(
            {peer: outgoing[peer] for peer in others}, {peer: incoming[peer] for peer in others}, "peer_all_to_all"
        )

    return exchange


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, sent: list[int], received: list[int], exchange: AllToAll) -> Tensor:
        ctx.sent, ctx.received, ctx.exchange = sent, received, exchange
        output = given.new_empty(sum(received), *given.shape[1:])
        exchange(output, given.contiguous(), sent, received)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output = gradients[0].new_empty(sum(ctx.sent), *gradients[0].shape[1:])
        ctx.exchange(output, gradients[0].contiguous(), ctx.received, ctx.sent)
        return output, None, None, None


class _Experts(nn.Module):
    """This rank's experts in torchtitan's place of ``GroupedExperts``, in the model's element type instead of bf16."""

    def __init__(self, workload: Workload, rows: nn.Parameter) -> None:
        super().__init__()
        self.rows, self._ffn = rows, workload.model.ffn

    def forward(self, x_RD: Tensor, counts_e: Tensor) -> Tensor:
        return grouped_feed_forward(x_RD, counts_e.tolist(), self.rows.unbind(0), ffn=self._ffn)


class _TorchtitanExperts(RoutedExperts):
    def __init__(self, workload: Workload, rows: nn.Parameter, exchange: AllToAll | None) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common import token_dispatcher

        set_spmd_backend("default")
        model = workload.model
        config = token_dispatcher.AllToAllTokenDispatcher.Config(num_experts=model.num_experts, top_k=model.top_k)
        self._dispatcher = config.build()
        self._dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if exchange is not None:
            size = dist.get_world_size()

            def ours(given: Tensor, received: list[int] | None, sent: list[int] | None, group: object) -> Tensor:
                if sent is None or received is None:
                    sent = received = [given.shape[0] // size] * size
                moved: Tensor = _Exchange.apply(given, sent, received, exchange)  # type: ignore[no-untyped-call]
                return moved

            token_dispatcher.all_to_all_single = ours
        self.experts, self._num_experts = _Experts(workload, rows), model.num_experts

    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self._num_experts)
        x_RD, counts_e, metadata = self._dispatcher.dispatch(x_TH, weights_TK, ids_TK, counts_E)
        y_TH: Tensor = self._dispatcher.combine(self.experts(x_RD, counts_e), metadata, x_TH)
        return y_TH


class _Expert(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.row, self._ffn = nn.Parameter(torch.empty(workload.model.expert_params)), workload.model.ffn

    def forward(self, x_GCH: Tensor) -> Tensor:
        return feed_forward(x_GCH.flatten(0, 1), self.row, ffn=self._ffn).view_as(x_GCH)


class _DeepSpeedBlock(nn.Module):
    """DeepSpeed's gate and MoE layer, dropless, in place of a whole ``MoeBlock``."""

    def __init__(self, workload: Workload, gate_weight_EH: Tensor, rows: Tensor, exchange: AllToAll | None) -> None:
        super().__init__()
        from deepspeed import comm
        from deepspeed.moe import sharded_moe
        from deepspeed.moe.experts import Experts

        model, size = workload.model, dist.get_world_size()
        local = model.num_experts // size
        gate = sharded_moe.TopKGate(model.hidden_size, model.num_experts, k=model.top_k, drop_tokens=False)
        with torch.no_grad():
            gate.wg.weight.copy_(gate_weight_EH)
        experts = Experts(_Expert(workload), local, "ep")
        with torch.no_grad():
            for expert, row in zip(experts.deepspeed_experts, rows, strict=True):
                expert.row.copy_(row)
        self.layer = sharded_moe.MOELayer(gate, experts, "ep", size, local)
        self.layer._set_ep_group(comm.get_world_group())
        if exchange is not None:

            def ours(output: Tensor, given: Tensor, group: object = None) -> None:
                even = [len(given) // size] * size
                exchange(output, given, even, even)

            sharded_moe.dist.all_to_all_single = ours

    recompute = Recompute.NOTHING

    def prepare(self) -> None:
        """As a ``MoeBlock``, and the rest."""

    def begin(self, x_BSH: Tensor, decided: list[Tensor]) -> Tensor:
        return x_BSH

    def finish(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x_BSH, None), x_BSH.new_zeros(x_BSH.shape[0])


def build_peer(
    peer: str, workload: Workload, exchange: AllToAll | None, seed: int
) -> tuple[Transformer, dict[str, nn.Parameter]]:
    """The transformer and its expert parameters, which are not reduced over ranks."""
    model, rank = workload.model, dist.get_rank()
    local = model.num_experts // dist.get_world_size()

    def rows(layer: int) -> Tensor:
        made = [initial_expert(seed, layer, rank * local + i, model.expert_params).float() for i in range(local)]
        return torch.stack(made)

    expert_parameters: dict[str, nn.Parameter] = {}

    def make(layer: int) -> RoutedExperts:
        if peer == "deepspeed":
            return _Nothing()
        expert_parameters[f"layer {layer}"] = nn.Parameter(rows(layer))
        return _TorchtitanExperts(workload, expert_parameters[f"layer {layer}"], exchange)

    transformer = Transformer(workload, make, dtype=torch.float32)
    transformer.initialise(Seeded(model, seed))
    if peer == "deepspeed":
        for index, layer in enumerate(list(transformer.layers.values())):
            block = layer.feed_forward
            assert isinstance(block, MoeBlock)
            theirs = _DeepSpeedBlock(workload, block.gate.weight.detach(), rows(index), exchange)
            layer.feed_forward = theirs
            for name, parameter in theirs.layer.experts.named_parameters():
                expert_parameters[f"layer {index} {name}"] = parameter
    return transformer, expert_parameters


class _Nothing(RoutedExperts):
    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        raise NotImplementedError


def main() -> None:
    job_file, rank_text, address = sys.argv[1:]
    job, rank = json.loads(Path(job_file).read_text()), int(rank_text)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    torch.set_num_threads(1)
    workload, cluster = build(Workload, job["workload"], "job"), build(Cluster, job["cluster"], "job")
    mesh = Mesh(plan=baseline(cluster, workload, "ep"), rank=rank)
    meeting = Path(job["folder"]) / "meeting.json"
    if rank == 0:
        store = host_store(address, timeout_s=180)
        write_text(meeting, json.dumps({"address": address, "port": store.port}))
    else:
        while not meeting.exists():
            time.sleep(0.1)
        place = json.loads(meeting.read_text())
        store = join_store(place["address"], place["port"], timeout_s=180)
    if job["transport"] == "ours":
        open_process_group(store, rank=rank, world_size=mesh.world_size, timeout_s=180)
    else:
        # As a peer would open it: its connections and threads as gloo makes them.
        dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.world_size, timeout=timedelta(seconds=180))
    if job["peer"] == "deepspeed":
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(mesh.world_size), DS_ACCELERATOR="cpu")
        from deepspeed import comm
        from deepspeed.comm import torch as backend

        # Its collectives over shared memory are for inference on one machine, and compiled at the start.
        backend.build_shm_op = lambda: None
        comm.init_distributed(dist_backend="gloo", verbose=False)
    transport = Transport(timeout_s=120)
    ours = job["transport"] == "ours"
    run = Run(name="peer", cluster=cluster.name, workload=workload.name, output=Path(job["folder"]), steps=job["steps"])
    transformer, experts = build_peer(job["peer"], workload, all_to_all_over(transport) if ours else None, run.seed)
    expert_ids = {id(parameter) for parameter in experts.values()}
    dense = {name: p for name, p in transformer.named_parameters() if id(p) not in expert_ids}
    optimizer = HomeOptimizer(run.optimizer, {**dense, **experts})
    flat, reduce = flat_gradients(list(dense.values()), mesh.dtype), DenseReduce(mesh, transport.exchange)
    training = workload.training
    batches = training_batches(run, workload)
    global_tokens = training.tokens * training.micro_batches * mesh.world_size
    for step in range(1, job["steps"] + 1):
        dist.barrier()
        started_s, loss_sum = time.perf_counter(), 0.0
        for micro_batch in range(training.micro_batches):
            first = (micro_batch * mesh.world_size + rank) * training.micro_batch_size
            loss, _ = transformer(*batches(step, first, training.micro_batch_size))
            (loss / global_tokens).backward()
            loss_sum += loss.item()
        if ours:
            reduce(flat)
        else:
            dist.all_reduce(flat)
        optimizer.step(step)
        taken = torch.tensor([time.perf_counter() - started_s])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        total = torch.tensor([loss_sum], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            with (Path(job["folder"]) / "steps.jsonl").open("a") as stream:
                stream.write(json.dumps({"step_s": taken.item(), "loss": total.item() / global_tokens}) + "\n")
    sent = [number for (_, peer), number in transport.sent_bytes.items() if cluster.location(peer)[0] != mesh.location[0]]
    wan = torch.tensor([float(sum(sent))])
    dist.all_reduce(wan)
    if rank == 0:
        write_text(
            Path(job["folder"]) / "done.json", json.dumps({"wan_bytes_per_step": wan.item() / job["steps"] if ours else None})
        )
    dist.barrier()
    # A process group of gloo may keep threads that end only with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
