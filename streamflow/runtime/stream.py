"""Streams the user asks for, lanes the runtime picks, and the task's current stream."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from streamflow.errors import Closed
from streamflow.runtime.op import Op
from streamflow.runtime.parked import no_calls
from streamflow.runtime.recording import refuse
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["ENTERED", "Lane", "Stream", "current_line", "explicit_line"]

ENTERED: ContextVar[tuple[Stream, ...]] = ContextVar("streamflow_entered_streams", default=())
"""Every ``with stream:`` of this task that has not been left, outermost first."""


class Lane:
    """A stream that the runtime picks; promises data order only (rule R3)."""

    __slots__ = ("_line",)

    def __init__(self, line: Timeline) -> None:
        self._line = line

    @property
    def name(self) -> str:
        """``"h2d"``, ``"d2h"``, ``"free"``, ``"compute0"``, ..."""
        return self._line.name

    @property
    def backend_stream(self) -> Any:
        """The backend's own stream object."""
        return self._line.stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version and handle, for other libraries."""
        return (0, int(self._line.stream.handle))

    def __repr__(self) -> str:
        return f"<Lane {self.name}>"


class Stream:
    """An explicit stream: work given to it runs in program order.

    Made by :meth:`Device.stream`. ``with stream:`` makes it the current one of the
    calling *task*; ``async with stream:`` also drains and closes it at the end.
    """

    __slots__ = ("__weakref__", "_core", "_line", "is_closed", "priority")

    def __init__(self, core: Core, line: Timeline, priority: int) -> None:
        self._core = core
        self._line = line
        self.priority = priority
        self.is_closed = False

    @property
    def name(self) -> str:
        """The name given, or one with its number."""
        return self._line.name

    @property
    def backend_stream(self) -> Any:
        """The backend's own stream object; on CUDA a ``cuda.core.Stream``."""
        self._check_open()
        return self._line.stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version and handle, for other libraries."""
        return (0, int(self.backend_stream.handle))

    def record(self) -> Op[None]:
        """An op that ends when everything submitted here so far has ended.

        Ordering
        --------
        At this position of the stream; later work does not delay it (rule R4).
        """
        self._check_open()
        op: Op[None] = Op(self._core, "record", None)
        self._core.parking.submit(op, no_calls, line=self._line)
        return op

    def wait_for(self, op: Op[Any]) -> None:
        """Order everything submitted to this stream from now on after ``op``.

        Parameters
        ----------
        op : Op
            Submitted on any stream of any device of this loop; it may be parked.

        Ordering
        --------
        A device-side wait; the host goes on at once. Nothing is issued if an
        earlier wait already implies it (rule R4).

        Raises
        ------
        DeviceLost
            The device of this stream has failed.
        ValueError
            ``op`` belongs to another event loop.
        """
        self._check_open()
        core = self._core
        after = core.after((op,))
        if after.tickets or after.futures:
            core.parking.submit(Op(core, "wait", None), no_calls, line=self._line, after=after)

    async def synchronize(self) -> None:
        """Wait until everything submitted here so far has ended.

        Raises
        ------
        DeviceLost
            The device failed meanwhile.
        """
        refuse(self._core, "nothing can be awaited before its block is left")
        await self.record()

    def close(self) -> None:
        """Take no more work. What was submitted still runs, as do frees of its arrays."""
        self._core.check_here()
        if not self.is_closed:
            self.is_closed = True
            self._core.closed_lines.close(self._line)

    def __enter__(self) -> Stream:
        self._check_open()
        ENTERED.set((*ENTERED.get(), self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Take out our own entry wherever it stands: exits may come out of order, and a
        # generator may be closed in a context that never entered it.
        entered = list(ENTERED.get())
        for place in reversed(range(len(entered))):
            if entered[place] is self:
                del entered[place]
                ENTERED.set(tuple(entered))
                return

    async def __aenter__(self) -> Stream:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)
        try:
            if self._core.lost is None and not self.is_closed:
                await self.synchronize()
        finally:
            self.close()

    def __del__(self) -> None:
        if not self.is_closed:
            self._core.closed_lines.post(self._line)

    def _check_open(self) -> None:
        self._core.check_open()
        if self.is_closed:
            raise Closed(f"stream {self.name} is closed")

    def __repr__(self) -> str:
        return f"<Stream {self.name}{' closed' if self.is_closed else ''}>"


def current_line(core: Core) -> Timeline | None:
    """The timeline of the task's innermost ``with stream:`` of this device."""
    for stream in reversed(ENTERED.get()):
        if stream._core is core and not stream.is_closed:
            return stream._line
    return None


def explicit_line(core: Core, stream: Stream | None) -> Timeline | None:
    """The timeline of ``stream=``, else of the current stream, else None.

    Raises
    ------
    TypeError
        Not a :class:`Stream`.
    ValueError
        A stream of another device.
    Closed
        A closed stream.
    """
    if stream is None:
        return current_line(core)
    if not isinstance(stream, Stream):
        raise TypeError(f"stream= takes a streamflow Stream or None, found {stream!r}")
    if stream._core is not core:
        raise ValueError(f"{stream!r} belongs to another device")
    if stream.is_closed:
        raise Closed(f"stream {stream.name} is closed")
    return stream._line
