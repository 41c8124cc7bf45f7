"""What is trained: a Mixture-of-Experts transformer and its batch, with the bytes, FLOPs and parameters that follow.

Counts are per rank (with the mean number of tokens) unless a name says otherwise. A multiply-add is two FLOPs. Backward costs
twice the forward.
"""

from __future__ import annotations

from enum import Enum
from math import ceil, isfinite
from typing import Any

from pydantic import Field, field_validator, model_validator

from hybridep.attention import LatentSizes, RopeScaling
from hybridep.config import Strict

_MOST_PARAMS = 10**15
_MOST_TOKENS = 10**12
"""Of one rank in one step."""
FEW_SUMMED = 8
"""Micro-batches whose gradients may add up in bf16: the sum is off by 0.3 % of its length, about what rounding it is; of 64 by
0.8 %, of 512 by 5 %, as measured (experiments/LOG.md)."""
UNGROUPED = {"expert_groups": 1, "groups_per_token": 1, "group_rating_experts": None}
"""Changes to a model that make it one whose tokens choose from all experts, as where their number is another one."""
LOSS_PART, LOSS_PARTS = 1 << 22, 16
"""Elements of the logits, about, that are made fp32 at a time; more where that would be more than so many parts, since a device
takes long to begin many short ones."""


class Ffn(Enum):
    """Form of an expert: two matrices with GELU between, or three with SwiGLU."""

    GELU = "gelu"
    SWIGLU = "swiglu"

    @property
    def num_matrices(self) -> int:
        """Weight matrices of size hidden x ffn."""
        return 2 if self is Ffn.GELU else 3


class DropPolicy(Enum):
    """Which tokens an expert turns away when more chose it than it takes."""

    PROBS = "probs"
    """Tokens that chose the expert with the smallest probability."""
    POSITION = "position"
    """The last tokens of the sequence."""


class ScoreFunction(Enum):
    """What a gate makes of an expert's logit."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    """Of each expert by itself (DeepSeek-V3, arXiv:2412.19437, Eq. 15)."""


class Dtype(Enum):
    """Element type of tokens, experts and gradients, in memory and on the links."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return {Dtype.FP64: 8, Dtype.FP32: 4, Dtype.BF16: 2}[self]

    @property
    def state_bytes(self) -> int:
        """Bytes that AdamW keeps at the home for one parameter beside weight and gradient: two moments, and a fp32
        master copy where the weight itself is bf16."""
        return {Dtype.FP64: 16, Dtype.FP32: 8, Dtype.BF16: 12}[self]


class Part(Strict):
    """Which of a whole model's layers a pipeline stage has. The first stage has the embedding, too, the last one the final norm
    and the output projection."""

    first_layer: int = Field(ge=0)
    first_moe_layer: int = Field(ge=0)
    """MoE layers before its own."""
    of_layers: int = Field(ge=1)
    """Layers of the whole model."""


