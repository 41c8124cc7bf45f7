"""Computations of ranks that share processors: timelines computed by hand, and steps of plans."""

import numpy as np
import pytest

from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.plan import LayerGroup, Plan
from simulator.collective import Execution, Flows, Program, execute
from simulator.engine import Engine
from simulator.network import Network, Transfers
from simulator.step import simulate_step


class Link:
    """Between ranks 0 and 1, 10 bytes/s."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.network = Network(self.engine, [10.0])

    def swap(self, seconds: float) -> Flows:
        transfers = Transfers(links=np.array([[0]]), latency_s=np.zeros(1), size_bytes=np.array([10 * seconds]))
        return Flows(source=np.array([0]), destination=np.array([1]), transfers=transfers)

    def run(self, program: Program) -> Execution:
        return execute(program, self.engine, self.network)


def test_first_come_first_served_each_to_its_end() -> None:
    program = Program(num_ranks=5, processors=2)
    work = program.compute("work", np.array([3.0, 1.0, 1.0, 2.0, 0.0]), ())
    # 0 on one processor, 1, 2 and 3 on the other; 4 has nothing to compute and needs none.
    assert Link().run(program).end_s[work].tolist() == [3.0, 1.0, 2.0, 4.0, 0.0]


@pytest.mark.parametrize(("beside", "end_s"), [(False, [[1.0, 4.0], [3.0, 6.0]]), (True, [[1.0, 2.0], [4.0, 6.0]])])
def test_who_goes_on_computing_keeps_the_processor_and_what_runs_beside_queues(beside: bool, end_s: list[list[float]]) -> None:
    program = Program(num_ranks=2, processors=1)
    first = program.compute("first", np.array([1.0, 1.0]), ())
    program.compute("second", np.array([2.0, 2.0]), [first], beside=beside)
    assert Link().run(program).end_s.tolist() == end_s


def test_who_waits_for_an_exchange_gives_it_up() -> None:
    link, program = Link(), Program(num_ranks=2, processors=1)
    before = program.compute("before", np.array([1.0, 1.0]), ())
    swap = program.exchange("swap", link.swap(1.0), [before])
    after = program.compute("after", np.array([1.0, 1.0]), [swap])
    execution = link.run(program)
    assert execution.end_s[before].tolist() == [1.0, 2.0]
    assert execution.end_s[swap].tolist() == [3.0, 3.0]
    assert execution.end_s[after].tolist() == [4.0, 5.0]


def test_a_transfer_waits_for_what_others_compute_beside_theirs() -> None:
    """Rank 1's copies set out when rank 0 has computed both: only its own computation hides them."""
    link, program = Link(), Program(num_ranks=2, processors=1)
    experts = program.compute("experts", np.array([1.0, 1.0]), ())
    gather = program.exchange("gather", link.swap(10.0), [experts])
    beside = program.compute("beside", np.array([2.0, 2.0]), [experts])
    program.compute("next", np.zeros(2), [gather, beside])
    execution = link.run(program)
    assert execution.start_s[gather].tolist() == [1.0, 4.0]
    assert execution.makespan_s == 14.0


def plan(domains: tuple[int, int], *overrides: str) -> Plan:
    cluster, workload = load_cluster("lab-4dc", overrides), load_workload("tiny", ["model.num_layers=3"])
    sizes = dict(zip((level.name for level in cluster.levels), domains, strict=True))
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains=sizes, migration={})
    return Plan(cluster=cluster, workload=workload, layers=(group,))


FAST = tuple(f"levels.{level}.{key}" for level in ("dc", "gpu") for key in ("bandwidth=1000 Tbps", "latency=0 s"))
SLOW = tuple(f"levels.{level}.{key}" for level in ("dc", "gpu") for key in ("bandwidth=1 Mbps", "latency=0 s"))


@pytest.mark.parametrize(
    ("domains", "links", "longer"), [((1, 1), FAST, 0), ((4, 2), FAST, 0), ((1, 1), SLOW, -1), ((4, 2), SLOW, 1)]
)
def test_turns_take_as_long_fill_links_that_would_idle_and_hide_less_of_copies(
    domains: tuple[int, int], links: tuple[str, ...], longer: int
) -> None:
    """Eight ranks on two processors: where links take no time, none of them is ever idle, as if all had computed at once."""
    own, shared = (simulate_step(plan(domains, *links, *more)).step_s for more in ((), ("gpu.sharing=4",)))
    assert np.sign(round(shared / own - 1, 6)) == longer


@pytest.mark.parametrize(("sharing", "processors"), [(1.0, None), (1.05, None), (1.9, 4), (4.4, 2), (30.0, 1)])
def test_a_whole_number_of_processors(sharing: float, processors: int | None) -> None:
    assert load_cluster("lab-4dc", [f"gpu.sharing={sharing}"]).processors == processors
