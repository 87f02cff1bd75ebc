"""Explicit streams that were closed or dropped, until their last work has been seen to end."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["ClosedLines"]


class ClosedLines:
    """The streams of one device that nobody submits to any more.

    Attributes
    ----------
    dropped : deque of Timeline
        Left by finalisers, or with work still parked on them.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.dropped: deque[Timeline] = deque()
        self._closed: deque[Timeline] = deque()

    def __bool__(self) -> bool:
        return bool(self.dropped or self._closed)

    def post(self, line: Timeline) -> None:
        """Leave a stream to the loop. Any thread; called by finalisers (R12)."""
        self.dropped.append(line)
        self._core.needs_check = True

    def close(self, line: Timeline) -> None:
        """Destroy a stream, once nothing is parked on it."""
        if line.parked_tail is not None or line.waiting is not None:
            self.post(line)  # again later
            return
        stream, line.stream = line.stream, None
        if stream is not None:
            stream.close()
        self._closed.append(line)

    def forget(self) -> None:
        """Close what was left, and let go of what has ended."""
        for _ in range(len(self.dropped)):
            self.close(self.dropped.popleft())
        for _ in range(len(self._closed)):
            line = self._closed.popleft()
            self._core.reap(line)
            if line.inflight:
                self._closed.append(line)
            else:
                self._core.lines.remove(line)
                self._core.tracer.forget(line)
