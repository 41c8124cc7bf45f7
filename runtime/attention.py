"""Causal self-attention with rotary embeddings: grouped-query, and multi-head latent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridep.workload import Model
from runtime.norm import RmsNorm
from runtime.rotary import Rotary

_LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever ``norm_eps`` says of the others: public models have it so."""


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
        self.head_dim = model.attention_width // model.num_heads
        self.rotary = Rotary(model)
        width, bias = model.attention_width, model.attention_bias
        self.query = nn.Linear(model.hidden_size, width, bias=bias, dtype=dtype)
        self.key = nn.Linear(model.hidden_size, model.kv_width, bias=bias, dtype=dtype)
        self.value = nn.Linear(model.hidden_size, model.kv_width, bias=bias, dtype=dtype)
        self.output = nn.Linear(width, model.hidden_size, bias=False, dtype=dtype)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if model.qk_norm:
            widths = (width, model.kv_width) if model.qk_norm_full_width else (self.head_dim, self.head_dim)
            self.query_norm, self.key_norm = (RmsNorm(one, eps=model.norm_eps, dtype=dtype) for one in widths)
        self.norms_all_heads = model.qk_norm_full_width

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H]."""
        num_sequences, length, _ = x_BSH.shape

        def heads(projected: Tensor, number: int) -> Tensor:
            return projected.view(num_sequences, length, number, self.head_dim).transpose(1, 2)

        def normed(projected: Tensor, number: int, norm: nn.Module) -> Tensor:
            found: Tensor = heads(norm(projected), number) if self.norms_all_heads else norm(heads(projected, number))
            return found

        query = self.rotary(normed(self.query(x_BSH), self.num_heads, self.query_norm))
        key = self.rotary(normed(self.key(x_BSH), self.num_kv_heads, self.key_norm))
        value = heads(self.value(x_BSH), self.num_kv_heads)
        shared = self.num_kv_heads != self.num_heads
        if shared and query.is_cuda and query.dtype.itemsize > 2:
            # torch's fused attention takes keys that heads share in 16 bits only, and would else keep all scores.
            repeats, shared = self.num_heads // self.num_kv_heads, False
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        projected: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return projected


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, Eq. 9-19), as it is trained: keys and values are made for all
    heads."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = model.latent_attention
        assert sizes is not None
        self.sizes, self.num_heads = sizes, model.num_heads
        self.rotary = Rotary(model)
        self.scale = sizes.key_head_dim**-0.5
        if model.rope_scaling is not None:
            self.scale *= model.rope_scaling.latent_scale**2

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        def norm(width: int) -> RmsNorm:
            return RmsNorm(width, eps=_LATENT_NORM_EPS, dtype=dtype)

        width = model.attention_width
        if sizes.query_rank is None:
            self.query: nn.Module = linear(model.hidden_size, width)
        else:
            self.query_down, self.query_norm = linear(model.hidden_size, sizes.query_rank), norm(sizes.query_rank)
            self.query_up = linear(sizes.query_rank, width)
        self.kv_down = linear(model.hidden_size, sizes.kv_rank + sizes.rope_head_dim)
        self.kv_norm = norm(sizes.kv_rank)
        self.kv_up = linear(sizes.kv_rank, self.num_heads * (sizes.nope_head_dim + sizes.value_head_dim))
        self.output = linear(model.value_width, model.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H]."""
        sizes, rows = self.sizes, x_BSH.shape[:-1]

        def heads(projected: Tensor) -> Tensor:
            return projected.view(*rows, self.num_heads, -1).transpose(1, 2)

        if sizes.query_rank is None:
            query = heads(self.query(x_BSH))
        else:
            query = heads(self.query_up(self.query_norm(self.query_down(x_BSH))))
        query_nope, query_rope = torch.split(query, [sizes.nope_head_dim, sizes.rope_head_dim], dim=-1)
        latent, key_rope = torch.split(self.kv_down(x_BSH), [sizes.kv_rank, sizes.rope_head_dim], dim=-1)
        key_value = heads(self.kv_up(self.kv_norm(latent)))
        key_nope, value = torch.split(key_value, [sizes.nope_head_dim, sizes.value_head_dim], dim=-1)
        shared = self.rotary(key_rope)[:, None].expand(-1, self.num_heads, -1, -1)
        query = torch.cat([query_nope, self.rotary(query_rope)], dim=-1)
        key = torch.cat([key_nope, shared], dim=-1)
        y = _attend(query, key, value, self.scale)
        projected: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return projected


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Of queries and keys [B, N, S, D] and values [B, N, S, V]. Widths are made alike with zeros: of others torch has no flash
    attention, and on CPU it would keep all scores for backward."""
    width, found = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    if query.shape[-1] < width:
        query, key = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key))
    # A copy in any case: a view would keep all that keys and values were made from.
    value = F.pad(value, (0, width - found))
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return y[..., :found]
