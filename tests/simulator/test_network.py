import numpy as np
import pytest

from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.flow import IntArray
from simulator.network import Network


class Log:
    """When which row of which batch arrived."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arrivals: dict[tuple[str, int], float] = {}

    def on(self, name: str):  # type: ignore[no-untyped-def]
        def note(rows: IntArray) -> None:
            for row in rows.tolist():
                assert (name, row) not in self.arrivals
                self.arrivals[name, row] = self.engine.now_s

        return note


def test_single_link_takes_bytes_over_rate_plus_latency() -> None:
    engine = Engine()
    network, log = Network(engine, [100.0]), Log(engine)
    network.start([network.path([0], 0.25)], [200.0], log.on("a"))
    assert engine.run() == pytest.approx(2.25)
    assert log.arrivals == {("a", 0): pytest.approx(2.25)}
    assert network.link_bytes.tolist() == [200.0]
    assert network.link_busy_s.tolist() == [pytest.approx(2.0)]


def test_shared_link_gives_the_rest_to_who_remains() -> None:
    engine = Engine()
    network, log = Network(engine, [100.0]), Log(engine)
    path = network.path([0], 0.0)
    network.start([path, path], [100.0, 300.0], log.on("a"))
    engine.at(1.0, lambda: network.start([path], [50.0], log.on("b")))
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
    paths = [network.path([sender, num_senders], 0.5) for sender in range(num_senders)]
    network.start(paths, [30.0] * num_senders, log.on("a"))
    engine.run()
    (arrival_s,) = set(log.arrivals.values())
    assert arrival_s == pytest.approx(3.0 * num_senders + 0.5)
    assert len(log.arrivals) == num_senders


@pytest.mark.parametrize("num_hosts", [2, 3, 8, 17])
def test_all_to_all_through_a_switch(num_hosts: int) -> None:
    engine = Engine()
    network, log = Network(engine, [12.5e9] * (2 * num_hosts)), Log(engine)
    pairs = [(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b]
    paths = [network.path([2 * a, 2 * b + 1], 1e-6) for a, b in pairs]
    network.start(paths, [1e6] * len(pairs), log.on("a"))
    assert engine.run() == pytest.approx((num_hosts - 1) * 1e6 / 12.5e9 + 1e-6, rel=1e-9)
    assert len(log.arrivals) == len(pairs)
    np.testing.assert_allclose(network.link_bytes, (num_hosts - 1) * 1e6)


@pytest.mark.parametrize("num_hosts", [2, 5, 12])
def test_ring_moves_all_at_once(num_hosts: int) -> None:
    engine = Engine()
    network, log = Network(engine, [4.0] * (2 * num_hosts)), Log(engine)
    paths = [network.path([2 * a, 2 * ((a + 1) % num_hosts) + 1], 0.0) for a in range(num_hosts)]
    network.start(paths, [8.0] * num_hosts, log.on("a"))
    assert engine.run() == pytest.approx(2.0)


def test_two_levels_share_the_outer_uplink() -> None:
    # 2 DCs of 4: each rank sends 6 bytes to its peer in the other DC through an uplink of 8/s, and 6 to a neighbour.
    engine = Engine()
    network, log = Network(engine, [8.0, 8.0] + [16.0] * 16), Log(engine)

    def up(rank: int) -> int:
        return 2 + 2 * rank

    remote = [network.path([up(r), r // 4, up((r + 4) % 8) + 1], 0.1) for r in range(8)]
    near = [network.path([up(r), up(r // 4 * 4 + (r + 1) % 4) + 1], 0.0) for r in range(8)]
    network.start(remote, [6.0] * 8, log.on("remote"))
    network.start(near, [28.0] * 8, log.on("near"))
    engine.run()
    # The uplink gives 2/s to each of four; the rank's own link has 14/s left for the neighbour.
    assert log.arrivals["remote", 3] == pytest.approx(6 / 2 + 0.1)
    assert log.arrivals["near", 5] == pytest.approx(28 / 14)
    assert network.link_bytes.tolist() == [24.0, 24.0] + [34.0] * 16


def test_counted_flow_equals_written_out_flows() -> None:
    def run(rows: list[tuple[list[int], float, int]]) -> tuple[float, list[float]]:
        engine = Engine()
        network, log = Network(engine, [3.0, 5.0]), Log(engine)
        paths = [network.path(links, 0.0) for links, _, _ in rows]
        network.start(paths, [size for _, size, _ in rows], log.on("a"), [float(count) for _, _, count in rows])
        return engine.run(), network.link_bytes.tolist()

    counted = run([([0], 4.0, 3), ([0, 1], 2.0, 2), ([1], 9.0, 1)])
    written_out = run([([0], 4.0, 1)] * 3 + [([0, 1], 2.0, 1)] * 2 + [([1], 9.0, 1)])
    assert counted[0] == pytest.approx(written_out[0], rel=1e-9)
    assert counted[1] == written_out[1]


def test_no_bytes_or_no_links_take_the_latency_only() -> None:
    engine = Engine()
    network, log = Network(engine, [1.0]), Log(engine)
    network.start([network.path([0], 0.5), network.path([], 0.25)], [0.0, 1e9], log.on("a"))
    assert engine.run() == 0.5
    assert log.arrivals == {("a", 0): 0.5, ("a", 1): 0.25}


def test_distance_delays_arrival_but_not_the_link() -> None:
    engine = Engine()
    network, log = Network(engine, [10.0]), Log(engine)
    network.start([network.path([0], 0.0), network.path([0], 5.0)], [10.0, 10.0], log.on("a"))
    engine.run()
    assert log.arrivals == {("a", 0): pytest.approx(2.0), ("a", 1): pytest.approx(7.0)}


def test_solutions_found_again_are_the_same() -> None:
    engine = Engine()
    network, log = Network(engine, [3.0, 7.0]), Log(engine)
    paths = [network.path([0], 0.0), network.path([0, 1], 0.0), network.path([1], 0.0)]
    for turn in range(3):
        network_start = lambda turn=turn: network.start(paths, [2.0, 4.0, 8.0], log.on(f"turn {turn}"))  # noqa: E731
        engine.at(100.0 * turn, network_start)
    engine.run()
    for row in range(3):
        took_s = [log.arrivals[f"turn {turn}", row] - 100.0 * turn for turn in range(3)]
        assert took_s == [pytest.approx(took_s[0], rel=1e-9)] * 3


def test_rounding_never_stalls() -> None:
    """Sizes and rates 18 orders apart, late in simulated time, where the clock's own step exceeds a flow's duration."""
    engine = Engine()
    network, log = Network(engine, [1e11, 3.0, 7e10]), Log(engine)
    rng = np.random.default_rng(7)
    choices = [network.path(links, 0.0) for links in ([0], [1], [0, 2], [2])]
    sizes = rng.lognormal(2, 6, 300)
    rows = rng.choice(choices, 300)
    engine.at(1e9, lambda: network.start(rows, sizes, log.on("a")))
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
        links = [rng.choice(6, int(rng.integers(1, 4)), replace=False) for _ in range(8)]
        paths = [network.path(path.tolist(), 0.0) for path in links]
        sizes = rng.uniform(0.1, 5, 8)
        for path, size in zip(links, sizes, strict=True):
            expected[path] += size
        note = log.on(f"{batch}")
        engine.at(float(rng.uniform(0, 30)), lambda p=paths, s=sizes, n=note: network.start(p, s, n))
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
        network.path([3], 0.0)
    with pytest.raises(SimulationError, match="latency -1"):
        network.path([0], -1.0)
    with pytest.raises(SimulationError, match="not negative"):
        network.start([network.path([0], 0.0)], [-1.0], lambda rows: None)
