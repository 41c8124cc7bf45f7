"""A row gather in Triton, for comparison in the bench; imported only where Triton is installed."""

# No postponed annotations here: Triton reads BLOCK's.
from importlib import import_module
from typing import Any

from torch import Tensor

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _gather(x, index, out, hidden, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    tl.store(out + row * hidden + at, tl.load(x + source * hidden + at, mask=inside), mask=inside)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """[R, H]: rows ``index`` [R] of ``x`` [N, H]."""
    out = x.new_empty(len(index), x.shape[1])
    _gather[(len(index), -(-x.shape[1] // _BLOCK))](x, index, out, x.shape[1], BLOCK=_BLOCK)
    return out
