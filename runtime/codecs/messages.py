"""Tensors of known types and lengths, one after the other in one message of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Open(NamedTuple):
    """A message that may be longer than both its ends know, or room for one."""

    tensor: Tensor
    """uint8: the message, at least as long as agreed, or all the room that there is."""
    agreed_bytes: int
    """What both ends know."""


Message = Tensor | Open
"""What is sent, or the room for what comes."""


def message_of(tensor: Tensor, known_bytes: int) -> Message:
    """The tensor itself where it is as long as both ends know."""
    return tensor if tensor.nbytes == known_bytes else Open(tensor, known_bytes)


def joined(messages: Sequence[Tensor], each_bytes: int) -> Message:
    """Messages of which both ends know that each is so long, or longer, as one."""
    return message_of(torch.cat(list(messages)), len(messages) * each_bytes)


def room(number: int, each_bytes: int, most_bytes: int, device: torch.device) -> Message:
    """For so many messages as one. Where they may be longer only what has come is worth room on a device."""
    place = torch.device("cpu") if most_bytes > each_bytes else device
    return message_of(torch.empty(number * most_bytes, dtype=torch.uint8, device=place), number * each_bytes)


def tensor_of(message: Message) -> Tensor:
    """All there is of it."""
    return message if isinstance(message, Tensor) else message.tensor


def agreed_bytes(message: Message) -> int:
    """What both ends know of its length."""
    return message.nbytes if isinstance(message, Tensor) else message.agreed_bytes


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
