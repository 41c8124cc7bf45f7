"""Weights of public models: the loss that transformers computes, and checkpoints written as transformers writes them.

``public_models`` holds a tiny model of each architecture with tokens and transformers' loss on them, as
``experiments/public-weights/run.py --make`` makes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pipelined_cases
import pytest
import torch
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from training_cases import MODELS, Case, losses_of, train_run, training_run

from hybridep.commands.inputs import load_workload
from hybridep.errors import UserError
from hybridep.hugging_face import CONFIG_FILE, workload_data
from hybridep.pipeline import AnyPlan
from hybridep.plan import Residency
from hybridep.recompute import ALL
from hybridep.workload import Workload
from runtime import public_weights
from runtime.checkpoint_files import SavedWeights
from runtime.public_weights import PublicWeights, export_weights
from runtime.reference import LocalExperts, ReferenceTrainer
from runtime.transformer import Transformer

pytestmark = pytest.mark.timeout(120)

PUBLIC = Path(__file__).parent / "public_models"
NAMES = sorted(path.name for path in PUBLIC.iterdir())
WEIGHTS = "model.safetensors"
STEPS = 3


def public_model(name: str) -> dict[str, Any]:
    data: dict[str, Any] = workload_data(PUBLIC / name / CONFIG_FILE)["model"]
    return data


def expected(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((PUBLIC / name / "expected.json").read_text())
    return data


def sum_of_losses(transformer: Transformer, tokens: list[list[int]]) -> float:
    text = torch.tensor(tokens)
    with torch.no_grad():
        return float(transformer(text[:, :-1], text[:, 1:])[0])


def loss_of(workload: Workload, folder: Path, tokens: list[list[int]]) -> float:
    """In fp64, with the weights in a folder."""
    weights, dtype = PublicWeights(folder, workload.model), torch.float64
    transformer = Transformer(workload, lambda layer: LocalExperts(workload.model, layer, weights, dtype), dtype=dtype)
    transformer.initialise(weights)
    return sum_of_losses(transformer, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_transformers(name: str) -> None:
    """Which computes norms, gates and angles in fp32."""
    told = expected(name)
    assert loss_of(load_workload(str(PUBLIC / name)), PUBLIC / name, told["tokens"]) == pytest.approx(told["loss"], rel=1e-7)


PLANS: dict[str, Any] = {
    "mixtral": Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), model="public", micro_batches=2),
    "qwen2_moe": pipelined_cases.Case(
        sizes=(2, 2), stages=((1,), (0,)), layers=(2, 1), domains=({}, {"gpu": 2}), micro_batches=4, model="public"
    ),
    "olmoe": Case(sizes=(2, 2), domains=(2, 2), model="public", micro_batches=2),
    "qwen3_moe": Case(sizes=(2, 2), domains=(1, 2), residency=Residency.MICROBATCH, recompute=ALL, model="public"),
    "deepseek_v3": Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), model="public"),
    "deepseek_v2": Case(sizes=(2, 2), domains=(2, 2), residency=Residency.MICROBATCH, model="public", micro_batches=2),
    "glm4_moe": Case(sizes=(2, 2), domains=(1, 2), migration=(0.5,), model="public", micro_batches=2),
    "kimi_k2": pipelined_cases.Case(
        sizes=(2, 2), stages=((0,), (1,)), layers=(2, 1), domains=({"gpu": 2}, {}), micro_batches=4, model="public"
    ),
}


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> the run's folder: each architecture a few steps on from its weights, under a plan of another kind."""
    folders = {}
    for name in NAMES:
        folders[name] = tmp_path_factory.mktemp(name)
        run = training_run(folders[name], steps=STEPS, weights=PUBLIC / name)
        reports = ranks.run_with_store(train_run, run, plan_of(name))
        trainer = ReferenceTrainer(run, plan_of(name))
        assert losses_of(reports) == pytest.approx([trainer.step(step) for step in range(1, STEPS + 1)], rel=1e-10)
        loss = sum_of_losses(trainer.transformer, expected(name)["tokens"])
        (folders[name] / "loss.json").write_text(json.dumps(loss))
    return folders


