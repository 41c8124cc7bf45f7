"""Computations of ranks that share processors: timelines computed by hand, and steps of plans."""

import numpy as np
import pytest

from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.plan import LayerGroup, Plan
from simulator.collective import Execution, Flows, Program, execute
from simulator.engine import Engine
from simulator.network import Network, Transfers
from simulator.step import simulate_step
from simulator.token_exchange import Route, TokenExchange


@pytest.mark.parametrize("seed", range(40))
def test_no_processor_idles_nor_is_given_twice_and_nobody_overtakes(seed: int) -> None:
    """Random programs: a computation begins when it is entered and when its rank's last one has ended, or in its turn."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 7))
    program = Program(num_ranks=ranks, processors=int(rng.integers(1, ranks)))
    for position in range(12):
        after = sorted({*rng.integers(0, position, 2).tolist(), position - 1}) if position else []
        if rng.random() < 0.7:
            program.compute("", rng.uniform(0.1, 2, ranks), after, beside=bool(rng.random() < 0.25))
            continue
        source = rng.integers(ranks, size=ranks)
        transfers = Transfers(links=np.full((ranks, 1), -1), latency_s=rng.uniform(0.1, 1.5, ranks), size_bytes=np.zeros(ranks))
        destination = (source + rng.integers(1, ranks, size=ranks)) % ranks
        program.exchange("", Flows(source=source, destination=destination, transfers=transfers), after)
    execution = Link().run(program)
    computed = [(k, each.seconds, each.beside) for k, each in enumerate(program.operations) if each.seconds is not None]
    entered, end = (np.concatenate([moments[k] for k, _, _ in computed]) for moments in (execution.start_s, execution.end_s))
    begun = end - np.concatenate([seconds for _, seconds, _ in computed])
    of_rank, beside = np.tile(np.arange(ranks), len(computed)), np.repeat([each for _, _, each in computed], ranks)
    moments = np.unique(np.round(np.concatenate([entered, begun, end]), 9))
    for moment in (moments[1:] + moments[:-1]) / 2:
        running = int(((begun < moment) & (moment < end)).sum())
        assert running <= (program.processors or 0)
        assert running == program.processors or not ((entered < moment) & (moment < begun - 1e-9)).any()
    goes_on = (np.abs(end[:, None] - entered) < 1e-9).T & (of_rank[:, None] == of_rank) & ~beside[:, None]
    in_turn = ~(goes_on.any(axis=1) & (begun - entered < 1e-9))
    earlier = entered[:, None] < entered[in_turn] - 1e-9
    assert (begun[:, None] <= begun[in_turn] + 1e-9)[earlier].all()


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


def messages_of(one: Plan, exchange: TokenExchange | None = None) -> dict[str, set[float]]:
    """Milliseconds of a processor after each exchange, by its operation and level."""
    program = simulate_step(one, exchange=exchange).program
    found: dict[str, set[float]] = {}
    for operation in program.operations:
        if operation.label == "messages":
            (position,) = operation.after
            before = program.operations[position]
            assert operation.seconds is not None
            assert operation.beside == (before.label in ("expert_gather", "gradient_return"))
            found.setdefault(f"{before.label}@{before.level}", set()).update(np.round(operation.seconds * 1e3, 9).tolist())
    return found


LATE = ("gpu.jitter=8 ms", "gpu.message_overhead=4 ms")


def test_messages_take_a_processor_what_they_took_all_ranks_at_once() -> None:
    """A quarter of jitter, with two processors for eight ranks, and of each message beyond the first."""
    tokens, dense = plan((1, 1), "gpu.sharing=4", *LATE), {"dense_reduce_scatter@0": {2.0}, "dense_all_gather@0": {2.0}}
    rows = ("token_counts", "token_dispatch", "token_combine", "combine_backward", "dispatch_backward")
    assert messages_of(tokens) == {f"{op}@{level}": {2.0} for op in rows for level in (0, 1)} | dense
    copies = plan((4, 2), "gpu.sharing=4", *LATE)
    moves = ("expert_gather", "gradient_return")
    assert messages_of(copies) == {f"{op}@{level}": {ms} for op in moves for level, ms in ((0, 4.0), (1, 2.0))} | dense
    assert not messages_of(plan((1, 1), *LATE)), "ranks with their own processors wait, and compute nothing for it"


def test_messages_of_rows_that_go_directly() -> None:
    """Each rank has seven peers, one of them in its site."""
    found = messages_of(plan((1, 1), "gpu.sharing=4", *LATE), TokenExchange(route=Route.DIRECT, per_choice=True))
    assert found["token_dispatch@0"] == {6.0 + 2.0}


def test_messages_of_who_only_receives() -> None:
    one = plan((1, 1), "gpu.sharing=4", *LATE)
    model, training = one.workload.model, one.workload.training
    choices = np.full((8, training.micro_batch_size * training.sequence_length, model.top_k), -1)
    choices[..., 0] = 0
    layers, batches = range(model.num_moe_layers), range(training.micro_batches)
    program = simulate_step(one, {(layer, batch): choices for layer in layers for batch in batches}).program
    inner = next(k for k, each in enumerate(program.operations) if each.label == "token_dispatch" and each.level == 1)
    after = next(each.seconds for each in program.operations if each.label == "messages" and each.after == (inner,))
    assert after is not None
    # All rows are for the first rank; its neighbour passes on those that came to its place in the site.
    assert np.round(after * 1e3, 9).tolist() == [2.0, 2.0] + [0.0] * 6


def test_messages_of_ranks_that_do_all_at_once_take_as_long_as_measured() -> None:
    own, shared = (simulate_step(plan((1, 1), *FAST, *LATE, *more)).step_s for more in ((), ("gpu.sharing=4",)))
    without = simulate_step(plan((1, 1), *FAST, "gpu.sharing=4")).step_s
    assert shared == pytest.approx(own, rel=1e-6)
    assert shared > 1.5 * without


def test_messages_wait_for_nobody_where_processors_are_free() -> None:
    """Between links that rule, a rank's messages are alone on a processor, four times as fast as with all ranks at it."""
    own, shared = (simulate_step(plan((4, 1), *SLOW, *more)).step_s for more in (LATE, (*LATE, "gpu.sharing=4")))
    assert shared < own


@pytest.mark.parametrize(("sharing", "processors"), [(1.0, None), (1.05, None), (1.9, 4), (4.4, 2), (30.0, 1)])
def test_a_whole_number_of_processors(sharing: float, processors: int | None) -> None:
    assert load_cluster("lab-4dc", [f"gpu.sharing={sharing}"]).processors == processors
