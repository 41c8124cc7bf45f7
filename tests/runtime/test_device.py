"""Which device a rank computes on, and the host memory that a device's messages pass through. No GPU is needed: torch's answers
and the test for a device are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_transport import run_ranks

from hybridep.errors import UserError
from hybridep.run import Device
from runtime import staging
from runtime.device import CPU, choose_device


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")


def test_ranks_share_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (9, 0), (8, 0))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for wanted in (Device.AUTO, Device.CUDA):
        assert [choose_device(wanted, rank) for rank in range(4)] == [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    assert choose_device(Device.CPU, 3) == CPU
    # A machine's ranks need not be in a row.
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device(Device.AUTO, 12) == torch.device("cuda", 1)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    assert choose_device(Device.AUTO, 0) == CPU
    with pytest.raises(UserError, match=r"run\.device: cuda, but torch sees no CUDA device"):
        choose_device(Device.CUDA, 0)


def test_a_gpu_that_is_too_old_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (7, 5))
    assert choose_device(Device.AUTO, 0) == CPU
    with pytest.raises(UserError, match=r"GPU 0 is sm_75 and the kernels need sm_80 or newer; set it to cpu"):
        choose_device(Device.CUDA, 0)


def test_messages_of_a_device_pass_through_host_memory(tmp_path: Path) -> None:
    """What leaves and what arrives is never the tensor itself, and it arrives all the same: also in views, empty, in pieces,
    and in the background."""
    program = """
        from runtime import staging, transport as transport_module
        staging.needs_staging = lambda tensor: True
        handed = []
        class Handing:
            def __init__(self, group):
                self.group = group
            def send(self, tensors, *rest):
                handed.append(tensors[0].untyped_storage().data_ptr())
                return self.group.send(tensors, *rest)
            def recv(self, tensors, *rest):
                handed.append(tensors[0].untyped_storage().data_ptr())
                return self.group.recv(tensors, *rest)
        transport = Transport(timeout_s=20)
        transport._channels._groups = [Handing(group) for group in transport._channels._groups]
        sends = {peer: message(rank, peer, 3_000_000 * (peer == 0)) for peer in peers}
        store = torch.full((world, 3_000_000), -1, dtype=torch.int64)
        receives = {peer: store[peer][: 3_000_000 * (rank == 0)] for peer in peers}
        transport.exchange(sends, receives, "large")
        for peer in peers:
            assert torch.equal(receives[peer], message(peer, rank, 3_000_000 * (rank == 0)))
        pieces = -(-24_000_000 // transport_module._PIECE_BYTES)
        assert pieces > 1 and len(handed) == (2 * pieces if rank == 0 else pieces), len(handed)
        more = {peer: torch.zeros(7, dtype=torch.int64) for peer in peers}
        small = {peer: message(rank, peer, 7) for peer in peers}
        transport.exchange(small, more, "small")
        assert all(torch.equal(more[peer], message(peer, rank, 7)) for peer in peers)
        mine = {tensor.untyped_storage().data_ptr() for part in (sends, receives, more, small) for tensor in part.values()}
        assert handed and not mine & set(handed)
        assert sum(transport.sent_bytes.values()) == (24_000_000 if rank else 0) + 56 * len(peers)
    """
    for code, output in run_ranks(program, 3, tmp_path):
        assert code == 0, output


def test_tensors_of_the_host_are_not_copied() -> None:
    tensor = torch.arange(3)
    assert staging.outgoing(tensor).data_ptr() == tensor.data_ptr()
    assert staging.Incoming(tensor).host.data_ptr() == tensor.data_ptr()
