"""Public models as Hugging Face transformers describes them (``config.json``): which of them are this project's transformer.

Mixtral (arXiv:2401.04088), Qwen2-MoE (arXiv:2407.10671), Qwen3-MoE (arXiv:2505.09388), DeepSeek-V3 (arXiv:2412.19437), Kimi-K2
(arXiv:2507.20534), GLM-4.5 (arXiv:2508.06471), OLMoE (arXiv:2409.02060) and DeepSeek-V2 (arXiv:2405.04434) are.
Without torch: the names of their weights are in ``runtime.public_weights``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from hybridep.config import build
from hybridep.errors import ConfigError, UserError
from hybridep.workload import UNGROUPED, Dtype, Ffn, Model, ScoreFunction, Workload

CONFIG_FILE = "config.json"
QUANTIZATION = "quantization_config"
MTP_LAYERS = "num_nextn_predict_layers"
"""Of DeepSeek-V3 and GLM-4.5: layers behind the last that predict tokens further on, neither read, trained nor written."""
DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.BF16, "float32": Dtype.FP32, "float64": Dtype.FP64}
_LONGEST_SEQUENCE = 4096
"""Of a batch where nothing says how long sequences are; that of the shipped models."""


class Architecture(Enum):
    """What ``model_type`` says."""

    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V3 = "deepseek_v3"
    KIMI_K2 = "kimi_k2"
    """DeepSeek-V3 by another name, as which it is written where no ``config.json`` goes along."""
    GLM4_MOE = "glm4_moe"
    OLMOE = "olmoe"
    DEEPSEEK_V2 = "deepseek_v2"
    """Of two kinds: with groups of experts, and DeepSeek-V2-Lite without."""

    @property
    def class_name(self) -> str:
        """In transformers, which has none for Kimi-K2 but DeepSeek-V3's."""
        names = {
            Architecture.MIXTRAL: "Mixtral",
            Architecture.QWEN2_MOE: "Qwen2Moe",
            Architecture.QWEN3_MOE: "Qwen3Moe",
            Architecture.DEEPSEEK_V3: "DeepseekV3",
            Architecture.KIMI_K2: "DeepseekV3",
            Architecture.GLM4_MOE: "Glm4Moe",
            Architecture.OLMOE: "Olmoe",
            Architecture.DEEPSEEK_V2: "DeepseekV2",
        }
        return names[self] + "ForCausalLM"


def config_file(path: Path) -> Path | None:
    """The ``config.json`` that a path is, or that a folder holds; else None."""
    inside = path / CONFIG_FILE if path.is_dir() else path
    return inside if inside.name == CONFIG_FILE and inside.is_file() else None


def read_config(path: Path) -> dict[str, Any]:
    """What a ``config.json`` holds. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "", f"cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), "", f"must hold keys and values, found {type(data).__name__}")
    return data


def workload_data(path: Path) -> dict[str, Any]:
    """What a workload's YAML file would say of the model in a ``config.json``. The batch is an assumption, as in the shipped
    models: 8 micro-batches of one sequence of up to 4096 tokens. Raises ConfigError where the model is not trained here."""
    config = _Config(path)
    try:
        return {
            "name": path.absolute().parent.name or "model",
            "model": _model_data(config),
            "training": {
                "sequence_length": min(config.get("max_position_embeddings", _LONGEST_SEQUENCE), _LONGEST_SEQUENCE),
                "micro_batch_size": 1,
                "micro_batches": 8,
                "dtype": config.dtype.value,
            },
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(str(path), "", f"holds values of other types than transformers writes ({error})") from None


def require_same_model(folder: Path, model: Model) -> None:
    """Raises UserError, which names the first difference, where the public model in a folder is not this one."""
    path = folder / CONFIG_FILE
    theirs = build(Workload, workload_data(path), str(path)).model
    for key in Model.model_fields:
        if key not in _OF_TRAINING and (found := _effective(theirs, key)) != (own := _effective(model, key)):
            raise UserError(f"weights: {path} is of a model with {key} {found}, the workload's has {own}")


_OF_TRAINING = {"balance_loss_weight", "capacity_factor", "token_drop_policy", "pad_expert_input_to_capacity"}
"""Keys of a model that its weights know nothing of."""


def _effective(model: Model, key: str) -> Any:
    if key == "num_kv_heads":
        return model.num_kv_heads or model.num_heads
    if key in UNGROUPED and not model.limits_groups:
        # Groups of which tokens choose all are none.
        return UNGROUPED[key]
    if key == "group_rating_experts":
        return model.rated_by
    if key == "dense_ffn_size":
        return model.dense_ffn_size if model.num_dense_layers else 0
    if key == "expert_bias_update_rate":
        # How fast it changes is of training; whether there is a bias is not.
        return None if model.expert_bias_update_rate is None else "of some size"
    return model.attention_width // model.num_heads if key == "head_dim" else getattr(model, key)


def architecture_of(config: Mapping[str, Any], where: Path) -> Architecture:
    """Raises ConfigError for a ``model_type`` that is not this project's transformer."""
    try:
        return Architecture(config.get("model_type"))
    except ValueError:
        known = ", ".join(one.value for one in Architecture)
        raise ConfigError(str(where), "model_type", f"{config.get('model_type')!r} is none of {known}") from None


