"""Cutting an ndarray of any layout into pieces that fill staging chunks in C order."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

__all__ = ["Pieces", "overlaps_itself"]

Array = np.ndarray[Any, Any]

_NUM_LOOKED_AT_MAX = 1 << 16
_PAGE_NBYTES = 4096


class Pieces:
    """Views that cover an array in C order, by number: nobody has to walk through them.

    Every view keeps the array's own strides, so no piece is copied here: strided, reversed
    and broadcast arrays are cut along their leading axes. The pieces of one axis are of nearly
    one size. Structured items are taken as they lie in memory, padding and all.

    Parameters
    ----------
    array : ndarray
        Of plain bytes.
    max_nbytes : int
        The bytes of a piece, at most.
    """

    __slots__ = ("_array", "_num_per_row", "_outer", "_row_nbytes", "_step", "_step_nbytes", "num")

    def __init__(self, array: Array, max_nbytes: int) -> None:
        if array.flags.c_contiguous:
            # An item may be larger than a chunk: bytes can be cut anywhere.
            array = array.reshape(-1).view(np.uint8)
        elif array.itemsize > max_nbytes:
            array = array[..., np.newaxis].view(np.uint8)
        elif array.dtype.fields is not None:
            array = array.view((np.void, array.itemsize))
        self._array = array
        if not array.nbytes:
            self.num = 0
            return
        row_nbytes, axis = array.nbytes, 0  # of what is at one index of the axes before `axis`
        while axis < array.ndim - 1 and row_nbytes // array.shape[axis] > max_nbytes:
            row_nbytes //= array.shape[axis]
            axis += 1
        length = array.shape[axis]
        item_nbytes = row_nbytes // length
        self._outer = array.shape[:axis]
        self._row_nbytes = row_nbytes
        longest = max(1, max_nbytes // item_nbytes)
        step = -(-length // -(-length // longest))
        if item_nbytes == 1:  # copies of whole pages
            step = min(longest, step + -step % _PAGE_NBYTES)
        self._step = step
        self._step_nbytes = step * item_nbytes
        self._num_per_row = -(-length // step)
        self.num = prod(self._outer) * self._num_per_row

    def __getitem__(self, number: int) -> tuple[int, Array]:
        """``(offset in bytes, view)`` of one piece."""
        row, part = divmod(number, self._num_per_row)
        start = part * self._step
        view = self._array
        if self._outer:
            view = view[np.unravel_index(row, self._outer)]
        offset = row * self._row_nbytes + part * self._step_nbytes
        return offset, view[start : start + self._step]


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of ``array`` share bytes, so that it can't take what is copied there.

    Exact for whatever slicing and transposing make of an array. Of axes that interleave, as only
    made-up strides do, large arrays count as overlapping.
    """
    if array.size < 2 or array.flags.c_contiguous:
        return False
    axes = sorted(
        (abs(stride), num)
        for num, stride in zip(array.shape, array.strides, strict=True)
        if num > 1
    )
    reach = array.itemsize
    for stride, num in axes:
        if stride < reach:
            break
        reach += stride * (num - 1)
    else:
        return False
    if axes[0][0] == 0 or array.size > _NUM_LOOKED_AT_MAX:
        return True
    starts = np.zeros(1, np.intp)
    for stride, num in axes:
        starts = np.add.outer(starts, stride * np.arange(num)).reshape(-1)
    starts.sort()
    return bool((np.diff(starts) < array.itemsize).any())
