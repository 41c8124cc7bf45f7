"""How long a step of a pipeline plan is expected to take: its stages' passes and what travels between them, walked through.

Each stage by itself takes what ``planner.staggered`` expects of its passes: first all that it exchanges between its sites, then
the rest. Between stages each way carries one micro-batch after the other. What crosses one link at the same time, on its way to
another stage or inside one, shares it, evenly but for what the other links of one leave over. Stages whose ranks share processors
slow each other down while they compute. What comes once a step, before a stage's first pass and after its last, is taken to have
links to itself, and all sites of a stage to begin a pass together: too fast and too slow by about as much (docs/design.md).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridep.pipeline import PipelinePlan, Ways, order_of_passes
from hybridep.placement import IntArray
from hybridep.topology import Cluster
from planner.exchange import ExchangeTimes
from planner.staggered import Between, PassTimes, crossed

_WALKED = 8
"""Micro-batches for each stage that are walked through, or three times as many as are in flight; of more, each further one takes
what the last ones took, two for each stage."""


Links = tuple[tuple[int, float, int], ...]
"""Numbers of outer links, seconds for which what crosses holds each, alone, and by how many messages."""


class Way(NamedTuple):
    """One micro-batch's transfer from a stage to another, or all that a stage exchanges in a pass."""

    latency_s: float
    links: Links
    least_s: float
    """Seconds that its bytes take at least, by links inside sites, or windows."""

    @property
    def alone_s(self) -> float:
        """Seconds until its bytes have left, alone on all links."""
        return max([self.least_s, *(seconds for _, seconds, _ in self.links)])


NOTHING = Way(0.0, (), 0.0)


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of one step; the three parts add up to it. Each is found when it is asked for."""

    plan: PipelinePlan
    stages: Sequence[PassTimes]

    @cached_property
    def step_s(self) -> float:
        """Seconds until the last stage is done."""
        walked_s = _step_s(self.plan, self.stages, *ways_of(self.plan), stage_links(self.plan, self.stages))
        return max(walked_s, self.work_s, busiest_link_s(self.plan, self.stages))

    @property
    def work_s(self) -> float:
        """The busiest stage's own passes, copies, reductions and optimizer."""
        return max(one.busy_s(self.plan.micro_batches) for one in self.stages)

    @cached_property
    def bubble_s(self) -> float:
        """What stages that wait for each other add to ``work_s``."""
        none = [NOTHING] * (len(self.stages) - 1)
        without_s = _step_s(self.plan, self.stages, none, none, stage_links(self.plan, self.stages))
        return min(max(without_s, self.work_s), self.step_s) - self.work_s

    @property
    def activations_s(self) -> float:
        """What the ways between stages add to ``work_s`` and ``bubble_s``."""
        return self.step_s - self.work_s - self.bubble_s


def least_step_s(plan: PipelinePlan, stages: Sequence[PassTimes]) -> float:
    """Seconds below which no walk ends: the busiest stage's, or the busiest link's."""
    return max(busiest_link_s(plan, stages), *(one.busy_s(plan.micro_batches) for one in stages))


def busiest_link_s(plan: PipelinePlan, stages: Sequence[PassTimes]) -> float:
    """Seconds that the busiest link between sites takes for what it carries in a step, inside stages and from stage to stage."""
    held_s: dict[int, float] = {}

    def add(links: Iterable[tuple[int, float, int]], times: int) -> None:
        for link, seconds, _ in links:
            held_s[link] = held_s.get(link, 0.0) + times * seconds

    forth, back = ways_of(plan)
    for way in (*forth, *back):
        add(way.links, plan.micro_batches)
    for inside in stage_links(plan, stages):
        add(inside.once, 1)
        for way in (inside.forward, inside.backward):
            add(way.links, plan.micro_batches)
    return max([0.0, *held_s.values(), *(plan.micro_batches * way.least_s for way in (*forth, *back))])


def ways_of(plan: PipelinePlan) -> tuple[list[Way], list[Way]]:
    """[stages - 1] each: one micro-batch's way from each stage to the next, and back."""
    network = ExchangeTimes(cluster=plan.cluster, streams=plan.schedule.streams)
    between = [plan.ways(stage) for stage in range(len(plan.stages) - 1)]
    return [_way(plan, network, one, down=True) for one in between], [_way(plan, network, one, down=False) for one in between]


