"""Page-locked host memory, cached by size, with a byte budget for what users keep.

Pinning and unpinning hold a driver-wide lock and may wait for running kernels, so
neither happens on the event loop: the loop only takes cached blocks.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from streamflow.scheduler.guards import guard
from streamflow.scheduler.reaper import post_orphan

__all__ = ["SMALL_NBYTES", "PinnedBlock", "PinnedPool"]

SMALL_NBYTES = 64 << 10
"""Copies up to this size go through the loop itself (rule R1's bound)."""

_SLAB_NBYTES = 1 << 20
_MIN_CLASS_NBYTES = 512


class PinnedBlock:
    """One pinned range on loan; back in its pool when :meth:`release` is called, once."""

    __slots__ = ("_memory", "address", "is_counted", "nbytes", "pool")

    def __init__(self, pool: PinnedPool, address: int, nbytes: int, is_counted: bool) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.is_counted = is_counted
        self._memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def bytes_view(self, nbytes: int, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes ``[offset, offset + nbytes)``; valid until the block is released."""
        return np.frombuffer(self._memory, np.uint8, nbytes, offset)

    def release(self) -> None:
        """Give the block back. Any thread; nothing in flight may still touch it (R6)."""
        self.pool._give_back(self)

    def as_result(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], holder: object
    ) -> np.ndarray[Any, Any]:
        """An ndarray that *is* this block; the block returns when the array is collected.

        ``holder`` says who asked for it: :meth:`PinnedPool.holders` tells.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        self.pool._holders[self.address] = holder
        # As bytes first: the array interface cannot express every structured dtype.
        return np.asarray(_Loan(self, nbytes)).view(dtype).reshape(shape)


class _Loan:
    """The base object of a result array: its end is the end of the loan."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: PinnedBlock, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
        }

    def __del__(self) -> None:
        self._block.release()


class PinnedPool:
    """Pinned blocks by size class: powers of two up to 64 KiB, then multiples of that.

    Parameters
    ----------
    allocate_blocking, free_blocking : callable
        The backend's verbs; called on worker threads only.
    budget_nbytes : int
        Bound of live and cached bytes that count; staging chunks do not.
    """

    def __init__(
        self,
        allocate_blocking: Callable[[int], int],
        free_blocking: Callable[[int], None],
        *,
        budget_nbytes: int,
    ) -> None:
        self._allocate_blocking = allocate_blocking
        self._free_blocking = free_blocking
        self.budget_nbytes = budget_nbytes
        self._lock = threading.RLock()  # re-entrant: a collection inside may release a loan
        self._free: dict[int, list[int]] = {}
        self._to_unpin: list[int] = []  # counted no more
        self._slabs: list[int] = []
        self._holders: dict[int, object] = {}  # by address, of the results that users keep
        self._is_closed = False
        self._is_off = False
        self.counted_nbytes = 0
        self.num_live = 0
        guard(self)

    def try_acquire(self, nbytes: int) -> PinnedBlock | None:
        """A cached block of at least ``nbytes``, or None without blocking."""
        size = _class_nbytes(nbytes)
        with self._lock:
            addresses = self._free.get(size)
            if not addresses:
                return None
            self.num_live += 1
            return PinnedBlock(self, addresses.pop(), size, size > SMALL_NBYTES)

    def reserve(self, nbytes: int) -> bool:
        """Set budget aside for a block of ``nbytes``, dropping cached ones; False if too little.

        Undone by :meth:`unreserve`, used up by :meth:`acquire_reserved_blocking`.
        """
        size = _class_nbytes(nbytes)
        if size <= SMALL_NBYTES:
            return True
        with self._lock:
            cached = sum(
                size * len(addresses)
                for size, addresses in list(self._free.items())
                if size > SMALL_NBYTES
            )
            if self.counted_nbytes - cached + size > self.budget_nbytes:
                return False
            self.counted_nbytes += size
            for cached_size, addresses in list(self._free.items()):
                while (
                    cached_size > SMALL_NBYTES
                    and addresses
                    and self.counted_nbytes > self.budget_nbytes
                ):
                    # Out of the cache now, so that nobody takes it before a thread unpins it.
                    self._to_unpin.append(addresses.pop())
                    self.counted_nbytes -= cached_size
            return True

    def holders(self) -> list[object]:
        """Who holds each live block, as given to :meth:`PinnedBlock.as_result`; else None."""
        with self._lock:
            known = list(self._holders.values())
            return known + [None] * (self.num_live - len(known))

    def unreserve(self, nbytes: int) -> None:
        """Give a reservation back."""
        size = _class_nbytes(nbytes)
        if size > SMALL_NBYTES:
            with self._lock:
                self.counted_nbytes -= size

    def acquire_reserved_blocking(self, nbytes: int) -> PinnedBlock:
        """A block of at least ``nbytes`` that was reserved; worker threads only."""
        block = self.try_acquire(nbytes)
        if block is not None:  # one came back meanwhile
            self.unreserve(nbytes)
            return block
        size = _class_nbytes(nbytes)
        if size <= SMALL_NBYTES:
            return self._carve_blocking(nbytes, size)
        try:
            self._unpin_blocking()
            address = self._allocate_blocking(size)
        except BaseException:
            self.unreserve(nbytes)
            raise
        with self._lock:
            self.num_live += 1
        return PinnedBlock(self, address, size, True)

    def acquire_blocking(self, nbytes: int) -> PinnedBlock:
        """A small block, pinned now if none is cached. Worker threads only."""
        assert nbytes <= SMALL_NBYTES
        return self.try_acquire(nbytes) or self._carve_blocking(nbytes, _class_nbytes(nbytes))

    def _carve_blocking(self, nbytes: int, size: int) -> PinnedBlock:
        block = None
        while block is None:  # another thread may take all of a slab
            slab = self._allocate_blocking(_SLAB_NBYTES)
            with self._lock:
                self._slabs.append(slab)
                self._free.setdefault(size, []).extend(range(slab, slab + _SLAB_NBYTES, size))
            block = self.try_acquire(nbytes)
        return block

    def close_blocking(self) -> None:
        """Unpin what is cached. Blocks still on loan are unpinned after they come back."""
        self._unpin_blocking()
        with self._lock:
            self._is_closed = True
            large = [
                address
                for size, addresses in list(self._free.items())
                if size > SMALL_NBYTES
                for address in addresses
            ]
            slabs = self._slabs if self.num_live == 0 else []
            self._free.clear()
            self._slabs = [] if slabs else self._slabs
        for address in (*large, *slabs):
            self._free_blocking(address)

    def _unpin_blocking(self) -> None:
        while self._to_unpin:
            try:
                address = self._to_unpin.pop()
            except IndexError:  # another thread took the last one
                return
            self._free_blocking(address)

    def on_fork(self) -> None:
        """Take nothing back any more: the blocks are the parent's."""
        self._is_off = True

    def on_exit(self) -> tuple[()]:
        """Take nothing back any more: results may outlive what this would need."""
        self._is_off = True
        return ()

    def _give_back(self, block: PinnedBlock) -> None:
        if self._is_off:  # before the lock, which nobody may be there to release
            return
        with self._lock:
            self.num_live -= 1
            self._holders.pop(block.address, None)
            if not self._is_closed:
                self._free.setdefault(block.nbytes, []).append(block.address)
                return
            last_slabs = self._slabs if self.num_live == 0 else []
            if last_slabs:
                self._slabs = []
        free = self._free_blocking
        # The device is gone, and this may be a finaliser: leave it to a later one (R12).
        for address in ([block.address] if block.is_counted else []) + last_slabs:
            post_orphan(lambda address=address: free(address))  # type: ignore[misc]


def _class_nbytes(nbytes: int) -> int:
    if nbytes <= _MIN_CLASS_NBYTES:
        return _MIN_CLASS_NBYTES
    if nbytes <= SMALL_NBYTES:
        return 1 << (nbytes - 1).bit_length()
    return -(-nbytes // SMALL_NBYTES) * SMALL_NBYTES
