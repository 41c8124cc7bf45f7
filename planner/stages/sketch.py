"""About how long a pipeline's step takes, for searches that try many.

Each stage takes what one layer takes on its sites, times its layers; what a layer takes with other micro-batches lies on a line
in the sequences of a rank. Left out: embeddings, rounding to whole sequences between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Speed
from hybridep.pipeline import sequences_of_place, token_weights
from hybridep.plan import LayerGroup
from hybridep.shares import parts
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.exchange import ExchangeTimes
from planner.sites.grouping import Groups
from planner.stages.batches import numbers_about, unevenness
from planner.stages.order import facing
from planner.stages.schedule import busiest_link_s, lanes_of, links_of, paced_s, with_coding
from planner.stages.walk import Sent, StageLinks, Way
from planner.staggered import PassTimes


class OneLayer(NamedTuple):
    """What one layer takes on a stage's sites."""

    layers: tuple[LayerGroup, ...]
    times: PassTimes
    links: StageLinks


_MOST_LANES = 32
"""Fewer than in a costed pipeline's walk, which takes 30 ms with 60 lanes."""

_Stage = tuple[tuple[int, ...], bool]
"""A stage's sites, and whether each is a lane."""


@dataclass
class Sketches:
    """About how long the steps of pipelines of one problem take."""

    cluster: Cluster
    workload: Workload
    network: ExchangeTimes
    step_bytes: float
    """Activations of all ranks of a stage in a step."""
    speed: Speed | None
    """Of coding them; None where that takes no time."""
    one_layer: Callable[[tuple[int, ...], int, OneLayer | None], OneLayer]
    """Of sites, with a number of micro-batches: placed anew, or as in another."""
    _weights: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)
    """Sites -> how much of a micro-batch each takes, against the others."""
    _timed: dict[tuple[int, ...], list[tuple[float, OneLayer]]] = field(default_factory=dict)
    """Sites -> (sequences of a rank, what a layer takes) with two numbers of micro-batches."""
    _between: dict[tuple[_Stage, _Stage], tuple[list[Sent], list[Sent]]] = field(default_factory=dict)
    """Two stages -> what their lanes pass there and back, with all bytes of a step."""
    _known: dict[tuple[Groups, tuple[int, ...], int, int], float] = field(default_factory=dict)
    """What ``step_s`` found."""

    @cached_property
    def _together(self) -> int:
        """Sequences of a step, one rank of each site of a stage together."""
        return sequences_of_place(self.workload, self.cluster)

    def step_s(self, path: Groups, layers: tuple[int, ...], micro_batches: int, ahead: int) -> float:
        """Seconds of a step with these sites in the stages, and their layers."""
        key = path, layers, micro_batches, ahead
        if key not in self._known:
            self._known[key] = self._step_s(*key)
        return self._known[key]

    def _step_s(self, path: Groups, layers: tuple[int, ...], micro_batches: int, ahead: int) -> float:
        stages, inside = [], []
        for place, (group, number) in enumerate(zip(path, layers, strict=True)):
            one = self._one_layer(path, place, micro_batches)
            after_s = head_s(self.cluster, self.workload, group, micro_batches) if place == len(path) - 1 else 0.0
            once_s = 2 * float(self.cluster.site_latency_s[np.ix_(group, group)].max())
            stages.append(_times(one.times, number, after_s, min(once_s, one.times.after_s)))
            inside.append(StageLinks(*(way.longer(number) for way in one.links)))
        most = [self._sequences(group, micro_batches) for group in path]
        stages = with_coding(self.speed, self.workload, most, stages)
        lanes = lanes_of([np.arange(len(group)) for group in path], inside, _MOST_LANES)
        both = [self._sent(*ends) for ends in pairwise(zip(path, (bool(one.any()) for one in lanes), strict=True))]
        share = 1 / micro_batches
        forth, back = ([[Sent(one.way.longer(share), one.to) for one in ways[down]] for ways in both] for down in (0, 1))
        walked_s = paced_s(micro_batches, ahead, stages, forth, back, inside)
        busy_s = max(one.busy_s(micro_batches) for one in stages)
        return max(walked_s, busy_s, busiest_link_s(micro_batches, forth, back, inside))

    def _one_layer(self, path: Groups, place: int, micro_batches: int) -> OneLayer:
        group = path[place]
        timed = self._timed.setdefault(group, [])
        wanted = self._sequences(group, micro_batches)
        if not timed:
            timed.append((wanted, self.one_layer(group, micro_batches, None)))
        first, one = timed[0]
        if wanted == first:
            return one
        if len(timed) == 1:
            # The smallest micro-batches, or the largest where it is those.
            numbers = numbers_about(unevenness(self.workload, self.cluster, path), len(path))
            every = sorted((self._sequences(group, number), number) for number in numbers)
            second, number = every[0] if every[0][0] < first else every[-1]
            timed.append((second, self.one_layer(group, number, one) if second != first else one))
        second, other = timed[1]
        return one if second == first else _on_line(one, other, (wanted - first) / (second - first))

    def _sequences(self, group: tuple[int, ...], micro_batches: int) -> float:
        """Of the rank that has most of a micro-batch."""
        if group not in self._weights:
            [self._weights[group]] = token_weights(self.cluster, [group])
        return float(max(parts(self._together // micro_batches, self._weights[group])))

    def _sent(self, one: _Stage, other: _Stage) -> tuple[list[Sent], list[Sent]]:
        if (one, other) not in self._between:
            source, destination, part = facing(one[0], other[0], self.cluster.token_weights)
            own = np.searchsorted(sorted(one[0]), source) * one[1]
            others = np.searchsorted(sorted(other[0]), destination) * other[1]
            there = self._of_lanes(source, destination, part, own, others)
            self._between[one, other] = there, self._of_lanes(destination, source, part, others, own)
        return self._between[one, other]

    def _of_lanes(self, source: IntArray, destination: IntArray, part: FloatArray, own: IntArray, other: IntArray) -> list[Sent]:
        """What the lanes of a stage pass to another in a step, from sites to others, each its ``part``: [n] each; ``own`` and
        ``other``: these sites' lanes."""
        every = [own == lane for lane in range(int(own.max()) + 1)]
        ways = [self._way(source[mine], destination[mine], part[mine]) for mine in every]
        return [Sent(way, tuple(np.unique(other[mine]).tolist())) for way, mine in zip(ways, every, strict=True)]

    def _way(self, source: IntArray, destination: IntArray, part: FloatArray) -> Way:
        cluster, size_bytes, inside = self.cluster, part * self.step_bytes, self.cluster.ranks_per_site
        links, _ = links_of(self.network, source * inside, destination * inside, size_bytes, inside)
        per_byte = self.network.window_s_per_byte[0]
        windows_s = size_bytes / inside * (per_byte[source, destination] if per_byte.ndim else float(per_byte))
        return Way(float(cluster.site_latency_s[source, destination].max()), links, float(windows_s.max()))


def head_s(cluster: Cluster, workload: Workload, group: Sequence[int], micro_batches: int) -> float:
    """Seconds of the output projection on these sites for a micro-batch, there and back."""
    model, training = workload.model, workload.training
    tokens = training.tokens * training.micro_batches * cluster.num_gpus / micro_batches
    per_s = sum(cluster.site_gpus[site].throughput for site in group) * cluster.ranks_per_site
    return float(3 * 2 * tokens * model.vocab_size * model.hidden_size / per_s)


def _times(one: PassTimes, layers: int, head_s: float, once_s: float) -> PassTimes:
    """Of so many layers, and the output projection there and back. ``once_s``: latencies of the dense gradients' reduction."""
    return one._replace(
        gather_s=layers * one.gather_s,
        forward_s=layers * one.forward_s + head_s / 3,
        backward_s=layers * one.backward_s + head_s * 2 / 3,
        return_s=layers * one.return_s,
        after_s=once_s + layers * (one.after_s - once_s),
        layers=layers,
        early_s=layers * one.early_s,
        late_s=layers * one.late_s,
    )


def _on_line(one: OneLayer, other: OneLayer, share: float) -> OneLayer:
    """What passes take where ``one`` has a share of 0 and ``other`` of 1; what comes once a step is that of ``one``."""

    def between(first: float, second: float) -> float:
        return max(first + share * (second - first), 0.0)

    def way(first: Way, second: Way) -> Way:
        held_s = {link: seconds for link, seconds, _ in second.links}
        links = tuple((link, between(seconds, held_s.get(link, seconds)), messages) for link, seconds, messages in first.links)
        return Way(first.latency_s, links, between(first.least_s, second.least_s))

    times = one.times._replace(
        forward_s=between(one.times.forward_s, other.times.forward_s),
        backward_s=between(one.times.backward_s, other.times.backward_s),
    )
    forward, backward = way(one.links.forward, other.links.forward), way(one.links.backward, other.links.backward)
    return OneLayer(one.layers, times, one.links._replace(forward=forward, backward=backward))
