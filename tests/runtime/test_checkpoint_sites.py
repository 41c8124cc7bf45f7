"""Checkpoints of sites that share no file system: copies that outlive a site, and files that come from sites that have them."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pipelined_cases
import pytest
import torch
from rank_pool import RankFailed, RankPool
from training_cases import Case, losses_of, run_apart, train_run, training_run

from hybridep.checkpoint_folders import MANIFEST
from hybridep.launch.machine import copied_bytes
from hybridep.launch.worker import Job
from hybridep.pipeline import AnyPlan
from hybridep.run import Checkpoints, Run, StepReport
from runtime import checkpoint, checkpoint_travel, trainer
from runtime.checkpoint_files import LAYOUT, dense_shard, expert_shard

pytestmark = pytest.mark.timeout(120)

THREE = Case(sizes=(3, 1), domains=(3, 1))
"""Three sites of one rank."""
FOUR = Case(sizes=(2, 2), domains=(2, 1), codecs=(("dc", (("experts", "change-int8"), ("gradients", "int8"))),))
"""Two sites of two ranks, whose codecs keep something."""
STAGES = pipelined_cases.CASES[0]
"""Each of two sites a stage."""
LAST = "step-00000002"


def train(ranks: RankPool, run: Run, plan: AnyPlan, resume: bool = False, job: Any = run_apart) -> list[list[StepReport]]:
    """What each rank of the plan reports."""
    return [reports for reports in ranks.run_with_store(job, run, plan, resume) if reports is not None]


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / LAST).glob("*.pt")}


@pytest.fixture(scope="module")
def written(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Path, list[float]]]:
    """By plan and number of copies: the folder of a run of two steps, and the losses of four."""
    made = {}
    for name, plan, most in (("three", THREE.plan(), 2), ("four", FOUR.plan(), 1), ("stages", STAGES.plan(), 1)):
        whole = losses_of(train(ranks, training_run(tmp_path_factory.mktemp("whole"), steps=4), plan))
        for copies in range(most + 1):
            run = training_run(output := tmp_path_factory.mktemp(name), steps=2, checkpoints=Checkpoints(copies=copies))
            assert losses_of(train(ranks, run, plan)) == whole[:2], "copies change nothing in the training"
            made[name, copies] = output, whole
    return made


Written = dict[tuple[str, int], tuple[Path, list[float]]]


def again(source: Path, target: Path, lost: int | None = None) -> Run:
    """A run that goes on from copies of the folders of all sites but one."""
    copytree(source, target, dirs_exist_ok=True)
    if lost is not None:
        rmtree(target / f"site{lost}")
    return training_run(target, steps=4)


@pytest.mark.parametrize(("name", "copies"), [("three", 0), ("three", 1), ("three", 2), ("four", 1), ("stages", 1)])
def test_so_many_other_sites_keep_each_file(written: Written, name: str, copies: int) -> None:
    folders = sorted(written[name, copies][0].glob("site*"))
    sites = Counter(file for folder in folders for file in files(folder))
    dense_parts = {"three": 1, "four": 2, "stages": 4}[name]
    ranks, codecs = len(folders) * (1 if name == "three" else 2), 4 if name == "four" else 0
    assert len(sites) == ranks + dense_parts + codecs + 1
    for file, found in sites.items():
        everywhere = file.startswith("dense") and name != "stages"
        assert found == (len(folders) if everywhere else copies + 1), file
    for folder in folders:
        sizes = {path.name: path.stat().st_size for path in (folder / LAST).glob("*.pt")}
        assert json.loads((folder / LAST / MANIFEST).read_text())["bytes"] == sizes
        assert {path.name for path in folder.iterdir()} == {LAST, "routing.npz"} - (
            {"routing.npz"} if folder != folders[0] else set()
        )


@pytest.mark.parametrize(
    ("name", "copies", "lost"),
    [("three", 1, 0), ("three", 1, 1), ("three", 2, 2), ("four", 1, 0), ("four", 1, 1), ("stages", 1, 0), ("stages", 1, 1)],
)
def test_a_site_that_lost_its_disk_gets_its_files_back(
    ranks: RankPool, written: Written, tmp_path: Path, name: str, copies: int, lost: int
) -> None:
    """To the bit, also where codecs keep something."""
    source, whole = written[name, copies]
    plan = {"three": THREE, "four": FOUR, "stages": STAGES}[name].plan()
    reports = train(ranks, again(source, tmp_path, lost), plan, resume=True)
    assert losses_of(reports) == whole[2:]
    [said] = reports[0][0].remarks
    assert f"{LAST}: " in said and said.endswith(" went to sites that lacked them")
    assert not any(report.remarks for one in reports[1:] for report in one)
    back, was = tmp_path / f"site{lost}", source / f"site{lost}"
    needed = {file for file in files(was) if (back / LAST / file).exists()}
    assert needed and all((back / LAST / file).read_bytes() == (was / LAST / file).read_bytes() for file in needed)
    assert json.loads((back / LAST / MANIFEST).read_text())["bytes"].keys() == files(back)
    assert not list(tmp_path.glob("site*/.step*"))


@pytest.mark.parametrize(("name", "lost"), [("three", 1), ("stages", 0)])
def test_without_copies_what_is_lost_is_named(written: Written, tmp_path: Path, name: str, lost: int) -> None:
    run, plan = again(written[name, 0][0], tmp_path, lost), {"three": THREE, "stages": STAGES}[name].plan()
    gone = f"experts-{lost * (1 if name == 'three' else 2):05d}" if name == "three" else "dense-00000-00000"
    with (
        RankPool(plan.cluster.num_gpus, join=False) as pool,
        pytest.raises(RankFailed, match=rf"no site has {gone}\.pt of {LAST}\); bring"),
    ):
        train(pool, run, plan, resume=True)


@pytest.mark.parametrize(
    ("name", "copies", "other"),
    [
        ("three", 1, Case(sizes=(2, 1), domains=(1, 1))),
        ("three", 0, replace(THREE, domains=(1, 1), wild=3)),
        ("four", 1, Case(sizes=(1, 2), domains=(1, 1))),
        ("stages", 1, pipelined_cases.Case(sizes=(1, 2), stages=((0,),), layers=(5,), domains=({},), micro_batches=1)),
        ("stages", 0, replace(STAGES, stages=((1,), (0,)), layers=(2, 3))),
    ],
    ids=str,
)
def test_another_plan_goes_on_with_what_the_sites_have(
    ranks: RankPool, written: Written, tmp_path: Path, name: str, copies: int, other: Any
) -> None:
    """For fewer sites, other homes, other stages: as from one folder with everything."""
    source, plan = written[name, copies][0], other.plan()
    sites = plan.cluster.num_gpus // plan.cluster.ranks_per_site
    run = again(source, tmp_path / "apart")
    for left in range(sites, 3):
        rmtree(tmp_path / "apart" / f"site{left}", ignore_errors=True)
    found = train(ranks, run, plan, resume=True)
    for folder in sorted(source.glob("site*")):
        copytree(folder, tmp_path / "one" / "checkpoints", dirs_exist_ok=True)
    expected = train(ranks, training_run(tmp_path / "one", steps=4), plan, resume=True, job=train_run)
    assert losses_of(found) == losses_of(expected) and len(found[0]) == 2
    brought, lacking = ([said for said in one[0][0].remarks if "was written with" not in said] for one in (found, expected))
    assert len(brought) == (sites > 1) and not lacking, "where all is in one folder nothing is lacking"


def test_codecs_begin_anew_with_experts_from_other_sites(ranks: RankPool, tmp_path: Path) -> None:
    """A site is lost where copies travel as coded changes: the others read experts that they copy, too."""
    codecs = (("dc", (("experts", "change-int8"), ("gradients", "int8"))),)
    case = Case(sizes=(3, 1), domains=(3, 1), codecs=codecs)
    train(ranks, training_run(tmp_path, steps=2, checkpoints=Checkpoints(copies=1)), case.plan())
    rmtree(tmp_path / "site2")
    fewer = Case(sizes=(2, 1), domains=(2, 1), codecs=codecs).plan()
    reports = train(ranks, training_run(tmp_path, steps=4), fewer, resume=True)
    assert [report.step for report in reports[0]] == [3, 4]


def test_what_codecs_keep_belongs_to_a_checkpoint(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    """Under its plan: without one rank's the checkpoint is not whole. Under another one codecs begin anew."""
    run = again(written["four", 0][0], tmp_path)
    (tmp_path / "site1" / LAST / "codecs-00002.pt").unlink()
    with RankPool(4, join=False) as pool, pytest.raises(RankFailed, match=r"codecs-00002\.pt"):
        train(pool, run, FOUR.plan(), resume=True)
    assert len(train(ranks, run, Case(sizes=(2, 2), domains=(1, 1)).plan(), resume=True)[0]) == 2


