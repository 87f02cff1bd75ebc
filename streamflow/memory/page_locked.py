"""Which page-locked host memory there is in this process, and whose it is.

Copies to and from page-locked memory need no staging. The runtime asks here whether an
ndarray lies in such memory, and which ops have to come before the next one that uses it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any, Protocol

import numpy as np

from streamflow.scheduler.hazards import Region

__all__ = ["Owner", "Usable", "add_range", "find", "remove_range"]


class Usable(Protocol):
    """Page-locked bytes that somebody may use now: a lease, a result, pinned user memory.

    Attributes
    ----------
    region : Region or None
        The hazards of the ops on it (rules R3 and R6); None: nobody orders them, the program does.
    """

    region: Region | None


class Owner(Protocol):
    """Whoever page-locked a range."""

    def usable_at(self, address: int, nbytes: int) -> Usable | None:
        """What these bytes of its range belong to; None: to what may not be used any more."""


_lock = threading.RLock()  # a collection inside may release a result
_starts: list[int] = []
_ranges: list[tuple[int, Owner]] = []  # (stop, owner), in the order of _starts


def add_range(start: int, nbytes: int, owner: Owner) -> None:
    """Page-locked memory has come. Ranges may not overlap."""
    with _lock:
        at = bisect_right(_starts, start)
        _starts.insert(at, start)
        _ranges.insert(at, (start + nbytes, owner))


def remove_range(start: int) -> None:
    """The range that begins at ``start`` is about to go."""
    with _lock:
        at = bisect_right(_starts, start) - 1
        assert at >= 0 and _starts[at] == start
        del _starts[at], _ranges[at]


def find(array: np.ndarray[Any, Any]) -> Usable | None:
    """What all bytes of ``array``, contiguous or not, belong to; None if they are pageable.

    Raises
    ------
    ValueError
        They belong to a lease that was released, or lie only in part in page-locked memory.
    """
    if not _starts:
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    with _lock:
        at = bisect_right(_starts, high - 1) - 1
        if at < 0 or _ranges[at][0] <= low:
            return None
        stop, owner = _ranges[at]
        if low < _starts[at] or high > stop:
            raise ValueError(
                f"an array of {array.nbytes} bytes lies only in part in page-locked memory: "
                "pin all of it, or none"
            )
        usable = owner.usable_at(low, high - low)
    if usable is None:
        raise ValueError(
            f"an array of {array.nbytes} bytes lies in pinned memory whose lease was released: "
            "copy what is needed before the release, or keep the lease"
        )
    return usable
