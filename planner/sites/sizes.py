"""A bound for many sites of few kinds: how many sites of each kind hold how many experts, as a linear program.

A token row that goes to a holder of m experts finds at most m / P(m) of those it needs, P being the chance that a token needs
one of m. That gain per row is convex in m from one expert on, so a holder of m experts does no more than a mixture of holders of
a and b experts with a <= m <= b and the same mean: holders of a few sizes, in fractions of sites, do at least what any plan does.
As users, sites whose number of experts lies between two neighbouring sizes are taken together. A box says how long the busiest
link is at most busy with rows, on the way to the experts and on the way back; the upper ends limit what each site sends and
receives, and the program minimises what rows and copies cost. What a site receives and holds must also find room in the memory
of its ranks. A box as costly as the best known plan needs no proof, so a few hold all that could be better. As elsewhere the
solver only proposes multipliers.

It speaks of sites whose paths have no limits of their own and one latency; inner links are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array

from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.traffic import FloatArray, gathers_and_returns
from planner.memory import lasting_copy_bytes, routed_activation_bytes
from planner.sites.capacity import lifted, most_served
from planner.sites.linear import BoxProgram, Duals, Rows
from planner.sites.relaxation import Relaxation, whole

MOST_KINDS = 24
"""Of sites; more make the programs too large."""
MOST_TYPES = 40
"""Kinds times sizes."""


@dataclass(frozen=True, kw_only=True)
class SizeBox:
    """Plans with this residency whose busiest links carry a byte of every row in times within these closed intervals."""

    residency: Residency
    forward_s: tuple[float, float]
    """Dispatch and combine backward."""
    back_s: tuple[float, float]
    """Combine and dispatch backward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeRelaxation:
    """The program's ingredients."""

    relaxation: Relaxation
    points: IntArray
    """[K], ascending from 0 to E: sizes of holders."""

    @property
    def tied(self) -> bool:
        """Every site's links are equally fast up and down, so the way back takes as long as the way there."""
        problem = self.relaxation.problem
        return bool((problem.up_bytes_per_s == problem.down_bytes_per_s).all())

    @property
    def least_s(self) -> float:
        """A plan that moves any token keeps some link busy for at least so long per byte of a row."""
        kinds = self.relaxation.classes
        fastest = max(float(kinds.up_bytes_per_s.max()), float(kinds.down_bytes_per_s.max()))
        return self.relaxation.rows * float(self.relaxation.problem.hit[1]) / fastest

    def roots(self, best_s: float) -> list[SizeBox]:
        """Boxes that hold every plan with a shorter step than ``best_s``: those that move tokens, and those that move none."""
        forward, back, _ = self.relaxation.budgets_s
        room_s = max(best_s - self.relaxation.base_s, 0.0) / self.relaxation.num_layers
        least = self.least_s * (1 - 1e-9)
        made = []
        for residency in self.relaxation.problem.residencies:
            made.append(SizeBox(residency=residency, forward_s=(0.0, least), back_s=(0.0, least)))
            if self.tied:
                most = max(room_s / (forward + back), least)
                made.append(SizeBox(residency=residency, forward_s=(least, most), back_s=(least, most)))
            else:
                ends = (least, max(room_s / forward, least)), (least, max(room_s / back, least))
                made.append(SizeBox(residency=residency, forward_s=ends[0], back_s=ends[1]))
        return made

    def proven_s(self, box: SizeBox, duals: Duals | None, program: BoxProgram | None = None) -> float:
        """No plan of the box has a shorter step, whatever the multipliers; without any, the corner alone. ``program`` is the
        box's, where it is known."""
        relaxation = self.relaxation
        forward, back, compute = relaxation.budgets_s
        problem = relaxation.problem
        moving_s = forward * box.forward_s[0] + back * box.back_s[0]
        if duals is not None:
            moving_s = max(moving_s, (program or self.program(box)).value_s(duals))
        if box.forward_s[0] > 0:
            moving_s += problem.workload.training.micro_batches * float(relaxation.reaches_s[1])
        return relaxation.base_s + relaxation.num_layers * (moving_s + compute * problem.least_expert_s)

    def main_sizes(self, own: IntArray, rows: FloatArray) -> IntArray:
        """[U]: how many experts a site that holds at most ``own`` ([U]) finds at least at that other site where it finds most,
        if its tokens are to need at most ``rows`` ([U]) rows each; zero where it needs nobody, E + 1 where there is no way. With
        parts of at most n experts rows are fewest when all but one are n, because P is concave."""
        problem = self.relaxation.problem
        experts, hit = problem.num_experts, problem.hit
        sizes = np.arange(1, experts + 1)[None, :]
        rest = np.maximum(experts - own, 0)[:, None]
        fewest = rest // sizes * hit[sizes] + hit[rest % sizes]
        enough = fewest <= rows[:, None] * (1 + 1e-9)
        found = np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, experts + 1)
        return np.where(rest[:, 0] == 0, 0, found)

    def program(self, box: SizeBox) -> BoxProgram:
        """Numbers of sites are in shares of all sites, experts found elsewhere in shares of all (site, expert)."""
        relaxation = self.relaxation
        problem, kinds = relaxation.problem, relaxation.classes
        experts, num = float(problem.num_experts), len(kinds.count)
        share = kinds.count / problem.num_sites
        points = self.points.astype(np.float64)
        last = len(points) - 1
        # Users: kinds by intervals of sizes; holders: kinds by sizes that are no nothing.
        most = np.minimum(kinds.homes + np.maximum(relaxation.copies_in_memory(box.residency), 0.0), experts)
        user_kind, user_low = np.nonzero((points[1:][None, :] >= kinds.homes[:, None]) & (points[:-1][None, :] <= most[:, None]))
        users = len(user_kind)
        up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
        # Kinds that only differ in how many experts live there send and receive alike: what they find is counted together.
        links, linked = np.unique(np.column_stack([up, down]), axis=0, return_inverse=True)
        linked, num_linked = linked.reshape(-1), len(links)
        linked_share = np.bincount(linked, weights=share)
        groups, group = np.unique(linked[user_kind] * last + user_low, return_inverse=True)
        group_kind, finders = groups // last, len(groups)
        hold_kind, hold_size = np.divmod(np.arange(num_linked * last), last)
        hold_size = hold_size + 1
        holders = len(hold_kind)
        low, high = np.arange(users), users + np.arange(users)
        found = 2 * users + np.arange(finders * holders)
        finder, holder = np.divmod(np.arange(finders * holders), holders)
        gather = 2 * users + finders * holders
        give_back, gather_cost, return_cost = gather + 1, gather + 2, gather + 3
        forward_cost, back_cost = gather + 4, gather + 5
        unserved = gather + 6 + np.arange(finders)
        variables = gather + 6 + finders
        per_expert = experts * problem.hit[self.points[1:]] / points[1:]
        row_cost = per_expert[hold_size[holder] - 1]
        forward, back = box.forward_s[1] * (1 + 1e-9), box.back_s[1] * (1 + 1e-9)
        out_rows = np.minimum(forward * up, back * down) / relaxation.rows
        in_rows = np.minimum(forward * down, back * up) / relaxation.rows
        rows = Rows()

        # What each group of users sends.
        rows.add(
            np.concatenate([finder, group, group]),
            np.concatenate([found, low, high]),
            np.concatenate([row_cost, -out_rows[user_kind], -out_rows[user_kind]]),
            np.zeros(finders),
        )
        # What each group of holders receives: sites of a size are the upper ends of one interval and the lower ends of the next.
        place = np.full((num_linked, last + 1), -1)
        place[hold_kind, hold_size] = np.arange(holders)
        lower, upper = place[linked[user_kind], user_low], place[linked[user_kind], user_low + 1]
        holds = lower >= 0
        rows.add(
            np.concatenate([holder, lower[holds], upper]),
            np.concatenate([found, low[holds], high]),
            np.concatenate([row_cost, -in_rows[user_kind[holds]], -in_rows[user_kind]]),
            np.zeros(holders),
        )
        # Rows come whole: so many experts are served by all sites of a kind together, by how many they hold.
        link_rows = np.minimum(forward * links[:, 1], back * links[:, 0]) / relaxation.rows
        served = lifted(most_served(relaxation.hit, link_rows, problem.num_sites - 1), self.points) / experts
        user_link = linked[user_kind]
        rows.add(
            np.concatenate([hold_kind[holder], user_link, user_link]),
            np.concatenate([found, low, high]),
            np.concatenate([np.ones(len(found)), -served[user_link, user_low], -served[user_link, user_low + 1]]),
            np.zeros(num_linked),
        )
        # All sites of a kind together send and receive what the busiest link's true times allow, which cost something.
        forward_cost_s, back_cost_s, _ = relaxation.budgets_s
        for kind, rates in ((group_kind[finder], links.T), (hold_kind[holder], links.T[::-1])):
            for rate, cost_s, variable in zip(rates, (forward_cost_s, back_cost_s), (forward_cost, back_cost), strict=True):
                rows.add(
                    np.concatenate([kind, np.arange(num_linked)]),
                    np.concatenate([found, np.full(num_linked, variable)]),
                    np.concatenate([row_cost, -rate * linked_share / (relaxation.rows * cost_s)]),
                    np.zeros(num_linked),
                )
        # Whoever finds experts elsewhere within what it may send has a main holder with at least ``need`` of them, and a holder
        # receives from few users that much: main users are whole.
        need = self.main_sizes(self.points[user_low + 1], out_rows[user_kind])
        for least in np.unique(need[(need > 0) & (need <= problem.num_experts)]):
            fits = np.floor(in_rows / problem.hit[least] * (1 + 1e-9))
            holding = self.points[user_low + 1] >= least
            coefficient = (need >= least).astype(np.float64) - holding * fits[user_kind]
            rows.add(
                np.zeros(2 * users, dtype=np.int64),
                np.concatenate([low, high]),
                np.concatenate([coefficient, coefficient]),
                np.zeros(1),
            )
        # Rows that a site computes and, per residency, its copies need room on its ranks, however they share them.
        work, layers, one = problem.workload, relaxation.num_layers, np.ones(1)
        copy_bytes = layers * float(lasting_copy_bytes(work, one, box.residency)[0])
        # Rows that one site's tokens need of all experts.
        chosen = problem.num_inside * float(problem.rows_per_choice.min()) * experts
        computed_bytes = layers * chosen * float(routed_activation_bytes(work, one, 0 * one)[0])
        arrived_bytes = layers * relaxation.rows * float(routed_activation_bytes(work, 0 * one, one)[0])
        room = kinds.best(relaxation.room_bytes) + copy_bytes * kinds.homes
        per_size = (points * (copy_bytes + computed_bytes / experts))[1:]
        # A mixture of two sizes needs what one in between does: all of this is linear in the number of experts held.
        low_bytes = np.where(user_low > 0, per_size[user_low - 1], 0.0) - room[user_kind]
        high_bytes = per_size[user_low] - room[user_kind]
        unit = 1.0 / max(float(np.abs(room).max()), 1.0)
        rows.add(
            np.concatenate([holder, lower[holds], upper]),
            np.concatenate([found, low[holds], high]),
            unit
            * np.concatenate(
                [computed_bytes + row_cost * arrived_bytes, low_bytes[holds], high_bytes],
            ),
            np.zeros(holders),
        )
        # Copies come in through each kind's links and leave through those of the experts' homes.
        there, back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
        sizes = np.concatenate([points[user_low], points[user_low + 1]])
        both_kind, both = np.concatenate([user_kind, user_kind]), np.concatenate([low, high])
        own = kinds.homes * share
        for rate, other, variable, weight in ((down, up, gather, there), (up, down, give_back, back)):
            scale = weight / (rate * share)
            rows.add(
                np.concatenate([both_kind, np.arange(num)]),
                np.concatenate([both, np.full(num, variable)]),
                np.concatenate([sizes * scale[both_kind], -np.ones(num)]),
                own * scale,
            )
            home_rate = float((other * kinds.count)[kinds.homes > 0].sum()) / problem.num_sites
            rows.add(
                np.zeros(2 * users + 1, dtype=np.int64),
                np.concatenate([both, [variable]]),
                np.concatenate([sizes * (weight / home_rate), [-1.0]]),
                np.array([float(own.sum()) * weight / home_rate]),
            )
        batches = problem.workload.training.micro_batches
        gathers, returns = gathers_and_returns(box.residency, batches)
        hidden, beside = min(gathers, batches), problem.beside_s
        zero = np.zeros(2, dtype=np.int64)
        rows.add(zero, np.array([gather, gather_cost]), np.array([gathers - hidden, -1.0]), np.zeros(1))
        rows.add(zero, np.array([gather, gather_cost]), np.array([gathers, -1.0]), np.array([hidden * beside]))
        rows.add(zero, np.array([give_back, return_cost]), np.array([returns, -1.0]), np.array([2 * returns * beside]))

        # All sites are somewhere, and find all experts that they do not hold.
        row = np.concatenate([both_kind, num + finder, num + group, num + group, num + np.arange(finders)])
        column = np.concatenate([both, found, both, unserved])
        value = np.concatenate([np.ones(2 * users), np.ones(finders * holders), sizes / experts - 1.0, np.ones(finders)])
        bounds = np.zeros((variables, 2))
        bounds[: 2 * users, 1] = share[both_kind]
        bounds[found, 1] = linked_share[group_kind[finder]]
        bounds[unserved, 1] = linked_share[group_kind]
        most_gather, most_back = relaxation.full_gather_s
        bounds[gather, 1], bounds[give_back, 1] = most_gather, most_back
        bounds[gather_cost, 1], bounds[return_cost, 1] = gathers * most_gather, returns * most_back
        costs = np.zeros(variables)
        costs[[gather_cost, return_cost, forward_cost, back_cost]] = 1.0
        bounds[forward_cost] = np.array(box.forward_s) * forward_cost_s
        bounds[back_cost] = np.array(box.back_s) * back_cost_s
        # Empty boxes shall have a bound too.
        costs[unserved] = 1e3 * relaxation.full_gather_cost_s
        costs[np.concatenate([low, high])] = np.tile(
            np.where(need > problem.num_experts, 1e3 * relaxation.full_gather_cost_s, 0.0), 2
        )
        return BoxProgram(
            costs=costs,
            inequality=rows.matrix(variables),
            right=np.concatenate(rows.right),
            equality=coo_array((value, (row, column)), shape=(num + finders, variables)).tocsr(),
            total=np.concatenate([share, np.zeros(finders)]),
            bounds=bounds,
        )


def size_relaxation(relaxation: Relaxation) -> SizeRelaxation | None:
    """None where paths between sites have limits or latencies of their own, or there are too many kinds of sites: merged ones
    would count as fast as the fastest."""
    problem, kinds = relaxation.problem, relaxation.classes
    few = len(kinds.count) <= MOST_KINDS and not kinds.mixed
    if problem.num_sites < 2 or not problem.alike_paths or not few or problem.num_experts < 2:
        return None
    experts, number = problem.num_experts, max(MOST_TYPES // len(kinds.count), 4)
    # Dense where few experts make a difference, and near all of them.
    steps = np.linspace(0.0, 1.0, number)
    points = np.unique(np.concatenate([[0, 1, experts], whole(1 + (experts - 1) * steps**1.6).astype(np.int64)]))
    return SizeRelaxation(relaxation=relaxation, points=points)
