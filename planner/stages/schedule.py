"""How long a step of a pipeline plan is expected to take: its stages' passes and what travels between them, walked through.

Each stage by itself takes what ``planner.staggered`` expects of its passes. Between stages each way carries one micro-batch after
the other; ways that cross one link at the same time share it, evenly but for what the other links of one leave over. Stages whose
ranks share processors slow each other down while they compute. Inside a stage nothing is delayed by what passes between stages,
which counts in the pipeline's favour where a stage has several sites.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridep.pipeline import PipelinePlan, Ways, order_of_passes
from planner.exchange import Network
from planner.staggered import PassTimes, crossed

_WALKED = 8
"""Micro-batches for each stage that are walked through, or three times as many as are in flight; of more, each further one takes
what the last ones took, two for each stage."""


class Way(NamedTuple):
    """One micro-batch's transfer from a stage to another."""

    latency_s: float
    links: tuple[tuple[int, float, int], ...]
    """Outer links, the seconds for which it holds each, alone, and by how many messages."""
    least_s: float
    """Whatever else: links inside sites, or windows."""

    @property
    def alone_s(self) -> float:
        """Until its bytes have left, alone on all links."""
        return max([self.least_s, *(seconds for _, seconds, _ in self.links)])


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of one step; the three parts add up to it."""

    step_s: float
    work_s: float
    """The busiest stage's own passes, copies, reductions and optimizer."""
    bubble_s: float
    """What stages that wait for each other add to that."""

    @property
    def activations_s(self) -> float:
        """What the way between stages adds to both."""
        return self.step_s - self.work_s - self.bubble_s


def pipeline_times(plan: PipelinePlan, stages: Sequence[PassTimes]) -> PipelineTimes:
    """Of one step; ``stages``: what each of them takes by itself."""
    none = [Way(0.0, (), 0.0)] * (len(stages) - 1)
    work_s = max(one.busy_s(plan.micro_batches) for one in stages)
    without_s = max(_step_s(plan, stages, none, none), work_s)
    step_s = max(_step_s(plan, stages, *ways_of(plan)), without_s)
    return PipelineTimes(step_s=step_s, work_s=work_s, bubble_s=without_s - work_s)


def least_step_s(plan: PipelinePlan, stages: Sequence[PassTimes]) -> float:
    """Below the walk: the busiest stage, or the busiest link."""
    held_s = steady_s(*ways_of(plan))
    return max(plan.micro_batches * held_s, *(one.busy_s(plan.micro_batches) for one in stages))


def ways_of(plan: PipelinePlan) -> tuple[list[Way], list[Way]]:
    """From each stage to the next, and back."""
    network = Network(cluster=plan.cluster, streams=plan.schedule.streams)
    between = [plan.ways(stage) for stage in range(len(plan.stages) - 1)]
    return [_way(plan, network, one, down=True) for one in between], [_way(plan, network, one, down=False) for one in between]


def steady_s(forth: Sequence[Way], back: Sequence[Way]) -> float:
    """Seconds for which the busiest link is held by one micro-batch on its way through all stages."""
    held: dict[int, float] = {}
    for way in (*forth, *back):
        for link, seconds, _ in way.links:
            held[link] = held.get(link, 0.0) + seconds
    return max([0.0, *held.values(), *(way.least_s for way in (*forth, *back))])


def _way(plan: PipelinePlan, network: Network, ways: Ways, *, down: bool) -> Way:
    cluster = plan.cluster
    source, destination = (ways.source, ways.destination) if down else (ways.destination, ways.source)
    size_bytes = ways.number.astype(np.float64) * plan.sequence_bytes
    load_bytes, messages = np.zeros(len(cluster.link_table)), np.zeros(len(cluster.link_table), dtype=np.int64)
    for link, transfer, share in crossed(cluster, 0, source, destination):
        np.add.at(load_bytes, link, size_bytes[transfer] * share)
        np.add.at(messages, link, 1)
    held_s = load_bytes / network.bandwidths_bytes_per_s
    inside = cluster.num_gpus // cluster.sizes[0]
    sites = source // inside, destination // inside
    per_byte = network.window_s_per_byte[0]
    windows_s = size_bytes * (per_byte[sites] if per_byte.ndim else float(per_byte))
    used = np.flatnonzero(held_s)
    is_outer = (used < 2 * cluster.sizes[0]) | (used >= cluster.pair_links.start)
    return Way(
        latency_s=float(cluster.site_latency_s[sites].max()),
        links=tuple((int(link), float(held_s[link]), int(messages[link])) for link in used[is_outer]),
        least_s=float(max(windows_s.max(), held_s[used[~is_outer]].max(initial=0.0))),
    )


