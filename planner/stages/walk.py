"""A pipeline's step walked through event by event: passes, what they exchange, and what travels from stage to stage.

All that crosses links is on one of its *ways*: gradients back from each stage, activations forth from it, and what it exchanges
inside, in its forwards and its backwards. What is on links at a time shares them evenly by messages, but for what the other links
of one leave over. Micro-batches go in order everywhere, so that counts say which have come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.compiled import compiled, told_of_compiling
from hybridep.pipeline import order_of_passes
from hybridep.placement import IntArray
from hybridep.traffic import FloatArray
from planner.constraints import BoolArray
from planner.staggered import PassTimes

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


class StageLinks(NamedTuple):
    """What a stage exchanges between its sites, over the links of the whole cluster."""

    forward: Way = NOTHING
    """All of a forward pass."""
    backward: Way = NOTHING
    """All of a backward pass."""
    once: Links = ()
    """All that a step exchanges beside its passes."""


class Ways(NamedTuple):
    """All ways as arrays: for each stage, gradients back, then activations forth, then what its backwards exchange, and its
    forwards."""

    latency_s: FloatArray
    least_s: FloatArray
    first: IntArray
    """[ways + 1]: of the entries, one for each link that a way crosses."""
    way: IntArray
    """[entries], as the next four."""
    link: IntArray
    held_s: FloatArray
    messages: IntArray
    wanted: FloatArray
    """Share of the link that each message would take if the link had room."""
    first_on_link: IntArray
    """[links + 1]: of the entries by link."""
    on_link: IntArray
    """[entries]: their numbers, link by link."""


class Passes(NamedTuple):
    """What stages compute; of two kinds, backwards (0) and forwards (1)."""

    kind: IntArray
    """[stages, 2 x micro-batches]: of each pass, in order."""
    follows_s: FloatArray
    """[2, stages]: what follows the exchange."""
    computing: FloatArray
    """[2, stages]: share of that in which ranks compute."""
    crowding: FloatArray
    """[stages]: ranks as a share of the processors that all ranks share; of length 0 where each has its own."""
    free_s: FloatArray
    """[stages]: when each can begin; in the end, when its last pass has ended."""


class _State(NamedTuple):
    begun: IntArray
    """[stages]: passes that have begun."""
    begun_of: IntArray
    """[2, stages]: those of each kind."""
    left_s: FloatArray
    """[stages]: seconds until the end of what is computed if no other stage computed, at ``since_s``."""
    since_s: FloatArray
    slower: FloatArray
    """[stages]: how many times as long it takes at present."""
    ends_s: FloatArray
    """[stages]: when it ends; infinite where nothing is computed."""
    done: IntArray
    """[ways]: micro-batches that may leave, and those of them that have set out, have left the links, and have arrived."""
    sent: IntArray
    left: IntArray
    arrived: IntArray
    arrives_s: FloatArray
    """[ways, micro-batches + 1]: when each that has left arrives; infinite for the others."""
    leaves_s: FloatArray
    """[ways]: when what is on the links has left them; infinite where nothing is."""
    share: FloatArray
    """[ways]: how much of its bytes has not left, at ``moved_s``."""
    rate: FloatArray
    moved_s: FloatArray
    marked: BoolArray
    """[ways]: for a look at what shares links."""
    demands: FloatArray
    """[ways]: what others want of a link."""
    numbers: IntArray
    """[ways]: their messages."""


COMPILING_S = 8.0
"""About what compiling takes once on a machine."""


def prepare(report: Callable[[str, float], None] | None = None) -> None:
    """Compiles the walk, which shall not count as time of a search. ``report`` is told ("compiling", ``COMPILING_S``) unless it
    has been done before."""
    with told_of_compiling(report, COMPILING_S):
        walked_s(1, 1, [PassTimes(0.0, 1.0, 1.0, 0.0, 0.0)], [], [])


def walked_s(
    micro_batches: int,
    ahead: int,
    stages: Sequence[PassTimes],
    forth: Sequence[Way],
    back: Sequence[Way],
    inside: Sequence[StageLinks] | None = None,
    crowding: Sequence[float] | None = None,
) -> float:
    """Seconds until the last stage is done. ``forth`` and ``back``, [stages - 1]: each micro-batch's way from a stage to the next
    and back; ``inside``: what each exchanges; ``crowding``: ranks of each as a share of the processors that all share, None where
    each rank has its own."""
    number, inside = len(stages), inside or [StageLinks()] * len(stages)
    backward, forward = [one.backward for one in inside], [one.forward for one in inside]
    whole_s = np.array([[one.backward_s for one in stages], [one.forward_s for one in stages]])
    follows_s = whole_s - [[one.alone_s for one in backward], [one.alone_s for one in forward]]
    computed_s = whole_s * [one.computing for one in stages]
    orders = [order_of_passes(stage, number, micro_batches, ahead) for stage in range(number)]
    passes = Passes(
        kind=np.array([[is_forward for is_forward, _ in order] for order in orders], dtype=np.int64),
        follows_s=np.maximum(follows_s, 0.0),
        computing=np.minimum(np.divide(computed_s, follows_s, out=np.zeros((2, number)), where=follows_s > 0), 1.0),
        crowding=np.array(crowding or [], dtype=np.float64),
        free_s=np.array([_awaited_s(one) if stage else one.gather_s for stage, one in enumerate(stages)]),
    )
    ways = [NOTHING, *back, *forth, NOTHING, *backward, *forward]
    _walk(_as_arrays(ways), passes, _begun(number, micro_batches))
    after_s = [(one.late_s if stage and micro_batches > 1 else one.return_s) + one.after_s for stage, one in enumerate(stages)]
    return float((passes.free_s + after_s).max())


def _awaited_s(one: PassTimes) -> float:
    """For copies that set out when the step begins, in a stage that waits for another: each layer waits for its own, and they
    come one layer after the other."""
    return max(one.early_s - one.forward_s * (1 - 1 / one.layers), one.early_s / one.layers)


def _as_arrays(ways: Sequence[Way]) -> Ways:
    entries = [(number, *one) for number, way in enumerate(ways) for one in way.links]
    _, link = np.unique(np.array([one[1] for one in entries], dtype=np.int64), return_inverse=True)
    return Ways(
        latency_s=np.array([way.latency_s for way in ways]),
        least_s=np.array([way.least_s for way in ways]),
        first=np.cumsum([0, *(len(way.links) for way in ways)]),
        way=np.array([one[0] for one in entries], dtype=np.int64),
        link=link,
        held_s=np.array([one[2] for one in entries], dtype=np.float64),
        messages=np.array([one[3] for one in entries], dtype=np.int64),
        wanted=np.array([wanted for way in ways for wanted in _wanted(way)], dtype=np.float64),
        first_on_link=np.cumsum([0, *np.bincount(link)]),
        on_link=np.argsort(link, kind="stable"),
    )


def _wanted(way: Way) -> list[float]:
    """[its links]: share of each that a message would take if that had room: no more than its other links let through."""
    alone_s = way.alone_s
    # Where one link holds all up, its own time is no other's.
    return [(held_s / alone_s if held_s < alone_s else 1.0) / messages for _, held_s, messages in way.links]


def _begun(stages: int, micro_batches: int) -> _State:
    ways = 4 * stages
    return _State(
        begun=np.zeros(stages, dtype=np.int64),
        begun_of=np.zeros((2, stages), dtype=np.int64),
        left_s=np.zeros(stages),
        since_s=np.zeros(stages),
        slower=np.ones(stages),
        ends_s=np.full(stages, np.inf),
        done=np.zeros(ways, dtype=np.int64),
        sent=np.zeros(ways, dtype=np.int64),
        left=np.zeros(ways, dtype=np.int64),
        arrived=np.zeros(ways, dtype=np.int64),
        arrives_s=np.full((ways, micro_batches + 1), np.inf),
        leaves_s=np.full(ways, np.inf),
        share=np.zeros(ways),
        rate=np.zeros(ways),
        moved_s=np.zeros(ways),
        marked=np.zeros(ways, dtype=np.bool_),
        demands=np.zeros(ways),
        numbers=np.zeros(ways, dtype=np.int64),
    )


@compiled
def _held_s(ways: Ways, state: _State, entry: int) -> float:
    """How long a way's whole transfer takes on a link beside what else is on it: others take no more than an even share for
    each message, nor more than their own other links let through."""
    link, others, left = ways.link[entry], 0, ways.messages[entry]
    for place in range(ways.first_on_link[link], ways.first_on_link[link + 1]):
        other = ways.on_link[place]
        if other != entry and state.leaves_s[ways.way[other]] < np.inf:
            at = others
            # Smallest first.
            while at > 0 and state.demands[at - 1] > ways.wanted[other]:
                state.demands[at], state.numbers[at] = state.demands[at - 1], state.numbers[at - 1]
                at -= 1
            state.demands[at], state.numbers[at] = ways.wanted[other], ways.messages[other]
            others, left = others + 1, left + ways.messages[other]
    free = 1.0
    for at in range(others):
        if state.demands[at] >= free / left:
            break
        free, left = free - state.demands[at] * state.numbers[at], left - state.numbers[at]
    return float(ways.held_s[entry] * left / (ways.messages[entry] * free))


@compiled
def _renew(ways: Ways, state: _State, way: int, now_s: float) -> None:
    """A new rate for what is on one way."""
    state.share[way] = max(state.share[way] - state.rate[way] * (now_s - state.moved_s[way]), 0.0)
    state.moved_s[way] = now_s
    taken_s = ways.least_s[way]
    for entry in range(ways.first[way], ways.first[way + 1]):
        taken_s = max(taken_s, _held_s(ways, state, entry))
    state.rate[way] = 1 / taken_s if taken_s else 0.0
    state.leaves_s[way] = now_s + state.share[way] * taken_s


@compiled
def _share(ways: Ways, state: _State, way: int, now_s: float) -> None:
    """New rates for what is on a way's links."""
    for again in (False, True):
        for entry in range(ways.first[way], ways.first[way + 1]):
            link = ways.link[entry]
            for place in range(ways.first_on_link[link], ways.first_on_link[link + 1]):
                other = ways.way[ways.on_link[place]]
                if again and state.marked[other]:
                    state.marked[other] = False
                    _renew(ways, state, other, now_s)
                elif not again and state.leaves_s[other] < np.inf:
                    state.marked[other] = True


