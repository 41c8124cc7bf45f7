"""What the sites of a stage send each other at least, whatever they hold: for the bound of pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Wire
from hybridep.topology import Cluster

_WHOLE = 1e-9
"""An expert, or a second, that lacks only this share counts as whole."""


def most_homes(experts: int, weights: FloatArray, own: FloatArray, size: int) -> list[int]:
    """[sites]: experts that may live at a site of weight ``own`` [sites] (``Site.experts``) at most, in a stage of so many of all
    sites (``weights``)."""
    if np.ptp(weights) == 0:
        return [-(-experts // size)] * len(own)
    ordered, found = np.sort(weights), list[int]()
    for one in own:
        lightest = np.delete(ordered, np.searchsorted(ordered, one))[: size - 1].sum()
        found.append(min(math.ceil(experts * one / (one + lightest) + _WHOLE), experts) if one > 0 else 0)
    return found


def least_site_bytes(
    away: FloatArray, home: int, tokens: FloatArray, rows_bytes: tuple[int, int], copy_bytes: tuple[int, int]
) -> FloatArray:
    """[up or down, shares]: over a site's access link, of one layer in a stage, by the site's tokens [shares]; whatever it holds
    beside the ``home`` experts that live there at most. ``away`` [E + 1]: the share of tokens, at least, that need others where
    so many experts are held."""
    experts = len(away) - 1
    held = np.arange(min(home, experts), experts + 1)
    copies = (held - home).clip(0)[:, None]
    both = [copies * copy + np.outer(away[held], tokens) * rows for copy, rows in zip(copy_bytes, rows_bytes, strict=True)]
    return np.stack([one.min(axis=0) for one in both])


def least_mean_bytes(away: FloatArray, size: int, tokens: float, row_bytes: int, copy_bytes: int, *, alike: bool = True) -> float:
    """Of one layer, all that the sites of a stage of so many send each other, over their number; whatever they hold. ``tokens``:
    of each, at least; ``row_bytes`` there and back, ``copy_bytes`` of a copy and its gradient. ``alike``: as many experts live
    at each, but for one."""
    experts = len(away) - 1
    held, (each, more) = np.arange(experts + 1), divmod(experts, size)
    least = np.minimum.accumulate((held * copy_bytes + tokens * row_bytes * away)[::-1])[::-1] - held * copy_bytes
    if alike:
        return float((size - more) * least[each] + more * least[min(each + 1, experts)]) / size
    # Of any numbers with this mean: as much as two of them, on either side of it.
    mean = experts / size
    below, above = held[held <= mean][:, None], held[held > mean - 1e-9]
    share = (mean - below) / np.maximum(above - below, 1e-9)
    return float(((1 - share) * least[below] + share * least[above]).min())


def layer_dense_bytes(cluster: Cluster, wire: Wire, sizes: IntArray) -> FloatArray:
    """[sizes of stages]: what a site sends, and what comes to it, of one layer's dense gradients: the other sites' parts of its
    own, and its part of all; a little less, for parts that are not equal, and codecs that have larger parts of some lengths."""
    model, many = wire.workload.model, 2**30
    params = model.model_copy(update={"num_layers": 2, "num_dense_layers": 0, "part": None}).dense_params
    params -= model.model_copy(update={"num_layers": 1, "num_dense_layers": 0, "part": None}).dense_params
    element_bytes = float(wire.dense_bytes(np.array([many]))[0]) / many * (1 - 1e-6)
    parts = (params * (sizes - 1) / sizes - cluster.ranks_per_site * sizes).clip(0)
    return np.asarray(2 * element_bytes * np.where(sizes > 1, parts, 0.0))


class Payloads(NamedTuple):
    """Bytes of what crosses links between sites."""

    row: int
    """Of a token, there and back."""
    expert: int
    gradient: int
    """Of an expert."""


class Copying:
    """How many layers stages of 2, 3, ... sites can have where what they copy takes so long at most.

    Nothing passes a site before its copies have come for the first micro-batch, and their gradients, and those of dense parts,
    leave after the last one. A rank of a later stage waits for all of its sequences, whichever sites they come through. So what
    it has of a step for its passes is, on average over sequences, no more than what copies and such gradients leave of it at the
    sites of the stage before, by the sequences that each lets through. For what sites hold no copies of their tokens are sent.
    """

    def __init__(self, away: FloatArray, homes: Sequence[int], most_share: FloatArray, tokens: float, payloads: Payloads) -> None:
        """``away`` [E + 1]: the share of tokens, at least, that need others where so many experts are held. By numbers of sites:
        ``homes``, experts that live at one of them at most, and ``most_share``, of the sequences that one of them may have.
        ``tokens``: of a step."""
        self._payloads, copies = payloads, np.arange(len(away))
        # Sites, and layers, may copy different numbers: no fewer tokens are sent than if all copied the mean.
        left = np.array([[*_convex(away[home:]), *[0.0] * home] for home in homes])
        copied = copies * (payloads.expert + payloads.gradient) / most_share[:, None]
        self._sent_bytes = copied + tokens * payloads.row * left
        """[numbers, copies]: by all of a stage's sites for a layer, where so many are copied, on average over sequences."""
        self._least_bytes = np.minimum.accumulate(self._sent_bytes, axis=1)

    def layers(
        self,
        copying_s: float,
        most: int,
        access: tuple[float, float],
        dense_bytes: FloatArray,
        sent_bytes: FloatArray,
        room_bytes: FloatArray,
    ) -> IntArray:
        """[numbers]: up to how many, ``most`` at most. ``access``: the fastest links up and down. By numbers of sites:
        ``dense_bytes`` of one layer at each; what all of them send for one layer whatever they copy (``sent_bytes``), and may
        send for all of them (``room_bytes``)."""
        up, down = access
        layers, dense, sizes = np.arange(1, most + 1), dense_bytes[:, None], np.arange(2, len(dense_bytes) + 2)[:, None]
        copies = (copying_s / layers - dense / up) / (self._payloads.expert / down + self._payloads.gradient / up)
        sent = np.maximum(self._of_at_most(copies.clip(0.0)) + sizes * dense, sent_bytes[:, None])
        could = (copies >= -_WHOLE) & (layers * sent <= room_bytes[:, None] * (1 + _WHOLE))
        return np.asarray(np.cumprod(could, axis=1).sum(axis=1))

    def _of_at_most(self, copies: FloatArray) -> FloatArray:
        """[numbers, layers] bytes, as ``_sent_bytes``, of so many ``copies`` at most."""
        most = self._sent_bytes.shape[1] - 1
        copies = np.minimum(copies, most)
        below = copies.astype(np.int64)
        first, second = (np.take_along_axis(self._sent_bytes, place, axis=1) for place in (below, np.minimum(below + 1, most)))
        best = np.take_along_axis(self._least_bytes, below, axis=1)
        return np.asarray(np.minimum(best, first + (copies - below) * (second - first)))


def _convex(values: FloatArray) -> FloatArray:
    """The largest convex function below ``values`` [n]."""
    found: list[int] = []
    for place, value in enumerate(values):
        while len(found) > 1:
            first, last = found[-2], found[-1]
            if (values[last] - values[first]) * (place - first) < (value - values[first]) * (last - first):
                break
            found.pop()
        found.append(place)
    return np.asarray(np.interp(np.arange(len(values)), found, values[found]))
