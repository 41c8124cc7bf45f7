"""Arrays of bytes from each rank to each coordinate, of which most are zero where thousands of sites reach few experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import sparse

from hybridep.arrays import FloatArray, IntArray

Sent = FloatArray | sparse.csr_array
"""[ranks, coordinates of a level] bytes."""

_LARGE = 2**22
"""Smaller arrays stay as they are."""

_SPARSE = 0.1
"""With a larger share of entries that are not zero, the plain array is smaller or faster."""

_BLOCK = 2**22


def compact(sent: FloatArray) -> Sent:
    """The same in less memory, if it is large and mostly zero."""
    if sent.size < _LARGE or np.count_nonzero(sent) > _SPARSE * sent.size:
        return sent
    return sparse.csr_array(sent)


def spread(sent: Sent, rows: IntArray, columns: IntArray, shape: tuple[int, int]) -> Sent:
    """In a larger array: each row and each column at these places, and nothing elsewhere."""
    parts = sparse.coo_array(sent)
    row, column = parts.coords
    found = sparse.csr_array((parts.data, (rows[row], columns[column])), shape=shape)
    return found if shape[0] * shape[1] >= _LARGE else dense(found)


def dense(sent: Sent) -> FloatArray:
    """As a plain array."""
    return np.asarray(sent if isinstance(sent, np.ndarray) else sent.toarray(), dtype=np.float64)


def blocks(sent: Sent) -> Iterator[tuple[int, FloatArray]]:
    """Plain arrays of consecutive ranks, and the first rank of each."""
    if isinstance(sent, np.ndarray):
        yield 0, sent
        return
    step = max(_BLOCK // sent.shape[1], 1)
    for first in range(0, sent.shape[0], step):
        yield first, dense(sent[first : first + step])
