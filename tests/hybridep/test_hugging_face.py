"""``config.json`` of public models: which are read as this project's models, what is refused, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from public_configs import DEEPSEEK, GLM, LITE, MIXTRAL, OLMOE, QWEN3, SHIPPED, V2, YARN

from hybridep.commands.inputs import load_workload
from hybridep.config import build
from hybridep.errors import ConfigError, UserError
from hybridep.hugging_face import CONFIG_FILE, require_same_model, workload_data
from hybridep.hugging_face_export import config_for
from hybridep.workload import Ffn, Model, ScoreFunction, Workload


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


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
        ({"model_type": "llama"}, "model_type: 'llama' is none of mixtral, qwen2_moe, qwen3_moe, deepseek_v3"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not trained here, only 'silu'"),
        ({"sliding_window": 4096}, "sliding_window: 4096: attention here sees the whole sequence"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling: 'llama3': only 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings: is missing"),
        ({"rope_scaling": YARN | {"factor": None}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor: .*greater than or equal to 1"),
        ({"rope_scaling": YARN | {"attention_factor": 1.5}}, "rope_scaling.attention_factor: 1.5 is not trained here"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate: False is not trained here, only True"),
        ({"rope_scaling": YARN | {"beta_slow": 64}}, "beta_slow: 64.0 must not exceed beta_fast 32.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: .*gptq.*: of quantised weights only fp8 ones"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config: .*e5m2.* only fp8 ones"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size: None must be two numbers"),
        ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, r"weight_block_size: \[128, 0\] must be two numbers"),
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
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not trained here, only 1"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5 is not trained here",
        ),
    ],
)
def test_what_qwen3_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, QWEN3 | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: True is not trained here, only False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8 is not trained here, only 128"),
        ({"rope_interleave": False}, "rope_interleave: False is not trained here, only True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not trained here, only 1"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not trained here, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not trained here, only 'noaux_tc'"),
        ({"topk_group": 0}, "groups_per_token: Input should be greater than or equal to 1"),
        ({"kv_lora_rank": None}, "kv_lora_rank: is missing"),
        ({"qk_rope_head_dim": 63}, "rope_head_dim: .*multiple of 2"),
    ],
)
def test_what_deepseek_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, DEEPSEEK | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not trained here, only 'sigmoid'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: Input should be less than or equal to 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: 'linear': only 'yarn'"),
        ({"n_shared_experts": None}, "n_shared_experts: is missing"),
    ],
)
def test_what_glm_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, GLM | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv: 8.0 is not trained here, only None"),
        ({"attention_bias": True}, "attention_bias: True is not trained here, only False"),
        ({"head_dim": 64}, "head_dim: 64 is not trained here, only 128"),
    ],
)
def test_what_olmoe_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, OLMOE | changes)))


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    """Published (arXiv:2405.04434, appendix B): 15.7 B parameters, 2.4 B active without the embedding."""
    workload = load_workload(str(written(tmp_path, LITE)))
    model = workload.model
    assert model.total_params == pytest.approx(15.7e9, rel=0.01)
    active = model.dense_params + model.num_moe_layers * model.top_k * model.expert_params
    assert active - model.vocab_size * model.hidden_size == pytest.approx(2.4e9, rel=0.03)
    assert model.score_function is ScoreFunction.SOFTMAX and not model.norm_topk_prob and not model.limits_groups
    config = config_for(workload)
    assert {config[key] for key in ("model_type", "topk_method", "scoring_func")} == {"deepseek_v2", "greedy", "softmax"}
    require_same_model(written(tmp_path, config), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not trained here, only 'greedy'"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group: is missing"),
        ({"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid' is not trained here, only 'softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob: True is not trained here, only False"),
        ({"mlp_bias": True}, "mlp_bias: True is not trained here, only False"),
        ({"attention_bias": True}, "attention_bias: True is not trained here, only False"),
    ],
)
def test_what_deepseek_v2_may_not_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(str(written(tmp_path, LITE | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True},
        {"expert_groups": 8, "groups_per_token": 3},  # two of each add up
        {"expert_bias_update_rate": 0.001},
        {"score_function": ScoreFunction.SIGMOID},
        {"shared_ffn_size": 0},
        {"shared_expert_gate": True},
        {"num_heads": 15},
        {"ffn": Ffn.GELU},
    ],
)
def test_other_models_with_latent_attention_and_softmax_are_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    refuses(load_workload(str(written(tmp_path, LITE))), changes)


def test_deepseek_v2(tmp_path: Path) -> None:
    """Published (arXiv:2405.04434, section 3.1.2): 236 B parameters, 21 B active; groups are compared by their best expert."""
    workload = load_workload(str(written(tmp_path, LITE | V2)))
    model = workload.model
    assert model.total_params == pytest.approx(236e9, rel=0.005)
    active = model.dense_params + model.num_moe_layers * model.top_k * model.expert_params
    assert active == pytest.approx(21e9, rel=0.03)
    assert (model.expert_groups, model.groups_per_token, model.group_rating_experts, model.rated_by) == (8, 3, 1, 1)
    config = config_for(workload)
    assert (config["topk_method"], config["n_group"], config["topk_group"]) == ("group_limited_greedy", 8, 3)
    require_same_model(written(tmp_path, config), model)
    with pytest.raises(UserError, match="group_rating_experts 1, the workload's has 2"):
        require_same_model(
            written(tmp_path, config), build(Model, model.model_dump(mode="json") | {"group_rating_experts": 2}, "v2")
        )


def test_groups_that_are_compared_by_more_or_fewer_experts_than_usual(tmp_path: Path) -> None:
    """DeepSeek-V3's are by two, whatever top_k / groups_per_token is."""
    model = load_workload(str(written(tmp_path, DEEPSEEK | {"num_experts_per_tok": 12}))).model
    assert model.group_rating_experts == model.rated_by == 2
    usual = load_workload(str(written(tmp_path, DEEPSEEK))).model
    assert usual.group_rating_experts is None and usual.rated_by == 2
    said = build(Model, usual.model_dump(mode="json") | {"group_rating_experts": 2}, "v3")
    require_same_model(written(tmp_path, config_for(load_workload("deepseek-v3").model_copy(update={"model": said}))), usual)