def fp8_block(config: Mapping[str, Any], where: Path) -> tuple[int, int] | None:
    """Rows and columns of the blocks of which each has a scale, where weights are fp8 (e4m3) as DeepSeek-V3 publishes them; None
    where they are not quantised. Raises ConfigError for any other quantisation."""
    found = config.get(QUANTIZATION)
    if found is None:
        return None
    read = {"quant_method": "fp8", "fmt": "e4m3"}
    if not isinstance(found, dict) or any(found.get(key, value) != value for key, value in read.items()):
        raise ConfigError(str(where), QUANTIZATION, f"{found!r}: of quantised weights only fp8 ones (e4m3) are read here")
    block = found.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise ConfigError(
            str(where), f"{QUANTIZATION}.weight_block_size", f"{block!r} must be two numbers: rows and columns of a scale's block"
        )
    return block[0], block[1]


class _Config:
    """A ``config.json``, whose keys must be there or have a default."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, read_config(path)
        self.architecture = architecture_of(self.data, path)

    def __getitem__(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise ConfigError(str(self.path), key, "is missing")
        return self.data[key]

    def get(self, key: str, default: Any) -> Any:
        found = self.data.get(key)
        return default if found is None else found

    def require(self, key: str, wanted: Any, default: Any) -> None:
        """Of what the transformer here cannot be told otherwise."""
        if (found := self.get(key, default)) != wanted:
            raise ConfigError(str(self.path), key, f"{found!r} is not trained here, only {wanted!r}")

    @property
    def dtype(self) -> Dtype:
        """Of the weights; fp16 ones are trained in bf16."""
        name = str(self.get("dtype", self.get("torch_dtype", "bfloat16")))
        if name not in DTYPES:
            raise ConfigError(str(self.path), "dtype", f"{name!r} is none of {', '.join(DTYPES)}")
        return DTYPES[name]

    @property
    def _rope(self) -> dict[str, Any]:
        """Where transformers 4 and 5 have it."""
        rope: dict[str, Any] = self.get("rope_parameters", self.get("rope_scaling", {}))
        return rope

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embeddings' wavelengths."""
        return float(self._rope["rope_theta"] if "rope_theta" in self._rope else self["rope_theta"])

    @property
    def partial_rotary_factor(self) -> float:
        """Of GLM-4.5's heads a half is rotated unless it says otherwise."""
        of_glm = self.architecture is Architecture.GLM4_MOE
        found = self._rope.get("partial_rotary_factor", self.get("partial_rotary_factor", 0.5 if of_glm else 1.0))
        if found != 1 and not of_glm:
            raise ConfigError(str(self.path), "partial_rotary_factor", f"{found!r} is not trained here, only 1")
        return float(found)

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """As a workload has it."""
        rope = self._rope
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise ConfigError(str(self.path), "rope_scaling", f"{kind!r}: only 'yarn' is a scaling of rotary embeddings here")
        for key, wanted in {"attention_factor": None, "truncate": True}.items():
            if (found := rope.get(key, wanted)) != wanted:
                raise ConfigError(str(self.path), f"rope_scaling.{key}", f"{found!r} is not trained here, only {wanted!r}")
        for key in ("factor", "original_max_position_embeddings"):
            if rope.get(key) is None:
                raise ConfigError(str(self.path), f"rope_scaling.{key}", "is missing")
        # A zero says what nothing does.
        given = {key: rope[key] for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if rope.get(key)}
        return {"factor": rope["factor"], "original_length": rope["original_max_position_embeddings"]} | given


