"""What a layer's step is made of beside the serving table, as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.plan import Residency
from hybridep.traffic import Op, gathers_and_returns
from planner.compute import shared_s
from planner.layer_times import BlockTimes, layer_times
from planner.price import step_usd
from planner.sites.flows import COPIES, TOKENS
from planner.sites.problem import SiteProblem

EXCHANGES = (
    (Op.TOKEN_COUNTS, TOKENS, 0),
    (Op.TOKEN_DISPATCH, TOKENS, 0),
    (Op.COMBINE_BACKWARD, TOKENS, 0),
    (Op.TOKEN_COMBINE, TOKENS, 1),
    (Op.DISPATCH_BACKWARD, TOKENS, 1),
    (Op.EXPERT_GATHER, COPIES, 0),
    (Op.GRADIENT_RETURN, COPIES, 1),
)
"""Operations between sites, with their kind and way (``planner.sites.flows``)."""
OP_KIND, OP_WAY = tuple(kind for _, kind, _ in EXCHANGES), tuple(way for *_, way in EXCHANGES)
KNOTS = 2
BYTES, KNOT_S, SLOPE = 0, 1, 1 + KNOTS
"""What is known of each: bytes of a unit; from ``KNOT_S`` on lengths at which it begins to count differently for a layer, and
from ``SLOPE`` on how much a second counts before each of them, and beyond."""
SITE_ROWS, CHOICES, ROW_S = range(3)
"""What is known of each site: rows of all its tokens; rows per choice, and seconds per row that an expert computes."""
FIXED_S, EXPERTS, OWN, MEAN, VALUE_PER_S, VALUE_PER_USD = range(6)
"""Further numbers: a layer's step without what the table decides; how much a second of the experts' computation counts, to which
what a rank computes and the mean of all contribute (``planner.compute.shared_s``); what seconds and dollars of a layer's step add
to the goal."""


UNITS = 16
"""What an expert that is as popular as all are on average counts for, where they differ."""


class Work(NamedTuple):
    """What no table changes."""

    home_site: IntArray
    """[E]."""
    weight: IntArray
    """[E]: what an expert counts for in ``hit`` and in rows that are computed; 1 where all are alike."""
    hit: FloatArray
    """[sum of weights + 1]: probability that a token needs at least one of experts that together count for so much
    (``SiteProblem.hit``)."""
    by_site: FloatArray
    """[SITE_ROWS to ROW_S, D]; choices are those of an expert that counts for 1."""
    by_op: FloatArray
    """[7, BYTES to the last slope]."""
    numbers: FloatArray
    """[FIXED_S to VALUE_PER_USD]."""
    unit_bytes: FloatArray
    """[2 kinds, 2 ways]: of a unit, in all its repetitions."""
    serve: BoolArray
    """[D, D]: the row's tokens may be computed at the column's site."""
    hold: BoolArray
    """[D, E]: the site may compute the expert."""


def work_of(problem: SiteProblem, residency: Residency) -> Work:
    """For walks over tables whose copies live so long."""
    wire, batches, rules = problem.wire, problem.workload.training.micro_batches, problem.permissions
    gathers, returns = gathers_and_returns(residency, batches)
    op_bytes = {
        Op.TOKEN_COUNTS: 0,
        Op.TOKEN_DISPATCH: wire.dispatch_row_bytes,
        Op.COMBINE_BACKWARD: wire.combine_row_bytes,
        Op.TOKEN_COMBINE: wire.combine_row_bytes,
        Op.DISPATCH_BACKWARD: wire.dispatch_gradient_row_bytes,
        Op.EXPERT_GATHER: wire.expert_bytes,
        Op.GRADIENT_RETURN: wire.expert_gradient_bytes,
    }
    fixed_s, experts, by_op = _weights(problem, residency)
    by_op[:, BYTES] = [op_bytes[op] for op, *_ in EXCHANGES]
    alone, other = shared_s(np.array([1.0, 0.0]), problem.compute.sharing)
    per_s, per_usd = (
        problem.num_layers * problem.goal.value(seconds, step_usd(problem.cluster.rent_usd_per_s, dollars, seconds))
        for seconds, dollars in ((1.0, 0.0), (0.0, 1.0))
    )
    size = problem.num_sites
    return Work(
        home_site=problem.home_site.astype(np.int64),
        weight=np.ones(problem.num_experts, dtype=np.int64),
        hit=problem.hit.copy(),
        by_site=np.stack([problem.num_inside * problem.tokens, problem.rows_per_choice, problem.compute.expert_s_per_row[:, 0]]),
        by_op=by_op,
        numbers=np.array([fixed_s, experts, alone - other, 2 * other, per_s, per_usd]),
        unit_bytes=np.array(
            [
                [batches * wire.row_there_bytes, batches * wire.row_back_bytes],
                [gathers * wire.expert_bytes, returns * wire.expert_gradient_bytes],
            ],
            dtype=np.float64,
        ),
        serve=np.ones((size, size), dtype=np.bool_) if rules is None else rules.serve.copy(),
        hold=np.ones((size, problem.num_experts), dtype=np.bool_) if rules is None else rules.hold.copy(),
    )


def for_popularity(work: Work, problem: SiteProblem, shares: Sequence[float]) -> Work:
    """The same where experts are chosen with these shares ([E]): they count as often as they are chosen, and a set is needed by
    about as many tokens as experts that are all alike, of which as much is chosen."""
    experts = problem.num_experts
    weight = np.maximum(np.round(np.asarray(shares) * (experts * UNITS)), 1.0).astype(np.int64)
    hit = np.interp(np.arange(weight.sum() + 1) / UNITS, np.arange(experts + 1), problem.hit)
    by_site = work.by_site.copy()
    by_site[CHOICES] /= UNITS
    return work._replace(weight=weight, hit=hit, by_site=by_site)


def _weights(problem: SiteProblem, residency: Residency) -> tuple[float, float, FloatArray]:
    """A layer's step without exchanges and experts, how much a second of the experts counts, and ``Work.by_op`` without bytes.
    What ``planner.layer_times`` says, asked at a few lengths: each exchange adds to a step by itself, in straight pieces that end
    where computation no longer hides it."""
    compute, batches = problem.compute, problem.workload.training.micro_batches

    def total_s(expert_s: float = 0.0, exchanges_s: dict[Op, float] | None = None) -> float:
        block = BlockTimes(
            compute=compute,
            expert_s=expert_s,
            exchanges_s=dict.fromkeys(Op, 0.0) | (exchanges_s or {}),
            experts_s=np.zeros(1),
            recompute=problem.recompute,
        )
        return layer_times(block, batches, residency, problem.schedule).total_s

    fixed_s, by_op = total_s(), np.zeros((len(EXCHANGES), SLOPE + KNOTS + 1))
    ends_s = np.array([0.0, problem.beside_s, problem.beside_backward_s, problem.beside_backward_s + 1.0])
    lengths_s = np.diff(ends_s)
    for number, (op, *_) in enumerate(EXCHANGES):
        by_op[number, KNOT_S:SLOPE] = ends_s[1 : 1 + KNOTS]
        more_s = np.diff([total_s(exchanges_s={op: seconds}) for seconds in ends_s.tolist()])
        by_op[number, SLOPE:] = more_s / np.where(lengths_s > 0, lengths_s, 1.0)
    return fixed_s, total_s(expert_s=1.0) - fixed_s, by_op
