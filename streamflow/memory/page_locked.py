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

__all__ = ["Owner", "Staged", "Usable", "add_range", "find", "owner_over", "remove_range"]


class Usable(Protocol):
    """Page-locked bytes that somebody may use now: a lease, a result, pinned user memory."""

    @property
    def region(self) -> Region | None:
        """The hazards of the ops on it (rules R3, R6); None: the program orders them."""


class Staged:
    """Page-locked bytes that copies are staged from and to all the same, whatever the driver says.

    They are being unpinned, pinned only in part, or another event loop's, which will not wait for
    our ops.
    """

    __slots__ = ("region",)

    def __init__(self, region: Region | None) -> None:
        self.region = region


class Owner(Protocol):
    """Whoever page-locked a range."""

    def usable_at(self, address: int, nbytes: int) -> Usable | None:
        """What these bytes of its range belong to; None: to what may not be used any more."""


_lock = threading.RLock()  # a collection inside may release a result
_starts: list[int] = []
_ranges: list[tuple[int, Owner]] = []  # (stop, owner), in the order of _starts
_programs: set[int] = set()  # the starts of those that the program allocated


def add_range(start: int, nbytes: int, owner: Owner, *, is_programs: bool = False) -> None:
    """Page-locked memory has come. Ranges may not overlap.

    ``is_programs``: the program allocated it, so that it may be NumPy's own.
    """
    with _lock:
        at = bisect_right(_starts, start)
        _starts.insert(at, start)
        _ranges.insert(at, (start + nbytes, owner))
        if is_programs:
            _programs.add(start)


def remove_range(start: int) -> None:
    """The range that begins at ``start`` is about to go."""
    with _lock:
        at = bisect_right(_starts, start) - 1
        assert _starts[at] == start
        del _starts[at], _ranges[at]
        _programs.discard(start)


def owner_over(start: int, stop: int) -> Owner | None:
    """Who page-locked a range that has some of these bytes; of several, the last."""
    with _lock:
        at = bisect_right(_starts, stop - 1) - 1
        if at < 0 or _ranges[at][0] <= start:
            return None
        return _ranges[at][1]


def find(array: np.ndarray[Any, Any]) -> Usable | None:
    """What all bytes of ``array``, contiguous or not, belong to; None if they are pageable.

    Raises
    ------
    ValueError
        They belong to a lease that was released.
    """
    if not _starts or (not _programs and _is_numpys(array)):
        return None
    low, high = np.lib.array_utils.byte_bounds(array)
    with _lock:
        at = bisect_right(_starts, high - 1) - 1
        if at < 0 or _ranges[at][0] <= low:
            return None
        stop, owner = _ranges[at]
        start = max(low, _starts[at])
        usable = owner.usable_at(start, min(high, stop) - start)
        if usable is not None and (low < start or high > stop):
            # Whoever pinned a part, another thread perhaps, must not break others' copies.
            usable = Staged(usable.region)
    if usable is None or _is_revoked(array):
        raise ValueError(
            f"an array of {array.nbytes} bytes lies in pinned memory whose lease was released: "
            "copy what is needed before the release, or keep the lease"
        )
    return usable


def _is_numpys(array: np.ndarray[Any, Any]) -> bool:
    """Whether NumPy allocated its memory: asking for the address takes microseconds."""
    base: Any = array
    while type(base.base) is np.ndarray:
        base = base.base
    is_owner: bool = base.base is None and base.flags.owndata
    return is_owner


def _is_revoked(array: np.ndarray[Any, Any]) -> bool:
    """Whether it was made from a lease that was released; the memory may be another's now."""
    base: Any = array.base
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    return getattr(base, "is_revoked", False) is True
