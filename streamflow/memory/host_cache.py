"""The blocks of a caching host allocator: which are live, cached, or wait to be unpinned."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

from streamflow.backends.base import Backend
from streamflow.errors import Closed, DeviceLost, OutOfDeviceMemory
from streamflow.memory.host_blocks import Cell, DrainPoint, Point, UsePoint, reraise
from streamflow.memory.host_ops import Used, op_points
from streamflow.memory.page_locked import add_range, remove_range
from streamflow.memory.sizes import quarter_class
from streamflow.memory.space import Place, Space
from streamflow.scheduler.guards import guard
from streamflow.scheduler.reaper import post_orphan

__all__ = ["INVALID_BIN", "HostCache", "Presence"]

INVALID_BIN = 2**32 - 1
_PATIENCE_S = 0.1


class _Lock:
    """Knows whether the calling thread has it, as it may in a finaliser that runs inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()


class _Lines:
    """Cells in the order they came, kept apart by the streams they wait for.

    Of those that wait for the same streams the first is ready before the others, so only
    the first of each is ever asked: a slow stream holds up no other's, and a search costs a
    query per stream rather than one per block.
    """

    def __init__(self) -> None:
        self._queues: dict[frozenset[int], deque[Cell]] = {}

    def add(self, cell: Cell) -> None:
        self._queues.setdefault(cell.key, deque()).append(cell)

    def remove(self, cell: Cell) -> None:
        queue = self._queues[cell.key]
        queue.remove(cell)  # the first, as a rule
        if not queue:
            del self._queues[cell.key]

    def heads(self) -> list[Cell]:
        """The first of each, the one that came first before the others."""
        return sorted((queue[0] for queue in self._queues.values()), key=lambda cell: cell.turn)


class Presence:
    """The allocator as a tenant of one device's memory."""

    _depth = 0

    def __init__(self, cache: HostCache, space: Space) -> None:
        self._cache = cache
        self._space = space

    def _reap(self) -> bool:
        return self._cache.reap()

    def _is_empty(self) -> bool:
        return not self._cache.is_waiting(self._space)

    def trim(self) -> None:
        """Pinned memory is the host's: giving it back would help nobody who lacks a device's."""
        self._cache.reclaim()

    def _on_space_closing(self) -> None:
        self._cache.on_space_closing(self._space)


