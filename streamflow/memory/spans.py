"""Stretches of memory, and the shelves that free ones lie on: each by its own way of choosing.

Spans of one region are linked by address, so a span knows its neighbours without a search. A
shelf holds the free ones that one stream may use without a wait, in the order of their frees.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from streamflow.memory.order import FreePoint

__all__ = ["AddressShelf", "FifoShelf", "Region", "Shelf", "SizeShelf", "Span", "find_run"]

_NUM_LOOKS = 8
"""How many sizes, or spans of the request's own class, are looked at for a better choice."""


class Region:
    """Memory that came in one piece: from an upstream, or a superblock of an arena.

    Attributes
    ----------
    source : object
        The upstream's piece, or the span that this is the inside of.
    first : Span
        The one at the lowest address.
    num_live : int
        Spans in use.
    """

    __slots__ = ("address", "first", "nbytes", "num_live", "source", "store")

    def __init__(self, address: int, nbytes: int, source: Any, store: Any) -> None:
        self.address = address
        self.nbytes = nbytes
        self.source = source
        self.store = store
        self.num_live = 0
        self.first = Span(self, address, nbytes, None, None)

    def __iter__(self) -> Iterator[Span]:
        span: Span | None = self.first
        while span is not None:
            yield span
            span = span.next


class Span:
    """A stretch of a region, free or in use.

    Attributes
    ----------
    shelf : Shelf or None
        Where it lies while free.
    points : tuple of FreePoint
        What its next user comes after; empty if nothing is left to wait for.
    inside : Region or None
        What an arena has made of it.
    """

    __slots__ = ("address", "inside", "nbytes", "next", "points", "prev", "region", "shelf")

    def __init__(
        self, region: Region, address: int, nbytes: int, prev: Span | None, next_: Span | None
    ) -> None:
        self.region = region
        self.address = address
        self.nbytes = nbytes
        self.prev = prev
        self.next = next_
        self.shelf: Shelf | None = None
        self.points: tuple[FreePoint, ...] = ()
        self.inside: Region | None = None


class Shelf(Protocol):
    """Free spans.

    Attributes
    ----------
    spans : dict
        As a set, in the order of their frees.
    joinable : dict
        Spans here that may have a neighbour here behind them: to be joined when room is wanted.
    touching : dict
        The same where one of the two lies on the shelf of what is free for all.
    """

    spans: dict[Span, None]
    joinable: dict[Span, None]
    touching: dict[Span, None]

    def add(self, span: Span, /) -> None: ...

    def remove(self, span: Span, /) -> None: ...

    def cut(self, span: Span, nbytes: int, /) -> None:
        """Take the first bytes of a span away; it stays where it is in the order of frees."""

    def find(self, nbytes: int, /) -> Span | None:
        """A span of at least that size; it stays here."""

    def fitting(self, nbytes: int, /) -> Iterator[Span]:
        """A few spans that would do, the best first; of equal ones the one freed first."""


class SizeShelf:
    """Best fit: distinct sizes in order, and for each its spans, the last freed one first."""

    __slots__ = ("_by_size", "_sizes", "joinable", "spans", "touching")

    def __init__(self) -> None:
        self.spans: dict[Span, None] = {}
        self.joinable: dict[Span, None] = {}
        self.touching: dict[Span, None] = {}
        self._sizes: list[int] = []
        self._by_size: dict[int, dict[Span, None]] = {}

    def add(self, span: Span) -> None:
        self.spans[span] = None
        self._index(span, span.nbytes)

    def remove(self, span: Span) -> None:
        del self.spans[span]
        self._unindex(span, span.nbytes)

    def cut(self, span: Span, nbytes: int) -> None:
        self._unindex(span, span.nbytes)
        span.address += nbytes
        span.nbytes -= nbytes
        self._index(span, span.nbytes)

    def find(self, nbytes: int) -> Span | None:
        same = self._by_size.get(nbytes)
        if same is None:
            sizes = self._sizes
            if not sizes or sizes[-1] < nbytes:
                return None
            same = self._by_size[sizes[bisect_left(sizes, nbytes)]]
        return next(reversed(same))

    def fitting(self, nbytes: int) -> Iterator[Span]:
        sizes = self._sizes
        first = bisect_left(sizes, nbytes)
        for size in sizes[first : first + _NUM_LOOKS]:
            yield next(iter(self._by_size[size]))

    def _index(self, span: Span, size: int) -> None:
        same = self._by_size.get(size)
        if same is None:
            self._by_size[size] = {span: None}
            insort(self._sizes, size)
        else:
            same[span] = None

    def _unindex(self, span: Span, size: int) -> None:
        same = self._by_size[size]
        if len(same) > 1:
            del same[span]
        else:
            del self._by_size[size]
            sizes = self._sizes
            del sizes[bisect_left(sizes, size)]


