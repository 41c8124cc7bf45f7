"""What a layer's gate will choose, from what the gate of the layer before has chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridep.arrays import FloatArray

_FADING = 0.9
"""What a pair of loads counts less than one that is a micro-batch younger."""
_ROUNDS = 500
_CLOSE = 1e-9


def predicted_load(before: Sequence[FloatArray], after: Sequence[FloatArray], now: FloatArray) -> FloatArray:
    """Of the next layer, [ranks, experts], for the load `now` of this one; `before` and `after` are theirs in earlier
    micro-batches, as many of each, oldest first."""
    return np.asarray(now @ transition(before, after).T)


def transition(before: Sequence[FloatArray], after: Sequence[FloatArray]) -> FloatArray:
    """[E, E]: the share of each expert's tokens (column) that choose each expert of the next layer (row).

    The least sum of squares |after - P before|^2 over all ranks, with columns of P on the simplex; recent ones count more
    (MixNet, appendix on traffic prediction, solved there by SLSQP; convex, so accelerated projected gradients find the same).
    """
    weight = _FADING ** np.arange(len(before))[::-1]
    x = np.concatenate([w**0.5 * load for w, load in zip(weight, before, strict=True)])
    y = np.concatenate([w**0.5 * load for w, load in zip(weight, after, strict=True)])
    square, product = x.T @ x, y.T @ x
    steep = float(np.linalg.eigvalsh(square)[-1])
    num_experts = square.shape[0]
    best = np.full((num_experts, num_experts), 1 / num_experts)
    if steep <= 0:
        return best
    ahead, momentum = best, 1.0
    for _ in range(_ROUNDS):
        moved = _on_simplex(ahead - (ahead @ square - product) / steep)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - best)
        done = float(np.abs(moved - best).max()) < _CLOSE
        best, momentum = moved, following
        if done:
            break
    return best


def _on_simplex(columns: FloatArray) -> FloatArray:
    """The nearest columns without negative entries that sum to 1 (Duchi et al., ICML 2008)."""
    falling = -np.sort(-columns, axis=0)
    excess = (np.cumsum(falling, axis=0) - 1) / np.arange(1, len(columns) + 1)[:, None]
    kept = (falling > excess).sum(axis=0)
    return np.asarray(np.maximum(columns - excess[kept - 1, np.arange(columns.shape[1])], 0.0))
