"""Timelines of small programs, computed by hand."""

import numpy as np
import pytest

from simulator.collective import Flows, Program, execute
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.network import Network, Transfers


class Switch:
    """Ranks behind one non-blocking switch, each with an up and a down link of 10 bytes/s."""

    def __init__(self, num_ranks: int, latency_s: float = 0.0) -> None:
        self.engine = Engine()
        self.network = Network(self.engine, [10.0] * (2 * num_ranks))
        self.latency_s = latency_s

    def flows(self, *transfers: tuple[int, int, float]) -> Flows:
        source = np.array([a for a, _, _ in transfers], dtype=np.int64)
        destination = np.array([b for _, b, _ in transfers], dtype=np.int64)
        return Flows(
            source=source,
            destination=destination,
            transfers=Transfers(
                links=np.stack([2 * source, 2 * destination + 1], axis=1),
                latency_s=np.full(len(transfers), self.latency_s),
                size_bytes=np.array([size for _, _, size in transfers]),
            ),
        )


def test_a_flow_waits_for_both_ends_and_ranks_go_on_alone() -> None:
    fabric = Switch(3)
    program = Program(num_ranks=3)
    work = program.compute("work", np.array([1.0, 3.0, 0.0]), ())
    swap = program.exchange("swap", fabric.flows((0, 1, 20.0), (1, 0, 10.0)), [work])
    more = program.compute("more", np.array([1.0, 1.0, 1.0]), [swap])
    execution = execute(program, fabric.engine, fabric.network)
    assert execution.end_s[work].tolist() == [1.0, 3.0, 0.0]
    assert execution.start_s[swap].tolist() == [1.0, 3.0, 0.0]
    # Rank 2 exchanges nothing. The others leave when both their send and their receive are done.
    assert execution.end_s[swap].tolist() == [5.0, 5.0, 0.0]
    assert execution.end_s[more].tolist() == [6.0, 6.0, 1.0]
    assert execution.makespan_s == 6.0


def test_ranks_leave_an_exchange_at_their_own_time() -> None:
    fabric = Switch(4, latency_s=0.5)
    program = Program(num_ranks=4)
    send = program.exchange("send", fabric.flows((0, 1, 10.0), (2, 3, 40.0)), ())
    execution = execute(program, fabric.engine, fabric.network)
    assert execution.end_s[send].tolist() == pytest.approx([1.5, 1.5, 4.5, 4.5])


def test_two_exchanges_in_flight_share_the_links() -> None:
    fabric = Switch(2)
    program = Program(num_ranks=2)
    fork = program.compute("fork", np.zeros(2), ())
    one = program.exchange("one", fabric.flows((0, 1, 10.0)), [fork])
    two = program.exchange("two", fabric.flows((0, 1, 30.0)), [fork])
    overlapped = program.compute("overlapped", np.array([1.0, 1.0]), [fork])
    join = program.compute("join", np.zeros(2), [one, two, overlapped])
    execution = execute(program, fabric.engine, fabric.network)
    assert execution.end_s[one].tolist() == pytest.approx([2.0, 2.0])
    assert execution.end_s[two].tolist() == pytest.approx([4.0, 4.0])
    assert execution.end_s[overlapped].tolist() == [1.0, 1.0]
    assert execution.end_s[join].tolist() == pytest.approx([4.0, 4.0])


def test_long_chains_of_nothing_do_not_recurse() -> None:
    fabric = Switch(2)
    program = Program(num_ranks=2)
    last = program.compute("start", np.zeros(2), ())
    for _ in range(2000):
        last = program.exchange("empty", fabric.flows(), [last])
        last = program.compute("none", np.zeros(2), [last])
    assert execute(program, fabric.engine, fabric.network).makespan_s == 0.0


def test_misuse_is_named() -> None:
    program = Program(num_ranks=2)
    with pytest.raises(SimulationError, match="comes after operation 0"):
        program.compute("work", np.zeros(2), [0])
    with pytest.raises(SimulationError, match="2 finite durations"):
        program.compute("work", np.zeros(3), ())
    with pytest.raises(SimulationError, match="2 finite durations"):
        program.compute("work", np.array([1.0, np.nan]), ())