class Model(Strict):
    """A decoder-only transformer whose feed-forward parts are MoE blocks (all but the first ``num_dense_layers``)."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Grouped-query attention; as many as ``num_heads`` when absent."""
    head_dim: int | None = Field(default=None, ge=1)
    attention_bias: bool = False
    """Of query, key and value (Qwen2)."""
    qk_norm: bool = False
    """Each head of queries and keys is normalised before it is rotated (Qwen3)."""
    qk_norm_full_width: bool = False
    """Not each by itself but all heads together (OLMoE)."""
    latent_attention: LatentSizes | None = None
    """In place of (grouped-query) attention, with heads of other widths."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's queries and keys that is rotated, its first elements (GLM-4.5: half of them)."""
    rope_theta: float = Field(default=10000.0, gt=1, allow_inf_nan=False)
    """Base of the rotary embeddings' wavelengths."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(default=1e-6, gt=0, lt=1)
    vocab_size: int = Field(ge=2)
    tie_embeddings: bool = False
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    expert_ffn_size: int = Field(ge=1)
    ffn: Ffn = Ffn.SWIGLU
    shared_ffn_size: int = Field(default=0, ge=0)
    """Intermediate size of the shared expert that every token passes; 0 for none."""
    shared_expert_gate: bool = False
    """What the shared expert makes of a token is scaled by a sigmoid of the token (Qwen2-MoE)."""
    norm_topk_prob: bool = True
    """The chosen experts' probabilities are scaled to add up to one (Mixtral, Qwen3; not Qwen2-MoE)."""
    score_function: ScoreFunction = ScoreFunction.SOFTMAX
    routed_scaling_factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The chosen experts' weights are multiplied by this in the end (DeepSeek-V3: 2.5)."""
    expert_groups: int = Field(default=1, ge=1)
    """Groups of as many neighbouring experts each. A token chooses experts from ``groups_per_token`` of them only: those whose
    best ``group_rating_experts`` scores add up to most (group-limited routing; DeepSeek-V3, section 2.1.2). It limits to how many
    sites a token travels."""
    groups_per_token: int = Field(default=1, ge=1)
    group_rating_experts: int | None = Field(default=None, ge=1)
    """1 in DeepSeek-V2 (arXiv:2405.04434, section 2.2.2). Absent: ``top_k / groups_per_token``, rounded down, one at least."""
    expert_bias_update_rate: float | None = Field(default=None, ge=0, le=1)
    """Balance without a loss (DeepSeek-V3, Eq. 16): a number for each expert is added to its score where experts are chosen, not
    to its weight. After each step it grows by this where the expert had fewer tokens of the global batch than the mean, and
    shrinks where it had more; 0: it stays as it is. Absent: there is none. Scores are 1 at most."""
    num_dense_layers: int = Field(default=0, ge=0)
    dense_ffn_size: int = Field(default=0, ge=0)
    balance_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the load-balancing loss, taken per sequence (DeepSeek-V3, Eq. 17-20; Switch Transformer, Eq. 4)."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """An expert takes at most ceil(this x sequence length x top_k / num_experts) tokens of each sequence and drops the others;
    absent: dropless. Megatron-Core applies the same formula to all tokens of a rank; a sequence by itself is the same under any
    plan, micro-batch size and number of ranks."""
    token_drop_policy: DropPolicy = DropPolicy.PROBS
    part: Part | None = None
    """Set where this is no whole model but a pipeline stage's part of one; layers are counted from its first one."""
    pad_expert_input_to_capacity: bool = False
    """Experts compute their full capacity, rows of zeros where no token came, so that shapes and times are fixed. Padding is
    added where the expert is computed: it costs computation, no bytes on the links."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_checkpoints(cls, data: Any) -> Any:
        """They hold every key, also one that is no more, as null."""
        if isinstance(data, dict) and data.get("attention_params", 0) is None:
            return {key: value for key, value in data.items() if key != "attention_params"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: {self.top_k} exceeds num_experts {self.num_experts}")
        if self.num_experts % self.expert_groups:
            raise ValueError(f"expert_groups: {self.expert_groups} must divide num_experts {self.num_experts}")
        if self.groups_per_token > self.expert_groups:
            raise ValueError(f"groups_per_token: {self.groups_per_token} exceeds expert_groups {self.expert_groups}")
        if self.top_k > (room := self.groups_per_token * self.num_experts // self.expert_groups):
            raise ValueError(f"top_k: {self.top_k} exceeds the {room} experts of the groups_per_token {self.groups_per_token}")
        if self.group_rating_experts is not None and not self.limits_groups:
            raise ValueError("group_rating_experts: needs groups_per_token below expert_groups")
        if self.limits_groups and self.rated_by > (size := self.num_experts // self.expert_groups):
            raise ValueError(f"group_rating_experts: {self.rated_by} exceeds the {size} experts of a group")
        if self.latent_attention is not None:
            plain = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "attention_bias": self.attention_bias or None}
            rotated = None if self.partial_rotary_factor == 1 else self.partial_rotary_factor
            for key, value in (plain | {"qk_norm": self.qk_norm or None, "partial_rotary_factor": rotated}).items():
                if value is not None:
                    raise ValueError(
                        f"{key}: {value} does not go with latent_attention, which has sizes of its own; remove {key}"
                    )
        if self.qk_norm_full_width and not self.qk_norm:
            raise ValueError("qk_norm_full_width: needs qk_norm")
        if self.latent_attention is None and self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} must divide hidden_size {self.hidden_size}, or give head_dim")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(f"num_dense_layers: {self.num_dense_layers} leaves no MoE block in {self.num_layers} layers")
        if self.shared_expert_gate and not self.shared_ffn_size:
            raise ValueError("shared_expert_gate: needs a shared expert (shared_ffn_size)")
        if self.pad_expert_input_to_capacity and self.capacity_factor is None:
            raise ValueError("pad_expert_input_to_capacity: needs a capacity_factor")
        if self.num_dense_layers and not self.dense_ffn_size:
            raise ValueError("dense_ffn_size: is missing though num_dense_layers is set")
        if self.total_params > _MOST_PARAMS:
            raise ValueError(f"{self.total_params:.3g} parameters; at most {_MOST_PARAMS:.3g} are counted")
        if self.part is not None and self.part.first_layer + self.num_layers > self.part.of_layers:
            raise ValueError(f"part: {self.num_layers} layers from {self.part.first_layer} on exceed {self.part.of_layers}")
        return self

    @property
    def has_embedding(self) -> bool:
        """Its tokens come as numbers, not as hidden vectors from the stage before."""
        return self.part is None or self.part.first_layer == 0

    @property
    def has_head(self) -> bool:
        """It ends in the final norm and the output projection."""
        return self.part is None or self.part.first_layer + self.num_layers == self.part.of_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers that hold experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def limits_groups(self) -> bool:
        """Tokens choose from some groups of experts only."""
        return self.groups_per_token < self.expert_groups

    @property
    def rated_by(self) -> int:
        """How many of a group's best scores add up to what groups are compared by."""
        return self.group_rating_experts or max(self.top_k // self.groups_per_token, 1)

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        if self.latent_attention is not None:
            return self.num_heads * self.latent_attention.key_head_dim
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head's queries and keys are rotated."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_head_dim
        return int(self.attention_width // self.num_heads * self.partial_rotary_factor)

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads, together; not of latent attention."""
        return self.attention_width // self.num_heads * (self.num_kv_heads or self.num_heads)

    @property
    def value_width(self) -> int:
        """Width of all that queries find, together: the input of the output projection."""
        return self.attention_width if self.latent_attention is None else self.num_heads * self.latent_attention.value_head_dim

    @property
    def attention_block_params(self) -> int:
        """Parameters of one attention block's matrices (query, key, value and output projections)."""
        if self.latent_attention is not None:
            return self.latent_attention.matrix_params(self.hidden_size, self.num_heads)
        return self.hidden_size * (2 * self.attention_width + 2 * self.kv_width)

    @property
    def attention_other_params(self) -> int:
        """Those of its biases and norms."""
        if self.latent_attention is not None:
            return self.latent_attention.norm_params
        bias = self.attention_bias * (self.attention_width + 2 * self.kv_width)
        norms = self.attention_width + self.kv_width if self.qk_norm_full_width else 2 * (self.attention_width // self.num_heads)
        return bias + self.qk_norm * norms

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: 2 or 3 matrices, no bias."""
        return self.ffn.num_matrices * self.hidden_size * self.expert_ffn_size

    @property
    def shared_params(self) -> int:
        """Parameters of one block's shared expert."""
        return self.ffn.num_matrices * self.hidden_size * self.shared_ffn_size

    @property
    def dense_params(self) -> int:
        """Parameters outside the experts, replicated on every rank: embeddings, attention, gates, shared experts, norms."""
        ends = 1 if self.tie_embeddings else self.has_embedding + self.has_head
        embeddings = self.vocab_size * self.hidden_size * ends
        per_layer = self.attention_block_params + self.attention_other_params + 2 * self.hidden_size
        gates = (self.num_experts + self.shared_expert_gate) * self.hidden_size
        moe = self.num_moe_layers * (gates + self.shared_params)
        dense = self.num_dense_layers * self.ffn.num_matrices * self.hidden_size * self.dense_ffn_size
        return embeddings + self.num_layers * per_layer + moe + dense + self.hidden_size * self.has_head

    @property
    def total_params(self) -> int:
        """All parameters of the model."""
        return self.dense_params + self.num_moe_layers * self.num_experts * self.expert_params


class Training(Strict):
    """The batch of one rank and the element type."""

    sequence_length: int = Field(ge=1)
    micro_batch_size: int | float = Field(ge=1)
    """Sequences per rank and micro-batch; the mean, where sites take different shares (``Site.tokens``). A fraction where what
    all sites take together does not divide by them: they take as many each, but for one (``hybridep.shares``)."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step (gradient accumulation)."""
    dtype: Dtype = Dtype.FP32

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _number(cls, value: Any) -> int | float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"must be a number (found {value!r})") from None
        if not isfinite(number):
            raise ValueError(f"must be finite (found {value!r})")
        return int(number) if number == int(number) else number

    @model_validator(mode="after")
    def _countable(self) -> Training:
        if (tokens := self.tokens * self.micro_batches) > _MOST_TOKENS:
            raise ValueError(f"{tokens:.3g} tokens of each rank in a step; at most {_MOST_TOKENS:.3g} are counted")
        return self

    @property
    def gradient_dtype(self) -> Dtype:
        """Of gradients in memory: where those of more than ``FEW_SUMMED`` micro-batches of bf16 add up the sums are fp32, since
        bf16 loses what is small beside them. On links they are of ``dtype``."""
        return Dtype.FP32 if self.dtype is Dtype.BF16 and self.micro_batches > FEW_SUMMED else self.dtype

    @property
    def tokens(self) -> int | float:
        """Tokens of one rank in one micro-batch (the mean)."""
        return self.sequence_length * self.micro_batch_size


class Workload(Strict):
    """A model and how it is trained; one YAML file."""

    name: str
    model: Model
    training: Training

    def for_one_rank(self) -> Workload:
        """In whole sequences: as much as the rank has that has most of sites with equal shares."""
        training = self.training.model_copy(update={"micro_batch_size": ceil(self.training.micro_batch_size)})
        return self.model_copy(update={"training": training})

    @property
    def expert_capacity(self) -> int | None:
        """Tokens of one sequence that an expert takes; None without a limit."""
        model, length = self.model, self.training.sequence_length
        if model.capacity_factor is None:
            return None
        return min(ceil(model.capacity_factor * length * model.top_k / model.num_experts), length)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights (and of its gradient) on a link."""
        return self.model.expert_params * self.training.dtype.num_bytes

    @property
    def dispatch_row_bytes(self) -> int:
        """Bytes of one token row on its way to the experts: hidden vector, top-k weights, top-k expert ids (int32)."""
        width = self.training.dtype.num_bytes
        return self.model.hidden_size * width + self.model.top_k * (width + 4)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of one row of partial outputs, or of their gradient."""
        return self.model.hidden_size * self.training.dtype.num_bytes

    @property
    def dispatch_gradient_row_bytes(self) -> int:
        """Bytes of the gradient of one dispatched row: hidden vector and top-k weights."""
        return (self.model.hidden_size + self.model.top_k) * self.training.dtype.num_bytes

    @property
    def pre_expert_flops(self) -> float:
        """Forward of one MoE layer before its routed experts, one micro-batch: attention, gate and shared expert."""
        model = self.model
        weights = model.attention_block_params + model.num_experts * model.hidden_size + model.shared_params
        return float(self.training.tokens * (2 * weights + self._score_flops))

    @property
    def _score_flops(self) -> int:
        """Of one token in one layer: query-key and probability-value products, causal half."""
        return self.training.sequence_length * (self.model.attention_width + self.model.value_width)

    @property
    def expert_flops_per_row(self) -> float:
        """Forward of one expert on one row."""
        return 2.0 * self.model.expert_params

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of one token, with all experts that it chooses; of scores the causal half, and nothing that is
        computed again: what is called model FLOPs."""
        model = self.model
        routed = model.top_k * self.expert_flops_per_row
        forward = model.num_moe_layers * (self.pre_expert_flops / self.training.tokens + routed)
        return 3.0 * (forward + self.head_flops / self.training.tokens)

    @property
    def head_flops(self) -> float:
        """Forward of what lies outside the MoE layers, one micro-batch: dense layers and the output projection."""
        projection = 2 * self.model.vocab_size * self.model.hidden_size * self.model.has_head
        return self.dense_layers_flops + float(self.training.tokens * projection)

    @property
    def dense_layers_flops(self) -> float:
        """Forward of layers without experts, one micro-batch."""
        model = self.model
        weights = model.attention_block_params + model.ffn.num_matrices * model.hidden_size * model.dense_ffn_size
        return float(self.training.tokens * model.num_dense_layers * (2 * weights + self._score_flops))
