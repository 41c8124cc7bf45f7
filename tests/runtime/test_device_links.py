"""Messages inside sites that go from GPU to GPU: rehearsed on CPU with gloo in the place of NCCL.
All messages have one tag here, so that they match by order only, as NCCL's do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailed, RankPool
from training_cases import Case, Outcome, check_bytes, check_fidelity, train_case

from hybridep.plan import Residency
from hybridep.traffic import Op
from runtime import device_links as module
from runtime.device_links import DeviceLinks, device_links
from runtime.mesh import Mesh
from runtime.transport import Transport

pytestmark = pytest.mark.timeout(120)

CASES = [
    Case(sizes=(2, 2), domains=(1, 1), micro_batches=2),
    Case(sizes=(2, 2), domains=(1, 2), prefetch=1),
    Case(sizes=(2, 2), domains=(2, 2), residency=Residency.MICROBATCH, micro_batches=2),
    Case(sizes=(1, 2, 2), domains=(1, 2, 1), random_serving=1),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@dataclass(frozen=True)
class Routes:
    """What one rank trained, and which labels went where."""

    outcome: Outcome
    on_device: set[str]
    through_host: set[str]


def train_with_links(rank: int, case: Case) -> Routes:
    on_device: set[str] = set()
    through_host: set[str] = set()

    def prepare(trainer: Any) -> None:
        links = DeviceLinks(trainer.mesh, backend="gloo", timeout_s=20)
        transport = trainer.transport
        transport._device_links = links
        start, of = links.start, transport._channels.of

        def recorded_start(sends: Any, receives: Any, label: str) -> Any:
            on_device.add(label)
            return start(sends, receives, label)

        def recorded_of(label: str) -> Any:
            through_host.add(label)
            return of(label)

        links.start, transport._channels.of = recorded_start, recorded_of  # type: ignore[method-assign]

    return Routes(train_case(rank, case, prepare), on_device, through_host)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_the_same(pool: RankPool, case: Case) -> None:
    """As one process trains, with the bytes of the traffic function; only counts, and what leaves a site, pass the host."""
    routes = pool.run(train_with_links, case)
    outcomes = [each.outcome for each in routes]
    check_fidelity(case, outcomes)
    check_bytes(case, outcomes)
    outermost = case.plan().cluster.levels[0].name
    for each in routes:
        assert any(label.startswith(Op.DENSE_ALL_GATHER.value) for label in each.on_device)
        assert not any(label.endswith("@" + outermost) for label in each.on_device)
        inside = {label for label in each.through_host if not label.endswith("@" + outermost)}
        assert all(label.startswith(Op.TOKEN_COUNTS.value) for label in inside)


def wait_for_nobody(rank: int, case: Case) -> float:
    mesh = Mesh(plan=case.plan(), rank=rank)
    transport = Transport(timeout_s=20, device_links=DeviceLinks(mesh, backend="gloo", timeout_s=1.0))
    if rank == 0:
        transport.exchange({}, {1: torch.zeros(4)}, mesh.label(Op.TOKEN_COMBINE, 1))
    return 0.0


def test_a_peer_that_does_not_come_is_named() -> None:
    with RankPool(4) as pool, pytest.raises(RankFailed, match=r"rank 1\b.*\n*.*could not exchange with it in 'token_combine@"):
        pool.run(wait_for_nobody, CASES[0])


@dataclass
class Unfinished:
    """An operation of NCCL's, as ``work``: waiting for it holds up all that the device is given afterwards."""

    looks: int
    """After how many it is complete."""
    waited: bool = False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta) -> bool:
        assert self.looks < 0, "the device waits for what is not complete"
        self.waited = True
        return True


def test_the_device_waits_for_nothing_unfinished() -> None:
    links = DeviceLinks(Mesh(plan=Case(sizes=(4, 1), domains=(1, 1)).plan(), rank=0), backend="nccl", timeout_s=0.2)
    works = [Unfinished(3), Unfinished(0)]
    links.wait(works)  # type: ignore[arg-type]
    assert all(work.waited for work in works)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 s"):
        links.wait([Unfinished(10**9)])  # type: ignore[list-item]


def start_beside(rank: int, case: Case) -> bool:
    """Whether another exchange of the rank's can end while one is held up as it starts."""
    mesh = Mesh(plan=case.plan(), rank=rank)
    links = DeviceLinks(mesh, backend="gloo", timeout_s=20)
    transport, ended, start = Transport(timeout_s=20, device_links=links), threading.Event(), links.start
    beside: list[bool] = []

    def held_up(sends: Any, receives: Any, label: str) -> Any:
        beside.append(ended.wait(10))
        return start(sends, receives, label)

    links.start = held_up  # type: ignore[method-assign]
    peer = mesh.peer(1, 1 - mesh.location[1])
    label = mesh.label(Op.TOKEN_COMBINE, 1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(transport.exchange, {peer: torch.ones(4)}, {peer: torch.zeros(4)}, label)
        transport.exchange({peer: torch.ones(4)}, {peer: torch.zeros(4)}, mesh.label(Op.TOKEN_COUNTS, 1))
        ended.set()
        first.result()
    return beside == [True]


def test_an_exchange_that_is_held_up_holds_up_no_other(pool: RankPool) -> None:
    assert all(pool.run(start_beside, CASES[0]))


def uses_nccl(rank: int, case: Case, gpus: list[str], available: Sequence[bool]) -> list[str]:
    """The backends that ``device_links`` makes groups with, when rank r has ``gpus[r]`` and its torch NCCL or not."""
    made = []

    def recorded(mesh: Mesh, *, backend: str, timeout_s: float) -> None:
        made.append(backend)

    kept = module.DeviceLinks, module._identity, dist.is_nccl_available
    module.DeviceLinks, module._identity = recorded, lambda device: gpus[rank].encode().ljust(16, b"\0")  # type: ignore[assignment,misc]
    dist.is_nccl_available = lambda: available[rank]
    try:
        device_links(Mesh(plan=case.plan(), rank=rank), timeout_s=20)
    finally:
        module.DeviceLinks, module._identity, dist.is_nccl_available = kept  # type: ignore[misc]
    return made


@pytest.mark.parametrize(
    ("sizes", "gpus", "available", "expected"),
    [
        ((2, 2), ["a", "b", "c", "d"], [True] * 4, ["nccl"]),
        ((2, 2), ["a", "b", "a", "d"], [True] * 4, []),
        ((2, 2), ["a", "b", "", "d"], [True] * 4, []),
        ((2, 2), ["a", "b", "c", "d"], [False] * 4, []),
        ((2, 2), ["a", "b", "c", "d"], [True, True, True, False], []),
        ((4, 1), ["a", "b", "c", "d"], [True] * 4, []),
    ],
    ids=["a GPU each", "shared", "one on CPU", "no NCCL", "one without NCCL", "one GPU a site"],
)
def test_nccl_where_every_rank_has_a_gpu(
    pool: RankPool, sizes: tuple[int, ...], gpus: list[str], available: list[bool], expected: list[str]
) -> None:
    assert pool.run(uses_nccl, Case(sizes=sizes, domains=(1, 1)), gpus, available) == [expected] * 4
