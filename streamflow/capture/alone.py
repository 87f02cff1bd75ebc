"""Launches that have to go alone: a graph with more places than are left above a window (R7).

The driver would hold the caller up until there is room. So such a launch parks until all it comes
after has ended, and until its stream is empty: then nothing holds it, and the device works it
off while it comes in.
"""

from __future__ import annotations

from functools import partial

from streamflow.capture.executables import Executables
from streamflow.runtime.core import Core
from streamflow.runtime.parked import Parked
from streamflow.scheduler.timeline import Timeline

__all__ = ["GoesAlone", "num_places_free"]


def num_places_free(core: Core) -> int:
    """Places of a stream's queue that are free whenever its window has room for one op."""
    return core.backend.num_queued_max - core.window + 1


class GoesAlone:
    """The :data:`~streamflow.runtime.parked.Start` of a launch of a part that may be too large."""

    __slots__ = ("_executables", "_part")

    def __init__(self, executables: Executables, part: int) -> None:
        self._executables = executables
        self._part = part

    def __call__(self, parked: Parked) -> None:
        core: Core = parked.op._core
        if self._executables.places_of(self._part) <= num_places_free(core):
            core.parking.ready(parked)
            return
        parked.need = "an empty stream"
        self._when_passed(parked)

    def _when_passed(self, parked: Parked) -> None:
        core: Core = parked.op._core
        if parked.has_left or core.lost is not None:  # it fails with its device
            return
        if any(source.failure is not None for source in parked.sources):
            core.parking.ready(parked)  # which says what failed
            return
        pending = core.parking.flattened(parked.deps)
        if pending:  # also where what ended had failed, and left others before it
            core.when_all_ended(pending, partial(self._when_passed, parked))
        else:
            core.parking.admit(parked, self._go)

    def _go(self, parked: Parked) -> None:
        """Submit it, if its stream is empty and no launch of the same executable runs on."""
        core: Core = parked.op._core
        if parked.has_left or core.lost is not None:
            return
        line = parked.line
        if not isinstance(line, Timeline):
            # The lanes may be busy with others' work at any time.
            try:
                line = parked.line = core.graph_lane or core.make_timeline("graphs")
            except Exception as error:
                core.parking.drop(parked, core.lose(error, "making a stream for a large graph"))
                return
            core.graph_lane = line
        core.reap(line)
        if parked.has_left:  # a fault was found
            return
        before = [line.inflight[-1]] if line.inflight else []
        earlier = self._executables.alone.get(self._part)
        if earlier is not None and earlier.position and not earlier.is_passed:
            before.append(earlier)
        if before:
            core.when_all_ended(before, partial(self._go, parked))
            return
        self._executables.alone[self._part] = parked.op.ticket
        core.parking.pick_and_go(parked)
