"""How long a step of a pipeline plan is expected to take: its stages' passes and what travels between them, walked through.

Each stage by itself takes what ``planner.staggered`` expects of its passes: first all that it exchanges between its sites, then
the rest. Between stages each way carries one micro-batch after the other. What crosses one link at the same time, on its way to
another stage or inside one, shares it, evenly but for what the other links of one leave over. Stages whose ranks share processors
slow each other down while they compute. What comes once a step, before a stage's first pass and after its last, is taken to have
links to itself, and all sites of a stage to begin a pass together: too fast and too slow by about as much (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from hybridep.pipeline import PipelinePlan, Ways, forwards_ahead
from hybridep.placement import IntArray
from hybridep.topology import Cluster
from planner.exchange import ExchangeTimes
from planner.stages.walk import NOTHING, Links, StageLinks, Way, walked_s
from planner.staggered import Between, PassTimes, crossed

_WALKED, _LAST = 8, 2
"""Micro-batches for each stage that are walked through at least, or twice as many as are in flight; and those of them of which
further ones have the pace, in whole rounds: where stages wait for long ways, as many as are in flight come at a time."""


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

    @cached_property
    def bubble_s(self) -> float:
        """What stages that wait for each other add to ``work_s``."""
        none = [NOTHING] * (len(self.stages) - 1)
        return min(max(self._walked_s(none, none), self.work_s), self.step_s) - self.work_s

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
            stage = max(range(len(self.stages)), key=lambda stage: self.stages[stage].busy_s(self.plan.micro_batches))
            return set((self.plan.ranks[stage] // cluster.ranks_per_site).tolist())
        if link < cluster.pair_links.start:
            return {link // 2}
        if link >= cluster.pair_links.stop:
            return set()
        source, place = divmod(link - cluster.pair_links.start, cluster.sizes[0] - 1)
        return {source, place + (place >= source)}

    @cached_property
    def _ways(self) -> tuple[list[Way], list[Way]]:
        return ways_of(self.plan)

    @cached_property
    def _inside(self) -> list[StageLinks]:
        return stage_links(self.plan, self.stages)

    def _walked_s(self, forth: Sequence[Way], back: Sequence[Way]) -> float:
        return paced_s(self.plan.micro_batches, self.plan.ahead, self.stages, forth, back, self._inside, _crowding(self.plan))


def least_step_s(plan: PipelinePlan, stages: Sequence[PassTimes]) -> float:
    """Seconds below which no walk ends: the busiest stage's, or the busiest link's."""
    busiest_s = busiest_link_s(plan.micro_batches, *ways_of(plan), stage_links(plan, stages))
    return max(busiest_s, *(one.busy_s(plan.micro_batches) for one in stages))


def busiest_link_s(micro_batches: int, forth: Sequence[Way], back: Sequence[Way], inside: Sequence[StageLinks]) -> float:
    """Seconds that the busiest link between sites takes for what it carries in a step, inside stages and from stage to stage."""
    held_s = _held_s(micro_batches, forth, back, inside)
    return max([0.0, *held_s.values(), *(micro_batches * way.least_s for way in (*forth, *back))])


def _held_s(micro_batches: int, forth: Sequence[Way], back: Sequence[Way], inside: Sequence[StageLinks]) -> dict[int, float]:
    """Number of a link between sites -> seconds for which a step holds it."""
    held_s: dict[int, float] = {}

    def add(links: Iterable[tuple[int, float, int]], times: int) -> None:
        for link, seconds, _ in links:
            held_s[link] = held_s.get(link, 0.0) + times * seconds

    for way in (*forth, *back):
        add(way.links, micro_batches)
    for one in inside:
        add(one.once, 1)
        for way in (one.forward, one.backward):
            add(way.links, micro_batches)
    return held_s


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


def stage_links(plan: PipelinePlan, stages: Sequence[PassTimes]) -> list[StageLinks]:
    """[stages]: what each exchanges between its sites."""
    inside = plan.cluster.ranks_per_site
    sites = [np.unique(ranks // inside) for ranks in plan.ranks]
    every = zip(sites, plan.plans, stages, strict=True)
    return [links_inside(plan.cluster, own, stage.cluster, times) for own, stage, times in every]


def links_inside(cluster: Cluster, sites: IntArray, own: Cluster, times: PassTimes) -> StageLinks:
    """What a stage on some sites of the cluster, which are ``own`` by themselves, exchanges between them."""

    def links(between: Between) -> Links:
        return tuple((_in_whole(cluster, sites, own, link), held_s, many) for link, held_s, many in between.links)

    # By itself what is exchanged keeps a pass no longer than the pass takes.
    forward = Way(0.0, links(times.forward), min(times.forward.seconds, times.forward_s))
    backward = Way(0.0, links(times.backward), min(times.backward.seconds, times.backward_s))
    return StageLinks(forward, backward, links(times.once))


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
    forth: Sequence[Way],
    back: Sequence[Way],
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
