"""The events of a pipeline's step, one after the other: compiled, with all that ``planner.stages.walk`` knows in arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.compiled import compiled


class Ways(NamedTuple):
    """All ways as arrays: for each lane, gradients back, then activations forth, then what its backwards exchange, and its
    forwards; for each stage, copies, then their gradients, then dense gradients."""

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
    ahead: int
    """Micro-batches that are announced ahead of those that the next stage has begun."""
    follows_s: FloatArray
    """[2, stages]: what follows the exchange."""
    computing: FloatArray
    """[2, stages]: share of that in which ranks compute."""
    after_gather_s: FloatArray
    """[stages]: from when the last copy has left until the first forward ends, at least; in the first stage, which begins with
    the copies, all that follows the exchange."""
    after_return_s: FloatArray
    """[stages]: from when the last gradient of a copy has left until those of the dense parts set out."""
    after_dense_s: FloatArray
    """[stages]: from when these have left until the end."""
    crowding: FloatArray
    """[lanes]: ranks as a share of the processors that all ranks share; of length 0 where each has its own."""
    timed_at: FloatArray
    """[lanes]: how many times as long its passes take, as they are given, as if each rank had a processor: all of the stage's
    lanes compute then, and no others."""
    stage: IntArray
    """[lanes], stage by stage."""
    first_from: IntArray
    """[2 x lanes + 1]: of ``origins``, for gradients that come back to a lane, then for activations."""
    origins: IntArray
    """Lanes that a lane's passes wait for."""
    first_to: IntArray
    """The same for where they go."""
    targets: IntArray
    end_s: FloatArray
    """[stages]: when each is done, in the end."""


class State(NamedTuple):
    """Where the step is."""

    begun: IntArray
    """[lanes]: passes that have begun."""
    begun_of: IntArray
    """[2, lanes]: those of each kind."""
    busy: BoolArray
    """[lanes]: whether a pass has begun and not ended."""
    left_s: FloatArray
    """[lanes]: seconds until the end of what is computed if no other lane computed, at ``since_s``."""
    since_s: FloatArray
    slower: FloatArray
    """[lanes]: how many times as long it takes at present."""
    ends_s: FloatArray
    """[lanes]: when it ends; infinite where nothing is computed, or copies are awaited."""
    lanes_left: IntArray
    """[stages]: lanes that have passes left."""
    gathered_s: FloatArray
    """[stages]: when the last copy has left its links; infinite before."""
    dense_s: FloatArray
    """[stages]: when dense gradients will set out; infinite before that is known, and after."""
    done: IntArray
    """[2 x lanes]: micro-batches that may leave, and those of them that have set out, have left the links, and have arrived."""
    sent: IntArray
    left: IntArray
    arrived: IntArray
    arrives_s: FloatArray
    """[2 x lanes, micro-batches + 1]: when each that has left arrives; infinite for the others."""
    comes_s: FloatArray
    """[2 x lanes]: that of the next one."""
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


def begun(lanes: IntArray, micro_batches: int) -> State:
    """``lanes``: [stages]."""
    stages, number = len(lanes), int(lanes.sum())
    ways = 4 * number + 3 * stages
    return State(
        begun=np.zeros(number, dtype=np.int64),
        begun_of=np.zeros((2, number), dtype=np.int64),
        busy=np.zeros(number, dtype=np.bool_),
        left_s=np.zeros(number),
        since_s=np.zeros(number),
        slower=np.ones(number),
        ends_s=np.full(number, np.inf),
        lanes_left=lanes,
        gathered_s=np.full(stages, np.inf),
        dense_s=np.full(stages, np.inf),
        done=np.zeros(2 * number, dtype=np.int64),
        sent=np.zeros(2 * number, dtype=np.int64),
        left=np.zeros(2 * number, dtype=np.int64),
        arrived=np.zeros(2 * number, dtype=np.int64),
        arrives_s=np.full((2 * number, micro_batches + 1), np.inf),
        comes_s=np.full(2 * number, np.inf),
        leaves_s=np.full(ways, np.inf),
        share=np.zeros(ways),
        rate=np.zeros(ways),
        moved_s=np.zeros(ways),
        marked=np.zeros(ways, dtype=np.bool_),
        demands=np.zeros(ways),
        numbers=np.zeros(ways, dtype=np.int64),
    )


