"""Why a program took as long as it did: the chain of operations that nothing could have been shortened without."""

from __future__ import annotations

from typing import NamedTuple

from simulator.collective import Execution, Program


class Segment(NamedTuple):
    """A stretch of the critical path: one operation, from when its late rank entered to when the waiting rank left."""

    operation: int
    rank: int
    """The rank that left last."""
    start_s: float
    end_s: float


def critical_path(program: Program, execution: Execution) -> list[Segment]:
    """Segments from the start to the end of the program, each beginning when the one before ends.

    Walks back from the rank that finished last: a computation began when the rank's last dependency was done; an
    exchange completed with a transfer that began when the later of its two ends entered.
    """
    if not program.operations:
        return []
    segments = []
    operation, rank = (int(index) for index in divmod(int(execution.end_s.argmax()), program.num_ranks))
    while True:
        gate = int(execution.gate[operation, rank])
        start_s = float(execution.start_s[operation, gate])
        segments.append(Segment(operation, rank, start_s, float(execution.end_s[operation, rank])))
        after = program.operations[operation].after
        if not after:
            return segments[::-1]
        operation, rank = max(after, key=lambda earlier: float(execution.end_s[earlier, gate])), gate


def seconds_by_label(program: Program, execution: Execution) -> dict[str, float]:
    """Seconds of the critical path in each kind of operation, in order of first appearance; they sum to the makespan.

    What is hidden behind something slower does not count.
    """
    seconds: dict[str, float] = {}
    for segment in critical_path(program, execution):
        label = program.operations[segment.operation].label
        seconds[label] = seconds.get(label, 0.0) + segment.end_s - segment.start_s
    return seconds
