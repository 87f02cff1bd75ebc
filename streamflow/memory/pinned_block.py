"""One block of page-locked memory: on loan to the runtime, to a result, or leased."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.memory.page_locked import Staged, Usable
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.memory.pinned import PinnedBlocks

__all__ = ["PAGE_NBYTES", "PinnedBlock", "Slab", "views_of"]

PAGE_NBYTES = 256 << 10
"""Small blocks of one class are cut from such a part of a slab."""
_POISON = 0xDB


class PinnedBlock:
    """One pinned range: cached in its pool, or on loan until :meth:`release` is called, once.

    Attributes
    ----------
    address, nbytes : int
        Host address and size, that of the class.
    is_leased : bool
        The program may use it, and the runtime orders the ops on it.
    """

    __slots__ = (
        "_bytes",
        "_is_open",
        "_last_used",
        "_region",
        "_slab",
        "_view",
        "_views",
        "address",
        "is_leased",
        "nbytes",
        "pool",
    )

    def __init__(self, pool: PinnedBlocks, address: int, nbytes: int, slab: Slab | None) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.is_leased = False
        self._slab = slab
        self._is_open = False  # the program may use it
        self._last_used = 0
        self._region: Region | None = None
        self._bytes: memoryview | None = None
        self._view: weakref.ref[_View] | None = None  # of the present lease
        self._views: list[weakref.ref[_View]] = []  # of earlier ones too

    def view(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Its start as an ndarray in C order; valid until the block is released."""
        memory = self._bytes
        if memory is None:
            memory = memoryview((ctypes.c_char * self.nbytes).from_address(self.address))
            memory = self._bytes = memory.cast("B")
        return np.ndarray(shape, dtype, memory)

    def release(self) -> None:
        """Give the block back. Any thread; nothing in flight may still touch it (R6)."""
        self.pool._give_back(self)

    def as_result(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], holder: object
    ) -> np.ndarray[Any, Any]:
        """An ndarray that *is* this block; the block returns when the array is collected.

        ``holder`` says who asked for it: :meth:`PinnedBlocks.holders` tells.
        """
        self.pool._holders[self.address] = holder
        self._is_open = True
        return _shaped(_Loan(self, math.prod(shape) * dtype.itemsize), shape, dtype)

    # -- leases ------------------------------------------------------------------------------

    @property
    def region(self) -> Region | None:
        """The hazards of the ops on a lease, from its first op on (rules R3, R6)."""
        if self._region is None and self.is_leased:
            self._region = Region(_START, 0, self.nbytes)
        return self._region

    def lease(self, holder: object) -> None:
        """The program may use it now; :meth:`release` ends that."""
        self.is_leased = self._is_open = True
        self.pool._holders[self.address] = holder

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A lease's bytes as an ndarray. While any view of it lives, nobody unpins the memory."""
        view = None if self._view is None else self._view()
        if view is None:
            view = _View(self, self.nbytes)
            self._view = weakref.ref(view)
            self._views = [each for each in self._views if each() is not None] + [self._view]
        nbytes = math.prod(shape) * dtype.itemsize
        return np.asarray(view)[:nbytes].view(dtype).reshape(shape)

    def revoke(self) -> None:
        """What the program still has of a lease must not be used any more."""
        self._is_open = False
        view = None if self._view is None else self._view()
        self._view = None
        if view is not None:
            view.is_revoked = True

    def poison(self) -> None:
        """Overwrite the bytes where the program still has views of them, so that it shows."""
        if any(True for _ in views_of(self)):
            ctypes.memset(self.address, _POISON, self.nbytes)

    def usable_at(self, address: int, nbytes: int) -> Usable | None:
        """As :class:`~streamflow.memory.page_locked.Owner` has it."""
        if not self._is_open:
            return None
        # Ops of another loop can't be waited for before it is released (rule R11).
        return self if not self.is_leased or self.pool.is_here() else Staged(None)


class _View:
    """The base object of arrays in pinned memory: memory lives as long as it does."""

    __slots__ = ("__array_interface__", "__weakref__", "_block", "is_revoked")

    def __init__(self, block: PinnedBlock, nbytes: int) -> None:
        self._block = block
        self.is_revoked = False
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
        }


class _Loan(_View):
    """The base object of a result array: its end is the end of the loan."""

    __slots__ = ()

    def __del__(self) -> None:
        self._block._is_open = False
        self._block.release()


def _shaped(view: _View, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # As bytes first: the array interface cannot express every structured dtype.
    return np.asarray(view).view(dtype).reshape(shape)


class Slab:
    """Pinned memory that small blocks are cut from, a page of one class at a time."""

    __slots__ = ("address", "is_counted", "nbytes", "num_live", "pages")

    def __init__(self, address: int, nbytes: int, is_counted: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.is_counted = is_counted
        self.num_live = 0
        self.pages: list[list[PinnedBlock]] = []

    def usable_at(self, address: int, nbytes: int) -> Usable | None:
        """As :class:`~streamflow.memory.page_locked.Owner` has it."""
        page, offset = divmod(address - self.address, PAGE_NBYTES)
        blocks = self.pages[page] if page < len(self.pages) else []
        at = offset // blocks[0].nbytes if blocks else 0
        if at >= len(blocks) or address + nbytes > blocks[at].address + blocks[at].nbytes:
            return None
        return blocks[at].usable_at(address, nbytes)


def views_of(memory: PinnedBlock | Slab) -> Iterator[_View]:
    """What programs still have of the memory; stale it may be, but it must not go yet."""
    blocks = [memory] if isinstance(memory, PinnedBlock) else chain(*memory.pages)
    for block in blocks:
        for known in block._views:
            view = known()
            if view is not None:
                yield view


def _passed_ticket() -> Ticket:
    line = Timeline(0, name="pinned")
    ticket = Ticket(0, None)
    line.advance(ticket, 1, None)
    line.retire(1)
    return ticket


_START = _passed_ticket()
"""What the first op on a lease follows."""
