"""``config.json`` of public models: which are read as this project's models, what is refused, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridep.commands.inputs import load_workload
from hybridep.errors import ConfigError, UserError
from hybridep.hugging_face import CONFIG_FILE, config_for, require_same_model, workload_data
from hybridep.workload import Workload

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
}
"""As of mistralai/Mixtral-8x7B-v0.1."""
QWEN3 = {key: value for key, value in MIXTRAL.items() if key not in ("num_local_experts", "sliding_window", "rope_theta")} | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN2 = QWEN3 | {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_experts": 64,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "norm_topk_prob": False,
}
SHIPPED = {"mixtral-8x7b": MIXTRAL, "qwen3-30b-a3b": QWEN3, "qwen2-57b-a14b": QWEN2}


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_public_configs_are_the_shipped_models(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "public", SHIPPED[name])
    read, shipped = load_workload(str(folder)), load_workload(name)
    require_same_model(folder, shipped.model)
    assert read.model.total_params == shipped.model.total_params
    assert read.name == "public" and read.training == shipped.training
    again = load_workload(str(folder / CONFIG_FILE), ["training.sequence_length=128", "model.capacity_factor=1.5"])
    assert again.training.sequence_length == 128 and again.model.capacity_factor == 1.5


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_written_is_read_as_the_same_model(tmp_path: Path, name: str) -> None:
    workload = load_workload(name)
    folder = written(tmp_path / "public", config_for(workload))
    require_same_model(folder, workload.model)
    assert load_workload(str(folder)).training == workload.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type: 'deepseek_v3' is none of mixtral, qwen2_moe, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not trained here, only 'silu'"),
        ({"sliding_window": 4096}, "sliding_window: 4096: attention here sees the whole sequence"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: 'yarn': scaled rotary embeddings"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* is not trained here"),
        ({"rms_norm_eps": None}, "rms_norm_eps: is missing"),
        ({"rope_theta": None}, "rope_theta: is missing"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is none of bfloat16"),
        ({"rope_theta": "large"}, "holds values of other types than transformers writes"),
        ({"max_position_embeddings": "long"}, "holds values of other types than transformers writes"),
        ({"hidden_size": 4095}, "num_heads: 32 must divide hidden_size 4095"),
        ({"num_local_experts": 1}, "top_k: 2 exceeds num_experts 1"),
    ],
)
def test_what_is_not_trained_here_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, MIXTRAL | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not trained here"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers: \[1\]: only the first layers may be without experts"),
        ({"attention_bias": True}, "attention_bias: True is not trained here"),
        ({"use_sliding_window": True}, "sliding_window: 4096"),
    ],
)
def test_what_qwen3_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, QWEN3 | changes)))


def test_first_layers_without_experts(tmp_path: Path) -> None:
    data = workload_data(written(tmp_path, QWEN3 | {"mlp_only_layers": [0, 1]}) / CONFIG_FILE)["model"]
    assert (data["num_dense_layers"], data["dense_ffn_size"]) == (2, 14336)
    assert config_for(load_workload(str(tmp_path)))["mlp_only_layers"] == [0, 1]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, model = written(tmp_path, MIXTRAL | {"rope_theta": 1e4}), load_workload("mixtral-8x7b").model
    with pytest.raises(UserError, match=r"config.json is of a model with rope_theta 10000.0, the workload's has 1000000.0"):
        require_same_model(folder, model)


@pytest.mark.parametrize("name", ["gpt-large", "deepseek-v3"])
def test_models_of_no_public_architecture_are_not_written(name: str) -> None:
    with pytest.raises(UserError, match="is of no public architecture"):
        config_for(load_workload(name))


@pytest.mark.parametrize(
    "changes",
    [{"norm_topk_prob": False}, {"attention_bias": True}, {"shared_ffn_size": 8}, {"qk_norm": True, "attention_bias": True}],
)
def test_mixtures_of_architectures_are_not_written(changes: dict[str, Any]) -> None:
    workload = load_workload("mixtral-8x7b")
    other = workload.model_copy(update={"model": workload.model.model_copy(update=changes)})
    assert isinstance(other, Workload)
    with pytest.raises(UserError, match="is of no public architecture"):
        config_for(other)
