"""Page-locked host memory, cached by size, under one byte budget.

Pinning and unpinning hold a driver-wide lock and may wait for running kernels, so
neither happens on the event loop: the loop only takes cached blocks.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streamflow.memory.numa import near
from streamflow.memory.page_locked import add_range, remove_range
from streamflow.memory.pinned_block import PAGE_NBYTES, PinnedBlock, Slab, views_of
from streamflow.scheduler.guards import guard
from streamflow.scheduler.reaper import post_orphan

__all__ = ["SMALL_NBYTES", "PinnedBlocks", "class_nbytes"]

SMALL_NBYTES = 64 << 10
"""Copies up to this size go through the loop itself (rule R1's bound)."""

_SLAB_NBYTES = 1 << 20
_FIRST_SLAB_NBYTES = 8 << 20
"""Pinned when a device is opened: a page for each small class, and outside the budget."""
_MIN_CLASS_NBYTES = 512
_CLASSES_UP_TO_NBYTES = 1 << 20
_WASTE = 8
"""Above the classes, a cached block serves a request that is at most 1/8 smaller."""


class PinnedBlocks:
    """Pinned blocks by size class. Thread-safe; the calls of the loop never pin or unpin.

    There are four classes per doubling from 512 bytes to 1 MiB (at most 1/4 of what is asked
    is wasted), then multiples of 64 KiB, where a cached block serves a request that is at most
    1/8 smaller. Blocks up to 64 KiB are cut from slabs.

    Parameters
    ----------
    allocate_blocking, free_blocking : callable
        The backend's verbs; called on worker threads only.
    budget_nbytes : int
        Bound of what is pinned, live and cached, but for the first slab; staging chunks do not
        count.
    numa_node : int, optional
        Pin near this node of the host.
    is_here : callable, optional
        Whether the caller runs on the loop whose ops use the leases.
    """

    def __init__(
        self,
        allocate_blocking: Callable[[int], int],
        free_blocking: Callable[[int], None],
        *,
        budget_nbytes: int,
        numa_node: int | None = None,
        is_here: Callable[[], bool] = lambda: True,
    ) -> None:
        self._allocate_blocking = allocate_blocking
        self._free_blocking = free_blocking
        self.budget_nbytes = budget_nbytes
        self.numa_node = numa_node
        self.is_here = is_here
        self._lock = threading.RLock()
        self._is_busy = False  # within the lock: a collection there may release a loan
        self._returned: deque[PinnedBlock] = deque()  # by such
        self._free: dict[int, list[PinnedBlock]] = {}  # by class; the last used comes last
        self._sizes: list[int] = []  # those above the classes that have a cached block
        self._to_unpin: list[PinnedBlock | Slab] = []  # counted no more
        self._unpinning = threading.Lock()
        self._slabs: list[Slab] = []
        self._holders: dict[int, object] = {}  # by address, of what users keep
        self._num_releases = 0
        self.is_closed = False
        self._is_off = False
        self.on_release: Callable[[], None] | None = None  # while somebody waits; any thread
        self.counted_nbytes = 0
        self.cached_nbytes = 0  # of counted_nbytes; without slabs
        self.num_live = 0
        self.num_acquired = 0
        self.num_pins = 0  # driver calls
        guard(self)

    # -- taking --------------------------------------------------------------------------------

    def try_acquire(self, nbytes: int, *, is_waiter: bool = False) -> PinnedBlock | None:
        """A cached block of at least ``nbytes``, or None without blocking.

        While somebody waits, only who ``is_waiter`` gets a large one.
        """
        try:
            with self._lock:  # not `_section`: this is the hot path of leases (P8)
                self._is_busy = True
                try:
                    if self.on_release is not None and not is_waiter and nbytes > SMALL_NBYTES:
                        return None
                    blocks = self._free.get(nbytes) or self._blocks_for(nbytes)
                    if not blocks:
                        return None
                    block = blocks.pop()
                    self.num_live += 1
                    self.num_acquired += 1
                    slab = block._slab
                    if slab is not None:
                        slab.num_live += 1
                    else:
                        self.cached_nbytes -= block.nbytes
                        if not blocks and block.nbytes > _CLASSES_UP_TO_NBYTES:
                            self._forget_size(block.nbytes)
                    return block
                finally:
                    self._is_busy = False
        finally:
            if self._returned:
                self._take_returned()

    @contextmanager
    def _section(self) -> Iterator[None]:
        """Within it nobody else changes the books, finalisers neither."""
        try:
            with self._lock:
                self._is_busy = True
                try:
                    yield
                finally:
                    self._is_busy = False
        finally:
            self._take_returned()

    def _take_returned(self) -> None:
        while self._returned:
            try:
                block = self._returned.popleft()
            except IndexError:  # another thread took the last one
                return
            self._give_back(block)

    def _tell(self) -> None:
        """Something came back. Without the lock: a loop has one as well, and finalisers in it."""
        on_release = self.on_release
        if on_release is not None:
            on_release()

    def _blocks_for(self, nbytes: int) -> list[PinnedBlock] | None:
        """Where a block for a request comes from, which is no class's own size as a rule."""
        size = class_nbytes(nbytes)
        blocks = self._free.get(size)
        if blocks:
            return blocks
        if size > SMALL_NBYTES:
            return self._similar(nbytes, size)
        return self._free[size] if self._cut_page(size) else None

    def _similar(self, nbytes: int, size: int) -> list[PinnedBlock] | None:
        """Cached blocks above the classes that waste little."""
        if size <= _CLASSES_UP_TO_NBYTES:
            return None
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes) or (self._sizes[at] - nbytes) * _WASTE > nbytes:
            return None
        return self._free[self._sizes[at]]

    def _cut_page(self, size: int) -> bool:
        for slab in self._slabs:
            start = len(slab.pages) * PAGE_NBYTES
            if start < slab.nbytes:
                first = slab.address + start
                blocks = [
                    PinnedBlock(self, address, size, slab)
                    for address in range(first, first + PAGE_NBYTES - size + 1, size)
                ]
                slab.pages.append(blocks)
                self._free.setdefault(size, []).extend(blocks)
                return True
        for slab in self._slabs:  # all of them are cut: anew, where nobody has any of it
            if slab.num_live == 0 and not any(True for _ in views_of(slab)):
                self._drop_pages(slab)
                slab.pages = []
                return self._cut_page(size)
        return False

    def _drop_pages(self, slab: Slab) -> None:
        """Have nobody take any block of an idle slab."""
        for page in slab.pages:
            gone, size = set(page), page[0].nbytes
            self._free[size] = [block for block in self._free[size] if block not in gone]

    def reserve(self, nbytes: int, *, is_waiter: bool = False) -> bool:
        """Set budget aside for a block of ``nbytes``, dropping cached ones; False if too little.

        While somebody waits, only who ``is_waiter`` gets any. Undone by :meth:`unreserve`,
        used up by :meth:`acquire_reserved_blocking`.
        """
        size = _growth_nbytes(nbytes)
        with self._section():
            if self.on_release is not None and not is_waiter:
                return False
            idle = sum(slab.nbytes for slab in self._idle_slabs())
            if self.counted_nbytes - self.cached_nbytes - idle + size > self.budget_nbytes:
                return False
            self.counted_nbytes += size
            self._evict(self.budget_nbytes - self.counted_nbytes)
            return True

    def unreserve(self, nbytes: int) -> None:
        """Give a reservation back."""
        with self._section():
            self.counted_nbytes -= _growth_nbytes(nbytes)
        self._tell()

    def acquire_reserved_blocking(self, nbytes: int) -> PinnedBlock:
        """A block of at least ``nbytes`` that was reserved; worker threads only."""
        block = self.try_acquire(nbytes, is_waiter=True)
        if block is not None:  # one came back meanwhile
            self.unreserve(nbytes)
            return block
        size = class_nbytes(nbytes)
        try:
            self.unpin_blocking()
            if size <= SMALL_NBYTES:
                return self._grow_blocking(nbytes)
            address = self._pin_blocking(size)
        except BaseException:
            self.unreserve(nbytes)
            raise
        block = PinnedBlock(self, address, size, None)
        add_range(address, size, block)
        with self._section():
            self.num_live += 1
            self.num_acquired += 1
        return block

    def prepare_blocking(self) -> None:
        """Pin what small copies of a new device need. Worker threads only."""
        self._slabs.append(self._slab_blocking(_FIRST_SLAB_NBYTES, is_counted=False))

    def _grow_blocking(self, nbytes: int) -> PinnedBlock:
        slab = self._slab_blocking(_SLAB_NBYTES, is_counted=True)
        with self._lock:  # before other threads take all of it
            self._slabs.append(slab)
            block = self.try_acquire(nbytes)
        assert block is not None
        return block

    def _slab_blocking(self, nbytes: int, *, is_counted: bool) -> Slab:
        slab = Slab(self._pin_blocking(nbytes), nbytes, is_counted)
        add_range(slab.address, nbytes, slab)
        return slab

    def _pin_blocking(self, nbytes: int) -> int:
        with near(self.numa_node):
            self.num_pins += 1
            try:
                return self._allocate_blocking(nbytes)
            except Exception:
                with self._section():
                    has_more = self._evict(-self.cached_nbytes)
                if not has_more:
                    raise
            self.unpin_blocking()  # it may be what is cached here that the driver lacks
            return self._allocate_blocking(nbytes)

    # -- giving back ---------------------------------------------------------------------------

    def _give_back(self, block: PinnedBlock) -> None:
        if self._is_off:  # before the lock, which nobody may be there to release
            return
        with self._lock:
            if self._is_busy:
                self._returned.append(block)
                return
            self._is_busy = True
            try:
                self._book_return(block)
            finally:
                self._is_busy = False
            slab, is_closed = block._slab, self.is_closed
            is_last = slab is None or slab.num_live == 0
        if self._returned:
            self._take_returned()
        if not is_closed:
            self._tell()
        elif is_last:  # the device is gone, and this may be a finaliser: for a later one (R12)
            self._leave(block if slab is None else slab)

    def _book_return(self, block: PinnedBlock) -> None:
        self.num_live -= 1
        self._holders.pop(block.address, None)
        block.is_leased = block._is_open = False
        block._region = None
        slab = block._slab
        if slab is not None:
            slab.num_live -= 1
        if self.is_closed:
            return
        blocks = self._free.get(block.nbytes)
        if blocks is None:
            blocks = self._free[block.nbytes] = []
        if slab is None:
            self.cached_nbytes += block.nbytes
            if not blocks and block.nbytes > _CLASSES_UP_TO_NBYTES:
                insort(self._sizes, block.nbytes)
        self._num_releases = block._last_used = self._num_releases + 1
        blocks.append(block)

    def trim(self, keep_nbytes: int = 0) -> int:
        """Take cached memory above ``keep_nbytes`` out, longest unused first; how much it is.

        :meth:`unpin_blocking` gives it back to the host.
        """
        with self._section():
            idle = sum(slab.nbytes for slab in self._idle_slabs())
            return self._evict(keep_nbytes - self.cached_nbytes - idle)

    def _evict(self, room_nbytes: int) -> int:
        """Take cached blocks out until ``room_nbytes`` is no longer negative."""
        evicted = 0
        while room_nbytes + evicted < 0:
            oldest = min(
                (blocks[0] for blocks in self._free.values() if blocks and not blocks[0]._slab),
                key=_last_used,
                default=None,
            )
            if oldest is None:
                break
            blocks = self._free[oldest.nbytes]
            del blocks[0]
            if not blocks and oldest.nbytes > _CLASSES_UP_TO_NBYTES:
                self._forget_size(oldest.nbytes)
            # Out of the cache now, so that nobody takes it before a thread unpins it.
            self._to_unpin.append(oldest)
            self.counted_nbytes -= oldest.nbytes
            self.cached_nbytes -= oldest.nbytes
            evicted += oldest.nbytes
        for slab in self._idle_slabs():
            if room_nbytes + evicted >= 0:
                break
            self._slabs.remove(slab)
            self._drop_pages(slab)
            self._to_unpin.append(slab)
            self.counted_nbytes -= slab.nbytes
            evicted += slab.nbytes
        return evicted

    def _idle_slabs(self) -> list[Slab]:
        return [slab for slab in self._slabs if slab.is_counted and slab.num_live == 0]

    def _forget_size(self, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, size)]

    def unpin_blocking(self) -> None:
        """Unpin what was taken out. Worker threads only: it waits for running kernels.

        When it returns, no other thread is at it either: what is pinned is within the budget.
        """
        with self._unpinning:
            for _ in range(len(self._to_unpin)):  # what has views comes again later
                memory = self._to_unpin.pop()
                if any(True for _ in views_of(memory)):
                    self._leave(memory)
                else:
                    self._unpin(memory.address)

    def _unpin(self, address: int) -> None:
        remove_range(address)
        self._free_blocking(address)

    def _leave(self, memory: PinnedBlock | Slab) -> None:
        """Have it unpinned once no view of it lives: next time, or by a later device (R12)."""
        for view in views_of(memory):
            # Look again when it is gone: there may be more.
            weakref.finalize(view, self._leave, memory).atexit = False
            return
        if self.is_closed:
            address = memory.address
            post_orphan(lambda: self._unpin(address))
        else:
            self._to_unpin.append(memory)

    def close_blocking(self) -> None:
        """Unpin what is cached. Blocks still on loan are unpinned after they come back."""
        with self._section():
            self.is_closed = True
            self._to_unpin += [
                block for blocks in self._free.values() for block in blocks if not block._slab
            ]
            self._to_unpin += [slab for slab in self._slabs if slab.num_live == 0]
            self._free.clear()
            self._slabs.clear()
            self._sizes.clear()
            self.cached_nbytes = 0
        self.unpin_blocking()

    # -- looking -------------------------------------------------------------------------------

    def holders(self) -> list[object]:
        """Who holds each live block, as given to :meth:`PinnedBlock.as_result`; else None."""
        with self._section():
            known = list(self._holders.values())
            return known + [None] * (self.num_live - len(known))

    def on_fork(self) -> None:
        """Take nothing back any more: the blocks are the parent's."""
        self._is_off = True

    def on_exit(self) -> tuple[()]:
        """Take nothing back any more: results may outlive what this would need."""
        self._is_off = True
        return ()


def _last_used(block: PinnedBlock) -> int:
    return block._last_used


def _growth_nbytes(nbytes: int) -> int:
    """What the pool grows by for a block of ``nbytes``."""
    size = class_nbytes(nbytes)
    return size if size > SMALL_NBYTES else _SLAB_NBYTES


def class_nbytes(nbytes: int) -> int:
    """The size of the block that a request of ``nbytes`` gets, if none is reused.

    Examples
    --------
    >>> [class_nbytes(n) for n in (1, 513, 700_000, 1_100_000)]
    [512, 640, 786432, 1114112]
    """
    if nbytes <= _MIN_CLASS_NBYTES:
        return _MIN_CLASS_NBYTES
    if nbytes <= _CLASSES_UP_TO_NBYTES:
        step = 1 << ((nbytes - 1).bit_length() - 3)  # four to the next power of two
        return -(-nbytes // step) * step
    return -(-nbytes // SMALL_NBYTES) * SMALL_NBYTES
