"""Checkpoint files without any process group: completeness, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from training_cases import Case

from hybridep.errors import UserError
from hybridep.run import MANIFEST, Optimizer
from runtime.barrier import Barrier
from runtime.checkpoint import expert_name, last_checkpoint, load_checkpoint, save_checkpoint
from runtime.mesh import Mesh
from runtime.optimizer import HomeOptimizer

CASE = Case(sizes=(1, 1), domains=(1, 1), dtype="bf16")


def optimizer(mesh: Mesh, seed: int) -> HomeOptimizer:
    generator = torch.Generator().manual_seed(seed)
    model = mesh.plan.workload.model
    names = {"norm.weight": (16,)} | {expert_name(layer): (model.num_experts, model.expert_params) for layer in range(2)}
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(mesh.dtype)) for name, shape in names.items()
    }
    return HomeOptimizer(Optimizer(learning_rate=0.1), parameters)


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

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]


ALONE = Alone()


def save(folder: Path, mesh: Mesh, state: HomeOptimizer, step: int) -> Path:
    return save_checkpoint(folder, step, mesh=mesh, dense=["norm.weight"], optimizer=state, codecs={}, chosen=None, barrier=ALONE)


def test_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Also the fp32 master copies of bf16 weights, without which a resumed run would drift."""
    mesh = Mesh(plan=CASE.plan(), rank=0)
    first, second = optimizer(mesh, 1), optimizer(mesh, 2)
    advance(first, 1)
    path = save(tmp_path, mesh, first, 1)
    assert load_checkpoint(path, mesh=mesh, dense=["norm.weight"], optimizer=second) == 1
    for step in (2, 3):
        advance(first, step)
        advance(second, step)
    for name in first.parameters:
        assert torch.equal(first.parameters[name], second.parameters[name])
        assert torch.equal(first.masters[name], second.masters[name])


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
    assert last_checkpoint(tmp_path, ALONE).name == "step-00000010"
    assert save(tmp_path, mesh, state, 10).is_dir()
    assert not list(tmp_path.glob(".step-*")), "what an earlier run left is cleared away"


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    mesh = Mesh(plan=CASE.plan(), rank=0)
    state = optimizer(mesh, 1)
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        last_checkpoint(tmp_path / "nowhere", ALONE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoints\.folder: .*file cannot be written"):
        save(tmp_path / "file", mesh, state, 1)
    path = save(tmp_path, mesh, state, 1)

    def load() -> None:
        load_checkpoint(path, mesh=mesh, dense=["norm.weight"], optimizer=state)

    other = json.loads((path / MANIFEST).read_text())
    other["workload"]["model"]["hidden_size"] = 32
    original = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"model\.hidden_size was 32 when it was written, now it is 16"):
        load()
    unnumbered = json.dumps(json.loads(original) | {"number": None})
    for damaged in (original[:50], "[]", unnumbered):
        (path / MANIFEST).write_text(damaged)
        with pytest.raises(UserError, match=r"manifest\.json: cannot be read"):
            load()
        with pytest.raises(UserError, match=r"manifest\.json: cannot be read"):
            last_checkpoint(tmp_path, ALONE)
    (path / MANIFEST).write_text(json.dumps(json.loads(original) | {"homes": None}))
    with pytest.raises(UserError, match="cannot be read"):
        load()
    (path / MANIFEST).write_text(original)
    shard = path / "experts-00000.pt"
    whole = shard.read_bytes()
    for damaged_bytes in (whole[:100], b"", whole.replace(b"torch", b"tarch"), b"\x80\x02X" * 100):
        shard.write_bytes(damaged_bytes)
        with pytest.raises(UserError, match=r"experts-00000\.pt: (cannot be read|is damaged)") as caught:
            load()
        assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)
    shard.write_bytes(whole)
    path.rename(renamed := path.with_name("step-00000007"))
    with pytest.raises(UserError, match="is of step 1; name it step-00000001"):
        load_checkpoint(renamed, mesh=mesh, dense=["norm.weight"], optimizer=state)
