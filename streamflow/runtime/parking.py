"""Submission: ops that may go at once do, others park until their needs are met (R3, R7).

An op parks behind what has no position yet: a parked predecessor, a need on the host (a
future, staging, a host task, a kernel still compiling, a pinned block, an admission
budget), or a full window. It goes on the moment the last of these is gone, in program
order on an ordered stream, in data order on a lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamflow.errors import Closed, CycleFound, DeviceLost, UpstreamFailed
from streamflow.runtime.op import Op, added
from streamflow.runtime.parked import (
    NOTHING,
    After,
    Parked,
    PickLine,
    Run,
    Start,
    path_between,
    tell_cycle,
)
from streamflow.scheduler.budget import Budget
from streamflow.scheduler.fair import FairQueue
from streamflow.scheduler.hazards import Region, add_unpassed
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

if TYPE_CHECKING:
    from streamflow.backends.base import Checker
    from streamflow.runtime.core import Core

__all__ = ["Parking", "submit_as"]

_REAP_EVERY = 64

_NEVER_RECORDED = frozenset(("free", "pin", "unpin"))
"""Finalisers leave such work, and it is done in whatever task comes by next (C40)."""


class Parking:
    """Submits the ops of one device, now or later."""

    __slots__ = ("_admitted", "_core", "_due", "_is_admitting", "_is_submitting")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._due: deque[Parked] = deque()  # every need met, in the order that happened
        self._is_submitting = False
        self._admitted: deque[Parked] = deque()
        self._is_admitting = False

    def submit(
        self,
        op: Op[Any],
        run: Run,
        *,
        line: Timeline | PickLine | None,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: After = NOTHING,
        is_overwrite: bool = False,
        num_needs: int = 0,
        start: Start | None = None,
        nbytes: int = 0,
    ) -> Parked | None:
        """Order ``op`` after its hazards and submit or park it.

        Parameters
        ----------
        line : Timeline, callable or None
            Where it goes; a callable picks a lane at the moment of submission; None for
            work on the host alone.
        reads, writes : sequence of Region
            What it touches; recorded here, in program order.
        after : After
            Further ops it comes after; their failure is an upstream failure too.
        is_overwrite : bool
            It writes all of ``writes`` without reading: earlier failures don't matter.
        num_needs : int
            Host needs still to be met by :meth:`ready` calls.
        start : callable, optional
            Its work on the host, ended by one more :meth:`ready`, or :meth:`host_done`.
        nbytes : int
            What it takes of the budgets of the scopes it is in.

        Returns
        -------
        Parked or None
            The parked op, or None when it was submitted or has failed.
        """
        if self._core.recording is not None and op.kind not in _NEVER_RECORDED:
            recorder = self._core.recording.here()
            if recorder is not None:
                recorder.record(op, run, line, reads, writes, after, is_overwrite, start)
                return None
        deps: list[Ticket] = []
        for ticket in after.tickets:
            add_unpassed(ticket, deps)
        for region in reads:
            region.before_read(deps)
        for region in writes:
            region.before_write(deps)
        sources = list(after.tickets)
        for region in reads if is_overwrite else (*reads, *writes):
            sources.append(region.last_write)
            if region.overlapping or region.last_write.failure is not None:
                sources.extend(region.failed_writes())
                sources.extend(region.parked_writes())
        if self._core.instrument is not None:
            self._core.tracer.op_called(op, reads, writes, after.tickets, is_overwrite)
        parked = None
        if not self._fails_upstream(op, sources, deps):
            budgets: Sequence[Budget[Parked]] = ()
            if nbytes and op._rare is not None and op._rare.scope is not None:
                budgets = op._rare.scope.budgets
                op._rare.nbytes = nbytes
            try:
                parked = self._go_or_park(
                    op, run, line, deps, sources, after.futures, num_needs, start, budgets
                )
            except BaseException as error:  # of the user's placement
                op._disown()
                if self._core.instrument is not None:
                    self._core.tracer.refused(op, error)
                raise
        ticket = op.ticket
        for region in reads:
            region.record_read(ticket)
        for region in writes:
            region.record_write(ticket)
        if parked is not None and parked.num_blockers == 0:
            self._go_on(parked)
            return None if parked.has_left else parked
        return parked

    def ready(self, parked: Parked) -> None:
        """One need or predecessor of ``parked`` is met; it goes on if that was the last."""
        parked.num_blockers -= 1
        if parked.num_blockers == 0:
            self._go_on(parked)

    def host_done(self, parked: Parked) -> None:
        """The op had work on the host only, and that has ended well."""
        ticket = parked.op.ticket
        ticket.inherited = ()  # nothing on the device for its followers to wait for
        self._core.complete(parked.op)
        self._left(parked)

    def drop(self, parked: Parked, error: BaseException) -> None:
        """End a parked op with ``error``; what it waited for passes to its followers."""
        if parked.has_left:
            return
        older = [other for other in parked.predecessors if not other.has_left]
        for follower in parked.followers:
            if follower.has_left:
                continue
            # Each link once: chains of drops would double them every time.
            new = [other for other in older if other not in follower.predecessors]
            for other in new:
                other.followers = added(other.followers, follower)
            follower.predecessors = [*follower.predecessors, *new]
            follower.num_blockers += len(new)
        parked.num_blockers = -1
        if parked.withdraw is not None:
            parked.withdraw()
        line = parked.line
        if isinstance(line, Timeline) and line.parked_tail is parked:
            line.parked_tail = max(
                (other for other in older if other.line is line),
                key=lambda other: other.op.ticket.seq,
                default=None,
            )
        self._core.fail(parked.op, error, parked.deps)
        self._left(parked)

    def depend(self, parked: Parked, ticket: Ticket) -> None:
        """Order ``parked`` after one more op: a future has told which.

        Raises
        ------
        CycleFound
            That op itself waits for ``parked``; the message has the path.
        """
        other: Parked | None = None
        if ticket.is_parked:
            other = ticket.op._rare.parked
            assert other is not None
            path = path_between(other, parked)
            if path is not None:
                raise CycleFound(tell_cycle([parked, *path]))
        if self._core.instrument is not None:
            self._core.tracer.depends(parked.op, ticket)
        parked.sources.append(ticket)
        if ticket.failure is None:  # else it fails, too, and has no part in the order
            add_unpassed(ticket, parked.deps)
        if other is not None and other not in parked.predecessors:
            parked.predecessors = [*parked.predecessors, other]
            other.followers = added(other.followers, parked)
            parked.num_blockers += 1

    def admit(self, parked: Parked, then: Start) -> None:
        """Call ``then(parked)`` once every budget it asks has room for it: now, or later."""
        rare = parked.op.rare()
        nbytes = rare.nbytes
        while parked.budgets:
            budget = parked.budgets[0]
            if not budget.request(rare.scope, parked, nbytes):
                parked.need = budget.queue.what
                parked.withdraw = partial(self._withdraw, parked, budget)
                parked.start = then
                return
            self._take_share(parked)
        then(parked)

    def admitted(self, budget: Budget[Parked], admitted: Iterable[Parked], ended: Ticket) -> None:
        """``budget`` has given these their share, which ``ended`` had: they go on."""
        for parked in admitted:
            parked.withdraw, parked.need = None, ""
            if self._core.instrument is not None:
                self._core.tracer.found_room(parked.op, ended)
            self._take_share(parked)
            self._admitted.append(parked)
        if self._is_admitting:  # one that fails admits others: no recursion
            return
        self._is_admitting = True
        try:
            while self._admitted:
                parked = self._admitted.popleft()
                if parked.has_left:
                    continue
                then, parked.start = parked.start, None
                if self._fails_upstream(parked.op, parked.sources, parked.deps):
                    self._left(parked)
                else:
                    assert then is not None
                    self.admit(parked, then)
        finally:
            self._is_admitting = False

    def _take_share(self, parked: Parked) -> None:
        rare = parked.op.rare()
        rare.budgets = (*rare.budgets, parked.budgets[0])
        parked.budgets = parked.budgets[1:]
        rare.is_wanted = True  # others may wait for it to end: the poller runs for it (R11)

    def _withdraw(self, parked: Parked, budget: Budget[Parked]) -> None:
        admitted = budget.withdraw(parked.op.rare().scope, parked)
        self.admitted(budget, admitted, parked.op.ticket)

    def pick_and_go(self, parked: Parked) -> None:
        """Submit it, all its needs being met, or have it wait for room on its stream."""
        line = parked.line
        assert line is not None
        if not isinstance(line, Timeline):
            try:
                line = line(self.flattened(parked.deps))
            except Exception as error:  # of the user's placement
                self.drop(parked, error.with_traceback(None))
                return
        if not self.has_room(line):
            parked.line = line
            self._wait_for_room(parked, line)
            return
        self._core.abroad.submitting(parked.op, parked.sources)
        self.go(parked.op, parked.run, line, parked.deps)
        self._left(parked)

    def room_in(self, line: Timeline, ended: Ticket) -> None:
        """``ended``, the last of them, made room in the window of ``line``: submit what waits."""
        core = self._core
        while (waiting := line.waiting) is not None and line.num_outstanding < core.window:
            parked = waiting.pop()
            if not waiting:
                line.waiting = None
            parked.withdraw = None
            core.completion.unwant(line)
            if core.instrument is not None:
                core.tracer.found_room(parked.op, ended)
            if not self._fails_upstream(parked.op, parked.sources, parked.deps):
                core.abroad.submitting(parked.op, parked.sources)
                self.go(parked.op, parked.run, line, parked.deps)
            self._left(parked)

    # -- inside -------------------------------------------------------------------------

    def _go_or_park(
        self,
        op: Op[Any],
        run: Run,
        line: Timeline | PickLine | None,
        deps: list[Ticket],
        sources: list[Ticket],
        futures: Sequence[Any],
        num_needs: int,
        start: Start | None,
        budgets: Sequence[Budget[Parked]],
    ) -> Parked | None:
        blockers = [dep for dep in deps if dep.position == 0]
        tail = line.parked_tail if isinstance(line, Timeline) else None
        if line is not None and not (
            blockers or num_needs or tail is not None or start or budgets or futures
        ):
            target = line if isinstance(line, Timeline) else line(self.flattened(deps))
            if self.has_room(target):
                self._core.abroad.submitting(op, sources)
                self.go(op, run, target, deps)
                return None
            line = target
        parked = Parked(op, line, run, deps, sources, start, budgets)
        rare = op.rare()
        rare.parked = parked
        self._core.pending(op)
        found = [dep.op._rare.parked for dep in blockers]
        if tail is not None:
            found.append(tail)
        parked.predecessors = found if len(found) < 2 else list(dict.fromkeys(found))
        for predecessor in parked.predecessors:
            predecessor.followers = added(predecessor.followers, parked)
        parked.num_blockers = len(parked.predecessors) + num_needs + len(futures)
        if isinstance(line, Timeline) and line.is_ordered:
            line.parked_tail = parked
        for future in futures:
            self._core.futures.watch(parked, future)
        return parked

    def _go_on(self, parked: Parked) -> None:
        self._due.append(parked)
        if not self._is_submitting:  # one op's leaving makes others due: no recursion
            self._is_submitting = True
            try:
                while self._due:
                    self._unpark(self._due.popleft())
            finally:
                self._is_submitting = False

    def _unpark(self, parked: Parked) -> None:
        if parked.has_left:
            return
        if self._fails_upstream(parked.op, parked.sources, parked.deps):
            self._left(parked)
        elif parked.start is not None:
            start, parked.start = parked.start, None
            parked.num_blockers = 1  # until the work on the host has ended
            start(parked)
        else:
            self.admit(parked, self.pick_and_go)

    def _wait_for_room(self, parked: Parked, line: Timeline) -> None:
        core = self._core
        if line.waiting is None:
            line.waiting = FairQueue(f"room on {line.name}")
        line.waiting.push(parked.op.rare().scope, parked)
        # A partial is one object; a closure would be five, for each of thousands that wait.
        parked.need, parked.withdraw = line.waiting.what, partial(self._need_no_room, parked, line)
        core.completion.want(line, core.now())
        core.schedule_turn()

    def _need_no_room(self, parked: Parked, line: Timeline) -> None:
        assert line.waiting is not None
        line.waiting.remove(parked.op.rare().scope, parked)
        if not line.waiting:
            line.waiting = None
        self._core.completion.unwant(line)

    def _left(self, parked: Parked) -> None:
        line = parked.line
        parked.has_left = True
        parked.predecessors = ()
        if isinstance(line, Timeline) and line.parked_tail is parked:
            line.parked_tail = None
        if parked.op._rare is not None:
            parked.op._rare.parked = None
        for stop in parked.stops:
            stop()
        followers, parked.followers = parked.followers, ()
        for follower in followers:  # possibly of another device of this loop
            follower.op._core.parking.ready(follower)

    def has_room(self, line: Timeline) -> bool:
        """Whether ``line`` takes another op now (rule R7); retires what it can first."""
        if line.waiting is not None:
            return False
        window = self._core.window
        if line.num_outstanding >= window:
            self._core.reap(line)
            return line.num_outstanding < window and line.waiting is None
        if line.inflight and not len(line.inflight) % _REAP_EVERY:
            self._core.reap(line)
        return True

    def go(self, op: Op[Any], run: Run, line: Timeline, deps: Iterable[Ticket]) -> None:
        """Submit ``op`` now: the waits it needs, its own calls, and its event."""
        core = self._core
        if core.lost is not None or core.is_closed:
            core.fail(op, core.lost or Closed("the device was closed"), deps)
            return
        if core.is_serial:
            core.serial_op = op
        tracer = core.tracer if core.instrument is not None else None
        stream = line.stream
        num_calls = 1
        waits: list[Ticket] = []
        try:
            if tracer is None:
                event = core.take_event()
            else:
                event = tracer.take_event()
                op.ticket.holds += 1  # no pool takes it: there are none that time
        except Exception as error:  # nothing was submitted yet
            self.submission_failed(op, error, deps)
            return
        try:
            waits = needed_waits(line, self.flattened(deps))
            for ticket in waits:
                stream.wait(ticket.event)
            if waits:
                line.join(waits)
                num_calls += len(waits)
            if tracer is not None:
                tracer.before(op, stream)
            checker = core.backend.checker
            num_calls += run(stream) if checker is None else submit_as(checker, op, run, stream)
        except Exception as error:
            self.refused(op, error, line, event, num_calls)
            return
        try:
            stream.record(event)
        except Exception as error:
            self.unrecorded(op, error)
            return
        line.advance(op.ticket, num_calls, event)
        if tracer is not None:
            tracer.submitted(op, line, waits)
        core.submitted(op)
        if core.is_serial:
            core.settle(line)

    def refused(
        self, op: Op[Any], error: Exception, line: Timeline, event: Any, num_calls: int
    ) -> None:
        """Fail ``op``, which the driver refused, perhaps half way: later ops still follow it."""
        try:
            line.stream.record(event)
        except Exception as failure:
            self.unrecorded(op, failure)
            return
        line.advance(op.ticket, num_calls, event)
        self._core.num_submitted += 1
        if op._rare is not None:
            op._rare.is_wanted = False  # wanted while it was parked: not on this stream yet
        self.submission_failed(op, error, ())

    def unrecorded(self, op: Op[Any], error: Exception) -> None:
        """Lose the device: work of ``op`` may be running and nothing can tell when it ends.

        What the op holds is never given back (rule R6).
        """
        core = self._core
        if op._rare is not None:
            op._rare.on_retired = None
        lost = core.lose(error, f"recording {op.name}")
        if core.lost is None:
            lost = core.lose_to(DeviceLost(str(lost)), error)
        if op._error is None:
            core.fail(op, lost)

    def submission_failed(self, op: Op[Any], error: Exception, deps: Iterable[Ticket]) -> None:
        """End ``op``, which the driver or a check refused."""
        core = self._core
        failure = core.lose(error, f"submitting {op.name}")
        # Its frames hold the caller's arrays, and the op may outlive them (C23); so do those of
        # an error that the caller happened to be handling.
        error.__traceback__ = error.__context__ = None
        if op._error is None:
            core.fail(op, failure, deps)

    def flattened(self, deps: Iterable[Ticket]) -> list[Ticket]:
        """What is still to be waited for, seen through ops that never ran."""
        flat: list[Ticket] = []
        for dep in deps:
            add_unpassed(dep, flat)
        return flat

    def _fails_upstream(
        self, op: Op[Any], sources: Iterable[Ticket], deps: Iterable[Ticket]
    ) -> bool:
        for source in sources:
            failure = source.failure
            if failure is None:
                continue
            # The root cause, not the chain of ops between: those would nest without end.
            root = failure.__cause__ if isinstance(failure, UpstreamFailed) else failure
            name = source.op.name if source.op is not None else f"op #{source.seq}"
            error = UpstreamFailed(f"{op.name} needs the result of {name}, which failed: {root}")
            error.__cause__ = root
            self._core.fail(op, error, deps)
            return True
        return False


def submit_as(checker: Checker, op: Op[Any], run: Run, stream: Any) -> int:
    """``run(stream)``, while the backend knows whose work it is."""
    checker.attribute(op._told)
    try:
        return run(stream)
    finally:
        checker.attribute(None)
