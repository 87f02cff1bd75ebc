"""Where a sub-allocator's bytes are, and how its free ones are scattered."""

from __future__ import annotations

from dataclasses import dataclass

from streamflow.memory.order import FreePoint
from streamflow.memory.store import Store

__all__ = [
    "Figures",
    "SubAllocatorInfo",
    "free_nbytes",
    "largest_free_nbytes",
    "pending_nbytes",
]


@dataclass(frozen=True, slots=True)
class SubAllocatorInfo:
    """Where a sub-allocator's bytes are, at one moment.

    ``live + free + pending = reserved``.
    """

    live_nbytes: int
    """In use, rounding included."""
    free_nbytes: int
    """Free, and nothing on the device still uses it."""
    pending_nbytes: int
    """Freed, but the stream has not come that far."""
    reserved_nbytes: int
    """Taken from the upstream."""
    largest_free_nbytes: int
    """The longest stretch without a block in use."""
    num_upstream_calls: int
    """Allocations and frees asked of the upstream."""
    num_waits: int
    """Times a stream was made to wait for another."""

    @property
    def fragmentation(self) -> float:
        """1 - largest / free, pending bytes counted as free; 0 where nothing is free."""
        free = self.free_nbytes + self.pending_nbytes
        return 1 - self.largest_free_nbytes / free if free else 0.0


class Figures:
    """The figures of :meth:`info` one by one; several of them at one moment are to be had there."""

    def info(self) -> SubAllocatorInfo:
        """Every figure, taken at one moment."""
        raise NotImplementedError

    @property
    def live_nbytes(self) -> int:
        """Bytes in use, rounding included."""
        return self.info().live_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the upstream."""
        return self.info().reserved_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that are free and that nothing on the device still uses."""
        return self.info().free_nbytes

    @property
    def pending_nbytes(self) -> int:
        """Bytes freed on a stream that has not come that far."""
        return self.info().pending_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """The longest stretch without a block in use."""
        return self.info().largest_free_nbytes

    @property
    def fragmentation(self) -> float:
        """1 - largest / free; 0 where nothing is free."""
        return self.info().fragmentation

    @property
    def num_upstream_calls(self) -> int:
        """Allocations and frees asked of the upstream."""
        return self.info().num_upstream_calls

    @property
    def num_waits(self) -> int:
        """Times a stream was made to wait for another."""
        return self.info().num_waits


def pending_nbytes(store: Store) -> int:
    """Free, and not passed; asks the device. A walk over what streams have freed."""
    stuck: dict[int, int] = {}  # by timeline: the first position that is not passed

    def is_passed(point: FreePoint) -> bool:
        line, position = id(point.timeline), point.position
        if position >= stuck.get(line, position + 1):
            return point.is_known_passed()
        if store.order.is_passed(point):
            return True
        stuck[line] = position
        return False

    return sum(
        span.nbytes
        for shelf in store.shelves.values()
        for span in shelf.spans
        if not all(is_passed(point) for point in span.points)
    )


def free_nbytes(store: Store) -> int:
    """Not in use, pending or not."""
    shelves = (store.ready, *store.shelves.values())
    return sum(span.nbytes for shelf in shelves for span in shelf.spans)


def largest_free_nbytes(store: Store) -> int:
    """The longest stretch without a span in use."""
    largest = 0
    for region in store.regions.values():
        run = 0
        for span in region:
            inside = span.inside  # a superblock, which may be as good as free
            is_free = span.shelf is not None or (inside is not None and not inside.num_live)
            run = run + span.nbytes if is_free else 0
            largest = max(largest, run)
    return largest
