"""Tables of flows and of the links that they share, which compiled code reads and writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridep.arrays import FloatArray, IntArray
from hybridep.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Uint32Array = npt.NDArray[np.uint32]
ByteArray = npt.NDArray[np.int8]

WAITING, ACTIVE, DONE = 0, 1, 2

RESIDUE = 1e-9
"""Less than this share of a weight, left over when weights that are no round numbers are taken away again, is nothing."""

LATER = 127
"""After every priority."""

UNKNOWN = -1.0
"""In `least_due`: to be looked for among the flows."""


class FlowColumns(NamedTuple):
    """[flows]; a flow may stand for many alike. All of a row's links but those that can never be full."""

    links: Int32Array
    """[flows, width], -1 where fewer."""
    weights: FloatArray
    """[flows, width]: how many of the flows cross one link; [0, 0] where all are one."""
    places: Int32Array
    """[flows, width]: the flow's entry on each of its links."""
    status: ByteArray
    due: FloatArray
    """What `served` of the link that fixed the rate will be when the flow must end; the bytes it has left where none has yet."""
    spare_bytes: FloatArray
    """With no more left a flow may end together with another."""
    full_link: Int32Array
    """The link that fixed the rate, -1 before the first filling."""


class LinkColumns(NamedTuple):
    """[links] that can be full, a row for each priority of their flows; and a row for each limit of single flows.

    The flows on a link are its entries first[link] : first[link] + num_members[link]; those that it fixed come first.
    """

    capacity: FloatArray
    """Of a link in all; of a limit, the rate of each flow."""
    priority: ByteArray
    """Rows of lower numbers fill first."""
    above: Int32Array
    """The same link's row of the priority before, -1 without; [0] where there is one priority only."""
    is_limit: ByteArray
    """Of single flows; [0] where there are none."""
    first: IntArray
    """[links + 1]: room for the entries of each link."""
    num_members: IntArray
    num_fixed: IntArray
    """Flows that the link fixed."""
    members: Int32Array
    """[entries]: the flow."""
    fixed_by: Uint32Array
    """[entries]: the link that fixed the flow. Unsigned, because negative indices cost a test each."""
    weights: FloatArray
    """[entries]: how many flows it stands for on this link; [0] where all are one."""
    load: FloatArray
    """Flows that the link fixed, by weight."""
    level: FloatArray
    """Rate at which the link filled; infinite where it does not."""
    served: FloatArray
    """Bytes that each of the flows which the link fixed has had of it, as of `since_s`."""
    since_s: FloatArray
    least_due: FloatArray
    """Of the flows that the link fixed; or UNKNOWN."""
    least_early: FloatArray
    """The least that is due less what may be spared, of these flows."""
    soonest_s: FloatArray
    """When the first of them ends."""
    order: Int32Array
    """Links by priority and level, those that do not fill last."""
    position: Int32Array
    """Of each link in the order."""
    changed: ByteArray
    """Its flows, or their rates, are not those that its level is for."""


@compiled
def swap_entries(
    paths: Int32Array,
    places: Int32Array,
    members: Int32Array,
    fixed_by: Uint32Array,
    weights: FloatArray,
    link: int,
    one: int,
    other: int,
) -> None:
    """Two entries of a link change places."""
    if one == other:
        return
    first, second = members[one], members[other]
    for hop in range(paths.shape[1]):
        if paths[first, hop] == link:
            places[first, hop] = other
        if paths[second, hop] == link:
            places[second, hop] = one
    members[one], members[other] = second, first
    fixed_by[one], fixed_by[other] = fixed_by[other], fixed_by[one]
    if weights.size:
        weights[one], weights[other] = weights[other], weights[one]


@compiled
def first_ends(members: Int32Array, due: FloatArray, spare_bytes: FloatArray, begin: int, end: int) -> tuple[float, float]:
    """Of the flows at some entries: the least that is due, and the least that is due less what may be spared."""
    least, early = np.inf, np.inf
    for entry in range(begin, end):
        flow = members[entry]
        least = min(least, due[flow])
        early = min(early, due[flow] - spare_bytes[flow])
    return least, early


@compiled
def soonest_end_s(links: LinkColumns, link: int, now_s: float) -> float:
    """When the first of the flows that a link has fixed ends."""
    level = links.level[link]
    if 0.0 < level < np.inf:
        return float(now_s + max(links.least_due[link] - links.served[link], 0.0) / level)
    # Flows of links that are cut, or taken whole by flows of higher priority, wait: but for what has left but for rounding.
    return np.inf if links.least_early[link] > links.served[link] else now_s
