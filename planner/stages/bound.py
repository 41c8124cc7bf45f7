"""What no pipeline of two stages or more is below, whatever its stages; and what no plan for any of the sites is below.

A site in a stage works on a share of all sequences, which is the same for all of the stage's n sites but for one sequence of each
micro-batch. So this share of all activations leaves it forward, for the next stage, and of their gradients back, for the one
before; as much comes to it. Only in the first and the last stage it is half of that, and there are two of those: their sites'
shares make two together. Between the sites of a stage each layer is exchanged: a site that holds h of a layer's experts has
fetched what is not its own of them, gives back their gradients, and sends each token away that chose another one, forward and
backward. Whatever h is, each layer takes that much of its access links, beside what its own attention computes, and all sites of
the stage together compute all of it. So in a given time a site carries so many layers, whole ones, one at least, with each share;
and all sites' layers times their shares, or over the sizes of their stages, must make up the model. And all computation, shared
perfectly, takes its time.

Where sites may be left out each adds what it can, or nothing; and some may have all layers together, without stages, so that no
activations pass.

Links of pairs, latencies, micro-batches, memory and trunks are left out, and what waits for what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import comb

import numpy as np

from hybridep.codecs import EXACT, Codecs, Wire
from hybridep.pipeline import sequences_of_place
from hybridep.placement import IntArray
from hybridep.shares import sequences_together
from hybridep.topology import Cluster
from hybridep.traffic import FloatArray
from hybridep.workload import Workload
from planner.price import step_usd

_CLOSE = 1e-6
"""The bound is found to this share."""
_WHOLE = 1e-9
"""A layer that lacks only this share counts as whole."""
_PRICES = 24
"""Prices of being first or last that are tried for each time, about."""
_MANY = 2**15
"""Sites times sizes of stages above which fewer prices are tried, and near shares of the sequences count as one."""
_NEAR = 1.5
"""How many times as large as the least of some shares the largest may be where these count as one."""


def least_s(cluster: Cluster, workload: Workload, stages: int = 2, codecs: Codecs = EXACT, *, alike: bool = True) -> float:
    """Seconds of a step below which there is no pipeline of ``stages`` or more for all sites. ``codecs``: between sites.
    ``alike``: experts are chosen alike; of measured popularity only activations count."""
    computed_s = _all_computation_s(cluster, workload)
    if stages < 2 or stages > cluster.sizes[0]:
        return computed_s
    return _least(computed_s, _Sites(cluster, workload, codecs, cluster.sizes[0] - stages + 1, alike=alike).could)


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
        sites = _Sites(cluster, workload, codecs, most, alike=alike)
        found.append(_least(computed_s, lambda step_s: sites.could(step_s, idle=True)))
    return min(found, default=computed_s)


def _least(low_s: float, could: Callable[[float], bool]) -> float:
    """Up to ``_CLOSE`` the shortest time from ``low_s`` on that could be."""
    high_s = max(low_s, 1e-9)
    while not could(high_s):
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > _CLOSE * high_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if could(middle_s) else (middle_s, high_s)
    return low_s


class _Sites:
    """What each site can do in a given time, in stages of up to ``most`` sites; sites that are alike once."""

    def __init__(self, cluster: Cluster, workload: Workload, codecs: Codecs, most: int, *, alike: bool) -> None:
        model, training, number = workload.model, workload.training, cluster.sizes[0]
        wire, (sizes, share, self._most_share) = Wire(workload=workload, codecs=codecs), _shares(cluster, workload, most)
        tokens = float(training.tokens * training.micro_batches * cluster.num_gpus)
        self._layers, self._sizes, self._share = model.num_moe_layers, sizes, share
        """``_sizes``, ``_share`` and ``_most_share`` [ways]: the sizes of a site's stage, and its shares of the sequences."""
        self._step_bytes = tokens * wire.activation_row_bytes
        """Bytes of all sequences' activations in a step, from one stage to the next."""
        rows_bytes = (wire.row_there_bytes, wire.row_back_bytes)
        copy_bytes = (wire.expert_gradient_bytes, wire.expert_bytes)
        # [up or down, ways]: of one layer.
        self._layer_bytes = np.zeros((2, sizes.size))
        if alike and model.capacity_factor is None:
            for size in np.unique(sizes[sizes > 1]):
                mine = sizes == size
                own = tokens * share[mine]
                self._layer_bytes[:, mine] = _least_bytes(model.num_experts, model.top_k, int(size), own, rows_bytes, copy_bytes)
        self._attention_flops = 3 * workload.pre_expert_flops / training.tokens * tokens * share
        # Figures of ranks that share processors are those while all of them compute.
        sharing = cluster.gpu.sharing * cluster.num_gpus / number
        gpus = [cluster.site_gpus[site] for site in range(number)]
        speeds = np.array([[gpu.throughput, max(gpu.throughput, gpu.expert_flops_per_s)] for gpu in gpus]) * sharing
        self._whole_flops = 3 * (workload.pre_expert_flops + _expert_flops(workload)) / training.tokens * tokens
        every, self._count = np.unique(np.column_stack([*cluster.access_bytes_per_s, speeds]), axis=0, return_counts=True)
        self._access, self._speed = every.T[:2], every[:, 2:3]
        fastest = np.concatenate([[0.0], np.cumsum(-np.sort(-speeds[:, 1]))])
        self._all_computed_s = _all_flops(cluster, workload) / fastest[sizes]
        """[ways]: seconds in which as many sites as a stage has, the fastest ones, compute all."""
        self._speeds = every[:, 3:] + np.minimum(fastest[sizes - 1], fastest[sizes] - every[:, 3:])
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
        return bool(((able.sum(axis=0) >= self._sizes) & (self._all_computed_s <= step_s)).any())

    def could(self, step_s: float, *, idle: bool = False) -> bool:
        """Whether ``step_s`` is not too short for any pipeline, as far as is known here. ``idle``: sites may be left out."""
        carried = self._carried(step_s)[:2]
        able = np.where(carried >= 1, carried, 0.0 if idle else -np.inf)
        if not np.isfinite(able.max(axis=(0, 2))).all():
            return False
        return self._could(able, self._most_share) and self._could(able, 1 / self._sizes)

    def _could(self, able: FloatArray, counts: FloatArray) -> bool:
        """``able``: layers as `_carried` has them; ``counts`` [ways]: how much each of them counts, which makes one for all of a
        stage's sites together, so that each of its layers counts once."""
        worth = able * counts

        def most(price: float) -> float:
            """Layers of all sites together, if being first or last costs that much for a whole stage, or earns it below zero."""
            best = np.maximum(worth[0].max(axis=1), (worth[1] - price * counts).max(axis=1))
            return float((self._count * best).sum()) + 2 * price

        # Of any price, what sites do at best is no less than what any pipeline does.
        high, least = float(self._layers * self._count.sum()), self._layers * (1 - _WHOLE)
        low = -high
        if most(0.0) < least:
            return False
        for _ in range(_PRICES if able.size <= _MANY else 2):
            third = (high - low) / 3
            one, other = (most(price) for price in (low + third, high - third))
            if min(one, other) < least:
                return False
            low, high = (low, high - third) if one < other else (low + third, high)
        return True