def _model_data(config: _Config) -> dict[str, Any]:
    kind = config.architecture
    config.require("hidden_act", "silu", "silu")
    for key in ("attention_dropout", "router_jitter_noise"):
        config.require(key, 0, 0)
    fp8_block(config.data, config.path)
    window = config.get("sliding_window", None) if config.get("use_sliding_window", kind is Architecture.MIXTRAL) else None
    if window and window < config["max_position_embeddings"]:
        raise ConfigError(str(config.path), "sliding_window", f"{window}: attention here sees the whole sequence")
    data = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "partial_rotary_factor": config.partial_rotary_factor,
        "norm_eps": config["rms_norm_eps"],
        "top_k": config["num_experts_per_tok"],
        "ffn": Ffn.SWIGLU.value,
    }
    if kind in (Architecture.DEEPSEEK_V3, Architecture.KIMI_K2):
        return data | _latent_data(config) | _shared_and_dense(config) | _sigmoid_gate(config)
    if kind is Architecture.DEEPSEEK_V2:
        return data | _latent_data(config) | _shared_and_dense(config) | _softmax_gate(config)
    data |= {"num_kv_heads": config.get("num_key_value_heads", None), "head_dim": config.get("head_dim", None)}
    if kind is Architecture.GLM4_MOE:
        norms, biases = config.get("use_qk_norm", False), config.get("attention_bias", False)
        return data | {"qk_norm": norms, "attention_bias": biases} | _shared_and_dense(config) | _sigmoid_gate(config)
    if kind is Architecture.OLMOE:
        return data | _olmoe_data(config)
    if kind is Architecture.MIXTRAL:
        return data | {"num_experts": config["num_local_experts"], "expert_ffn_size": config["intermediate_size"]}
    config.require("decoder_sparse_step", 1, 1)
    dense = list(config.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise ConfigError(str(config.path), "mlp_only_layers", f"{dense}: only the first layers may be without experts here")
    data |= {
        "num_experts": config["num_experts"] if "num_experts" in config.data else config["num_local_experts"],
        "expert_ffn_size": config["moe_intermediate_size"],
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "num_dense_layers": len(dense),
        "dense_ffn_size": config["intermediate_size"] if dense else 0,
    }
    if kind is Architecture.QWEN3_MOE:
        config.require("attention_bias", False, False)
        return data | {"qk_norm": True}
    config.require("qkv_bias", True, True)
    return data | {
        "attention_bias": True,
        "shared_ffn_size": config["shared_expert_intermediate_size"],
        "shared_expert_gate": True,
    }


def _olmoe_data(config: _Config) -> dict[str, Any]:
    whole = config["hidden_size"] // config["num_attention_heads"]
    for key, only in {"attention_bias": False, "clip_qkv": None, "head_dim": whole}.items():
        config.require(key, only, only)
    return {
        "qk_norm": True,
        "qk_norm_full_width": True,
        "num_experts": config["num_experts"],
        "expert_ffn_size": config["intermediate_size"],
        "norm_topk_prob": config.get("norm_topk_prob", False),
    }


def _latent_data(config: _Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    for key, only in {"num_key_value_heads": heads, "attention_bias": False, "rope_interleave": True}.items():
        config.require(key, only, only)
    if "q_lora_rank" not in config.data:
        raise ConfigError(str(config.path), "q_lora_rank", "is missing; null where queries are projected at once")
    return {
        "latent_attention": {
            "query_rank": config.data["q_lora_rank"],
            "kv_rank": config["kv_lora_rank"],
            "nope_head_dim": config["qk_nope_head_dim"],
            "rope_head_dim": config["qk_rope_head_dim"],
            "value_head_dim": config["v_head_dim"],
        }
    }


def _shared_and_dense(config: _Config) -> dict[str, Any]:
    """Experts beside a shared one, behind layers without any, as DeepSeek names them."""
    config.require("moe_layer_freq", 1, 1)
    dense = config["first_k_dense_replace"]
    return {
        "num_experts": config["n_routed_experts"],
        "expert_ffn_size": config["moe_intermediate_size"],
        "shared_ffn_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "num_dense_layers": dense,
        "dense_ffn_size": config["intermediate_size"] if dense else 0,
    }


def _softmax_gate(config: _Config) -> dict[str, Any]:
    """DeepSeek-V2's, without ``norm_topk_prob``, which transformers does not heed and DeepSeek's own code does."""
    config.require("mlp_bias", False, False)
    for key, only in {"scoring_func": "softmax", "norm_topk_prob": False}.items():
        config.require(key, only, only)
    found = {"norm_topk_prob": False, "routed_scaling_factor": config["routed_scaling_factor"]}
    if config.get("topk_method", "greedy") == "group_limited_greedy":
        return found | _groups(config, 1)
    config.require("topk_method", "greedy", "greedy")
    return found


def _sigmoid_gate(config: _Config) -> dict[str, Any]:
    config.require("scoring_func", "sigmoid", "sigmoid")
    config.require("topk_method", "noaux_tc", "noaux_tc")
    return {
        "norm_topk_prob": config["norm_topk_prob"],
        "score_function": ScoreFunction.SIGMOID.value,
        "routed_scaling_factor": config["routed_scaling_factor"],
        "expert_bias_update_rate": _BIAS_UPDATE_RATE,
    } | _groups(config, RATED_BY)


def _groups(config: _Config, rated_by: int) -> dict[str, Any]:
    """Groups of experts that are compared by the sum of so many scores of each."""
    groups, chosen = config["n_group"], config["topk_group"]
    usual = not 0 < chosen < groups or max(config["num_experts_per_tok"] // chosen, 1) == rated_by
    return {"expert_groups": groups, "groups_per_token": chosen} | ({} if usual else {"group_rating_experts": rated_by})


RATED_BY = 2
"""Scores that add up to a group's, in transformers."""
_BIAS_UPDATE_RATE = 0.001
"""That of DeepSeek-V3 (arXiv:2412.19437, section 4.2) and GLM-4.5 (arXiv:2508.06471); weights do not say."""
