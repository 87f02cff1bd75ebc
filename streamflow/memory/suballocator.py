"""What pool, arena and fixed-size resources share: an upstream, a lock, growth, and figures.

The lock is never held while the upstream is called, so an upstream may call back in, wait for
another thread's frees or fail, and finds everything in order. One thread at a time has it grow.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any, ClassVar, TypeVar

from streamflow.errors import Closed, OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.figures import (
    Figures,
    SubAllocatorInfo,
    free_nbytes,
    largest_free_nbytes,
    pending_nbytes,
)
from streamflow.memory.order import FreePoint, StreamOrder
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place
from streamflow.memory.spans import Region, Shelf, Span
from streamflow.memory.store import NO_STREAM, Store

__all__ = ["SubAllocator", "round_up"]


_Result = TypeVar("_Result")


class SubAllocator(Figures, DeviceMemoryResource):
    """Cuts memory of an upstream into blocks, and hands freed ones on in stream order.

    A block freed on one stream may be handed to another: it waits for that free, unless it
    comes after it anyway.

    Attributes
    ----------
    upstream_mr : DeviceMemoryResource
    """

    _shelf_type: ClassVar[type[Shelf]]
    """How a free span is chosen."""

    def __init__(self, upstream_mr: DeviceMemoryResource, device: Any = None) -> None:
        if not isinstance(upstream_mr, DeviceMemoryResource):
            raise TypeError(f"upstream_mr takes a memory resource, found {upstream_mr!r}")
        super().__init__(upstream_mr.device if device is None else device)
        below = upstream_mr.device
        if below is not None and self.device != below:
            raise ValueError(
                f"device={self.device}, but the upstream {upstream_mr!r} has its memory on "
                f"device {below}"
            )
        self.upstream_mr = upstream_mr
        self.is_device_accessible = upstream_mr.is_device_accessible
        self.is_host_accessible = upstream_mr.is_host_accessible
        self._region_alignment = ALIGNMENT
        self._order = StreamOrder()
        self._is_busy = False
        # Frees by finalisers that ran in this thread in the middle of another call.
        self._late: deque[tuple[Piece, Place]] = deque()
        self._growing = threading.RLock()
        self._main: Store | None = None
        self._live_nbytes = 0
        self._reserved_nbytes = 0
        self._num_upstream_calls = 0

    def get_upstream(self) -> DeviceMemoryResource:
        """The resource that the memory comes from."""
        return self.upstream_mr

    # -- figures -----------------------------------------------------------------------------

    def info(self) -> SubAllocatorInfo:
        """Every figure, taken at one moment. Asks the device which frees have passed."""
        return self._locked(self._take_info)

    @property
    def live_nbytes(self) -> int:
        """Bytes in use, rounding included."""
        return self._live_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the upstream."""
        return self._reserved_nbytes

    # -- what a class says -------------------------------------------------------------------

    @abstractmethod
    def _find(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """A span that takes no new memory and no wait for the program's work. Locked."""

    @abstractmethod
    def _find_waiting(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """One that takes such a wait. Locked."""

    @abstractmethod
    def _growths(self, nbytes: int) -> list[int]:
        """What to ask the upstream for, the wanted first, the least that would do last. Locked."""

    def _on_region(self, region: Region) -> None:
        """New memory has come. Locked."""

    def _defragment(self) -> None:
        """Make what is wholly free a region without a span in use. Locked."""

    def _need(self, nbytes: int, alignment: int) -> int:
        """The size of a region that surely has room for such a block."""
        return nbytes + max(0, alignment - ALIGNMENT)

    # -- the calls ---------------------------------------------------------------------------

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        rounded = (nbytes + 255) & -256
        with self._lock:
            if self._is_busy:
                raise RuntimeError(f"a finaliser allocates of {self!r} in the middle of a call")
            self._is_busy = True
            try:
                span = self._find(place, rounded, alignment)
            finally:
                self._is_busy = False
            if span is not None:
                capacity = span.nbytes
                self._live_nbytes += capacity
            if self._late:
                self._give_late()
        if span is None:
            span = self._take_slowly(place, rounded, alignment, nbytes)
            capacity = span.nbytes
        return Piece(self, span.address, nbytes, alignment, capacity, None, span)

    def _give(self, piece: Piece, place: Place) -> None:
        with self._lock:
            if self._is_busy:
                self._late.append((piece, place))
                return
            self._is_busy = True
            try:
                self._put_back(piece, place)
            except BaseException:
                self._keep(piece, place)
                raise
            finally:
                self._is_busy = False
            if self._late:
                self._give_late()
        if self._is_closed:
            try:
                self.trim()
            except Exception:  # the block is back all the same; what stays goes with the next one
                getLogger("streamflow").exception("giving memory back to the upstream failed")

    def _put_back(self, piece: Piece, place: Place) -> None:
        span: Span = piece.note
        region, space = span.region, self._space
        if space is None or region.store.regions.get(region.address) is not region:
            return  # all of it was given back when its device closed
        point = self._order.mark(space, place)
        self._live_nbytes -= span.nbytes
        region.store.give(span, point)

    def _give_late(self) -> None:
        """Free what could not be freed at its moment. Called with the lock held."""
        while self._late:
            piece, place = self._late.popleft()
            self._is_busy = True
            try:
                self._put_back(piece, place)
            except Exception:  # the next call tries again, and tells
                self._keep(piece, place)
            finally:
                self._is_busy = False

    def _keep(self, piece: Piece, place: Place) -> None:
        """Have the next call free what could not be freed; for its owner it is back."""
        space = self._space
        if space is None:
            return
        again = Piece(
            self,
            piece.address,
            piece.nbytes,
            piece.alignment,
            piece.capacity_nbytes,
            None,
            piece.note,
        )
        piece.address = 0
        space.count_blocks(1)
        self._dropped.append((again, space, place.stream, None))

    def _take_slowly(self, place: Place, nbytes: int, alignment: int, asked_nbytes: int) -> Span:
        span = self._grow(place, nbytes, alignment)
        if span is None:
            span = self._locked(lambda: self._counted(self._find_waiting(place, nbytes, alignment)))
        if span is None:
            self.trim()
            span = self._grow(place, nbytes, alignment)
        if span is None:
            raise OutOfDeviceMemory(self._describe_shortage(asked_nbytes))
        return span

    def _grow(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """New memory, and a span of it; None if the upstream has none."""

        def find() -> Span | None:
            return self._counted(self._find(place, nbytes, alignment))

        with self._growing:  # one at a time: each doubles what is there
            span = self._locked(find)  # another thread may have grown meanwhile
            if span is not None:
                return span
            need = self._need(nbytes, alignment)
            for size in self._locked(lambda: self._growths(need)):
                home = place
                if self.upstream_mr.is_stream_ordered:
                    # On a stream without the program's work, so that everybody can have it.
                    home = self._known_space().sync_place()
                try:
                    self._num_upstream_calls += 1
                    piece = self.upstream_mr.take(size, self._region_alignment, home)
                except MemoryError:
                    continue
                try:
                    return self._locked(partial(self._add, piece, home, find))
                except BaseException:
                    if piece.address not in (self._main.regions if self._main else ()):
                        self._give_up(piece, home)
                    raise
        return None

    def _add(self, piece: Piece, home: Place, find: Callable[[], Span | None]) -> Span | None:
        store = self._main
        assert store is not None
        points: tuple[FreePoint, ...] = ()
        if self.upstream_mr.is_stream_ordered:
            points = (self._order.mark(self._known_space(), home),)
            store.quiet_uid = home.line.uid
        nbytes = piece.nbytes & -ALIGNMENT
        region = store.add_region(piece.address, nbytes, piece, points, home.line.uid)
        self._reserved_nbytes += nbytes
        self._on_region(region)
        return find()

    # -- giving back -------------------------------------------------------------------------

    def trim(self) -> None:
        """Give every wholly free piece of the upstream's back to it.

        Ordering
        --------
        Returns at once. What streams are not done with is given back in the order of a stream
        that comes after them.
        """
        super().trim()
        self._locked(lambda: None)  # what comes late is free then
        self._locked(self._defragment)
        while True:
            taken = self._locked(self._take_unused)
            if taken is None:
                return
            self._give_region(*taken)

    def _take_unused(self) -> tuple[Piece, tuple[FreePoint, ...]] | None:
        store = self._main
        for region in store.unused_regions() if store is not None else ():
            assert store is not None
            points = store.remove_region(region)
            self._reserved_nbytes -= region.nbytes
            return region.source, points
        return None

    def _give_region(self, piece: Piece, points: tuple[FreePoint, ...]) -> None:
        try:
            place = self._known_space().release_place()
            self._locked(lambda: self._order.put_after(place, points))
            self._give_up(piece, place)
        except BaseException:
            if piece.address:  # else it is back all the same
                self._locked(lambda: self._put_region_back(piece, points))
            raise
        self._locked(lambda: self._store().drop(points))

    def _give_up(self, piece: Piece, place: Place) -> None:
        self._num_upstream_calls += 1
        self.upstream_mr.give(piece, place)

    def _put_region_back(self, piece: Piece, points: tuple[FreePoint, ...]) -> None:
        nbytes = piece.nbytes & -ALIGNMENT
        uid = (
            points[0].uid if len(points) == 1 else NO_STREAM
        )  # no stream comes after several of them
        region = self._store().add_region(piece.address, nbytes, piece, points, uid)
        self._reserved_nbytes += nbytes
        self._on_region(region)

    def _on_space_closing(self) -> None:
        """Everything goes back, in use or not: the device has drained."""
        store, space = self._main, self._space
        with self._lock:
            regions = list(store.regions.values()) if store is not None else []
            self._forget()
            self._space = None
        if space is None or self.upstream_mr._space is not space:
            return  # the upstream's own turn came first: it has given everything back
        errors: list[Exception] = []
        for region in regions:
            try:
                self._give_up(region.source, space.sync_place())
            except Exception as error:  # the others are to go back all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def _forget(self) -> None:
        self._main = None
        self._order = StreamOrder()
        self._dropped.clear()
        self._late.clear()
        self._live_nbytes = self._reserved_nbytes = 0

    # -- inside ------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return self.upstream_mr._depth + 1

    def _is_empty(self) -> bool:
        return not self._reserved_nbytes

    def _store(self) -> Store:
        """The store that the upstream's memory goes to."""
        store = self._main
        if store is None:
            if self._space is None:
                raise Closed(f"{self!r}: its device was closed")
            store = self._main = self._make_store()
        return store

    def _make_store(self) -> Store:
        assert self._space is not None
        return Store(self._space, self._order, self._shelf_type)

    def _stores(self) -> list[Store]:
        return [] if self._main is None else [self._main]

    def _counted(self, span: Span | None) -> Span | None:
        if span is not None:
            self._live_nbytes += span.nbytes
        return span

    def _locked(self, action: Callable[[], _Result]) -> _Result:
        """``action()`` under the lock; finalisers that free meanwhile come after it."""
        with self._lock:
            if self._is_busy:
                raise RuntimeError(f"a finaliser uses {self!r} in the middle of a call")
            self._is_busy = True
            try:
                return action()
            finally:
                self._is_busy = False
                if self._late:
                    self._give_late()

    def _take_info(self) -> SubAllocatorInfo:
        stores = self._stores()
        pending = sum(map(pending_nbytes, stores))
        return SubAllocatorInfo(
            live_nbytes=self._live_nbytes,
            free_nbytes=sum(map(free_nbytes, stores)) - pending,
            pending_nbytes=pending,
            reserved_nbytes=self._reserved_nbytes,
            largest_free_nbytes=max(map(largest_free_nbytes, stores), default=0),
            num_upstream_calls=self._num_upstream_calls,
            num_waits=sum(store.num_waits for store in stores),
        )

    def _describe_shortage(self, nbytes: int) -> str:
        found = self.info()
        return (
            f"{self!r} cannot give {nbytes} bytes: of {found.reserved_nbytes} bytes it has "
            f"{found.live_nbytes} in use, {found.pending_nbytes} pending behind work on the "
            f"device and {found.free_nbytes} free, the largest hole of {found.largest_free_nbytes};"
            f" {self.upstream_mr!r} has no more; free blocks, or raise the limit"
        )


def round_up(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-nbytes // multiple) * multiple
