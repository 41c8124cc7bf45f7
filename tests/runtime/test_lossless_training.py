"""Training over ranks whose messages are shortened without loss: to the bit as without, in the bytes that plans count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pipelined_cases
import pytest
from rank_pool import RankPool
from test_coded_training import EP, FULL, Coded, check_coding, train_coded, wan
from training_cases import Case, Outcome, check_bytes

from hybridep import codecs
from hybridep.plan import Residency

pytestmark = pytest.mark.timeout(400)
ALL = {"tokens": "lossless", "experts": "lossless", "gradients": "lossless"}
CASES = {
    "tokens": replace(EP, codecs=wan(**ALL)),
    "copies": replace(FULL, codecs=wan(**ALL)),
    "both-in-bf16": replace(FULL, migration=(0.5, 1.0), dtype="bf16", codecs=wan(**ALL)),
    "ahead-per-micro-batch": replace(
        FULL, micro_batches=2, residency=Residency.MICROBATCH, prefetch=1, streams=2, codecs=wan(**ALL)
    ),
    "in-parts": replace(FULL, migration=(0.5, 1.0), chunks=2, codecs=wan(**ALL)),
    "fp64": replace(FULL, migration=(0.5, 1.0), dtype="fp64", codecs=wan(**ALL)),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def with_room(rank: int, case: Case, share: float) -> Coded:
    """Trained with messages that have room for this share of exponents written out."""
    with pytest.MonkeyPatch.context() as patch:
        give_room(patch, share)
        return train_coded(rank, case)


def give_room(patch: pytest.MonkeyPatch, share: float) -> None:
    for kind in codecs._WRITTEN_OUT:
        patch.setitem(codecs._WRITTEN_OUT, kind, share)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("room", ["ample", "none"])
def test_nothing_is_lost(name: str, room: str, pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every message is longer than agreed."""
    case, share = CASES[name], {"ample": 0.6, "none": 0.0}[room]
    exact = pool.run(train_coded, replace(case, codecs=()), timeout_s=300)
    found = pool.run(with_room, case, share, timeout_s=300)
    for mine, plain in zip(found, exact, strict=True):
        same_to_the_bit(mine.outcome, plain.outcome)
    give_room(monkeypatch, share)
    outcomes = [one.outcome for one in found]
    if room == "ample":
        check_bytes(case, outcomes)
        if case.dtype == "fp32":
            check_coding(case, found)
    elif name != "fp64":
        with pytest.raises(AssertionError):
            check_bytes(case, outcomes)


def same_to_the_bit(found: Outcome | pipelined_cases.Outcome, wanted: Outcome | pipelined_cases.Outcome) -> None:
    assert found.losses == wanted.losses
    for name, values in wanted.parameters.items():
        assert np.array_equal(found.parameters[name], values), name


def pipelined(rank: int, port: int, case: pipelined_cases.Case, share: float) -> pipelined_cases.Outcome:
    with pytest.MonkeyPatch.context() as patch:
        give_room(patch, share)
        return pipelined_cases.train_case(rank, port, case)


@pytest.mark.turns(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("room", ["ample", "none"])
def test_nothing_is_lost_between_stages(room: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = replace(pipelined_cases.CASES[2], dtype=dtype)
    case, share = replace(exact, codecs=(("activations", "lossless"),)), {"ample": 0.6, "none": 0.0}[room]
    with RankPool(case.sizes[0] * case.sizes[1], join=False) as ranks:
        plain = ranks.run_with_store(pipelined_cases.train_case, exact)
        found = ranks.run_with_store(pipelined, case, share)
    for mine, other in zip(found, plain, strict=True):
        same_to_the_bit(mine, other)
    give_room(monkeypatch, share)
    if room == "ample":
        pipelined_cases.check_bytes(case.plan(), found)
    else:
        with pytest.raises(AssertionError):
            pipelined_cases.check_bytes(case.plan(), found)
