"""Checksums of host memory that must not change: for the race checker, and for debugging."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["checksum", "sampled_checksum"]

_WHOLE_NBYTES = 64 << 10
_NUM_SAMPLES = 16


def checksum(memory: npt.NDArray[np.uint8]) -> int:
    """Of all bytes. A sum or XOR of words would be faster, and blind to a new constant."""
    return zlib.crc32(memory.data)


def sampled_checksum(array: npt.NDArray[Any]) -> int:
    """Of an array of any layout: of all elements if it is small, else of stretches of it.

    0 for what has fields and gaps between its elements: copying leaves padding undefined.
    """
    if array.flags.c_contiguous:
        flat: Any = array.reshape(-1).view(np.uint8)
    elif array.dtype.fields is None:
        flat = array.flat
    else:
        return 0
    num = len(flat)
    if array.nbytes <= _WHOLE_NBYTES:
        return zlib.crc32(flat[:num].tobytes())
    length = _WHOLE_NBYTES // _NUM_SAMPLES * num // array.nbytes + 1
    value = 0
    for number in range(_NUM_SAMPLES):
        start = number * (num - length) // (_NUM_SAMPLES - 1)
        value = zlib.crc32(flat[start : start + length].tobytes(), value)
    return value