def _step_s(plan: PipelinePlan, stages: Sequence[PassTimes], forth: Sequence[Way], back: Sequence[Way]) -> float:
    number, ahead = plan.micro_batches, plan.ahead
    more = max(_WALKED * len(stages), 3 * plan.in_flight(0))
    crowded = _crowding(plan)
    if number <= more:
        return _Walk(number, ahead, stages, forth, back, crowded).step_s()
    last = 2 * len(stages)
    few_s, more_s = (_Walk(each, ahead, stages, forth, back, crowded).step_s() for each in (more - last, more))
    return more_s + (number - more) * (more_s - few_s) / last


def _crowding(plan: PipelinePlan) -> tuple[float, ...] | None:
    """For each stage, its ranks as a share of the processors that all ranks share; None where each has its own."""
    sharing = plan.cluster.gpu.sharing
    if sharing == 1:
        return None
    return tuple(len(ranks) * sharing / plan.cluster.num_gpus for ranks in plan.ranks)


@dataclass
class _Pass:
    """What a stage does at a time."""

    forward: bool
    batch: int
    left_s: float
    """If no other stage computed."""
    moved_s: float
    slower: float = 1.0
    """How many times as long it takes at present."""
    number: int = 0
    """Of its last event in the queue."""


@dataclass
class _Transfer:
    """What is on one way, and what waits for it."""

    way: Way
    waiting: deque[int]
    """Micro-batches whose turn has not come."""
    batch: int | None = None
    left: float = 0.0
    """Share of its bytes that have not left."""
    rate: float = 0.0
    """Of that, per second, since ``moved_s``."""
    moved_s: float = 0.0
    number: int = 0
    """Of its last event in the queue; earlier ones count no more."""


_ARRIVES, _LEAVES, _ENDS = range(3)
"""Kinds of events: a micro-batch is at a stage, or has left a stage; a pass ends."""


