"""How many experts a site can serve for tokens of other sites: more if it holds more, but rows come whole.

A site that holds m experts serves a user of n <= m of them with P(n) rows, P being the chance that a token needs one of n. P is
concave, so those that serve V experts with fewest rows are as large as they can be, but for one. What a link has room for is thus
used in steps, which chords of P (``planner.sites.relaxation``) do not see: with room for 1.4 rows of a token, a site of seven
experts serves one user of them and one of another expert, not 1.4 users.
"""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.sites.boxes import Box, Boxes, over
from planner.sites.relaxation import SLACK, Limits, Relaxation

SLOPES = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5])
"""Of lines above what a site can serve, in experts served per expert held and row of a token that there is room for."""


def serving_lines(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> tuple[FloatArray, FloatArray]:
    """(slope, value at zero), [C, S] each: in every plan of the box a site that holds ``held`` experts serves at most
    slope x held + value for others. As close as lines of these slopes can be."""
    classes = relaxation.classes
    forward_s, back_s = over(box.forward_s[1], 1), over(box.back_s[1], 1)
    rows = np.minimum(forward_s * classes.down_bytes_per_s, back_s * classes.up_bytes_per_s) / relaxation.rows
    users = relaxation.problem.num_sites - 1
    rows = np.minimum(rows, users)[..., None]  # nobody needs more than a row per token
    slope, held = SLOPES * rows, np.arange(relaxation.problem.num_experts + 1)
    served = most_served(relaxation.hit, rows, users, held)
    least = -classes.largest(-np.maximum(limits.least_held, classes.kinds.homes))
    can_hold = (least[..., None] <= held) & (held <= classes.largest(limits.most_held)[..., None])
    served = np.where(can_hold, served, -np.inf)
    above = served[..., None, :] - slope[..., None] * held
    return slope, np.asarray(above.max(axis=-1))


def most_served(hit: FloatArray, rows: FloatArray, users: int, held: IntArray) -> FloatArray:
    """Experts that sites with room for so many ``rows`` of each token and ``held`` experts serve at most for that many users;
    also found at most with so many rows at so many sites, each holding ``held``. ``hit`` is P, [E + 1]; rows and held have shapes
    that go together."""
    room, each = rows * (1 + SLACK), hit[held]
    whole = np.minimum(np.floor(room / np.maximum(each, hit[1])), users)
    rest = hit.searchsorted((room - whole * each) * (1 + SLACK), side="right") - 1
    return np.asarray(whole * held + np.where(whole < users, np.minimum(rest, held), 0))
