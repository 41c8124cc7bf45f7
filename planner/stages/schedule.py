"""How long a step of a pipeline plan is expected to take: its stages' passes and what travels between them, walked through.

Each stage by itself takes what ``planner.staggered`` expects of its passes: first all that it exchanges between its sites, then
the rest. Between stages each way carries one micro-batch after the other. What crosses one link at the same time, on its way to
another stage or inside one, once a step or in every pass, shares it, evenly but for what the other links of one leave over. Sites
that exchange no tokens with others of their stage begin their passes by themselves. Stages whose ranks share processors slow each
other down while they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.codecs import Speed
from hybridep.pipeline import PipelinePlan, Ways, forwards_ahead
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.exchange import ExchangeTimes
from planner.stages.walk import NOTHING, Links, Sent, StageLinks, Way, walked_s
from planner.staggered import Between, PassTimes, crossed

_MOST_LANES = 128
"""Of all stages together; where there were more, all sites of a stage begin passes together, since walks would take long."""
_WALKED, _LAST = 8, 2
"""Micro-batches for each stage that are walked through at least, or twice as many as are in flight; and those of them of which
further ones have the pace, in whole rounds: where stages wait for long ways, as many as are in flight come at a time."""
_ROUNDING = 1e-12
"""Share of a step that is none."""


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of one step; the three parts add up to it. Each is found when it is asked for."""

    plan: PipelinePlan
    stages: Sequence[PassTimes]

    @cached_property
    def step_s(self) -> float:
        """Seconds until the last stage is done."""
        return max(self._walked_s(*self._ways), self.work_s, self.busiest_link_s)

    @property
    def busiest_link_s(self) -> float:
        """What the busiest link between sites carries in a step."""
        return busiest_link_s(self.plan.micro_batches, *self._ways, self._inside)

    @property
    def work_s(self) -> float:
        """The busiest stage's own passes, copies, reductions and optimizer."""
        return max(one.busy_s(self.plan.micro_batches) for one in self.stages)

    @property
    def busiest_stage(self) -> int:
        """Number of the stage that ``work_s`` is of."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].busy_s(self.plan.micro_batches))

    @cached_property
    def bubble_s(self) -> float:
        """What stages that wait for each other add to ``work_s``."""
        forth, back = ([[Sent(NOTHING, one.to) for one in sent] for sent in ways] for ways in self._ways)
        seconds = min(max(self._walked_s(forth, back), self.work_s), self.step_s) - self.work_s
        return seconds if seconds > _ROUNDING * self.step_s else 0.0

    @property
    def activations_s(self) -> float:
        """What the ways between stages add to ``work_s`` and ``bubble_s``."""
        return self.step_s - self.work_s - self.bubble_s

    @property
    def busiest_sites(self) -> set[int]:
        """Numbers of the sites at the link that is busy longest, or in the stage that is, if that is longer; none for a trunk."""
        cluster, held_s = self.plan.cluster, _held_s(self.plan.micro_batches, *self._ways, self._inside)
        link = max(held_s, key=lambda link: (held_s[link], -link), default=-1)
        if held_s.get(link, 0.0) < self.work_s:
            return set((self.plan.ranks[self.busiest_stage] // cluster.ranks_per_site).tolist())
        if link < cluster.pair_links.start:
            return {link // 2}
        if link >= cluster.pair_links.stop:
            return set()
        source, place = divmod(link - cluster.pair_links.start, cluster.sizes[0] - 1)
        return {source, place + (place >= source)}

    @cached_property
    def _ways(self) -> tuple[list[list[Sent]], list[list[Sent]]]:
        return ways_of(self.plan, self._inside)

    @cached_property
    def _inside(self) -> list[StageLinks]:
        return stage_links(self.plan, self.stages)

    def _walked_s(self, forth: Sequence[Sequence[Sent]], back: Sequence[Sequence[Sent]]) -> float:
        return paced_s(self.plan.micro_batches, self.plan.ahead, self.stages, forth, back, self._inside, _crowding(self.plan))


def least_step_s(plan: PipelinePlan, stages: Sequence[PassTimes]) -> float:
    """Seconds below which no walk ends: the busiest stage's, or the busiest link's."""
    inside = stage_links(plan, stages)
    busiest_s = busiest_link_s(plan.micro_batches, *ways_of(plan, inside), inside)
    return max(busiest_s, *(one.busy_s(plan.micro_batches) for one in stages))


def busiest_link_s(
    micro_batches: int, forth: Sequence[Sequence[Sent]], back: Sequence[Sequence[Sent]], inside: Sequence[StageLinks]
) -> float:
    """Seconds that the busiest link between sites takes for what it carries in a step, inside stages and from stage to stage."""
    held_s = _held_s(micro_batches, forth, back, inside)
    ways = (one.way for sent in (*forth, *back) for one in sent)
    return max([0.0, *held_s.values(), *(micro_batches * way.least_s for way in ways)])


def _held_s(
    micro_batches: int, forth: Sequence[Sequence[Sent]], back: Sequence[Sequence[Sent]], inside: Sequence[StageLinks]
) -> dict[int, float]:
    """Number of a link between sites -> seconds for which a step holds it."""
    held_s: dict[int, float] = {}

    def add(links: Iterable[tuple[int, float, int]], times: int) -> None:
        for link, seconds, _ in links:
            held_s[link] = held_s.get(link, 0.0) + times * seconds

    for sent in (*forth, *back):
        for passed in sent:
            add(passed.way.links, micro_batches)
    for one in inside:
        for way in one.every:
            add(way.links, 1)
        for way in (one.forward, one.backward):
            add(way.links, micro_batches)
    return held_s


def lanes_of(sites: Sequence[IntArray], inside: Sequence[StageLinks], most: int = _MOST_LANES) -> list[IntArray]:
    """[stages], each [its sites]: the lane that each of a stage's ``sites`` is in, from 0 on; one for all sites of a stage where
    there were more than ``most`` in all."""
    apart = [not (one.forward.links or one.backward.links) for one in inside]
    if sum(len(own) if alone else 1 for own, alone in zip(sites, apart, strict=True)) > most:
        apart = [False] * len(apart)
    return [np.arange(len(own)) * alone for own, alone in zip(sites, apart, strict=True)]


def ways_of(plan: PipelinePlan, inside: Sequence[StageLinks]) -> tuple[list[list[Sent]], list[list[Sent]]]:
    """[stages - 1] each: what the lanes of each stage pass to the next with a micro-batch, and what those pass back."""
    cluster, network = plan.cluster, ExchangeTimes(cluster=plan.cluster, streams=plan.schedule.streams)
    sites, lane = stage_sites(plan), np.zeros(plan.cluster.sizes[0], dtype=np.int64)
    for own, places in zip(sites, lanes_of(sites, inside), strict=True):
        lane[own] = places
    forth, back = list[list[Sent]](), list[list[Sent]]()
    for stage in range(len(plan.stages) - 1):
        ways = plan.ways(stage)
        lanes = [lane[ends // cluster.ranks_per_site] for ends in (ways.source, ways.destination)]
        for sent, (own, other), down in ((forth, lanes, True), (back, lanes[::-1], False)):
            every = [(own == number, other) for number in range(int(own.max()) + 1)]
            sent.append([_sent(plan, network, ways, mine, other, down=down) for mine, other in every])
    return forth, back


def _sent(plan: PipelinePlan, network: ExchangeTimes, ways: Ways, mine: BoolArray, other: IntArray, *, down: bool) -> Sent:
    """``mine``: [ways] whether one is the lane's; ``other``: the lane where it goes."""
    cluster = plan.cluster
    source, destination = ways.source[mine], ways.destination[mine]
    if not down:
        source, destination = destination, source
    size_bytes = ways.number[mine].astype(np.float64) * plan.sequence_bytes
    per_byte = network.window_s_per_byte[0]
    sites = source // cluster.ranks_per_site, destination // cluster.ranks_per_site
    windows_s = size_bytes * (per_byte[sites] if per_byte.ndim else float(per_byte))
    links, inside_s = links_of(network, source, destination, size_bytes)
    further_s = (int(np.bincount(source).max()) - 1) * cluster.gpu.message_overhead
    latency_s = float(cluster.site_latency_s[sites].max()) + further_s
    return Sent(Way(latency_s, links, float(max(windows_s.max(), inside_s))), tuple(np.unique(other[mine]).tolist()))


