"""Checkpoint files without any process group: completeness, and errors that say what is wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from training_cases import Case

from hybridep.checkpoint_folders import MANIFEST
from hybridep.errors import UserError
from hybridep.run import Optimizer
from runtime.barrier import Barrier
from runtime.checkpoint import keep_last, load_checkpoint, load_expert_bias, rank_state, save_checkpoint
from runtime.checkpoint_files import SavedWeights, expert_name, expert_shard, last_with_all
from runtime.checkpoint_search import last_checkpoint, shared_folder
from runtime.dense_reduce import DenseReduce
from runtime.dense_shard import SHARD, DenseShard
from runtime.mesh import Mesh
from runtime.optimizer import HomeOptimizer
from runtime.transport import Transport

CASE = Case(sizes=(1, 1), domains=(1, 1), dtype="bf16")


class State(HomeOptimizer):
    """Of a rank with one dense parameter."""

    shard: DenseShard


def optimizer(mesh: Mesh, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    model = mesh.plan.workload.model
    names = {"norm.weight": (16,)} | {expert_name(layer): (model.num_experts, model.expert_params) for layer in range(2)}
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(mesh.dtype)) for name, shape in names.items()
    }
    shard = DenseShard({"norm.weight": parameters.pop("norm.weight")}, DenseReduce(mesh, lambda *_: None), mesh.dtype)
    state = State(Optimizer(learning_rate=0.1), {SHARD: shard.parameter} | parameters)
    state.shard = shard
    return state


def advance(state: HomeOptimizer, step: int) -> None:
    for index, parameter in enumerate(state.parameters.values()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + step))
    state.step(step)


class Alone(Barrier):
    """Of one rank, without a process group."""

    def __init__(self) -> None:
        pass

    def agree(self, value: float) -> float:
        return value

    def most(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather_json(self, value: Any) -> list[Any]:
        return [value]

    def share_json(self, value: Any) -> Any:
        return value


ALONE = Alone()


class Nowhere(Transport):
    """Of one rank, which sends to none."""

    def __init__(self) -> None:
        pass


def save(folder: Path, mesh: Mesh, state: State, step: int, attempt: int = 0, bias: torch.Tensor | None = None) -> Path:
    return save_checkpoint(
        folder,
        step,
        rank_state(state.shard, state, {}, None, bias),
        mesh=mesh,
        barrier=ALONE,
        transport=Nowhere(),
        copies=1,
        attempt=attempt,
    )


def last(folder: Path) -> tuple[Path, list[str]]:
    """The last checkpoint, and what there is to say."""
    with shared_folder(folder, 0, ALONE) as shared:
        found = last_checkpoint(shared, 0, ALONE)
    return found.path, found.remarks


def test_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Also the fp32 master copies of bf16 weights, without which a resumed run would drift."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    first, second = optimizer(mesh, 1), optimizer(mesh, 2)
    advance(first, 1)
    path = save(tmp_path, mesh, first, 1)
    assert load_checkpoint(path, mesh=mesh, shard=second.shard, optimizer=second) == 1
    for step in (2, 3):
        advance(first, step)
        advance(second, step)
    for name in first.parameters:
        assert torch.equal(first.parameters[name], second.parameters[name])
        assert torch.equal(first.masters[name], second.masters[name])


def test_biases_of_gates_come_back_to_the_bit(tmp_path: Path) -> None:
    """Wherever there is a manifest; also to whom exports a model."""
    mesh = Mesh(plan=Case(sizes=(1, 1), domains=(1, 1), dtype="bf16", model="top4-tied-gqa").plan(), rank=0)
    model = mesh.plan.workload.model
    generator = torch.Generator().manual_seed(1)
    bias_LE = torch.randn(model.num_moe_layers, model.num_experts, generator=generator).double()
    state = optimizer(mesh, 1)
    path = save(tmp_path, mesh, state, 1, bias=bias_LE)
    found = load_expert_bias(path, model)
    assert found is not None and torch.equal(found, bias_LE)
    assert load_expert_bias(path, model.model_copy(update={"expert_bias_update_rate": None})) is None
    for layer in range(2):
        assert torch.equal(SavedWeights(path).dense(f"layers.{layer}.feed_forward.gate.expert_bias"), bias_LE[layer])
    manifest = json.loads((path / MANIFEST).read_text())
    for damaged in ([[0.0, 1.0]], None):
        (path / MANIFEST).write_text(json.dumps(manifest | {"expert_bias": damaged}))
        with pytest.raises(UserError, match=r"cannot be read.*; move the checkpoint away"):
            load_expert_bias(path, model)


def test_what_is_exported_is_the_last_that_is_all_here(tmp_path: Path) -> None:
    """Last by when its run was started, so that what a later one has left behind does not come back."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    assert last_with_all(tmp_path) is None
    paths = {step: save(tmp_path, mesh, state, step, attempt=attempt) for step, attempt in ((3, 1), (4, 1), (1, 2), (2, 2))}
    assert last_with_all(tmp_path) == paths[2]
    (paths[2] / expert_shard(0)).write_bytes(b"cut off")
    assert last_with_all(tmp_path) == paths[1]
    (paths[1] / MANIFEST).write_text("{")
    assert last_with_all(tmp_path) == paths[4]
    for step in (3, 4):
        (paths[step] / expert_shard(0)).unlink()
    assert last_with_all(tmp_path) == paths[2]
    (paths[3] / MANIFEST).write_text('{"step": 3, "schema_version": 99}')
    with pytest.raises(UserError, match="is of schema 99"):
        last_with_all(tmp_path)


