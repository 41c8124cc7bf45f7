"""The exchange between ranks that see each other's memory, forward and backward: a thread per rank, the kernels emulated,
the ranks' buffers ordinary memory of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from kernel_cases import Case, make_ids, make_rows
from kernel_emulator import EmulatingDriver
from torch import Tensor

from runtime.kernels.driver import Launch
from runtime.kernels.errors import KernelInputError
from runtime.kernels.peers import PeerDomain
from runtime.kernels.reference import Route
from runtime.kernels.tokens import TokenKernels

RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 9, 24, 3, 8
DTYPE = torch.float64


@dataclass
class OneAtATime:
    """The emulator has one set of threads: launches of different ranks take turns."""

    inner: EmulatingDriver
    lock: threading.Lock = field(default_factory=threading.Lock)

    def launch(self, launch: Launch, device: torch.device) -> None:
        with self.lock:
            self.inner.launch(launch, device)


@dataclass
class ThreadMemory:
    """A rank's view of buffers that all threads share."""

    rank: int
    buffers: list[Tensor]
    meeting: threading.Barrier

    @property
    def local(self) -> Tensor:
        return self.buffers[self.rank]

    @property
    def addresses(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self.buffers]

    def barrier(self) -> None:
        self.meeting.wait(timeout=60)


def on_all_ranks(compiled_kernels: Path, work: Callable[[PeerDomain, int], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    kernels = TokenKernels(OneAtATime(EmulatingDriver(folder=compiled_kernels, order=3)))
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": DTYPE}
    needed = PeerDomain.bytes_needed(ranks=RANKS, **sizes)
    # Whatever was in the memory before must not matter: -1 is a NaN in every float type.
    buffers = [torch.full((needed // 8,), -1, dtype=torch.int64).view(torch.uint8) for _ in range(RANKS)]
    meeting = threading.Barrier(RANKS)

    def run(rank: int) -> tuple[Tensor, ...]:
        try:
            return work(PeerDomain(kernels, ThreadMemory(rank, buffers, meeting), **sizes), rank)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def expert(e: int, x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x * scale[e]) + e


@pytest.mark.turns(2)
@pytest.mark.parametrize("multiple", [1, 8])
def test_forward_and_backward_equal_a_single_process(multiple: int, compiled_kernels: Path) -> None:
    """Two passes over one domain, so that the second meets what the first left behind."""
    tokens = [TOKENS, 0, 4, TOKENS]
    ids = [make_ids(Case(name="", rows=n, top_k=TOP_K, experts=EXPERTS), seed=rank) for rank, n in enumerate(tokens)]
    x = [make_rows(n, HIDDEN, DTYPE, seed=20 + rank) for rank, n in enumerate(tokens)]
    weights = [make_rows(n, TOP_K, DTYPE, seed=30 + rank) for rank, n in enumerate(tokens)]
    scale = make_rows(EXPERTS, 1, DTYPE, seed=40)
    rank_of = torch.tensor([0, 0, 3, 1, 1, -1, 2, 3], dtype=torch.int32)  # expert 5 is served in another domain

    def work(domain: PeerDomain, rank: int) -> tuple[Tensor, ...]:
        mine = [e for e in range(EXPERTS) if rank_of[e] == rank]
        place_of = torch.full((EXPERTS,), -1, dtype=torch.int32)
        place_of[mine] = torch.arange(len(mine), dtype=torch.int32)
        inputs = [tensor.clone().requires_grad_() for tensor in (x[rank], weights[rank], scale)]
        for _ in range(2):
            rows = domain.dispatch(inputs[0], inputs[1], ids[rank], rank_of, place_of, len(mine), multiple=multiple)
            assert rows.local.status[0] == 0
            bounds = rows.local.offsets.tolist()
            parts = [expert(e, rows.x[begin:end], inputs[2]) for e, begin, end in zip(mine, bounds[:-1], bounds[1:], strict=True)]
            y = torch.cat([*parts, rows.x.new_full((len(rows.x) - bounds[-1], HIDDEN), float("nan"))])
            out = domain.combine(y, rows, multiple=multiple)
            grads = torch.autograd.grad(out.square().sum(), inputs)
        return out.detach(), *grads

    found = on_all_ranks(compiled_kernels, work)
    scale_gradient = torch.zeros_like(scale)
    for rank, n in enumerate(tokens):
        inputs = [tensor.clone().requires_grad_() for tensor in (x[rank], weights[rank], scale)]
        sums = [
            sum(inputs[1][i, k] * expert(e, inputs[0][i], inputs[2]) for k, e in enumerate(ids[rank][i].tolist()) if e != 5)
            for i in range(n)
        ]
        wanted = torch.stack(sums) if sums else torch.zeros(0, HIDDEN, dtype=DTYPE) * inputs[2].sum()
        torch.testing.assert_close(found[rank][0], wanted.detach())
        grads = torch.autograd.grad(wanted.square().sum(), inputs, allow_unused=True, materialize_grads=True)
        for a, b in zip(found[rank][1:3], grads[:2], strict=True):
            torch.testing.assert_close(a, b)
        scale_gradient += grads[2]
    torch.testing.assert_close(sum(result[3] for result in found), scale_gradient)


def test_domain_checks_its_sizes() -> None:
    kernels, meeting = TokenKernels(EmulatingDriver(folder=Path("/nowhere"))), threading.Barrier(1)
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": DTYPE}
    needed = PeerDomain.bytes_needed(ranks=1, **sizes)
    with pytest.raises(KernelInputError, match=f"has {needed - 1} bytes, must have {needed}"):
        PeerDomain(kernels, ThreadMemory(0, [torch.empty(needed - 1, dtype=torch.uint8)], meeting), **sizes)
    domain = PeerDomain(kernels, ThreadMemory(0, [torch.empty(needed, dtype=torch.uint8)], meeting), **sizes)
    one = torch.zeros(1, dtype=torch.int32)
    ids = torch.zeros(TOKENS + 1, TOP_K, dtype=torch.int32)
    x = torch.zeros(TOKENS + 1, HIDDEN, dtype=DTYPE)
    with pytest.raises(KernelInputError, match="has 10 rows, the domain was made for 9"):
        domain.dispatch(x, x[:, :TOP_K].contiguous(), ids, one, one, 1)
    # What has no room in the peers' memory, where nothing else would notice.
    away = Route(ids, one, one, one)
    for wrong in (x.float(), x[:, 1:].contiguous()):
        with pytest.raises(KernelInputError, match="PeerDomain: x: "):
            domain.push(wrong, away)
    weights = x[:, :TOP_K].contiguous()
    for name, bad in (("weights", (weights.float(), ids)), ("ids", (weights, ids[:, 1:].contiguous()))):
        with pytest.raises(KernelInputError, match=f"PeerDomain: {name}: "):
            domain.push_routing(*bad, one, away)