def links_of(
    network: ExchangeTimes, source: IntArray, destination: IntArray, size_bytes: FloatArray, each: int = 1
) -> tuple[Links, float]:
    """Links between sites that transfers between ranks cross, [n] of them, and seconds for which all keep the busiest of the
    other links busy. ``each``: messages that one of them stands for."""
    cluster = network.cluster
    load_bytes, messages = np.zeros(len(cluster.link_table)), np.zeros(len(cluster.link_table), dtype=np.int64)
    for link, transfer, share in crossed(cluster, 0, source, destination):
        np.add.at(load_bytes, link, size_bytes[transfer] * share)
        np.add.at(messages, link, each)
    held_s = load_bytes / network.bandwidths_bytes_per_s
    used = np.flatnonzero(held_s)
    is_outer = cluster.outer_links[used]
    links = tuple((int(link), float(held_s[link]), int(messages[link])) for link in used[is_outer])
    return links, float(held_s[used[~is_outer]].max(initial=0.0))


def with_coding(
    speed: Speed | None, workload: Workload, sequences: Sequence[float], stages: Sequence[PassTimes]
) -> list[PassTimes]:
    """[stages], with what their passes take to decode what comes from other stages and to code what goes there: [stages] so many
    ``sequences`` of the rank that has most of a micro-batch."""
    if speed is None:
        return list(stages)
    row_bytes, found = workload.training.sequence_length * workload.combine_row_bytes, []
    for stage, (number, one) in enumerate(zip(sequences, stages, strict=True)):
        size_bytes = number * row_bytes
        before, after = (size_bytes if each else 0 for each in (stage > 0, stage < len(stages) - 1))
        forward_s = before / speed.decode + after / speed.encode
        backward_s = after / speed.decode + before / speed.encode
        passes_s = one.forward_s + one.backward_s
        computed_s = one.computing * passes_s + forward_s + backward_s
        made = one._replace(forward_s=one.forward_s + forward_s, backward_s=one.backward_s + backward_s)
        found.append(made._replace(computing=computed_s / (made.forward_s + made.backward_s)))
    return found


