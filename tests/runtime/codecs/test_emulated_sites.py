"""experiments/codec-loss trains its sites one after the other in one process: the same losses as ranks that exchange messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / "tests" / "runtime"), str(ROOT / "experiments" / "codec-loss")]

from emulation import EmulatedSites  # noqa: E402
from rank_pool import RankPool  # noqa: E402
from training_cases import Case, train_case, training_run  # noqa: E402

STEPS = 4
CASES = {
    "copies": (("experts", "change-int8"), ("gradients", "top-k"), ("gradients_keep", 0.3)),
    "shared": (("experts", "sr"), ("experts_keep", 0.3), ("gradients", "int8")),
    "tokens": (("tokens", "int8"),),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def losses_of(rank: int, case: Case) -> list[float]:
    return train_case(rank, case, steps=STEPS).losses


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", CASES)
def test_emulated_sites_train_as_ranks_do(name: str, pool: RankPool) -> None:
    domain = 1 if name == "tokens" else 2
    case = Case(sizes=(2, 1), domains=(domain, 1), codecs=(("dc", CASES[name]),))
    ranks = np.sum(pool.run(losses_of, case), axis=0)
    plan = case.plan()
    sites = EmulatedSites(training_run(), plan)
    num_tokens = plan.workload.training.tokens * 2
    found = np.array([sites.step(step) for step in range(1, STEPS + 1)])
    # Sums in another order; a value at the edge of two codes may then take the other one.
    np.testing.assert_allclose(found, ranks / num_tokens, rtol=1e-6)
