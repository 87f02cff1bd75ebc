"""Cutting an ndarray of any layout into pieces that fill staging chunks in C order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["pieces"]

Array = np.ndarray[Any, Any]


def pieces(array: Array, max_nbytes: int) -> Iterator[tuple[int, Array]]:
    """Yield ``(offset in bytes, view)`` that cover ``array`` in C order.

    Every view has at most ``max_nbytes`` bytes (one element at least) and keeps the
    array's own strides, so no piece is copied here: strided, reversed and broadcast
    arrays are cut along their leading axes.
    """
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        step = max(1, max_nbytes // max(1, array.itemsize))
        for start in range(0, flat.size, step):
            yield start * array.itemsize, flat[start : start + step]
    else:
        yield from _cut(array, 0, max_nbytes)


def _cut(array: Array, offset: int, max_nbytes: int) -> Iterator[tuple[int, Array]]:
    if array.nbytes <= max_nbytes or array.ndim == 0:
        if array.size:
            yield offset, array
        return
    row_nbytes = array.nbytes // array.shape[0]
    rows = max_nbytes // row_nbytes
    if rows or array.ndim == 1:
        for start in range(0, array.shape[0], max(1, rows)):
            yield offset + start * row_nbytes, array[start : start + max(1, rows)]
    else:
        for row in range(array.shape[0]):
            yield from _cut(array[row], offset + row * row_nbytes, max_nbytes)