def test_rotated_parts_and_norms_of_glm(tmp_path: Path) -> None:
    """As transformers 4 and 5 write the former, and without either as GLM-4.5-Air has it."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    given = GLM | {"rope_parameters": rope, "partial_rotary_factor": 0.5}
    assert load_workload(str(written(tmp_path, given))).model.rotary_dim == 32
    bare = {key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "use_qk_norm", "attention_bias")}
    workload = load_workload(str(written(tmp_path, bare)))
    model, config = workload.model, config_for(workload)
    assert (model.rotary_dim, model.qk_norm, model.attention_bias) == (64, False, False)
    assert (config["partial_rotary_factor"], config["use_qk_norm"], config["attention_bias"]) == (0.5, False, False)
    require_same_model(written(tmp_path, config), model)


def test_weights_in_fp8_are_those_of_the_same_model(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published."""
    plain = load_workload(str(written(tmp_path, DEEPSEEK)))
    assert load_workload(str(written(tmp_path, DEEPSEEK | {"quantization_config": FP8}))) == plain


def test_queries_of_deepseek_may_be_projected_at_once(tmp_path: Path) -> None:
    workload = load_workload(str(written(tmp_path, DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1})))
    assert workload.model.latent_attention is not None and workload.model.latent_attention.query_rank is None
    assert config_for(workload)["q_lora_rank"] is None
    with pytest.raises(ConfigError, match="q_lora_rank: is missing; null where"):
        load_workload(str(written(tmp_path, {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"})))


def test_how_fast_biases_change_is_of_training_whether_there_are_any_is_not(tmp_path: Path) -> None:
    folder, model = written(tmp_path, DEEPSEEK), load_workload("deepseek-v3").model
    for rate in (0.0, 0.01):
        require_same_model(folder, model.model_copy(update={"expert_bias_update_rate": rate}))
    with pytest.raises(UserError, match="expert_bias_update_rate of some size, the workload's has None"):
        require_same_model(folder, model.model_copy(update={"expert_bias_update_rate": None}))


def test_scaled_rotary_embeddings_are_read_and_written(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768, "mscale": 0}
    workload = load_workload(str(written(tmp_path, QWEN3 | {"rope_parameters": rope})))
    scaling = workload.model.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.original_length, scaling.mscale) == (4, 32768, None)
    assert (workload.model.rope_theta, scaling.beta_fast, scaling.beta_slow) == (1e6, 32, 1)
    again = written(tmp_path, config_for(workload))
    require_same_model(again, workload.model)
    assert config_for(workload)["max_position_embeddings"] == 4 * 32768
    with pytest.raises(UserError, match="of a model with rope_scaling factor=4"):
        require_same_model(again, workload.model.model_copy(update={"rope_scaling": None}))


def test_first_layers_without_experts(tmp_path: Path) -> None:
    data = workload_data(written(tmp_path, QWEN3 | {"mlp_only_layers": [0, 1]}) / CONFIG_FILE)["model"]
    assert (data["num_dense_layers"], data["dense_ffn_size"]) == (2, 14336)
    assert config_for(load_workload(str(tmp_path)))["mlp_only_layers"] == [0, 1]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, model = written(tmp_path, MIXTRAL | {"rope_theta": 1e4}), load_workload("mixtral-8x7b").model
    with pytest.raises(UserError, match=r"config.json is of a model with rope_theta 10000.0, the workload's has 1000000.0"):
        require_same_model(folder, model)


@pytest.mark.parametrize("changes", [{"expert_groups": 4, "groups_per_token": 4}, {"dense_ffn_size": 8}])
def test_what_a_model_says_and_does_not_use_makes_it_no_other(tmp_path: Path, changes: dict[str, Any]) -> None:
    """``config.json`` has no place for it."""
    workload = load_workload("mixtral-8x7b")
    model = build(Model, workload.model.model_dump(mode="json") | changes, "model")
    require_same_model(written(tmp_path, config_for(workload.model_copy(update={"model": model}))), model)


def test_models_of_no_public_architecture_are_not_written() -> None:
    with pytest.raises(UserError, match="is of no public architecture"):
        config_for(load_workload("gpt-large"))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"attention_bias": True},
        {"shared_ffn_size": 8},
        {"qk_norm": True, "attention_bias": True},
        {"score_function": ScoreFunction.SIGMOID},
        {"routed_scaling_factor": 2.5},
        {"expert_groups": 2},
        {"expert_bias_update_rate": 0.001},
        {"partial_rotary_factor": 0.5},
        {"qk_norm": True, "qk_norm_full_width": True, "head_dim": 64},
    ],
)
def test_mixtures_of_architectures_are_not_written(changes: dict[str, Any]) -> None:
    refuses(load_workload("mixtral-8x7b"), changes)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
