"""Submission: ops that may go at once do, others park until their needs are met (R3, R7).

An op parks behind what has no position yet: a parked predecessor, a need on the host
(staging, a kernel still compiling, a pinned block), or a full window. It is submitted the
moment the last of these is gone, in program order on an ordered stream, in data order on
a lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from streamflow.errors import Closed, DeviceLost, UpstreamFailed
from streamflow.runtime.op import Op, OpState
from streamflow.scheduler.hazards import Region, add_unpassed
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Parked", "Parking", "PickLine", "Run"]

Run = Callable[[Any], int]
"""Makes the driver calls of an op on a backend stream; returns how many they were."""

PickLine = Callable[[list[Ticket]], Timeline]
"""Picks a lane, at the moment of submission, from what the op comes after."""

_REAP_EVERY = 64


class Parked:
    """An op that waits to be submitted, with all it takes to do so."""

    __slots__ = (
        "deps",
        "followers",
        "has_left",
        "is_waiting_for_room",
        "line",
        "num_blockers",
        "op",
        "predecessors",
        "run",
        "sources",
    )

    def __init__(
        self,
        op: Op[Any],
        line: Timeline | PickLine,
        run: Run,
        deps: list[Ticket],
        sources: list[Ticket],
    ) -> None:
        self.op = op
        self.line = line
        self.run = run
        self.deps = deps
        self.sources = sources
        self.num_blockers = 0
        self.predecessors: list[Parked] = []
        self.followers: list[Parked] = []
        self.has_left = False
        self.is_waiting_for_room = False


class Parking:
    """Submits the ops of one device, now or later."""

    __slots__ = ("_core", "_due", "_is_submitting")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._due: deque[Parked] = deque()  # every need met, in the order that happened
        self._is_submitting = False

    def submit(
        self,
        op: Op[Any],
        run: Run,
        *,
        line: Timeline | PickLine,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Ticket] = (),
        is_overwrite: bool = False,
        num_needs: int = 0,
    ) -> Parked | None:
        """Order ``op`` after its hazards and submit or park it.

        Parameters
        ----------
        line : Timeline or callable
            Where it goes; a callable picks a lane at the moment of submission.
        reads, writes : sequence of Region
            What it touches; recorded here, in program order.
        after : sequence of Ticket
            Further ops it comes after; their failure is an upstream failure too.
        is_overwrite : bool
            It writes all of ``writes`` without reading: earlier failures don't matter.
        num_needs : int
            Host needs still to be met by :meth:`ready` calls.

        Returns
        -------
        Parked or None
            The parked op, or None when it was submitted or has failed.
        """
        deps: list[Ticket] = list(after)
        for region in reads:
            region.before_read(deps)
        for region in writes:
            region.before_write(deps)
        sources = list(after)
        for region in reads if is_overwrite else (*reads, *writes):
            sources.append(region.last_write)
            if region.overlapping or region.last_write.failure is not None:
                sources.extend(region.failed_writes())
                sources.extend(
                    other.last_write for other in region.overlapping if other.last_write.is_parked
                )
        if self._core.instrument is not None:
            self._core.tracer.op_called(op, reads, writes, after, is_overwrite)
        parked = None
        if not self._fails_upstream(op, sources, deps):
            parked = self._go_or_park(op, run, line, deps, sources, num_needs)
        ticket = op.ticket
        for region in reads:
            region.record_read(ticket)
        for region in writes:
            region.record_write(ticket)
        return parked

    def ready(self, parked: Parked) -> None:
        """One need or predecessor of ``parked`` is met; submit it if that was the last."""
        parked.num_blockers -= 1
        if parked.num_blockers == 0:
            self._due.append(parked)
            if not self._is_submitting:  # one op's leaving makes others due: no recursion
                self._is_submitting = True
                try:
                    while self._due:
                        self._unpark(self._due.popleft())
                finally:
                    self._is_submitting = False

    def drop(self, parked: Parked, error: BaseException) -> None:
        """End a parked op with ``error``; what it waited for passes to its followers."""
        if parked.has_left:
            return
        older = [other for other in parked.predecessors if not other.has_left]
        for follower in parked.followers:
            # Each link once: chains of drops would double them every time.
            new = [other for other in older if other not in follower.predecessors]
            for other in new:
                other.followers.append(follower)
            follower.predecessors += new
            follower.num_blockers += len(new)
        parked.num_blockers = -1
        line = parked.line
        if parked.is_waiting_for_room:
            assert isinstance(line, Timeline)
            line.waiting.remove(parked)
            self._core.completion.unwant(line)
        if isinstance(line, Timeline) and line.parked_tail is parked:
            line.parked_tail = max(
                (other for other in older if other.line is line),
                key=lambda other: other.op.ticket.seq,
                default=None,
            )
        self._core.fail(parked.op, error, parked.deps)
        self._left(parked)

    def room_in(self, line: Timeline) -> None:
        """Completions made room in the window of ``line``: submit what waits for it."""
        core = self._core
        waiting = line.waiting
        while waiting and line.num_outstanding < core.window:
            parked = waiting.popleft()
            parked.is_waiting_for_room = False
            core.completion.unwant(line)
            self.go(parked.op, parked.run, line, parked.deps)
            self._left(parked)

    # -- inside -------------------------------------------------------------------------

    def _go_or_park(
        self,
        op: Op[Any],
        run: Run,
        line: Timeline | PickLine,
        deps: list[Ticket],
        sources: list[Ticket],
        num_needs: int,
    ) -> Parked | None:
        blockers = [dep for dep in deps if dep.position == 0]
        tail = line.parked_tail if isinstance(line, Timeline) else None
        if not (blockers or num_needs or tail is not None):
            target = line if isinstance(line, Timeline) else line(self.flattened(deps))
            if self.has_room(target):
                self.go(op, run, target, deps)
                return None
            line = target
        parked = Parked(op, line, run, deps, sources)
        rare = op.rare()
        rare.parked = parked
        self._core.pending(op, OpState.PARKED)
        found = [dep.op._rare.parked for dep in blockers]
        if tail is not None:
            found.append(tail)
        parked.predecessors = list(dict.fromkeys(found))
        for predecessor in parked.predecessors:
            predecessor.followers.append(parked)
        parked.num_blockers = len(parked.predecessors) + num_needs
        if isinstance(line, Timeline) and line.is_ordered:
            line.parked_tail = parked
        if parked.num_blockers == 0:
            self._wait_for_room(parked, line)  # type: ignore[arg-type]
        return parked

    def _unpark(self, parked: Parked) -> None:
        op = parked.op
        if parked.has_left:
            return
        if not self._fails_upstream(op, parked.sources, parked.deps):
            line = parked.line
            if not isinstance(line, Timeline):
                try:
                    line = line(self.flattened(parked.deps))
                except Exception as error:  # of the user's placement
                    error.__traceback__ = None
                    self._core.fail(op, error, parked.deps)
                    self._left(parked)
                    return
            if not self.has_room(line):
                parked.line = line
                self._wait_for_room(parked, line)
                return
            self.go(op, parked.run, line, parked.deps)
        self._left(parked)

    def _wait_for_room(self, parked: Parked, line: Timeline) -> None:
        parked.is_waiting_for_room = True
        line.waiting.append(parked)
        core = self._core
        core.completion.want(line, core.now())
        core.schedule_turn()

    def _left(self, parked: Parked) -> None:
        line = parked.line
        parked.has_left = True
        parked.predecessors = []
        if isinstance(line, Timeline) and line.parked_tail is parked:
            line.parked_tail = None
        if parked.op._rare is not None:
            parked.op._rare.parked = None
        followers, parked.followers = parked.followers, []
        for follower in followers:  # possibly of another device of this loop
            follower.op._core.parking.ready(follower)

    def has_room(self, line: Timeline) -> bool:
        """Whether ``line`` takes another op now (rule R7); retires what it can first."""
        if line.waiting:
            return False
        window = self._core.window
        if line.num_outstanding >= window:
            self._core.reap(line)
            return line.num_outstanding < window and not line.waiting
        if line.inflight and not len(line.inflight) % _REAP_EVERY:
            self._core.reap(line)
        return True

    def go(self, op: Op[Any], run: Run, line: Timeline, deps: Iterable[Ticket]) -> None:
        """Submit ``op`` now: the waits it needs, its own calls, and its event."""
        core = self._core
        if core.lost is not None or core.is_closed:
            core.fail(op, core.lost or Closed("the device was closed"), deps)
            return
        tracer = core.tracer if core.instrument is not None else None
        stream = line.stream
        num_calls = 1
        waits: list[Ticket] = []
        try:
            event = core.take_event() if tracer is None else tracer.take_event()
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
            num_calls += run(stream)
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
        # Its frames hold the caller's arrays, and the op may outlive them (C23).
        error.__traceback__ = None
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