def _way(plan: PipelinePlan, network: ExchangeTimes, ways: Ways, *, down: bool) -> Way:
    cluster = plan.cluster
    source, destination = (ways.source, ways.destination) if down else (ways.destination, ways.source)
    size_bytes = ways.number.astype(np.float64) * plan.sequence_bytes
    load_bytes, messages = np.zeros(len(cluster.link_table)), np.zeros(len(cluster.link_table), dtype=np.int64)
    for link, transfer, share in crossed(cluster, 0, source, destination):
        np.add.at(load_bytes, link, size_bytes[transfer] * share)
        np.add.at(messages, link, 1)
    held_s = load_bytes / network.bandwidths_bytes_per_s
    sites = source // cluster.ranks_per_site, destination // cluster.ranks_per_site
    per_byte = network.window_s_per_byte[0]
    windows_s = size_bytes * (per_byte[sites] if per_byte.ndim else float(per_byte))
    used = np.flatnonzero(held_s)
    is_outer = cluster.outer_links[used]
    return Way(
        latency_s=float(cluster.site_latency_s[sites].max()) + _coding_s(plan, ways),
        links=tuple((int(link), float(held_s[link]), int(messages[link])) for link in used[is_outer]),
        least_s=float(max(windows_s.max(), held_s[used[~is_outer]].max(initial=0.0))),
    )


def _coding_s(plan: PipelinePlan, ways: Ways) -> float:
    """Seconds of the rank that has most of one micro-batch's rows to code, then decode."""
    speed = plan.activation_speed
    if speed is None:
        return 0.0
    exact_bytes = plan.workload.training.sequence_length * plan.workload.combine_row_bytes
    most = [int(np.bincount(ends, weights=ways.number).max()) for ends in (ways.source, ways.destination)]
    return max(most) * exact_bytes * (1 / speed.encode + 1 / speed.decode)


class StageLinks(NamedTuple):
    """What a stage exchanges between its sites, over the links of the whole cluster."""

    forward: Way = NOTHING
    """All of a forward pass."""
    backward: Way = NOTHING
    """All of a backward pass."""
    once: Links = ()
    """All that a step exchanges beside its passes."""


