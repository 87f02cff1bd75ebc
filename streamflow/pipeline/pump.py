"""The pump: what asks for items, hands them over, and ends a run, as a state machine on the loop.

No task and no task group is behind it (rule R11): it goes on when an op of its own has ended, and
when the consumer comes for an item.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from streamflow.errors import Closed, UpstreamFailed
from streamflow.pipeline.flow import Item, Node, Outcome, Request, Stop
from streamflow.pipeline.progress import Bar
from streamflow.pipeline.sources import Opened
from streamflow.pipeline.stages import Clock
from streamflow.pipeline.stats import Meter
from streamflow.pipeline.work import Work
from streamflow.runtime.failures import add_note, add_notes, raise_group
from streamflow.runtime.host import is_async
from streamflow.runtime.op import Op

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Pump"]


class Pump:
    """One run of a pipeline.

    Parameters
    ----------
    depth : int
        Items asked for that the consumer has not got yet.
    ordered : bool
        False: whatever is there first is handed over first.
    """

    def __init__(
        self,
        core: Core,
        work: Work,
        node: Node,
        sources: Sequence[Opened],
        meter: Meter,
        consumer: Clock,
        bar: Bar | None,
        *,
        depth: int,
        ordered: bool,
    ) -> None:
        self._core = core
        self._work = work
        self._node: Node | None = node
        self._sources = list(sources)
        self._meter = meter
        self._consumer = consumer
        self._num_given = 0
        self._is_away = False  # the consumer has an item, and has not come back yet
        self._bar = bar
        self._depth = depth
        self._ordered = ordered
        self._slots: deque[Request] = deque()
        self._held: Item | None = None  # with the consumer, and on the device still
        self._wake: Callable[[], None] | None = None  # the consumer waits
        self._given: Outcome | None = None  # for the consumer that was woken
        self._is_begun = self._is_ending = self._is_stopping = False
        self.is_over = False
        self._on_over: list[Callable[[], None]] = []
        self._error: BaseException | None = None  # of closing the sources, or the device's end

    # -- the consumer -------------------------------------------------------------------------

    async def next_item(self) -> Any:
        """The next item's value.

        Raises
        ------
        StopAsyncIteration
            There is none.
        """
        core = self._core
        core.check_here()
        if self._wake is not None:
            raise RuntimeError("two tasks wait for the next item of one run: start a run for each")
        self._return_held()
        if self._is_away:
            self._is_away = False
            self._consumer.ended(self._num_given)
            self._num_given += 1
        if self.is_over and self._error is None:
            raise StopAsyncIteration
        if not self._is_begun and not self._is_stopping:
            self._is_begun = True
            core.waiting.runs[id(self)] = self
            self._meter.begun(core.clock_s())
        self._work.context.run(self._fill)
        self._hand_over()
        if self._given is not None:
            await checkpoint()  # which may raise: then it is there for the next call
        while self._given is None and not self._is_stopping:
            self._wake, wait = core.shell.park()
            try:
                self._hand_over()
                await wait(False)
            finally:
                self._wake = None
        outcome, self._given = self._given, None
        if isinstance(outcome, Item):
            value = outcome.value
            if outcome.is_lent:
                self._held = outcome
                self._work.keep(outcome.ops)
            if self._bar is not None:
                self._bar.update(1, outcome.nbytes)
            self._is_away = True
            self._consumer.came(self._num_given)
            return value
        if outcome is not None:
            error = outcome.error
        else:
            error, self._error = self._error, None
        del outcome
        await self.stop()
        try:
            self._raise(error)
        finally:
            del error, self  # what is raised has this frame (C23)

    async def close(self) -> None:
        """Leave early."""
        await self.stop()
        error, self._error = self._error, None
        others = self._work.take_failures()
        if error is not None and not isinstance(error, Closed):
            add_notes(error, others)
            raise error
        if others:
            raise_group("pipeline", None, others)

    async def stop(self) -> None:
        """End the run; returns once all of it has ended, or ``close_timeout_s`` is over."""
        core = self._core
        core.check_here()
        self.begin_stop()
        if not self.is_over:
            wake, wait = core.shell.park()
            self._on_over.append(wake)
            cancel = core.shell.call_later(core.settings.close_timeout_s, wake)
            try:
                await wait(True)
            finally:
                cancel()

    def _return_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._work.context.run(held.give_back)

    def _raise(self, error: BaseException | None) -> None:
        core = self._core
        failures = self._work.take_failures()
        if error is None:
            error, self._error = self._error, None
        if error is None:
            if failures:
                raise_group("pipeline", None, failures)
            raise StopAsyncIteration
        core.observed(error)
        if isinstance(error, (StopIteration, StopAsyncIteration)):
            told = RuntimeError(f"a stage raised {error!r}, which would end the consumer's loop")
            told.__cause__ = error
            error = told
            del told
        cause = error.__cause__ if isinstance(error, UpstreamFailed) else None
        others = [failure for failure in failures if failure is not error and failure is not cause]
        add_notes(error, others)
        try:
            raise error.with_traceback(None)
        finally:
            del error, cause, failures, others, self  # what is raised has this frame (C23)

    # -- asking and handing over -----------------------------------------------------------------

    def _fill(self) -> None:
        """Have as many requests open as there are slots."""
        while not self._is_ending and len(self._slots) < self._depth:
            slot = Request()
            self._slots.append(slot)
            assert self._node is not None
            self._node.request(partial(self._delivered, slot))

    def _delivered(self, slot: Request, outcome: Outcome) -> None:
        if self._is_stopping:
            return
        slot.outcome = outcome
        if isinstance(outcome, Stop):
            self._is_ending = True
        if self._wake is not None:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the consumer the next item that is there."""
        if self._given is not None:
            return
        for place, slot in enumerate(self._slots):
            outcome = slot.outcome
            if outcome is not None and (place == 0 or isinstance(outcome, Item)):
                del self._slots[place]
                self._given = outcome
                if self._wake is not None:
                    self._wake()
                if isinstance(outcome, Item):
                    self._work.context.run(self._fill)
                return
            if self._ordered:
                return

    # -- the end ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The device is being closed, or is lost."""
        if isinstance(error, Closed):
            self._error = error
            self.begin_stop()

    def silence(self) -> None:
        """The loop has ended: nobody is told anything any more."""
        self.is_over = self._is_stopping = True
        self._work.is_stopped = True

    def begin_stop(self) -> None:
        """Ask for nothing more and drop what is on its way; the sources are closed after that."""
        if self._is_stopping:
            return
        self._is_stopping = self._is_ending = True
        self._slots.clear()
        self._given = self._held = None
        if self._wake is not None:
            self._wake()
        if self._bar is not None:
            self._bar.close()
        if self._is_begun:
            self._meter.finished(self._core.clock_s())
        self._work.drop(partial(self._work.context.run, self._close_sources))

    def _close_sources(self) -> None:
        while self._sources:
            close = self._sources.pop().close
            if close is not None:
                self._run_close(close)
                return
        self._core.waiting.runs.pop(id(self), None)
        self._work.close()
        self._node = None  # with all that was on its way
        self.is_over = True
        for wake in self._on_over:
            wake()

    def _run_close(self, close: Callable[[], Any]) -> None:
        """Have the source's own clean-up run, also where the device takes no work any more."""
        core = self._core

        def ended(error: BaseException | None) -> None:
            if error is not None and self._error is None and not isinstance(error, Closed):
                self._error = error
            elif error is not None:
                add_note(self._error, f"closing the source failed as well: {error!r}")
            self._close_sources()

        if core.is_closed or core.lost is not None:
            if is_async(close):
                _spawn_close(core, close, ended)
            else:
                threading.Thread(
                    target=_close_blocking, args=(core, close, ended), daemon=True
                ).start()
            return
        op: Op[Any] = Op(core, "host", "close the source")
        core.host.submit(op, close, (), core.after(()))
        op.add_done_callback(lambda op: ended(op.exception()))


def _spawn_close(
    core: Core, close: Callable[[], Any], ended: Callable[[BaseException | None], None]
) -> None:
    from contextvars import Context

    async def run() -> None:
        error: BaseException | None = None
        try:
            with anyio.CancelScope(shield=True):
                await close()
        except Exception as failure:
            error = failure
        ended(error)

    core.shell.spawn(run, Context(), partial(ended, None))


def _close_blocking(
    core: Core, close: Callable[[], Any], ended: Callable[[BaseException | None], None]
) -> None:
    error: BaseException | None = None
    try:
        close()
    except Exception as failure:
        error = failure
    core.shell.call_soon_threadsafe(partial(ended, error))
