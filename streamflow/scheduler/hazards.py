"""Which earlier ops a read, a write or a free of device memory must come after (R3, R5).

A :class:`Region` remembers the last write and the reads since. Arrays made by
``split`` have regions of their own over one allocation; an op on one region also
looks at every region that overlaps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamflow.scheduler.timeline import Ticket

__all__ = ["Region", "add_unpassed"]

_THIN_AT = 8


class Region:
    """The hazards of a byte range of one allocation.

    Attributes
    ----------
    allocation : Ticket
        The op that allocated the memory.
    last_write : Ticket
        The latest write in program order; at first the allocation.
    reads : sequence of Ticket
        Reads in program order since ``last_write``, thinned to the latest per stream.
        Parked ones stay apart, since they have no position yet.
    overlapping : sequence of Region
        Every other region of the allocation that shares bytes with this one.
    """

    __slots__ = (
        "_thin_at",
        "allocation",
        "last_write",
        "overlapping",
        "reads",
        "start",
        "stop",
    )

    def __init__(self, allocation: Ticket, start: int, stop: int) -> None:
        self.allocation = allocation
        self.last_write = allocation
        self.reads: Sequence[Ticket] = ()  # a list once there are any
        self._thin_at = _THIN_AT
        self.overlapping: Sequence[Region] = ()  # a list once there are any
        self.start = start
        self.stop = stop

    def carve(self, root: Region, start: int, stop: int) -> Region:
        """Make a region of ``[start, stop)`` that inherits this one's history.

        ``root`` covers the whole allocation; every region overlaps it.
        """
        for known in root.overlapping:
            if known.start == start and known.stop == stop:
                return known
        part = Region(self.allocation, start, stop)
        part.last_write = self.last_write
        part.reads = list(self.reads)
        for other in (root, *root.overlapping):
            if other.start < stop and start < other.stop:
                other.overlapping = [*other.overlapping, part]
                part.overlapping = [*part.overlapping, other]
        if part not in root.overlapping:  # an empty part shares no bytes, but is found again
            root.overlapping = [*root.overlapping, part]
        return part

    def before_read(self, into: list[Ticket]) -> None:
        """Add what a read must come after: every write that has not completed."""
        add_unpassed(self.last_write, into)
        for other in self.overlapping:
            add_unpassed(other.last_write, into)

    def before_write(self, into: list[Ticket]) -> None:
        """Add what a write or a free must come after: the last write and all reads since."""
        add_unpassed(self.last_write, into)
        for read in self.reads:
            if read.failure is None or read.position:  # a read that never ran orders nothing
                add_unpassed(read, into)
        for other in self.overlapping:
            add_unpassed(other.last_write, into)
            for read in other.reads:
                if read.failure is None or read.position:
                    add_unpassed(read, into)

    def failed_writes(self) -> Iterator[Ticket]:
        """The writes whose failure a reader of this region inherits (rule R9)."""
        last = self.last_write
        if last.failure is not None:
            yield last
        for other in self.overlapping:
            write = other.last_write
            # Older than our own last write: overwritten since, the failure is cleared.
            if write.failure is not None and write.seq > last.seq:
                yield write

    def parked_writes(self) -> Iterator[Ticket]:
        """The overlapping writes whose failure, if it comes to that, a reader inherits."""
        last = self.last_write
        for other in self.overlapping:
            write = other.last_write
            if write.is_parked and write.seq > last.seq:  # else overwritten since
                yield write

    def is_left_behind(self) -> bool:
        """Whether an op on it is: then the memory is never given back (rule R6)."""
        return any(
            ticket.is_left_behind
            for each in (self, *self.overlapping)
            for ticket in (each.last_write, *each.reads)
        )

    def record_read(self, ticket: Ticket) -> None:
        """Note a read, in program order."""
        reads = self.reads
        if not reads:
            self.reads = [ticket]
            return
        assert isinstance(reads, list)
        if ticket.position:
            latest = reads[-1]
            if latest.position and latest.timeline is ticket.timeline:
                reads[-1] = ticket
                return
        reads.append(ticket)
        if len(reads) > self._thin_at:
            self.reads = _thinned(reads)
            self._thin_at = max(_THIN_AT, 2 * len(self.reads))  # parked reads stay: not each time

    def record_write(self, ticket: Ticket) -> None:
        """Note a write of the whole region, in program order."""
        self.last_write = ticket
        self.reads = ()
        for other in self.overlapping:
            if self.start <= other.start and other.stop <= self.stop:
                other.last_write = ticket
                other.reads = ()


def add_unpassed(ticket: Ticket, into: list[Ticket]) -> None:
    """Add ``ticket`` unless it has completed; for one that never ran, what it waited for."""
    if ticket.position:
        if ticket.position > ticket.timeline.watermark:
            into.append(ticket)
        return
    # An op that failed before submission ran nothing on the device, nor did a host
    # task: their followers come after what they would have waited for. A chain of
    # such may be long: no recursion.
    stack, seen = [ticket], set()
    while stack:
        here = stack.pop()
        if here.position:
            if here.position > here.timeline.watermark:
                into.append(here)
        elif here.inherited is None:
            into.append(here)
        elif id(here) not in seen:
            seen.add(id(here))
            stack.extend(reversed(here.inherited))


def _thinned(reads: Sequence[Ticket]) -> list[Ticket]:
    latest: dict[object, Ticket] = {}
    parked: list[Ticket] = []
    for read in reads:
        if read.is_parked:
            parked.append(read)
        elif read.position and not read.is_passed:
            known = latest.get(read.timeline)
            if known is None or known.position < read.position:
                latest[read.timeline] = read
    return [*latest.values(), *parked]
