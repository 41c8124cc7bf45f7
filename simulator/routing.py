"""Uneven choices of experts: popularity by Zipf's law, different in every layer, drifting from step to step."""

from __future__ import annotations

import math

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.pipeline import AnyPlan
from hybridep.routing import Routing
from hybridep.shares import site_sequences
from hybridep.workload import DropPolicy
from simulator.errors import SimulationError


def zipf_routing(plan: AnyPlan, *, exponent: float, seed: int, step: int = 0, drift: float = 0.0) -> Routing:
    """Choices of a training step: the i-th most popular of a layer's experts has a share proportional to i ** -exponent.

    exponent: 0 is uniform. Each token draws its top-k without replacement (Gumbel's trick; Kool et al., ICML 2019); of groups of
    experts, where the model limits these, those with the best experts.
    drift: how far the order of popularity moves per step, from 0 (never) to 1 (a new order each step): scores whose order
    it is follow an autoregressive process. The same seed and step give the same choices, whatever the plan's placement.
    Experts of limited capacity drop what they have no room for, as in training.
    Returns (MoE layer, micro-batch) -> [G, T, K] expert ids, -1 for dropped choices and for tokens that a rank lacks. Raises
    SimulationError for values out of range.
    """
    if not (exponent >= 0 and math.isfinite(exponent) and 0 <= drift <= 1 and step >= 0):
        raise SimulationError(
            f"routing: exponent {exponent}, step {step} and drift {drift} must not be negative, drift at most 1"
        )
    model, training = plan.workload.model, plan.workload.training
    num_layers, num_experts = model.num_moe_layers, model.num_experts
    rng = np.random.default_rng([seed, 0])
    score = rng.standard_normal((num_layers, num_experts))
    for _ in range(step):
        score = math.sqrt(1 - drift**2) * score + drift * rng.standard_normal(score.shape)
    rank = np.argsort(np.argsort(-score, axis=1), axis=1)
    log_share = -exponent * np.log1p(rank)
    tokens = np.random.default_rng([seed, 1, step])
    own_tokens = training.sequence_length * np.array(site_sequences(plan.cluster, plan.workload))
    shape = (plan.cluster.num_gpus, int(own_tokens.max()), num_experts)
    lacks = np.arange(shape[1])[None, :] >= np.repeat(own_tokens, plan.cluster.ranks_per_site)[:, None]
    choices, capacity = {}, plan.workload.expert_capacity
    for layer in range(num_layers):
        for micro_batch in range(training.micro_batches):
            noise = tokens.gumbel(size=shape)
            drawn = log_share[layer] + noise
            if model.limits_groups:
                drawn = _of_best_groups(drawn, model.expert_groups, model.groups_per_token)
            top = np.argpartition(-drawn, model.top_k - 1, axis=-1)[..., : model.top_k]
            if capacity is not None:
                top = _within(capacity, top, noise, training.sequence_length, model.token_drop_policy)
            choices[layer, micro_batch] = np.where(lacks[..., None], -1, top)
    return choices


def _within(capacity: int, top: IntArray, noise: FloatArray, length: int, policy: DropPolicy) -> IntArray:
    """[G, T, K]: -1 in place of choices that experts have no room for, of each sequence so many at most."""
    chosen = np.full(noise.shape, -np.inf)
    if policy is DropPolicy.POSITION:
        noise = np.broadcast_to(-np.arange(noise.shape[1], dtype=np.float64)[:, None], noise.shape)
    np.put_along_axis(chosen, top, np.take_along_axis(noise, top, axis=-1), axis=-1)
    of_sequences = chosen.reshape(noise.shape[0], -1, length, noise.shape[2])
    least = np.partition(of_sequences, length - capacity, axis=2)[:, :, length - capacity, None]
    fits = (of_sequences >= least).reshape(noise.shape)
    return np.where(np.take_along_axis(fits, top, axis=-1), top, -1)


def _of_best_groups(drawn: FloatArray, groups: int, per_token: int) -> FloatArray:
    """[G, T, E]: nothing for experts outside each token's best groups."""
    of_groups = drawn.reshape(*drawn.shape[:2], groups, -1)
    best = of_groups.max(axis=3)
    own = best >= np.partition(best, groups - per_token, axis=2)[:, :, groups - per_token, None]
    return np.where(own[..., None], of_groups, -np.inf).reshape(drawn.shape)
