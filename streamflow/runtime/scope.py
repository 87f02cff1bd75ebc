"""Scopes: what is submitted inside one has ended before it is left (rule R8)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio

from streamflow.errors import DeadlineExceeded, OpCancelled, OutOfDeviceMemory
from streamflow.runtime.failures import add_notes, raise_group
from streamflow.runtime.op import SCOPE, Op, OpState, added
from streamflow.runtime.report import Report, make_report
from streamflow.scheduler.budget import Budget, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamflow.runtime.core import Core

__all__ = ["Scope", "budgets_of", "check_budgets", "is_around_here"]


class Scope:
    """A structured lifetime of ops. Made by :meth:`Device.scope`; entered once.

    Attributes
    ----------
    name : str
    limit_nbytes : int or None
        Bytes of ``put`` and ``launch`` that may be in flight at a time.
    """

    def __init__(
        self, core: Core, *, limit: int | str | None, deadline: float | None, name: str | None
    ) -> None:
        self.name = "scope" if name is None else name
        self.limit_nbytes = None if limit is None else parse_nbytes(limit)
        self.deadline_s = None if deadline is None else _checked_deadline(deadline)
        self._core = core
        self._outer: Scope | None = None  # of this task, perhaps of another device
        self._ops: dict[Op[Any], None] = {}
        self._is_open = False
        self._is_entered = False
        self._is_late = False
        self._is_cut_short = False  # by the deadline
        self._has_lost_ops = False
        self._report: Report | None = None
        self._drop_until = 0
        self._on_empty: Callable[[], None] | None = None
        self._body: AbstractContextManager[Any] | None = None
        self._stop_timer: Callable[[], None] | None = None
        self._own_budget: Budget[Any] | None = None
        self.budgets: tuple[Budget[Any], ...] = ()

    # -- membership ----------------------------------------------------------------------

    def _find(self, core: Core) -> Scope | None:
        """The innermost open scope of ``core``'s device, from here outwards."""
        scope: Scope | None = self
        while scope is not None and not (scope._is_open and scope._core is core):
            scope = scope._outer
        return scope

    def _enroll(self, op: Op[Any]) -> None:
        """Make ``op``, just called for, end before its scope does."""
        scope = self._find(op._core)
        if scope is not None:
            scope._adopt(op)

    def _adopt(self, op: Op[Any]) -> None:
        op.rare().scope = self
        self._ops[op] = None

    def _forget(self, op: Op[Any]) -> None:
        self._ops.pop(op, None)
        if not self._ops and self._on_empty is not None:
            self._on_empty()

    def _ended(self, op: Op[Any]) -> None:
        """``op`` is in its final state."""
        self._ops.pop(op, None)
        ticket = op.ticket
        core = self._core
        if (
            ticket.failure is not None
            and ticket.position
            and not ticket.is_passed
            and core.lost is None
            and not core.is_closed
        ):
            mark = core.mark(ticket)  # it has failed, and still runs
            if mark._state is OpState.SUBMITTED:
                self._adopt(mark)
        if not self._ops and self._on_empty is not None:
            self._on_empty()

    def _failed(self, op: Op[Any], error: BaseException) -> None:
        """``op`` failed: drop what is parked now, in the next turn."""
        if error is self._core.lost:
            self._has_lost_ops = True  # the loss has dropped what is parked
            return
        if self._drop_until:
            return  # asked for already
        self._drop_until = next(reversed(self._ops), op).ticket.seq

        def drop() -> None:
            newest, self._drop_until = self._drop_until, 0
            self._drop_parked(f"{op.name} of scope {self.name!r} failed", newest)

        self._core.shell.call_soon(drop)

    def _drop_parked(self, why: str, newest: float = math.inf) -> None:
        """End the parked ops up to number ``newest``; frees always run (rule R5)."""
        for op in reversed(list(self._ops)):  # a follower goes on once its predecessor has left
            if op._state is OpState.PARKED and op.ticket.seq <= newest and op.kind != "free":
                parked = op.rare().parked
                if parked is not None:
                    self._core.parking.drop(parked, OpCancelled(f"{op.name} was dropped: {why}"))

    def _stop_host_work(self) -> None:
        for op in list(self._ops):
            if op._state is OpState.STAGING and op._rare is not None and op._rare.stop is not None:
                op._rare.stop()

    @property
    def num_unfinished(self) -> int:
        """Ops of this scope that have not been seen to end."""
        return len(self._ops)

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes of the limit that are taken; 0 without a limit."""
        return 0 if self._own_budget is None else self._own_budget.used_nbytes

    # -- entering and leaving --------------------------------------------------------------

    async def __aenter__(self) -> Scope:
        core = self._core
        core.check_open()
        if self._is_entered:
            raise RuntimeError("a scope is entered once: make another one")
        self._outer = _open_one(SCOPE.get())
        self.budgets = budgets_of(core)
        if self.limit_nbytes is not None:
            self._own_budget = Budget(self.limit_nbytes, f"the limit of scope {self.name!r}")
            self.budgets = (self._own_budget, *self.budgets)
        self._is_open = self._is_entered = True
        SCOPE.set(self)
        if self.deadline_s is not None:
            self._body = anyio.CancelScope()
            self._stop_timer = core.timers.call_later(self.deadline_s, self._expire)
            self._body.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        core = self._core
        if kind is GeneratorExit and not core.is_here():
            self._close()  # the loop is gone: nothing can be waited for
            return False
        core.check_here()
        is_cut = False
        if self._body is not None:
            try:
                is_cut = bool(self._body.__exit__(kind, error, traceback)) and error is not None
            except BaseException:  # left by another task than entered it
                self._close()
                for op in list(self._ops):
                    self._hand_over(op)
                raise
        leaving = None if is_cut else error  # cut short by our own deadline
        try:
            leaving = await self._drain(leaving, is_cut)
        finally:
            self._close()
        is_late = is_cut or self._is_cut_short
        for op in list(self._ops):
            self._hand_over(op)
        failures = core.failures.take(lambda owner: owner is self)
        if leaving is not None and not isinstance(leaving, Exception):
            add_notes(leaving, failures)
            if leaving is error:
                return False
            raise leaving
        if leaving is None and is_late:
            late = DeadlineExceeded(self._tell_late(), report=self._report)
            add_notes(late, failures)
            raise late from None
        if leaving is None and core.lost is not None and self._has_lost_ops:
            raise core.tell_loss() from core.lost
        if failures:
            raise_group(f"scope {self.name!r}", leaving, failures)
        return False

    async def _drain(self, error: BaseException | None, is_cut: bool) -> BaseException | None:
        """Wait for the ops. Returns the error to leave with: a cancellation comes first."""
        cancelled_type = anyio.get_cancelled_exc_class()
        if error is not None or is_cut:
            self._give_up(error)
        if not self._is_late and (error is None or isinstance(error, Exception)):
            try:
                while self._ops and not self._is_late:
                    await self._empty(shielded=False)
            except cancelled_type as cancelled:
                error = cancelled
        if self._ops and not (is_cut or isinstance(error, Exception)):
            self._give_up(error)  # cancelled or late meanwhile
        if self._ops:
            is_over = False

            def over() -> None:
                nonlocal is_over
                is_over = True
                self._wake()

            stop = self._core.shell.call_later(self._core.settings.close_timeout_s, over)
            try:
                while self._ops and not is_over:
                    if self._is_late:  # only what writes the caller's memory is waited for
                        for op in [op for op in self._ops if not op.writes_host]:
                            self._hand_over(op)
                    try:
                        await self._empty(shielded=True)
                    except cancelled_type as cancelled:
                        if error is None or isinstance(error, Exception):
                            error = cancelled
            finally:
                stop()
        return error

    def _give_up(self, error: BaseException | None) -> None:
        """Drop what is parked and stop staging: the rest is only drained (rule R8)."""
        self._is_cut_short = self._is_late and bool(self._ops)
        why = "its deadline passed" if self._is_late else f"its scope was left by {error!r}"
        self._drop_parked(why)
        if self._is_late or not isinstance(error, Exception):
            self._stop_host_work()

    async def _empty(self, *, shielded: bool) -> None:
        """Wait until no op is left, or :meth:`_wake`."""
        core = self._core
        if not self._ops:
            return
        wake, wait = core.shell.park()
        self._on_empty = wake

        def watch() -> None:  # the newest first: it ends last, as a rule
            if self._on_empty is not wake:
                return
            newest = next(reversed(self._ops), None)
            if newest is not None:
                rare = newest.rare()
                rare.on_ended = added(rare.on_ended, watch)
                newest._core.want(newest)

        watch()
        try:
            await wait(shielded)
        finally:
            self._on_empty = None

    def _wake(self) -> None:
        if self._on_empty is not None:
            self._on_empty()

    def _expire(self) -> None:
        self._is_late = True
        self._report = make_report(self._core, self._ops)
        if self._on_empty is not None:
            self._wake()
        elif self._body is not None:
            self._body.cancel()  # type: ignore[attr-defined]

    def _close(self) -> None:
        self._is_open = False
        if self._stop_timer is not None:
            self._stop_timer()
        if SCOPE.get() is self:
            SCOPE.set(_open_one(self._outer))

    def _hand_over(self, op: Op[Any]) -> None:
        """What outlasts the scope is the device's: its exit drains or quarantines it."""
        del self._ops[op]
        if op._rare is not None:
            op._rare.scope = None

    def _tell_late(self) -> str:
        report = "" if self._report is None else f"\n{self._report}"
        return f"scope {self.name!r} did not end within {self.deadline_s} s{report}"

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed" if self._is_entered else "not entered"
        return f"<Scope {self.name!r} {state}, {len(self._ops)} unfinished>"