class HostCache:
    """What a :class:`~streamflow.memory.caching_host.CachingHostAllocator` holds. Thread-safe.

    The driver is never called with the lock held.

    Parameters
    ----------
    max_cached_bytes : int
    is_telling : bool
        Print what it does.
    """

    def __init__(self, max_cached_bytes: int, is_telling: bool) -> None:
        self.max_cached_bytes = max_cached_bytes
        self.free_nbytes = self.live_nbytes = self.pending_nbytes = 0
        self.num_hits = self.num_misses = 0
        self.is_off = False
        self.is_abandoned = False
        self._is_telling = is_telling
        self._lock = _Lock()
        self._live: dict[int, Cell] = {}  # by address
        # By turn: the least recently used first. A dict would be searched for its first.
        self._cached: OrderedDict[int, Cell] = OrderedDict()
        self._bins: dict[int, _Lines] = {}
        self._pending: dict[int, Cell] = {}  # by address: out of the cache, not unpinned yet
        self._pending_lines = _Lines()
        self._dropped: deque[Cell] = deque()
        self._presences: dict[Space, Presence] = {}
        self._turn = 0
        guard(self)

    # -- for finalisers and the guards ---------------------------------------------------------

    def post(self, cell: Cell) -> None:
        """Have ``cell`` freed by whoever calls next. Takes no lock (rule R12)."""
        if self.is_off:
            return
        self._dropped.append(cell)
        presence = self._presences.get(cell.space)
        if presence is not None and cell.space.is_open:
            cell.space.dropped.append(presence)
        elif self.is_abandoned:
            post_orphan(self.clear)

    def abandon(self) -> None:
        """The allocator was dropped: what it has goes back by a later call. Takes no lock."""
        self.is_abandoned = True
        if self.is_off:
            return
        is_known = False
        for space, presence in tuple(self._presences.items()):
            if space.is_open:
                space.dropped.append(presence)
                is_known = True
        if not is_known:
            post_orphan(self.clear)

    def on_fork(self) -> None:
        """Take nothing back any more: the blocks are the parent's."""
        self.is_off = True

    def on_exit(self) -> tuple[()]:
        """Take nothing back any more: the process gives everything back."""
        self.is_off = True
        return ()

    # -- the calls -----------------------------------------------------------------------------

    def enter(self, space: Space) -> None:
        """Hear when this device closes."""
        if space not in self._presences:
            with self._lock:
                presence = self._presences.setdefault(space, Presence(self, space))
                space.tenants[id(presence)] = presence

    def take(
        self, space: Space, order: int, nbytes: int, num_asked: int, prepare: Callable[[Cell], None]
    ) -> bool:
        """Make a cell of ``nbytes`` live, of the cache or new; whether it was of the cache.

        ``prepare(cell)`` is called in the moment it becomes the caller's. May block.
        """
        self.collect()
        found = (
            None if order == INVALID_BIN else self._take_cached(space, order, num_asked, prepare)
        )
        if found is not None:
            if found.pinned_nbytes >= num_asked:
                return True
            self.tell(f"{found.pinned_nbytes} bytes at {found.address:#x} are too few of {nbytes}")
            self.reclaim()
        backend = space.backend
        pinned_nbytes = nbytes if order == INVALID_BIN else min(nbytes, quarter_class(num_asked))
        address = self._pin_blocking(backend, pinned_nbytes)
        cell = Cell(address, nbytes, pinned_nbytes, order, space, backend)
        add_range(address, pinned_nbytes, Used(cell))
        with self._lock:
            prepare(cell)
            cell.is_live = True
            self._live[address] = cell
            self.live_nbytes += nbytes
            self.num_misses += found is None
            self.num_hits += found is not None
        return found is not None

    def _take_cached(
        self, space: Space, order: int, num_asked: int, prepare: Callable[[Cell], None]
    ) -> Cell | None:
        """The one that serves the request; where too little of it is pinned, not live."""
        busy: set[frozenset[int]] = set()
        while True:
            with self._lock:
                lines = self._bins.get(order)
                heads = [] if lines is None else [(cell.turn, cell) for cell in lines.heads()]
            for turn, cell in heads:
                if cell.key in busy:
                    continue
                if not cell.is_ready():
                    busy.add(cell.key)
                    continue
                with self._lock:
                    if self._cached.get(turn) is not cell:
                        break  # another thread was faster, and may have freed it since
                    self._uncache(cell)
                    cell.points, cell.key, cell.space = (), frozenset(), space
                    if cell.pinned_nbytes < num_asked:
                        self._set_aside(cell)
                        return cell
                    prepare(cell)
                    cell.is_live = True
                    self._live[cell.address] = cell
                    self.live_nbytes += cell.nbytes
                    self.num_hits += 1
                return cell
            else:
                return None

    def _pin_blocking(self, backend: Backend, nbytes: int) -> int:
        doing = f"pinning {nbytes} bytes"
        try:
            return backend.allocate_pinned_blocking(nbytes)
        except Exception as error:
            if not isinstance(backend.translate(error, doing), OutOfDeviceMemory):
                reraise(backend, error, doing)
        self.tell(f"no memory for {nbytes} bytes: freeing the cache, then trying again")
        self.free_all_cached()
        # Behind a kernel, unpinning takes as long as that runs, and the caller may be a loop.
        end_s = monotonic() + _PATIENCE_S
        for space in tuple(self._presences):
            if space.is_open:
                space.wait_released_blocking(max(0.0, end_s - monotonic()))
        try:
            return backend.allocate_pinned_blocking(nbytes)
        except Exception as error:
            waiting = self.pending_nbytes
            reraise(backend, error, f"{doing} (cache empty, {waiting} bytes still in use)")

    def give(self, cell: Cell) -> None:
        """Take a live cell back. If this raises, it is live as before."""
        if self._lock.is_mine:  # a finaliser of the program's, in the middle of a change
            self._dropped.append(cell)
            return
        points = self._mark(cell)
        with self._lock:
            del self._live[cell.address]
            self.live_nbytes -= cell.nbytes
            cell.points = points
            cell.key = frozenset(point.uid for point in points)
            cell.uses, cell.regions, cell.is_live = {}, {}, False
            self._turn += 1
            cell.turn = self._turn
            if cell.bin != INVALID_BIN and cell.nbytes <= self.max_cached_bytes:
                while self.free_nbytes + cell.nbytes > self.max_cached_bytes:
                    oldest = next(iter(self._cached.values()))
                    self._uncache(oldest)
                    self._set_aside(oldest)
                self._cached[cell.turn] = cell
                self._bins.setdefault(cell.bin, _Lines()).add(cell)
                self.free_nbytes += cell.nbytes
            else:
                self._set_aside(cell)
        self.tell(f"returned {cell.nbytes} bytes at {cell.address:#x}")
        self.reclaim()

    def _mark(self, cell: Cell) -> tuple[Point, ...]:
        """Record this moment of every stream that uses the cell, and which ops still do."""
        points: list[Point] = list(op_points(cell))
        for point in points:
            self.enter(point.space)
        for space, stream in tuple(cell.uses.values()):
            try:
                points.append(_point(space, space.place(stream)))
            except Exception as error:
                doing = "freeing a pinned block"
                if not isinstance(error, Closed) and not (
                    space.is_open and isinstance(space.backend.translate(error, doing), DeviceLost)
                ):
                    for point in points:
                        point.finish()
                    reraise(space.backend, error, doing)
                # No event tells when its work has ended, though that still runs.
                points.append(DrainPoint(space, -id(cell)))
        return tuple(points)

    def free_all_cached(self) -> None:
        """Empty the cache. What is still in use is unpinned when it no longer is."""
        with self._lock:
            for cell in tuple(self._cached.values()):
                self._uncache(cell)
                self._set_aside(cell)
        self.reclaim()

    def reclaim(self) -> None:
        """Unpin what left the cache and isn't in use any more, off the loop (rule R1)."""
        passed: list[Cell] = []
        try:
            passed.extend(self._take_passed())
        finally:  # what was taken before a query failed, too
            if passed:
                self._unpin_later(passed)

    def _unpin_later(self, cells: list[Cell]) -> None:
        action = partial(self._unpin_blocking, cells)
        # The last to have had one of them; else any: a thread of a device's that is open.
        for space in (cells[-1].space, *self._presences):
            if space.is_open:
                space.release(action)
                return
        action()

    def _take_passed(self) -> Iterator[Cell]:
        while self._pending:
            with self._lock:
                heads = self._pending_lines.heads()
            ready = [cell for cell in heads if cell.is_ready()]
            if not ready:
                return
            for cell in ready:
                with self._lock:
                    is_mine = self._pending.get(cell.address) is cell  # no thread was faster
                    if is_mine:
                        del self._pending[cell.address]
                        self._pending_lines.remove(cell)
                        self.pending_nbytes -= cell.pinned_nbytes
                if is_mine:
                    yield cell

    def _unpin_blocking(self, cells: Iterable[Cell]) -> None:
        errors: list[Exception] = []
        for cell in cells:
            try:
                remove_range(cell.address)
                cell.backend.free_pinned_blocking(cell.address)
            except Exception as error:  # the others are to go back all the same
                if not isinstance(cell.backend.translate(error, "unpinning"), DeviceLost):
                    errors.append(error)
            else:
                self.tell(f"freed {cell.pinned_nbytes} bytes at {cell.address:#x}")
        if errors:
            raise errors[0]

    def collect(self) -> None:
        """Free what was dropped, and unpin what has waited long enough."""
        for _ in range(len(self._dropped)):
            try:
                cell = self._dropped.popleft()
            except IndexError:  # another thread took the last one
                break
            try:
                self.give(cell)
            except BaseException:
                self._dropped.append(cell)  # the next call tries again
                raise
        if self._pending:
            self.reclaim()

    def tell(self, line: str) -> None:
        """Print ``line``, where it is to be told. Not with the lock held."""
        if self._is_telling:
            print(
                f"CachingHostAllocator: {line}; {len(self._cached)} blocks cached "
                f"({self.free_nbytes} bytes), {len(self._live)} live ({self.live_nbytes} bytes)"
            )

    def is_live(self, cell: Cell) -> bool:
        """Whether it is in the program's hands."""
        return self._live.get(cell.address) is cell

    def note_use(self, cell: Cell, uid: int, space: Space, stream: Any) -> None:
        """The holder of ``cell`` uses it on ``stream``, too."""
        with self._lock:
            cell.uses[uid] = space, stream

    def cached(self) -> list[Cell]:
        """Those in the cache, by size and then by age."""
        with self._lock:
            return sorted(self._cached.values(), key=lambda cell: (cell.nbytes, cell.turn))

    def live(self) -> list[Cell]:
        """Those in the program's hands, by address."""
        with self._lock:
            return sorted(self._live.values(), key=lambda cell: cell.address)

    def _uncache(self, cell: Cell) -> None:
        del self._cached[cell.turn]
        self._bins[cell.bin].remove(cell)
        self.free_nbytes -= cell.nbytes

    def _set_aside(self, cell: Cell) -> None:
        self._pending[cell.address] = cell
        self._pending_lines.add(cell)
        self.pending_nbytes += cell.pinned_nbytes

    # -- for the devices -----------------------------------------------------------------------

    def reap(self) -> bool:
        """As a tenant: False where the allocator was dropped and something is left."""
        self.collect()
        if not self.is_abandoned:
            return True
        self.free_all_cached()
        return not (self._pending or self._dropped)

    def clear(self) -> None:
        """Give everything back that was dropped or cached."""
        self.collect()
        self.free_all_cached()

    def is_waiting(self, space: Space) -> bool:
        """Whether a device of ``space`` may still use something."""
        with self._lock:
            return any(
                use[0] is space for cell in self._live.values() for use in cell.uses.values()
            ) or any(
                point.space is space and not point.is_over
                for cells in (self._cached, self._pending)
                for cell in cells.values()
                for point in cell.points
            )

    def on_space_closing(self, space: Space) -> None:
        """The device has drained: nothing there uses any of it, and all of it outlives that."""
        with self._lock:
            self._presences.pop(space, None)
            for cell in self._live.values():
                cell.uses = {uid: use for uid, use in cell.uses.items() if use[0] is not space}
            for cells in (self._cached, self._pending):
                for cell in cells.values():
                    for point in cell.points:
                        if point.space is space:
                            point.finish()
        self._unpin_blocking(list(self._take_passed()))
        if self.is_abandoned:
            self.clear()


def _point(space: Space, place: Place) -> UsePoint:
    event = space.take_event(place.backend)
    try:
        place.stream.record(event)
    except BaseException:
        space.give_event(event, place.backend)
        raise
    return UsePoint(space, place.backend, event, place.line.uid)