@compiled
def _held_s(ways: Ways, state: State, entry: int) -> float:
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
def _renew(ways: Ways, state: State, way: int, now_s: float) -> None:
    """A new rate for what is on one way."""
    state.share[way] = max(state.share[way] - state.rate[way] * (now_s - state.moved_s[way]), 0.0)
    state.moved_s[way] = now_s
    taken_s = ways.least_s[way]
    for entry in range(ways.first[way], ways.first[way + 1]):
        taken_s = max(taken_s, _held_s(ways, state, entry))
    state.rate[way] = 1 / taken_s if taken_s else 0.0
    state.leaves_s[way] = now_s + state.share[way] * taken_s


@compiled
def _share(ways: Ways, state: State, way: int, now_s: float) -> None:
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
def _put(ways: Ways, state: State, way: int, now_s: float) -> None:
    """Bytes begin to leave over a way's links."""
    state.share[way], state.rate[way], state.moved_s[way], state.leaves_s[way] = 1.0, 0.0, now_s, now_s
    if ways.first[way] == ways.first[way + 1]:
        _renew(ways, state, way, now_s)
    else:
        _share(ways, state, way, now_s)


@compiled
def _send(ways: Ways, passes: Passes, state: State, way: int, now_s: float) -> None:
    """The next micro-batch that waits for a way between stages sets out, if the way is free and where it goes all have begun
    what they had announced."""
    if state.leaves_s[way] < np.inf or state.sent[way] == state.done[way]:
        return
    kind, begun = way // len(passes.stage), state.sent[way] - passes.ahead
    for place in range(passes.first_to[way], passes.first_to[way + 1]):
        if state.begun_of[kind, passes.targets[place]] < begun:
            return
    state.sent[way] += 1
    _put(ways, state, way, now_s)


@compiled
def _crowd(passes: Passes, state: State, now_s: float) -> None:
    """New ends of all passes, where ranks share processors: what they compute takes longer the more of them do."""
    wanted = 0.0
    for lane in range(len(passes.crowding)):
        if state.ends_s[lane] < np.inf:
            stage = passes.stage[lane]
            wanted += passes.crowding[lane] * passes.computing[passes.kind[stage, state.begun[lane] - 1], stage]
    for lane in range(len(passes.crowding)):
        if state.ends_s[lane] < np.inf:
            stage, crowding = passes.stage[lane], passes.crowding[lane]
            computing = passes.computing[passes.kind[stage, state.begun[lane] - 1], stage]
            others = wanted - crowding * computing + crowding
            state.left_s[lane] -= max(now_s - state.since_s[lane], 0.0) / state.slower[lane]
            state.since_s[lane] = max(now_s, state.since_s[lane])
            state.slower[lane] = 1 + computing * (max(1.0, others) / passes.timed_at[lane] - 1)
            state.ends_s[lane] = state.since_s[lane] + max(state.left_s[lane], 0.0) * state.slower[lane]


@compiled
def _compute(passes: Passes, state: State, lane: int, now_s: float) -> None:
    """A pass goes on with what follows its exchanges; a first forward ends no sooner than copies allow."""
    stage, number = passes.stage[lane], state.begun[lane]
    state.since_s[lane], state.slower[lane] = now_s, 1.0
    state.left_s[lane] = passes.follows_s[passes.kind[stage, number - 1], stage]
    if number == 1:
        if state.gathered_s[stage] == np.inf:
            return
        _await(passes, state, lane, now_s)
    state.ends_s[lane] = now_s + state.left_s[lane]
    _crowd(passes, state, now_s)


@compiled
def _await(passes: Passes, state: State, lane: int, now_s: float) -> None:
    """What a first forward has left at ``now_s``, once its copies have left."""
    stage = passes.stage[lane]
    if stage == 0:
        state.left_s[lane] = passes.after_gather_s[stage]
    else:
        ends_s = max(state.since_s[lane] + state.left_s[lane], state.gathered_s[stage] + passes.after_gather_s[stage])
        state.left_s[lane] = ends_s - now_s
    state.since_s[lane] = now_s


