"""Max-min fairness by its definition and by the textbook, to hold the network against."""

from functools import partial

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from simulator.engine import Engine
from simulator.network import EXACT, Batch, Network, Transfers


def max_min_rates(capacity: FloatArray, paths: IntArray, weights: FloatArray) -> FloatArray:
    """Progressive filling, one link at a time (Bertsekas and Gallager, Data Networks, section 6.5.2)."""
    rates = np.full(len(paths), np.inf)
    left = capacity.astype(np.float64)
    is_open = (paths >= 0).any(axis=1)
    while is_open.any():
        load = np.zeros(len(capacity))
        for path, weight in zip(paths[is_open], weights[is_open], strict=True):
            np.add.at(load, path[path >= 0], weight[path >= 0])
        share = np.divide(left, load, out=np.full(len(capacity), np.inf), where=load > 0)
        link = int(share.argmin())
        for flow in np.flatnonzero(is_open & (paths == link).any(axis=1)):
            rates[flow] = share[link]
            on_link = paths[flow] >= 0
            np.subtract.at(left, paths[flow][on_link], weights[flow][on_link] * share[link])
            is_open[flow] = False
        left = np.maximum(left, 0.0)
    return rates


def check_max_min(capacity: FloatArray, paths: IntArray, weights: FloatArray, rates: FloatArray) -> None:
    """Links carry no more than they can, and every flow crosses a full link on which no flow is faster."""
    load = np.zeros(len(capacity))
    fastest = np.zeros(len(capacity))
    for path, weight, rate in zip(paths, weights, rates, strict=True):
        np.add.at(load, path[path >= 0], weight[path >= 0] * rate)
        np.maximum.at(fastest, path[path >= 0], rate)
    assert (load <= capacity * (1 + 1e-8)).all()
    for flow, path in enumerate(paths):
        links = path[path >= 0]
        full = load[links] >= capacity[links] * (1 - 1e-8)
        assert (full & (rates[flow] >= fastest[links] * (1 - 1e-8))).any(), f"flow {flow} has no bottleneck"


def rates_bytes_per_s(network: Network, batch: Batch) -> FloatArray:
    """[n] of a batch's flows as of the last start or end; meaningless for those that are done or have not started."""
    rows, first = np.zeros(batch.size, dtype=np.int64), network._first_row(batch.serial)
    mine = np.arange(first, network._first_row(batch.serial + 1))
    rows[network._cargo.position[mine]] = mine
    return np.asarray(network._links.level[network._flows.full_link[rows]], dtype=np.float64)


def random_network(seed: int, *, weighted: bool = False) -> tuple[FloatArray, IntArray, FloatArray]:
    """Capacities, paths [flows, longest] and weights. Half of the networks have few distinct capacities, so that many
    links fill together."""
    rng = np.random.default_rng(seed)
    num_links, num_flows = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    width = min(num_links, int(rng.integers(1, 6)))
    capacity = rng.integers(1, 4, num_links) * 1e9 if seed % 2 else rng.lognormal(20, 2, num_links)
    paths = np.full((num_flows, width), -1, dtype=np.int64)
    for flow in range(num_flows):
        length = int(rng.integers(1, width + 1))
        paths[flow, :length] = rng.choice(num_links, length, replace=False)
    # Whole numbers and thirds: what is taken away again must leave nothing.
    weights = rng.integers(1, 5, paths.shape) / (1 + 2 * (seed % 3 == 0)) if weighted else np.ones(paths.shape)
    return capacity.astype(np.float64), paths, weights


class Run:
    """Flows that start at their times, or all at once, and when each ended."""

    def __init__(
        self,
        capacity: FloatArray,
        paths: IntArray,
        weights: FloatArray,
        sizes: FloatArray,
        tolerance: float = EXACT,
        start_s: FloatArray | None = None,
    ) -> None:
        self.engine = Engine()
        self.network = Network(self.engine, capacity, tolerance)
        self.end_s = np.full(len(paths), np.nan)
        transfers = Transfers(
            links=paths,
            latency_s=np.zeros(len(paths)),
            size_bytes=sizes,
            weights=None if (weights == 1).all() else weights,
        )
        self.batch: Batch = self.network.prepare(transfers, self._note)
        if start_s is None:
            self.network.start(self.batch)
            return
        for flow, at_s in enumerate(start_s.tolist()):
            self.engine.at(at_s, partial(self.network.start, self.batch, np.array([flow])))

    def _note(self, groups: IntArray, last: IntArray) -> None:
        self.end_s[groups] = self.engine.now_s


def fluid_end_s(
    capacity: FloatArray, paths: IntArray, weights: FloatArray, sizes: FloatArray, start_s: FloatArray | None = None
) -> FloatArray:
    """When each flow ends: from one start or end to the next at the textbook's rates."""
    left, end_s, now_s = sizes.copy(), np.zeros(len(sizes)), 0.0
    start_s = np.zeros(len(sizes)) if start_s is None else start_s
    ended = np.zeros(len(sizes), dtype=bool)
    while not ended.all():
        active = np.flatnonzero(~ended & (start_s <= now_s))
        later_s = start_s[start_s > now_s].min(initial=np.inf) - now_s
        needs_s = left[active] / max_min_rates(capacity, paths[active], weights[active])
        step_s = min(needs_s.min(initial=np.inf), later_s)
        left[active] -= left[active] / needs_s * step_s
        # The times themselves, where something starts: sums would miss them.
        now_s = now_s + step_s if step_s < later_s else float(start_s[start_s > now_s].min())
        done = active[needs_s <= step_s * (1 + 1e-10)]
        end_s[done] = now_s
        ended[done] = True
    return end_s


def carried_bytes(capacity: FloatArray, paths: IntArray, weights: FloatArray, end_s: FloatArray) -> FloatArray:
    """What the textbook's rates carry of flows that all start at 0 and end at these times: the sizes for which they are exact."""
    carried, now_s = np.zeros(len(end_s)), 0.0
    for then_s in np.unique(end_s).tolist():
        active = np.flatnonzero(end_s >= then_s)
        carried[active] += max_min_rates(capacity, paths[active], weights[active]) * (then_s - now_s)
        now_s = then_s
    return carried