@compiled
def _put(ways: Ways, state: _State, way: int, now_s: float) -> None:
    """Bytes begin to leave over a way's links."""
    state.share[way], state.rate[way], state.moved_s[way], state.leaves_s[way] = 1.0, 0.0, now_s, now_s
    if ways.first[way] == ways.first[way + 1]:
        _renew(ways, state, way, now_s)
    else:
        _share(ways, state, way, now_s)


@compiled
def _send(ways: Ways, state: _State, way: int, now_s: float) -> None:
    """The next micro-batch that waits for a way sets out, if the way is free."""
    if state.leaves_s[way] == np.inf and state.sent[way] < state.done[way]:
        state.sent[way] += 1
        _put(ways, state, way, now_s)


@compiled
def _crowd(passes: Passes, state: _State, now_s: float) -> None:
    """New ends of all passes, where stages share processors: what they compute takes longer the more of them do."""
    wanted = 0.0
    for stage in range(len(passes.crowding)):
        if state.ends_s[stage] < np.inf and state.begun[stage]:
            wanted += passes.crowding[stage] * passes.computing[passes.kind[stage, state.begun[stage] - 1], stage]
    for stage in range(len(passes.crowding)):
        if state.ends_s[stage] < np.inf and state.begun[stage]:
            crowding, computing = passes.crowding[stage], passes.computing[passes.kind[stage, state.begun[stage] - 1], stage]
            others = wanted - crowding * computing + crowding
            state.left_s[stage] -= max(now_s - state.since_s[stage], 0.0) / state.slower[stage]
            state.since_s[stage] = max(now_s, state.since_s[stage])
            state.slower[stage] = 1 + computing * (max(1.0, others) / max(1.0, crowding) - 1)
            state.ends_s[stage] = state.since_s[stage] + max(state.left_s[stage], 0.0) * state.slower[stage]


