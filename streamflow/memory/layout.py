"""Cutting an ndarray of any layout into pieces that fill staging chunks in C order."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

__all__ = ["Pieces", "has_gaps", "is_compact", "overlaps_itself"]

Array = np.ndarray[Any, Any]

_NUM_LOOKED_AT_MAX = 1 << 16
_PAGE_NBYTES = 4096
_COMPACT_NBYTES = 1 << 20


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
    num_rising : int
        The first so many pieces, where there are as many, grow in equal steps up to a whole one:
        then as many threads, who begin together, are done one after another, the first one soon.
    keeps_gaps : bool
        Structured items are taken field by field, so that what is between those stays as it is.
        No item may be larger than a piece then.
    """

    __slots__ = (
        "_array",
        "_item_nbytes",
        "_num_per_row",
        "_num_rising",
        "_outer",
        "_risen",
        "_row_nbytes",
        "_step",
        "_unit",
        "num",
    )

    def __init__(
        self, array: Array, max_nbytes: int, *, num_rising: int = 0, keeps_gaps: bool = False
    ) -> None:
        if keeps_gaps and has_gaps(array.dtype):
            array = np.atleast_1d(array)
        elif array.flags.c_contiguous:
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
        unit = 1
        if item_nbytes == 1:  # copies of whole pages
            unit = _PAGE_NBYTES
            step = min(longest, step + -step % unit)
        self._item_nbytes, self._step, self._unit = item_nbytes, step, unit
        if axis or length <= (num_rising - 1) * step or step < num_rising * unit:
            num_rising = 0
        self._num_rising, self._risen = num_rising, 0
        self._risen = self._start(num_rising)  # the others follow there
        self._num_per_row = num_rising + -(-(length - self._risen) // step)
        self.num = prod(self._outer) * self._num_per_row

    def __getitem__(self, number: int) -> tuple[int, Array]:
        """``(offset in bytes, view)`` of one piece."""
        row, part = divmod(number, self._num_per_row)
        start, stop = self._start(part), self._start(part + 1)
        view = self._array
        if self._outer:
            view = view[np.unravel_index(row, self._outer)]
        return row * self._row_nbytes + start * self._item_nbytes, view[start:stop]

    def _start(self, part: int) -> int:
        """Where a piece begins on its axis."""
        num, unit = self._num_rising, self._unit
        if part > num or not num:
            start: int = self._risen + (part - num) * self._step
        else:
            start = self._step // unit * part * (part + 1) // (2 * num) * unit
        return start


def has_gaps(dtype: np.dtype[Any]) -> bool:
    """Whether items have bytes that are no field's: padding, or columns that were not selected."""
    if dtype.subdtype is not None:
        return has_gaps(dtype.base)
    if dtype.names is None:
        return False
    fields = [dtype[name] for name in dtype.names]
    return sum(each.itemsize for each in fields) != dtype.itemsize or any(map(has_gaps, fields))


def is_compact(array: Array) -> bool:
    """Whether its bytes lie close together: else a few KiB may be thousands of page faults."""
    if array.flags.c_contiguous:
        return True
    low, high = np.lib.array_utils.byte_bounds(array)
    return bool(high - low <= _COMPACT_NBYTES)


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
