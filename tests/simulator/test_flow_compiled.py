"""The compiled loop, run here as plain Python, against the vectorised reference; compiled too where numba is installed."""

import numpy as np
import pytest

import simulator.network
from simulator.engine import Engine
from simulator.flow import FloatArray, IntArray, max_min_rates
from simulator.flow_compiled import Fill, Solver, compiled_fill, fill
from simulator.network import Network


def random_case(seed: int) -> tuple[FloatArray, IntArray, FloatArray]:
    rng = np.random.default_rng(seed)
    num_links, num_paths = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    width = min(num_links, int(rng.integers(1, 5)))
    capacity = rng.integers(1, 4, num_links) * 1e9 if seed % 2 else rng.lognormal(20, 2, num_links)
    paths = np.full((num_paths, width), -1, dtype=np.int64)
    for path in range(num_paths):
        length = int(rng.integers(1, width + 1))
        paths[path, :length] = rng.choice(num_links, length, replace=False)
    return capacity.astype(np.float64), paths, rng.integers(1, 4, num_paths).astype(np.float64)


def check_while_flows_leave(fill: Fill, seed: int) -> None:
    capacity, paths, counts = random_case(seed)
    solver = Solver(fill, capacity, paths, counts)
    present = np.arange(len(paths))
    rng = np.random.default_rng(seed)
    while present.size:
        expected = max_min_rates(capacity, paths[present], counts[present])
        np.testing.assert_allclose(solver.solve()[present], expected, rtol=1e-8)
        used = np.zeros(capacity.size, dtype=np.bool_)
        used[paths[present][paths[present] >= 0]] = True
        np.testing.assert_array_equal(solver.used, used)
        leaving = rng.permutation(present)[: int(rng.integers(1, 4))]
        solver.remove(leaving)
        present = np.setdiff1d(present, leaving)


@pytest.mark.parametrize("block", range(4))
def test_solver_follows_flows_that_leave(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        check_while_flows_leave(fill, seed)


def test_compiled_loop_gives_the_same() -> None:
    compiled = compiled_fill()
    if compiled is None:
        pytest.skip("numba is not installed")
    for seed in range(200):
        check_while_flows_leave(compiled, seed)


@pytest.mark.parametrize("seed", range(3))
def test_network_timeline_does_not_depend_on_the_solver(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def arrivals() -> dict[tuple[int, int], float]:
        rng = np.random.default_rng(seed)
        engine = Engine()
        network = Network(engine, rng.uniform(1, 10, 8))
        seen: dict[tuple[int, int], float] = {}
        for batch in range(6):
            links = [rng.choice(8, int(rng.integers(1, 4)), replace=False).tolist() for _ in range(15)]
            paths = [network.path(path, 0.01 * len(path)) for path in links]
            sizes = rng.lognormal(0, 1, 15)

            def note(rows: IntArray, batch: int = batch) -> None:
                seen.update({(batch, row): engine.now_s for row in rows.tolist()})

            engine.at(float(rng.uniform(0, 20)), lambda paths=paths, sizes=sizes, note=note: network.start(paths, sizes, note))
        engine.run()
        busy_s.append(network.link_busy_s)
        return seen

    busy_s: list[FloatArray] = []
    by_path = arrivals()
    monkeypatch.setattr(simulator.network, "_COMPILE_AFTER", 3)
    monkeypatch.setattr(simulator.network, "compiled_fill", lambda: fill)
    by_loop = arrivals()
    assert len(by_path) == 90
    assert by_loop == pytest.approx(by_path, rel=1e-7)
    np.testing.assert_allclose(busy_s[0], busy_s[1], rtol=1e-7)
