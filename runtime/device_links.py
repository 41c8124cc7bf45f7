"""Messages between GPUs of one site over NCCL, where every rank has a GPU of its own.

NCCL refuses two ranks on one GPU, and between sites messages leave in pieces that keep the links busy (``runtime.transport``);
both go through host memory and gloo. A communicator runs what it is given in order, and tokens, copies and gradients start from
different threads, in an order of each rank's own: so each kind of transfer has a communicator of its own at each level.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridep.traffic import Op
from runtime.mesh import Mesh

_ON_HOST = (Op.TOKEN_COUNTS,)
"""What the host needs to know travels as before."""
_POLL_S = 20e-6
_NO_GPU = bytes(16)
_WATCH_PATIENCE = 1.25
"""NCCL ends a process whose operation takes too long without a word; so it waits longer than those who name the peer."""


class DeviceLinks:
    """The communicators of one rank, by label (``Mesh.label``). All ranks make theirs together, and start the exchanges of one
    label in the same order."""

    def __init__(self, mesh: Mesh, *, backend: str, timeout_s: float) -> None:
        """``backend``: ``nccl``, or any other that carries tensors of ``mesh.device``."""
        self._timeout, self._device = timedelta(seconds=timeout_s), mesh.device
        self._asks_first = backend == "nccl"
        self._groups: dict[str, dist.ProcessGroup] = {}
        for level, size in enumerate(mesh.sizes):
            if level and size > 1:
                ranks = [mesh.peer(level, coordinate) for coordinate in range(size)]
                for op in Op:
                    if op not in _ON_HOST:
                        group = dist.new_group(
                            ranks, timeout=_WATCH_PATIENCE * self._timeout, backend=backend, use_local_synchronization=True
                        )
                        assert isinstance(group, dist.ProcessGroup)
                        self._groups[mesh.label(op, level)] = group
                        self._connect(mesh.label(op, level), [rank for rank in ranks if rank != mesh.rank])

    def _connect(self, label: str, peers: Sequence[int]) -> None:
        """Two ranks connect with their first message, which holds up both until the other one has it, too; and a communicator
        begins with what all of its ranks start. So each sends each a byte before anything else."""
        sends, receives = ({peer: torch.zeros(1, dtype=torch.uint8, device=self._device) for peer in peers} for _ in range(2))
        self.wait(self.start(sends, receives, label))

    def __contains__(self, label: str) -> bool:
        return label in self._groups

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> list[dist.Work]:
        """Queue the messages of an exchange behind what the device has to do for them. By global rank of the peer; contiguous,
        of any type; both ends know the size, and a message of no bytes is not sent."""
        group = self._groups[label]
        messages = [
            dist.P2POp(call, tensor.detach().view(-1).view(torch.uint8), peer, group)
            for call, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.nbytes
        ]
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return dist.batch_isend_irecv(messages) if messages else []

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Return when they are done. Raises RuntimeError when the timeout passes or a connection is lost."""
        deadline_s = time.perf_counter() + self._timeout.total_seconds()
        for work in works:
            # To wait with NCCL holds up the device's stream, behind which other threads' exchanges start: a rank whose tokens set
            # out before its copies would wait for one with the copies first, which would wait for it. So nothing unfinished is
            # waited for. (gloo's are not complete until somebody waits.)
            while self._asks_first and not work.is_completed():
                if time.perf_counter() > deadline_s:
                    raise RuntimeError(f"timed out after {self._timeout.total_seconds():g} s")
                time.sleep(_POLL_S)
            work.wait(self._timeout)


def device_links(mesh: Mesh, *, timeout_s: float) -> DeviceLinks | None:
    """NCCL inside sites, if every rank has a GPU of its own, which all ranks find out together; else None."""
    if all(size == 1 for size in mesh.sizes[1:]):
        return None
    # Machines may have other builds of torch: whoever lacks NCCL says so to those who have it.
    identity = _identity(mesh.device) if dist.is_nccl_available() else _NO_GPU
    mine = torch.frombuffer(bytearray(identity), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(everyone, mine)
    gpus = {bytes(each.tolist()) for each in everyone}
    if _NO_GPU in gpus or len(gpus) < mesh.world_size:
        return None
    return DeviceLinks(mesh, backend="nccl", timeout_s=timeout_s)


def _identity(device: torch.device) -> bytes:
    """16 bytes that no other GPU has."""
    if device.type != "cuda":
        return _NO_GPU
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[: len(_NO_GPU)]
