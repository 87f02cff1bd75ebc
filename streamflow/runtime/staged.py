"""Staged copies as ops: when their jobs start, and how the device's order goes on after them.

A job starts once the device has done all that the op comes after, runs on worker threads and
private streams, and the op then gets its position behind the events that the workers left.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.memory.staging import StagingJob
from streamflow.runtime.op import Op, OpState, added
from streamflow.runtime.parked import After, Parked, Run, no_calls
from streamflow.runtime.source_watch import SourceWatch
from streamflow.runtime.submission import Submission
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["StagedCopies", "place_in"]

Array = np.ndarray[Any, Any]


class StagedCopies:
    """The staged copies of one device."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def copy_in(
        self, array: Array, address: int, watch: SourceWatch | None, submit: Submission
    ) -> Op[None]:
        """Copy ``array`` to the device; returns the op that ends once it has been read."""
        core, op = self._core, submit.op
        staged: Op[None] = Op(core, "staged", None)
        ends: list[Any] = []

        def done(job: StagingJob) -> None:
            ends.extend(job.ends)
            changed = watch.end() if watch is not None and job.error is None else None
            if changed is not None and op._error is None:
                op.rare().doomed = changed
            self._ended(op, job)
            if staged._state is not OpState.STAGING:  # the device was closed meanwhile
                return
            if op._error is None:
                core.complete(staged)
            else:  # the same error: whoever sees one has seen both
                core.fail(staged, op._error)

        def ended() -> None:
            if not job.is_started and staged._state is OpState.STAGING:
                core.complete(staged)  # no worker will look at the source

        job = StagingJob(op.ticket.seq, array, address, True, done)
        core.start(staged)
        rare = op.rare()
        rare.on_ended = added(rare.on_ended, ended)
        submit(core, waits_for(ends), start=partial(self._start, job))
        return staged

    def copy_out(self, address: int, target: Array, result: Array, submit: Submission) -> None:
        """Copy what is at ``address`` to ``target``; the op's result is ``result``."""
        op = submit.op
        ends: list[Any] = []

        def done(job: StagingJob) -> None:
            if job.error is None:
                op._result = result
            ends.extend(job.ends)
            self._ended(op, job)

        job = StagingJob(op.ticket.seq, target, address, False, done)
        submit(self._core, waits_for(ends), start=partial(self._start, job))

    def start_in(self, array: Array, address: int, ends: list[Any], parked: Parked) -> None:
        """Begin to copy ``array``, which was not known before, for an op that is parked."""

        def done(job: StagingJob) -> None:
            ends.extend(job.ends)
            self._ended(parked.op, job)

        self._start(StagingJob(parked.op.ticket.seq, array, address, True, done), parked)

    def _start(self, job: StagingJob, parked: Parked) -> None:
        """Start ``job`` once the device has done all it comes after (rule R7)."""
        core = self._core
        pending = core.parking.flattened(parked.deps)
        core.when_all_ended(pending, partial(self._when_passed, job, parked))

    def _when_passed(self, job: StagingJob, parked: Parked) -> None:
        core = self._core
        if parked.has_left:
            return
        if any(source.failure is not None for source in parked.sources):
            core.parking.ready(parked)  # which says what failed
        elif core.parking.flattened(parked.deps):
            self._start(job, parked)  # what ended had failed, and left others before it
        else:
            core.parking.admit(parked, partial(self._stage, job))

    def _stage(self, job: StagingJob, parked: Parked) -> None:
        core, op = self._core, parked.op
        job.is_timed = core.instrument is not None
        job.told = op._told
        job.key = op.rare().scope
        op.rare().stop = partial(core.staging.stop, job)
        core.start(op)
        core.staging.start(job)
        core.schedule_turn()

    def _ended(self, op: Op[Any], job: StagingJob) -> None:
        core = self._core
        if op._error is not None:  # the device was closed meanwhile
            return
        parked: Parked = op.rare().parked
        op.rare().stop = None
        if job.error is not None:
            if core.is_serial:
                core.serial_op = op
            # Submitted all the same: it comes after what the other workers have in flight.
            op.rare().doomed = core.lose(job.error, f"staging {op.name}")
        if job.is_timed:
            core.tracer.staged(op, job.starts, job.ends)
        core.parking.ready(parked)


def waits_for(ends: list[Any]) -> Run:
    """What a staged op submits itself: waits for the events its workers leave in ``ends``."""

    def run(target: Any) -> int:
        for end in ends:
            target.wait(end)
        return len(ends)

    return run


def place_in(core: Core, line: Timeline, after: After) -> After:
    """What a staged copy, which runs on private streams, must come after on ``line``."""
    if not line.is_ordered:
        return after
    op: Op[None] = Op(core, "record", None)
    core.parking.submit(op, no_calls, line=line)
    return After([*after.tickets, op.ticket], after.futures)
