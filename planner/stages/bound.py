"""What no pipeline of two stages or more is below, whatever its stages; and what no plan for any of the sites is below.

A site in a stage works on a share of all sequences, which is the same for all of the stage's n sites but for one sequence of each
micro-batch; or, where sites have shares of their own (``Site.tokens``), what its weight among others comes to. So this share
of all activations leaves it forward, for the next stage, and of their gradients back, for the one before; as much comes to it.
Only in the first and the last stage it is half of that, and there are two of those: their sites' shares make two together.
Between the sites of a stage each layer is exchanged: a site that holds h of a layer's experts has fetched what is not its own of
them, gives back their gradients, and sends each token away that chose another one, forward and backward. Whatever h is, each
layer takes that much of its access links, beside what its own attention computes, and all sites of the stage together compute all
of it. So in a given time a site carries so many layers, whole ones, one at least, with each share; and all sites' layers times
their shares, or over the sizes of their stages, must make up the model. And all computation, shared perfectly, takes its time.

Nor do all layers fit where the last stage waits for what others copy. What it has of the step for its passes, they do not copy
in, nor return gradients in (``planner.stages.least_bytes.Copying``). So of the step's possible parts for its passes each is too
short for its layers, or too long for those of the others.

Where sites may be left out each adds what it can, or nothing; and some may have all layers together, without stages, so that no
activations pass.

Links of pairs, latencies, most of what micro-batches wait for, memory and trunks are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import EXACT, Codecs, Wire
from hybridep.gating import gating
from hybridep.pipeline import sequences_of_place
from hybridep.shares import sequences_together
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.price import step_usd
from planner.sites.least_hit import least_hit
from planner.stages.least_bytes import Copying, Payloads, layer_dense_bytes, least_mean_bytes, least_site_bytes, most_homes

_CLOSE = 1e-6
"""The bound is found to this share."""
_CLOSE_IN_PARTS, _PARTS_OF_STEP = 1e-4, 64
"""The same where the last stage has a part of the step, and parts that are told apart."""
_NOTHING = 1e7
"""Less than no layers, for a site that can have none."""
_WHOLE = 1e-9
"""A layer that lacks only this share counts as whole."""
_PRICES, _FEW_PRICES = 40, 5
"""Prices of being first or last that are tried for each time, and where there is more to do."""
_MANY = 2**15
"""Sites times sizes of stages above which fewer prices are tried, and near shares of the sequences count as one."""
_PARTS = 8
"""Of the range of a site's possible shares, where sites have shares of their own."""
_NEAR = 1.5
"""How many times as large as the least of some shares the largest may be where these count as one."""


def least_s(cluster: Cluster, workload: Workload, stages: int = 2, codecs: Codecs = EXACT, *, alike: bool = True) -> float:
    """Seconds of a step below which there is no pipeline of ``stages`` or more for all sites. ``codecs``: between sites.
    ``alike``: experts are chosen alike; of measured popularity only activations count."""
    computed_s = _all_computation_s(cluster, workload)
    if stages < 2 or stages > cluster.sizes[0]:
        return computed_s
    return _Sites(cluster, workload, codecs, cluster.sizes[0] - stages + 1, alike=alike).least_s(computed_s)


def least_of_any_s(
    cluster: Cluster, workload: Workload, stages: int | None = None, codecs: Codecs = EXACT, *, alike: bool = True
) -> float:
    """Seconds of a step below which there is no pipeline of ``stages`` or more for any of the sites, which share out the global
    batch (``hybridep.shares.on_sites``); without a number also none without stages, nor of one site by itself."""
    computed_s, size = _all_computation_s(cluster, workload), cluster.sizes[0]
    found = []
    if stages is None:
        found.append(_least(computed_s, _Sites(cluster, workload, codecs, size, alike=alike).could_together))
    most = size - (stages or 2) + 1
    if most > 0:
        found.append(_Sites(cluster, workload, codecs, most, alike=alike).least_s(computed_s, idle=True))
    return min(found, default=computed_s)