@compiled
def _compute(passes: Passes, state: _State, stage: int, now_s: float) -> None:
    """A pass goes on with what follows its exchanges."""
    state.left_s[stage] = passes.follows_s[passes.kind[stage, state.begun[stage] - 1], stage]
    state.since_s[stage], state.slower[stage] = now_s, 1.0
    state.ends_s[stage] = now_s + state.left_s[stage]
    _crowd(passes, state, now_s)


@compiled
def _begin(ways: Ways, passes: Passes, state: _State, stage: int, now_s: float) -> None:
    """The stage's next pass, if it can."""
    stages, number = passes.kind.shape[0], state.begun[stage]
    exchanging = min(state.leaves_s[2 * stages + stage], state.leaves_s[3 * stages + stage]) < np.inf
    if exchanging or state.ends_s[stage] < np.inf or number == passes.kind.shape[1]:
        return
    kind = passes.kind[stage, number]
    batch = state.begun_of[kind, stage]
    if kind == 1 and stage > 0 and state.arrived[stages + stage - 1] <= batch:
        return
    if kind == 0 and stage < stages - 1 and state.arrived[stage + 1] <= batch:
        return
    state.begun[stage] += 1
    state.begun_of[kind, stage] += 1
    exchange = (2 + kind) * stages + stage
    if ways.first[exchange] < ways.first[exchange + 1]:
        _put(ways, state, exchange, now_s)
    else:
        _compute(passes, state, stage, now_s)


