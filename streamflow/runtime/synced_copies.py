"""What brings the sides of a SyncedArray up to date: copies and zeros that are shared."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.origin import ON_BEHALF
from streamflow.errors import Closed, UpstreamFailed
from streamflow.runtime.op import SCOPE, Op
from streamflow.runtime.stream import Stream
from streamflow.runtime.synced_job import HostJob
from streamflow.runtime.synced_sides import DeviceSide, HostSide, Then
from streamflow.scheduler.synced_table import Asked, Cell, Heads, Side, Step, SyncedState

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.runtime.submit import Submit

__all__ = ["Copies"]


class Copies:
    """The two sides of one SyncedArray, and the copies between them.

    A copy is submitted in no scope of the program's: it belongs to everybody who wants it, so
    no scope that is left early may drop it.

    Attributes
    ----------
    heads : Heads
    host : HostSide
    device : DeviceSide
    """

    def __init__(
        self,
        dev: Submit,
        shape: tuple[int, ...],
        size: int,
        dtype: np.dtype[Any],
        origin: tuple[CodeType, int],
    ) -> None:
        core = dev._core
        self._dev = dev
        self._core = core
        self._what = f"SyncedArray {shape} {dtype} on device {core.backend.index}"
        self.heads = Heads()
        self.host = HostSide(core, shape, size, dtype, origin)
        self.device = DeviceSide(dev, shape, dtype, origin)
        self._job: HostJob | None = None
        self._is_closed = False

    def check_usable(self) -> None:
        """Raise unless the array may be used here and now."""
        self._core.check_open()
        if self._is_closed:
            raise Closed(f"{self!r} was closed")

    def look_at_state(self, *, looks: bool = False) -> SyncedState:
        """The state, with what is known of work that failed, or can be seen now."""
        heads = self.heads
        if heads.state is SyncedState.HEAD_AT_GPU:
            failure = self.device.failure(looks=looks)
            if failure is not None:
                root = failure.__cause__ if isinstance(failure, UpstreamFailed) else failure
                heads.settle(SyncedState.POISONED, root or failure)
        return heads.state

    def _look(self, asked: Asked) -> Cell:
        """The table's cell for ``asked``, unless that raises."""
        self.check_usable()
        self.look_at_state(looks=True)
        cell = self.heads.look(asked)
        if cell.step is Step.RAISE:
            raise self._poisoned()
        if cell.step is Step.REFUSE and asked in (Asked.PUSH, Asked.PULL):
            raise ValueError(f"{asked.value}: nothing was ever written to {self!r}")
        return cell

    def _poisoned(self) -> UpstreamFailed:
        cause = self.heads.cause
        assert cause is not None
        self._core.observed(cause)
        error = UpstreamFailed(
            f"{self!r}: what should have written it failed: {cause!r}. write='all', "
            "adopt() or discard() clears that"
        )
        error.__cause__ = cause
        return error

    def _context(self, origin: tuple[CodeType, int]) -> Context:
        """Where to submit on somebody's behalf: the caller's streams, none of its scopes."""
        context = copy_context()
        context.run(SCOPE.set, None)
        context.run(ON_BEHALF.set, origin)
        return context

    # -- copies ----------------------------------------------------------------------------

    def _push(self, context: Context, stream: Stream | None) -> Op[Any]:
        """A copy to the device: the one under way if there is one."""
        under_way: Op[Any] | None = self.heads.copy
        if under_way is not None:
            return under_way
        host = self.host
        host.check_usable()
        host.check_unchanged(self)
        array = self.device.acquire(context)
        array._staged = None
        _, op = context.run(self._dev._transfers.put, host.array, array, stream, ())
        self.device.note()
        # The copy may be done with the host memory before it has ended, or already.
        self._sent(op, Side.GPU, array._staged)
        return op

    def _pull(self, context: Context, stream: Stream | None) -> HostJob:
        """A copy to the host, as soon as there is memory that nothing uses."""
        job = self._begin(is_pull=True)

        def submit() -> None:
            try:
                self.check_usable()
                self.host.check_usable()
                array = self.device.acquire(context)
                op = context.run(self._dev._transfers.get, array, self.host.array, stream, ())
            except Exception as error:
                self._end(job, error.with_traceback(None))
                return
            if self.host.is_owned and op._rare is not None:
                op._rare.writes_host = False  # our own memory: nobody needs to hold out (R8)
            job.submitted(op)
            self._sent(op, Side.CPU, op, partial(self._end, job))

        self._when_free(job, submit)
        return job

    def _sent(self, op: Op[Any], to: Side, use: Op[Any] | None, then: Then | None = None) -> None:
        """``op`` copies the present data ``to`` a side, which it has once that has ended.

        ``use`` needs the host memory until it has ended.
        """
        heads, host = self.heads, self.host
        heads.begin_copy(op)
        if use is not None:
            host.used_by(use, writes=to is Side.CPU)

        def over() -> None:
            error = op._error
            is_pulled = error is None and heads.copy is op and to is Side.CPU
            # What it has copied may be wrong: work that fails as it runs fails no copy that was
            # submitted by then.
            if is_pulled and self.look_at_state(looks=True) is SyncedState.POISONED:
                error = self._poisoned()
            if heads.end_copy(op, is_well=error is None) and to is Side.CPU:
                host.note()
            if then is not None:
                then(error)

        self._when_known(op, over)

    def _when_known(self, op: Op[Any], react: Callable[[], None]) -> None:
        """Call ``react`` once ``op`` has ended; a refused one has, whatever runs."""
        if op._error is not None:
            react()
        else:
            self._core.when_all_ended([op.ticket], react)

    # -- jobs of the host side -----------------------------------------------------------------

    def _present_job(self) -> HostJob | None:
        """The job to join before anything else is begun."""
        job = self._job
        if job is None or not job.is_pull or job.version == self.heads.version:
            return job
        if self.host.array is None:
            return job  # the memory it is getting is wanted all the same
        self._job = None  # it goes on by itself, in the way of those only who use its memory
        return None

    def _begin(self, *, is_pull: bool) -> HostJob:
        assert self._job is None
        self._job = HostJob(self.heads.version, is_pull=is_pull)
        return self._job

    def _end(self, job: HostJob, error: BaseException | None) -> None:
        if self._job is job:
            self._job = None
        job.end(error)

    def _prepare(self, *, zeros: bool) -> HostJob:
        """Host memory, with zeros in it where there is no data."""
        job, heads, host = self._begin(is_pull=False), self.heads, self.host

        def zeroed(error: BaseException | None) -> None:
            if error is None and job.version == heads.version and not job.is_ended:
                heads.settle(SyncedState.HEAD_AT_CPU)
                host.note()
            self._end(job, error)

        if zeros:
            self._when_free(job, partial(host.zero, zeroed))
        else:
            host.acquire(partial(self._end, job))
        return job

    def _wait_for_uses(self, is_write: bool) -> HostJob:
        job = HostJob(self.heads.version, is_pull=False)  # of this waiter alone
        self._when_unused(job, is_write, partial(job.end, None))
        return job

    def _when_free(self, job: HostJob, write: Callable[[], None]) -> None:
        """``write()`` to the host memory once there is some that nothing uses."""

        def unused() -> None:
            if job.version == self.heads.version:
                write()
            else:  # nobody is left who would want it; by now the memory may be another's, too
                self._end(job, None)

        def acquired(error: BaseException | None) -> None:
            if error is None:
                self._when_unused(job, True, unused)
            else:
                self._end(job, error)

        self.host.acquire(acquired)

    def _when_unused(self, job: HostJob, is_write: bool, then: Callable[[], None]) -> None:
        """``then()`` once no transfer is in the way, unless ``job`` has ended meanwhile."""
        if job.is_ended:
            return
        ticket = self.host.in_the_way(is_write=is_write)
        if ticket is None:
            then()
        else:
            again = partial(self._when_unused, job, is_write, then)
            self._core.when_all_ended([ticket], again)

    def __repr__(self) -> str:
        return f"<{self._what}: {'closed' if self._is_closed else self.heads.state.value}>"