def stage_links(plan: PipelinePlan, stages: Sequence[PassTimes]) -> list[StageLinks]:
    """[stages]: what each exchanges between its sites."""
    every = zip(stage_sites(plan), plan.plans, stages, strict=True)
    return [links_inside(plan.cluster, own, stage.cluster, times) for own, stage, times in every]


def stage_sites(plan: PipelinePlan) -> list[IntArray]:
    """[stages]: each one's sites."""
    return [np.unique(ranks // plan.cluster.ranks_per_site) for ranks in plan.ranks]


def links_inside(cluster: Cluster, sites: IntArray, own: Cluster, times: PassTimes) -> StageLinks:
    """What a stage on some sites of the cluster, which are ``own`` by themselves, exchanges between them."""

    def way(between: Between, most_s: float) -> Way:
        # By itself what is exchanged takes no longer than all that it is part of.
        links = tuple((_in_whole(cluster, sites, own, link), held_s, many) for link, held_s, many in between.links)
        return Way(0.0, links, min(between.seconds, most_s))

    return StageLinks(
        forward=way(times.forward, times.forward_s),
        backward=way(times.backward, times.backward_s),
        gathered=way(times.gathered, times.early_s),
        returned=way(times.returned, times.late_s),
        dense=way(times.dense, times.after_s),
    )


def _in_whole(cluster: Cluster, sites: IntArray, own: Cluster, link: int) -> int:
    """The number of an outer link of a stage's cluster in that of all sites."""
    if link < own.pair_links.start:
        return int(2 * sites[link // 2] + link % 2)
    if link < own.pair_links.stop:
        source, place = divmod(link - own.pair_links.start, own.sizes[0] - 1)
        return cluster.pair_link(int(sites[source]), int(sites[place + (place >= source)]))
    trunks = [trunk.name for trunk in cluster.trunks]
    return int(cluster.pair_links.stop + trunks.index(own.trunks[link - own.pair_links.stop].name))


def paced_s(
    micro_batches: int,
    ahead: int,
    stages: Sequence[PassTimes],
    forth: Sequence[Sequence[Sent]],
    back: Sequence[Sequence[Sent]],
    inside: Sequence[StageLinks],
    crowding: Sequence[float] | None = None,
) -> float:
    """Seconds as ``planner.stages.walk`` has them, with the pace of the last micro-batches where there are many."""
    number = len(stages)
    in_flight = 1 + forwards_ahead(0, number, micro_batches, ahead)
    more = max(_WALKED * number, 2 * in_flight)
    more += (micro_batches - more) % in_flight
    if micro_batches <= more:
        return walked_s(micro_batches, ahead, stages, forth, back, inside, crowding)
    last = in_flight * ceil(_LAST * number / in_flight)
    few_s, more_s = (walked_s(each, ahead, stages, forth, back, inside, crowding) for each in (more - last, more))
    return more_s + (micro_batches - more) * (more_s - few_s) / last


def _crowding(plan: PipelinePlan) -> tuple[float, ...] | None:
    """For each stage, its ranks as a share of the processors that all ranks share; None where each has its own."""
    sharing = plan.cluster.gpu.sharing
    if sharing == 1:
        return None
    return tuple(len(ranks) * sharing / plan.cluster.num_gpus for ranks in plan.ranks)


def balanced_layers(
    seconds_per_layer: Sequence[float],
    extra_s: Sequence[float],
    layers: int,
    least: Sequence[int],
    most: Sequence[int] | None = None,
) -> list[int]:
    """So many layers for each stage that the slowest is as fast as can be: ``seconds_per_layer`` and what it takes besides for
    one micro-batch, and how many it must have ``least`` and may have at ``most``. Raises ValueError where there are too few, or
    too many."""
    found, most = list(least), most or [layers] * len(least)
    if sum(found) > layers:
        raise ValueError(f"{layers} layers for {len(found)} stages, which need {sum(found)}")
    if sum(most) < layers or any(have > may for have, may in zip(found, most, strict=True)):
        raise ValueError(f"{layers} layers for {len(found)} stages, which have room for {', '.join(map(str, most))}")
    for _ in range(layers - sum(found)):
        after = [
            extra + (have + 1) * each if have < may else inf
            for have, each, extra, may in zip(found, seconds_per_layer, extra_s, most, strict=True)
        ]
        found[int(np.argmin(after))] += 1
    return found
