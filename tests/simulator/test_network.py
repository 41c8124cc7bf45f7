import numpy as np
import pytest

from hybridep.arrays import IntArray
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.network import Network, OnComplete, Transfers


def send(
    network: Network,
    rows: list[tuple[list[int], float, float]],
    on_complete: OnComplete,
    counts: list[int] | None = None,
) -> None:
    """rows: (links, latency, bytes). counts: how many flows each stands for, on every one of its links."""
    width = max(len(links) for links, _, _ in rows)
    links = np.array([path + [-1] * (width - len(path)) for path, _, _ in rows], dtype=np.int64)
    transfers = Transfers(
        links=links.reshape(len(rows), width),
        latency_s=np.array([latency_s for _, latency_s, _ in rows]),
        size_bytes=np.array([size for _, _, size in rows]),
        weights=None if counts is None else np.repeat(np.array(counts, dtype=np.float64)[:, None], width, axis=1),
    )
    network.send(transfers, on_complete)


class Log:
    """When which row of which batch arrived."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arrivals: dict[tuple[str, int], float] = {}

    def on(self, name: str):  # type: ignore[no-untyped-def]
        def note(rows: IntArray, last: IntArray) -> None:
            for row in rows.tolist():
                assert (name, row) not in self.arrivals
                self.arrivals[name, row] = self.engine.now_s

        return note


def test_single_link_takes_bytes_over_rate_plus_latency() -> None:
    engine = Engine()
    network, log = Network(engine, [100.0]), Log(engine)
    send(network, [([0], 0.25, 200.0)], log.on("a"))
    assert engine.run() == pytest.approx(2.25)
    assert log.arrivals == {("a", 0): pytest.approx(2.25)}
    assert network.link_bytes.tolist() == [200.0]
    assert network.link_busy_s.tolist() == [pytest.approx(2.0)]


def test_shared_link_gives_the_rest_to_who_remains() -> None:
    engine = Engine()
    network, log = Network(engine, [100.0]), Log(engine)
    send(network, [([0], 0.0, 100.0), ([0], 0.0, 300.0)], log.on("a"))
    engine.at(1.0, lambda: send(network, [([0], 0.0, 50.0)], log.on("b")))
    engine.run()
    # 50 each until 1 s; thirds until the first 50 left are gone (1.5 s later, with b's), then one alone.
    assert log.arrivals == {
        ("a", 0): pytest.approx(2.5),
        ("b", 0): pytest.approx(2.5),
        ("a", 1): pytest.approx(4.5),
    }
    assert network.link_bytes.tolist() == [450.0]


@pytest.mark.parametrize("num_senders", [1, 2, 7, 32])
def test_incast_is_bound_by_the_receiver(num_senders: int) -> None:
    engine = Engine()
    network, log = Network(engine, [10.0] * (num_senders + 1)), Log(engine)
    send(network, [([sender, num_senders], 0.5, 30.0) for sender in range(num_senders)], log.on("a"))
    engine.run()
    (arrival_s,) = set(log.arrivals.values())
    assert arrival_s == pytest.approx(3.0 * num_senders + 0.5)
    assert len(log.arrivals) == num_senders


@pytest.mark.parametrize("num_hosts", [2, 3, 8, 17])
def test_all_to_all_through_a_switch(num_hosts: int) -> None:
    engine = Engine()
    network, log = Network(engine, [12.5e9] * (2 * num_hosts)), Log(engine)
    pairs = [(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b]
    send(network, [([2 * a, 2 * b + 1], 1e-6, 1e6) for a, b in pairs], log.on("a"))
    assert engine.run() == pytest.approx((num_hosts - 1) * 1e6 / 12.5e9 + 1e-6, rel=1e-9)
    assert len(log.arrivals) == len(pairs)
    np.testing.assert_allclose(network.link_bytes, (num_hosts - 1) * 1e6)


@pytest.mark.parametrize("num_hosts", [2, 5, 12])
def test_ring_moves_all_at_once(num_hosts: int) -> None:
    engine = Engine()
    network, log = Network(engine, [4.0] * (2 * num_hosts)), Log(engine)
    send(network, [([2 * a, 2 * ((a + 1) % num_hosts) + 1], 0.0, 8.0) for a in range(num_hosts)], log.on("a"))
    assert engine.run() == pytest.approx(2.0)


def test_two_levels_share_the_outer_uplink() -> None:
    # 2 DCs of 4: each rank sends 6 bytes to its peer in the other DC through an uplink of 8/s, and 6 to a neighbour.
    engine = Engine()
    network, log = Network(engine, [8.0, 8.0] + [16.0] * 16), Log(engine)

    def up(rank: int) -> int:
        return 2 + 2 * rank

    send(network, [([up(r), r // 4, up((r + 4) % 8) + 1], 0.1, 6.0) for r in range(8)], log.on("remote"))
    send(network, [([up(r), up(r // 4 * 4 + (r + 1) % 4) + 1], 0.0, 28.0) for r in range(8)], log.on("near"))
    engine.run()
    # The uplink gives 2/s to each of four; the rank's own link has 14/s left for the neighbour.
    assert log.arrivals["remote", 3] == pytest.approx(6 / 2 + 0.1)
    assert log.arrivals["near", 5] == pytest.approx(28 / 14)
    assert network.link_bytes.tolist() == [24.0, 24.0] + [34.0] * 16


def test_counted_flow_equals_written_out_flows() -> None:
    def run(rows: list[tuple[list[int], float, int]]) -> tuple[float, list[float]]:
        engine = Engine()
        network, log = Network(engine, [3.0, 5.0]), Log(engine)
        send(network, [(links, 0.0, size) for links, size, _ in rows], log.on("a"), [count for _, _, count in rows])
        return engine.run(), network.link_bytes.tolist()

    counted = run([([0], 4.0, 3), ([0, 1], 2.0, 2), ([1], 9.0, 1)])
    written_out = run([([0], 4.0, 1)] * 3 + [([0, 1], 2.0, 1)] * 2 + [([1], 9.0, 1)])
    assert counted[0] == pytest.approx(written_out[0], rel=1e-9)
    assert counted[1] == written_out[1]


def test_no_bytes_or_no_links_take_the_latency_only() -> None:
    engine = Engine()
    network, log = Network(engine, [1.0]), Log(engine)
    send(network, [([0], 0.5, 0.0), ([], 0.25, 1e9)], log.on("a"))
    assert engine.run() == 0.5
    assert log.arrivals == {("a", 0): 0.5, ("a", 1): 0.25}


def test_distance_delays_arrival_but_not_the_link() -> None:
    engine = Engine()
    network, log = Network(engine, [10.0]), Log(engine)
    send(network, [([0], 0.0, 10.0), ([0], 5.0, 10.0)], log.on("a"))
    engine.run()
    assert log.arrivals == {("a", 0): pytest.approx(2.0), ("a", 1): pytest.approx(7.0)}


def test_groups_are_told_when_their_last_flow_arrives() -> None:
    engine = Engine()
    network = Network(engine, [10.0, 10.0])
    seen: list[tuple[float, list[int], list[int]]] = []
    transfers = Transfers(
        links=np.array([[0], [0], [1]]),
        latency_s=np.array([0.0, 0.0, 9.0]),
        size_bytes=np.array([10.0, 20.0, 10.0]),
        groups=np.array([[0, 1], [0, 2], [2, 2]]),
    )
    batch = network.prepare(transfers, lambda groups, last: seen.append((engine.now_s, groups.tolist(), last.tolist())))
    network.start(batch, np.array([0, 2]))
    engine.at(5.0, lambda: network.start(batch, np.array([1])))
    engine.run()
    assert seen == [(1.0, [1], [0]), (7.0, [0], [1]), (10.0, [2], [2])]


def test_rounding_never_stalls() -> None:
    """Sizes and rates 18 orders apart, late in simulated time, where the clock's own step exceeds a flow's duration."""
    engine = Engine()
    network, log = Network(engine, [1e11, 3.0, 7e10]), Log(engine)
    rng = np.random.default_rng(7)
    choices = [[0], [1], [0, 2], [2]]
    rows = [(choices[rng.integers(4)], 0.0, float(size)) for size in rng.lognormal(2, 6, 300)]
    engine.at(1e9, lambda: send(network, rows, log.on("a")))
    engine.run()
    assert len(log.arrivals) == 300


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_conserves_bytes_and_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = rng.uniform(1, 10, 6)
    engine = Engine()
    network, log = Network(engine, capacity), Log(engine)
    expected = np.zeros(6)
    num_batches = 20
    for batch in range(num_batches):
        links = [rng.choice(6, int(rng.integers(1, 4)), replace=False).tolist() for _ in range(8)]
        rows = [(path, 0.0, float(size)) for path, size in zip(links, rng.uniform(0.1, 5, 8), strict=True)]
        for path, _, size in rows:
            expected[path] += size
        note = log.on(f"{batch}")
        engine.at(float(rng.uniform(0, 30)), lambda rows=rows, note=note: send(network, rows, note))
    end_s = engine.run()
    assert len(log.arrivals) == 8 * num_batches
    np.testing.assert_allclose(network.link_bytes, expected, rtol=1e-12)
    # A link cannot have carried its bytes in less time than at its full rate.
    assert (network.link_busy_s >= expected / capacity * (1 - 1e-8)).all()
    assert (network.link_busy_s <= end_s).all()


def test_misuse_names_the_value() -> None:
    engine = Engine()
    with pytest.raises(SimulationError, match="link 1 has capacity 0"):
        Network(engine, [1.0, 0.0])
    network = Network(engine, [1.0])
    with pytest.raises(SimulationError, match="link 3"):
        send(network, [([3], 0.0, 1.0)], lambda groups, last: None)
    with pytest.raises(SimulationError, match="latency -1"):
        send(network, [([0], -1.0, 1.0)], lambda groups, last: None)
    with pytest.raises(SimulationError, match="size -1"):
        send(network, [([0], 0.0, -1.0)], lambda groups, last: None)
    with pytest.raises(SimulationError, match=r"tolerance 0\.5"):
        Network(engine, [1.0], tolerance=0.5)


def test_flows_that_wait_change_nothing() -> None:
    """To the bit, however many the table holds between those that move."""

    def arrivals(apart: int) -> dict[tuple[str, int], float]:
        engine, number = Engine(), 6 * apart
        network, log = Network(engine, [3.0, 7.0, 11.0, 5.0]), Log(engine)
        row = np.arange(number) // apart
        paths = np.stack([row % 3, np.full(number, 3)], axis=1)
        transfers = Transfers(links=paths, latency_s=np.zeros(number), size_bytes=10.0 + row)
        batch = network.prepare(transfers, lambda rows, last: log.on("a")(rows // apart, last))
        for at in range(6):
            engine.at(at / 3, lambda at=at: network.start(batch, np.array([at * apart])))  # type: ignore[misc]
            engine.at(at * 1.5, lambda at=at: send(network, [([0, 3], 0.1, 2.0), ([1], 0.0, 3.0)], log.on(f"b{at}")))  # type: ignore[misc]
        engine.run()
        return log.arrivals

    assert arrivals(200) == arrivals(2) and len(arrivals(2)) == 18
