"""Which compute lane work without an explicit stream goes on: by affinity, or as the user says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = ["LaneLoad", "Placement", "PlacementRequest", "choose_lane", "least_loaded"]


def choose_lane(lanes: Sequence[Timeline], writes: Iterable[Ticket]) -> Timeline:
    """The lane whose tail is the last write of an input, else the least loaded.

    Staying behind one's input costs no event; leaving it when something else has
    queued up there would wait for work that the data do not ask for.
    """
    for ticket in writes:
        if ticket.position:
            timeline = ticket.timeline
            if ticket.position == timeline.position and timeline in lanes:
                return timeline
    return least_loaded(lanes)


def least_loaded(lanes: Sequence[Timeline]) -> Timeline:
    """The lane with the fewest driver calls outstanding; the first of equals."""
    best = lanes[0]
    load = best.position - best.watermark
    if not load:
        return best
    for lane in lanes:
        outstanding = lane.position - lane.watermark
        if outstanding < load:
            best, load = lane, outstanding
    return best


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """One compute lane, as a placement sees it."""

    name: str
    num_outstanding: int
    """Driver calls submitted and not known to be done."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a placement decides on; made at the moment of submission."""

    name: str
    kind: str
    """``"launch"``, ``"call"``, ``"fill"``, ``"copy"`` or ``"empty"``."""
    lanes: tuple[LaneLoad, ...]
    """The compute lanes; the answer is a place in here."""
    inputs: tuple[tuple[int | None, bool], ...]
    """For each unfinished op that this comes after: the place of its lane in ``lanes``, None
    where it is on another stream, and whether it is the newest there."""


class Placement:
    """A user's function from requests to places, and the check of what it answers."""

    __slots__ = ("_choose", "_lanes")

    def __init__(
        self, lanes: Sequence[Timeline], choose: Callable[[PlacementRequest], int]
    ) -> None:
        self._lanes = lanes
        self._choose = choose

    def pick(self, name: str, kind: str, tickets: Iterable[Ticket]) -> Timeline:
        """The lane for one op that comes after ``tickets``, none of which is parked.

        Raises
        ------
        TypeError
            The function answered something else than an int.
        ValueError
            There is no such lane.
        Exception
            Of the function.
        """
        lanes = self._lanes
        places = {lane: place for place, lane in enumerate(lanes)}
        answer = self._choose(
            PlacementRequest(
                name,
                kind,
                tuple(LaneLoad(lane.name, lane.num_outstanding) for lane in lanes),
                tuple(
                    (places.get(ticket.timeline), ticket.position == ticket.timeline.position)
                    for ticket in tickets
                ),
            )
        )
        try:
            if isinstance(answer, bool):
                raise TypeError
            place = index(answer)
        except TypeError:
            raise TypeError(
                f"the placement of {name} answered {answer!r}: it takes the number of a lane"
            ) from None
        if not 0 <= place < len(lanes):
            raise ValueError(
                f"the placement of {name} answered {place}: there are {len(lanes)} compute lanes, "
                "counted from 0"
            )
        return lanes[place]
