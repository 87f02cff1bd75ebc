"""Where free memory is looked for, in which order, and when its next user has to wait.

For a request on stream A, in the order of the driver's own pools: what was freed on A; what is
free for all; what A comes after anyway; what has passed since; then, after the caller has tried
new memory, what another stream is not done with, with a wait for exactly that (rule R4).
Not thread-safe: the resource's lock is held around every call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from streamflow.memory.order import FreePoint, StreamOrder
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place, Space
from streamflow.memory.spans import Region, Shelf, Span, find_run
from streamflow.scheduler.timeline import Timeline, needed_waits

__all__ = ["NO_STREAM", "Store"]

NO_STREAM = -2
"""Instead of a stream's id, for what no stream may use without a wait."""

_NUM_RETIRED_MAX = 256
"""How many spans one call moves to those that are free for all: bounds what a call takes."""
_NOWHERE = Timeline(-1)


class Store:
    """Regions, and the spans they are cut into.

    Parameters
    ----------
    space : Space
    order : StreamOrder
        Of all stores of the resource.
    make_shelf : callable
        How a span is chosen.
    joins : bool
        Whether free neighbours become one.
    keeps_points : bool
        Whether a span in use keeps what it comes after, for those who hand parts of it on.
    """

    def __init__(
        self,
        space: Space,
        order: StreamOrder,
        make_shelf: Callable[[], Shelf],
        *,
        joins: bool = True,
        keeps_points: bool = False,
    ) -> None:
        self._space = space
        self.order = order
        self._make_shelf = make_shelf
        self._joins = joins
        self._keeps_points = keeps_points
        self.ready = make_shelf()  # free for all
        self.shelves: dict[int, Shelf] = {}  # by stream
        self.regions: dict[int, Region] = {}  # by address
        self.num_waits = 0
        self.quiet_uid = -1
        """A stream that never waits for the program's work for long: new memory comes there."""

    # -- handing out -----------------------------------------------------------------------

    def take(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """A span of ``nbytes`` (a multiple of 256) that need not be waited for."""
        need = nbytes if alignment <= ALIGNMENT else nbytes + alignment - ALIGNMENT
        shelf = self.shelves.get(place.line.uid)
        if shelf is not None:
            span = shelf.find(need)
            if span is None and shelf.joinable:
                self._join(shelf, shelf.joinable)
                span = shelf.find(need)
            if span is not None:
                return self._cut(span, nbytes, alignment)
        span = self.ready.find(need)
        if span is None:
            span = self._find_ordered(place, need)
            if span is None:
                return None
        return self._cut(span, nbytes, alignment)

    def take_waiting(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """One that another stream is not done with: ``place`` waits for that free, no more."""
        need = nbytes if alignment <= ALIGNMENT else nbytes + alignment - ALIGNMENT
        best: Span | None = None
        for shelf in self.shelves.values():
            span = next(shelf.fitting(need), None)
            if span is not None and (best is None or span.nbytes < best.nbytes):
                best = span
        if best is None:
            return None
        self._put_after(place, best.points)
        return self._cut(best, nbytes, alignment)

    def take_joined(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        """One made of neighbours that were freed on several streams; a walk over all there is."""
        if not self._joins:
            return None
        need = nbytes if alignment <= ALIGNMENT else nbytes + alignment - ALIGNMENT
        run = find_run(self.regions.values(), need)
        if run is None:
            return None
        points = tuple(point for span in run for point in span.points)
        self._put_after(place, points)
        first = run[0]
        for span in run:
            self._unshelve(span)
        for _ in run[1:]:
            self._absorb_next(first)
        return self._cut(self._shelve(first, self._shelf(place.line.uid)), nbytes, alignment)

    def give(self, span: Span, point: FreePoint) -> None:
        """Take a span back that was freed at ``point``."""
        span.region.num_live -= 1
        span.points = (point,)
        uid = point.timeline.uid
        shelf = self.shelves.get(uid)
        if shelf is None:
            shelf = self._shelf(uid)
        # Neighbours are joined only when room is wanted: until then each keeps its own point,
        # so that another stream waits for no more than it has to (R4).
        if self._joins:
            near = span.next
            if near is not None and near.shelf is not None:
                if near.shelf is shelf:
                    shelf.joinable[span] = None
                elif near.shelf is self.ready:
                    shelf.touching[span] = None
            near = span.prev
            if near is not None and near.shelf is not None:
                if near.shelf is shelf:
                    shelf.joinable[near] = None
                elif near.shelf is self.ready:
                    shelf.touching[near] = None
        span.shelf = shelf
        shelf.add(span)

    def put(self, span: Span, points: tuple[FreePoint, ...]) -> None:
        """Take a span back whose next user comes after all of ``points``."""
        span.region.num_live -= 1
        span.points = points
        uid = points[0].uid if len(points) == 1 else NO_STREAM
        self._shelve(span, self._shelf(uid) if points else self.ready)

    # -- regions -----------------------------------------------------------------------------

    def add_region(
        self, address: int, nbytes: int, source: Any, points: tuple[FreePoint, ...], uid: int
    ) -> Region:
        """Memory to hand out.

        Usable on the stream ``uid`` at once, elsewhere after ``points``; anywhere if there are
        none.
        """
        region = Region(address, nbytes, source, self)
        self.regions[address] = region
        span = region.first
        span.points = points
        self._shelve(span, self._shelf(uid) if points else self.ready)
        return region

    def split_region(self, region: Region, block_nbytes: int) -> None:
        """Cut a region that nothing was taken from into equal spans."""
        last = region.first
        shelf = last.shelf
        assert shelf is not None
        self._unshelve(last)
        points = last.points
        last.nbytes = block_nbytes
        last.shelf = shelf
        shelf.add(last)
        for address in range(
            region.address + block_nbytes, region.address + region.nbytes, block_nbytes
        ):
            span = Span(region, address, block_nbytes, last, None)
            last.next = last = span
            span.points = points
            for point in points:
                point.holds += 1
            span.shelf = shelf
            shelf.add(span)

    def unused_regions(self) -> list[Region]:
        """Those that are wholly free."""
        return [region for region in self.regions.values() if not region.num_live]

    def remove_region(self, region: Region) -> tuple[FreePoint, ...]:
        """Give up a region; what its next user comes after."""
        del self.regions[region.address]
        points: list[FreePoint] = []
        for span in region:
            points += span.points
            if span.shelf is not None:
                self._unshelve(span)
        return self._maximal(points)

    def drop(self, points: tuple[FreePoint, ...]) -> None:
        """Nobody comes after these any more."""
        for point in points:
            self.order.drop(self._space, point)

    # -- inside ------------------------------------------------------------------------------

    def _find_ordered(self, place: Place, need: int) -> Span | None:
        """What needs no wait although another stream freed it; the slower half of the search."""
        uid, is_implied = place.line.uid, self.order.is_implied
        for other, shelf in list(self.shelves.items()):
            if not shelf.spans:
                del self.shelves[other]  # streams come and go
            elif other != uid:
                for span in shelf.fitting(need):
                    if all(is_implied(place, point) for point in span.points):
                        return span
        found: Span | None
        if sum(self._retire(shelf) for shelf in self.shelves.values()):
            found = self.ready.find(need)
            if found is not None:
                return found
        own = self.shelves.get(uid)
        if own is not None and (own.touching or own.joinable):
            while own.touching or own.joinable:
                self._join(own, own.joinable)
                self._join(own, own.touching)
            found = own.find(need)
            if found is not None:
                return found
        quiet = self.shelves.get(self.quiet_uid)
        found = None if quiet is None else next(quiet.fitting(need), None)
        if found is not None:
            self._put_after(place, found.points)
        return found

    def _retire(self, shelf: Shelf) -> bool:
        """Make what has passed free for all."""
        spans, is_passed = shelf.spans, self.order.is_passed
        if not spans:
            return False
        # Asking the newest may settle all of them.
        for point in next(reversed(spans)).points:
            is_passed(point)
        passed: list[Span] = []
        for span in islice(spans, _NUM_RETIRED_MAX):
            if not all(is_passed(point) for point in span.points):
                break
            passed.append(span)
        for span in passed:
            self._unshelve(span)
            self.drop(span.points)
            span.points = ()
            self._shelve(span, self.ready)
        return bool(passed)

    def _put_after(self, place: Place, points: tuple[FreePoint, ...]) -> None:
        self.num_waits += self.order.put_after(place, points)

    def _shelf(self, uid: int) -> Shelf:
        shelf = self.shelves.get(uid)
        if shelf is None:
            shelf = self.shelves[uid] = self._make_shelf()
        return shelf

    def _shelve(self, span: Span, shelf: Shelf) -> Span:
        """Lay a free span on a shelf; what is free for all is joined at once. The span there."""
        if self._joins:
            ready = self.ready
            before = span.prev
            if before is not None and before.shelf is not None:
                if before.shelf is shelf is ready:
                    self._unshelve(before)
                    self._absorb_next(before)
                    span = before
                elif before.shelf is shelf:
                    shelf.joinable[before] = None
                elif before.shelf is ready:
                    shelf.touching[before] = None
                elif shelf is ready:
                    before.shelf.touching[before] = None
            after = span.next
            if after is not None and after.shelf is not None:
                if after.shelf is shelf is ready:
                    self._unshelve(after)
                    self._absorb_next(span)
                    beyond = span.next
                    if beyond is not None and beyond.shelf is not None:
                        beyond.shelf.touching[span] = None
                elif after.shelf is shelf:
                    shelf.joinable[span] = None
                elif after.shelf is ready:
                    shelf.touching[span] = None
                elif shelf is ready:
                    after.shelf.touching[span] = None
        span.shelf = shelf
        shelf.add(span)
        return span

    def _unshelve(self, span: Span) -> None:
        assert span.shelf is not None
        span.shelf.remove(span)
        span.shelf = None

    def _join(self, shelf: Shelf, entries: dict[Span, None]) -> None:
        """Join neighbours on ``shelf``, or there and on the shelf of what is free for all.

        Each entry is looked at once and forgotten, so the work is paid for by the frees.
        """
        homes = (shelf,) if entries is shelf.joinable else (shelf, self.ready)
        while entries:
            span, _ = entries.popitem()
            home = span.shelf
            if home is None or not any(home is each for each in homes):
                continue  # in use again, or joined to another
            after = span.next
            if after is None or after.shelf is None or not any(after.shelf is h for h in homes):
                continue
            if home is not shelf and after.shelf is not shelf:
                continue
            self._unshelve(span)
            self._unshelve(after)
            self._absorb_next(span)
            self._shelve(span, shelf)

    def _absorb_next(self, span: Span) -> None:
        """Make a span, and the one behind it, one; neither lies on a shelf."""
        after = span.next
        assert after is not None
        span.nbytes += after.nbytes
        span.next = after.next
        if after.next is not None:
            after.next.prev = span
        if after.points:
            span.points = self._maximal([*span.points, *after.points])

    def _maximal(self, points: list[FreePoint]) -> tuple[FreePoint, ...]:
        """Those that imply the rest; the others are dropped."""
        if len(points) < 2:
            return tuple(points)
        if len(points) == 2:  # two frees of one stream, mostly
            one, other = points
            if one.timeline is other.timeline:
                if one.position < other.position:
                    one, other = other, one
                self.order.drop(self._space, other)
                return (one,)
        maximal = {id(point) for point in needed_waits(_NOWHERE, points)}
        kept: list[FreePoint] = []
        for point in points:
            if id(point) in maximal:
                maximal.discard(id(point))  # a point may be held twice
                kept.append(point)
            else:
                self.order.drop(self._space, point)
        return tuple(kept)

    def _cut(self, span: Span, nbytes: int, alignment: int) -> Span:
        """Take ``nbytes`` of a free span into use, from its lowest aligned address on."""
        shelf = span.shelf
        assert shelf is not None
        region = span.region
        if alignment > ALIGNMENT:
            lead = -span.address % alignment
            if lead:
                front = self._split_front(span, lead, shelf)
                front.points = span.points
                for point in front.points:
                    point.holds += 1
                front.shelf = shelf
                shelf.add(front)
        region.num_live += 1
        if span.nbytes > nbytes:
            front = self._split_front(span, nbytes, shelf)
            if self._keeps_points:
                front.points = span.points
                for point in front.points:
                    point.holds += 1
            return front
        shelf.remove(span)
        span.shelf = None
        if span.points and not self._keeps_points:
            self.drop(span.points)
            span.points = ()
        return span

    def _split_front(self, span: Span, nbytes: int, shelf: Shelf) -> Span:
        """A new span of the first ``nbytes``; the rest stays the one it was, with its points."""
        region, before = span.region, span.prev
        front = Span(region, span.address, nbytes, before, span)
        if before is None:
            region.first = front
        else:
            before.next = front
        span.prev = front
        shelf.cut(span, nbytes)
        return front
