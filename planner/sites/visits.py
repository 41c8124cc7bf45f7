"""How many copies of slow homes' experts are needed at least, by counting who finds these experts where.

A site with room for few rows cannot find all experts that it does not hold in small visits, a few experts at each of many
holders: it needs a main holder with most of them, and what its other visits find is little. A holder has room for few of these.
So each copy is used by its own site, by few others that visit it for much, and by those with rows left for small visits: all
sites need every expert, hence so many copies of it. Homes with the slowest links send fewest, so their experts are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.sites.boxes import Box, Boxes, over
from planner.sites.capacity import most_served
from planner.sites.relaxation import SLACK, Limits, Relaxation

LARGE = np.array([1 / 4, 3 / 8, 1 / 2, 3 / 4])
"""Shares of all experts from which on a visit may be called large: what is counted holds for each."""
MOST_GROUPS = 12
"""Of homes: those of the slowest twelfth of the experts, of the two slowest, and so on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """G groups of the homes that send slowest, each within the next."""

    member: FloatArray
    """[G, K]: one where sites of this kind belong to the group."""
    experts: FloatArray
    """[G]: at home there."""
    up_bytes_per_s: FloatArray
    """[G]: together."""
    down_bytes_per_s: FloatArray
    """[G]: together."""


def copies_for_visits_s(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> tuple[FloatArray, FloatArray]:
    """Seconds of one gather and one return: what groups of homes must send of copies. Infinite where all copies that the box
    leaves possible are too few. Zero where different sites are merged: of hundreds of kinds it takes longer than it is worth."""
    if relaxation.classes.mixed:
        return np.zeros(()), np.zeros(())
    groups, wire, needed = home_groups(relaxation), relaxation.problem.wire, needed_copies(relaxation, box, limits)
    sent = (limits.uploads * relaxation.classes.kinds.count) @ groups.member.T
    needed = np.where((needed > sent * (1 + SLACK)).any(axis=-1, keepdims=True), np.inf, needed)
    there_s, back_s = ((needed / rate).max(axis=-1) for rate in (groups.up_bytes_per_s, groups.down_bytes_per_s))
    return there_s * wire.expert_bytes * (1 - SLACK), back_s * wire.expert_gradient_bytes * (1 - SLACK)


def _small_and_received(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> tuple[FloatArray, FloatArray] | None:
    """[..., S, K] for each size from which on visits are large: experts that tokens of a site find at most in small visits, and
    large visits that a holder receives at most. Where small visits are enough for all they find any number; None if so in all
    boxes."""
    hit, experts = relaxation.hit, relaxation.problem.num_experts
    sent, room = row_budgets(relaxation, box)
    large = np.unique(np.ceil(LARGE * experts).astype(np.int64))[:, None]
    missing, sent_each = (experts - limits.most_held)[..., None, :], sent[..., None, :]
    without_main = in_small_visits(relaxation, sent_each, large)
    has_main = without_main < missing
    if not has_main.any():
        return None
    at_most, received = large_visits(relaxation, limits, sent, room, large)
    # A main visit takes the more rows the less is found beside it.
    main = np.clip(missing - in_small_visits(relaxation, sent_each - hit[large], large), large, experts).astype(np.int64)
    beside = np.where(at_most >= 1, in_small_visits(relaxation, sent_each - hit[main], large), -np.inf)
    beside = np.maximum(beside, np.where(at_most >= 2, in_small_visits(relaxation, sent_each - 2 * hit[large], large), -np.inf))
    small = np.where(has_main, beside, without_main)
    return np.where(has_main.any(axis=(-1, -2), keepdims=True), small, np.inf), received


def row_budgets(relaxation: Relaxation, box: Box | Boxes) -> tuple[FloatArray, FloatArray]:
    """[K]: rows of each of its tokens that a site may send, and of each of another site's that it may receive."""
    up, down = relaxation.classes.kinds.up_bytes_per_s, relaxation.classes.kinds.down_bytes_per_s
    forward_s, back_s = over(box.forward_s[1], 1), over(box.back_s[1], 1)
    sent = np.minimum(forward_s * up, back_s * down) / relaxation.kind_rows
    return sent, np.minimum(forward_s * down, back_s * up) / relaxation.rows


def in_small_visits(relaxation: Relaxation, rows: FloatArray, large: IntArray) -> FloatArray:
    """Experts that are found at most with so many rows in visits of fewer than ``large`` experts."""
    return most_served(relaxation.hit, np.maximum(rows, 0.0), relaxation.problem.num_sites - 1, large - 1)


def large_visits(
    relaxation: Relaxation, limits: Limits, sent: FloatArray, room: FloatArray, large: IntArray
) -> tuple[FloatArray, FloatArray]:
    """[..., S, K] each: visits of at least so many experts (``large``, [S, 1]) that sites make at most, and receive, with rows
    for so much (``row_budgets``)."""
    kinds, each = relaxation.classes.kinds, relaxation.hit[large]
    can = limits.most_found[..., None, :, :] >= large[:, :, None]
    made = np.where(can.any(axis=-1), np.floor(sent[..., None, :] * (1 + SLACK) / each), 0.0)
    visitors = (kinds.count @ can)[..., kinds.label]
    return made, np.minimum(np.floor(room[..., None, :] * (1 + SLACK) / each), visitors)


def slowest_homes(relaxation: Relaxation, most: int) -> IntArray:
    """[K]: to which of at most so many groups of about as many experts homes of each kind belong, those first whose links send
    copies of each of their experts most slowly; ``most`` where nothing is at home."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    owners = np.flatnonzero(kinds.homes)
    sent_per_s = np.minimum(kinds.up_bytes_per_s / wire.expert_bytes, kinds.down_bytes_per_s / wire.expert_gradient_bytes)
    order = owners[np.argsort(sent_per_s[owners] / kinds.homes[owners], kind="stable")]
    experts = np.cumsum((kinds.homes * kinds.count)[order])
    group = np.full(len(kinds.homes), most)
    group[order] = np.minimum((experts - 0.5) * most / relaxation.problem.num_experts, most - 1).astype(np.int64)
    return group


def needed_copies(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> FloatArray:
    """[..., G]: copies of the experts of each of ``home_groups``, so that all sites find them. Infinite where none are enough."""
    groups, counted = home_groups(relaxation), _small_and_received(relaxation, box, limits)
    needed = np.zeros((*limits.most_held.shape[:-1], len(groups.experts)))
    if counted is None:
        return needed
    small, received = counted
    classes, kinds, count = relaxation.classes, relaxation.classes.kinds, relaxation.classes.kinds.count
    needed[np.isneginf(small).any(axis=(-1, -2))] = np.inf
    used = 1 + received  # by how many sites, each copy
    at_home = used @ (groups.member * (kinds.homes * count)).T
    in_small = np.minimum(small[..., None, :], groups.experts[:, None]) @ count
    lacking = relaxation.problem.num_sites * groups.experts - at_home - in_small
    # [...] of the boxes, S of sizes and G of groups where copies are needed.
    *here, size, group = np.nonzero(lacking > 0)
    # Where copies are of most use.
    room = np.minimum((limits.most_held - kinds.homes)[..., None, :], groups.experts[:, None] - groups.member * kinds.homes)
    if not classes.merged:
        room = np.minimum(room, groups.member @ limits.copies.swapaxes(-1, -2))
    order = np.argsort(-used, axis=-1, kind="stable")[*here, size]
    each = np.take_along_axis(used[*here, size], order, axis=-1)
    copies = np.take_along_axis((np.maximum(room, 0.0) * count)[*here, group], order, axis=-1)
    total, found = np.cumsum(copies, axis=1), np.cumsum(copies * each, axis=1)
    missing = lacking[*here, size, group]
    full = (found < missing[:, None] * (1 - SLACK)).sum(axis=1)
    row, last = np.arange(len(full)), np.minimum(full, copies.shape[1] - 1)
    before, found_before = (total - copies)[row, last], (found - copies * each)[row, last]
    number = np.where(full < copies.shape[1], before + (missing - found_before) / each[row, last], np.inf)
    np.maximum.at(needed, (*here, group), number)
    return needed


@lru_cache(maxsize=4)
def home_groups(relaxation: Relaxation) -> Groups:
    """Of the slowest homes."""
    kinds, group = relaxation.classes.kinds, slowest_homes(relaxation, MOST_GROUPS)
    ends = np.unique(group[group < MOST_GROUPS])
    member = (group[None, :] <= ends[:, None]).astype(np.float64)
    return Groups(
        member=member,
        experts=member @ (kinds.homes * kinds.count),
        up_bytes_per_s=member @ (kinds.up_bytes_per_s * kinds.count),
        down_bytes_per_s=member @ (kinds.down_bytes_per_s * kinds.count),
    )