def _shares(cluster: Cluster, workload: Workload, most: int) -> tuple[IntArray, FloatArray, FloatArray]:
    """[ways] sizes of stages, and shares of the sequences that a site may have in one: as many as its others, but for one of a
    micro-batch (``hybridep.shares``). From the least to the most, since of many those that are near to each other are one."""
    batch = sequences_of_place(workload, cluster)
    every, found = sequences_together(batch, 1), list[tuple[int, float, float]]()
    near = _NEAR if cluster.sizes[0] * most > _MANY else 1.0
    for size in range(1, most + 1):
        together = every[bisect_left(every, size) :]
        for share in sorted({number / one for one in together for number in (one // size, -(-one // size))}):
            if found and found[-1][0] == size and share <= near * found[-1][1]:
                found[-1] = size, found[-1][1], share
            else:
                found.append((size, share, share))
    sizes, least, largest = zip(*found, strict=True)
    return np.array(sizes), np.array(least), np.array(largest)


def _least_bytes(
    experts: int, top_k: int, size: int, tokens: FloatArray, rows_bytes: tuple[int, int], copy_bytes: tuple[int, int]
) -> FloatArray:
    """[up or down, shares]: over a site's access link, of one layer in a stage of so many sites, by the site's tokens [shares];
    whatever it holds."""
    home = -(-experts // size)
    held = np.arange(min(home, experts), experts + 1)
    away = np.array([1 - comb(number, top_k) / comb(experts, top_k) for number in held.tolist()])
    copies = (held - home).clip(0)[:, None]
    both = [copies * copy + np.outer(away, tokens) * rows for copy, rows in zip(copy_bytes, rows_bytes, strict=True)]
    return np.stack([one.min(axis=0) for one in both])


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
    flops = model.num_moe_layers * (workload.pre_expert_flops + _expert_flops(workload)) + workload.head_flops
    return float(3 * training.micro_batches * flops * cluster.num_gpus)


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
