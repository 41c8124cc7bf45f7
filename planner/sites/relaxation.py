"""What bounds on the step time of every serving table are made of.

Plans are sorted into boxes (``planner.sites.boxes``): how long one gather takes (between sites), how long one return of
gradients, how long rows keep the busiest link, and how far copies and tokens travel. Inside a box the gather's time limits
how many experts M_h a site can hold: what comes in through its links in that time, beside its own, within its memory. How
long rows may keep a link limits how many experts a token finds elsewhere: n of them, all at one site, send P(n) of a row
there, P being the chance that a token needs one of n. P is concave, so n <= N experts cost at least n P(N) / N rows: the
tighter a box, the truer these chords.

With chords, rows are linear in n[d, h], the number of experts that site h serves for tokens of site d, and linear programs
(``planner.sites.lp``, or ``planner.sites.pooled_lp`` where sites are taken together) bound what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.plan import Residency
from hybridep.recompute import ALL
from hybridep.traffic import gathers_and_returns
from planner.activations import pre_expert_bytes
from planner.memory import TOLERANCE, lasting_copy_bytes
from planner.sites.boxes import Box, Boxes, over, upper_ends
from planner.sites.classes import SiteClasses, site_classes
from planner.sites.cost import fixed_cost
from planner.sites.forced import forced
from planner.sites.inside import InsideTimes, inside_times
from planner.sites.problem import SiteProblem

if TYPE_CHECKING:
    from planner.sites.priced import Priced

NEGLIGIBLE = 1e-3
"""Share of a layer's longest step below which what is spent inside sites is left out."""
SLACK = 1e-9
"""Caps are rounded down to whole experts after adding this share, so that rounding never cuts off a plan."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """What a box leaves possible, by kinds of sites (K) and classes of them (C); of ``Boxes`` with a first axis."""

    most_held: FloatArray
    """[K]: M_h, experts that a site can hold."""
    least_held: FloatArray
    """[K]: a site that holds fewer would send too many rows."""
    least_own: FloatArray
    """[K]: experts that a site's own tokens find there, at least."""
    copies: FloatArray
    """[K, C]: copies at the row's site of the experts of the column's home site, another one."""
    uploads: FloatArray
    """[K]: copies that leave a home site."""
    most_found: FloatArray
    """[K, C]: N, experts that tokens of the row's site find at the column's, another one."""
    kept: FloatArray
    """[K, C]: experts of the column's home site that the row's, another one, must hold, because its tokens find them nowhere
    else; zero where classes are merged."""

    def __getitem__(self, index: Any) -> Limits:
        """Of some of the boxes."""
        return Limits(**{one.name: getattr(self, one.name)[index] for one in fields(self)})

    def possible(self, classes: SiteClasses) -> BoolArray:
        """Every site can hold its own experts and as many as it must, all together no more than homes have and send. And copies
        of what sites must hold of each home can come from there."""
        kinds = classes.kinds
        least = np.maximum(self.least_held, kinds.homes)
        room = (kinds.homes + self.uploads) @ kinds.count * (1 + SLACK)
        held = (least <= self.most_held).all(axis=-1) & (least @ kinds.count <= room)
        if classes.merged:
            return np.asarray(held)
        come = (self.kept <= self.copies).all(axis=(-1, -2)) & (self.kept.sum(axis=-2) <= self.uploads).all(axis=-1)
        return np.asarray(held & come)


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """The bound's ingredients for one problem."""

    problem: SiteProblem
    """Whose ``hit`` holds for any n experts."""
    prices: tuple[Priced, ...] = ()
    """Of visits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", self.problem.for_bounds)

    @cached_property
    def known_needed(self) -> dict[tuple[Any, ...], FloatArray]:
        """Copies that the last boxes need by each of ``prices`` (``planner.sites.priced``), by ``upper_ends``."""
        return {}

    @cached_property
    def classes(self) -> SiteClasses:
        """Sites that nothing tells apart are treated together."""
        return site_classes(self.problem)

    @cached_property
    def budgets_s(self) -> tuple[float, float, float]:
        """Cost of one layer's step per second and row byte: (forward, back) exchanges in bytes per row over all
        micro-batches, and forward expert computation in seconds per second."""
        wire, batches = self.problem.wire, self.problem.workload.training.micro_batches
        forward = batches * wire.row_there_bytes
        back = batches * wire.row_back_bytes
        return float(forward), float(back), 3.0 * batches

    @cached_property
    def base_s(self) -> float:
        """Step time that no plan changes."""
        passes = 3 * self.problem.workload.training.micro_batches
        return fixed_cost(self.problem).total_s + self.num_layers * passes * self.problem.block_s

    @cached_property
    def tied(self) -> bool:
        """Access links, each as fast up as down, are all there is between sites: what goes back keeps the busiest one as long,
        per byte, as what went there."""
        problem = self.problem
        others = problem.cluster.trunks or problem.window_s_per_byte[0].any()
        return problem.alike_paths and not others and bool((problem.up_bytes_per_s == problem.down_bytes_per_s).all())

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
    def kind_rows(self) -> FloatArray:
        """[K]: the same of the sites of each kind, as of their class."""
        return np.asarray(self.user_rows[self.classes.kinds.label])

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
            # Links inside a site may be the narrower ones.
            for number, rate in problem.inner_links:
                most = float(problem.at_home.reshape(size * number, -1).sum(axis=1).max()) * (size - 1) + problem.num_experts
                limit = max(limit, most * weight / rate)
            limit = max(limit, float(problem.at_home.max()) * weight * slowest_s_per_byte)
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

    @cached_property
    def copy_reaches_s(self) -> FloatArray:
        """Ascending: zero for no copy, then every latency at which a further home may send copies to a further site."""
        return np.concatenate([[0.0], np.unique(self.classes.latency_s[self._copied])])

    @cached_property
    def _copied(self) -> BoolArray:
        """[C, C]: whether sites of the row's class have experts that others of the column's may copy."""
        return np.asarray((self.classes.others > 0) & (self.classes.homes > 0)[:, None])

    @cached_property
    def rates(self) -> tuple[FloatArray, FloatArray]:
        """[K, C] bytes per second from the row's site to the column's, and back: the narrowest link between them."""
        classes, kinds = self.classes, self.classes.kinds
        there = np.minimum(kinds.up_bytes_per_s[:, None], classes.down_bytes_per_s)
        again = np.minimum(kinds.down_bytes_per_s[:, None], classes.up_bytes_per_s)
        if classes.pair_bytes_per_s is not None:
            there, again = np.minimum(there, classes.pair_bytes_per_s), np.minimum(again, classes.pair_bytes_per_s.T)
        return there, again

    @cached_property
    def hit(self) -> FloatArray:
        """[E + 1]: P, without the last bits that would make it fall."""
        return np.maximum.accumulate(self.problem.hit)

    def roots(self) -> list[Box]:
        """Boxes that hold every plan."""
        problem = self.problem
        gather, back = self.full_gather_s
        slowest = min(float(problem.up_bytes_per_s.min()), float(problem.down_bytes_per_s.min()))
        slowest = min([slowest, *(rate for _, rate in problem.inner_links)])
        slowest = min([slowest, *(trunk.bandwidth for trunk in problem.cluster.trunks)])
        if problem.pair_bytes_per_s is not None:
            slowest = min(slowest, float(problem.pair_bytes_per_s.min()))
        slowest = 1 / max(1 / slowest, float(problem.window_s_per_byte[0].max()))
        # Each rank's tokens leave it once for every other site at most.
        most_rows = float(problem.tokens.max()) * problem.num_inside * problem.num_sites**2
        label = self.classes.label
        least = forced(problem, *(known[label][:, label] for known in (self.classes.latency_s, self.token_latency_s)))
        return [
            Box(
                residency=residency,
                gather_s=(least.gather_s, gather),
                return_s=(least.return_s, back),
                forward_s=(least.forward_s, most_rows / slowest),
                back_s=(least.back_s, most_rows / slowest),
                copy_reach=(int(np.searchsorted(self.copy_reaches_s, least.copies_from_s)), len(self.copy_reaches_s) - 1),
                reach=(int(np.searchsorted(self.reaches_s, least.tokens_from_s)), len(self.reaches_s) - 1),
            )
            for residency in problem.residencies
        ]

    def copies_s(self, residency: Residency, gather_s: float, return_s: float) -> float:
        """What gathers and returns of these lengths, latency included, add to one layer's step; rises with both
        (``planner.cost``)."""
        batches = self.problem.workload.training.micro_batches
        gathers, returns = gathers_and_returns(residency, batches)
        beside = self.problem.beside_s
        hidden = min(gathers, batches) * min(gather_s, beside) + returns * min(return_s, 2 * beside)
        return gathers * gather_s + returns * return_s - hidden

    def copy_latencies_s(self, boxes: Boxes) -> tuple[FloatArray, FloatArray]:
        """``copy_latency_s`` of each."""
        known = [self._latency_s(*reach) for reach in zip(*(ends.tolist() for ends in boxes.copy_reach), strict=True)]
        there_s, back_s = np.array(known).T
        return there_s, back_s

    def copy_latency_s(self, box: Box) -> tuple[float, float]:
        """Of one gather and one return, in every plan of the box: some pair of a home and a copy is as far as the lower end says,
        no farther than the upper one, and the way back is at least the shortest of such pairs."""
        return self._latency_s(*box.copy_reach)

    def _latency_s(self, low: int, high: int) -> tuple[float, float]:
        known = self._copy_latency_s.get((low, high))
        if known is None:
            latency, reaches = self.classes.latency_s, self.copy_reaches_s
            farthest = self._copied & (latency >= reaches[low]) & (latency <= reaches[high])
            known = (float(reaches[low]), float(latency.T[farthest].min())) if low > 0 else (0.0, 0.0)
            self._copy_latency_s[low, high] = known
        return known

    @cached_property
    def _copy_latency_s(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def token_latency_of(self, box: Box) -> float:
        """Seconds of one layer's step, in every plan of the box."""
        return self.problem.workload.training.micro_batches * float(self.reaches_s[box.reach[0]])

    def corner_s(self, box: Box) -> float:
        """What every plan of the box spends in one layer at least, beside what no plan changes: times rise with every side."""
        forward, back, compute = self.budgets_s
        latency_s, latency_back_s = self.copy_latency_s(box)
        copies_s = self.copies_s(box.residency, latency_s + box.gather_s[0], latency_back_s + box.return_s[0])
        tokens_s = forward * box.forward_s[0] + back * box.back_s[0]
        between_s = copies_s + tokens_s + self.token_latency_of(box)
        return between_s + self.inside_s(box) + compute * self.problem.least_expert_s

    def computing_s(self, box: Box) -> float:
        """What every plan of the box spends in one layer at least on copies and experts, beside what no plan changes: where
        tokens travel in parts, they may hide the experts or be hidden by them."""
        _, _, compute = self.budgets_s
        latency_s, latency_back_s = self.copy_latency_s(box)
        copies_s = self.copies_s(box.residency, latency_s + box.gather_s[0], latency_back_s + box.return_s[0])
        return copies_s + compute * self.problem.computed_s

    @cached_property
    def inside_times(self) -> tuple[InsideTimes, ...]:
        """Of all choices inside sites; none where the cheapest takes next to nothing."""
        made, experts = inside_times(self.problem), self.problem.num_experts
        most_tokens = float(self.problem.tokens.max())
        most_s = min(
            self.copies_s(Residency.MICROBATCH, float(one.gather_s[experts]), float(one.return_s[experts]))
            + most_tokens * float(one.token_s[experts])
            + one.latency_s
            for one in made
        )
        return made if most_s > NEGLIGIBLE * self.full_gather_cost_s else ()

    def inside_s(self, box: Box) -> float:
        """What every plan of the box spends inside sites in one layer at least, beside what it does between them: by the choice
        for which that is least. Gathers inside a site follow those between sites; of the shortest of these most is hidden."""
        if not self.inside_times:
            return 0.0
        known = self._inside_s.get(box)
        if known is None:
            known = self._inside_s[box] = self._least_inside_s(box, self.limits(box))
        return known

    @cached_property
    def _inside_s(self) -> dict[Box, float]:
        return {}

    def _least_inside_s(self, box: Box, limits: Limits) -> float:
        latency_s, latency_back_s = self.copy_latency_s(box)
        gather_s, return_s = latency_s + box.gather_s[0], latency_back_s + box.return_s[0]
        alone_s, most = self.copies_s(box.residency, gather_s, return_s), float(self.problem.num_experts)
        held = int(np.ceil(np.minimum(limits.least_held, most).max() - 1e-6))
        own = np.ceil(np.minimum(limits.least_own, most) - 1e-6).astype(np.int64)
        rank_tokens = self.kind_rows / self.problem.num_inside
        return min(
            self.copies_s(box.residency, gather_s + float(one.gather_s[held]), return_s + float(one.return_s[held]))
            - alone_s
            + float((rank_tokens * one.token_s[own]).max())
            + one.latency_s * bool(own.any())
            for one in self.inside_times
        )

    def limits(self, box: Box | Boxes) -> Limits:
        """What the upper ends of the box's intervals leave possible."""
        keys, known = upper_ends(box), self._known_limits
        if all(key in known for key in keys):
            return stacked([known[key] for key in keys]) if isinstance(box, Boxes) else known[keys[0]]
        found = self._limits_of(box)
        known.clear()
        known.update((key, found[number] if isinstance(box, Boxes) else found) for number, key in enumerate(keys))
        return found

    @cached_property
    def _known_limits(self) -> dict[tuple[Any, ...], Limits]:
        """Of the last boxes, which several bounds ask for: those that narrowing leaves them are the same."""
        return {}

    def _limits_of(self, box: Box | Boxes) -> Limits:
        classes, kinds = self.classes, self.classes.kinds
        homes, experts = kinds.homes, float(self.problem.num_experts)
        weight, weight_back = float(self.problem.wire.expert_bytes), float(self.problem.wire.expert_gradient_bytes)
        up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
        gather, back = over(box.gather_s[1], 1) * ((1 + SLACK) / weight), over(box.return_s[1], 1) * ((1 + SLACK) / weight_back)
        there_rate, again_rate = self.rates
        # [holder, home site]: whole experts that fit through in time.
        copies = whole(np.minimum(again_rate * gather[..., None], there_rate * back[..., None]))
        copies = np.minimum(copies, classes.largest(homes)) * _within(self._copies_from_s, self.copy_reaches_s, box.copy_reach[1])
        others = classes.others[kinds.label]
        most = np.minimum((copies * others).sum(axis=-1), self.copies_in_memory(box.residency)[kinds.label])
        most = np.minimum(most, whole(np.minimum(gather * down, back * up)))
        most_held = np.minimum(homes + most, experts)
        most_found = self._most_found(box, most_held)
        copies = np.minimum(copies, np.maximum(most, 0.0)[..., None])
        kept = self._kept(copies, most_found)
        must_hold = 0.0 if classes.merged else homes + kept.sum(axis=-1)
        least_own = np.maximum(experts - self._found_in_all(box, most_found), 0.0)
        uploads = whole(np.minimum(gather * up, back * down))
        sent = (classes.largest(copies, axis=-2).swapaxes(-1, -2) * classes.others).sum(axis=-1)
        return Limits(
            most_held=most_held,
            least_held=np.maximum(least_own, must_hold),
            least_own=least_own,
            copies=copies,
            uploads=np.minimum(uploads, sent[..., kinds.label]),
            most_found=most_found,
            kept=kept,
        )

    def _kept(self, copies: FloatArray, most_found: FloatArray) -> FloatArray:
        """``Limits.kept``: a site finds no more of a home's experts elsewhere than can be at the sites where it finds any."""
        classes = self.classes
        if classes.merged:
            return np.zeros_like(copies)
        elsewhere = (most_found > 0).astype(np.float64) @ (copies + np.diag(classes.homes))
        return np.asarray(np.maximum(classes.homes - elsewhere, 0.0) * classes.others)

    def _most_found(self, box: Box | Boxes, most_held: FloatArray) -> FloatArray:
        there_rate, again_rate = self.rates
        rows = np.minimum(over(box.forward_s[1], 2) * there_rate, over(box.back_s[1], 2) * again_rate) / self.kind_rows[:, None]
        found = self.hit.searchsorted(rows * (1 + SLACK), side="right") - 1.0
        found = np.minimum(found, self.classes.largest(most_held)[..., None, :])
        return np.asarray(found * _within(self._tokens_to_s, self.reaches_s, box.reach[1]))

    @cached_property
    def _copies_from_s(self) -> FloatArray:
        """[K, C]: latency of copies at the row's site from the column's; infinite where there can be none."""
        return np.where(self._copied, self.classes.latency_s, np.inf).T[self.classes.kinds.label]

    @cached_property
    def _tokens_to_s(self) -> FloatArray:
        """[K, C]: ``token_latency_s`` from the row's site to the column's; infinite where tokens may not go."""
        classes, permissions = self.classes, self.problem.permissions
        allowed = classes.others > 0
        if permissions is not None:
            permitted = np.zeros_like(allowed)
            np.logical_or.at(permitted, (classes.label[:, None], classes.label[None, :]), permissions.serve)
            allowed &= permitted
        return np.where(allowed, self.token_latency_s, np.inf)[classes.kinds.label]

    def _found_in_all(self, box: Box | Boxes, most_found: FloatArray) -> FloatArray:
        """[K]: experts that tokens find at all other sites together, at most. Because P is concave, most are found with as few
        rows as a site may send when parts are as large as they can be, largest first, but for one (no parts of the same sum and
        within the same limits are less even, so the sum of P is least)."""
        classes, kinds, hit = self.classes, self.classes.kinds, self.hit
        rows = np.minimum(over(box.forward_s[1], 1) * kinds.up_bytes_per_s, over(box.back_s[1], 1) * kinds.down_bytes_per_s)
        rows = rows * (1 + SLACK) / self.kind_rows
        # Small integers are sorted in a fraction of the time.
        small = np.min_scalar_type(-self.problem.num_experts)
        order = np.argsort((-most_found).astype(small), axis=-1, kind="stable")
        both = np.stack(np.broadcast_arrays(most_found, classes.others[kinds.label]))
        parts, number = np.take_along_axis(both, order[None], axis=-1)
        each = hit[parts.astype(np.int64)]
        before = np.cumsum(each * number, axis=-1) - each * number
        left = np.maximum(rows[..., None] - before, 0.0)
        full = np.minimum(np.floor(left / np.maximum(each, hit[1]) * (1 + SLACK)), number)
        # One part at most is neither full nor empty.
        first = (full < number).argmax(axis=-1)[..., None]
        there = np.take_along_axis(np.stack([left, each, parts, full, number]), first[None], axis=-1)
        left, each, part, whole_ones, number = there[..., 0]
        rest = np.maximum(left - whole_ones * each, 0.0)
        partial = np.minimum(hit.searchsorted(rest * (1 + SLACK), side="right") - 1.0, part)
        return np.asarray((full * parts).sum(axis=-1) + np.where(whole_ones < number, partial, 0.0))

    def copies_in_memory(self, residency: Residency) -> FloatArray:
        """[C]: no site keeps more copies: its ranks' memory beside what is there in any case. Activations of routed
        tokens and buffers are left out, and copies spread evenly inside, so this is never too few."""
        known = self._copies_in_memory.get(residency)
        if known is not None:
            return known
        # Weights and gradients of the copies of all layers, and of those of one layer while it runs backward.
        work, one = self.problem.workload, np.ones(1)
        passing = 2.0 if residency is Residency.STEP else 3.0
        weight = self.num_layers * float(lasting_copy_bytes(work, one, residency)[0]) + passing * work.expert_bytes
        known = self.classes.best(np.where(self.room_bytes < 0, -1.0, whole(self.room_bytes / weight)))
        return self._copies_in_memory.setdefault(residency, known)

    @cached_property
    def _copies_in_memory(self) -> dict[Residency, FloatArray]:
        return {}

    @cached_property
    def room_bytes(self) -> FloatArray:
        """[D]: memory of a site's ranks beside what they need in any case, also where all layers compute again; negative where
        some rank is too small."""
        least, share = replace(self.problem, recompute=ALL), self.problem.compute.share
        kept = self.num_layers * pre_expert_bytes(self.problem.workload, share, ALL).kept
        room = self.problem.compute.memory_bytes * (1 + TOLERANCE) - fixed_cost(least).lasting_bytes - kept
        return np.where((room < 0).any(axis=1), -1.0, room.sum(axis=1))

    def unit_rows(self, limits: Limits) -> FloatArray:
        """[D, D], where no sites are taken together: rows of one of n <= N experts that the column's site serves for tokens of
        the row's, at least."""
        found = np.maximum(limits.most_found, 1.0)
        return np.asarray(self.user_rows[:, None] * self.problem.hit[found.astype(np.int64)] / found)


def stacked(limits: Sequence[Limits]) -> Limits:
    """Of boxes side by side."""
    return Limits(**{one.name: np.stack([getattr(each, one.name) for each in limits]) for one in fields(Limits)})


def _within(far_s: FloatArray, reaches_s: FloatArray, position: int | IntArray) -> BoolArray:
    """[K, C]: what is no farther than a position says, of which the first one is nobody's."""
    return far_s <= over(np.where(np.asarray(position) > 0, reaches_s[position], -1.0), 2)


def whole(value: FloatArray) -> FloatArray:
    """Rounded down, but for what rounding may have taken."""
    return np.asarray(np.floor(value * (1 + SLACK) + SLACK))