def stage_links(plan: PipelinePlan, stages: Sequence[PassTimes]) -> list[StageLinks]:
    """[stages]: what each exchanges between its sites."""
    found = []
    for ranks, stage, times in zip(plan.ranks, plan.plans, stages, strict=True):
        sites = np.unique(ranks // plan.cluster.ranks_per_site)

        def links(between: Between, sites: IntArray = sites, own: Cluster = stage.cluster) -> Links:
            return tuple((_in_whole(plan.cluster, sites, own, link), held_s, many) for link, held_s, many in between.links)

        # By itself what is exchanged keeps a pass no longer than the pass takes.
        forward = Way(0.0, links(times.forward), min(times.forward.seconds, times.forward_s))
        backward = Way(0.0, links(times.backward), min(times.backward.seconds, times.backward_s))
        found.append(StageLinks(forward, backward, links(times.once)))
    return found


def _in_whole(cluster: Cluster, sites: IntArray, own: Cluster, link: int) -> int:
    """The number of an outer link of a stage's cluster in that of all sites."""
    if link < own.pair_links.start:
        return int(2 * sites[link // 2] + link % 2)
    if link < own.pair_links.stop:
        source, place = divmod(link - own.pair_links.start, own.sizes[0] - 1)
        return cluster.pair_link(int(sites[source]), int(sites[place + (place >= source)]))
    trunks = [trunk.name for trunk in cluster.trunks]
    return int(cluster.pair_links.stop + trunks.index(own.trunks[link - own.pair_links.stop].name))


def _step_s(
    plan: PipelinePlan, stages: Sequence[PassTimes], forth: Sequence[Way], back: Sequence[Way], inside: Sequence[StageLinks]
) -> float:
    number, ahead = plan.micro_batches, plan.ahead
    more, crowded = max(_WALKED * len(stages), 3 * plan.in_flight(0)), _crowding(plan)
    if number <= more:
        return _Walk(number, ahead, stages, forth, back, inside, crowded).step_s()
    last = 2 * len(stages)
    few_s, more_s = (_Walk(each, ahead, stages, forth, back, inside, crowded).step_s() for each in (more - last, more))
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
    """Seconds until its end if no other stage computed."""
    moved_s: float
    slower: float = 1.0
    """How many times as long it takes at present."""
    exchanging: bool = False
    """What it exchanges is on the links; ``left_s`` is what follows."""
    computing: float = 0.0
    """Share of ``left_s`` in which ranks compute."""
    number: int = 0
    """Number of its last event in the queue."""


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
    """Share of its bytes that leaves per second, since ``moved_s``."""
    moved_s: float = 0.0
    number: int = 0
    """Number of its last event in the queue; earlier ones count no more."""


_ARRIVES, _LEAVES, _ENDS, _BEGINS = range(4)
"""Kinds of events: a micro-batch is at a stage; what was on links has left them; a pass ends; a stage has its copies."""

_BACK, _FORTH, _PASS = range(3)
"""Kinds of transfers: gradients, activations, and what a stage exchanges in a pass."""


class _Walk:
    def __init__(
        self,
        micro_batches: int,
        ahead: int,
        stages: Sequence[PassTimes],
        forth: Sequence[Way],
        back: Sequence[Way],
        inside: Sequence[StageLinks] | None = None,
        crowding: Sequence[float] | None = None,
    ) -> None:
        number = len(stages)
        self._crowding = crowding
        self._stages, self._number = stages, number
        self._inside = inside or [StageLinks()] * number
        self._passes = [deque(order_of_passes(stage, number, micro_batches, ahead)) for stage in range(number)]
        self._free_s = [_awaited_s(one) if stage else one.gather_s for stage, one in enumerate(stages)]
        self._after_s = [
            (one.late_s if stage and micro_batches > 1 else one.return_s) + one.after_s for stage, one in enumerate(stages)
        ]
        self._doing: list[_Pass | None] = [None] * number
        self._here: set[tuple[bool, int, int]] = set()
        self._transfers = {
            **{(_FORTH, stage): _Transfer(way, deque()) for stage, way in enumerate(forth)},
            **{(_BACK, stage + 1): _Transfer(way, deque()) for stage, way in enumerate(back)},
            **{(_PASS, stage): _Transfer(NOTHING, deque()) for stage in range(number)},
        }
        self._on_link: dict[int, list[tuple[int, int]]] = {}
        for key, transfer in self._transfers.items():
            one = self._inside[key[1]]
            ways = (one.forward, one.backward) if key[0] == _PASS else (transfer.way,)
            for link in sorted({link for way in ways for link, _, _ in way.links}):
                self._on_link.setdefault(link, []).append(key)
        self._events: list[tuple[float, int, int, int, int, int]] = []
        self._count = 0

    def step_s(self) -> float:
        """When the last stage is done."""
        for stage in range(self._number):
            self._at(self._free_s[stage], _BEGINS, stage, 0, 0)
        while self._events:
            now_s, number, kind, stage, of, batch = heapq.heappop(self._events)
            if kind == _BEGINS:
                self._begin(stage, now_s)
            elif kind == _ENDS:
                doing = self._doing[stage]
                if doing is None or doing.number != number:
                    continue
                self._doing[stage] = None
                self._free_s[stage] = now_s
                self._crowd(now_s)
                if (of, stage) in self._transfers:
                    self._transfers[of, stage].waiting.append(batch)
                    self._send(of, stage, now_s)
                self._begin(stage, now_s)
            elif kind == _ARRIVES:
                self._here.add((bool(of), stage, batch))
                self._begin(stage, now_s)
            elif self._transfers[of, stage].number == number:
                self._left(of, stage, batch, now_s)
        return max(free + after for free, after in zip(self._free_s, self._after_s, strict=True))

    def _left(self, of: int, stage: int, batch: int, now_s: float) -> None:
        """What was on links is through."""
        transfer = self._transfers[of, stage]
        transfer.batch = None
        self._share(transfer.way, now_s)
        doing = self._doing[stage]
        if of == _PASS and doing is not None:
            self._go_on(stage, doing, now_s)
        else:
            other = stage + 1 if of == _FORTH else stage - 1
            self._at(now_s + transfer.way.latency_s, _ARRIVES, other, of, batch)
            self._send(of, stage, now_s)

    def _put(self, of: int, stage: int, way: Way, batch: int, now_s: float) -> None:
        """A transfer's bytes begin to leave over the links of ``way``."""
        transfer = self._transfers[of, stage]
        transfer.way, transfer.batch, transfer.left, transfer.moved_s, transfer.rate = way, batch, 1.0, now_s, 0.0
        self._share(way, now_s, (of, stage))

    def _at(self, when_s: float, kind: int, stage: int, of: int, batch: int) -> int:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, kind, stage, of, batch))
        return self._count

    def _begin(self, stage: int, now_s: float) -> None:
        """The stage's next pass, if it can."""
        if self._doing[stage] is not None or not self._passes[stage] or now_s < self._free_s[stage]:
            return
        forward, batch = self._passes[stage][0]
        waits = stage > 0 if forward else stage < self._number - 1
        if waits and (forward, stage, batch) not in self._here:
            return
        self._passes[stage].popleft()
        one, inside = self._stages[stage], self._inside[stage]
        pass_s, exchange = (one.forward_s, inside.forward) if forward else (one.backward_s, inside.backward)
        left_s = pass_s - exchange.alone_s
        doing = self._doing[stage] = _Pass(forward, batch, max(left_s, 0.0), now_s)
        doing.computing = min(one.computing * pass_s / left_s, 1.0) if left_s > 0 else 0.0
        doing.exchanging = bool(exchange.links)
        if doing.exchanging:
            self._put(_PASS, stage, exchange, batch, now_s)
        else:
            self._go_on(stage, doing, now_s)

    def _go_on(self, stage: int, doing: _Pass, now_s: float) -> None:
        """A pass goes on with what follows its exchanges."""
        doing.exchanging, doing.moved_s = False, now_s
        doing.number = self._at(now_s + doing.left_s, _ENDS, stage, int(doing.forward), doing.batch)
        self._crowd(now_s)

    def _crowd(self, now_s: float) -> None:
        """New ends of all passes, where stages share processors: what they compute takes longer the more of them do."""
        if self._crowding is None:
            return
        computing = [
            (stage, doing, crowding)
            for stage, (doing, crowding) in enumerate(zip(self._doing, self._crowding, strict=True))
            if doing is not None and not doing.exchanging
        ]
        wanted = sum(crowding * doing.computing for _, doing, crowding in computing)
        for stage, doing, crowding in computing:
            others = wanted - crowding * doing.computing + crowding
            slower = 1 + doing.computing * (max(1.0, others) / max(1.0, crowding) - 1)
            doing.left_s -= max(now_s - doing.moved_s, 0.0) / doing.slower
            doing.moved_s, doing.slower = max(now_s, doing.moved_s), slower
            ends_s = doing.moved_s + max(doing.left_s, 0.0) * slower
            doing.number = self._at(ends_s, _ENDS, stage, int(doing.forward), doing.batch)

    def _send(self, of: int, stage: int, now_s: float) -> None:
        """The next micro-batch that waits for a way sets out, if the way is free."""
        transfer = self._transfers[of, stage]
        if transfer.batch is None and transfer.waiting:
            self._put(of, stage, transfer.way, transfer.waiting.popleft(), now_s)

    def _share(self, way: Way, now_s: float, also: tuple[int, int] | None = None) -> None:
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

    def _held_s(self, mine: tuple[int, int], link: int, seconds: float, messages: int) -> float:
        """How long a way's whole transfer takes on a link beside what else is on it: others take no more than an even share for
        each message, nor more than their own other links let through."""
        others = [
            self._transfers[key].way for key in self._on_link[link] if key != mine and self._transfers[key].batch is not None
        ]
        demands = sorted(wanted for way in others if (wanted := _wanted(way, link)) is not None)
        if not demands:
            return seconds
        free = 1.0
        left = messages + sum(number for _, number in demands)
        for each, number in demands:
            if each >= free / left:
                break
            free, left = free - each * number, left - number
        return seconds * left / (messages * free)


def _awaited_s(one: PassTimes) -> float:
    """For copies that set out when the step begins, in a stage that waits for another: each layer waits for its own, and they
    come one layer after the other."""
    return max(one.early_s - one.forward_s * (1 - 1 / one.layers), one.early_s / one.layers)


def _wanted(way: Way, link: int) -> tuple[float, int] | None:
    """Share of a link that each message of a way would take if that link had room; and how many there are. None without any."""
    own, messages = next(((seconds, number) for other, seconds, number in way.links if other == link), (0.0, 0))
    if not messages:
        return None
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
