"""Timers of one device: real time on hardware, virtual time where the clock is virtual.

Our own timeouts count the time the device runs by, so a deadline on the simulator's
virtual clock falls at the same place of every run (R15).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf, isnan
from typing import TYPE_CHECKING

from streamflow.errors import DeviceLost

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Timer", "Timers"]

_next_order = count().__next__
"""One order of calls over all devices: those of one loop share a clock."""


class Timer:
    """One call to come; sorts by when it is due, then by when it was asked for."""

    __slots__ = ("_core", "_react", "due_s", "order")

    def __init__(self, core: Core, due_s: float, react: Callable[[], None]) -> None:
        self._core = core
        self._react: Callable[[], None] | None = react
        self.due_s = due_s
        self.order = _next_order()

    @property
    def is_pending(self) -> bool:
        return self._react is not None

    def cancel(self) -> None:
        """Never call; harmless once it was."""
        self._react = None

    def fire(self) -> None:
        """Call it, unless that was done or cancelled."""
        react, self._react = self._react, None
        if react is None:
            return
        try:
            react()
        except Exception as error:
            # A mistake of ours, as in the poller's turn: better lost than hung.
            self._core.lose_to(DeviceLost(f"streamflow failed: {error!r}"), error)

    def __lt__(self, other: Timer) -> bool:
        return (self.due_s, self.order) < (other.due_s, other.order)


class Timers:
    """The pending timers of one device. Loop thread only."""

    __slots__ = ("_core", "_heap", "_real")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heap: list[Timer] = []  # on the virtual clock; the poller fires them
        self._real: dict[Timer, Callable[[], None]] = {}  # each with what stops the loop's own

    def call_later(self, delay_s: float, react: Callable[[], None]) -> Callable[[], None]:
        """Call ``react`` on the loop once ``delay_s`` has passed on the device's clock.

        Parameters
        ----------
        delay_s : float
            Seconds; of real time, or of virtual time where the backend's clock is virtual.
            Infinity never comes.
        react : callable
            Called once, in a turn of its own, in an empty context, never after the cancel.

        Returns
        -------
        callable
            Cancels it; harmless when it was called already.

        Ordering
        --------
        In virtual time: after every completion at that moment, and by order of call among
        timers of one moment. Virtual time passes only as the simulated work completes. Where
        nothing can move any more, it jumps to the timer after 50 ms of the loop's time in
        which nothing changed: the program may have been about to open a gate.

        Raises
        ------
        ValueError
            The delay is not a number.
        """
        if isnan(delay_s):
            raise ValueError(f"a delay is a number of seconds, found {delay_s}")
        core = self._core
        delay_s = max(delay_s, 0.0)
        if core.is_closed or delay_s == inf:
            return _nothing
        timer = Timer(core, core.backend.clock_s() + delay_s, react)
        if core.backend.is_virtual:
            heappush(self._heap, timer)
            core.schedule_turn()
            return timer.cancel
        real = self._real

        def fire() -> None:
            if real.pop(timer, None) is not None:
                timer.fire()

        def cancel() -> None:
            stop = real.pop(timer, None)
            if stop is not None:
                timer.cancel()
                stop()

        real[timer] = core.shell.call_later(delay_s, fire)
        return cancel

    def first(self) -> Timer | None:
        """The next one due in virtual time; None if there is none."""
        heap = self._heap
        while heap and not heap[0].is_pending:
            heappop(heap)
        return heap[0] if heap else None

    def close(self) -> None:
        """Cancel them all."""
        for timer in self._heap:
            timer.cancel()
        self._heap.clear()
        for timer, stop in self._real.items():
            timer.cancel()
            stop()
        self._real.clear()


def _nothing() -> None:
    pass
