"""The program's own memory that is page-locked for it, for the whole process.

Devices, threads and tasks may all pin the same bytes: one registration with the driver serves
them, and goes with the last of them. Pinning and unpinning block (rule R1), one at a time as in
the driver, so those calls are for worker threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np

from streamflow.backends.base import Backend
from streamflow.backends.memory import MemoryKind
from streamflow.memory import page_locked
from streamflow.memory.page_locked import Staged, Usable
from streamflow.scheduler.guards import guard
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket

__all__ = [
    "Overlap",
    "Registration",
    "Share",
    "hold_blocking",
    "num_registered",
    "release_blocking",
]

Array = np.ndarray[Any, Any]

_NUM_PARTS_MAX = 64
"""Slices of one registration with hazards of their own; more share those of the whole."""


class Overlap(ValueError):
    """A range overlaps a registered one and does not lie in it."""


class _Part:
    """Some bytes of a registration that may be used as they are."""

    __slots__ = ("region",)

    def __init__(self, region: Region) -> None:
        self.region: Region | None = region


class Share:
    """What the devices of one event loop know of a registration: nothing here is for others.

    Attributes
    ----------
    num_open : int
        Pins of this loop that nobody has begun to undo.
    root : Region
        The hazards of all its bytes; slices have regions of their own, which it overlaps.
    """

    __slots__ = ("_current", "key", "num_open", "root")

    def __init__(self, key: object, current: Callable[[], object | None], nbytes: int) -> None:
        self.key = key
        self._current = current
        self.num_open = 0
        self.root = Region(_never(), 0, nbytes)

    def is_here(self) -> bool:
        """Whether the calling thread runs this loop."""
        return self._current() is self.key

    def region(self, start: int, stop: int) -> Region:
        """The hazards of a part."""
        root = self.root
        if start == root.start and stop == root.stop:
            return root
        for known in root.overlapping:
            if known.start == start and known.stop == stop:
                return known
        if len(root.overlapping) >= _NUM_PARTS_MAX:
            return root
        return root.carve(root, start, stop)


class Registration:
    """One range that the driver has page-locked; an :class:`~.page_locked.Owner`.

    Attributes
    ----------
    start, stop : int
        Addresses.
    array : ndarray
        Keeps the memory (rule R6).
    where : str
        The line that pinned it first.
    num_holds : int
        How many pins it is registered for, of any loop.
    """

    __slots__ = ("_shares", "array", "num_holds", "start", "stop", "where")

    def __init__(self, array: Array, start: int, stop: int, where: str) -> None:
        self.array = array
        self.start = start
        self.stop = stop
        self.where = where
        self.num_holds = 0
        self._shares: list[Share] = []

    def share(self, key: object, current: Callable[[], object | None]) -> Share:
        """That of the loop ``key``, whose thread calls."""
        for known in self._shares:
            if known.key is key:
                return known
        self._shares.append(Share(key, current, self.stop - self.start))
        return self._shares[-1]

    def usable_at(self, address: int, nbytes: int) -> Usable:
        """As :class:`~streamflow.memory.page_locked.Owner` has it, for the loop that asks."""
        for share in self._shares:
            if share.is_here():
                offset = address - self.start
                region = share.region(offset, offset + nbytes)
                return _Part(region) if share.num_open else Staged(region)
        return Staged(None)  # another loop's: it does not wait for our ops before it unpins

    def __str__(self) -> str:
        return (
            f"[{self.start:#x}, {self.stop:#x}) of {self.stop - self.start} bytes, pinned at "
            f"{self.where}"
        )


class _Table:
    """The registrations of the process, which do not overlap."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the driver is called, which has one as well
        self.starts: list[int] = []
        self.registrations: list[Registration] = []
        guard(self)

    def on_fork(self) -> None:
        """Nothing to do: the registrations are the parent's, and nobody gets this far."""

    def on_exit(self) -> list[Thread]:
        """Nothing to do: being told keeps the memory from being finalised (rule R12)."""
        return []

    def around(self, start: int, stop: int) -> Registration | None:
        """The registration that has all of these bytes. Needs the lock.

        Raises
        ------
        Overlap
            It has some of them only.
        """
        at = bisect_right(self.starts, stop - 1) - 1
        known = self.registrations[at] if at >= 0 else None
        if known is None or known.stop <= start:
            return None
        if known.start <= start and stop <= known.stop:
            return known
        raise Overlap(
            f"[{start:#x}, {stop:#x}) of {stop - start} bytes overlaps {known}, and does not lie "
            "in it: pin the larger one first, or one that has both, or unpin that one"
        )


_table = _Table()


def hold_blocking(
    array: Array, start: int, stop: int, is_read_only: bool, where: str, backend: Backend
) -> Registration | None:
    """Page-lock ``[start, stop)``, or count one more who wants it to be.

    Returns
    -------
    Registration or None
        None: others, such as another library, have page-locked it.

    Raises
    ------
    Overlap
        A part of it is registered.
    Exception
        What the backend raised; nothing has changed.
    """
    with _table.lock:
        known = _table.around(start, stop)
        if known is None:
            ends = (start, stop - 1)
            if all(backend.pointer_attributes(end).kind is MemoryKind.HOST for end in ends):
                return None
            known = Registration(array, start, stop, where)
            # First: a copy that asked the driver alone might be told yes, and be waited for by
            # no unpin. Until a loop has its share, copies are staged.
            page_locked.add_range(start, stop - start, known, is_programs=True)
            try:
                backend.register_host_blocking(start, stop - start, is_read_only)
            except BaseException:
                page_locked.remove_range(start)
                raise
            at = bisect_right(_table.starts, start)
            _table.starts.insert(at, start)
            _table.registrations.insert(at, known)
        known.num_holds += 1
        return known


def release_blocking(registration: Registration, backend: Backend) -> None:
    """Undo one :func:`hold_blocking`; every use that it was held for has ended.

    Raises
    ------
    Exception
        What the backend raised: the memory stays page-locked, and kept.
    """
    with _table.lock:
        registration.num_holds -= 1
        if registration.num_holds:
            return
        backend.unregister_host_blocking(registration.start)
        # Last: until here copies are told to stage, whatever the driver says of the memory.
        page_locked.remove_range(registration.start)
        at = bisect_right(_table.starts, registration.start) - 1
        del _table.starts[at], _table.registrations[at]


def num_registered() -> int:
    """How many ranges are registered in this process."""
    return len(_table.starts)


def _never() -> Ticket:
    """What the first op on a registration comes after: nothing."""
    ticket = Ticket(0)
    ticket.inherited = ()
    return ticket
