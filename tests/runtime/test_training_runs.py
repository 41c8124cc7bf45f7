"""Whole runs: reports, checkpoints, resuming under the same and under other plans, traces, and lost ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_pool import ADDRESS, RankFailed, RankPool
from training_cases import Case, training_run

from hybridep.plan import Residency
from hybridep.run import Checkpoints, Run, StepReport
from hybridep.traffic import step_traffic

pytestmark = pytest.mark.timeout(120)

CASE = Case(sizes=(2, 2), domains=(2, 1), micro_batches=1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, join=False) as pool:
        yield pool


def run_job(rank: int, port: int, run: Run, case: Case, resume: bool, fault: str = "") -> list[StepReport] | None:
    from runtime.mesh import join_store
    from runtime.trainer import train

    if rank >= case.num_ranks:
        return None
    os.environ["HYBRIDEP_FAULT"] = fault
    reports: list[StepReport] = []
    train(run, case.plan(), rank=rank, store=join_store(ADDRESS, port, timeout_s=30), on_step=reports.append, resume=resume)
    return reports


def train_on(ranks: RankPool, run: Run, case: Case, *, resume: bool = False, fault: str = "") -> list[list[StepReport]]:
    from runtime.mesh import host_store

    store = host_store(ADDRESS, timeout_s=30)
    return [reports for reports in ranks.run(run_job, store.port, run, case, resume, fault) if reports is not None]


def losses(reports: list[list[StepReport]]) -> list[float]:
    return [sum(step.loss_sum for step in steps) / sum(step.tokens for step in steps) for steps in zip(*reports, strict=True)]


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Six steps in one go, with checkpoints every two."""
    output = tmp_path_factory.mktemp("unbroken")
    run = training_run(output, steps=6, checkpoints=Checkpoints(every_steps=2), trace_step=3)
    return output, losses(train_on(ranks, run, CASE))


def continued(source: Path, target: Path, step: int) -> Run:
    """A run whose only checkpoint is that of one step of another run."""
    name = f"step-{step:08d}"
    (target / "checkpoints").mkdir(parents=True)
    (target / "checkpoints" / name).symlink_to(source / "checkpoints" / name)
    return training_run(target, steps=6)


def test_resume_equals_an_unbroken_run(ranks: RankPool, unbroken: tuple[Path, list[float]], tmp_path: Path) -> None:
    reports = train_on(ranks, continued(unbroken[0], tmp_path, 2), CASE, resume=True)
    assert [report.step for report in reports[0]] == [3, 4, 5, 6]
    assert losses(reports) == unbroken[1][2:]


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, domains=(2, 2), residency=Residency.MICROBATCH),
        replace(CASE, sizes=(2, 1), domains=(1, 1), micro_batches=2),
        replace(CASE, sizes=(3, 1), domains=(3, 1), micro_batches=1),
    ],
    ids=str,
)
def test_another_plan_reads_the_checkpoint(
    ranks: RankPool, unbroken: tuple[Path, list[float]], tmp_path: Path, other: Case
) -> None:
    found = losses(train_on(ranks, continued(unbroken[0], tmp_path, 4), other, resume=True))
    if other.num_ranks * other.micro_batches == 4:
        np.testing.assert_allclose(found, unbroken[1][4:], rtol=1e-12)
    else:
        # Fewer ranks without more micro-batches see a smaller batch: the run goes on, with other losses.
        assert len(found) == 2
        np.testing.assert_allclose(found, unbroken[1][4:], rtol=0.2)


def test_reports_say_what_was_sent(ranks: RankPool, unbroken: tuple[Path, list[float]], tmp_path: Path) -> None:
    run = continued(unbroken[0], tmp_path, 4)
    for report in train_on(ranks, run, CASE, resume=True)[0]:
        assert report.tokens == 12
        assert report.step_s > 0
        assert report.peak_bytes > 2**20
        outer = sum(number for label, number in report.sent_bytes.items() if label.endswith("@dc"))
        assert report.wan_bytes == outer > 0
        assert {label.split("@")[1] for label in report.sent_bytes} == {"dc", "gpu"}


def test_bytes_between_pods_of_a_site_do_not_cross_the_wan(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(sizes=(4, 1), domains=(4, 1), pods=(2, 1, 1))
    between = np.ones((4, 4), dtype=np.bool_)
    between[:2, :2] = False  # the first two ranks are pods of one site
    sent = [sent for (_, level), sent in step_traffic(case.plan()).items() if level == 0]
    reports = train_on(ranks, training_run(tmp_path, steps=1), case)
    found = [report.wan_bytes for [report] in reports]
    assert found == [sum(int(one[rank, between[rank]].sum()) for one in sent) for rank in range(4)]
    assert found[0] < sum(reports[0][0].sent_bytes.values())


def test_trace_holds_all_ranks(unbroken: tuple[Path, list[float]]) -> None:
    events = json.loads((unbroken[0] / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["cat"] for event in spans}
    assert {"pre_expert", "expert", "head", "optimizer", "expert_backward", "pre_expert_backward", "head_backward"} <= names
    assert {"token_dispatch", "expert_gather", "gradient_return", "dense_all_gather"} <= names
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"rank {rank} compute" for rank in range(4)} <= rows
    assert min(event["ts"] for event in spans) == 0
    assert not list(unbroken[0].glob(".spans*"))


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with RankPool(1, join=False) as pool, pytest.raises(RankFailed, match="holds no complete checkpoint; start without --resume"):
        train_on(pool, training_run(tmp_path, steps=1), replace(CASE, sizes=(1, 1), domains=(1, 1)), resume=True)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    run = training_run(tmp_path, steps=4, exchange_timeout="5 s")
    case = replace(CASE, sizes=(2, 1), domains=(2, 1))
    with RankPool(2, join=False) as pool, pytest.raises(RankFailed, match=r"(?s)rank 0:.*TransportError.*rank 1"):
        train_on(pool, run, case, fault="hang:rank=1,step=3")
