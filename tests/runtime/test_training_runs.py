"""Whole runs: reports, checkpoints, resuming under the same and under other plans, traces, and lost ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from shutil import copy, copytree, rmtree
from typing import Any

import numpy as np
import pipelined_cases
import pytest
import torch
from rank_pool import RankFailed, RankPool
from training_cases import Case, losses_of, run_apart, train_run, training_run

from hybridep.checkpoint_folders import MANIFEST
from hybridep.errors import UserError
from hybridep.launch.controller import add_up
from hybridep.plan import Residency
from hybridep.recompute import ALL, Recompute
from hybridep.routing import load_routing
from hybridep.run import Checkpoints, Data, Optimizer, Run, StepReport, Validation
from hybridep.traffic import step_traffic
from runtime import checkpoint
from runtime.reference import ReferenceTrainer

pytestmark = pytest.mark.timeout(120)

Job = Callable[..., list[StepReport] | None]
CASE = Case(sizes=(2, 2), domains=(2, 1), model="top4-tied-gqa", micro_batches=1)
"""Its gates have biases that move: a run that goes on without them chooses other experts."""


def train_on(
    ranks: RankPool, run: Run, case: Case, *, resume: bool = False, fault: str = "", job: Job = train_run
) -> list[list[StepReport]]:
    """What each rank of the case reports."""
    return [reports for reports in ranks.run_with_store(job, run, case.plan(), resume, fault) if reports is not None]


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Six steps in one go, with checkpoints every two."""
    output = tmp_path_factory.mktemp("unbroken")
    run = training_run(output, steps=6, checkpoints=Checkpoints(every_steps=2), trace_step=3)
    return output, losses_of(train_on(ranks, run, CASE))


def continued(source: Path, target: Path, step: int) -> Run:
    """A run whose only checkpoint is that of one step of another run."""
    name = f"step-{step:08d}"
    (target / "checkpoints").mkdir(parents=True)
    (target / "checkpoints" / name).symlink_to(source / "checkpoints" / name)
    return training_run(target, steps=6)


def test_resume_equals_an_unbroken_run(ranks: RankPool, unbroken: tuple[Path, list[float]], tmp_path: Path) -> None:
    reports = train_on(ranks, continued(unbroken[0], tmp_path, 2), CASE, resume=True)
    assert [report.step for report in reports[0]] == [3, 4, 5, 6]
    assert losses_of(reports) == unbroken[1][2:]
    whole, parts = (load_routing(output / "routing.npz") for output in (unbroken[0], tmp_path))
    np.testing.assert_array_equal(parts.chosen, whole.chosen)
    # Once more there is nothing to do, and nothing is written.
    (tmp_path / "routing.npz").unlink()
    assert train_on(ranks, training_run(tmp_path, steps=6), CASE, resume=True) == [[]] * 4
    assert not (tmp_path / "routing.npz").exists()
    # Choices that were recorded stay when a run goes on.
    copy(unbroken[0] / "routing.npz", tmp_path)
    train_on(ranks, training_run(tmp_path, steps=7), CASE, resume=True)
    longer = load_routing(tmp_path / "routing.npz")
    assert longer.choices.keys() == whole.choices.keys() != set()
    np.testing.assert_array_equal(longer.chosen.sum(axis=1) * 6, whole.chosen.sum(axis=1) * 7)


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
    reports = train_on(ranks, continued(unbroken[0], tmp_path, 4), other, resume=True)
    found, said = losses_of(reports), [report.remarks for report in reports[0]]
    if other.num_ranks * other.micro_batches == 4:
        np.testing.assert_allclose(found, unbroken[1][4:], rtol=1e-12)
        assert said == [[], []]
    else:
        # Fewer ranks without more micro-batches see a smaller batch: the run goes on, with other losses, and says so.
        assert len(found) == 2
        [[remark], later] = said
        assert later == [] and remark.startswith("step-00000004 was written with sequences of all sites in a step 8 (now 6); ")
        np.testing.assert_allclose(found, unbroken[1][4:], rtol=0.2)


def test_other_settings_are_named(ranks: RankPool, unbroken: tuple[Path, list[float]], tmp_path: Path) -> None:
    """What a run goes on with is what it is given: on purpose or by mistake."""
    run = continued(unbroken[0], tmp_path, 4)
    warmer = Optimizer(learning_rate=run.optimizer.learning_rate, warmup_steps=9)
    other = run.model_copy(update={"seed": run.seed + 1, "optimizer": warmer, "weights": tmp_path / "gone"})
    reports = train_on(ranks, other, CASE, resume=True)
    [remark] = reports[0][0].remarks
    assert remark == (
        f"step-00000004 was written with seed {run.seed} (now {run.seed + 1}), optimizer.warmup_steps 3 (now 9); the steps after "
        "it are made with what is given now"
    )
    assert losses_of(reports)[0] != pytest.approx(unbroken[1][4], rel=1e-6)


