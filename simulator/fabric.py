"""A wiring as links and paths of a network, one of each kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.compiled import compiled
from hybridep.traffic import Direct
from simulator.collective import Flows
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.network import EXACT, Network, Transfers
from simulator.sent import Sent, dense
from simulator.symmetry import HashArray, Symmetry, hash_of_number

_PART = 2**19
"""Transfers whose paths are looked at together: memory for several times their links."""


class Fabric:
    """The network of a wiring. Ranks and links that are alike are in it once, and transfers between them are weighted. Each
    transfer gets at most its ranks' windows per round trip; ``streams``: level name -> connections per pair of ranks, one where
    absent."""

    def __init__(
        self,
        engine: Engine,
        symmetry: Symmetry,
        tolerance: float = EXACT,
        conditions: Conditions | None = None,
        streams: Mapping[str, int] | None = None,
    ) -> None:
        self.symmetry = symmetry
        self._under_way_bytes = (conditions or Conditions()).under_way_bytes(symmetry.cluster, streams or {})
        gpu = symmetry.cluster.gpu
        # Ranks that share processors queue for them instead: `Blocks.messages_s`.
        self._further_s = gpu.message_overhead if symmetry.cluster.processors is None else 0.0
        self.network = Network(engine, symmetry.capacity_bytes_per_s, tolerance)

    def flows(self, level: int, sent: Sent, late_s: float = 0.0, circuits: IntArray | None = None) -> Flows:
        """Transfers of an array [ranks, size of the level]: from each rank to its peer at each coordinate; ``late_s`` longer,
        over `circuits` [regions, nodes of one, again] where these join the two."""
        cluster = self.symmetry.cluster
        stride, size = cluster.stride(level), cluster.sizes[level]
        sent = dense(sent[self.symmetry.first])
        kind, coordinate = np.nonzero(sent)
        source = self.symmetry.first[kind]
        own = source // stride % size
        moves = coordinate != own
        source, coordinate, own = source[moves], coordinate[moves], own[moves]
        # All arrive with the last: which of a rank's messages leaves first is not followed.
        further_s = (np.bincount(source, minlength=cluster.num_gpus)[source] - 1) * self._further_s
        destination = source + (coordinate - own) * stride
        return self.transfers(source, destination, sent[kind[moves], coordinate], late_s + further_s, circuits)

    def direct(self, pairs: Direct, late_s: float = 0.0) -> Flows:
        """Transfers between any two ranks; those inside a site take ``late_s`` longer."""
        cluster = self.symmetry.cluster
        ours = np.isin(pairs.source, self.symmetry.first)
        source, destination = pairs.source[ours], pairs.destination[ours]
        messages = np.bincount(source, minlength=cluster.num_gpus)[source]
        per_site = cluster.ranks_per_site
        inside = source // per_site == destination // per_site
        further_s = (messages - 1) * self._further_s + np.where(inside, late_s, 0.0)
        return self.transfers(source, destination, pairs.size_bytes[ours], further_s.astype(np.float64))

    def transfers(
        self,
        source: IntArray,
        destination: IntArray,
        size_bytes: FloatArray,
        late_s: FloatArray | None = None,
        circuits: IntArray | None = None,
    ) -> Flows:
        """Transfers between pairs of ranks, [n] each: all that the first rank of each kind sends; as `flows`."""
        late_s = np.zeros(source.size) if late_s is None else late_s
        # No two ends of parts are alike, because each kind has all of its transfers in one.
        cuts = _cuts(source)
        parts = [
            self._transfers(source[part], destination[part], size_bytes[part], late_s[part], circuits)
            for part in map(slice, cuts[:-1], cuts[1:])
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _transfers(
        self,
        source: IntArray,
        destination: IntArray,
        size_bytes: FloatArray,
        further_s: FloatArray,
        circuits: IntArray | None,
    ) -> Flows:
        symmetry = self.symmetry
        links, shares, latency_s, round_trip_s, level = symmetry.wiring.paths(source, destination, circuits)
        limits = self._limits_bytes_per_s(level, round_trip_s)
        # Links may be alike where no ranks are: those that nobody uses, or one behind the other.
        one_by_one = symmetry.num_kinds == symmetry.cluster.num_gpus and symmetry.link_size.size == symmetry.link_kind.size
        if not one_by_one:
            links = np.where(links >= 0, symmetry.link_kind[links], -1)
        path = np.zeros(source.size, dtype=np.uint64)
        length = _merge(links, shares, path)
        links, shares = links[:, :length].astype(np.int32), shares[:, :length]
        if one_by_one:
            return Flows(
                source=source,
                destination=destination,
                transfers=Transfers(
                    links=links,
                    latency_s=latency_s + further_s,
                    size_bytes=size_bytes,
                    weights=None if (shares == 1).all() else shares,
                    limit_bytes_per_s=limits,
                ),
            )
        kind, peer = symmetry.kind[source], symmetry.kind[destination]
        different = (kind * symmetry.num_kinds + peer, path, latency_s, *([] if limits is None else [limits]))
        number, *ends = (np.unique(each, return_inverse=True)[1].reshape(-1) for each in different)
        for place, end in enumerate(ends):
            if place:  # before a product would be too large
                number = np.unique(number, return_inverse=True)[1].reshape(-1)
            number = number * (end.max(initial=0) + 1) + end
        alike, counts = _alike(number, size_bytes)
        links, shares = links[alike], shares[alike]
        total = (counts * symmetry.size[kind[alike]])[:, None]
        return Flows(
            source=kind[alike],
            destination=peer[alike],
            transfers=Transfers(
                links=links,
                latency_s=(latency_s + further_s)[alike],
                size_bytes=size_bytes[alike],
                weights=np.where(links >= 0, total * shares / symmetry.link_size[links], 1.0),
                limit_bytes_per_s=None if limits is None else limits[alike],
            ),
        )

    def _limits_bytes_per_s(self, level: IntArray, round_trip_s: FloatArray) -> FloatArray | None:
        """[n]: what transfers get at most; None where nothing limits any."""
        if np.isinf(self._under_way_bytes).all():
            return None
        with np.errstate(divide="ignore"):
            return np.asarray(self._under_way_bytes[level] / round_trip_s)


def _cuts(source: IntArray) -> list[int]:
    """Where to cut transfers into parts of bounded size, all of a source in one; [0, n] where sources are in no order."""
    if source.size <= _PART or (np.diff(source) < 0).any():
        return [0, source.size]
    first = np.flatnonzero(np.diff(source, prepend=-1))
    cuts = [0]
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), source.size], strict=True):
        if end - cuts[-1] > _PART and begin > cuts[-1]:
            cuts.append(begin)
    return [*cuts, source.size]


def _joined(parts: list[Flows]) -> Flows:
    transfers = [part.transfers for part in parts]
    num_flows, width = sum(part.source.size for part in parts), max(part.links.shape[1] for part in transfers)
    limits = [part.limit_bytes_per_s for part in transfers]
    links = np.full((num_flows, width), -1, dtype=np.int32)
    weights = None if all(part.weights is None for part in transfers) else np.ones((num_flows, width))
    begin = 0
    for part in transfers:
        here = slice(begin, begin := begin + len(part.links)), slice(part.links.shape[1])
        links[here] = part.links
        if weights is not None and part.weights is not None:
            weights[here] = part.weights
    return Flows(
        source=np.concatenate([part.source for part in parts]),
        destination=np.concatenate([part.destination for part in parts]),
        transfers=Transfers(
            links=links,
            latency_s=np.concatenate([part.latency_s for part in transfers]),
            size_bytes=np.concatenate([part.size_bytes for part in transfers]),
            weights=weights,
            limit_bytes_per_s=None if limits[0] is None else np.concatenate([each for each in limits if each is not None]),
        ),
    )


def _alike(ends: IntArray, size_bytes: FloatArray) -> tuple[IntArray, IntArray]:
    """First row of each group of transfers with the same ends and (but for rounding) size, and the groups' sizes."""
    if not ends.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    order = np.lexsort((size_bytes, ends))
    near = np.isclose(size_bytes[order[1:]], size_bytes[order[:-1]], rtol=1e-11, atol=0)
    new = np.concatenate([[True], (np.diff(ends[order]) != 0) | ~near])
    starts = np.flatnonzero(new)
    return order[starts], np.diff(np.append(starts, ends.size))


@compiled
def _merge(links: IntArray, shares: FloatArray, path: HashArray) -> int:
    """Bring each row's links into order, -1 last, those that are the same into one with the sum of their shares; write a hash
    of the row into `path`. Returns the most links of a row."""
    longest = 0
    for row in range(links.shape[0]):
        kept = 0
        for hop in range(links.shape[1]):
            link, share = links[row, hop], shares[row, hop]
            if link < 0:
                continue
            place = kept
            while place > 0 and links[row, place - 1] > link:
                place -= 1
            if place > 0 and links[row, place - 1] == link:
                shares[row, place - 1] += share
                continue
            for moved in range(kept, place, -1):
                links[row, moved], shares[row, moved] = links[row, moved - 1], shares[row, moved - 1]
            links[row, place], shares[row, place] = link, share
            kept += 1
        links[row, kept:] = -1
        shares[row, kept:] = 1.0
        bits = shares[row].view(np.uint64)
        for hop in range(kept):
            path[row] = hash_of_number(bits[hop], np.uint64(1)) ^ (path[row] * np.uint64(31) + np.uint64(links[row, hop] + 1))
        longest = max(longest, kept)
    return longest