class FifoShelf:
    """Spans of one size, the one freed first comes first."""

    __slots__ = ("joinable", "spans", "touching")

    def __init__(self) -> None:
        self.spans: dict[Span, None] = {}
        self.joinable: dict[Span, None] = {}
        self.touching: dict[Span, None] = {}

    def add(self, span: Span) -> None:
        self.spans[span] = None

    def remove(self, span: Span) -> None:
        del self.spans[span]

    def cut(self, span: Span, nbytes: int) -> None:
        span.address += nbytes
        span.nbytes -= nbytes

    def find(self, nbytes: int) -> Span | None:
        return next(iter(self.spans), None)

    def fitting(self, nbytes: int) -> Iterator[Span]:
        return islice(self.spans, 1)


class AddressShelf:
    """First fit by address, by classes of doubling size.

    Every span of a larger class fits, so of each only the lowest address is looked at; of the
    request's own class the first few, and all of them only where nothing else fits.
    """

    __slots__ = ("_by_address", "_classes", "_mask", "joinable", "spans", "touching")

    def __init__(self) -> None:
        self.spans: dict[Span, None] = {}
        self.joinable: dict[Span, None] = {}
        self.touching: dict[Span, None] = {}
        self._by_address: dict[int, Span] = {}
        self._classes: dict[int, list[int]] = {}  # addresses, ascending
        self._mask = 0  # which classes have any

    def add(self, span: Span) -> None:
        self.spans[span] = None
        self._index(span)

    def remove(self, span: Span) -> None:
        del self.spans[span]
        self._unindex(span)

    def cut(self, span: Span, nbytes: int) -> None:
        order, address = span.nbytes.bit_length(), span.address
        if (span.nbytes - nbytes).bit_length() != order:
            self._unindex(span)
            span.address += nbytes
            span.nbytes -= nbytes
            self._index(span)
            return
        # Of the same class, and no other lies between: it takes the place that it had.
        span.address += nbytes
        span.nbytes -= nbytes
        del self._by_address[address]
        self._by_address[span.address] = span
        addresses = self._classes[order]
        addresses[bisect_left(addresses, address)] = span.address

    def find(self, nbytes: int) -> Span | None:
        by_address, classes = self._by_address, self._classes
        order = nbytes.bit_length()
        found = -1
        own = classes.get(order)
        if own is not None:
            for address in own[:_NUM_LOOKS]:
                if by_address[address].nbytes >= nbytes:
                    found = address
                    break
        mask = self._mask >> (order + 1) << (order + 1)
        while mask:
            lowest = mask & -mask
            mask ^= lowest
            address = classes[lowest.bit_length() - 1][0]
            if address < found or found < 0:
                found = address
        if found < 0 and own is not None:
            for address in own[_NUM_LOOKS:]:
                if by_address[address].nbytes >= nbytes:
                    found = address
                    break
        return None if found < 0 else by_address[found]

    def fitting(self, nbytes: int) -> Iterator[Span]:
        oldest = next(iter(self.spans), None)
        if oldest is not None and oldest.nbytes >= nbytes:
            yield oldest
        first = self.find(nbytes)
        if first is not None and first is not oldest:
            yield first

    def _index(self, span: Span) -> None:
        order = span.nbytes.bit_length()
        self._by_address[span.address] = span
        addresses = self._classes.get(order)
        if addresses is None:
            self._classes[order] = [span.address]
            self._mask |= 1 << order
        else:
            insort(addresses, span.address)

    def _unindex(self, span: Span) -> None:
        order, address = span.nbytes.bit_length(), span.address
        del self._by_address[address]
        addresses = self._classes[order]
        if len(addresses) > 1:
            del addresses[bisect_left(addresses, address)]
        else:
            del self._classes[order]
            self._mask ^= 1 << order


def find_run(regions: Iterable[Region], nbytes: int) -> list[Span] | None:
    """Free neighbours that are ``nbytes`` together: the first such, and no more than needed."""
    for region in regions:
        run: list[Span] = []
        total = 0
        for span in region:
            if span.shelf is None:
                run, total = [], 0
                continue
            run.append(span)
            total += span.nbytes
            if total >= nbytes:
                while total - run[0].nbytes >= nbytes:
                    total -= run.pop(0).nbytes
                return run
    return None
