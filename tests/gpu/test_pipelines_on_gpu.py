"""Training in pipeline stages on GPUs against the single process on CPU; four ranks share the devices that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pipelined_cases import CASES, Case, Outcome, check_bytes, check_losses, check_same_model, reference, train_case
from rank_pool import RankPool

from hybridep.run import Device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, join=False) as pool:
        yield pool


def outcomes_of(ranks: RankPool, case: Case) -> list[Outcome]:
    outcomes: list[Outcome] = ranks.run_with_store(train_case, case, Device.CUDA)
    check_bytes(case.plan(), outcomes)
    return outcomes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_equals_the_reference(ranks: RankPool, case: Case) -> None:
    """To rounding: the device adds in another order, and AdamW magnifies that where a gradient is nearly zero."""
    check_same_model(case, outcomes_of(ranks, case), 1e-9, 1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bf16_follows_the_reference(ranks: RankPool, case: Case) -> None:
    case = replace(case, dtype="bf16")
    losses, _ = reference(case)
    check_losses(case, outcomes_of(ranks, case), losses, 1e-2)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_coded_activations(ranks: RankPool, codec: str) -> None:
    """Lossy, but little: not the exact losses, and near them."""
    case = CASES[2]
    outcomes = outcomes_of(ranks, replace(case, codecs=(("activations", codec),)))
    found = np.sum([one.losses for one in outcomes], axis=0) / sum(one.tokens for one in outcomes)
    off = np.abs(found / np.array(reference(case)[0]) - 1)
    assert 1e-6 < off.max() < 0.02
