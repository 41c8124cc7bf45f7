"""Grid, word size and argument checks of the kernels: arithmetic on shapes and addresses, with no device in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.driver import Argument
from runtime.kernels.errors import KernelInputError

WARP = 32
WARPS_PER_BLOCK = 8
BLOCK = WARP * WARPS_PER_BLOCK
MAX_TOP_K = WARP
"""A warp holds one pair of a row in each lane."""
MAX_GROUPS = 12288
"""The route keeps one int32 per group in 48 KiB of shared memory."""
INT_LIMIT = 2**31
MAX_BLOCKS = 2**20
"""Warps then walk over the remaining units. Keeps unit + stride within 32 bits."""

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Rows that lie in several buffers of equal size, one per rank: row s is row s % rows of buffer s // rows."""

    addresses: Tensor
    """[ranks] int64 on the device: where each rank's buffer starts, as this process sees it."""
    rows: int
    """Rows of each buffer."""
    alignment: int
    """Every address is a multiple of it."""


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of the first element; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def peers_arguments(peers: Peers | None) -> tuple[Argument, Argument]:
    """Address table and rows per buffer, as row_at in csrc/rows.cuh takes them."""
    return (pointer(None), ctypes.c_uint32(1)) if peers is None else (pointer(peers.addresses), ctypes.c_uint32(peers.rows))


def u32(value: int) -> ctypes.c_uint32:
    """A 32-bit argument; callers have checked its range (``checked``)."""
    return ctypes.c_uint32(value)


def checked(where: str, name: str, value: int, limit: int = INT_LIMIT) -> int:
    """``value`` if it is below ``limit``, else KernelInputError: the kernels count rows, pairs and units in 32 bits
    (addresses in 64)."""
    if not 0 <= value < limit:
        raise KernelInputError(where, name, f"{value} must lie in 0..{limit - 1}; split the batch")
    return value


def require(
    where: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], device: torch.device
) -> None:
    """Raises KernelInputError unless the tensor is contiguous, on ``device``, of one of ``dtypes`` and of ``shape``
    (None: any)."""
    if tensor.device != device:
        raise KernelInputError(where, name, f"is on {tensor.device}, must be on {device}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise KernelInputError(where, name, f"is {tensor.dtype}, must be {allowed}")
    same = len(shape) == tensor.dim() and all(a is None or a == b for a, b in zip(shape, tensor.shape, strict=True))
    if not same:
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise KernelInputError(where, name, f"has shape {list(tensor.shape)}, must be {wanted}")
    if not tensor.is_contiguous():
        raise KernelInputError(where, name, "must be contiguous")


def require_top_k(where: str, top_k: int) -> None:
    """Raises KernelInputError for more pairs per row than a warp has lanes."""
    if not 1 <= top_k <= MAX_TOP_K:
        raise KernelInputError(where, "slot", f"{top_k} pairs per row; the kernels take 1 to {MAX_TOP_K}")


def alignment(tensors: Sequence[Tensor | Peers | None]) -> int:
    """Largest power of two up to 16 that divides every address."""
    bits = 16
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.alignment if isinstance(tensor, Peers) else tensor.data_ptr()
    return bits & -bits


def word_bytes(row_bytes: int, aligned_to: int) -> int:
    """Largest power of two up to 16 that divides both: the width of one access."""
    bits = row_bytes | aligned_to | 16
    return bits & -bits


def ceil_div(value: int, by: int) -> int:
    """Rounded up."""
    return -(-value // by)


def warp_grid(where: str, units: int) -> int:
    """Blocks for ``units`` units of work, one warp each; at least one, so that an empty batch needs no special case."""
    checked(where, "rows x chunks", units)
    return max(1, min(ceil_div(units, WARPS_PER_BLOCK), MAX_BLOCKS))


def worst_case_rows(num_pairs: int, groups: int, multiple: int) -> int:
    """Rows that a packed route can need, whatever the routing: what a buffer must hold when the host does not wait for
    the counts."""
    return num_pairs + min(groups, num_pairs) * (multiple - 1)
