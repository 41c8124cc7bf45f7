"""A pipeline's step walked through event by event: passes, what they exchange, and what travels from stage to stage.

A stage's sites go through its passes in one or several *lanes*: together where they exchange tokens in every pass, else each by
itself, as soon as its own sequences are there. All that crosses links is on a *way*: gradients back from each lane, activations
forth from it, what it exchanges inside in its forwards and its backwards; and what all of a stage exchanges once a step. What is
on links at a time shares them evenly by messages, but for what the other links of one leave over. Micro-batches go in order
everywhere, so that counts say which have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.pipeline import order_of_passes
from planner.stages.events import Passes, Ways, begun, run
from planner.staggered import PassTimes

Links = tuple[tuple[int, float, int], ...]
"""Numbers of outer links, seconds for which what crosses holds each, alone, and by how many messages."""


class Way(NamedTuple):
    """One micro-batch's transfer from a stage to another, or all that a stage exchanges in a pass, or once a step."""

    latency_s: float
    links: Links
    least_s: float
    """Seconds that its bytes take at least, by links inside sites, or windows."""

    @property
    def alone_s(self) -> float:
        """Seconds until its bytes have left, alone on all links."""
        return max([self.least_s, *(seconds for _, seconds, _ in self.links)])

    def longer(self, times: float) -> Way:
        """With so many times the bytes."""
        links = tuple((link, held_s * times, messages) for link, held_s, messages in self.links)
        return Way(self.latency_s, links, self.least_s * times)


NOTHING = Way(0.0, (), 0.0)


class Sent(NamedTuple):
    """What one lane passes on with every micro-batch."""

    way: Way
    to: tuple[int, ...]
    """For whom: places among the lanes of the next stage, or of the one before."""


class StageLinks(NamedTuple):
    """What a stage exchanges between its sites, over the links of the whole cluster."""

    forward: Way = NOTHING
    """All of a forward pass."""
    backward: Way = NOTHING
    """All of a backward pass."""
    gathered: Way = NOTHING
    """In a step beside its passes: copies that stay for it, then their gradients, and dense gradients."""
    returned: Way = NOTHING
    dense: Way = NOTHING

    @property
    def every(self) -> tuple[Way, ...]:
        """What a step exchanges beside its passes."""
        return self.gathered, self.returned, self.dense


def walked_s(
    micro_batches: int,
    ahead: int,
    stages: Sequence[PassTimes],
    forth: Sequence[Sequence[Sent]],
    back: Sequence[Sequence[Sent]],
    inside: Sequence[StageLinks] | None = None,
    crowding: Sequence[float] | None = None,
) -> float:
    """Seconds until the last stage is done. ``forth`` and ``back``, [stages - 1] each: what the lanes of a stage pass to the next
    with each micro-batch, and what those of the next pass back; ``inside``: what each exchanges, only stages of one lane in their
    passes; ``crowding``: ranks of each as a share of the processors that all share, None where each rank has its own."""
    number, inside = len(stages), inside or [StageLinks()] * len(stages)
    if micro_batches == 1:
        # The gradients of copies leave before the activations' do.
        stages = [one._replace(backward_s=one.backward_s + one.return_s, return_s=0.0) for one in stages]
    lanes = [len(one) for one in forth] + [len(back[-1]) if back else 1]
    backward, forward = [one.backward for one in inside], [one.forward for one in inside]
    whole_s = np.array([[one.backward_s for one in stages], [one.forward_s for one in stages]])
    follows_s = np.maximum(whole_s - [[one.alone_s for one in backward], [one.alone_s for one in forward]], 0.0)
    computed_s = whole_s * [one.computing for one in stages]
    orders = [order_of_passes(stage, number, micro_batches, ahead) for stage in range(number)]
    # A later stage's gradients of copies leave after all its passes.
    shown_s = [one.late_s if stage and micro_batches > 1 else one.return_s for stage, one in enumerate(stages)]
    returned = [_part(one.returned, shown_s[stage], stages[stage].late_s) for stage, one in enumerate(inside)]
    targets, origins = _reached(lanes, forth, back)
    first_from, all_origins = _in_rows(origins)
    first_to, all_targets = _in_rows(targets)
    every = zip(range(number), stages, inside, follows_s[1], strict=True)
    passes = Passes(
        kind=np.array([[is_forward for is_forward, _ in order] for order in orders], dtype=np.int64),
        ahead=ahead,
        follows_s=follows_s,
        computing=np.minimum(np.divide(computed_s, follows_s, out=np.zeros((2, number)), where=follows_s > 0), 1.0),
        after_gather_s=np.array([_after_gather_s(*each) for each in every]),
        after_return_s=np.array([max(each_s - one.alone_s, 0.0) for each_s, one in zip(shown_s, returned, strict=True)]),
        after_dense_s=np.array([max(one.after_s - each.dense.alone_s, 0.0) for one, each in zip(stages, inside, strict=True)]),
        crowding=np.repeat(np.array(crowding) / lanes, lanes) if crowding else np.zeros(0),
        timed_at=np.repeat(np.maximum(np.array(crowding), 1.0), lanes) if crowding else np.zeros(0),
        stage=np.repeat(np.arange(number), lanes),
        first_from=first_from,
        origins=all_origins,
        first_to=first_to,
        targets=all_targets,
        end_s=np.zeros(number),
    )
    single = [count == 1 for count in lanes]
    exchanged = [
        way if alone else NOTHING
        for ways in (backward, forward)
        for way, alone, count in zip(ways, single, lanes, strict=True)
        for _ in range(count)
    ]
    first, last = [NOTHING] * lanes[0], [NOTHING] * lanes[-1]
    passed = [first, *([one.way for one in sent] for sent in (*back, *forth)), last]
    once = [*(one.gathered for one in inside), *returned, *(one.dense for one in inside)]
    run(_as_arrays([*passed, *([one] for one in (*exchanged, *once))]), passes, begun(np.array(lanes), micro_batches))
    return float(passes.end_s.max())