def test_dense_parameters_come_back_in_other_parts(tmp_path: Path) -> None:
    """Two ranks of a site wrote a half each, one reads both; and what version 2 had in one file."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    first, second, third = (optimizer(mesh, seed) for seed in (1, 2, 3))
    advance(first, 1)
    path = save(tmp_path, mesh, first, 1)
    whole = torch.load(path / "dense-00000-00000.pt")
    layout = whole.pop("layout")
    assert layout == {"norm.weight": {"first": 0, "begin": 0, "end": 16, "shape": [16]}}
    halves = {"dense-00000-00001.pt": slice(5, 16), "dense-00000-00000.pt": slice(0, 5)}
    for name, half in halves.items():
        place = layout["norm.weight"] | {"first": half.start, "end": half.stop - half.start}
        parts = {key: value[half].clone() for key, value in whole.items()}
        torch.save({"layout": {"norm.weight": place}} | parts, path / name)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"dense": list(halves)}))
    load_checkpoint(path, mesh=mesh, shard=second.shard, optimizer=second)
    torch.save({"norm.weight": {key: value.view(4, 4) for key, value in whole.items()}}, path / "dense.pt")
    (path / MANIFEST).write_text(json.dumps({key: manifest[key] for key in manifest if key != "dense"} | {"schema_version": 2}))
    load_checkpoint(path, mesh=mesh, shard=third.shard, optimizer=third)
    for state in (second, third):
        advance(state, 2)
    advance(first, 2)
    for name in first.parameters:
        assert torch.equal(first.masters[name], second.masters[name]) and torch.equal(first.masters[name], third.masters[name])
    (path / "dense.pt").unlink()
    with pytest.raises(UserError, match=r"norm\.weight is not here; another site wrote it"):
        load_checkpoint(path, mesh=mesh, shard=third.shard, optimizer=third)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    advance(state, 1)
    save(tmp_path, mesh, state, 9)
    save(tmp_path, mesh, state, 10)
    (tmp_path / ".step-00000011.partial").mkdir()
    (tmp_path / "step-00000012").mkdir()
    copytree(tmp_path / "step-00000010", tmp_path / "step-00000010.bak")
    (tmp_path / "step-00000010.bak" / MANIFEST).write_text("")
    assert last(tmp_path)[0].name == "step-00000010"
    assert save(tmp_path, mesh, state, 10).is_dir()
    assert not list(tmp_path.glob(".step-*")), "what an earlier run left is cleared away"


def test_an_end_while_one_is_replaced_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may have a checkpoint that others lack; the run then goes on from an earlier one and writes it anew."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    path = save(tmp_path, mesh, state, 9).with_name("step-00000010")
    save(tmp_path, mesh, state, 10)

    def killed(folder: Path, **_: object) -> None:
        (folder / "experts-00000.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", killed)
        save(tmp_path, mesh, state, 10)
    assert load_checkpoint(last(tmp_path)[0], mesh=mesh, shard=state.shard, optimizer=state)
    # What has the name and is not whole, as after copying that was cut off, is in nobody's way, and kept.
    (path / MANIFEST).unlink()
    assert last(tmp_path)[0].name == "step-00000009"
    save(tmp_path, mesh, state, 10)
    assert last(tmp_path) == (path, []) and not list(tmp_path.glob(".step-*"))
    assert len(list(tmp_path.glob("step-00000010.other-*/experts-00000.pt"))) == 1


def test_what_has_the_name_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and their names in the folder, are on the disk before it gets its name, and that is before anything is deleted."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    advance(state, 1)
    save(tmp_path, mesh, state, 1)
    synced, told = set[int](), list[bool]()
    sync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def renamed(source: Path, target: Path) -> Path:
        if target.name == "step-00000001":
            told.append({path.stat().st_ino for path in (source, *source.iterdir())} <= synced and len(synced) == 4)
            synced.clear()
        return rename(source, target)

    def deleted(folder: Path, **how: bool) -> None:
        told.append(tmp_path.stat().st_ino in synced)
        rmtree(folder, **how)

    monkeypatch.setattr(os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), sync(handle)))
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", deleted)
    save(tmp_path, mesh, state, 1)
    assert told == [True, True]


def damaged(path: Path, how: str) -> str:
    """Damage a checkpoint; returns what is said of it."""
    shard = path / "experts-00000.pt"
    if how == "cut off":
        shard.write_bytes(whole := shard.read_bytes()[:-1])
        return rf"{path}: experts-00000\.pt has {len(whole)} bytes, and had {len(whole) + 1}"
    if how == "gone":
        shard.unlink()
        return rf"{path}: experts-00000\.pt is gone"
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[:50] if how == "manifest" else text.replace('"homes"', '"homer"'))
    return rf"{path}/manifest\.json: cannot be read \(.*\)"


@pytest.mark.parametrize("how", ["cut off", "gone", "manifest", "a key of the manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, how: str) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    advance(state, 1)
    before, after = save(tmp_path, mesh, state, 9), save(tmp_path, mesh, state, 10)
    said = damaged(after, how)
    path, [why] = last(tmp_path)
    assert path == before and re.fullmatch(f"checkpoint {said}", why)
    # As soon as none is whole that is an error.
    damaged(before, "gone")
    with pytest.raises(UserError, match=rf"holds no checkpoint that is whole, .*\(.*9: experts.*; checkpoint {said}\); bring"):
        last(tmp_path)
    # Its step replaces it.
    assert last(save(tmp_path, mesh, state, 10).parent) == (after, [])


def test_a_checkpoint_that_does_not_know_its_sizes_counts(tmp_path: Path) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    advance(state, 1)
    path = save(tmp_path, mesh, state, 9)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["bytes"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    damaged(path, "cut off")
    assert last(tmp_path) == (path, [])


@pytest.mark.parametrize("full", ["experts-00000", "dense", MANIFEST])
def test_a_full_disk_keeps_no_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state, replace = optimizer(mesh, 1), os.replace

    def out_of_space(source: str, target: str) -> None:
        if Path(target).name.startswith(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    (tmp_path / ".step-00000001.partial-1").mkdir()
    monkeypatch.setattr(os, "replace", out_of_space)
    with pytest.raises(UserError, match=rf"checkpoints\.folder: {tmp_path} cannot be written \(.*No space left"):
        save(tmp_path, mesh, state, 1)
    assert not list(tmp_path.iterdir()), "nor what an earlier run left"


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        last(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoints\.folder: .*file cannot be written"):
        save(tmp_path / "file", mesh, state, 1)
    path = save(tmp_path, mesh, state, 1)

    def load() -> None:
        load_checkpoint(path, mesh=mesh, shard=state.shard, optimizer=state)

    other = json.loads((path / MANIFEST).read_text())
    other["workload"]["model"]["hidden_size"] = 32
    original = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"model\.hidden_size was 32 when it was written, now it is 16"):
        load()
    unnumbered, unsized = (json.dumps(json.loads(original) | {key: None}) for key in ("number", "bytes"))
    for text in (original[:50], "[]", unnumbered, unsized):
        (path / MANIFEST).write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json: cannot be read"):
            load()
        with pytest.raises(UserError, match=r"manifest\.json: cannot be read"):
            last(tmp_path)
    (path / MANIFEST).write_text(json.dumps(json.loads(original) | {"homes": None}))
    with pytest.raises(UserError, match="cannot be read"):
        load()
    (path / MANIFEST).write_text(original)
    shard = path / "experts-00000.pt"
    whole = shard.read_bytes()
    for damaged_bytes in (whole[:100], b"", whole.replace(b"torch", b"tarch"), b"\x80\x02X" * 100):
        shard.write_bytes(damaged_bytes)
        with pytest.raises(UserError, match=r"experts-00000\.pt: (cannot be read|is damaged).*; move the ") as caught:
            load()
        assert "\n" not in str(caught.value) and not any(word in str(caught.value) for word in ("weights_only", "miniz"))
    shard.write_bytes(whole)
    path.rename(renamed := path.with_name("step-00000007"))
    with pytest.raises(UserError, match="is of step 1; name it step-00000001"):
        load_checkpoint(renamed, mesh=mesh, shard=state.shard, optimizer=state)


def test_checkpoints_of_later_steps_and_other_folders_stay(tmp_path: Path) -> None:
    """A run that goes on from an earlier step replaces later ones when their steps come again."""
    for step in (8, 9, 10, 99999999, 100000000, 100000001):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / MANIFEST).write_text(json.dumps({"step": step}))
    for name in ("step-00000007", ".step-00000009.partial-1", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-00000011" / MANIFEST).write_text("cut of")
    (tmp_path / "step-100000000" / MANIFEST).write_text(json.dumps({"step": 100000000, "bytes": {"gone.pt": 1}}))
    superseded = {f"step-{step}.other-{number}" for step, number in (("00000008", "1f"), ("00000010", "2"), ("99999999", "a"))}
    for name in (*superseded, "step-00000008.other-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-00000008.other-2").mkdir()
    keep_last(tmp_path, 2, 100000000)
    left = {"notes", "step-00000007", "step-00000010", "step-00000011", "step-99999999", "step-100000000", "step-100000001"}
    left |= {"step-00000008.other-2", "step-00000008.other-mine"} | superseded - {"step-00000008.other-1f"}
    assert {path.name for path in tmp_path.iterdir()} == left, "damaged ones do not count, and what never was one stays"
