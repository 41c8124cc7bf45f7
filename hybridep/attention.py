"""What attention of a model may have beside heads: widths of multi-head latent attention, and scaled rotary embeddings."""

from __future__ import annotations

from math import log

from pydantic import Field, model_validator

from hybridep.config import Strict


class LatentSizes(Strict):
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, and keys with values, pass through
    narrow vectors, and a key's rotated part is the same for all heads."""

    query_rank: int | None = Field(default=None, ge=1)
    """Width of what queries are made from; they are projected at once when absent."""
    kv_rank: int = Field(ge=1)
    """Width of what keys and values are made from."""
    nope_head_dim: int = Field(ge=1)
    """Of a head's queries and keys, what is not rotated."""
    rope_head_dim: int = Field(ge=2, multiple_of=2)
    """What is."""
    value_head_dim: int = Field(ge=1)

    @property
    def key_head_dim(self) -> int:
        """Of a head's queries and keys, all."""
        return self.nope_head_dim + self.rope_head_dim

    def matrix_params(self, hidden_size: int, num_heads: int) -> int:
        """Parameters of one block's matrices."""
        queries = num_heads * self.key_head_dim
        query = hidden_size * queries if self.query_rank is None else self.query_rank * (hidden_size + queries)
        down = hidden_size * (self.kv_rank + self.rope_head_dim)
        up = self.kv_rank * num_heads * (self.nope_head_dim + self.value_head_dim)
        return query + down + up + num_heads * self.value_head_dim * hidden_size

    @property
    def norm_params(self) -> int:
        """Parameters of one block's norms."""
        return (self.query_rank or 0) + self.kv_rank


class RopeScaling(Strict):
    """Rotary embeddings for longer sequences than a model was first trained on (YaRN, arXiv:2309.00071): what turns slowly turns
    ``factor`` times as slowly, what turns often within ``original_length`` positions as before."""

    factor: float = Field(ge=1)
    original_length: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs with at least so many turns in the original length stay as they are."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Those with at most so many are slowed down in full; the same number, and nothing lies between (Kimi-K2)."""
    mscale: float | None = Field(default=None, gt=0)
    """Queries and keys are scaled by 1 + 0.1 ln(factor), or where both of these are given, by the ratio of what they make of it:
    1 + 0.1 mscale ln(factor)."""
    mscale_all_dim: float | None = Field(default=None, gt=0)
    """And latent attention's queries and keys, all of them, by what this makes of it."""

    @model_validator(mode="after")
    def _consistent(self) -> RopeScaling:
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow: {self.beta_slow} must not exceed beta_fast {self.beta_fast}")
        return self

    @property
    def rotated_scale(self) -> float:
        """Of the rotated parts of queries and of keys."""
        if self.mscale is None or self.mscale_all_dim is None:
            return self._scale(1.0)
        return self._scale(self.mscale) / self._scale(self.mscale_all_dim)

    @property
    def latent_scale(self) -> float:
        """Of latent attention's queries and of its keys, beside."""
        return 1.0 if self.mscale_all_dim is None else self._scale(self.mscale_all_dim)

    def _scale(self, mscale: float) -> float:
        return 1 + 0.1 * mscale * log(self.factor)