def _after_gather_s(stage: int, one: PassTimes, links: StageLinks, follows_s: float) -> float:
    """From when the last copy of a step has left until the first forward ends. In the first stage copies travel beside its
    blocks; in others they set out when the step begins, each layer waits for its own, and they come one after the other."""
    rest_s = max(one.early_s - links.gathered.alone_s, 0.0)
    return rest_s + (one.forward_s / one.layers if stage else max(follows_s + one.gather_s - one.early_s, 0.0))


def _part(way: Way, seconds: float, whole_s: float) -> Way:
    """What of a way shows, if ``seconds`` of its ``whole_s`` do."""
    share = min(seconds / whole_s, 1.0) if whole_s else 1.0
    return way.longer(share)


def _reached(
    lanes: Sequence[int], forth: Sequence[Sequence[Sent]], back: Sequence[Sequence[Sent]]
) -> tuple[list[list[int]], list[list[int]]]:
    """[2 x lanes] lanes each: to which gradients go, then activations; and from which they come."""
    first, number = np.cumsum([0, *lanes]).tolist(), sum(lanes)
    targets: list[list[int]] = [[] for _ in range(2 * number)]
    origins: list[list[int]] = [[] for _ in range(2 * number)]
    for stage, (there, here) in enumerate(zip(forth, back, strict=True)):
        for lane, one in enumerate(there, number + first[stage]):
            targets[lane] = [first[stage + 1] + to for to in one.to]
        for lane, one in enumerate(here, first[stage + 1]):
            targets[lane] = [first[stage] + to for to in one.to]
    for place, every in enumerate(targets):
        kind, lane = divmod(place, number)
        for to in every:
            origins[kind * number + to].append(lane)
    return targets, origins


def _in_rows(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """[rows + 1] the first place of each, and all one after the other."""
    return np.cumsum([0, *map(len, rows)]), np.array([one for row in rows for one in row], dtype=np.int64)


def _as_arrays(together: Sequence[Sequence[Way]]) -> Ways:
    """``together``: ways, those that are mostly used at the same time together."""
    ways = [way for some in together for way in some]
    entries = np.array([entry for way in ways for entry in way.links], dtype=np.float64).reshape(-1, 3)
    way, held_s, messages = np.repeat(np.arange(len(ways)), [len(one.links) for one in ways]), entries[:, 1], entries[:, 2]
    _, link, users = np.unique(entries[:, 0], return_inverse=True, return_counts=True)
    least_s = np.array([one.least_s for one in ways])
    wanted = _wanted(np.repeat(np.arange(len(together)), [len(some) for some in together]), way, link, held_s, least_s) / messages
    # What only one way crosses is a time that it takes at least.
    shared = users[link] > 1
    np.maximum.at(least_s, way[~shared], held_s[~shared])
    way, link = way[shared], np.unique(link[shared], return_inverse=True)[1]
    return Ways(
        latency_s=np.array([one.latency_s for one in ways]),
        least_s=least_s,
        first=np.searchsorted(way, np.arange(len(ways) + 1)),
        way=way,
        link=link,
        held_s=held_s[shared],
        messages=messages[shared].astype(np.int64),
        wanted=wanted[shared],
        first_on_link=np.cumsum([0, *np.bincount(link)]),
        on_link=np.argsort(link, kind="stable"),
    )


def _wanted(together: IntArray, way: IntArray, link: IntArray, held_s: FloatArray, least_s: FloatArray) -> FloatArray:
    """[entries]: the share of its link that all of a way would take if it had room, no more than its other links let through with
    what is on its way at the same time. ``together`` and ``least_s``: [ways], ``way``, ``link`` and ``held_s``: [entries]."""
    place = together[way] * (link.max(initial=0) + 1) + link
    own_s = np.bincount(place, weights=held_s)[place]
    longest_s, second_s = least_s.copy(), least_s.copy()
    np.maximum.at(longest_s, way, own_s)
    is_longest = own_s == longest_s[way]
    np.maximum.at(second_s, way[~is_longest], own_s[~is_longest])
    # Where one link holds all up, its own time is no limit there, or small messages would leave room to large ones.
    alone = is_longest & (np.bincount(way[is_longest], minlength=len(least_s))[way] == 1)
    others_s = np.where(alone, second_s[way], longest_s[way])
    return np.divide(held_s, others_s, out=np.ones_like(held_s), where=held_s < others_s)
