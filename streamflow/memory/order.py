"""Which streams come after which frees, for resources that hand blocks out again (rule R4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamflow.backends.base import Backend
from streamflow.errors import Closed
from streamflow.memory.space import Place, Space
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

__all__ = ["FreePoint", "StreamOrder"]


_NUM_LINES_MAX = 256


class FreePoint(Ticket):
    """The moment of a stream at which a block was freed: its next user comes after that.

    A place among the resource's own frees; ``ticket`` is that of the runtime's op, which knows
    of waits that others have made. ``holds`` counts who may still ask for it.
    """

    __slots__ = ("backend", "ticket")

    def __init__(
        self, timeline: Timeline, event: Any, ticket: Ticket | None, backend: Backend
    ) -> None:
        # Of a ticket what orders it, and no more: one is made for every free.
        self.timeline = timeline
        self.position = timeline.position
        self.seen = timeline.clock
        self.event = event
        self.holds = 1
        self.ticket = ticket
        self.backend = backend

    @property
    def uid(self) -> int:
        """The stream's id."""
        return self.timeline.uid

    def is_known_passed(self) -> bool:
        """Whether it has passed for all we know; asks nobody."""
        if self.position <= self.timeline.watermark:
            return True
        return self.ticket is not None and self.ticket.is_passed


class StreamOrder:
    """The frees of one resource. Not thread-safe: its lock is the resource's."""

    def __init__(self) -> None:
        # By stream: a timeline that counts this resource's frees there, and nothing else.
        self._lines: dict[int, Timeline] = {}

    def mark(self, space: Space, place: Place) -> FreePoint:
        """Record this moment of a stream."""
        event = space.take_event(place.backend)
        place.stream.record(event)
        line = self._lines.get(place.line.uid) or self._line(place)
        line.position += 1
        return FreePoint(line, event, place.ticket, place.backend)

    def is_passed(self, point: FreePoint) -> bool:
        """Whether the device has got that far; one query at most.

        Raises
        ------
        Exception
            The backend's own: the device has failed.
        """
        if point.is_known_passed():
            return True
        try:
            if not point.event.is_done:
                return False
        except Closed:  # one of several devices on this memory, whose streams had ended
            pass
        line = point.timeline
        line.watermark = max(line.watermark, point.position)
        return True

    def is_implied(self, place: Place, point: FreePoint) -> bool:
        """Whether work given to ``place`` now comes after ``point`` without a wait."""
        if point.uid == place.line.uid or point.is_known_passed():
            return True
        ticket = point.ticket
        if (
            ticket is not None
            and ticket.position
            and place.line.clock.get(ticket.timeline, 0) >= ticket.position
        ):
            return True
        return not needed_waits(self._line(place), (point,))

    def put_after(self, place: Place, points: Iterable[FreePoint]) -> int:
        """Have ``place`` come after ``points``; returns how many waits that took."""
        needed = [point for point in points if not self.is_implied(place, point)]
        if not needed:
            return 0
        line = self._line(place)
        waits = needed_waits(line, needed)
        for point in waits:
            place.stream.wait(point.event)
            place.num_calls += 1
            if point.ticket is not None and point.ticket.position:
                place.waited.append(point.ticket)
        line.join(waits)
        return len(waits)

    def drop(self, space: Space, point: FreePoint) -> None:
        """One asks for ``point`` no more; after the last one its event may be used again."""
        point.holds -= 1
        if not point.holds and point.event is not None:
            space.give_event(point.event, point.backend)
            point.event = None

    def _line(self, place: Place) -> Timeline:
        uid = place.line.uid
        line = self._lines.get(uid)
        if line is None:
            if len(self._lines) >= _NUM_LINES_MAX:
                # Streams come and go. What is forgotten costs a wait that was not needed.
                for old in list(self._lines)[: _NUM_LINES_MAX // 2]:
                    del self._lines[old]
            line = self._lines[uid] = Timeline(uid, None, place.line.name)
        return line
