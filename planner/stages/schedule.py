"""How long a step of a pipeline plan is expected to take: its stages' passes and what travels between them, walked through in order.

Each stage by itself takes what ``planner.staggered`` expects of its passes. Between stages every link is a queue: a micro-batch's
transfer begins when it is made and all its outer links are free of those before it, holds each link for as long as its bytes take
there, and is over when the longest of them is done and its latency has passed. Inside a stage nothing is delayed by what passes
between stages, which counts in the pipeline's favour where a stage has several sites.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hybridep.pipeline import PipelinePlan, Ways, order_of_passes
from planner.exchange import Network
from planner.staggered import PassTimes, crossed


class Way(NamedTuple):
    """One micro-batch's transfer from a stage to another."""

    latency_s: float
    links: tuple[tuple[int, float], ...]
    """Outer links and the seconds for which it holds each."""
    least_s: float
    """Whatever else: links inside sites, or windows."""

    @property
    def alone_s(self) -> float:
        """Until it is over, with all links to itself and without its latency."""
        return max(self.least_s, *(seconds for _, seconds in self.links))


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
    forth, back = ways_of(plan)
    work_s = max(one.busy_s(plan.micro_batches) for one in stages)
    without_s = max(_walk(plan, stages, none, none), work_s)
    return PipelineTimes(
        step_s=max(_walk(plan, stages, forth, back), without_s), work_s=work_s, bubble_s=without_s - work_s
    )


def ways_of(plan: PipelinePlan) -> tuple[list[Way], list[Way]]:
    """From each stage to the next, and back."""
    network = Network(cluster=plan.cluster, streams=plan.schedule.streams)
    between = [plan.ways(stage) for stage in range(len(plan.stages) - 1)]
    return [_way(plan, network, one, down=True) for one in between], [_way(plan, network, one, down=False) for one in between]


def _way(plan: PipelinePlan, network: Network, ways: Ways, *, down: bool) -> Way:
    cluster = plan.cluster
    source, destination = (ways.source, ways.destination) if down else (ways.destination, ways.source)
    size_bytes = ways.number.astype(np.float64) * plan.sequence_bytes
    load_bytes = np.zeros(len(cluster.link_table))
    for link, transfer, share in crossed(cluster, 0, source, destination):
        np.add.at(load_bytes, link, size_bytes[transfer] * share)
    held_s = load_bytes / network.bandwidths_bytes_per_s
    sites = source // (cluster.num_gpus // cluster.sizes[0]), destination // (cluster.num_gpus // cluster.sizes[0])
    per_byte = network.window_s_per_byte[0]
    windows_s = size_bytes * (per_byte[sites] if per_byte.ndim else float(per_byte))
    outer = np.flatnonzero(held_s)
    is_outer = (outer < 2 * cluster.sizes[0]) | (outer >= cluster.pair_links.start)
    inner_s = held_s[outer[~is_outer]]
    latency_s = cluster.site_latency_s[sites].max() if cluster.links else cluster.levels[0].latency
    return Way(
        latency_s=float(latency_s),
        links=tuple((int(link), float(held_s[link])) for link in outer[is_outer]),
        least_s=float(max(windows_s.max(), inner_s.max(initial=0.0))),
    )


def _walk(plan: PipelinePlan, stages: Sequence[PassTimes], forth: Sequence[Way], back: Sequence[Way]) -> float:
    """When the last stage is done."""
    number, batches = len(stages), plan.micro_batches
    passes = [list(order_of_passes(stage, number, batches, plan.ahead))[::-1] for stage in range(number)]
    free_s = [one.gather_s for one in stages]
    link_free_s: dict[int, float] = {}
    sent_s = [[0.0, 0.0] for _ in stages]
    arrived: dict[tuple[bool, int, int], float] = {}
    queue: list[tuple[float, int]] = []

    def queue_next(stage: int) -> None:
        """The stage's next pass, once it is known when it can begin."""
        if not passes[stage]:
            return
        forward, batch = passes[stage][-1]
        waits = stage > 0 if forward else stage < number - 1
        if waits and (forward, stage, batch) not in arrived:
            return
        heapq.heappush(queue, (max(free_s[stage], arrived.get((forward, stage, batch), 0.0)), stage))

    for stage in range(number):
        queue_next(stage)
    waiting = [not any(stage == one for _, one in queue) for stage in range(number)]
    while queue:
        begin_s, stage = heapq.heappop(queue)
        forward, batch = passes[stage].pop()
        free_s[stage] = end_s = begin_s + (stages[stage].forward_s if forward else stages[stage].backward_s)
        other = stage + 1 if forward else stage - 1
        if 0 <= other < number:
            way = forth[stage] if forward else back[other]
            start_s = max(end_s, sent_s[stage][forward], *(link_free_s.get(link, 0.0) for link, _ in way.links), 0.0)
            for link, seconds in way.links:
                link_free_s[link] = start_s + seconds
            sent_s[stage][forward] = start_s
            arrived[forward, other, batch] = start_s + (way.alone_s if way.links else way.least_s) + way.latency_s
            if waiting[other] and passes[other] and passes[other][-1] == (forward, batch):
                waiting[other] = False
                queue_next(other)
        before = len(queue)
        queue_next(stage)
        waiting[stage] = len(queue) == before
    return max(free + one.return_s + one.after_s for free, one in zip(free_s, stages, strict=True))


def balanced_layers(seconds_per_layer: Sequence[float], extra_s: Sequence[float], layers: int, least: Sequence[int]) -> list[int]:
    """So many layers for each stage that the slowest is as fast as can be: ``seconds_per_layer`` and what it takes besides for one
    micro-batch, and how many it must have ``least``. Raises ValueError where there are too few."""
    found = list(least)
    if sum(found) > layers:
        raise ValueError(f"{layers} layers for {len(found)} stages, which need {sum(found)}")
    for _ in range(layers - sum(found)):
        after = [extra + (have + 1) * each for have, each, extra in zip(found, seconds_per_layer, extra_s, strict=True)]
        found[int(np.argmin(after))] += 1
    return found


def steady_s(plan: PipelinePlan, forth: Sequence[Way], back: Sequence[Way]) -> float:
    """Seconds that the busiest link is held for one micro-batch on its way through all stages."""
    held: dict[int, float] = {}
    for way in (*forth, *back):
        for link, seconds in way.links:
            held[link] = held.get(link, 0.0) + seconds
    least = max((way.least_s for way in (*forth, *back)), default=0.0)
    return max([least, *held.values()])


def fill_s(stages: Sequence[PassTimes], forth: Sequence[Way], back: Sequence[Way]) -> float:
    """What one micro-batch takes through all stages and back."""
    ways = sum(way.alone_s + way.latency_s if way.links else 0.0 for way in (*forth, *back))
    return ways + sum(one.forward_s + one.backward_s for one in stages)


def neighbours(order: Sequence[int]) -> list[tuple[int, int]]:
    """Stages that follow each other."""
    return list(pairwise(order))