class _Walk:
    def __init__(
        self,
        micro_batches: int,
        ahead: int,
        stages: Sequence[PassTimes],
        forth: Sequence[Way],
        back: Sequence[Way],
        crowding: Sequence[float] | None = None,
    ) -> None:
        number = len(stages)
        self._crowding = crowding
        self._stages, self._number = stages, number
        self._passes = [deque(order_of_passes(stage, number, micro_batches, ahead)) for stage in range(number)]
        self._free_s = [one.gather_s for one in stages]
        self._doing: list[_Pass | None] = [None] * number
        self._here: set[tuple[bool, int, int]] = set()
        self._transfers = {
            **{(True, stage): _Transfer(way, deque()) for stage, way in enumerate(forth)},
            **{(False, stage + 1): _Transfer(way, deque()) for stage, way in enumerate(back)},
        }
        self._on_link: dict[int, list[tuple[bool, int]]] = {}
        for key, transfer in self._transfers.items():
            for link, _, _ in transfer.way.links:
                self._on_link.setdefault(link, []).append(key)
        self._events: list[tuple[float, int, int, int, bool, int]] = []
        self._count = 0

    def step_s(self) -> float:
        """When the last stage is done."""
        for stage in range(self._number):
            self._begin(stage, self._free_s[stage])
        while self._events:
            now_s, number, kind, stage, forward, batch = heapq.heappop(self._events)
            if kind == _ENDS:
                doing = self._doing[stage]
                if doing is None or doing.number != number:
                    continue
                self._doing[stage] = None
                self._free_s[stage] = now_s
                self._crowd(now_s)
                if (forward, stage) in self._transfers:
                    self._transfers[forward, stage].waiting.append(batch)
                    self._send(forward, stage, now_s)
                self._begin(stage, now_s)
            elif kind == _ARRIVES:
                self._here.add((forward, stage, batch))
                self._begin(stage, now_s)
            elif self._transfers[forward, stage].number == number:
                transfer = self._transfers[forward, stage]
                transfer.batch = None
                other = stage + 1 if forward else stage - 1
                self._at(now_s + transfer.way.latency_s, _ARRIVES, other, forward, batch)
                self._share(transfer.way, now_s)
                self._send(forward, stage, now_s)
        return max(free + one.return_s + one.after_s for free, one in zip(self._free_s, self._stages, strict=True))

    def _at(self, when_s: float, kind: int, stage: int, forward: bool, batch: int) -> int:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, kind, stage, forward, batch))
        return self._count

    def _begin(self, stage: int, now_s: float) -> None:
        """The stage's next pass, if it can."""
        if self._doing[stage] is not None or not self._passes[stage]:
            return
        forward, batch = self._passes[stage][0]
        waits = stage > 0 if forward else stage < self._number - 1
        if waits and (forward, stage, batch) not in self._here:
            return
        self._passes[stage].popleft()
        one, begin_s = self._stages[stage], max(now_s, self._free_s[stage])
        doing = _Pass(forward, batch, one.forward_s if forward else one.backward_s, begin_s)
        doing.number = self._at(begin_s + doing.left_s, _ENDS, stage, forward, batch)
        self._doing[stage] = doing
        self._crowd(now_s)

    def _crowd(self, now_s: float) -> None:
        """New ends of all passes, where stages share processors: what they compute takes longer the more of them do."""
        if self._crowding is None:
            return
        all_of_them = zip(self._doing, self._stages, self._crowding, strict=True)
        wanted = sum(crowding * one.computing for doing, one, crowding in all_of_them if doing is not None)
        for stage, (doing, one, crowding) in enumerate(zip(self._doing, self._stages, self._crowding, strict=True)):
            if doing is None:
                continue
            others = wanted - crowding * one.computing + crowding
            slower = 1 + one.computing * (max(1.0, others) / max(1.0, crowding) - 1)
            doing.left_s -= max(now_s - doing.moved_s, 0.0) / doing.slower
            doing.moved_s, doing.slower = max(now_s, doing.moved_s), slower
            ends_s = doing.moved_s + max(doing.left_s, 0.0) * slower
            doing.number = self._at(ends_s, _ENDS, stage, doing.forward, doing.batch)

    def _send(self, forward: bool, stage: int, now_s: float) -> None:
        """The next that waits for a way."""
        transfer = self._transfers[forward, stage]
        if transfer.batch is None and transfer.waiting:
            transfer.batch, transfer.left, transfer.moved_s = transfer.waiting.popleft(), 1.0, now_s
            transfer.rate = 0.0
            self._share(transfer.way, now_s, (forward, stage))

    def _share(self, way: Way, now_s: float, also: tuple[bool, int] | None = None) -> None:
        """New rates for what is on a way's links."""
        keys = {key for link, _, _ in way.links for key in self._on_link[link]} | ({also} if also else set())
        for key in sorted(keys):
            one = self._transfers[key]
            if one.batch is None:
                continue
            one.left = max(one.left - one.rate * (now_s - one.moved_s), 0.0)
            one.moved_s = now_s
            taken_s = max([one.way.least_s, *(self._held_s(key, *held) for held in one.way.links)])
            one.rate = 1 / taken_s if taken_s else 0.0
            one.number = self._at(now_s + one.left * taken_s, _LEAVES, key[1], key[0], one.batch)

    def _held_s(self, mine: tuple[bool, int], link: int, seconds: float, messages: int) -> float:
        """How long a way's whole transfer takes on a link beside what else is on it: others take no more than an even share for
        each message, nor more than their own other links let through."""
        others = [
            self._transfers[key].way for key in self._on_link[link] if key != mine and self._transfers[key].batch is not None
        ]
        if not others:
            return seconds
        free, demands = 1.0, sorted(_wanted(way, link) for way in others)
        left = messages + sum(number for _, number in demands)
        for each, number in demands:
            if each >= free / left:
                break
            free, left = free - each * number, left - number
        return seconds * left / (messages * free)


def _wanted(way: Way, link: int) -> tuple[float, int]:
    """Share of a link that each message of a way would take if that link had room; and how many there are."""
    own, messages = next((seconds, number) for other, seconds, number in way.links if other == link)
    elsewhere_s = max([way.least_s, *(seconds for other, seconds, _ in way.links if other != link)])
    return (own / elsewhere_s if elsewhere_s > own else 1.0) / messages, messages


def balanced_layers(seconds_per_layer: Sequence[float], extra_s: Sequence[float], layers: int, least: Sequence[int]) -> list[int]:
    """So many layers for each stage that the slowest is as fast as can be: ``seconds_per_layer`` and what it takes besides for
    one micro-batch, and how many it must have ``least``. Raises ValueError where there are too few."""
    found = list(least)
    if sum(found) > layers:
        raise ValueError(f"{layers} layers for {len(found)} stages, which need {sum(found)}")
    for _ in range(layers - sum(found)):
        after = [extra + (have + 1) * each for have, each, extra in zip(found, seconds_per_layer, extra_s, strict=True)]
        found[int(np.argmin(after))] += 1
    return found
