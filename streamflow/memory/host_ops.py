"""Ops of the runtime on the blocks of a caching allocator: in order, and waited for by the free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from streamflow.errors import Closed, DeviceLost
from streamflow.memory.host_blocks import Cell, DrainPoint, Point, reraise
from streamflow.memory.space import Space, space_of
from streamflow.scheduler.hazards import Region, add_unpassed
from streamflow.scheduler.timeline import Ticket

__all__ = ["OpPoint", "Used", "op_points"]


def _before_all() -> Ticket:
    ticket = Ticket(0)
    ticket.inherited = ()  # never submitted, and waits for nothing
    return ticket


_START = _before_all()


class Used:
    """A pinned range, to the table of such ranges: a block while it is live.

    Ops of one loop on it are ordered among each other, as those on an array of a device are
    (R3). Loops can't wait for each other's: the program orders those.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def usable_at(self, address: int, nbytes: int) -> Used | None:
        """As :class:`~streamflow.memory.page_locked.Owner` has it."""
        return self if self._cell.is_live else None

    @property
    def region(self) -> Region:
        """The hazards of the ops that the calling thread's loop submits."""
        cell, thread = self._cell, threading.get_ident()
        region = cell.regions.get(thread)
        if region is not None and region.is_left_behind():
            # Of an earlier loop of this thread: only the free waits for it.
            cell.regions[-id(region)] = region
            region = None
        if region is None:
            region = cell.regions[thread] = Region(_START, 0, cell.pinned_nbytes)
        return region


class OpPoint:
    """An op that had not ended when a block that it uses was freed."""

    __slots__ = ("_ticket", "event", "is_over", "space", "uid")

    def __init__(self, ticket: Ticket, space: Space) -> None:
        self.space = space
        # By stream, as others are; apart from them, since an op may end before its stream's free.
        self.uid = -1 - ticket.timeline.uid if ticket.position else -id(ticket)
        self.event = None
        self.is_over = False
        self._ticket = ticket

    def is_passed(self) -> bool:
        """Whether it has ended. A failure to ask is not a yes, nor a device that was left.

        Raises
        ------
        StreamflowError
            The query failed, and not because the device is lost.
        """
        if not self.is_over and not self._ticket.is_left_behind:
            pending: list[Ticket] = []
            add_unpassed(self._ticket, pending)
            if all(_has_ended(ticket) for ticket in pending):
                self.finish()
        return self.is_over

    def finish(self) -> None:
        """It has ended."""
        self.is_over = True


def op_points(cell: Cell) -> Iterator[Point]:
    """What a free of ``cell`` must wait for of the ops that used it."""
    for region in tuple(cell.regions.values()):
        for ticket in _noted(region):
            if ticket.is_left_behind:
                yield DrainPoint(_space_of(ticket, cell.space), -id(cell))
        pending: list[Ticket] = []
        region.before_write(pending)
        for ticket in pending:
            yield OpPoint(ticket, _space_of(ticket, cell.space))


def _noted(region: Region) -> tuple[Ticket, ...]:
    return region.last_write, *region.reads


def _core_of(ticket: Ticket) -> Any:
    return ticket.timeline.owner if ticket.position else getattr(ticket.op, "_core", None)


def _space_of(ticket: Ticket, otherwise: Space) -> Space:
    core = _core_of(ticket)
    try:
        return otherwise if core is None else space_of(core.backend)
    except Closed:  # its device was left with work that had not ended
        return otherwise


def _has_ended(ticket: Ticket) -> bool:
    # Nobody may be looking (R11), so the watermark alone would not do. An event that goes back
    # to its pool meanwhile answers for a later op: not too early, that is.
    event = ticket.event if ticket.position else None
    if event is None:
        return ticket.is_passed
    try:
        return bool(event.is_done)
    except Exception as error:
        core, doing = _core_of(ticket), "asking whether a pinned block is in use"
        if core is None or isinstance(core.backend.translate(error, doing), (Closed, DeviceLost)):
            return ticket.is_passed
        reraise(core.backend, error, doing)