@pytest.mark.parametrize(
    "changes",
    [
        {"score_function": ScoreFunction.SOFTMAX},
        {"expert_bias_update_rate": None},
        {"shared_ffn_size": 0},
        {"shared_ffn_size": 3000},
        {"shared_expert_gate": True},
        {"expert_groups": 8, "groups_per_token": 4, "top_k": 12},
        {"qk_norm": True, "qk_norm_full_width": True},
        {"ffn": Ffn.GELU},
    ],
)
def test_models_with_other_gates_or_experts_than_deepseek_are_not_written(name: str, changes: dict[str, Any]) -> None:
    refuses(load_workload(name), changes)


@pytest.mark.parametrize(
    "changes",
    [{"shared_ffn_size": 8}, {"attention_bias": True}, {"head_dim": 64}, {"num_dense_layers": 1}, {"top_k": 8, "ffn": Ffn.GELU}],
)
def test_other_models_with_norms_of_all_heads_are_not_written(changes: dict[str, Any]) -> None:
    refuses(load_workload("olmoe-1b-7b"), changes)


def refuses(workload: Workload, changes: dict[str, Any]) -> None:
    other = workload.model_copy(update={"model": workload.model.model_copy(update=changes)})
    assert isinstance(other, Workload)
    with pytest.raises(UserError, match="is of no public architecture"):
        config_for(other)
