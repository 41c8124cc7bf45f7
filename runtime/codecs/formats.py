"""The formats of ``runtime.kernels`` wherever tensors are: kernels on a GPU, plain torch on CPU and for fp64; the same bits."""

from __future__ import annotations

from torch import Tensor

from runtime.kernels import reference_codecs as reference
from runtime.kernels.codecs import NARROW, CodecKernels
from runtime.kernels.driver import cuda_driver
from runtime.kernels.reference_codecs import ChangeCode, Residual


def change_encode(now: Tensor, copy: Tensor, code: ChangeCode) -> tuple[Tensor, Tensor]:
    """See ``reference_codecs.change_encode``; ``copy`` is updated in place."""
    return (_kernels().change_encode if _takes(now) else reference.change_encode)(now, copy, code)


def change_decode(codes: Tensor, scales: Tensor, copy: Tensor, code: ChangeCode) -> None:
    """See ``reference_codecs.change_decode``; ``copy`` is updated in place."""
    (_kernels().change_decode if _takes(copy) else reference.change_decode)(codes, scales, copy, code)


def residual_encode(value: Tensor, shared: Tensor, threshold: Tensor, capacity: int) -> Residual:
    """See ``reference_codecs.residual_encode``."""
    return (_kernels().residual_encode if _takes(value) else reference.residual_encode)(value, shared, threshold, capacity)


def residual_decode(shared: Tensor, residual: Residual) -> Tensor:
    """See ``reference_codecs.residual_decode``."""
    return (_kernels().residual_decode if _takes(shared) else reference.residual_decode)(shared, residual)


def _takes(tensor: Tensor) -> bool:
    """Whether kernels do."""
    return tensor.is_cuda and tensor.dtype in NARROW


def _kernels() -> CodecKernels:
    return CodecKernels(cuda_driver())
