"""Events: a remembered position of a stream."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from streamflow.errors import Closed, DeviceError

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Mark
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.races import Place

__all__ = ["EventState", "SimEvent"]


class EventState(Enum):
    """What a query would say."""

    NEVER_RECORDED = "never recorded"
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class SimEvent:
    """A point in a stream's order; bound to its latest record.

    Attributes
    ----------
    place : Place or None
        Stream and position of the latest record. One attribute, so that a query from
        another thread never sees half a record.
    """

    __slots__ = ("_mark", "device", "gpu", "is_closed", "is_timing", "place")

    def __init__(self, device: SimDevice, is_timing: bool) -> None:
        self.device = device
        self.gpu = device.gpu
        self.is_timing = is_timing
        self.is_closed = False
        self.place: Place | None = None
        self._mark: Mark | None = None

    @property
    def is_done(self) -> bool:
        """True once the latest record was passed; never moves the virtual clock.

        False for an event never recorded (the driver says done): see ``EventState``.
        """
        device = self.device
        device.counts["is_done"] += 1
        if device.stop is not None:
            raise device.stop()
        place = self.place
        if place is None:
            if self.is_closed:
                raise Closed("the event is closed")
            return False
        if place[0].num_done < place[1]:
            return False
        races = place[0].world.races
        if races is not None:
            races.observe(place)
        return True

    @property
    def state(self) -> EventState:
        """What a query would say, without raising or counting."""
        if self.device.stop is not None:
            return EventState.FAILED
        if self.place is None:
            return EventState.NEVER_RECORDED
        stream, position, *_ = self.place
        return EventState.DONE if stream.num_done >= position else EventState.PENDING

    def sync(self) -> None:
        """Block this thread until done.

        Raises
        ------
        DeviceError
            Never recorded; or, in the thread that drives a virtual clock, nothing is left
            that could complete it.
        DeviceLost
            The device has failed, before or while waiting.
        Closed
            The event or its device is closed.
        """
        device = self.device
        device.counts["event_sync"] += 1
        if device.stop is not None:
            raise device.stop()
        if self.is_closed:
            raise Closed("the event is closed")
        if self.place is None:
            raise DeviceError("this event was never recorded, so waiting for it would never end")
        self.place[0].world.wait_blocking(self.place)

    def close(self) -> None:
        """Destroy it; waits and work that depend on it stay as they are."""
        self.device.counts["event_close"] += 1
        self.is_closed = True
        self.place = None
        self._mark = None

    def bind(self, place: Place, mark: Mark) -> None:
        """Bind a timing event to a record."""
        self._mark = mark
        self.place = place

    def time_s(self) -> float:
        """When the latest record was passed, on the device's clock.

        Raises
        ------
        ValueError
            Made without ``timing=True``, or never recorded.
        DeviceError
            Not done yet.
        """
        if not self.is_timing:
            raise ValueError("elapsed time needs events made with timing=True")
        if self._mark is None:
            raise ValueError("elapsed time needs events that were recorded")
        if self._mark.time_s is None:
            raise DeviceError("elapsed time needs events that are done")
        return self._mark.time_s
