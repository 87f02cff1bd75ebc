"""The state of one open device: what its ops, arrays and streams share.

Everything here runs on the device's own loop unless it says otherwise (rule R11).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Thread
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
from streamflow.memory.pinned import PinnedPool
from streamflow.memory.staging import Staging
from streamflow.runtime.allocate import Memory
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.instrument import Instrument
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.parking import Parking
from streamflow.runtime.poller import Poller
from streamflow.runtime.tracer import Tracer
from streamflow.scheduler.completion import count_done
from streamflow.scheduler.guards import check_process, guard
from streamflow.scheduler.hazards import Region, add_unpassed
from streamflow.scheduler.loops import EndedShell, Shell
from streamflow.scheduler.timeline import Ticket, Timeline
from streamflow.scheduler.workers import Workers

__all__ = ["Core"]

_SUBMITTED, _DONE, _FAILED, _CANCELLED = (
    OpState.SUBMITTED,
    OpState.DONE,
    OpState.FAILED,
    OpState.CANCELLED,
)
_ENDED = (_DONE, _FAILED, _CANCELLED)


class Core:
    """What ops, arrays and streams of one device share."""

    def __init__(self, backend: Backend, shell: Shell, settings: Settings) -> None:
        self.backend = backend
        self.shell = shell
        self.settings = settings
        self.window = min(settings.window, backend.num_queued_max)
        self.instrument: Instrument | None = None
        self.tracer = Tracer(self)
        self.lost: DeviceLost | None = None
        self.is_loss_seen = False
        self.is_closing = False  # no more submissions
        self.is_closed = False
        self.needs_check = False  # closed, lost, or something dropped: the hot paths look closer
        self.events: list[Any] = []
        self.lines: list[Timeline] = []
        self.parking = Parking(self)
        self.num_submitted = 0
        self.num_finished = 0
        self._dropped: deque[tuple[int, Timeline, Region]] = deque()
        self._dropped_lines: deque[Timeline] = deque()
        self._closed_lines: deque[Timeline] = deque()
        self._failures: dict[int, BaseException] = {}  # by id; nobody has seen them yet
        self._pending: dict[Op[Any], None] = {}  # parked and staging ops
        self.poller = Poller(self)
        self.completion = self.poller.completion
        self.schedule_turn = self.poller.schedule
        wake, prepare = self.poller.wake, backend.set_current
        self.background = Workers("streamflow-background", 2, prepare, wake)
        self.stagers = Workers("streamflow-stage", settings.staging_threads, prepare, wake)
        self.pinned = PinnedPool(
            backend.allocate_pinned_blocking,
            backend.free_pinned_blocking,
            budget_nbytes=settings.pinned_budget_nbytes,
        )
        self.staging = Staging(
            backend,
            self.stagers,
            in_nbytes=settings.staging_in_nbytes,
            out_nbytes=settings.staging_out_nbytes,
            num=settings.staging_threads,
        )
        controls = backend.controls()
        if controls is not None:
            controls.on_change = wake
        self.compute = [self.make_timeline(f"compute{n}") for n in range(settings.compute_lanes)]
        self.h2d, self.d2h, self.free_lane = map(self.make_timeline, ("h2d", "d2h", "free"))
        self.memory = Memory(self)
        guard(self)

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
        if self.is_closing:
            raise Closed(f"device {self.backend.index} is closed")
        if self.lost is not None:
            self.is_loss_seen = True
            raise DeviceLost(str(self.lost), suspects=self.lost.suspects) from self.lost
        self.needs_check = False
        self.drain_dropped()

    # -- fork and exit (rule R12) ------------------------------------------------------------

    def on_fork(self) -> None:
        """Refuse every call, and let finalisers do nothing: the device is the parent's."""
        self.shell = EndedShell(self.shell.key)
        self.needs_check = self.is_closing = self.is_closed = True

    def on_exit(self) -> list[Thread]:
        """Have the threads end between two steps, and return them."""
        self.staging.stop_all()
        self.background.close()
        self.stagers.close()
        return [*self.poller.end(), *self.background.threads, *self.stagers.threads]

    # -- streams and events ----------------------------------------------------------------

    def make_timeline(self, name: str, *, priority: int = 0, is_ordered: bool = False) -> Timeline:
        """A new stream of the device."""
        stream = self.backend.create_stream(priority=priority)
        uid = self.backend.stream_id(stream)
        line = Timeline(uid, stream, name, is_ordered=is_ordered, owner=self)
        self.lines.append(line)
        return line

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
        op._state = _SUBMITTED
        rare = op._rare
        if rare is None:
            return
        self._pending.pop(op, None)
        if rare.doomed is not None:
            rare.is_wanted = False  # not wanted on this stream yet
            self.fail(op, rare.doomed)
            return
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
        op._error = error
        is_cancelled = isinstance(error, OpCancelled)
        if not is_cancelled and not isinstance(error, UpstreamFailed):
            self._failures[id(error)] = error
        self.finish(op, _CANCELLED if is_cancelled else _FAILED)

    def observed(self, error: BaseException) -> None:
        """Somebody has seen ``error``, which may be the failure of several ops."""
        if error is self.lost:
            self.is_loss_seen = True
        self._failures.pop(id(error), None)

    def take_failures(self) -> list[BaseException]:
        """The failures nobody has seen; they count as seen now.

        Root causes only: an op that failed with its upstream says nothing new.
        """
        failures = [error for error in self._failures.values() if error is not self.lost]
        self._failures.clear()
        return failures

    def op_of(self, ticket: Ticket) -> Op[Any] | None:
        """The op of a ticket that has not retired, or that failed."""
        op: Op[Any] | None = ticket.op
        return op

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
        ):
            rare.is_wanted = False
            if op.ticket.position:
                self.completion.unwant(op.ticket.timeline)

    def when_ended(self, ticket: Ticket, react: Callable[[], None]) -> None:
        """Call ``react`` once the work of ``ticket`` has ended in whatever way."""
        op: Op[Any] | None = ticket.op
        if ticket.failure is not None and ticket.position and not ticket.is_passed:
            op = ticket.timeline.owner.mark(ticket)  # failed, and still running
        elif ticket.is_passed or ticket.failure is not None or op is None:
            react()
            return
        assert op is not None
        if op._state in _ENDED:  # the mark could not be made: the device is lost
            react()
            return
        op.rare().on_ended.append(react)
        op._core.want(op)

    def mark(self, ticket: Ticket) -> Op[None]:
        """An op that ends when the work of ``ticket`` has, whose own op has failed already."""
        line = ticket.timeline if ticket.timeline.stream is not None else self.free_lane
        op: Op[None] = Op(self, "record", None)
        self.parking.go(op, lambda _: 0, line, (ticket,))
        return op

    def when_all_ended(self, tickets: list[Ticket], react: Callable[[], None]) -> None:
        """Call ``react`` once every op of ``tickets`` has ended."""
        while tickets:
            ticket = tickets.pop()
            if not (ticket.is_passed or (ticket.failure is not None and not ticket.position)):
                self.when_ended(ticket, partial(self.when_all_ended, tickets, react))
                return
        react()

    def after_tickets(self, after: Sequence[Any]) -> list[Ticket]:
        """The tickets that ``after=`` names: ops, or arrays for their latest write.

        Raises
        ------
        TypeError
            Something else.
        ValueError
            An op of another event loop.
        """
        if isinstance(after, (Op, DeviceArray)):
            after = (after,)
        tickets: list[Ticket] = []
        for item in after:
            if isinstance(item, DeviceArray):
                item.check_usable()
                for other in item._region.overlapping:
                    add_unpassed(other.last_write, tickets)
                core, ticket = item._core, item._region.last_write
            elif isinstance(item, Op):
                core, ticket = item._core, item.ticket
            else:
                raise TypeError(f"after= takes ops and device arrays, found {item!r}")
            if isinstance(item, Op) and item.kind == "staged":
                raise ValueError("after= takes ops of the device: pass the array instead")
            if core is not self and core.shell.key != self.shell.key:
                raise ValueError(f"{item!r} belongs to another event loop")
            if not ticket.is_passed or ticket.failure is not None:
                tickets.append(ticket)
        return tickets

    def reap(self, timeline: Timeline) -> int:
        """Retire what has completed on ``timeline``; a fault found here loses the device."""
        try:
            num = count_done(timeline)
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
                    op._state = _DONE
                    ticket.forget()
                else:
                    finished.append(op)
            else:
                ticket.event = None
        self.completion.moved(timeline, time.monotonic())
        if timeline.waiting:
            self.parking.room_in(timeline)
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
                self.fail(op, error)
                return
        self.finish(op, _DONE)

    def finish(self, op: Op[Any], state: OpState) -> None:
        """Put ``op`` in its final state and tell everybody."""
        op._state = state
        ticket = op.ticket
        if state is _DONE:
            ticket.forget()
        self._pending.pop(op, None)
        rare = op._rare
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
            except Exception as error:
                op._error = ticket.failure = error
                op._state = _FAILED
                self._failures[id(error)] = error
        for react in rare.on_ended:
            react()
        for wake in rare.wakers:
            wake()
        for callback in rare.callbacks:  # later: it may submit, and we may be in a submission
            self.call_back(callback, op)

    def call_back(self, callback: Callable[[Op[Any]], object], op: Op[Any]) -> None:
        """Run a user's callback in a later turn; what it raises is logged, as asyncio does."""

        def call() -> None:
            try:
                callback(op)
            except Exception:
                from logging import getLogger

                getLogger("streamflow").exception("a done callback of %s raised", op.name)

        self.shell.call_soon(call)

    def pending(self, op: Op[Any], state: OpState) -> None:
        """Note that ``op`` waits for something on the host."""
        op._state = state
        self._pending[op] = None

    def pending_ops(self) -> list[Op[Any]]:
        """The ops that are parked, staging, or in a host step, oldest first."""
        return list(self._pending)

    # -- streams that were closed or dropped -----------------------------------------------

    def post_line(self, line: Timeline) -> None:
        """Leave an explicit stream to the loop. Any thread; called by finalisers (R12)."""
        self._dropped_lines.append(line)
        self.needs_check = True

    def close_line(self, line: Timeline) -> None:
        """Destroy a stream nobody submits to any more, once nothing is parked on it."""
        if line.parked_tail is not None or line.waiting:
            self.post_line(line)  # again later
            return
        stream, line.stream = line.stream, None
        if stream is not None:
            stream.close()
        self._closed_lines.append(line)

    def _forget_lines(self) -> None:
        for _ in range(len(self._dropped_lines)):
            self.close_line(self._dropped_lines.popleft())
        for _ in range(len(self._closed_lines)):
            line = self._closed_lines.popleft()
            self.reap(line)
            if line.inflight:
                self._closed_lines.append(line)
            else:
                self.lines.remove(line)

    # -- memory that was dropped ----------------------------------------------------------------

    def post_free(self, address: int, home: Timeline, root: Region) -> None:
        """Leave a free to the loop. Any thread; called by finalisers (rule R12)."""
        if not self.is_closed:  # closing has freed everything already
            self._dropped.append((address, home, root))
            self.needs_check = True

    def drain_dropped(self) -> None:
        """Submit the frees that finalisers left, and close the streams."""
        if self._dropped_lines or self._closed_lines:
            self._forget_lines()
        dropped = self._dropped
        while dropped and self.lost is None:
            self.memory.free_dropped(*dropped.popleft())

    # -- faults -----------------------------------------------------------------------------------

    def lose(self, error: BaseException, doing: str) -> StreamflowError:
        """Translate ``error``; if it is sticky, fail everything that has not finished."""
        translated = self.backend.translate(error, doing)
        if isinstance(translated, DeviceLost):
            return self.lose_to(translated, error)
        return translated

    def lose_to(self, reason: DeviceLost, cause: BaseException) -> DeviceLost:
        """Fail everything that has not finished; the first reason stays."""
        if self.lost is not None:
            return self.lost
        unfinished = (ticket.op for line in self.lines for ticket in line.inflight)
        suspects = reason.suspects or tuple(op.name for op in unfinished if op is not None)
        self.lost = lost = DeviceLost(str(reason), suspects=suspects)
        lost.__cause__ = cause.with_traceback(None)
        self.needs_check = True
        self.abandon(lost)
        return lost

    def abandon(self, error: Exception, *, keeps_blocks: bool = False) -> None:
        """Fail everything that has not finished: it never will, or nobody will look.

        ``keeps_blocks``: the device may still be using what the ops hold, so that is never
        given back (rule R6).
        """
        in_flight = [ticket for line in self.lines for ticket in line.abandon()]
        self.completion.clear()
        self.staging.stop_all()
        parked = self.pending_ops()
        for op in (*(ticket.op for ticket in in_flight), *parked):
            if op is None or op._state in _ENDED:
                continue
            rare = op._rare
            if keeps_blocks and rare is not None:
                rare.on_retired = None
            waiting = rare.parked if rare is not None else None
            is_at_work = waiting is None or waiting.num_blockers > 0
            if op._state is OpState.STAGING and is_at_work and not keeps_blocks:
                continue  # a worker is at it, on the caller's memory perhaps: it ends soon
            if waiting is not None:
                self.parking.drop(waiting, error)
            else:
                self.fail(op, error)
