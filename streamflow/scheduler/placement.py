"""Which compute lane a kernel without an explicit stream goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = ["choose_lane", "least_loaded"]


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
