"""What a SyncedArray does: turns, copies that are shared, and the state they lead to."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.origin import ON_BEHALF, describe, user_instruction
from streamflow.errors import Closed, UpstreamFailed
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.failures import add_note
from streamflow.runtime.op import SCOPE, Op, next_seq
from streamflow.runtime.parked import Parked
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.runtime.synced_job import HostJob
from streamflow.runtime.synced_sides import DeviceSide, HostSide, Then
from streamflow.scheduler.synced_table import Asked, Cell, Heads, Side, Step, SyncedState
from streamflow.scheduler.turns import Turn, Turns

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.runtime.submit import Submit

__all__ = ["Pair"]


class Pair:
    """The two sides of one SyncedArray, and who may use them.

    A copy is submitted in no scope of the program's: it belongs to everybody who wants it, so
    no scope that is left early may drop it.

    Attributes
    ----------
    heads : Heads
    host : HostSide
    device : DeviceSide
    transfer : Op or None
        The copy of the present data that is under way.
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
        self.transfer: Op[Any] | None = None
        self._turns = Turns()
        self._tasks: dict[Turn, object] = {}  # whose block holds which turn
        self._job: HostJob | None = None
        self._is_closed = False
        core.synced[next_seq()] = self

    # -- checks ----------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise unless the array may be used here and now."""
        self._core.check_open()
        if self._is_closed:
            raise Closed(f"{self!r} was closed")

    def _check_idle(self, what: str) -> None:
        self.check_usable()
        if self._turns.is_busy:
            raise RuntimeError(
                f"{what}: {self!r} is in a block, or a copy waits to begin: leave the block first"
            )

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

    # -- turns -----------------------------------------------------------------------------

    def _ask(self, is_write: bool) -> Turn:
        task = self._core.shell.task()
        mine = [turn for turn, owner in self._tasks.items() if owner is task]
        if mine and (is_write or any(turn.is_write for turn in mine)):
            raise RuntimeError(
                f"this task is in a block of {self!r} that excludes what it asks for now: "
                "leave that block first"
            )
        return self._turns.ask(is_write=is_write, is_nested=bool(mine))

    async def take_turn(self, is_write: bool) -> Turn:
        """Wait for a turn, for a block of this task's."""
        self.check_usable()
        turn = self._ask(is_write)
        try:
            if not turn.is_held:
                turn.on_granted, wait = self._core.shell.park()
                await wait(False)
                if turn.error is not None:
                    raise turn.error
            self.check_usable()
        except BaseException:
            self._turns.leave(turn)
            raise
        self._tasks[turn] = self._core.shell.task()
        return turn

    def leave(self, turn: Turn) -> None:
        """Give a turn back, so that the next ones get theirs."""
        self._tasks.pop(turn, None)
        if self._core.is_here():  # else the loop has ended, and this is a finaliser (C12)
            self._turns.leave(turn)

    # -- bringing a side up to date ----------------------------------------------------------

    def _context(self, origin: tuple[CodeType, int]) -> Context:
        """Where to submit on somebody's behalf: the caller's streams, none of its scopes."""
        context = copy_context()
        context.run(SCOPE.set, None)
        context.run(ON_BEHALF.set, origin)
        return context

    def settle_device(self, asked: Asked, origin: tuple[CodeType, int]) -> None:
        """Have the device side ready for ``asked``; whatever that takes is submitted."""
        cell = self._look(asked)
        context = self._context(origin)
        self.device.acquire(context)
        if cell.step is Step.ZEROS:
            self.device.zero(context)
            self.heads.settle(SyncedState.HEAD_AT_GPU)
        elif cell.step is Step.COPY:
            self._push(context, None)
        elif asked is Asked.WRITE_ALL_DEVICE:
            self.device.overwrite(context)

    async def settle_host(self, asked: Asked, is_write: bool, origin: tuple[CodeType, int]) -> None:
        """Wait until the host side is ready for ``asked``."""
        context = self._context(origin)
        while True:
            cell = self._look(asked)
            host, job = self.host, self._present_job()
            if job is None:
                if cell.step is Step.COPY:
                    job = self._pull(context, None)
                elif cell.step is Step.ZEROS or host.array is None:
                    job = self._prepare(zeros=cell.step is Step.ZEROS)
                else:
                    if host.in_the_way(is_write=is_write) is None:
                        if asked is not Asked.WRITE_ALL_HOST and self.heads.is_current(Side.CPU):
                            host.check_unchanged(self)
                        return
                    job = self._wait_for_uses(is_write)
            await self._join(job)

    async def _join(self, job: HostJob) -> None:
        if not job.is_ended:
            wake, wait = self._core.shell.park()
            job.when_ended(wake)
            try:
                # The caller's own memory is written: hold a cancellation back (rule R8).
                await wait(job.op is not None and not self.host.is_owned)
            finally:
                job.forget(wake)
        if job.error is not None and job.version == self.heads.version:
            self._core.observed(job.error)
            raise job.error.with_traceback(None)

    # -- copies ----------------------------------------------------------------------------

    def _push(self, context: Context, stream: Stream | None) -> Op[Any]:
        """A copy to the device: the one under way if there is one."""
        if self.heads.copying_to is Side.GPU:
            assert self.transfer is not None
            return self.transfer
        host = self.host
        host.check_unchanged(self)
        array = self.device.acquire(context)
        _, op = context.run(self._dev._transfers.put, host.array, array, stream, ())
        self.device.note()
        self._sent(op, Side.GPU, _do_nothing)
        return op

    def _pull(self, context: Context, stream: Stream | None) -> HostJob:
        """A copy to the host, as soon as there is memory that nothing uses."""
        job = self._begin(is_pull=True)

        def acquired(error: BaseException | None) -> None:
            if error is None:
                self._when_unused(job, True, submit)
            else:
                self._end(job, error)

        def submit() -> None:
            if job.version != self.heads.version:
                self._end(job, None)  # nobody is left who would want it
                return
            try:
                self.check_usable()
                array = self.device.acquire(context)
                op = context.run(self._dev._transfers.get, array, self.host.array, stream, ())
            except Exception as error:
                self._end(job, error.with_traceback(None))
                return
            if self.host.is_owned and op._rare is not None:
                op._rare.writes_host = False  # our own memory: nobody needs to hold out (R8)
            job.submitted(op)
            self._sent(op, Side.CPU, partial(self._end, job))

        self.host.acquire(acquired)
        return job

    def _sent(self, op: Op[Any], to: Side, then: Then) -> None:
        """``op`` copies the present data ``to`` a side, which it has once that has ended."""
        heads, host = self.heads, self.host
        version = heads.begin_copy(to)
        self.transfer = op
        host.used_by(op, writes=to is Side.CPU)

        def over() -> None:
            host.unused_by(op)
            if self.transfer is op:
                self.transfer = None
            error = op._error
            if error is None and version == heads.version:
                # What it has copied may be wrong: work that fails as it runs fails no copy that
                # was submitted by then.
                if to is Side.CPU and self.look_at_state(looks=True) is SyncedState.POISONED:
                    error = self._poisoned()
                elif heads.end_copy(version, is_well=True) and to is Side.CPU:
                    host.written()
            else:
                heads.end_copy(version, is_well=False)
            then(error)

        self._core.when_all_ended([op.ticket], over)

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

        def acquired(error: BaseException | None) -> None:
            if error is None and zeros and job.version == heads.version:
                self._when_unused(job, True, partial(host.zero, zeroed))
            else:
                self._end(job, error)

        def zeroed(error: BaseException | None) -> None:
            if error is None and job.version == heads.version and not job.is_ended:
                heads.settle(SyncedState.HEAD_AT_CPU)
                host.note()
            self._end(job, error)

        host.acquire(acquired)
        return job

    def _wait_for_uses(self, is_write: bool) -> HostJob:
        job = HostJob(self.heads.version, is_pull=False)  # of this waiter alone
        self._when_unused(job, is_write, partial(job.end, None))
        return job

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

    # -- push and pull -----------------------------------------------------------------------

    def transfer_soon(self, asked: Asked, stream: Stream | None) -> Op[None]:
        """An op that ends once the copy has that ``asked`` leads to."""
        core = self._core
        self.check_usable()
        explicit_line(core, stream)  # a bad one is refused before anything has changed
        turn = self._ask(False)
        context = self._context(user_instruction())
        try:
            if turn.is_held and self._look(asked).step is Step.COPY and asked is Asked.PUSH:
                self.host.check_unchanged(self)
                self.device.acquire(context)
        except BaseException:
            self._turns.leave(turn)
            raise
        op: Op[None] = Op(core, asked.value, None)

        def start(parked: Parked) -> None:
            go = partial(self._go, asked, stream, context, turn, parked)
            parked.withdraw = partial(self._turns.leave, turn)
            if turn.is_held:
                go()
            else:
                parked.need = "its turn"
                turn.on_granted = partial(core.shell.call_soon, go)

        core.parking.submit(op, _no_calls, line=None, start=start)
        return op

    def _go(
        self,
        asked: Asked,
        stream: Stream | None,
        context: Context,
        turn: Turn,
        parked: Parked,
    ) -> None:
        """It is the turn of a ``push`` or ``pull``."""
        core = self._core
        if parked.has_left:
            return

        def ended(error: BaseException | None) -> None:
            self._turns.leave(turn)
            if parked.has_left:  # the device was closed meanwhile
                return
            parked.withdraw = None
            if error is None:
                core.start(parked.op)
                core.parking.host_done(parked)
            else:
                core.observed(error)  # it is this op's to tell
                core.parking.drop(parked, error)

        job = self._present_job()
        try:
            if turn.error is not None:
                raise turn.error
            if self._look(asked).step is not Step.COPY:
                ended(None)
                return
            if asked is Asked.PUSH:
                transfer = self._push(context, stream)
            elif job is None:
                job = self._pull(context, stream)
            elif not job.is_pull or job.version != self.heads.version:
                job.when_ended(partial(self._go, asked, stream, context, turn, parked))
                return
        except Exception as error:
            ended(error.with_traceback(None))
            return
        # It stays parked: dropping it, with a scope say, takes the copy from nobody.
        parked.need = "its copy"
        core.schedule_turn()
        if asked is Asked.PUSH:
            self._turns.leave(turn)
            core.when_all_ended([transfer.ticket], lambda: ended(transfer._error))
        else:
            assert job is not None
            pulled = job
            pulled.when_submitted(partial(self._turns.leave, turn))
            pulled.when_ended(lambda: ended(pulled.error))

    # -- changes at once -----------------------------------------------------------------------

    def adopt(self, data: Any, discard: bool) -> None:
        """See :meth:`SyncedArray.adopt`."""
        self._check_idle("adopt()")
        if isinstance(data, DeviceArray):
            array: Any = self.device.check_adoptable(data)
            side, asked, adopt = Side.GPU, Asked.ADOPT_DEVICE, self.device.adopt
        elif isinstance(data, np.ndarray):
            array = self.host.check_adoptable(data)
            side, asked, adopt = Side.CPU, Asked.ADOPT_HOST, self.host.adopt  # type: ignore[assignment]
        else:
            raise TypeError(f"adopt takes an ndarray or a DeviceArray, found {data!r}")
        self.look_at_state()
        if self.heads.look(asked).step is Step.REFUSE and not discard:
            raise ValueError(
                f"{asked.value}: the newest data of {self!r} is on the {side.other.value} alone: "
                "discard=True drops it"
            )
        adopt(array)
        self._settle(side.head)
        self.host.note()

    def discard(self) -> None:
        """See :meth:`SyncedArray.discard`."""
        self._check_idle("discard()")
        self._settle(SyncedState.UNINITIALIZED)

    def close(self) -> None:
        """See :meth:`SyncedArray.close`."""
        self._core.check_here()
        if self._is_closed:
            return
        if self._turns.is_busy:
            raise RuntimeError(f"close(): {self!r} is in a block: leave it first")
        self._is_closed = True
        self._settle(SyncedState.UNINITIALIZED)
        self.host.forget()
        self.device.forget()

    def _settle(self, state: SyncedState) -> None:
        self.heads.settle(state)
        self.transfer = None

    # -- writes ------------------------------------------------------------------------------

    def begin_write(self, side: Side) -> None:
        """A block begins to write ``side``."""
        self.heads.begin_write(side)
        self.transfer = None

    def fail_write(self, side: Side, error: BaseException, origin: tuple[CodeType, int]) -> None:
        """The body of a block that writes ``side`` raised ``error``."""
        try:
            cause = copy(error)
        except Exception:
            cause = error
        if cause is error or type(cause) is not type(error):
            cause = RuntimeError(repr(error))  # it can't be copied
        # The frames of the one that is on its way hold arrays (C23).
        add_note(cause, f"Raised in the block of {self._what} at {describe(*origin)}")
        self.heads.fail_write(side, cause)

    # -- the end of the device ---------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Nobody will get a turn, nor host memory, any more."""

        def own() -> BaseException:
            mine = copy(error)  # a traceback that several tasks share keeps their frames (C23)
            mine.__cause__ = error.__cause__
            return mine

        self._turns.fail(own)
        if self._job is not None and self._job.op is None:
            self._end(self._job, own())

    def silence(self) -> None:
        """Wake nobody any more: who waited is on a loop that ended (C12)."""
        self._turns.silence()
        if self._job is not None:
            self._job.silence()

    def __repr__(self) -> str:
        return f"<{self._what}: {'closed' if self._is_closed else self.heads.state.value}>"


def _no_calls(_: Any) -> int:
    return 0


def _do_nothing(_: BaseException | None) -> None:
    return
