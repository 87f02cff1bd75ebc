"""Page-locked memory that arrays lie in, and copies between it and other page-locked memory.

The driver makes a copy from host to host on the calling thread, once the stream has come to it:
behind a kernel of 200 ms, any copy call between two blocks of ``cuMemHostAlloc`` returned after
200 ms (H200, driver 580). So such a copy goes by the device, twice over the link.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort

__all__ = ["CHUNK_NBYTES", "add", "holds", "remove"]

CHUNK_NBYTES = 64 << 20
"""What a copy by the device moves at a time."""

_lock = threading.Lock()
_starts: list[int] = []
_stops: dict[int, int] = {}


def add(start: int, nbytes: int) -> None:
    """Arrays may lie in these bytes."""
    with _lock:
        insort(_starts, start)
        _stops[start] = start + nbytes


def remove(start: int) -> None:
    """They are given back; harmless for other memory."""
    with _lock:
        if _stops.pop(start, None) is not None:
            _starts.remove(start)


def holds(address: int) -> bool:
    """Whether ``address`` lies in them. Quick where there are none: every copy asks."""
    if not _starts:
        return False
    with _lock:
        at = bisect_right(_starts, address) - 1
        return at >= 0 and address < _stops[_starts[at]]
