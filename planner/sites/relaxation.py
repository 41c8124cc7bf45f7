"""A lower bound on the step time of every serving table, and what proves it.

Plans are sorted into boxes: how long one gather takes (between sites), how long one return of gradients takes, and how far
tokens travel. Inside a box the gather's time limits how many experts M_h a site can hold: what comes in through its links
in that time, beside its own, within its memory. A token's chance of needing one of n experts is concave in n, so n <= M_h
experts of a site cost at least n P(M_h) / M_h rows. With that, rows are linear in n[d, h], the number of experts that site
h serves for tokens of site d, and for any weights on the links, which add up to what a second on the busiest link costs,

    sum_links weight * (rows over the link / its bandwidth)

is at most the time of the token exchanges. Minimised over n with sum_h n[d, h] = E and n[d, h] <= M_h this splits by d into
fractional knapsacks, solved by sorting. So a box, its weights and the lower corner of its times are a proof that anyone
can evaluate with a sort; where the weights come from (``planner.sites.lp``) does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridep.plan import Residency
from hybridep.traffic import FloatArray, gathers_and_returns
from planner.memory import TOLERANCE
from planner.sites.classes import SiteClasses, site_classes
from planner.sites.cost import fixed_cost
from planner.sites.problem import SiteProblem

SLACK = 1e-9
"""Caps are rounded down to whole experts after adding this share, so that rounding never cuts off a plan."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """Plans with this residency whose times lie in these closed intervals, in seconds."""

    residency: Residency
    gather_s: tuple[float, float]
    """Of one gather between sites, latency included."""
    return_s: tuple[float, float]
    reach: tuple[int, int]
    """Positions in ``Relaxation.reaches_s``: latency of one micro-batch's token exchanges between the farthest sites that
    exchange tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """What a second on each link costs, all of them at least zero (dual variables); equal in each class of sites."""

    out: FloatArray
    """[C]: up links, tokens on their way to experts (dispatch, combine backward)."""
    into: FloatArray
    """[C]: down links, likewise."""
    back_out: FloatArray
    """[C]: up links, results on their way back (combine, dispatch backward)."""
    back_into: FloatArray
    """[C]: down links, likewise."""
    compute: FloatArray
    """[C]: expert computation of the site's ranks."""
    pair: FloatArray | None = None
    """[D, D]: pair links, on the way to experts."""
    back_pair: FloatArray | None = None
    """[D, D] indexed by (tokens' site, serving site): pair links, on the way back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """What a box leaves possible."""

    most_held: FloatArray
    """[C]: M_h, experts that a site of class h can hold."""
    copies: FloatArray
    """[C, C]: copies of the row's home site's experts at the column's site, another one."""
    most_copies: float
    """Of all sites together."""
    allowed: FloatArray
    """[C, C]: 1 where tokens of the row's site may be served at the column's, another one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """The bound's ingredients for one problem."""

    problem: SiteProblem

    @cached_property
    def classes(self) -> SiteClasses:
        """Sites that nothing tells apart are treated together."""
        return site_classes(self.problem)

    @cached_property
    def budgets_s(self) -> tuple[float, float, float]:
        """Cost of one layer's step per second and row byte: (forward, back) exchanges in bytes per row over all
        micro-batches, and forward expert computation in seconds per second."""
        wire, batches = self.problem.wire, self.problem.workload.training.micro_batches
        forward = batches * (wire.dispatch_row_bytes + wire.combine_row_bytes)
        back = batches * (wire.combine_row_bytes + wire.dispatch_gradient_row_bytes)
        return float(forward), float(back), 3.0 * batches

    @cached_property
    def base_s(self) -> float:
        """Step time that no plan changes."""
        passes = 3 * self.problem.workload.training.micro_batches
        return fixed_cost(self.problem).total_s + self.num_layers * passes * self.problem.block_s

    @cached_property
    def expert_s(self) -> FloatArray:
        """[C]: ``SiteProblem.expert_s_per_choice`` of the fastest site of each class."""
        return -self.classes.best(-self.problem.expert_s_per_choice)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.problem.workload.model.num_moe_layers

    @cached_property
    def rows(self) -> float:
        """Tokens of one site and micro-batch, at least."""
        return self.problem.num_inside * float(self.problem.tokens.min())

    @cached_property
    def user_rows(self) -> FloatArray:
        """[C]: the same of the sites of each class."""
        tokens = self.problem.tokens
        return self.rows * -self.classes.best(-tokens) / float(tokens.min())

    @cached_property
    def token_latency_s(self) -> FloatArray:
        """[C, C]: latency that one micro-batch costs when these two sites exchange tokens: counts, dispatch and combine
        backward one way, combine and dispatch backward the other."""
        latency = self.classes.latency_s
        return np.asarray(3 * latency + 2 * latency.T)

    @cached_property
    def reaches_s(self) -> FloatArray:
        """Ascending: zero for nobody, then every latency at which a further pair of sites may exchange tokens."""
        return np.concatenate([[0.0], np.unique(self.token_latency_s[self.classes.others > 0])])

    @cached_property
    def full_gather_s(self) -> tuple[float, float]:
        """Between sites, when every site gets every expert; no gather or return takes longer."""
        problem, size = self.problem, self.problem.num_sites
        if size < 2:
            return 0.0, 0.0
        homes, pair_rate = problem.homes.astype(np.float64), problem.pair_bytes_per_s
        given, taken = homes * (size - 1), homes.sum() - homes
        from_home, to_home = (0.0, 0.0) if pair_rate is None else ((homes / pair_rate.T).max(), (homes / pair_rate).max())
        if problem.cluster.trunks:
            away = homes[:, None] * ~np.eye(size, dtype=np.bool_)
            from_home = max(from_home, float((problem.trunk_s_per_byte @ away.ravel()).max()))
            to_home = max(to_home, float((problem.trunk_s_per_byte @ away.T.ravel()).max()))

        slowest_s_per_byte = float(problem.window_s_per_byte[0].max())

        def seconds(out: FloatArray, into: FloatArray, pair: float, weight: float) -> float:
            limit = weight * float(max((out / problem.up_bytes_per_s).max(), (into / problem.down_bytes_per_s).max(), pair))
            # A rank's own link may be the narrower one.
            ranks = problem.cluster.num_gpus // size
            owned = float(np.bincount(problem.home, minlength=size * ranks).max())
            most = owned * (size - 1) + problem.num_experts
            limit = max(limit, most * weight / problem.gpu_bytes_per_s, owned * weight * slowest_s_per_byte)
            return limit * (1 + SLACK) + float(problem.latency_s.max())

        there, back = problem.wire.expert_bytes, problem.wire.expert_gradient_bytes
        return seconds(given, taken, from_home, there), seconds(taken, given, to_home, back)

    @cached_property
    def full_gather_cost_s(self) -> float:
        """What one layer takes at most when every site gets every expert, beside what no plan changes."""
        _, _, compute = self.budgets_s
        copies_s = self.copies_s(Residency.MICROBATCH, *self.full_gather_s)
        expert_s = float(self.problem.expert_s_per_choice.max())
        return copies_s + compute * expert_s * self.problem.num_experts * self.problem.num_sites

    def roots(self) -> list[Box]:
        """Boxes that hold every plan."""
        gather, back = self.full_gather_s
        return [
            Box(residency=residency, gather_s=(0.0, gather), return_s=(0.0, back), reach=(0, len(self.reaches_s) - 1))
            for residency in self.problem.residencies
        ]

    def copies_s(self, residency: Residency, gather_s: float, return_s: float) -> float:
        """What gathers and returns of these lengths add to one layer's step; rises with both (``planner.cost``)."""
        batches = self.problem.workload.training.micro_batches
        gathers, returns = gathers_and_returns(residency, batches)
        beside = self.problem.beside_s
        hidden = min(gathers, batches) * min(gather_s, beside) + returns * min(return_s, 2 * beside)
        return gathers * gather_s + returns * return_s - hidden

    def corner_s(self, box: Box) -> float:
        """What every plan of the box spends in one layer on copies and on the latency of token exchanges."""
        batches = self.problem.workload.training.micro_batches
        latency = batches * float(self.reaches_s[box.reach[0]])
        return self.copies_s(box.residency, box.gather_s[0], box.return_s[0]) + latency

    def limits(self, box: Box) -> Limits:
        """What the upper ends of the box's intervals leave possible."""
        problem, kinds = self.problem, self.classes
        homes = kinds.homes
        weight, weight_back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
        up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
        gather, back = box.gather_s[1] * (1 + SLACK), box.return_s[1] * (1 + SLACK)
        there = np.where(kinds.others > 0, np.maximum(gather - kinds.latency_s, 0.0), 0.0)
        again = np.where(kinds.others > 0, np.maximum(back - kinds.latency_s.T, 0.0), 0.0)
        there_rate, again_rate = np.minimum(up[:, None], down[None, :]), np.minimum(down[:, None], up[None, :])
        if kinds.pair_bytes_per_s is not None:
            there_rate = np.minimum(there_rate, kinds.pair_bytes_per_s)
            again_rate = np.minimum(again_rate, kinds.pair_bytes_per_s.T)
        # [home site, holder]: whole experts that fit through in time.
        copies = np.minimum(whole(there * there_rate / weight), whole(again * again_rate / weight_back))
        copies = np.minimum(copies, homes[:, None])
        most = np.minimum((copies * kinds.others.T).sum(axis=0), self.copies_in_memory(box.residency))
        most = np.minimum(most, whole(there.max(axis=0) * down / weight))
        most = np.minimum(most, whole(again.max(axis=0) * up / weight_back))
        uploads = np.minimum((copies * kinds.others).sum(axis=1), whole(there.max(axis=1) * up / weight))
        uploads = np.minimum(uploads, whole(again.max(axis=1) * down / weight_back))
        allowed = (self.token_latency_s <= self.reaches_s[box.reach[1]]) & (box.reach[1] > 0)
        if problem.permissions is not None:
            permitted = np.zeros_like(allowed)
            np.logical_or.at(permitted, (kinds.label[:, None], kinds.label[None, :]), problem.permissions.serve)
            allowed &= permitted
        return Limits(
            most_held=np.minimum(homes + most, float(problem.num_experts)),
            copies=np.minimum(copies, np.maximum(most, 0.0)),
            most_copies=float(uploads @ kinds.count),
            allowed=(allowed * (kinds.others > 0)).astype(np.float64),
        )

    def copies_in_memory(self, residency: Residency) -> FloatArray:
        """[D]: no site keeps more copies: its ranks' memory beside what is there in any case. Activations of routed
        tokens and buffers are left out, and copies spread evenly inside, so this is never too few."""
        accumulates = self.problem.workload.training.micro_batches > 1
        # Weights and gradients of the copies of all layers, or of those of one layer; see ``planner.memory``.
        number = self.num_layers * (2.0 if accumulates else 1.0) + 2.0 if residency is Residency.STEP else 3.0
        weight = self.problem.workload.expert_bytes * number
        return self.classes.best(np.where(self.room_bytes < 0, -1.0, whole(self.room_bytes / weight)))

    @cached_property
    def room_bytes(self) -> FloatArray:
        """[D]: memory of a site's ranks beside what they need in any case; negative where some rank is too small."""
        room = self.problem.compute.memory_bytes * (1 + TOLERANCE) - fixed_cost(self.problem).lasting_bytes
        return np.where((room < 0).any(axis=1), -1.0, room.sum(axis=1))

    def unit_seconds(self, limits: Limits) -> FloatArray:
        """[C, C]: rows of one of n <= M_h experts that a site of the column's class serves for tokens of one of the row's, at
        least."""
        held = np.maximum(limits.most_held, 1.0)
        return np.outer(self.user_rows, self.problem.hit[held.astype(np.int64)] / held)

    def unit_costs(self, limits: Limits, weights: Weights) -> FloatArray:
        """[C, C]: what each expert that a site of class h serves for another one of class d costs at least, in seconds
        per layer."""
        kinds = self.classes
        up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
        site = weights.out / up + weights.back_into / down
        holder = weights.into / down + weights.back_out / up
        rate = site[:, None] + holder[None, :]
        if kinds.pair_bytes_per_s is not None:
            if weights.pair is not None:
                rate = rate + weights.pair / kinds.pair_bytes_per_s
            if weights.back_pair is not None:
                rate = rate + weights.back_pair / kinds.pair_bytes_per_s.T
        costs = rate * self.unit_seconds(limits)
        return np.asarray(costs + (weights.compute * self.expert_s)[None, :])

    def within_budget(self, weights: Weights) -> Weights:
        """Scaled down where weights add up to more than a second on the busiest link costs; then they prove something."""
        forward, back, compute = self.budgets_s
        pair = 0.0 if weights.pair is None else float(weights.pair.sum())
        back_pair = 0.0 if weights.back_pair is None else float(weights.back_pair.sum())
        count = self.classes.count
        a = _scale(float((weights.out + weights.into) @ count) + pair, forward)
        b = _scale(float((weights.back_out + weights.back_into) @ count) + back_pair, back)
        c = _scale(float(weights.compute @ count), compute)
        return Weights(
            out=weights.out * a,
            into=weights.into * a,
            back_out=weights.back_out * b,
            back_into=weights.back_into * b,
            compute=weights.compute * c,
            pair=None if weights.pair is None else weights.pair * a,
            back_pair=None if weights.back_pair is None else weights.back_pair * b,
        )

    def value_s(self, box: Box, weights: Weights) -> float:
        """No plan of the box has a shorter step; infinite when the box is empty. Raises ValueError for negative weights
        (which prove nothing); too large ones are scaled down first."""
        arrays = (weights.out, weights.into, weights.back_out, weights.back_into, weights.compute)
        optional = tuple(a for a in (weights.pair, weights.back_pair) if a is not None)
        if any((a < 0).any() for a in (*arrays, *optional)):
            raise ValueError("weights of a bound must be at least zero")
        weights, limits = self.within_budget(weights), self.limits(box)
        if (limits.most_held < self.classes.homes).any():
            return float("inf")
        own, taken, costs = self.cheapest(limits, weights)
        if (own + taken.sum(axis=1) < self.problem.num_experts - 1e-6).any():
            return float("inf")
        each = own * weights.compute * self.expert_s + (taken * costs).sum(axis=1)
        tokens_s = float(each @ self.classes.count)
        return self.base_s + self.num_layers * (self.corner_s(box) + tokens_s)

    def thresholds_s(self, box: Box) -> float:
        """No plan of the box has a shorter step, by another argument, which keeps the concave chance of a token needing a
        site as it is: a site that holds m experts sends each token with one of the other E - m at least once. So if no
        site's links are busy for longer than t, each holds at least m(t); the smallest t counts for which all of them can,
        and together do not hold more than what homes can send out."""
        kinds, limits, experts = self.classes, self.limits(box), self.problem.num_experts
        total = float(kinds.homes @ kinds.count) + limits.most_copies
        forward, back, compute = self.budgets_s
        away = np.outer(self.user_rows, self.problem.hit[experts - np.arange(experts + 1)])
        if (limits.most_held < kinds.homes).any():
            return float("inf")

        def least_s(rates: FloatArray) -> float:
            times = away / rates[:, None]
            candidates = np.unique(times)
            low, high = 0, len(candidates) - 1
            while low < high:
                middle = (low + high) // 2
                # Times fall with m, so the experts needed are those whose time is still too long.
                needed = (times > candidates[middle] * (1 + SLACK)).sum(axis=1)
                if (needed <= limits.most_held).all() and float(needed @ kinds.count) <= total * (1 + SLACK):
                    high = middle
                else:
                    low = middle + 1
            return float(candidates[low]) * (1 - SLACK)

        up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
        tokens_s = forward * max(least_s(up), self._serving_s(limits, total, down))
        tokens_s += back * max(least_s(down), self._serving_s(limits, total, up))
        tokens_s += compute * self.problem.least_expert_s
        return self.base_s + self.num_layers * (self.corner_s(box) + tokens_s)

    def _serving_s(self, limits: Limits, total: float, rates: FloatArray) -> float:
        """Seconds per byte of a row that the busiest site's link is busy for with tokens it serves to others, at least:
        a row that comes to a site with m experts finds at most m / P(m) of those it needs on average, and sites that hold
        ``total`` experts together leave D E - total to be found elsewhere. m / P(m) lies below a line from one expert on;
        the best m under those lines are found greedily."""
        kinds, experts = self.classes, float(self.problem.num_experts)
        most = limits.most_held
        first = np.where(most >= 1, 1 / self.problem.hit[1], 0.0)
        last = most / np.maximum(self.problem.hit[most.astype(np.int64)], self.problem.hit[1])
        slope = np.where(most > 1, (last - first) / np.maximum(most - 1, 1.0), 0.0)
        units = np.concatenate([np.minimum(most, 1.0) * kinds.count, np.maximum(most - 1, 0.0) * kinds.count])

        def enough(time_s: float) -> bool:
            rows = time_s * rates / self.rows
            gains = np.concatenate([rows * first, rows * slope]) + 1.0
            order = np.argsort(-gains, kind="stable")
            before = np.cumsum(units[order]) - units[order]
            taken = np.clip(total - before, 0.0, units[order])
            return float(taken @ gains[order]) >= experts * self.problem.num_sites * (1 - SLACK)

        low, high = 0.0, self.rows * experts * self.problem.num_sites / float(rates.min())
        if enough(low) or not enough(high):
            return 0.0 if enough(low) else high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return low

    def cheapest(self, limits: Limits, weights: Weights) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Fractional knapsacks: (experts that a site of each class serves itself [C], experts that it finds at all sites
        of each other class [C, C], their unit costs [C, C])."""
        experts, kinds = float(self.problem.num_experts), self.classes
        costs = self.unit_costs(limits, weights)
        size = len(kinds.count)
        # The last column is the site itself, which needs no link.
        all_costs = np.column_stack([costs, weights.compute * self.expert_s])
        caps = np.column_stack([limits.most_held[None, :] * kinds.others * limits.allowed, limits.most_held])
        order = np.argsort(all_costs, axis=1, kind="stable")
        sorted_caps = np.take_along_axis(caps, order, axis=1)
        before = np.cumsum(sorted_caps, axis=1) - sorted_caps
        taken = np.empty_like(caps)
        np.put_along_axis(taken, order, np.clip(experts - before, 0.0, sorted_caps), axis=1)
        return taken[:, size], taken[:, :size], costs


def latency_s(relaxation: Relaxation, box: Box) -> float:
    """Of the token exchanges of one layer's step, in every plan of the box."""
    return relaxation.problem.workload.training.micro_batches * float(relaxation.reaches_s[box.reach[0]])


def _scale(total: float, budget: float) -> float:
    return budget / total if total > budget else 1.0


def whole(value: FloatArray) -> FloatArray:
    """Rounded down, but for what rounding may have taken."""
    return np.asarray(np.floor(value * (1 + SLACK) + SLACK))