def _least(low_s: float, could: Callable[[float], bool], close: float = _CLOSE) -> float:
    """Up to a share ``close`` the shortest time from ``low_s`` on that could be."""
    high_s = max(low_s, 1e-9)
    while not could(high_s):
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > close * high_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if could(middle_s) else (middle_s, high_s)
    return low_s


class _Sites:
    """What each site can do in a given time, in stages of up to ``most`` sites; sites that are alike once."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Codecs, most: int, *, alike: bool) -> None:
        model, training, number = workload.model, workload.training, cluster.sizes[0]
        wire, access = Wire(workload=workload, codecs=codecs), np.array(cluster.access_bytes_per_s)
        # Figures of ranks that share processors are those while all of them compute.
        sharing = cluster.gpu.sharing * cluster.num_gpus / number
        gpus = [cluster.site_gpus[site] for site in range(number)]
        speeds = np.array([[gpu.throughput, max(gpu.throughput, gpu.expert_flops_per_s)] for gpu in gpus]) * sharing
        weights = [cluster.token_weights, cluster.home_weights]
        every, self._count = np.unique(np.column_stack([*access, speeds, *weights]), axis=0, return_counts=True)
        own = every[:, 4:] if any(map(np.ptp, weights)) else np.ones((1, 2))
        sizes, share, self._most_share = _shares(cluster, workload, most, own[:, 0])
        tokens = float(training.tokens * training.micro_batches * cluster.num_gpus)
        self._layers, self._sizes, self._share = model.num_moe_layers, sizes, share
        """``_sizes`` [ways], ``_share`` and ``_most_share`` [sites or 1, ways]: the sizes of a site's stage, and its share of the
        sequences."""
        self._step_bytes = tokens * wire.activation_row_bytes
        """Bytes of all sequences' activations in a step, from one stage to the next."""
        rows_bytes = (wire.row_there_bytes, wire.row_back_bytes)
        copy_bytes = (wire.expert_gradient_bytes, wire.expert_bytes)
        self._copying: Copying | None = None
        # [up or down, sites or 1, ways]: of one layer.
        self._layer_bytes = np.zeros((2, *share.shape))
        self._numbers, self._sent_bytes = np.arange(1, most + 1), np.zeros(most)
        """``_numbers``: the sizes of stages; ``_sent_bytes``: what a site of each sends of one layer at least, mean over its
        stage's sites."""
        # Each site of a stage needs a sequence of every micro-batch.
        self._most_batches = np.maximum(sequences_of_place(workload, cluster) // self._numbers, 1)
        if alike and model.capacity_factor is None:
            away, fullest = least_hit(gating(workload), np.arange(model.num_experts))[::-1], list[int]()
            for size in self._numbers[1:].tolist():
                mine = np.flatnonzero(sizes == size)
                homes = most_homes(model.num_experts, cluster.home_weights, own[:, 1], size)
                for site, home in enumerate(homes):
                    rows = tokens * share[site, mine]
                    self._layer_bytes[:, site, mine] = least_site_bytes(away, home, rows, rows_bytes, copy_bytes)
                least, alike_homes = tokens * float(share[:, mine].min()), np.ptp(cluster.home_weights) == 0
                self._sent_bytes[size - 1] = least_mean_bytes(
                    away, size, least, sum(rows_bytes), sum(copy_bytes), alike=bool(alike_homes)
                )
                fullest.append(max(homes))
            if fullest:
                payloads = Payloads(row=sum(rows_bytes), expert=wire.expert_bytes, gradient=wire.expert_gradient_bytes)
                self._copying = Copying(away, fullest, self._by_number(np.maximum, self._most_share)[1:], tokens, payloads)
        self._dense_bytes = layer_dense_bytes(cluster, wire, self._numbers)
        self._layer_bytes += self._dense_bytes[sizes - 1]
        self._sent_bytes += self._dense_bytes
        self._attention_flops = 3 * workload.pre_expert_flops / training.tokens * tokens * share
        self._whole_flops = 3 * (workload.pre_expert_flops + _expert_flops(workload)) / training.tokens * tokens
        self._most_access = np.cumsum(-np.sort(-access, axis=1), axis=1)[:, :most]
        """[up or down, numbers]: bytes/s of so many sites together, the ones with the widest links."""
        self._access, self._speed, self._fastest = every.T[:2], every[:, 2:3], float(speeds[:, 1].max())
        fastest = np.concatenate([[0.0], np.cumsum(-np.sort(-speeds[:, 1]))])
        self._all_computed_s = _all_flops(cluster, workload) / fastest[sizes]
        """[ways]: seconds in which as many sites as a stage has, the fastest ones, compute all."""
        self._speeds = every[:, 3:4] + np.minimum(fastest[sizes - 1], fastest[sizes] - every[:, 3:4])
        """[sites, ways]: FLOP/s of a stage's sites together, of which the others are the fastest ones."""

    def _carried(self, step_s: float) -> FloatArray:
        """[sites in the middle, at an end, or in the only stage; sites; ways]: layers, whole ones and at most all; below 1 where
        it is none."""
        computed = np.minimum(self._speed / self._attention_flops, self._speeds / self._whole_flops)
        found = np.repeat((step_s * computed)[None], 3, axis=0)
        for way, layer_bytes in enumerate(self._layer_bytes):
            for end, passes in enumerate((2, 1, 0)):
                left_bytes = step_s * self._access[way][:, None] - passes * self._step_bytes * self._share
                with np.errstate(divide="ignore", invalid="ignore"):
                    most = np.where(layer_bytes > 0, left_bytes / layer_bytes, np.inf)
                found[end] = np.minimum(found[end], np.where(left_bytes >= 0, most, 0.0))
        return np.asarray(np.floor(np.minimum(found, self._layers) + _WHOLE))

    def could_together(self, step_s: float) -> bool:
        """Whether ``step_s`` is not too short for some number of the sites that have all layers, without stages."""
        able = (self._carried(step_s)[2] >= self._layers) * self._count[:, None]
        sent = (self._layers * self._numbers * self._sent_bytes <= step_s * self._most_access).all(axis=0)
        return bool(
            ((able.sum(axis=0) >= self._sizes) & np.asarray(sent)[self._sizes - 1] & (self._all_computed_s <= step_s)).any()
        )

    def least_s(self, computed_s: float, *, idle: bool = False) -> float:
        """Seconds below which there is no pipeline; ``computed_s``: nor anything else. ``idle``: sites may be left out."""
        least_s = _least(computed_s, lambda step_s: self._could(step_s, idle=idle))
        return _least(least_s, lambda step_s: self._could_in_parts(step_s, 0.0, step_s, idle=idle), _CLOSE_IN_PARTS)

    def _could(self, step_s: float, *, idle: bool) -> bool:
        """Whether ``step_s`` is not too short for all that sites do, whenever they do it."""
        carried = self._carried(step_s)[:2]
        able = np.where(carried >= 1, carried, 0.0 if idle else -np.inf)
        if not np.isfinite(able.max(axis=(0, 2))).all():
            return False
        return self._could_all(able, self._on_average(step_s, carried, idle=idle))

    def _could_in_parts(self, step_s: float, least_s: float, most_s: float, *, idle: bool) -> bool:
        """Whether ``step_s`` could be the last stage's passes, which take from ``least_s`` to ``most_s``, and what other stages
        copy before and return after them."""
        if self._copying is None:
            return True
        carried = self._carried(step_s)[:2]
        least, most = (0.0 if idle else -np.inf), [self._copied(step_s, step_s - least_s, passes) for passes in (2, 1)]
        copied = np.where(np.array(most) >= 1, most, least)
        able = np.minimum(np.where(carried >= 1, carried, least), copied[:, None, self._sizes - 1])
        means = (np.minimum(one, copied[:, None]) for one in self._on_average(step_s, carried, idle=idle))
        if not self._could_all(able, means, self._last(step_s, most_s, carried[1])):
            return False
        if most_s - least_s <= step_s / _PARTS_OF_STEP:
            return True
        middle_s = (least_s + most_s) / 2
        parts = ((least_s, middle_s), (middle_s, most_s))
        return any(self._could_in_parts(step_s, *part, idle=idle) for part in parts)

    def _copied(self, step_s: float, copying_s: float, passes: int) -> IntArray:
        """[numbers]: layers of a stage of so many sites, if what it copies takes so long, and its activations pass so often."""
        assert self._copying is not None
        found = self._copying.layers(
            copying_s,
            self._layers,
            (float(self._access[0].max()), float(self._access[1].max())),
            self._dense_bytes[1:],
            (self._numbers * self._sent_bytes)[1:],
            (step_s * self._most_access - passes * self._step_bytes).min(axis=0)[1:],
        )
        return np.concatenate([[self._layers], found])

    def _last(self, step_s: float, last_s: float, carried: FloatArray) -> FloatArray:
        """[numbers]: layers of the last stage, if it has so many sites, and ``last_s`` for its passes. ``carried``: at an end."""
        # Its ranks wait for the first micro-batch, and others for its last one: on average for half of either.
        passed_s = self._step_bytes / (self._numbers * float(self._access.max()) * self._most_batches)
        # Where sites have few sequences they may have more of the step than others.
        computed = (last_s - passed_s) * self._fastest / (self._by_number(np.minimum, self._share) * self._whole_flops)
        with np.errstate(divide="ignore", invalid="ignore"):
            sent = ((step_s * self._most_access - self._step_bytes) / (self._numbers * self._sent_bytes)).min(axis=0)
        found = np.minimum(
            np.minimum(computed, self._by_number(np.maximum, carried)), np.where(self._sent_bytes > 0, sent, np.inf)
        )
        return np.asarray(np.where(found >= 1 - _WHOLE, np.floor(found + _WHOLE), -np.inf))

    def _by_number(self, of: np.ufunc, values: FloatArray) -> FloatArray:
        """[numbers]: the least or the largest of ``values`` [sites or 1, ways], of stages of so many sites."""
        return np.asarray(of.reduceat(of.reduce(values, axis=0), np.searchsorted(self._sizes, self._numbers)))

    def _on_average(self, step_s: float, carried: FloatArray, *, idle: bool) -> Iterator[FloatArray]:
        """[sites in the middle or at an end, sites, numbers], for links up and down: layers of which no stage has more than the
        mean of its sites', if each sends what comes to it, too. ``carried``: by themselves, with each share."""
        alone = np.maximum.reduceat(carried, np.searchsorted(self._sizes, self._numbers), axis=2)
        sends = self._sent_bytes > 0
        for rates in self._access:
            means = alone.copy()
            for end, passes in enumerate((2, 1)):
                left_bytes = step_s * rates[:, None] - passes * self._step_bytes / self._numbers[sends]
                means[end][:, sends] = left_bytes / self._sent_bytes[sends]
            means = np.where(alone >= 1, means, -np.inf)
            yield np.maximum(means, 0.0) if idle else means

    def _could_all(self, able: FloatArray, means: Iterable[FloatArray], last: FloatArray | None = None) -> bool:
        """Whether all layers could be somewhere, in each way to count them. ``able``, ``means``: as `_carried` and `_on_average`
        have them; ``last``: as `_could_count` has it."""
        if not self._could_count(able, self._most_share, self._share, last):
            return False
        if not self._could_count(able, 1 / self._sizes, last=last):
            return False
        return all(self._could_count(mean, 1 / self._numbers, last=last) for mean in means)

    def _could_count(
        self, able: FloatArray, counts: FloatArray, fewest: FloatArray | None = None, last: FloatArray | None = None
    ) -> bool:
        """``able``: layers as `_carried` has them; ``counts`` [ways, or sites, ways]: how much each of them counts, which is one
        for all of a stage's sites together, so that each of its layers counts once. ``fewest``: how much at least, where it may
        be less; then ``counts`` are the most. ``last`` [numbers]: layers of the last stage, if it has so many sites, where these
        are known; others' are ``able`` then."""
        middle, finite = (able[0] * counts).max(axis=1), able[np.isfinite(able)]
        fewest = counts if fewest is None else fewest

        def most(price: float) -> tuple[float, float]:
            """(Layers of all sites together, if being first or last costs that much for a whole stage, or earns it below zero; by
            how much that grows with the price)."""
            # What costs more than it is worth is taken as seldom as may be.
            taken = np.where(able[1] >= price, counts, fewest)
            worth = (able[1] - price) * taken
            end = worth.argmax(axis=1)
            rows = np.arange(len(end))
            best_end = worth[rows, end]
            best = np.maximum(middle, best_end)
            ended = np.where(best_end > middle, taken[rows, end], 0.0)
            if last is None:
                return float((self._count * best).sum()) + 2 * price, 2 - float((self._count * ended).sum())
            # The last stage's sites are others, at best those that do least.
            best, ended = (np.repeat(one, self._count) for one in (np.maximum(best, -_NOTHING), ended))
            order = np.argsort(best, kind="stable")
            layers = last - np.cumsum(best[order])[self._numbers - 1]
            number = int(layers.argmax())
            return float(best.sum() + layers[number]) + price, 1 - float(ended[order[number + 1 :]].sum())

        # Of any price, what sites do at best is no less than what any pipeline does.
        high, least = float(np.abs(finite).max(initial=0.0) * self._count.sum()), self._layers * (1 - _WHOLE)
        low, price = -high, 0.0
        for _ in range(_PRICES if able.size <= _MANY else _FEW_PRICES):
            layers, slope = most(price)
            if layers < least:
                return False
            low, high = (low, price) if slope > 0 else (price, high)
            price = (low + high) / 2
        return True


def _shares(cluster: Cluster, workload: Workload, most: int, own: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    """[ways] sizes of stages, and [sites, ways] shares of the sequences that a site may have in one, from the least to the most:
    as many as its others, but for one of a micro-batch (``hybridep.shares``), where of many those that are near to each other are
    one. ``own`` [sites]: their ``Site.tokens``; where these differ what they may be in a stage of so many, in parts."""
    batch = sequences_of_place(workload, cluster)
    every, found = sequences_together(batch, ()), list[tuple[int, float, float]]()
    if np.ptp(cluster.token_weights):
        ranges = [_weighted_shares(every, cluster.token_weights, own, size) for size in range(1, most + 1)]
        edges = [low * (high / low) ** np.linspace(0, 1, _PARTS + 1) for low, high in ranges]
        return (
            np.repeat(np.arange(1, most + 1), _PARTS),
            np.concatenate([one[:, :-1] for one in edges], axis=1),
            np.concatenate([one[:, 1:] for one in edges], axis=1),
        )
    near = _NEAR if cluster.sizes[0] * most > _MANY else 1.0
    for size in range(1, most + 1):
        together = every[bisect_left(every, size) :]
        for share in sorted({number / one for one in together for number in (one // size, -(-one // size))}):
            if found and found[-1][0] == size and share <= near * found[-1][1]:
                found[-1] = size, found[-1][1], share
            else:
                found.append((size, share, share))
    sizes, least, largest = zip(*found, strict=True)
    shape = len(own), len(sizes)
    return np.array(sizes), np.broadcast_to(least, shape), np.broadcast_to(largest, shape)


def _weighted_shares(together: Sequence[int], weights: FloatArray, own: FloatArray, size: int) -> tuple[FloatArray, FloatArray]:
    """[sites, 1] each: the least and the largest share of the sequences that a site of weight ``own`` [sites] may have in a stage
    of so many of all sites (``weights``), with any number of ``together`` in a micro-batch, whole sequences and one at least."""
    ordered, number = np.sort(weights), np.array([one for one in together if one >= size])
    others = [np.delete(ordered, np.searchsorted(ordered, one)) for one in own]
    lightest = own + [one[: size - 1].sum() for one in others]
    heaviest = own + [one[len(one) - size + 1 :].sum() for one in others]
    low = np.maximum(np.floor(number * (own / heaviest)[:, None] - _WHOLE), 1) / number
    high = np.minimum(np.ceil(number * (own / lightest)[:, None] + _WHOLE), number - size + 1) / number
    return low.min(axis=1, keepdims=True), high.max(axis=1, keepdims=True)


def _all_computation_s(cluster: Cluster, workload: Workload) -> float:
    """Seconds of all computation of a step, shared perfectly by all ranks, or by some where ranks share processors. Rows that a
    capacity may drop are left out."""
    fastest, ranks = -np.sort(-_flops_per_s(cluster)), np.arange(1, cluster.num_gpus + 1)
    # Figures of ranks that share processors are those while all of them compute.
    together = np.cumsum(fastest) * np.minimum(cluster.gpu.sharing, cluster.num_gpus / ranks)
    return _all_flops(cluster, workload) / float(together.max())


def _flops_per_s(cluster: Cluster) -> FloatArray:
    """[G]: FLOP/s of each rank, at experts or at all else, whichever is more."""
    return cluster.of_ranks(lambda gpu: max(gpu.throughput, gpu.expert_flops_per_s))


def _all_flops(cluster: Cluster, workload: Workload) -> float:
    """FLOPs of a step, all ranks together; of rows that a capacity may drop none."""
    model, training = workload.model, workload.training
    routed = 3 * model.num_moe_layers * model.top_k * workload.expert_flops_per_row
    each = workload.flops_per_token - (0.0 if model.capacity_factor is None else routed)
    return each * training.tokens * training.micro_batches * cluster.num_gpus


def _expert_flops(workload: Workload) -> float:
    """FLOPs of one layer's routed experts forward, a rank's micro-batch on average; of rows that a capacity may drop none."""
    model = workload.model
    return 0.0 if model.capacity_factor is not None else workload.training.tokens * model.top_k * workload.expert_flops_per_row


def least_usd(cluster: Cluster, workload: Workload, step_s: float, codecs: Codecs = EXACT) -> float:
    """Dollars of a step below which there is no pipeline: all ranks for ``step_s``, which no step is below, and activations that
    cross one border at least, there and back, where bytes cost least."""
    crossed_usd = 0.0
    if cluster.has_egress_prices:
        training, away = workload.training, ~np.eye(cluster.sizes[0], dtype=np.bool_)
        row_bytes = Wire(workload=workload, codecs=codecs).activation_row_bytes
        once_bytes = training.tokens * training.micro_batches * cluster.num_gpus * row_bytes
        crossed_usd = 2.0 * once_bytes * float(cluster.egress_usd_per_byte[away].min())
    return step_usd(cluster.rent_usd_per_s, crossed_usd, step_s)


def least_usd_of_any(cluster: Cluster, workload: Workload) -> float:
    """Dollars of a step below which there is no plan for any of the sites: all computation by the ranks that cost least for it,
    which are never idle and send nothing to other sites."""
    usd_per_s = cluster.of_ranks(lambda gpu: gpu.price or 0.0)
    return _all_flops(cluster, workload) * float((usd_per_s / _flops_per_s(cluster)).min()) / cluster.gpu.sharing
