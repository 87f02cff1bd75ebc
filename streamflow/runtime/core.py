"""The state of one open device: what its ops, arrays and streams share.

Everything here runs on the device's own loop unless it says otherwise (rule R11).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial
from logging import getLogger
from threading import current_thread
from typing import Any

from streamflow.backends.base import Backend
from streamflow.config import Settings
from streamflow.errors import (
    Closed,
    DeviceLost,
    OpCancelled,
    StreamflowError,
    UpstreamFailed,
    WrongThread,
)
from streamflow.memory.pinned import PinnedBlocks
from streamflow.memory.space import enter_space
from streamflow.memory.staging import Staging
from streamflow.runtime.abroad import Abroad
from streamflow.runtime.allocate import Memory
from streamflow.runtime.closed_lines import ClosedLines
from streamflow.runtime.failures import Failures, add_note
from streamflow.runtime.futures import Futures
from streamflow.runtime.host import HostTasks
from streamflow.runtime.instrument import Instrument
from streamflow.runtime.lease_queue import LeaseQueue
from streamflow.runtime.losing import lose
from streamflow.runtime.op import SCOPE, Op, OpState, added, next_seq
from streamflow.runtime.parked import PickLine, no_calls
from streamflow.runtime.parking import Parking
from streamflow.runtime.pinning import Pins
from streamflow.runtime.poller import Poller
from streamflow.runtime.recording import Recording
from streamflow.runtime.report import Report
from streamflow.runtime.scope import budgets_of, check_budgets
from streamflow.runtime.timers import Timers
from streamflow.runtime.tracer import Tracer
from streamflow.runtime.waiting import Waiting
from streamflow.scheduler.guards import Halt, Joinable, check_process, guard
from streamflow.scheduler.hazards import Region, add_unpassed
from streamflow.scheduler.loops import EndedShell, Shell
from streamflow.scheduler.machine import FINAL, OpStep, step
from streamflow.scheduler.placement import Placement, choose_lane
from streamflow.scheduler.reaper import post_orphan
from streamflow.scheduler.timeline import Ticket, Timeline
from streamflow.scheduler.workers import Workers

__all__ = ["Core"]

_DONE = OpState.DONE


class Core:
    """What ops, arrays and streams of one device share."""

    def __init__(self, backend: Backend, shell: Shell, settings: Settings) -> None:
        self.backend = backend
        self.shell = shell
        self.settings = settings
        self.window = min(settings.window, backend.num_queued_max)
        self.instrument: Instrument | None = None
        self.tracer = Tracer(self)
        self.recording: Recording | None = None  # while tasks capture graphs
        self.calling: str | None = None  # the op whose function runs on the loop right now
        self.placement: Placement | None = None  # the user's policy; None: by affinity
        self.lost: DeviceLost | None = None
        self.is_loss_seen = False
        self.is_closing = False  # no more submissions
        self.left_behind: Report | None = None  # what had not ended when it was closed
        self.is_closed = False
        self.needs_check = False  # closed, lost, or something dropped: the hot paths look closer
        self.is_serial = settings.serial
        self.abroad = Abroad(self)
        self.is_naming = False  # the short cuts name no op
        self.is_memory_short = False  # somebody waits for memory: all that runs is looked at
        self._num_short = 0
        self.choose_ways()
        self.serial_op: Op[Any] | None = None  # in serial mode: what is being worked on
        # Virtual time where there is one: ages and deadlines are counted in it.
        self.clock_s = backend.clock_s if backend.is_virtual else time.monotonic
        self.events: list[Any] = []
        self.lines: list[Timeline] = []
        self.parking = Parking(self)
        self.num_submitted = 0
        self.num_finished = 0
        self.num_parked = 0
        self._dropped: deque[tuple[int, Timeline, Region]] = deque()
        self.leftovers: deque[Callable[[], None]] = deque()  # of finalisers, for a worker thread
        self.closed_lines = ClosedLines(self)
        self.waiting = Waiting(self)
        self.failures = Failures()
        self._pending: dict[Op[Any], None] = {}  # parked and staging ops
        self.timers = Timers(self)
        self.poller = Poller(self)
        self.completion = self.poller.completion
        self.schedule_turn = self.poller.schedule
        wake, prepare = self.poller.wake, backend.set_current
        self.background, self.stagers, host = (
            Workers(f"streamflow-{name}", num, prepare, wake, backend.checker)
            for name, num in (
                ("background", 2),
                ("stage", settings.staging_threads),
                ("host", settings.host_workers),
            )
        )
        self.host = HostTasks(self, host)
        self.pools = (self.background, self.stagers, self.host.workers)
        self.futures = Futures(self)
        self.after, self.tickets_of = self.futures.after, self.futures.tickets_of
        self.pinned = PinnedBlocks(
            backend.allocate_pinned_blocking,
            backend.free_pinned_blocking,
            budget_nbytes=settings.pinned_budget_nbytes,
            numa_node=backend.properties.numa_node,
            is_here=self.is_here,
        )
        self.leases = LeaseQueue(self)
        self.pins = Pins(self)
        self.staging = Staging(
            backend,
            self.stagers,
            in_nbytes=settings.staging_in_nbytes,
            out_nbytes=settings.staging_out_nbytes,
            num=settings.staging_threads,
        )
        controls = backend.controls()
        if controls is not None:
            controls.on_change = self.poller.wake_all
            controls.on_naming = self.name_ops
        self.compute = [self.make_timeline(f"compute{n}") for n in range(settings.compute_lanes)]
        self.h2d, self.d2h, self.free_lane = map(self.make_timeline, ("h2d", "d2h", "free"))
        self.graph_lane: Timeline | None = None  # for graphs that go alone: made by the first
        self.memory = Memory(self)
        self.space = enter_space(backend, self.memory.trim)
        guard(self)

    def choose_ways(self) -> None:
        """Whether the hot paths may take their short cuts: those tell nobody of what they do."""
        is_plain = not (
            self.is_serial
            or self.recording is not None
            or self.abroad
            or self.is_naming
            or self.is_memory_short
        )
        self.is_fast = is_plain and self.instrument is None
        self.is_only_traced = is_plain and self.instrument is not None

    def be_short(self, by: int) -> None:
        """One more kind of memory is waited for, or one less."""
        self._num_short += by
        self.is_memory_short = self._num_short > 0
        self.choose_ways()

    def name_ops(self, is_naming: bool) -> None:
        """Have every submission name its op, or no more."""
        self.is_naming = is_naming
        self.choose_ways()

    @property
    def num_undelivered(self) -> int:
        """Tasks on worker threads whose results are still to come."""
        background, stagers, host = self.pools  # asked once a turn: no generator
        return background.num_undelivered + stagers.num_undelivered + host.num_undelivered

    # -- checks ------------------------------------------------------------------------

    def is_here(self) -> bool:
        """Whether the caller runs on this device's loop."""
        return self.shell.current() is self.shell.key

    def check_here(self) -> None:
        """Raise unless the caller runs on this device's loop."""
        if self.shell.current() is not self.shell.key:
            check_process()
            raise WrongThread(
                f"device {self.backend.index} belongs to the event loop that entered it; this "
                "call came from another thread or loop. Open a Device of its own there"
            )

    def check_open(self) -> None:
        """Raise unless work may be submitted here and now."""
        self.check_here()
        if self.calling is not None:
            raise RuntimeError(
                f"{self.calling} is running: the function of dev.call submits to the stream that "
                "it is given, and nothing through the device"
            )
        if self.is_closing:
            raise Closed(f"device {self.backend.index} is closed")
        if self.lost is not None:
            raise self.tell_loss() from self.lost
        self.needs_check = False
        self.drain_dropped()

    def tell_loss(self) -> DeviceLost:
        """An error of the caller's own that says how the device was lost: somebody sees it."""
        assert self.lost is not None
        self.is_loss_seen = True
        return DeviceLost(str(self.lost), suspects=self.lost.suspects)

    # -- fork and exit (rule R12) ------------------------------------------------------------

    def on_fork(self) -> None:
        """Refuse every call, and let finalisers do nothing: the device is the parent's."""
        self.shell = EndedShell(self.shell.key)
        self.needs_check = self.is_closing = self.is_closed = True

    def on_exit(self) -> list[Joinable]:
        """Have the threads end between two steps, and return them."""
        threads: list[Joinable] = []
        loop = self.shell.thread
        if loop is not current_thread() and loop.is_alive() and not self.is_closed:
            halt = Halt()  # a daemon's: between two of its turns
            if self.shell.call_soon_threadsafe(halt):
                threads.append(halt)
        self.staging.stop_all()
        for pool in self.pools:
            pool.close()
        threads += self.poller.end()
        return [*threads, *(thread for pool in self.pools for thread in pool.threads)]

    # -- streams and events ----------------------------------------------------------------

    def make_timeline(
        self, name: str, *, priority: int = 0, is_ordered: bool = False, where: str = ""
    ) -> Timeline:
        """A new stream of the device."""
        stream = self.backend.create_stream(priority=priority)
        if self.backend.checker is not None:
            self.backend.checker.name_stream(stream, name)
        uid = self.backend.stream_id(stream)
        line = Timeline(uid, stream, name, is_ordered=is_ordered, owner=self, where=where)
        self.lines.append(line)
        return line

    def settle(self, line: Timeline) -> None:
        """Block until what was submitted to ``line`` has ended: serial mode only (rule R9).

        A gate on virtual time would never open meanwhile: then go on without.
        """
        backend = self.backend
        while line.inflight and self.lost is None:
            try:
                if not backend.is_virtual:
                    line.inflight[-1].event.sync()
                elif not line.inflight[-1].event.is_done and not backend.advance(0):
                    return
            except Exception as error:
                self.lose(error, "running in serial mode")
            self.reap(line)
        self.serial_op = None

    def picker(self, op: Op[Any]) -> PickLine:
        """Picks the compute lane of ``op``, at the moment of its submission."""
        if self.placement is None:
            return partial(choose_lane, self.compute)
        return partial(self.placement.pick, op.name, op.kind)

    def take_event(self) -> Any:
        """An event whose last record, if any, is known to have completed."""
        return self.events.pop() if self.events else self.backend.create_event()

    def now(self) -> float:
        """The host's clock, for ages and reports."""
        return time.monotonic()

    # -- submission ------------------------------------------------------------------------

    def submitted(self, op: Op[Any]) -> None:
        """Note that ``op`` just got its position."""
        self.num_submitted += 1
        if self.is_memory_short:
            op.rare().is_wanted = True
        rare = op._rare
        if rare is None:
            op._state = step(op._state, OpStep.SUBMIT, op.story)
            return
        self._pending.pop(op, None)
        if rare.doomed is not None:
            rare.is_wanted = False  # not wanted on this stream yet
            self.fail(op, rare.doomed)
            return
        op._state = step(op._state, OpStep.SUBMIT, op.story)
        if rare.is_wanted or rare.on_device_done is not None:
            self.completion.want(op.ticket.timeline, time.monotonic())
            rare.is_wanted = True
            self.schedule_turn()

    def fail(self, op: Op[Any], error: BaseException, inherited: Iterable[Ticket] = ()) -> None:
        """End ``op`` with ``error``; its readers fail with ``UpstreamFailed`` (rule R9)."""
        ticket = op.ticket
        ticket.failure = error
        if not ticket.position:
            flat: list[Ticket] = []
            for older in inherited:
                add_unpassed(older, flat)
            ticket.inherited = tuple(dict.fromkeys(flat))
        op._error, op._result = error, None  # its array may go: the ticket stays known (R6)
        if isinstance(error, OpCancelled):
            self._finish(op, OpStep.CANCEL)
            return
        scope = op._rare.scope if op._rare is not None else None
        if error is not self.lost and not isinstance(error, UpstreamFailed):
            self.failures.note(error, scope)
            add_note(error, f"{op.name} was submitted at {op.where}")
        if scope is not None and not isinstance(error, UpstreamFailed):
            scope._failed(op, error)
        self._finish(op, OpStep.FAIL)

    def start(self, op: Op[Any]) -> None:
        """The work of ``op`` on the host begins."""
        op._state = step(op._state, OpStep.START, op.story)
        self._pending[op] = None
        if op._rare is not None and op._rare.traced is not None:
            self.tracer.began(op._rare.traced)

    def complete(self, op: Op[Any]) -> None:
        """All of ``op`` has ended well."""
        self._finish(op, OpStep.COMPLETE)

    def op_of(self, ticket: Ticket) -> Op[Any] | None:
        """The op of a ticket that has not retired, or that failed."""
        op: Op[Any] | None = ticket.op
        return op

    def observed(self, error: BaseException) -> None:
        """Somebody has seen ``error``, which may be the failure of several ops."""
        if error is self.lost:
            self.is_loss_seen = True
        self.failures.observed(error)

    # -- scopes ------------------------------------------------------------------------

    def has_budgets(self) -> bool:
        """Whether work submitted here and now has to be admitted by a scope."""
        return bool(budgets_of(self))

    def check_budgets(self, nbytes: int, what: str) -> None:
        """Raise if ``nbytes`` are more than a scope's limit can ever admit."""
        if SCOPE.get() is not None:
            check_budgets(self, nbytes, what)

    # -- completion ------------------------------------------------------------------------

    def want(self, op: Op[Any]) -> None:
        """Have the poller run until ``op`` has ended."""
        rare = op.rare()
        if not rare.is_wanted:
            rare.is_wanted = True
            if op.ticket.position:
                self.completion.want(op.ticket.timeline, time.monotonic())
        self.schedule_turn()

    def unwant(self, op: Op[Any]) -> None:
        """Take :meth:`want` back if nothing else wants ``op``."""
        rare = op._rare
        if (
            rare is not None
            and rare.is_wanted
            and not rare.wakers
            and not rare.callbacks
            and not rare.on_ended
            and rare.on_device_done is None
            and not rare.budgets
        ):
            rare.is_wanted = False
            if op.ticket.position:
                self.completion.unwant(op.ticket.timeline)

    def when_ended(self, ticket: Ticket, react: Callable[[], None]) -> None:
        """Call ``react`` once the work of ``ticket`` has ended in whatever way."""
        op: Op[Any] | None = ticket.op
        if ticket.failure is not None and ticket.position and not ticket.is_passed:
            op = ticket.timeline.owner.mark(ticket)  # failed, and still running
        if op is None or op._state in FINAL:
            react()
            return
        rare = op.rare()
        rare.on_ended = added(rare.on_ended, react)
        op._core.want(op)

    def mark(self, ticket: Ticket) -> Op[None]:
        """An op that ends when the work of ``ticket`` has, whose own op has failed already."""
        line = ticket.timeline if ticket.timeline.stream is not None else self.free_lane
        outer = SCOPE.set(None)  # whoever asks, it is the device's own
        op: Op[None] = Op(self, "record", None)
        SCOPE.reset(outer)
        self.parking.go(op, no_calls, line, (ticket,))
        return op

    def when_all_ended(self, tickets: list[Ticket], react: Callable[[], None]) -> None:
        """Call ``react`` once every op of ``tickets`` has ended."""
        while tickets:
            ticket = tickets.pop()
            if ticket.position and not ticket.is_passed:
                # It may have ended with what set this off. Seen in a later turn only, what comes
                # next would depend on how far the workers are by then (R15).
                ticket.timeline.owner.reap(ticket.timeline)
            op: Op[Any] | None = ticket.op
            is_running = ticket.position > 0 and not ticket.is_passed
            if is_running or (op is not None and op._state not in FINAL):
                self.when_ended(ticket, partial(self.when_all_ended, tickets, react))
                return
        react()

    def reap(self, timeline: Timeline, is_head_done: bool = False) -> int:
        """Retire what has completed on ``timeline``; a fault found here loses the device."""
        try:
            num = self.completion.count_done(timeline, is_head_done)
        except Exception as error:
            failure = self.lose(error, "polling an event")
            if self.lost is None:  # whatever it is, nothing can be seen to finish any more
                self.lose_to(DeviceLost(str(failure)), error)
            return 0
        if num:
            self._retire(timeline, num)
        return num

    def _retire(self, timeline: Timeline, num: int) -> None:
        events = self.events
        finished = []
        self.num_finished += num
        for ticket in timeline.retire(num):
            op: Op[Any] | None = ticket.op
            if ticket.holds == 0:
                events.append(ticket.event)
            if op is not None and ticket.failure is None:
                if op._rare is None:
                    op._state = _DONE  # the table's submitted -> done, without a call
                    ticket.forget()
                else:
                    finished.append(op)
            else:
                ticket.event = None
        # There is a new head.
        if timeline.wants and (timeline.inflight or timeline.waiting is not None):
            self.completion.moved(timeline, time.monotonic(), num)
        if timeline.waiting is not None:
            self.parking.room_in(timeline, ticket)
        for op in finished:
            self.device_done(op)

    def device_done(self, op: Op[Any]) -> None:
        """The device has finished ``op``; a host step may follow."""
        rare = op._rare
        if rare is not None and rare.on_device_done is not None:
            step, rare.on_device_done = rare.on_device_done, None
            try:
                step()
            except Exception as error:
                error.__traceback__ = None  # its frames may hold arrays (C23)
                self.fail(op, error)
                return
        self.complete(op)

    def _finish(self, op: Op[Any], happened: OpStep) -> None:
        """Put ``op`` in its final state and tell everybody."""
        rare = op._rare
        if happened is OpStep.COMPLETE and rare is not None and rare.on_retired is not None:
            on_retired, rare.on_retired = rare.on_retired, None
            try:
                on_retired()
            except Exception as error:
                self.fail(op, error)
                return
        op._state = step(op._state, happened, op.story)
        if self.abroad:
            self.abroad.ended(op)
        ticket = op.ticket
        if happened is OpStep.COMPLETE:
            ticket.forget()
        self._pending.pop(op, None)
        if rare is None:
            return
        if rare.traced is not None:
            self.tracer.finished(op, rare.traced)
        if rare.is_wanted:
            rare.is_wanted = False
            if ticket.position:
                self.completion.unwant(ticket.timeline)
        op._rare = None
        if rare.on_retired is not None:
            try:
                rare.on_retired()
            except Exception as error:  # the op has failed already: this is only worse
                add_note(op._error, f"giving back what it held failed as well: {error!r}")
        for budget in rare.budgets:
            self.parking.admitted(budget, budget.release(rare.nbytes), ticket)
        if rare.scope is not None:
            rare.scope._ended(op)
        for react in rare.on_ended:
            react()
        for wake in rare.wakers:
            wake()
        # Later: it may submit, and we may be in a submission.
        for callback, context in rare.callbacks:
            self.call_back(callback, context, op)

    def call_back(
        self, callback: Callable[[Op[Any]], object], context: Context, op: Op[Any]
    ) -> None:
        """Run a user's callback in a later turn; what it raises is logged, as asyncio does."""

        def call() -> None:
            try:
                callback(op)
            except Exception:
                from logging import getLogger

                getLogger("streamflow").exception("a done callback of %s raised", op.name)

        self.shell.call_soon(partial(context.run, call))

    def pending(self, op: Op[Any]) -> None:
        """Note that ``op`` waits for something on the host."""
        self._pending[op] = None
        self.num_parked += 1

    def pending_ops(self) -> list[Op[Any]]:
        """The ops that are parked, staging, or in a host step, oldest first."""
        return list(self._pending)

    # -- memory that was dropped ----------------------------------------------------------------

    def post_free(self, address: int, home: Timeline, root: Region) -> None:
        """Leave a free to the loop. Any thread; called by finalisers (rule R12)."""
        if not self.is_closed:  # closing has freed everything already
            self._dropped.append((address, home, root))
            self.needs_check = True
            if self.is_memory_short:  # somebody waits for memory, and no turn may be coming
                self.poller.wake()

    def leave(self, action: Callable[[], None]) -> None:
        """Have a worker thread do ``action``, sometime. Any thread; called by finalisers (R12)."""
        if self.is_closed:
            post_orphan(action)
        else:
            self.leftovers.append(action)
            self.needs_check = True

    def drain_dropped(self) -> None:
        """Submit the frees that finalisers left, and close the streams."""
        if self.closed_lines:
            self.closed_lines.forget()
        while self.leftovers:
            self.background.submit(next_seq(), self.leftovers.popleft(), _ignore)
        if self.leases.dropped:
            self.leases.take_dropped()
        if self.pins.dropped:
            self.pins.take_dropped()
        dropped = self._dropped
        if dropped:
            # Not the work of whatever scope happens to submit something now.
            outer = SCOPE.set(None)
            while dropped and self.lost is None:
                self.memory.free_dropped(*dropped.popleft())
            SCOPE.reset(outer)

    # -- faults -----------------------------------------------------------------------------------

    def lose(self, error: BaseException, doing: str) -> StreamflowError:
        """Translate ``error``; if it is sticky, fail everything that has not finished."""
        translated = self.backend.translate(error, doing)
        if isinstance(translated, DeviceLost):
            return self.lose_to(translated, error)
        return translated

    def lose_to(self, reason: DeviceLost, cause: BaseException) -> DeviceLost:
        """Fail everything that has not finished; the first reason stays."""
        if self.lost is None:
            lose(self, reason, cause)
        assert self.lost is not None
        return self.lost


def _ignore(_: object, error: BaseException | None) -> None:
    if error is not None:
        getLogger("streamflow").error("clean-up failed", exc_info=error)