def test_a_checkpoint_of_another_model_is_refused(written: Written, tmp_path: Path) -> None:
    run = again(written["three", 1][0], tmp_path)
    with RankPool(3, join=False) as pool, pytest.raises(RankFailed, match=r"model\.num_kv_heads was None when it was written"):
        train(pool, run, replace(THREE, model="top4-tied-gqa").plan(), resume=True)


def test_damaged_files_are_replaced_and_others_put_aside(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    """A file that was cut off; and a checkpoint of the same step of another run."""
    source, whole = written["three", 1]
    run = again(source, tmp_path)
    cut = tmp_path / "site1" / LAST / "experts-00001.pt"
    [stale] = [tmp_path / site / LAST for site in ("site0", "site2") if cut.name not in files(tmp_path / site)]
    original = cut.read_bytes()
    cut.write_bytes(original[:-1])
    manifest = json.loads((stale / MANIFEST).read_text())
    (stale / MANIFEST).write_text(json.dumps(manifest | {"number": manifest["number"] + 1}))
    reports = train(ranks, run, THREE.plan(), resume=True)
    assert losses_of(reports) == whole[2:] and cut.read_bytes() == original
    assert [remark for remark in reports[1][0].remarks if "experts-00001.pt has" in remark]
    assert [path.name.partition(".other-")[0] for path in stale.parent.glob(f"{LAST}*")].count(LAST) == 2


def test_what_was_written_before_the_last_resume_comes_after_all_since(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    """A site was away with a later checkpoint, all of it, while the others went on from an earlier one in another way."""
    source, _ = written["three", 2]
    run = again(source, tmp_path)
    (later := tmp_path / "site2" / "step-00000009").parent.joinpath(LAST).rename(later)
    manifest = json.loads((later / MANIFEST).read_text())
    (later / MANIFEST).write_text(json.dumps(manifest | {"step": 9}))
    away = later.rename(tmp_path / "away")
    two = Case(sizes=(2, 1), domains=(1, 1)).plan()
    assert [report.step for report in train(ranks, run, two, resume=True)[0]] == [3, 4]
    away.rename(later)
    longer = run.model_copy(update={"steps": 6})
    assert [report.step for report in train(ranks, longer, THREE.plan(), resume=True)[0]] == [5, 6]
    attempts = [json.loads(path.read_text())["attempt"] for path in sorted(tmp_path.glob(f"site0/step-*/{MANIFEST}"))]
    assert manifest["attempt"] == attempts[0] < attempts[1] < attempts[2]
    # Where nothing newer is whole it counts.
    for site in range(3):
        for step in (2, 4, 6):
            rmtree(tmp_path / f"site{site}" / f"step-0000000{step}", ignore_errors=True)
    assert [report.step for report in train(ranks, run.model_copy(update={"steps": 10}), THREE.plan(), resume=True)[0]] == [10]


def run_in_folders(rank: int, port: int, run: Run, plan: AnyPlan, *arguments: Any) -> list[StepReport] | None:
    """Of four ranks in two sites the second two have a folder each, which are two machines."""
    output = run.output / f"folder{max(rank - 1, 0)}"
    own = run.model_copy(update={"output": output, "checkpoints": run.checkpoints.model_copy(update={"folder": output})})
    return train_run(rank, port, own, plan, *arguments)


def test_copies_are_at_other_sites_not_only_on_other_machines(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(sizes=(2, 2), domains=(2, 1))
    whole = losses_of(train(ranks, training_run(tmp_path / "whole", steps=4), case.plan()))
    run = training_run(tmp_path, steps=2, checkpoints=Checkpoints(copies=1))
    train(ranks, run, case.plan(), job=run_in_folders)
    first, *second = (files(tmp_path / f"folder{number}") for number in range(3))
    assert first == second[0] | second[1] and {"experts-00002.pt", "experts-00003.pt"} <= first
    rmtree(tmp_path / "folder1")
    rmtree(tmp_path / "folder2")
    assert losses_of(train(ranks, training_run(tmp_path, steps=4), case.plan(), resume=True, job=run_in_folders)) == whole[2:]


def run_where_one_cannot_take_copies(rank: int, *arguments: Any) -> list[StepReport] | None:
    def full(path: Path, start: int, piece: torch.Tensor) -> None:
        raise OSError(ENOSPC, "No space left on device")

    if rank == 1:
        checkpoint_travel._append = full
    return run_apart(rank, *arguments)


@pytest.mark.parametrize("resume", [False, True])
def test_no_part_stays_where_a_copy_finds_no_room(written: Written, tmp_path: Path, resume: bool) -> None:
    run = training_run(tmp_path, steps=2, checkpoints=Checkpoints(copies=1))
    if resume:
        run = again(written["three", 1][0], tmp_path, lost=1)
    before = {path.relative_to(tmp_path) for path in tmp_path.glob("*/*")}
    with (
        RankPool(3, join=False) as pool,
        pytest.raises(RankFailed, match=r"rank 1:(?s:.)*site1 cannot be written \(.*No space left"),
    ):
        train(pool, run, THREE.plan(), resume=resume, job=run_where_one_cannot_take_copies)
    assert {path.relative_to(tmp_path) for path in tmp_path.glob("*/*")} == before


def run_where_pieces_are_small(rank: int, *arguments: Any) -> list[StepReport] | None:
    checkpoint_travel._PIECE_BYTES = 1000
    return run_apart(rank, *arguments)


def test_large_files_travel_in_pieces(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    source, whole = written["three", 1]
    with RankPool(3, join=False) as pool:
        run = again(source, tmp_path, lost=1)
        assert losses_of(train(pool, run, THREE.plan(), resume=True, job=run_where_pieces_are_small)) == whole[2:]
    assert all((tmp_path / "site1" / LAST / name).stat().st_size > 5000 for name in files(tmp_path / "site1") - {"chosen.pt"})


def test_what_an_earlier_run_left_is_never_gone_on_from(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    """Also not where another site has all of it: a run from the start puts it aside everywhere."""
    again(written["three", 2][0], tmp_path)
    with RankPool(3, join=False) as pool, pytest.raises(RankFailed, match="fault injected"):
        run = training_run(tmp_path, steps=4)
        pool.run_with_store(run_apart, run, THREE.plan(), False, "raise:rank=1,step=1")
    for site in tmp_path.glob("site*"):
        assert (site / "previous" / LAST / MANIFEST).is_file() and not list(site.glob("step-*"))
    with RankPool(3, join=False) as pool, pytest.raises(RankFailed, match="holds no complete checkpoint"):
        train(pool, training_run(tmp_path, steps=4), THREE.plan(), resume=True)


def test_a_restarted_run_begins_where_there_is_no_checkpoint(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    """Where there is one that is not whole it ends: what is missing may come back."""
    source, whole = written["three", 0]
    run = again(source, tmp_path / "lost", lost=1)
    with RankPool(3, join=False) as pool, pytest.raises(RankFailed, match=r"no site has experts-00001\.pt of"):
        pool.run_with_store(run_apart, run, THREE.plan(), True, "", True)
    for folder, first in (("new", 0), ("whole", 2)):
        if folder == "whole":
            again(source, tmp_path / folder)
        run = training_run(tmp_path / folder, steps=4)
        assert losses_of(ranks.run_with_store(run_apart, run, THREE.plan(), True, "", True)[:3]) == whole[first:]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_checkpoint_behind_a_link_to_another_disk_is_mended(ranks: RankPool, written: Written, tmp_path: Path) -> None:
    source, whole = written["three", 1]
    run = again(source, tmp_path)
    linked, own = tmp_path / "site1" / LAST, "experts-00001.pt"
    with TemporaryDirectory(dir="/dev/shm") as other:
        copytree(linked, elsewhere := Path(other) / LAST)
        rmtree(linked)
        linked.symlink_to(elsewhere)
        (linked / own).unlink()
        before = {path.name for path in linked.iterdir()}
        # Of a run that ended while files came.
        (left := linked / ".step-resume.partial-1").mkdir()
        (left / f"{own}.1").touch()
        assert losses_of(train(ranks, run, THREE.plan(), resume=True)) == whole[2:]
        assert {path.name for path in linked.iterdir()} == before | {own}
        assert (linked / own).read_bytes() == (source / "site1" / LAST / own).read_bytes()


def run_where_writing_is_slow(rank: int, *arguments: Any) -> list[StepReport] | None:
    write = checkpoint._write

    def slow(state: Any, path: Path) -> None:
        time.sleep(1)
        write(state, path)

    checkpoint._write = slow
    try:
        return run_apart(rank, *arguments)
    finally:
        checkpoint._write = write


def run_where_one_has_no_room(rank: int, *arguments: Any) -> list[StepReport] | None:
    def full(state: Any, path: Path) -> None:
        raise OSError(ENOSPC, "No space left on device")

    if rank == 1:
        checkpoint._write = full
    return run_apart(rank, *arguments)


def tensor_bytes(file: Path) -> int:
    def inside(content: Any) -> int:
        return content.nbytes if isinstance(content, torch.Tensor) else sum(map(inside, content.values()))

    content = torch.load(file, weights_only=True)
    return inside({name: value for name, value in content.items() if name != LAYOUT})


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["three", "four", "stages"])
def test_training_goes_on_while_checkpoints_are_written(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """They are those that are written between steps, to the bit, and so is what a run that goes on from one makes."""
    plan = {"three": THREE, "four": FOUR, "stages": STAGES}[name].plan()
    found: dict[Any, list[Any]] = {}
    for kind in (False, True):
        settings = Checkpoints(copies=1, every_steps=2, async_save=kind)
        run = training_run(tmp_path / str(kind), steps=6, checkpoints=settings)
        reports = train(ranks, run, plan, job=run_where_writing_is_slow if kind else run_apart)
        found[kind] = losses_of(reports)
        complete = [step.checkpoint for step in reports[0]]
        if kind:  # the second of the steps beside a checkpoint may end after it
            assert complete[:3] == [None, None, None] and complete[4] == 2
        else:
            assert complete == [None, None, 2, 2, 4, 4]
    assert found[True] == found[False]
    between, beside = (
        {path.relative_to(tmp_path / str(kind)): path.read_bytes() for path in (tmp_path / str(kind)).rglob("*.pt")}
        for kind in (False, True)
    )
    assert between == beside and len({path.parent for path in beside}) == 3 * plan.cluster.sizes[0]
    places = {rank: checkpoint._dense_place(plan, rank) for rank in range(plan.cluster.num_gpus)}
    names = [name for rank, place in places.items() for name in (expert_shard(rank), dense_shard(*place))]
    written = [next((tmp_path / "True").glob(f"site*/step-00000006/{name}")) for name in names]
    assert sum(map(tensor_bytes, written)) == copied_bytes(Job(run=run, plan=plan)), "what the ranks' memory must hold"
    for kind in ("False", "True"):
        manifests = [json.loads(path.read_text()) for path in sorted((tmp_path / kind).rglob(MANIFEST))]
        assert len(manifests) == 3 * plan.cluster.sizes[0]
        biases = [[one["step"], one.get("expert_bias")] for one in manifests]
        assert biases == found.setdefault("biases", biases) and all(
            (bias is not None) == (name == "stages") for _, bias in biases
        )
    for path in (tmp_path / "True").glob("site*/step-00000006"):
        rmtree(path)
    run = training_run(tmp_path / "True", steps=6, checkpoints=settings)
    assert losses_of(train(ranks, run, plan, resume=True)) == found[False][4:]
    assert not list(tmp_path.glob("*/site*/.step*"))


def test_what_goes_wrong_beside_the_steps_ends_the_run(tmp_path: Path) -> None:
    run = training_run(tmp_path, steps=500, checkpoints=Checkpoints(every_steps=2, async_save=True))
    with (
        RankPool(3, join=False) as pool,
        pytest.raises(RankFailed, match=r"rank 1:(?s:.)*site1 cannot be written \(.*No space left"),
    ):
        train(pool, run, THREE.plan(), job=run_where_one_has_no_room)
    assert not list(tmp_path.glob("site*/*step*"))


def run_to_a_loss_that_is_not_finite(rank: int, *arguments: Any) -> list[StepReport] | None:
    step = trainer.RankTrainer.step

    def spoilt(self: trainer.RankTrainer, number: int) -> StepReport:
        report = step(self, number)
        return replace(report, loss_sum=math.nan) if number == 3 and rank == 1 else report

    trainer.RankTrainer.step = spoilt
    return run_where_writing_is_slow(rank, *arguments)


def test_a_loss_that_is_not_finite_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Which is still written when it comes."""
    run = training_run(tmp_path, steps=8, checkpoints=Checkpoints(every_steps=2, async_save=True))
    with RankPool(3, join=False) as pool, pytest.raises(RankFailed, match=r"rank 1:(?s:.)*the loss of step 3 is not finite"):
        train(pool, run, THREE.plan(), job=run_to_a_loss_that_is_not_finite)
    assert [(site / LAST / MANIFEST).is_file() for site in sorted(tmp_path.glob("site*"))] == [True] * 3
