"""What one run of a pipeline has submitted: ops that end, or are dropped, before it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from streamflow.backends.origin import ON_BEHALF
from streamflow.runtime.failures import add_note, placed
from streamflow.runtime.op import SCOPE, Op, OpState
from streamflow.runtime.scope import Scope, budgets_of
from streamflow.runtime.stream import ENTERED

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Then", "Work"]

Then = Callable[[Any, BaseException | None], None]
"""Called on the loop with what a function has returned, or raised."""


class Work(Scope):
    """A scope whose ops outlive each other's failures: the good items before still come.

    It is entered by no task (rule R11): whatever is called by :meth:`run` belongs to it.
    """

    def __init__(self, core: Core, origin: tuple[CodeType, int]) -> None:
        super().__init__(core, limit=None, deadline=None, name="pipeline")
        self._outer = SCOPE.get()
        self.budgets = budgets_of(core)
        self._is_open = self._is_entered = True
        self.is_stopped = False
        self.at: str | None = None
        """Which stage is submitting, and for which item; for errors."""
        self._origin = origin  # the line that made the pipeline: what we submit is said to be there
        self.is_programs = False
        """Whether a function of the program's is submitting, which has lines of its own."""
        self._gathered: list[Op[Any]] | None = None
        self._kept: set[Op[Any]] = set()  # the consumer has got their arrays: never dropped
        self._places: dict[Op[Any], str] = {}
        self._blamed: dict[int, tuple[BaseException, str]] = {}  # root causes, by id
        self._context = copy_context()
        self._context.run(SCOPE.set, self)
        self._context.run(ON_BEHALF.set, origin)
        # The program's current stream would put all that is to overlap one after the other.
        self._context.run(ENTERED.set, ())

    @property
    def context(self) -> Context:
        """To run in what the stages do."""
        return self._context.copy()

    # -- submitting ------------------------------------------------------------------------

    def host(self, function: Callable[..., Any], *args: Any, name: str, then: Then) -> None:
        """Have ``function(*args)`` run on a worker thread, or on the loop if async.

        ``then`` is not called any more once the run has been stopped.
        """
        core = self._core
        try:
            core.check_open()
        except Exception as error:
            then(None, error)
            return
        at, self.at = self.at, None  # of another item: what is put gives the source its buffer back
        try:
            op: Op[Any] = Op(core, "host", name)
            core.host.submit(op, partial(function, *args), (), core.after(()))
        finally:
            self.at = at
        self.when_ended(op, then)

    def when_ended(self, op: Op[Any], then: Then) -> None:
        """Call ``then`` with the result or the failure of ``op``, in a later turn."""

        def ended(op: Op[Any]) -> None:
            if not self.is_stopped:
                error = op.exception()
                then(op._result if error is None else None, self.told(error))

        op.add_done_callback(ended)

    def gather(self) -> list[Op[Any]]:
        """Collects the ops that are submitted from now on, until the next call."""
        self._gathered = []
        return self._gathered

    def keep(self, ops: Sequence[Op[Any]]) -> None:
        """Do not drop these: what the consumer submits comes after them."""
        self._kept.update(op for op in ops if op in self._ops)

    # -- failures ----------------------------------------------------------------------------

    def placed(self, error: BaseException, what: str) -> BaseException:
        """``error``, raised by a function of the program's on the loop."""
        return placed(error, None, what)

    def told(self, error: BaseException | None) -> BaseException | None:
        """``error`` with a note of the stage whose op failed, where it is known."""
        cause = error
        while cause is not None:
            known = self._blamed.get(id(cause))
            if known is not None:
                add_note(error, known[1])
                break
            cause = cause.__cause__
        return error

    def take_failures(self) -> list[BaseException]:
        """What failed and nobody has heard of."""
        return self._core.failures.take(lambda owner: owner is self)

    def _adopt(self, op: Op[Any]) -> None:
        super()._adopt(op)
        if not self.is_programs:
            op._origin = self._origin
        if self.is_stopped:  # a mark behind what has failed and still runs
            self._core.want(op)
        if self._gathered is not None and self.at is not None:
            self._gathered.append(op)
        if self.at is not None:
            self._places[op] = self.at

    def _ended(self, op: Op[Any]) -> None:
        self._places.pop(op, None)
        self._kept.discard(op)
        super()._ended(op)

    def _forget(self, op: Op[Any]) -> None:
        self._places.pop(op, None)
        self._kept.discard(op)
        super()._forget(op)

    def _failed(self, op: Op[Any], error: BaseException) -> None:
        place = self._places.get(op)
        if place is not None:
            note = f"{op.name} belongs to {place}"
            add_note(error, note)
            self._blamed[id(error)] = (error, note)

    # -- the end -----------------------------------------------------------------------------

    def drop(self, then: Callable[[], None]) -> None:
        """Drop what is parked, stop what is on the host, and call ``then`` once all has ended."""
        self.is_stopped = True
        if self._core.lost is None:
            kept = {op: self._ops.pop(op) for op in list(self._ops) if op in self._kept}
            self._drop_parked("its pipeline was left")
            self._stop_host_work()
            self._ops.update(kept)
        for op in list(self._ops):
            if op._state is OpState.SUBMITTED:
                self._core.reap(op.ticket.timeline)
        if not self._ops:
            self._core.shell.call_soon(then)
            return

        def emptied() -> None:
            self._on_empty = None
            self._core.shell.call_soon(then)

        self._on_empty = emptied
        for op in self._ops:
            self._core.want(op)

    def close(self) -> None:
        """Nothing belongs to it any more; what has not ended is the device's.

        Failures on the host were of items that nobody will get: only those of ops on the device
        are still to be heard of.
        """
        self._is_open = False
        for error in self.take_failures():
            if id(error) in self._blamed:
                self._core.failures.note(error, self)
        for op in list(self._ops):
            self._hand_over(op)
        self._places.clear()
