"""Page-locked memory of somebody else's, for tests of copies from and to it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import streamflow as sf
from streamflow.memory import page_locked
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket


class Owner:
    """Owns one range; with a region, if ops on it are to be ordered."""

    def __init__(self, nbytes: int, has_region: bool) -> None:
        never = Ticket(0, None)
        never.inherited = ()  # nothing to come after
        self.region = Region(never, 0, nbytes) if has_region else None
        self.is_released = False

    def usable_at(self, address: int, nbytes: int) -> Owner | None:
        return None if self.is_released else self


@contextmanager
def page_locked_bytes(
    dev: sf.Device, nbytes: int, *, has_region: bool = True, is_known: bool = True
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.uint8]], Owner]]:
    """``nbytes`` of page-locked memory, as bytes, and who owns it.

    ``is_known=False``: not in the table, as if it were another library's.
    """
    backend = dev._core.backend
    address = backend.allocate_pinned_blocking(nbytes)
    owner = Owner(nbytes, has_region)
    memory = (ctypes.c_char * nbytes).from_address(address)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 0
    if is_known:
        page_locked.add_range(address, nbytes, owner)
    try:
        yield array, owner
    finally:
        if is_known:
            page_locked.remove_range(address)
        backend.free_pinned_blocking(address)
