"""An arena for each stream, over one that all share."""

from __future__ import annotations

from logging import getLogger
from typing import Any

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.figures import free_nbytes, largest_free_nbytes
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT, checked_size
from streamflow.memory.space import Place
from streamflow.memory.spans import AddressShelf, Span
from streamflow.memory.store import Store
from streamflow.memory.suballocator import SubAllocator, round_up

__all__ = ["ArenaMemoryResource"]

SUPERBLOCK_NBYTES = 1 << 20


class ArenaMemoryResource(SubAllocator):
    """First fit by address, with an arena for each stream.

    A stream's arena takes superblocks of 1 MiB from the shared one and cuts them up; what is
    larger than that comes from the shared one itself. A block freed on another stream goes back
    to the arena that it came from. Where nothing is found, superblocks without a block in use go
    back to the shared arena, whose neighbours are joined, and room in another stream's superblock
    will do; then the request fails.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    arena_size : int or str, optional
        What is taken with the first allocation, in bytes or as ``"1GiB"``, rounded up to a
        superblock; never more. None: half of what the device has free then.
    dump_log_on_failure : bool
        Whether a request that fails logs :meth:`dump`.
    device : Device or int, optional
    """

    _shelf_type = AddressShelf

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        arena_size: int | str | None = None,
        dump_log_on_failure: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        size = None if arena_size is None else checked_size(arena_size, "arena_size")
        if size == 0:
            raise ValueError("arena_size: at least 1 byte")
        self._arena_nbytes = None if size is None else round_up(size, SUPERBLOCK_NBYTES)
        self._dumps = bool(dump_log_on_failure)
        self._arenas: dict[int, Store] = {}  # by stream

    @property
    def largest_nbytes(self) -> int | None:
        """The arena's size, where one was named."""
        return self._arena_nbytes

    def dump(self) -> str:
        """Every arena in words: what is in use, free, and the largest hole."""
        found, rows = self.info(), self._locked(self._rows)
        head = (
            f"{self!r}: {found.reserved_nbytes} bytes, {found.live_nbytes} in use, "
            f"{found.free_nbytes} free, {found.pending_nbytes} pending, largest hole "
            f"{found.largest_free_nbytes}, fragmentation {found.fragmentation:.3f}"
        )
        lines = (
            f"  {name}: {num} superblocks or regions, {free} bytes free, largest hole {hole}"
            for name, num, free, hole in rows
        )
        return "\n".join((head, *lines))

    def _take_slowly(self, place: Place, nbytes: int, alignment: int, asked_nbytes: int) -> Span:
        try:
            return super()._take_slowly(place, nbytes, alignment, asked_nbytes)
        except OutOfDeviceMemory:
            if self._dumps:
                getLogger("streamflow").error("no room for %d bytes\n%s", asked_nbytes, self.dump())
            raise

    def _find(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        shared = self._main or self._store()
        if self._need(nbytes, alignment) > SUPERBLOCK_NBYTES:
            return self._settled(shared, shared.take(place, nbytes, alignment))
        arena = self._arenas.get(place.line.uid)
        if arena is not None:
            span = arena.take(place, nbytes, alignment)
            if span is not None:
                return span
        return self._open(
            place, shared.take(place, SUPERBLOCK_NBYTES, ALIGNMENT), nbytes, alignment
        )

    def _find_waiting(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        self._defragment()
        span = self._find(place, nbytes, alignment)
        if span is not None:
            return span
        shared = self._store()
        if self._need(nbytes, alignment) > SUPERBLOCK_NBYTES:
            span = shared.take_waiting(place, nbytes, alignment)
            if span is None:
                span = shared.take_joined(place, nbytes, alignment)
            return self._settled(shared, span)
        arena = self._arenas.get(place.line.uid)
        if arena is not None:
            span = arena.take_waiting(place, nbytes, alignment)
            if span is not None:
                return span
        block = shared.take_waiting(place, SUPERBLOCK_NBYTES, ALIGNMENT)
        if block is None:
            block = shared.take_joined(place, SUPERBLOCK_NBYTES, ALIGNMENT)
        if block is not None:
            return self._open(place, block, nbytes, alignment)
        # Rather another stream's superblock than none: many streams may hold a little each.
        for store in self._arenas.values():
            span = store.take(place, nbytes, alignment)
            if span is not None:
                return span
        for store in self._arenas.values():
            span = store.take_waiting(place, nbytes, alignment)
            if span is None:
                span = store.take_joined(place, nbytes, alignment)
            if span is not None:
                return span
        return None

    def _open(self, place: Place, block: Span | None, nbytes: int, alignment: int) -> Span | None:
        """Cut up a superblock that ``place`` comes after."""
        if block is None:
            return None
        uid = place.line.uid
        arena = self._arenas.get(uid)
        if arena is None:
            assert self._space is not None
            arena = self._arenas[uid] = Store(self._space, self._order, self._shelf_type)
        points, block.points = block.points, ()
        block.inside = arena.add_region(block.address, block.nbytes, block, points, uid)
        return arena.take(place, nbytes, alignment)

    def _defragment(self) -> None:
        """Give superblocks without a block in use back to the shared arena."""
        for uid, arena in list(self._arenas.items()):
            for region in arena.unused_regions():
                block: Span = region.source
                block.inside = None
                self._store().put(block, arena.remove_region(region))
            if not arena.regions:
                del self._arenas[uid]
                self._store().num_waits += arena.num_waits

    @staticmethod
    def _settled(shared: Store, span: Span | None) -> Span | None:
        if span is not None and span.points:
            shared.drop(span.points)
            span.points = ()
        return span

    def _growths(self, nbytes: int) -> list[int]:
        if self._main is not None and self._main.regions:
            return []
        size = self._arena_nbytes
        if size is not None:
            return [size] if nbytes <= size else []
        half = self._known_space().backend.memory_info()[0] // 2 & -SUPERBLOCK_NBYTES
        least = round_up(nbytes, SUPERBLOCK_NBYTES)
        sizes = [max(half, least)]
        while sizes[-1] > least:
            sizes.append(max(least, sizes[-1] // 2 & -SUPERBLOCK_NBYTES))
        return sizes

    def _make_store(self) -> Store:
        assert self._space is not None
        return Store(self._space, self._order, self._shelf_type, keeps_points=True)

    def _stores(self) -> list[Store]:
        return [*super()._stores(), *self._arenas.values()]

    def _forget(self) -> None:
        super()._forget()
        self._arenas = {}

    def _rows(self) -> list[tuple[str, int, int, int]]:
        named = [("shared", store) for store in super()._stores()]
        named += [(f"stream {uid}", arena) for uid, arena in self._arenas.items()]
        return [
            (name, len(store.regions), free_nbytes(store), largest_free_nbytes(store))
            for name, store in named
        ]
