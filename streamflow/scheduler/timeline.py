"""Positions, tickets and clocks: what is ordered after what, without asking the device.

Each stream numbers its driver calls. An op takes the position of its last one and
records one event there, so waiting for the op waits for nothing behind it (R4). A
watermark per stream turns "is it done?" into a comparison. A ticket carries what its
stream had seen at that position, and a stream that waits for a ticket merges *that*,
so a wait which earlier waits already imply is never issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from streamflow.scheduler.fair import FairQueue

__all__ = ["Clock", "Ticket", "Timeline", "needed_waits"]

Clock = Mapping["Timeline", int]
"""For each other timeline, the last position known to come before; never mutated in place."""

_NOTHING_SEEN: Clock = {}


class Timeline:
    """The order of one stream.

    Keyed by identity, one per stream ever made, so a stream destroyed and another
    created at the same handle share nothing.

    Attributes
    ----------
    uid : int
        The driver's unique id of the stream.
    position : int
        Driver calls submitted so far.
    watermark : int
        Position known to have completed; only grows.
    clock : Clock
        What this stream has waited for, joined over all its waits.
    inflight : deque of Ticket
        Submitted and not retired, oldest first.
    """

    __slots__ = (
        "clock",
        "inflight",
        "is_ordered",
        "name",
        "owner",
        "parked_tail",
        "position",
        "stream",
        "uid",
        "waiting",
        "wants",
        "watermark",
        "where",
    )

    def __init__(
        self,
        uid: int,
        stream: Any = None,
        name: str = "",
        *,
        is_ordered: bool = False,
        owner: Any = None,
        where: str = "",
    ) -> None:
        self.uid = uid
        self.where = where  # file and line that asked for it, for the ledger
        self.owner = owner  # the device; streams of several may depend on each other
        self.stream = stream
        self.name = name
        self.is_ordered = is_ordered  # explicit streams keep program order; lanes do not (R3)
        self.parked_tail: Any = None  # the newest parked op of an ordered stream (rule R7)
        self.waiting: FairQueue[Any] | None = None  # ops that only lack room in the window (R7)
        self.position = 0
        self.watermark = 0
        self.clock: Clock = _NOTHING_SEEN
        self.inflight: deque[Ticket] = deque()
        self.wants = 0  # how many callers want to see completions here (rule R11)

    @property
    def num_outstanding(self) -> int:
        """Driver calls submitted and not known to be done (rule R7)."""
        return self.position - self.watermark

    def advance(self, ticket: Ticket, num_calls: int, event: Any) -> None:
        """Give ``ticket`` the position after ``num_calls`` more driver calls."""
        self.position = position = self.position + num_calls
        ticket.timeline = self
        ticket.position = position
        ticket.seen = self.clock
        ticket.event = event
        self.inflight.append(ticket)

    def join(self, tickets: Iterable[Ticket]) -> None:
        """Note that everything submitted from now on comes after ``tickets``.

        Makes a new clock, since older tickets hold the present one; what has
        completed meanwhile is left out, so clocks stay as small as the work in flight.
        """
        clock = {line: seen for line, seen in self.clock.items() if seen > line.watermark}
        for ticket in tickets:
            for line, seen in (*ticket.seen.items(), (ticket.timeline, ticket.position)):
                if line is not self and seen > line.watermark and seen > clock.get(line, 0):
                    clock[line] = seen
        self.clock = clock

    def retire(self, count: int) -> list[Ticket]:
        """Take the ``count`` oldest tickets, known to be done, and move the watermark."""
        popleft = self.inflight.popleft
        retired = [popleft() for _ in range(count)]
        if retired:
            self.watermark = retired[-1].position
        return retired

    def abandon(self) -> list[Ticket]:
        """Take every ticket in flight: nothing will run any more, so nothing is waited for."""
        tickets = list(self.inflight)
        self.inflight.clear()
        self.watermark = self.position
        return tickets

    def __repr__(self) -> str:
        return f"<Timeline {self.name or self.uid} {self.watermark}/{self.position}>"


class Ticket:
    """The place of one op in the order: (timeline, position, what the stream had seen).

    A parked op's ticket has position 0 until the op is submitted. Where the op never will
    be, because it failed or all its work was on the host, ``inherited`` holds what its
    followers still have to wait for; None until then. ``failure`` is set when the result
    is wrong.
    """

    __slots__ = (
        "event",
        "failure",
        "holds",
        "inherited",
        "op",
        "position",
        "seen",
        "seq",
        "timeline",
    )

    timeline: Timeline  # these three from submission on
    seen: Clock
    event: Any

    def __init__(self, seq: int, op: Any = None) -> None:
        self.seq = seq
        self.op = op
        self.position = 0
        self.failure: BaseException | None = None
        self.inherited: tuple[Ticket, ...] | None = None
        self.holds = 0  # users of the event besides the timeline; it is not pooled until 0

    @property
    def is_parked(self) -> bool:
        """Not submitted, and still going to be."""
        return self.position == 0 and self.inherited is None

    @property
    def is_passed(self) -> bool:
        """Known to have completed on the device."""
        return 0 < self.position <= self.timeline.watermark

    @property
    def is_left_behind(self) -> bool:
        """Whether its device was closed while it ran, or was to: who knows when it ends (R6)."""
        if self.failure is None:
            return False
        owner = self.timeline.owner if self.position else getattr(self.op, "_core", None)
        return getattr(owner, "left_behind", None) is not None

    def forget(self) -> None:
        """Drop what a completed ticket no longer needs (rule R6)."""
        self.seen = _NOTHING_SEEN
        self.event = None
        self.op = None

    def __repr__(self) -> str:
        if self.position == 0:
            return f"<Ticket #{self.seq} {'parked' if self.is_parked else 'never submitted'}>"
        return f"<Ticket #{self.seq} {self.timeline.name}@{self.position}>"


_Ticket = TypeVar("_Ticket", bound=Ticket)


def needed_waits(timeline: Timeline, tickets: Iterable[_Ticket]) -> list[_Ticket]:
    """Which of ``tickets`` a new op on ``timeline`` must wait for by event.

    Leaves out what has completed, what the same stream orders by itself, what earlier
    waits imply, and what another ticket of the same call implies: the transitive
    reduction (rule R4). None of ``tickets`` may be parked.
    """
    clock = timeline.clock
    waits: list[_Ticket] = []
    for ticket in tickets:
        line = ticket.timeline
        position = ticket.position
        if line is timeline or position <= line.watermark or position <= clock.get(line, 0):
            continue
        if waits:
            # Keep only maximal tickets: drop this one, or those that this one implies.
            if any(
                (other.timeline is line and other.position >= position)
                or other.seen.get(line, 0) >= position
                for other in waits
            ):
                continue
            seen = ticket.seen
            waits = [
                other
                for other in waits
                if not (
                    (other.timeline is line and other.position <= position)
                    or seen.get(other.timeline, 0) >= other.position
                )
            ]
        waits.append(ticket)
    return waits
