"""Training on GPUs against the single process on CPU: as many ranks as a case has, sharing the devices that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_cases import Inputs, shell
from rank_pool import RankPool
from training_cases import Case, Outcome, cases, check_bytes, check_fidelity, check_losses, train_case

from hybridep.codecs import KINDS
from hybridep.plan import Residency
from hybridep.recompute import ALL
from hybridep.run import Device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SOME = [
    Case(sizes=(2, 2), domains=(1, 1)),
    Case(sizes=(2, 2), domains=(2, 1), model="top4-tied-gqa", migration=(0.5,), micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 1), model="qwen2", micro_batches=2, recompute=ALL),
    Case(sizes=(2, 2), domains=(2, 2), model="dense-first-uneven", residency=Residency.MICROBATCH),
    Case(sizes=(2, 2), domains=(1, 2), model="top1-gelu-shared", overlap=False, random_serving=1),
    Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), chunks=3, residency=Residency.MICROBATCH, micro_batches=2),
    Case(sizes=(2, 2), domains=(1, 1), random_serving=5, prefetch=1, micro_batches=2),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def train_on_gpu(rank: int, case: Case) -> tuple[Outcome, Counter[str]]:
    """(outcome, how often each kernel was launched)."""
    from runtime.kernels.driver import CudaDriver, Launch

    launched: Counter[str] = Counter()
    launch = CudaDriver.launch

    def count(driver: CudaDriver, item: Launch, device: object) -> None:
        launched[item.kernel] += 1
        launch(driver, item, device)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDriver, "launch", count)
        return train_case(rank, case, device=Device.CUDA), launched


@pytest.mark.parametrize("case", SOME, ids=str)
def test_fp64_equals_the_reference(pool: RankPool, case: Case) -> None:
    """To rounding: the device adds in another order, and AdamW magnifies that where a gradient is nearly zero."""
    results = pool.run(train_on_gpu, case, timeout_s=240.0)
    outcomes = [outcome for outcome, _ in results]
    check_losses(case, outcomes, 1e-9)
    check_fidelity(case, outcomes, 1e-6)
    check_bytes(case, outcomes)
    for _, launched in results:
        assert {"route_count", "route_scan", "route_assign"} <= launched.keys()
        assert launched.keys() & {"combine_f64", "combine_two_f64"}
        assert any(name.startswith("dispatch_") for name in launched)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bf16_follows_the_reference(pool: RankPool, case: Case) -> None:
    case = replace(case, dtype="bf16")
    results = pool.run(train_on_gpu, case, timeout_s=240.0)
    check_losses(case, [outcome for outcome, _ in results], 1e-2)
    check_bytes(case, [outcome for outcome, _ in results])
    assert all(launched["combine_bf16"] + launched["combine_two_bf16"] for _, launched in results)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lossless_messages_change_no_bit(pool: RankPool, dtype: str) -> None:
    exact = Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), micro_batches=2, dtype=dtype)
    case = replace(exact, codecs=(("dc", tuple((kind, "lossless") for kind in KINDS)),))
    plain, found = (pool.run(train_on_gpu, one, timeout_s=240.0) for one in (exact, case))
    for (mine, _), (other, _) in zip(found, plain, strict=True):
        assert mine.losses == other.losses
        assert all(np.array_equal(values, other.parameters[name]) for name, values in mine.parameters.items())


@pytest.mark.parametrize("case", cases((2, 2), 1), ids=str)
def test_every_domain_choice(pool: RankPool, case: Case) -> None:
    outcomes = [outcome for outcome, _ in pool.run(train_on_gpu, case, timeout_s=240.0)]
    check_losses(case, outcomes, 1e-9)
    check_bytes(case, outcomes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_command_line_trains_to_the_same_loss(dtype: str, tmp_path: Path) -> None:
    """``hybridep train --local`` on the GPU by default, and again on CPU; a checkpoint of one resumes on the other."""
    inputs, common = Inputs(tmp_path), ("--local", "--json", "--set", f"workload.training.dtype={dtype}")
    runs = {}
    for device in ("auto", "cpu"):
        output = ("--set", f"output={tmp_path / device}", "--set", f"device={device}")
        runs[device] = shell("train", inputs.run, *common, *output, timeout_s=200.0)
        assert runs[device].code == 0, runs[device].err
    tolerance = 1e-2 if dtype == "bf16" else 1e-4
    assert runs["auto"].json["losses"] == pytest.approx(runs["cpu"].json["losses"], rel=tolerance)
    more = ("--set", f"output={tmp_path / 'auto'}", "--set", "device=cpu", "--set", "steps=6", "--resume")
    resumed = shell("train", inputs.run, *common, *more, timeout_s=200.0)
    assert resumed.code == 0, resumed.err
    assert resumed.json["first_step"] == 5
