"""Tensors of known types and lengths, one after the other in one message of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(parts: Sequence[Tensor]) -> Tensor:
    """uint8: the parts' elements, without gaps."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(message: Tensor, parts: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """The flat parts of a message, by type and length; views where they are aligned, else copies."""
    sizes = [dtype.itemsize * length for dtype, length in parts]
    return [_view(part, dtype) for part, (dtype, _) in zip(torch.split(message, sizes), parts, strict=True)]


def _view(part: Tensor, dtype: torch.dtype) -> Tensor:
    # A part may start where its type must not (ids after bf16 weights): a copy is aligned.
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)