def is_around_here(owner: Scope | None) -> bool:
    """Whether a failure in ``owner`` is for this task to hear of: no other will (rule R9)."""
    if owner is None or not owner._is_open:
        return True
    scope = SCOPE.get()
    while scope is not None and scope is not owner:
        scope = scope._outer
    return scope is owner


def budgets_of(core: Core) -> tuple[Budget[Any], ...]:
    """The budgets that work submitted here and now takes its share of."""
    scope = SCOPE.get()
    scope = None if scope is None else scope._find(core)
    return () if scope is None else scope.budgets


def check_budgets(core: Core, nbytes: int, what: str) -> None:
    """Raise ``OutOfDeviceMemory`` if ``nbytes`` are more than a limit can ever admit."""
    for budget in budgets_of(core):
        if nbytes > budget.limit_nbytes:
            raise OutOfDeviceMemory(
                f"{what} needs {nbytes} bytes, {budget.queue.what} is {budget.limit_nbytes}: "
                "split the work, or raise the limit"
            )


def _checked_deadline(deadline: float) -> float:
    """``deadline`` in seconds from now, if it is one."""
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
        raise TypeError(f"a deadline is a number of seconds, found {deadline!r}")
    if not deadline > 0:  # NaN too
        raise ValueError(f"a deadline is above 0 seconds from now, found {deadline}")
    return float(deadline)


def _open_one(scope: Scope | None) -> Scope | None:
    """``scope`` or the innermost around it that is open: a generator may close them late."""
    while scope is not None and not scope._is_open:
        scope = scope._outer
    return scope
