"""A model as the ``config.json`` of a public architecture, which ``hybridep.hugging_face`` reads."""

from __future__ import annotations

from typing import Any

from hybridep.attention import LatentSizes, RopeScaling
from hybridep.errors import UserError
from hybridep.hugging_face import DTYPES, MTP_LAYERS, RATED_BY, Architecture
from hybridep.workload import Dtype, Ffn, Model, ScoreFunction, Workload


def architecture_for(model: Model) -> Architecture:
    """Which architecture a model is of. Raises UserError where it is of none."""
    latent = model.latent_attention is not None
    if _has_deepseek_gate(model) and _has_own_shared(model) and not model.qk_norm_full_width:
        return Architecture.DEEPSEEK_V3 if latent else Architecture.GLM4_MOE
    if latent and _has_own_shared(model) and _has_softmax_gate_of_deepseek(model) and not model.hidden_size % model.num_heads:
        return Architecture.DEEPSEEK_V2
    gate = model.score_function, model.routed_scaling_factor, model.limits_groups, model.expert_bias_update_rate
    features = model.attention_bias, model.qk_norm, bool(model.shared_ffn_size), model.shared_expert_gate
    plain = not latent and model.ffn is Ffn.SWIGLU and model.partial_rotary_factor == 1
    if plain and gate == (ScoreFunction.SOFTMAX, 1.0, False, None):
        if features == (False, False, False, False) and model.norm_topk_prob and not model.num_dense_layers:
            return Architecture.MIXTRAL
        if features == (True, False, True, True):
            return Architecture.QWEN2_MOE
        if features == (False, True, False, False):
            if not model.qk_norm_full_width:
                return Architecture.QWEN3_MOE
            if model.attention_width == model.hidden_size and not model.num_dense_layers:
                return Architecture.OLMOE
    raise UserError(
        "model: is of no public architecture that can be written, which are those of swiglu experts that have: "
        "softmax scores and no groups, scaling or biases of experts: by themselves mixtral, with qk_norm qwen3_moe, with "
        "qk_norm_full_width, heads as wide as hidden_size together and experts in all layers olmoe, with "
        "attention_bias, shared_ffn_size and shared_expert_gate qwen2_moe; "
        "sigmoid scores, an expert_bias_update_rate, a shared expert without a gate that is as wide as one or more others and, "
        f"where groups are limited, group_rating_experts of {RATED_BY}: with latent_attention deepseek_v3, else glm4_moe; "
        "such a shared expert, latent_attention, heads whose number divides hidden_size, softmax scores, no biases of experts, "
        "no norm_topk_prob and, where groups are limited, group_rating_experts of 1: deepseek_v2"
    )


def _has_deepseek_gate(model: Model) -> bool:
    groups = not model.limits_groups or model.rated_by == RATED_BY
    return model.score_function is ScoreFunction.SIGMOID and model.expert_bias_update_rate is not None and groups


def _has_softmax_gate_of_deepseek(model: Model) -> bool:
    plain = (not model.limits_groups or model.rated_by == 1) and model.expert_bias_update_rate is None
    return model.score_function is ScoreFunction.SOFTMAX and plain and not model.norm_topk_prob


def _has_own_shared(model: Model) -> bool:
    """A shared expert as DeepSeek has it: as wide as some others, and without a gate."""
    alike = bool(model.shared_ffn_size) and not model.shared_ffn_size % model.expert_ffn_size
    return model.ffn is Ffn.SWIGLU and alike and not model.shared_expert_gate


def config_for(workload: Workload) -> dict[str, Any]:
    """The ``config.json`` of a model. Raises UserError where it is of no public architecture."""
    model = workload.model
    kind = architecture_for(model)
    config: dict[str, Any] = {
        "architectures": [kind.class_name],
        "model_type": kind.value,
        "hidden_act": "silu",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": workload.training.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "num_experts_per_tok": model.top_k,
        # Otherwise numbers of tokens of the vocabulary, which need not have so many.
        "bos_token_id": None,
        "eos_token_id": None,
    } | dtype_keys(workload.training.dtype)
    if model.rope_scaling is not None:
        config |= _rope_scaling_keys(model.rope_scaling)
    if model.latent_attention is not None:
        return config | _latent_keys(model.latent_attention) | _shared_and_dense_keys(model) | _deepseek_gate_keys(model)
    config["head_dim"] = model.attention_width // model.num_heads
    if kind is Architecture.GLM4_MOE:
        config |= _shared_and_dense_keys(model) | _deepseek_gate_keys(model)
        config |= {"attention_bias": model.attention_bias, "use_qk_norm": model.qk_norm}
        return config | {"partial_rotary_factor": model.partial_rotary_factor}
    if kind is Architecture.OLMOE:
        config |= {"num_experts": model.num_experts, "intermediate_size": model.expert_ffn_size}
        return config | {"norm_topk_prob": model.norm_topk_prob, "attention_bias": False, "clip_qkv": None}
    if kind is Architecture.MIXTRAL:
        return config | {"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn_size}
    config |= {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_size,
        "intermediate_size": model.dense_ffn_size or model.expert_ffn_size,
        "norm_topk_prob": model.norm_topk_prob,
        "mlp_only_layers": list(range(model.num_dense_layers)),
        "decoder_sparse_step": 1,
    }
    return config | ({"shared_expert_intermediate_size": model.shared_ffn_size} if kind is Architecture.QWEN2_MOE else {})


def _rope_scaling_keys(scaling: RopeScaling) -> dict[str, Any]:
    optional = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    rope = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    } | {key: value for key, value in optional.items() if value is not None}
    # From which transformers 4 computes the factor.
    return {"max_position_embeddings": round(scaling.factor * scaling.original_length), "rope_scaling": rope}


def _latent_keys(sizes: LatentSizes) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "q_lora_rank": sizes.query_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.nope_head_dim,
        "qk_rope_head_dim": sizes.rope_head_dim,
        "v_head_dim": sizes.value_head_dim,
        "rope_interleave": True,
    }


def _shared_and_dense_keys(model: Model) -> dict[str, Any]:
    return {
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "moe_intermediate_size": model.expert_ffn_size,
        "intermediate_size": model.dense_ffn_size or model.expert_ffn_size,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        MTP_LAYERS: 0,
    }


def _deepseek_gate_keys(model: Model) -> dict[str, Any]:
    softmax = "group_limited_greedy" if model.limits_groups else "greedy"
    return {
        "norm_topk_prob": model.norm_topk_prob,
        "scoring_func": model.score_function.value,
        "topk_method": "noaux_tc" if model.score_function is ScoreFunction.SIGMOID else softmax,
        "routed_scaling_factor": model.routed_scaling_factor,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
    }


def dtype_keys(dtype: Dtype) -> dict[str, str]:
    """How transformers 4 and 5 are told the element type of the weights in a ``config.json``."""
    name = next(name for name, one in DTYPES.items() if one is dtype)
    return {"torch_dtype": name, "dtype": name}
