"""A checkpoint's files on their way between sites that share no file system: from where to where, and bringing them there.

A *folder* is what some ranks see alike, called by the lowest of them. Rank 0 decides for all, since it alone hears what all have.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridep.config import sync
from hybridep.errors import UserError
from hybridep.topology import Cluster
from runtime.barrier import Barrier
from runtime.mesh import first_line
from runtime.transport import Posted, Transport

_PIECE_BYTES = 8 << 20
_TURNS_APART = 16
"""Ranks are at most so many pieces apart."""


class Transfer(NamedTuple):
    """One file on its way, from one rank of the run to another."""

    name: str
    size_bytes: int
    source: int
    destination: int


class Kept(NamedTuple):
    """One file of a checkpoint."""

    size_bytes: int
    holders: list[int]
    """Folders that have it."""


def kept(have: Mapping[int, Mapping[str, int]]) -> dict[str, Kept]:
    """By name: the largest of each folder first, folders by turns. have: folder -> file -> bytes."""
    files: dict[str, Kept] = {}
    for leader in sorted(have):
        for name, size_bytes in have[leader].items():
            files.setdefault(name, Kept(size_bytes, [])).holders.append(leader)
    turn, number = dict[str, tuple[int, int]](), Counter[int]()
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        first = files[name].holders[0]
        turn[name] = number[first], first
        number[first] += 1
    return {name: files[name] for name in sorted(files, key=turn.__getitem__)}


class Roads:
    """Takes each file over the links that are the first to be done with it."""

    def __init__(self, cluster: Cluster, leaders: Sequence[int]) -> None:
        """``leaders``: of each rank the lowest that sees its folder."""
        self._ranks = {leader: [rank for rank, other in enumerate(leaders) if other == leader] for leader in sorted(set(leaders))}
        self._dc = {leader: int(cluster.coordinates[leader][0]) for leader in self._ranks}
        self._site = np.array(cluster.datacenters)
        self._access, self._pairs = cluster.access_bytes_per_s, cluster.pair_bytes_per_s
        size = cluster.sizes[0]
        self._access_bytes, self._pair_bytes = np.zeros((2, size)), np.zeros((size, size))
        """That go up from and down to each, and between two of them."""
        self._sent, self._received = Counter[int](), Counter[int]()
        """Bytes by rank."""
        self.transfers: list[Transfer] = []

    def bring(self, name: str, file: Kept, wanted: Collection[int]) -> None:
        """To each of some folders, from one that has it."""
        for leader in sorted(set(wanted) - set(file.holders)):
            self._take(name, file, [leader])

    def copy(self, name: str, file: Kept, copies: int) -> None:
        """To other sites, until that many beside one have it, or all."""
        sites = {self._site[self._dc[leader]] for leader in file.holders}
        while len(sites) <= copies:
            free = [leader for leader, dc in self._dc.items() if self._site[dc] not in sites]
            if not free:
                return
            sites.add(self._site[self._dc[self._take(name, file, free)]])

    def _take(self, name: str, file: Kept, free: Sequence[int]) -> int:
        """The folder that gets it."""
        size_bytes, sources = file
        begins, ends = (np.array([self._dc[leader] for leader in leaders]) for leaders in (sources, free))
        up_s, down_s = (self._access_bytes + size_bytes) / self._access
        done_s, both_s = np.maximum(up_s[begins][:, None], down_s[ends]), up_s[begins][:, None] + down_s[ends]
        if self._pairs is not None:
            where = np.ix_(begins, ends)
            done_s = np.maximum(done_s, (self._pair_bytes[where] + size_bytes) / self._pairs[where])
        done_s[self._site[begins][:, None] == self._site[ends]] = 0.0
        # Where the sender's link decides, any receiver is done as soon: the one with the least to receive; of equals the next
        # site, so that no two send to the same.
        ahead = (ends - begins[:, None]) % len(self._site)
        first, last = divmod(int(np.lexsort((ahead.ravel(), both_s.ravel(), done_s.ravel()))[0]), len(free))
        if done_s[first, last] > 0:
            self._access_bytes[0, begins[first]] += size_bytes
            self._access_bytes[1, ends[last]] += size_bytes
            self._pair_bytes[begins[first], ends[last]] += size_bytes
        sender = min(self._ranks[sources[first]], key=lambda rank: (self._sent[rank], rank))
        receiver = min(self._ranks[free[last]], key=lambda rank: (self._received[rank], rank))
        self._sent[sender] += size_bytes
        self._received[receiver] += size_bytes
        self.transfers.append(Transfer(name, size_bytes, sender, receiver))
        return free[last]


def carry(
    transfers: Sequence[Transfer],
    source: Path,
    target: Path,
    *,
    rank: int,
    transport: Transport,
    barrier: Barrier,
    cluster: Cluster,
) -> list[Transfer]:
    """Send and receive what a rank has part in; returns what arrived, each in ``target`` by its :func:`arrival` name and on the
    disk. All ranks call it with the same transfers. A run's own exchanges have the links first. Raises OSError, after the last
    piece, so that nobody waits for this rank."""
    mine = [one for one in transfers if one.destination == rank]
    turns = _turns(transfers)
    leaving = _by_turn(((one.destination, one) for one in transfers if one.source == rank), turns)
    coming = _by_turn(((one.source, one) for one in mine), turns)
    failed, label = None, f"checkpoint@{cluster.levels[0].name}"

    def announced(turn: int) -> tuple[dict[int, Tensor], Posted]:
        room = {peer: piece.room() for peer, piece in coming[turn].items()}
        return room, transport.post_in_background(room, label)

    # A turn ahead: else each would wait for a round trip.
    awaited = deque(announced(turn) for turn in range(min(turns, 1)))
    for turn in range(turns):
        if turn % _TURNS_APART == _TURNS_APART - 1:
            # Ranks with little to do would wait for the others longer than a barrier lasts.
            barrier.wait()
        if turn + 1 < turns:
            awaited.append(announced(turn + 1))
        (receives, posted), sends = awaited.popleft(), {peer: piece.room() for peer, piece in leaving[turn].items()}
        try:
            for peer, piece in leaving[turn].items():
                _read(source / piece.name, piece.start, sends[peer])
        except OSError as error:
            failed = error
        posted.exchange(sends)
        try:
            for peer, piece in coming[turn].items() if failed is None else ():
                _append(target / arrival(piece.name, rank), piece.start, receives[peer])
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    for one in mine:
        with (target / arrival(one.name, rank)).open("ab") as stream:
            sync(stream)
    return mine


def _turns(transfers: Sequence[Transfer]) -> int:
    """Pieces of the two ranks that have most for each other."""
    pieces = Counter[tuple[int, int]]()
    for one in transfers:
        pieces[one.source, one.destination] += -(-one.size_bytes // _PIECE_BYTES)
    return max(pieces.values(), default=0)


@contextmanager
def together(folder: Path, barrier: Barrier, *partial: Path) -> Iterator[None]:
    """Ends when all ranks have written what they write inside. Where one cannot, nothing of ``partial`` stays, since the next
    one may need the room."""
    failed = None
    try:
        yield
    except (OSError, RuntimeError, UserError) as error:
        failed = UserError(f"checkpoints.folder: {folder} cannot be written ({first_line(error)})")
    if barrier.most([failed is not None])[0]:
        for path in partial:
            shutil.rmtree(path, ignore_errors=True)
        barrier.wait()
        if failed is not None:
            raise failed
        barrier.wait()  # for the rank that ends the run


def arrival(name: str, rank: int) -> str:
    """Name of a file that is not all there yet: of ranks that see each other's files late several may bring the same one."""
    return f"{name}.{rank}"


class _Piece(NamedTuple):
    name: str
    start: int
    stop: int

    def room(self) -> Tensor:
        return torch.zeros(self.stop - self.start, dtype=torch.uint8)


def _by_turn(files: Iterable[tuple[int, Transfer]], turns: int) -> list[dict[int, _Piece]]:
    """By turn and peer: the pieces of all files, in order."""
    found, number = [dict[int, _Piece]() for _ in range(turns)], Counter[int]()
    for peer, one in files:
        for start in range(0, one.size_bytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, one.size_bytes)
            found[number[peer]][peer] = _Piece(one.name, start, stop)
            number[peer] += 1
    return found


def _read(path: Path, start: int, piece: Tensor) -> None:
    with path.open("rb") as stream:
        stream.seek(start)
        if stream.readinto(piece.numpy().data) != len(piece):
            raise OSError(f"{path} ends before its {start + len(piece)} bytes")


def _append(path: Path, start: int, piece: Tensor) -> None:
    with path.open("r+b" if start else "wb") as stream:
        stream.seek(start)
        stream.write(piece.numpy().data)
