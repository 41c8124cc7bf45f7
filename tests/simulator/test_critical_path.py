import numpy as np
import pytest

from simulator.collective import Flows, Program, execute
from simulator.critical_path import Segment, critical_path, seconds_by_label
from simulator.engine import Engine
from simulator.network import Network, Transfers


def test_the_path_crosses_to_the_rank_that_was_waited_for() -> None:
    engine = Engine()
    network = Network(engine, [10.0] * 6)
    flows = Flows(
        source=np.array([0, 2]),
        destination=np.array([1, 0]),
        transfers=Transfers(links=np.array([[0, 3], [4, 1]]), latency_s=np.array([0.5, 0.0]), size_bytes=np.array([20.0, 10.0])),
    )
    program = Program(num_ranks=3)
    work = program.compute("work", np.array([1.0, 4.0, 2.0]), ())
    hidden = program.compute("hidden", np.array([0.5, 0.5, 0.5]), [work])
    move = program.exchange("move", flows, [work])
    finish = program.compute("finish", np.array([3.0, 1.0, 1.0]), [move, hidden])
    execution = execute(program, engine, network)
    # Rank 0 finishes last. Its send waited for rank 1, which worked until 4 s.
    assert critical_path(program, execution) == [
        Segment(work, 1, 0.0, 4.0),
        Segment(move, 0, 4.0, pytest.approx(6.5)),
        Segment(finish, 0, pytest.approx(6.5), pytest.approx(9.5)),
    ]
    assert seconds_by_label(program, execution) == pytest.approx({"work": 4.0, "move": 2.5, "finish": 3.0})


def test_a_program_of_nothing_has_no_path() -> None:
    program = Program(num_ranks=1)
    engine = Engine()
    assert critical_path(program, execute(program, engine, Network(engine, [1.0]))) == []
