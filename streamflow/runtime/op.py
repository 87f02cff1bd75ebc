"""An op: one submitted piece of work, and its future."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextvars import Context, ContextVar, copy_context
from itertools import count
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from streamflow.backends.base import Doing
from streamflow.backends.origin import caller, describe
from streamflow.errors import OpCancelled
from streamflow.scheduler.machine import FINAL, OpState
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.scope import Scope

__all__ = ["SCOPE", "Op", "OpState", "added"]

T = TypeVar("T")

next_seq = count(1).__next__
"""One order of ops over all devices: hazards compare across them."""

SCOPE: ContextVar[Scope | None] = ContextVar("streamflow_scope", default=None)
"""The innermost scope of this task: what it submits belongs there."""

_PARKED, _SUBMITTED, _DONE = OpState.PARKED, OpState.SUBMITTED, OpState.DONE


class _Rare:
    """Fields that few ops need."""

    __slots__ = (
        "budgets",
        "callbacks",
        "doomed",
        "is_wanted",
        "nbytes",
        "on_device_done",
        "on_ended",
        "on_retired",
        "parked",
        "scope",
        "stop",
        "traced",
        "wakers",
        "writes_host",
    )

    def __init__(self) -> None:
        # Lists once there is something in them: thousands of ops may be awaited at a time,
        # and the garbage collector looks at every list.
        self.wakers: Sequence[Callable[[], None]] = ()
        self.callbacks: Sequence[tuple[Callable[[Op[Any]], object], Context]] = ()
        self.on_device_done: Callable[[], None] | None = None  # a host step of the op itself
        self.on_retired: Callable[[], None] | None = None  # gives back what the op held (R6)
        self.on_ended: Sequence[Callable[[], None]] = ()  # for the runtime, before any callback
        self.parked: Any = None
        self.doomed: BaseException | None = None  # fails with this once it has its position
        self.scope: Scope | None = None  # ends before the scope does
        self.budgets: Sequence[Any] = ()  # has ``nbytes`` of each until it ends
        self.nbytes = 0
        self.stop: Callable[[], None] | None = None  # ends its work on the host early (R8)
        self.traced: Any = None
        self.is_wanted = False  # the poller runs for this op
        self.writes_host = False  # the caller's own memory (rule R8)


def added(known: Sequence[Any], item: Any) -> Sequence[Any]:
    """``known`` with one more item, in place where it is a list already."""
    if not known:
        return [item]
    assert isinstance(known, list)
    known.append(item)
    return known


class Op(Generic[T]):
    """Work submitted to a device; await it for its end.

    Awaiting returns the result, or raises what went wrong. Cancelling a task that
    awaits an op detaches from the op and leaves it running; where the op writes the
    caller's own memory, the cancellation arrives only after that write (rule R8).
    """

    __slots__ = (
        "__weakref__",
        "_code",
        "_core",
        "_error",
        "_freed_nbytes",
        "_lasti",
        "_rare",
        "_result",
        "_state",
        "called_s",
        "kind",
        "label",
        "ticket",
    )

    _freed_nbytes: int  # of a free

    def __init__(
        self, core: Core, kind: str, label: str | None, frame: FrameType | None = None
    ) -> None:
        self._core = core
        self.kind = kind
        self.label = label
        self.ticket = Ticket(next_seq(), self)
        self._state = _PARKED
        self._rare: _Rare | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        if frame is None:
            frame = caller(2)
        self._code: CodeType = frame.f_code  # the frame itself would keep its locals (C23)
        self._lasti = frame.f_lasti
        self.called_s = core.clock_s()
        scope = SCOPE.get()
        if scope is not None:
            scope._enroll(self)

    # -- asking ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name given, else the kind of work with the op's number."""
        return self.label if self.label is not None else f"{self.kind}#{self.ticket.seq}"

    @property
    def where(self) -> str:
        """File and line of the call that made this op."""
        return describe(*self._origin)

    @property
    def _origin(self) -> tuple[CodeType, int]:
        """:attr:`where`, not yet looked up: that takes longer than a submission."""
        return self._code, self._lasti

    @_origin.setter
    def _origin(self, origin: tuple[CodeType, int]) -> None:
        """Say that it was called for there."""
        self._code, self._lasti = origin
        if self._rare is not None and self._rare.traced is not None:
            self._rare.traced.origin = origin

    def _of_nobody(self, origin: tuple[CodeType, int]) -> None:
        """Say that a finaliser left it, of what was made there: no task called for it."""
        self._origin = origin
        if self._rare is not None and self._rare.traced is not None:
            self._rare.traced.task = None

    @property
    def _told(self) -> Doing:
        """Name and origin, for who is to tell of the op and may not keep it."""
        return self.name, self._code, self._lasti

    @property
    def state(self) -> OpState:
        """The state as last seen; asking makes no query."""
        return self._state

    @property
    def stream(self) -> str | None:
        """The name of the lane or stream; None while no lane has been picked."""
        if self.ticket.position:
            return self.ticket.timeline.name
        line = self._rare.parked.line if self._rare and self._rare.parked else None
        return line.name if isinstance(line, Timeline) else None

    def done(self) -> bool:
        """Whether the op has ended. Looks at the device; never blocks."""
        core = self._core
        if core.shell.current() is not core.shell.key:
            core.check_here()
        if self._state is _SUBMITTED:
            core.reap(self.ticket.timeline)
        return self._state in FINAL

    def result(self) -> T:
        """The result of a finished op.

        Raises
        ------
        RuntimeError
            The op has not finished.
        Exception
            What the op failed with.
        """
        error = self.exception()
        if error is not None:
            try:
                raise error.with_traceback(None)  # not the frames of everybody who asked before
            finally:
                del error, self
        result: T = self._result
        return result

    def exception(self) -> BaseException | None:
        """What a finished op failed with, or None. Marks the failure as seen (rule R9)."""
        if not self.done():
            raise RuntimeError(f"{self.name} is {self._state.value}: await it first")
        if self._error is not None:
            self._core.observed(self._error)
        return self._error

    # -- waiting -----------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        core = self._core
        if core.shell.current() is not core.shell.key:
            core.check_here()
        if core.recording is not None:
            core.recording.refuse_await(self)
        if self._state is _SUBMITTED:
            core.reap(self.ticket.timeline)
        if self._state not in FINAL:
            rare = self.rare()
            wake, wait = core.shell.park()
            rare.wakers = added(rare.wakers, wake)
            core.want(self)
            try:
                yield from wait(rare.writes_host).__await__()
            finally:
                if self._state not in FINAL:
                    rare.wakers = [other for other in rare.wakers if other is not wake]
                    core.unwant(self)
            del rare
        error = self._error
        if error is not None:
            core.observed(error)
            try:
                raise error.with_traceback(None)
            finally:
                del error, self  # its traceback has this frame (C23)
        result: T = self._result
        return result

    def add_done_callback(self, callback: Callable[[Op[T]], object]) -> None:
        """Call ``callback(op)`` on the loop once the op has ended.

        Parameters
        ----------
        callback : callable
            Called in a later turn of the loop, so it may submit, and in a copy of the
            context of this call, so that it does so on this task's current stream. An
            exception it raises is logged.
        """
        self._core.check_here()
        if self.done():
            self._core.call_back(callback, copy_context(), self)
            return
        rare = self.rare()
        rare.callbacks = added(rare.callbacks, (callback, copy_context()))
        self._core.want(self)

    def cancel(self) -> bool:
        """Remove a parked op. True if removed.

        False once it is staging, submitted or finished (rule R8), and for a free or an unpin,
        which always run (rules R5, R6).
        """
        self._core.check_here()
        parked = self._rare.parked if self._rare is not None else None
        if self._state is not _PARKED or parked is None or self.kind in ("free", "unpin"):
            return False
        self._core.parking.drop(
            parked, OpCancelled(f"{self.name} was cancelled before it was submitted")
        )
        return True

    def remove_done_callback(self, callback: Callable[[Op[T]], object]) -> None:
        """Take a callback back that has not been called.

        Parameters
        ----------
        callback : callable
            As it was added; one that was not is ignored.
        """
        self._core.check_here()
        rare = self._rare
        if rare is None:
            return
        for place, (known, _) in enumerate(rare.callbacks):
            if known == callback:
                rare.callbacks = [*rare.callbacks[:place], *rare.callbacks[place + 1 :]]
                self._core.unwant(self)
                return

    @property
    def writes_host(self) -> bool:
        """Whether it still has to write memory of the caller's (rule R8)."""
        return self._rare is not None and self._rare.writes_host

    # -- for the runtime -----------------------------------------------------------------

    def rare(self) -> _Rare:
        """The side object, made when first needed."""
        rare = self._rare
        if rare is None:
            rare = self._rare = _Rare()
        return rare

    def _disown(self) -> None:
        """The call that made it raised: it will never end, and nobody waits for it."""
        rare = self._rare
        if rare is not None and rare.scope is not None:
            scope, rare.scope = rare.scope, None
            scope._forget(self)

    def story(self) -> str:
        """What is known of the op, for errors and reports."""
        stream = self.stream
        place = f" on {stream}" if stream is not None else ""
        error = f", failed with {self._error!r}" if self._error is not None else ""
        return f"{self.name} ({self.kind}, {self._state.value}{place}, {self.where}{error})"

    def __repr__(self) -> str:
        return f"<Op {self.name} {self._state.value}>"