APART = Case(sizes=(2, 1), domains=(2, 1), micro_batches=2)
"""Two sites of one rank."""


def test_sites_need_not_share_a_file_system(ranks: RankPool, tmp_path: Path) -> None:
    whole = losses_of(train_on(ranks, training_run(tmp_path / "whole", steps=6), APART))
    run = training_run(tmp_path, steps=4, checkpoints=Checkpoints(every_steps=2), trace_step=1)
    assert losses_of(train_on(ranks, run, APART, job=run_apart)) == whole[:4]
    folders = [tmp_path / f"site{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        assert sorted(path.name for path in folder.glob("step*")) == ["step-00000002", "step-00000004"]
        assert [path.name for path in sorted(folder.glob("*4/experts*"))] == [f"experts-0000{rank}.pt"]
    events = json.loads((folders[0] / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"rank 0 compute", "rank 1 compute"} <= rows and not (folders[1] / "trace.json").exists()
    # One site has checkpoints of another run, and lost the last one of this: the last that is whole counts.
    rmtree(folders[1] / "step-00000004")
    copytree(folders[1] / "step-00000002", stale := folders[1] / "step-00000009")
    manifest = json.loads((stale / MANIFEST).read_text())
    (stale / MANIFEST).write_text(json.dumps(manifest | {"step": 9, "number": manifest["number"] + 1}))
    again = run.model_copy(update={"steps": 6})
    # Under another plan with experts at the same homes.
    reports = train_on(ranks, again, replace(APART, domains=(1, 1)), resume=True, job=run_apart)
    assert [one.step for one in reports[0]] == [3, 4, 5, 6]
    np.testing.assert_allclose(losses_of(reports), whole[2:], rtol=1e-12)
    rmtree(stale)
    # Put together, they are read by any number of ranks.
    together = tmp_path / "together" / "checkpoints"
    for folder in folders:
        copytree(folder, together, dirs_exist_ok=True)
    one = training_run(tmp_path / "together", steps=7)
    assert [step.step for step in train_on(ranks, one, replace(APART, sizes=(1, 1), domains=(1, 1)), resume=True)[0]] == [7]


def test_all_sites_pass_over_what_is_damaged_at_one(ranks: RankPool, tmp_path: Path) -> None:
    run = training_run(tmp_path, steps=4, checkpoints=Checkpoints(every_steps=2))
    whole = losses_of(train_on(ranks, run, APART, job=run_apart))
    for step in (4, 2):
        (tmp_path / "site1" / f"step-0000000{step}" / "experts-00001.pt").write_bytes(b"")
        if step == 4:
            reports = train_on(ranks, run, APART, resume=True, job=run_apart)
            assert losses_of(reports) == whole[2:]
            first, *others = [report.remarks for one in reversed(reports) for report in one]
            assert len(first) == 1 and "step-00000004: experts-00001.pt has 0 bytes, and had" in first[0] and not any(others)
            rmtree(tmp_path / "site1" / "step-00000004")
    with (
        RankPool(2, join=False) as pool,
        pytest.raises(RankFailed, match=r"rank 1:(?s:.)*no checkpoint that is whole.*2: experts"),
    ):
        train_on(pool, run, APART, resume=True, job=run_apart)


def run_with_one_full_disk(rank: int, *arguments: Any) -> list[StepReport] | None:
    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"part")
        raise OSError(ENOSPC, "No space left on device")

    if rank == 1:
        checkpoint._write = full
    return run_apart(rank, *arguments)


def test_no_site_keeps_its_part_where_another_has_a_full_disk(tmp_path: Path) -> None:
    with RankPool(2, join=False) as pool, pytest.raises(RankFailed, match=r"site1 cannot be written \(.*No space left"):
        train_on(pool, training_run(tmp_path, steps=1), APART, job=run_with_one_full_disk)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == []


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


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with RankPool(1, join=False) as pool, pytest.raises(RankFailed, match="holds no complete checkpoint; start without --resume"):
        train_on(pool, training_run(tmp_path, steps=1), replace(CASE, sizes=(1, 1), domains=(1, 1)), resume=True)


@pytest.mark.parametrize(
    ("most", "every", "what"),
    [(None, 0, "the loss of step 3 is"), (None, 1, "the weights after step 2 are"), (1.0, 1, "the gradient of step 2 is")],
)
def test_what_is_not_finite_ends_the_run(tmp_path: Path, most: float | None, every: int, what: str) -> None:
    """Before a checkpoint holds it."""
    wild = Optimizer(max_gradient_norm=most).model_copy(update={"learning_rate": 1e300})
    run = training_run(tmp_path, steps=4, optimizer=wild, checkpoints=Checkpoints(every_steps=every))
    with RankPool(1, join=False) as pool, pytest.raises(RankFailed, match=f"{what} not finite"):
        train_on(pool, run, replace(CASE, sizes=(1, 1), domains=(1, 1)))
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000001"] * every


def test_a_folder_that_cannot_be_written_is_noticed_at_once(tmp_path: Path) -> None:
    from runtime.trainer import train

    (tmp_path / "file").write_text("")
    run = training_run(tmp_path, checkpoints=Checkpoints(folder=tmp_path / "file" / "below"))
    with pytest.raises(UserError, match=r"checkpoints\.folder: .*below cannot be written"):
        train(run, CASE.plan(), rank=0, store=None, on_step=lambda report: None)  # type: ignore[arg-type]


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    run = training_run(tmp_path, steps=4, exchange_timeout="5 s")
    case = replace(CASE, sizes=(2, 1), domains=(2, 1))
    with RankPool(2, join=False) as pool, pytest.raises(RankFailed, match=r"(?s)rank 0:.*TransportError.*rank 1"):
        train_on(pool, run, case, fault="hang:rank=1,step=3")


def test_only_the_last_checkpoints_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    run = training_run(tmp_path, steps=4, checkpoints=Checkpoints(every_steps=1, keep=2))
    train_on(ranks, run, CASE)
    assert sorted(path.name for path in run.checkpoint_folder.iterdir()) == ["step-00000003", "step-00000004"]
    reports = train_on(ranks, run.model_copy(update={"steps": 5}), CASE, resume=True)
    assert [report.step for report in reports[0]] == [5]


PIPELINE = pipelined_cases.Case(sizes=(2, 2), stages=((0,), (1,)), layers=(3, 2), domains=({}, {"gpu": 2}), micro_batches=2)


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", [CASE, PIPELINE], ids=str)
def test_long_gradients_are_scaled_down_as_torch_does(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case | pipelined_cases.Case
) -> None:
    """Of all parameters together, whichever ranks have them."""
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noted(parameters: Any, most: float) -> torch.Tensor:
        norm = clip(parameters, most)
        norms.append(float(norm))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    losses = {}
    for most in (None, 1.5):
        optimizer = Optimizer(learning_rate=0.1, max_gradient_norm=most)
        run = training_run(tmp_path / f"{most}", steps=6, optimizer=optimizer)
        reports = [one for one in ranks.run_with_store(train_run, run, case.plan()) if one is not None]
        losses[most], trainer = losses_of(reports), ReferenceTrainer(run, case.plan())
        assert losses[most] == pytest.approx([trainer.step(step) for step in range(1, 7)], rel=1e-10)
        for one in reports:
            assert [step.gradient_norm for step in one] == (pytest.approx(norms, rel=1e-10) if most else [None] * 6)
    assert min(norms) < 1.5 < max(norms) and losses[None] != losses[1.5]


ALIKE = [
    Case(sizes=(2, 2), domains=(2, 2), residency=Residency.MICROBATCH, prefetch=1, micro_batches=2, model="qwen2"),
    Case(sizes=(2, 2), domains=(1, 2), chunks=3, recompute=ALL, micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 1), prefetch=2, recompute=Recompute.ATTENTION, model="top4-tied-gqa"),
]
VALIDATED = [CASE, *(pytest.param(case, marks=pytest.mark.turns(3)) for case in ALIKE), PIPELINE]


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", VALIDATED, ids=str)
def test_validation_is_that_of_one_process_and_changes_nothing(
    ranks: RankPool, tmp_path: Path, case: Case | pipelined_cases.Case
) -> None:
    text = tmp_path / "held-out.txt"
    text.write_bytes(bytes(np.random.default_rng(5).integers(1, 256, size=300, dtype=np.uint8)))
    validation = Validation(data=Data(path=text), every_steps=3, batches=2)
    plain = training_run(tmp_path / "plain", steps=5)
    run = training_run(tmp_path / "validated", steps=5, validation=validation)
    before, reports = (
        [one for one in ranks.run_with_store(train_run, each, case.plan()) if one is not None] for each in (plain, run)
    )
    assert losses_of(reports) == losses_of(before)
    assert [[step.sent_bytes for step in one] for one in reports] == [[step.sent_bytes for step in one] for one in before]
    chosen = [load_routing(each.output / "routing.npz").chosen for each in (plain, run)]
    np.testing.assert_array_equal(*chosen)
    trainer = ReferenceTrainer(run, case.plan())
    for step, records in enumerate(zip(*reports, strict=True), start=1):
        trainer.step(step)
        loss = add_up(records).validation_loss
        if step not in (3, 5):
            assert loss is None
        else:
            assert loss == pytest.approx(trainer.validation_loss(2), rel=1e-10)