@compiled
def _begin(ways: Ways, passes: Passes, state: State, lane: int, now_s: float) -> None:
    """The lane's next pass, if it can."""
    stage, number, lanes = passes.stage[lane], state.begun[lane], len(passes.stage)
    if state.busy[lane] or number == passes.kind.shape[1]:
        return
    if stage == 0 and state.gathered_s[stage] == np.inf:
        return
    kind = passes.kind[stage, number]
    batch = state.begun_of[kind, lane]
    way = kind * lanes + lane
    for place in range(passes.first_from[way], passes.first_from[way + 1]):
        if state.arrived[kind * lanes + passes.origins[place]] <= batch:
            return
    state.busy[lane] = True
    state.begun[lane] += 1
    state.begun_of[kind, lane] += 1
    for place in range(passes.first_from[way], passes.first_from[way + 1]):
        _send(ways, passes, state, kind * lanes + passes.origins[place], now_s)
    exchange = (2 + kind) * lanes + lane
    if ways.first[exchange] < ways.first[exchange + 1] or ways.least_s[exchange] > 0:
        _put(ways, state, exchange, now_s)
    else:
        _compute(passes, state, lane, now_s)


@compiled
def _end(ways: Ways, passes: Passes, state: State, lane: int, now_s: float) -> None:
    """A pass ends."""
    stage, lanes = passes.stage[lane], len(passes.stage)
    kind = passes.kind[stage, state.begun[lane] - 1]
    state.ends_s[lane], state.busy[lane] = np.inf, False
    _crowd(passes, state, now_s)
    way = kind * lanes + lane
    if passes.first_to[way] < passes.first_to[way + 1]:
        state.done[way] += 1
        _send(ways, passes, state, way, now_s)
    if state.begun[lane] == passes.kind.shape[1]:
        state.lanes_left[stage] -= 1
        if state.lanes_left[stage] == 0:
            _put(ways, state, 4 * lanes + len(passes.end_s) + stage, now_s)
    else:
        _begin(ways, passes, state, lane, now_s)


@compiled
def _leave(ways: Ways, passes: Passes, state: State, way: int, now_s: float) -> None:
    """What was on a way's links has left them."""
    lanes, stages = len(passes.stage), len(passes.end_s)
    state.leaves_s[way] = np.inf
    _share(ways, state, way, now_s)
    if way < 2 * lanes:
        state.arrives_s[way, state.left[way]] = now_s + ways.latency_s[way]
        state.comes_s[way] = state.arrives_s[way, state.arrived[way]]
        state.left[way] += 1
        _send(ways, passes, state, way, now_s)
        return
    if way < 4 * lanes:
        _compute(passes, state, way % lanes, now_s)
        return
    which, stage = (way - 4 * lanes) // stages, (way - 4 * lanes) % stages
    if which == 2:
        passes.end_s[stage] = now_s + passes.after_dense_s[stage]
    elif which == 1:
        state.dense_s[stage] = now_s + passes.after_return_s[stage]
    else:
        state.gathered_s[stage] = now_s
        for lane in range(lanes):
            if passes.stage[lane] == stage:
                exchanging = state.leaves_s[3 * lanes + lane] < np.inf
                if not state.busy[lane]:
                    _begin(ways, passes, state, lane, now_s)
                elif state.begun[lane] == 1 and not exchanging:
                    _await(passes, state, lane, now_s)
                    state.ends_s[lane] = now_s + state.left_s[lane]
                    _crowd(passes, state, now_s)


@compiled
def run(ways: Ways, passes: Passes, state: State) -> None:
    """One event after the other, until nothing is left to happen."""
    lanes, stages = len(passes.stage), len(passes.end_s)
    for stage in range(stages):
        _put(ways, state, 4 * lanes + stage, 0.0)
    while True:
        lane, way, dense = int(state.ends_s.argmin()), int(state.leaves_s.argmin()), int(state.dense_s.argmin())
        coming = int(state.comes_s.argmin())
        ends_s, leaves_s, dense_s = state.ends_s[lane], state.leaves_s[way], state.dense_s[dense]
        now_s = min(ends_s, leaves_s, dense_s, state.comes_s[coming])
        if now_s == np.inf:
            return
        if now_s == ends_s:
            _end(ways, passes, state, lane, now_s)
        elif now_s == leaves_s:
            _leave(ways, passes, state, way, now_s)
        elif now_s == dense_s:
            state.dense_s[dense] = np.inf
            _put(ways, state, 4 * lanes + 2 * stages + dense, now_s)
        else:
            state.arrived[coming] += 1
            state.comes_s[coming] = state.arrives_s[coming, state.arrived[coming]]
            for place in range(passes.first_to[coming], passes.first_to[coming + 1]):
                _begin(ways, passes, state, passes.targets[place], now_s)
