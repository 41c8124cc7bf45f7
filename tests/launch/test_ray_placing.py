"""Which ranks share a machine of a Ray cluster."""

from __future__ import annotations

import json
import subprocess

import pytest

from hybridep.commands.inputs import load_cluster
from hybridep.launch.ray_placing import Machine, shares_of
from hybridep.launch.ray_sites import sites_at_hand


def placed(
    ranks: int, group: int, machines: list[tuple[int, int]], *, use_gpus: bool = True
) -> list[tuple[list[int], dict[str, float]]] | None:
    """Ranks and resources of each share of a site whose first rank is 8."""
    offered = [Machine(cpus=cpus, gpus=gpus) for cpus, gpus in machines]
    shares = shares_of("oslo", range(8, 8 + ranks), group, offered, use_gpus=use_gpus)
    if shares is None:
        return None
    assert {share.dc for share in shares} == {"oslo"}
    assert sorted(rank for share in shares for rank in share.ranks) == list(range(8, 8 + ranks))
    return [(list(share.ranks), share.resources) for share in shares]


@pytest.mark.parametrize(
    ("ranks", "group", "machines", "use_gpus", "sizes", "gpus"),
    [
        # Two machines of eight GPUs and many CPUs: without GPUs one would take all.
        (16, 16, [(96, 8), (96, 8)], True, [8, 8], [8, 8]),
        (16, 8, [(96, 8), (96, 8)], True, [8, 8], [8, 8]),
        (16, 8, [(96, 8), (96, 8)], False, [8, 8], [0, 0]),
        # Workers of the innermost level stay together where a machine has room for one.
        (8, 4, [(64, 6), (64, 4)], True, [4, 4], [4, 4]),
        (6, 3, [(4, 0), (2, 0)], True, [4, 2], [0, 0]),
        # Several on one machine are one share.
        (8, 2, [(64, 4), (64, 4)], True, [4, 4], [4, 4]),
        # Fewer GPUs than ranks: as many on each.
        (4, 4, [(64, 1), (64, 1)], True, [2, 2], [1, 1]),
        (4, 2, [(64, 1)], True, [4], [1]),
        (5, 5, [(64, 2), (64, 1)], True, [4, 1], [2, 1]),
        (4, 4, [(64, 1)], False, [4], [0]),
        # A machine without GPUs, in a site that has enough, takes none.
        (8, 8, [(96, 0), (96, 8)], True, [8], [8]),
        (2, 2, [(1, 0), (1, 0)], True, [1, 1], [0, 0]),
    ],
)
def test_shares(
    ranks: int, group: int, machines: list[tuple[int, int]], use_gpus: bool, sizes: list[int], gpus: list[int]
) -> None:
    shares = placed(ranks, group, machines, use_gpus=use_gpus)
    assert shares is not None
    assert [len(held) for held, _ in shares] == sizes
    assert [resources for _, resources in shares] == [
        {"CPU": float(size)} | ({"GPU": float(number)} if number else {}) for size, number in zip(sizes, gpus, strict=True)
    ]


def test_neighbours_stay_together() -> None:
    shares = placed(8, 2, [(64, 4), (64, 4)])
    assert shares is not None and [ranks for ranks, _ in shares] == [[8, 9, 12, 13], [10, 11, 14, 15]]
    shares = placed(6, 3, [(4, 0), (2, 0)])
    assert shares is not None and [ranks for ranks, _ in shares] == [[8, 9, 10, 13], [11, 12]]


def test_too_little_room() -> None:
    assert placed(4, 4, []) is None
    assert placed(4, 2, [(2, 0), (1, 0)]) is None
    assert placed(4, 4, [(3, 8)]) is None


@pytest.mark.parametrize(
    ("gpus", "use_gpus", "found"),
    [
        # Of eight ranks each: two of the large site's four, none of the middle one, and one of the two small ones.
        ({}, True, {"large-pod0", "large-pod1", "small-a"}),
        # One machine of two is left, whose GPUs took a rank each, or two ranks.
        ({"small-a": (4, 8)}, True, {"large-pod0", "large-pod1"}),
        ({"small-a": (4, 8)}, False, {"large-pod0", "large-pod1", "small-a"}),
        ({"small-a": (4, 4), "large": (8, 16)}, True, {"large-pod0", "large-pod1", "small-a"}),
        ({"large": (8, 32)}, True, {"large-pod0", "small-a"}),
    ],
)
def test_sites_at_hand_pod_by_pod(
    gpus: dict[str, tuple[int, int]], use_gpus: bool, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = {"large": 23, "middle": 7, "small-a": 64, "elsewhere": 8}
    room = {
        dc: dict(zip(("cpus", "gpus", "had_gpus"), (number, *gpus.get(dc, (0, 0))), strict=True)) for dc, number in cpus.items()
    }
    answer = subprocess.CompletedProcess([], 0, stdout=f"some warning\n{json.dumps(room)}\n".encode())
    monkeypatch.setattr(subprocess, "run", lambda *words, **settings: answer)
    assert sites_at_hand("somewhere", load_cluster("pods-4dc"), use_gpus=use_gpus) == found
