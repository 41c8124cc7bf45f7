"""Training over any plan equals training in one process, and sends the bytes that the traffic function says.

Mutations show that these comparisons can fail: each breaks one thing in one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rank_pool import RankPool
from training_cases import MODELS, Case, cases, check_bytes, check_fidelity, divisors, train_case

from hybridep.plan import Residency

pytestmark = pytest.mark.timeout(180)

FOUR = cases((2, 2), 4)
EIGHT = [*cases((4, 2), 1), Case(sizes=(2, 2, 2), domains=(2, 1, 2), micro_batches=2, migration=(0.5,))]


class Pools:
    """The pool of the world size last asked for; a new one after a failure."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    def train(self, case: Case, prepare: Callable[[Any], None] | None = None) -> list[Any]:
        if self._pool is None or self._pool.world_size != case.num_ranks:
            self.close()
            self._pool = RankPool(case.num_ranks)
        try:
            return self._pool.run(train_case, case, prepare)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("case", [*FOUR, *EIGHT], ids=str)
def test_every_plan_equals_the_reference(pools: Pools, case: Case) -> None:
    outcomes = pools.train(case)
    check_fidelity(case, outcomes)
    check_bytes(case, outcomes)


def test_cases_cover_what_plans_can_say() -> None:
    for sizes, found in (((2, 2), FOUR), ((4, 2), EIGHT)):
        same = [case for case in found if case.sizes == sizes]
        assert {case.residency for case in same} == set(Residency)
        assert {case.micro_batches for case in same} == {1, 2}
        assert {case.model for case in same} == set(MODELS)
        assert len({case.migration for case in same}) == 4
        assert len({case.domains for case in same}) == len(divisors(sizes[0])) * len(divisors(sizes[1]))


def _drop_gradient_return(trainer: Any) -> None:
    """Rank 1 loses what came back for its experts of layer 0."""
    exchange = trainer.model.routed[0].exchange
    original = exchange._return
    if trainer.mesh.rank == 1:
        exchange._return = lambda: original() * 0


def _swap_copies(trainer: Any) -> None:
    """Rank 2 takes its first two copies for each other."""
    place = trainer.model.routed[1]._place
    first, second = trainer.model.routed[1].exchange.held[-2:]
    if trainer.mesh.rank == 2:
        place[first], place[second] = place[second].clone(), place[first].clone()


def _swap_rows(trainer: Any) -> None:
    """Rank 0 gives its first two rows each other's combined output, in the first hop of every layer."""
    dispatcher = trainer.model.routed[0].dispatcher
    original = dispatcher.back

    def swapped(hop: Any, op: Any, blocks: Any) -> Any:
        sums = original(hop, op, blocks)
        if op.value == "token_combine" and hop.level == 0:
            sums[0][[0, 1]] = sums[0][[1, 0]]
        return sums

    if trainer.mesh.rank == 0:
        dispatcher.back = swapped


def _forget_last_sum(trainer: Any) -> None:
    """Rank 3's part of the dense gradients counts twice."""
    if trainer.mesh.rank == 3:
        weight = trainer.model.transformer.norm.weight
        weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("mutation", [_drop_gradient_return, _swap_copies, _swap_rows, _forget_last_sum])
def test_the_comparison_notices(pools: Pools, mutation: Callable[[Any], None]) -> None:
    case = Case(sizes=(2, 2), domains=(2, 2))
    outcomes = pools.train(case, mutation)
    with pytest.raises(AssertionError):
        check_fidelity(case, outcomes)


def test_the_byte_comparison_notices(pools: Pools) -> None:
    case = Case(sizes=(2, 2), domains=(1, 1))
    outcomes = pools.train(case)
    check_bytes(case, outcomes)
    # As if none of rank 1's tokens had left it in layer 0.
    outcomes[1].routing[0, 0][:] = np.flatnonzero(case.plan().placements[0].home == 1)
    with pytest.raises(AssertionError):
        check_bytes(case, outcomes)
