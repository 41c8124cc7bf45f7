"""Ranks that exchange through each other's device memory: four processes, on one GPU where there are no four.

gloo sets the group up (NCCL refuses two ranks on one GPU); TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES lets their symmetric
memory share the device.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernel_cases import Case, make_ids, make_rows

from runtime.kernels.driver import cuda_driver
from runtime.kernels.peers import PeerDomain, SymmetricMemory
from runtime.kernels.tokens import TokenKernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 130, 1024, 4, 16
PASSES = 20


def worst_error(domain: PeerDomain, rank: int, device: torch.device) -> float:
    """Largest relative error of outputs and gradients over several passes, against the closed form: expert e multiplies
    by e + 1."""
    experts = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    rank_of, here = experts % RANKS, EXPERTS // RANKS
    place_of = torch.where(rank_of == rank, experts // RANKS, -1).int()
    worst = 0.0
    for turn in range(PASSES):
        case = Case(name="", rows=TOKENS - turn, top_k=TOP_K, experts=EXPERTS)
        ids = make_ids(case, seed=rank + 10 * turn).to(device)
        x = make_rows(case.rows, HIDDEN, torch.float32, seed=rank).to(device).requires_grad_()
        weights = make_rows(case.rows, TOP_K, torch.float32, seed=50 + rank).to(device).requires_grad_()
        rows = domain.dispatch(x, weights, ids, rank_of, place_of, here, multiple=8)
        row = torch.arange(len(rows.x), dtype=torch.int32, device=device)
        place = torch.searchsorted(rows.local.offsets[1:].contiguous(), row, right=True)
        factor = place.clamp(max=here - 1) * RANKS + rank + 1
        out = domain.combine(rows.x * factor[:, None], rows, multiple=8)
        grads = torch.autograd.grad(out.sum(), (x, weights))
        scale = (weights * (ids + 1)).sum(dim=1, keepdim=True)
        wanted = (scale * x, scale.expand_as(x), (ids + 1) * x.sum(dim=1, keepdim=True))
        for found, truth in zip((out, *grads), wanted, strict=True):
            worst = max(worst, float((found - truth).detach().norm() / truth.detach().norm()))
    return worst


def exchange(rank: int, store: str, results: str) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        sizes = {"tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": torch.float32}
        memory = SymmetricMemory(PeerDomain.bytes_needed(ranks=RANKS, **sizes), dist.group.WORLD, device)
        domain = PeerDomain(TokenKernels(cuda_driver()), memory, **sizes)
        Path(results, str(rank)).write_text(str(worst_error(domain, rank, device)))
    finally:
        dist.destroy_process_group()


def test_four_ranks_exchange_through_device_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(exchange, args=(f"{folder}/store", folder), nprocs=RANKS, join=True)
        errors = [float(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    assert max(errors) < 1e-5