def plan_of(name: str) -> AnyPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "public", public_model(name))
        plan: AnyPlan = PLANS[name].plan()
    return plan


def checkpoint_of(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{STEPS:08d}"


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_on_and_written_is_the_model_of_one_process(trained: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder, workload = tmp_path / "public", plan_of(name).workload
    count = export_weights(checkpoint_of(trained[name]), folder, None)
    assert count == workload.model.total_params, "without biases of experts"
    kind = json.loads((folder / CONFIG_FILE).read_text())["model_type"]
    assert kind == ("deepseek_v3" if name == "kimi_k2" else name)
    first, last = load_file(PUBLIC / name / WEIGHTS), load_file(folder / WEIGHTS)
    assert {key: value.shape for key, value in first.items()} == {key: value.shape for key, value in last.items()}
    assert {value.dtype for value in last.values()} == {torch.float64}
    told = expected(name)
    loss = json.loads((trained[name] / "loss.json").read_text())
    assert abs(loss / told["loss"] - 1) > 1e-4, "training has changed it"
    assert loss_of(load_workload(str(folder)), folder, told["tokens"]) == pytest.approx(loss, rel=1e-10)


def test_large_models_are_written_in_parts(trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, whole, parts = checkpoint_of(trained["mixtral"]), tmp_path / "whole", tmp_path / "parts"
    export_weights(checkpoint, whole, None)
    monkeypatch.setattr(public_weights, "_SHARD_BYTES", 20_000)
    export_weights(checkpoint, parts, PUBLIC / "mixtral")
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert files[1] == f"model-00002-of-{len(files):05d}.safetensors"
    assert max((parts / file).stat().st_size for file in files) < 25_000
    tensors = load_file(whole / WEIGHTS)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for file in files:
        for key, value in load_file(parts / file).items():
            assert index["weight_map"][key] == file and torch.equal(value, tensors.pop(key))
    assert not tensors
    # What the public model says of itself goes along, what else was in its folder does not.
    config, before = (json.loads((folder / CONFIG_FILE).read_text()) for folder in (parts, PUBLIC / "mixtral"))
    assert config == before | {"torch_dtype": "float64", "dtype": "float64"}
    assert sorted(path.name for path in parts.glob("*.json")) == [
        CONFIG_FILE,
        "generation_config.json",
        "model.safetensors.index.json",
    ]
    workload, tokens = load_workload(str(parts)), expected("mixtral")["tokens"]
    assert loss_of(workload, parts, tokens) == loss_of(workload, whole, tokens)


def test_what_is_written_of_deepseek_has_its_layout(tmp_path: Path, trained: dict[str, Path]) -> None:
    """Its own config.json, but without layers that predict tokens further on, and biases of gates that have moved."""
    public, folder = PUBLIC / "deepseek_v3", tmp_path / "public"
    export_weights(checkpoint_of(trained["deepseek_v3"]), folder, public)
    config, before = (json.loads((one / CONFIG_FILE).read_text()) for one in (folder, public))
    types = {"torch_dtype": "float64", "dtype": "float64"}
    assert before["num_nextn_predict_layers"] == 1 and config == before | types | {"num_nextn_predict_layers": 0}
    first, last = load_file(public / WEIGHTS), load_file(folder / WEIGHTS)
    for key, value in last.items():
        # As close as three steps leave them; rows in another order would be farther off.
        torch.testing.assert_close(value, first[key].double(), atol=0.02, rtol=0)
    biases = [key for key in last if key.endswith("e_score_correction_bias")]
    moved = torch.stack([last[key] - first[key].double() for key in biases]) / 0.001
    assert len(biases) == 2 and moved.abs().max() > 0.9
    torch.testing.assert_close(moved, moved.round(), atol=1e-6, rtol=0)


def test_what_is_written_of_kimi_is_called_so_and_has_its_code(trained: dict[str, Path], tmp_path: Path) -> None:
    """Where its ``config.json`` goes along, which names Python files beside it (``auto_map``)."""
    public = tmp_path / "public"
    shutil.copytree(PUBLIC / "kimi_k2", public)
    for name in ("configuration_deepseek.py", "tokenization_kimi.py", "tiktoken.model", "notes.txt"):
        (public / name).write_text(name)
    export_weights(checkpoint_of(trained["kimi_k2"]), tmp_path / "written", public)
    config, before = (json.loads((one / CONFIG_FILE).read_text()) for one in (tmp_path / "written", public))
    assert config == before | {"torch_dtype": "float64", "dtype": "float64"} and config["model_type"] == "kimi_k2"
    beside = {path.name for path in (tmp_path / "written").iterdir()} - {CONFIG_FILE, WEIGHTS, "generation_config.json"}
    assert beside == {"configuration_deepseek.py", "tokenization_kimi.py", "tiktoken.model"}


def test_layers_behind_the_last_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "public"
    shutil.copytree(PUBLIC / "deepseek_v3", folder)
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(8)}, folder / WEIGHTS)
    told = expected("deepseek_v3")
    assert loss_of(load_workload(str(folder)), folder, told["tokens"]) == pytest.approx(told["loss"], rel=1e-7)


def in_fp8(folder: Path, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A copy of the DeepSeek-V3 model with its projections in fp8, a scale for each block; returns what the blocks stand for."""
    shutil.copytree(PUBLIC / "deepseek_v3", folder)
    tensors, values = load_file(folder / WEIGHTS), dict[str, torch.Tensor]()
    for name in [one for one in tensors if "_proj" in one and one.endswith(".weight")]:
        weight = tensors[name].float()
        codes, value = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for at in torch.cartesian_prod(*(torch.arange(size) for size in scales.shape)).tolist():
            block = tuple(slice(place * each, (place + 1) * each) for place, each in zip(at, (rows, columns), strict=True))
            scales[tuple(at)] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[tuple(at)]).to(codes.dtype)
            value[block] = codes[block].float() * scales[tuple(at)]
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        values[name] = value
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / CONFIG_FILE).read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("block", [(128, 128), (3, 5)])
def test_weights_in_fp8_are_their_codes_times_their_scales(tmp_path: Path, block: tuple[int, int]) -> None:
    values, told = in_fp8(tmp_path / "fp8", *block), expected("deepseek_v3")
    workload, plain = load_workload(str(tmp_path / "fp8")), tmp_path / "plain"
    shutil.copytree(PUBLIC / "deepseek_v3", plain)
    save_file(load_file(plain / WEIGHTS) | values, plain / WEIGHTS)
    loss = loss_of(workload, tmp_path / "fp8", told["tokens"])
    assert loss == loss_of(workload, plain, told["tokens"])
    assert loss == pytest.approx(told["loss"], rel=0.02) and loss != pytest.approx(told["loss"], rel=1e-6)


def test_fp8_weights_whose_scales_do_not_suit_them(tmp_path: Path) -> None:
    in_fp8(tmp_path / "fp8", 4, 4)
    model, tensors = load_workload(str(tmp_path / "fp8")).model, load_file(tmp_path / "fp8" / WEIGHTS)
    name = "model.layers.0.mlp.gate_proj.weight"

    def read(scale: torch.Tensor | None) -> None:
        changed = tensors | ({} if scale is None else {f"{name}_scale_inv": scale})
        save_file({key: value for key, value in changed.items() if scale is not None or key != f"{name}_scale_inv"}, folder)
        PublicWeights(tmp_path / "fp8", model).dense("layers.0.feed_forward.row", torch.Size([1]))

    folder = tmp_path / "fp8" / WEIGHTS
    with pytest.raises(UserError, match=rf"has no {name}_scale_inv, which {name} in fp8 needs"):
        read(None)
    with pytest.raises(UserError, match=rf"{name}_scale_inv and {name} are 1x1 and .*blocks of 4x4 .*weight_block_size\) do not"):
        read(torch.ones(1, 1))


def test_fp8_weights_of_which_the_config_says_nothing(tmp_path: Path) -> None:
    """Their codes are not their values."""
    in_fp8(tmp_path / "fp8", 4, 4)
    config = json.loads((tmp_path / "fp8" / CONFIG_FILE).read_text())
    del config["quantization_config"]
    (tmp_path / "fp8" / CONFIG_FILE).write_text(json.dumps(config))
    weights = PublicWeights(tmp_path / "fp8", load_workload(str(tmp_path / "fp8")).model)
    with pytest.raises(UserError, match=r"gate_proj\.weight is float8_e4m3fn, of which config\.json does not tell the values"):
        weights.dense("layers.0.feed_forward.row", torch.Size([1]))


def test_what_is_written_after_fp8_is_not_in_fp8(trained: dict[str, Path], tmp_path: Path) -> None:
    in_fp8(tmp_path / "fp8", 4, 4)
    export_weights(checkpoint_of(trained["deepseek_v3"]), tmp_path / "written", tmp_path / "fp8")
    assert "quantization_config" not in json.loads((tmp_path / "written" / CONFIG_FILE).read_text())
    assert {value.dtype for value in load_file(tmp_path / "written" / WEIGHTS).values()} == {torch.float64}


def test_biases_of_gates_are_written_in_fp32_among_narrower_weights(trained: dict[str, Path], tmp_path: Path) -> None:
    saved = SavedWeights(checkpoint_of(trained["deepseek_v3"]))
    files, _, size = public_weights._write_shards(tmp_path, saved, saved.workload.model, torch.bfloat16)
    written = load_file(tmp_path / WEIGHTS)
    assert files.keys() == written.keys() and size == sum(value.nbytes for value in written.values())
    wide = {key for key, value in written.items() if value.dtype == torch.float32}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert {value.dtype for value in written.values()} == {torch.float32, torch.bfloat16}


def test_coded_changes_begin_with_the_public_weights(ranks: RankPool, tmp_path: Path) -> None:
    """Both ends of a copy have them, so that nothing is lost in the first step."""
    losses = []
    for codecs in ((), (("dc", (("experts", "change-int8"),)),)):
        case = Case(sizes=(2, 2), domains=(2, 1), model="public", codecs=codecs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MODELS, "public", public_model("mixtral"))
            plan = case.plan()
        run = training_run(tmp_path / str(len(codecs)), steps=2, weights=PUBLIC / "mixtral")
        losses.append(losses_of(ranks.run_with_store(train_run, run, plan)))
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]


def changed(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """Mixtral's folder, with other weights."""
    folder = tmp_path / "changed"
    shutil.copytree(PUBLIC / "mixtral", folder)
    tensors = load_file(folder / WEIGHTS) | {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / WEIGHTS)
    return folder


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    model = load_workload(str(PUBLIC / "mixtral")).model
    folder = changed(tmp_path, model__norm__weight=None)
    with pytest.raises(UserError, match=r"weights: .*changed has no model\.norm\.weight, which the model needs"):
        PublicWeights(folder, model)
    shutil.rmtree(folder)
    weights = PublicWeights(changed(tmp_path, model__norm__weight=torch.zeros(9)), model)
    with pytest.raises(UserError, match=r"changed: model\.norm\.weight is 9, which does not suit the model's sizes"):
        weights.dense("norm.weight", torch.Size([8]))
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"weights: .*changed cannot be read"):
        PublicWeights(folder, model)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(UserError, match=r"weights: .*changed"):
        PublicWeights(folder, model)
    (folder / "model.safetensors.index.json").unlink()
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"changed holds no \*\.safetensors file"):
        PublicWeights(folder, model)


def test_what_cannot_be_written(trained: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / f"step-{STEPS:08d}"
    shutil.copytree(checkpoint_of(trained["mixtral"]), checkpoint)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=r"--export .*there: exists; name a new folder"):
        export_weights(checkpoint, tmp_path / "there", None)
    with pytest.raises(UserError, match="is of a model with "):
        export_weights(checkpoint, tmp_path / "public", PUBLIC / "qwen3_moe")
    with pytest.raises(UserError, match=r"--export .*: cannot be written"):
        export_weights(checkpoint, tmp_path / ("x" * 300), None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--export .*public: cannot be written"):
        export_weights(checkpoint, tmp_path / "file" / "public", None)
    (checkpoint / "experts-00002.pt").unlink()
    with pytest.raises(UserError, match=r"experts-00002\.pt is gone; move the checkpoint away"):
        export_weights(checkpoint, tmp_path / "public", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", checkpoint.name, "there"], "no half"