@compiled
def _end(ways: Ways, passes: Passes, state: _State, stage: int, now_s: float) -> None:
    """A pass ends, or what a stage waits for at first has come."""
    state.ends_s[stage] = np.inf
    passes.free_s[stage] = now_s
    if state.begun[stage]:
        stages, kind = passes.kind.shape[0], passes.kind[stage, state.begun[stage] - 1]
        _crowd(passes, state, now_s)
        if stage != (stages - 1 if kind == 1 else 0):
            state.done[kind * stages + stage] += 1
            _send(ways, state, kind * stages + stage, now_s)
    _begin(ways, passes, state, stage, now_s)


@compiled
def _leave(ways: Ways, passes: Passes, state: _State, way: int, now_s: float) -> None:
    """What was on a way's links has left them."""
    stages = passes.kind.shape[0]
    state.leaves_s[way] = np.inf
    _share(ways, state, way, now_s)
    if way >= 2 * stages:
        _compute(passes, state, way % stages, now_s)
    else:
        state.arrives_s[way, state.left[way]] = now_s + ways.latency_s[way]
        state.left[way] += 1
        _send(ways, state, way, now_s)


@compiled
def _walk(ways: Ways, passes: Passes, state: _State) -> None:
    """One event after the other, until nothing is left to happen."""
    stages = passes.kind.shape[0]
    for stage in range(stages):
        state.ends_s[stage] = passes.free_s[stage]
    while True:
        stage, way, coming = int(state.ends_s.argmin()), int(state.leaves_s.argmin()), 0
        for one in range(1, 2 * stages):
            if state.arrives_s[one, state.arrived[one]] < state.arrives_s[coming, state.arrived[coming]]:
                coming = one
        ends_s, leaves_s, arrives_s = state.ends_s[stage], state.leaves_s[way], state.arrives_s[coming, state.arrived[coming]]
        now_s = min(ends_s, leaves_s, arrives_s)
        if now_s == np.inf:
            return
        if now_s == ends_s:
            _end(ways, passes, state, stage, now_s)
        elif now_s == leaves_s:
            _leave(ways, passes, state, way, now_s)
        else:
            state.arrived[coming] += 1
            # Back to the stage before, or forth to the next.
            _begin(ways, passes, state, coming - 1 if coming < stages else coming - stages + 1, now_s)
