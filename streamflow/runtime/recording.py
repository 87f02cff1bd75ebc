"""Whose calls are recorded into a graph instead of submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from streamflow.backends.origin import here
from streamflow.errors import CaptureRefused
from streamflow.runtime.op import Op
from streamflow.runtime.parked import After, PickLine, Run, Start
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from types import FrameType

    import numpy as np

    from streamflow.runtime.array import Allocation, DeviceArray
    from streamflow.runtime.core import Core

__all__ = ["Recorder", "Recording", "recorder_of", "refuse"]


class Recorder(Protocol):
    """What takes the calls of a task that captures."""

    def record(
        self,
        op: Op[Any],
        run: Run,
        line: Timeline | PickLine | None,
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: After,
        is_overwrite: bool,
        start: Start | None,
    ) -> None:
        """Take an op with what it touches, in place of its submission."""

    def record_host(
        self, op: Op[Any], function: Callable[..., Any], args: Sequence[Any], after: After
    ) -> None:
        """Take a host step."""

    def hold(self, args: Sequence[Any]) -> None:
        """Keep what of ``args`` are arrays for as long as the graph lives."""

    def hold_host(self, array: np.ndarray[Any, Any]) -> None:
        """Keep pinned memory that a copy reads or writes."""

    def record_allocation(self, array: DeviceArray) -> None:
        """Take an array whose memory was just allocated: that is the graph's."""

    def record_free(self, memory: Allocation, frame: FrameType) -> Op[None]:
        """Take an ``array.free()``."""

    def tickets_of(self, item: Op[Any] | DeviceArray) -> list[Ticket]:
        """What ``after=item`` stands for within the graph."""


class Recording:
    """The tasks of one loop that capture, each with its own recorder; ``core.recording``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._recorders: dict[object, Recorder] = {}

    def begin(self, recorder: Recorder) -> object:
        """Have the calling task's calls go to ``recorder``; returns what :meth:`end` takes.

        Raises
        ------
        CaptureRefused
            The task captures already.
        """
        task = self._core.shell.task()
        if task in self._recorders:
            raise CaptureRefused(
                f"{here()}: this task captures already: a capture inside another has no use"
            )
        self._recorders[task] = recorder
        self._core.recording = self
        self._core.choose_ways()
        return task

    def end(self, task: object) -> None:
        """Have the task's calls be submitted again."""
        self._recorders.pop(task, None)
        if not self._recorders:
            self._core.recording = None
            self._core.choose_ways()

    def refuse_await(self, op: Op[Any]) -> None:
        """Raise in a task that captures: nothing of the graph has run, nor will meanwhile."""
        refuse(self._core, f"{op.name} can't be awaited before its block is left")

    def here(self) -> Recorder | None:
        """That of the calling task; callbacks and other tasks have none."""
        return self._recorders.get(self._core.shell.task())


def recorder_of(core: Core) -> Recorder | None:
    """Who takes the caller's calls; None where they are submitted."""
    return None if core.recording is None else core.recording.here()


def refuse(core: Core, what: str) -> None:
    """Raise in a task that captures.

    Raises
    ------
    CaptureRefused
        ``what`` has no place in a graph; with the line of the call.
    """
    if core.recording is not None and core.recording.here() is not None:
        raise CaptureRefused(f"{here()}: a graph is being captured, and {what}")
