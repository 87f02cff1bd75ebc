"""What a SyncedArray does for whoever has a turn: up-to-date sides, and changes of its data."""

from __future__ import annotations

from contextvars import Context
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from streamflow.backends.origin import describe, user_instruction
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.failures import add_note
from streamflow.runtime.op import Op, OpState, next_seq
from streamflow.runtime.parked import Parked, no_calls
from streamflow.runtime.recording import refuse
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.runtime.synced_copies import Copies
from streamflow.runtime.synced_job import HostJob
from streamflow.scheduler.synced_table import Asked, Side, Step, SyncedState
from streamflow.scheduler.turns import Turn, Turns

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.runtime.submit import Submit

__all__ = ["Pair", "Wait"]


Origin: TypeAlias = "tuple[CodeType, int]"
Wait: TypeAlias = tuple[str, float, Origin]
"""What a block wants, since when, and where it was entered."""


class Pair(Copies):
    """The two sides of one SyncedArray, and who may use them when.

    Attributes
    ----------
    waits : dict
        The blocks that wait for a turn, for reports.
    """

    def __init__(
        self,
        dev: Submit,
        shape: tuple[int, ...],
        size: int,
        dtype: np.dtype[Any],
        origin: Origin,
    ) -> None:
        super().__init__(dev, shape, size, dtype, origin)
        self._turns = Turns()
        self._tasks: dict[Turn, object] = {}  # whose block holds which turn
        self.waits: dict[Turn, Wait] = {}
        dev._core.waiting.pairs[next_seq()] = self

    # -- turns -----------------------------------------------------------------------------

    def _check_idle(self, what: str) -> None:
        if self._turns.is_busy:
            raise RuntimeError(
                f"{what}: {self!r} is in a block, or a copy waits to begin: leave the block first"
            )

    def _ask(self, is_write: bool) -> Turn:
        task = self._core.shell.task()
        mine = [turn for turn, owner in self._tasks.items() if owner is task]
        if mine and (is_write or any(turn.is_write for turn in mine)):
            raise RuntimeError(
                f"this task is in a block of {self!r} that excludes what it asks for now: "
                "leave that block first"
            )
        return self._turns.ask(is_write=is_write, is_nested=bool(mine))

    async def take_turn(self, asked: Asked, is_write: bool, origin: Origin) -> Turn:
        """Wait for a turn, for a block of this task's."""
        self.check_usable()
        turn = self._ask(is_write)
        try:
            if not turn.is_held:
                self.waits[turn] = asked.value, self._core.clock_s(), origin
                turn.on_granted, wait = self._core.shell.park()
                try:
                    await wait(False)
                finally:
                    del self.waits[turn]
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
        self._turns.leave(turn)

    # -- bringing a side up to date ----------------------------------------------------------

    def settle_device(self, asked: Asked, origin: Origin) -> None:
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

    async def settle_host(self, asked: Asked, is_write: bool, origin: Origin) -> None:
        """Wait until the host side is ready for ``asked``."""
        context = self._context(origin)
        while True:
            cell = self._look(asked)
            self.host.check_usable()
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
                await wait(job is self._job and not self.host.is_owned)
            finally:
                job.forget(wake)
        if job.error is not None and job.version == self.heads.version:
            self._core.observed(job.error)
            raise job.error.with_traceback(None)

    # -- push and pull -----------------------------------------------------------------------

    def transfer_soon(self, asked: Asked, stream: Stream | None) -> Op[None]:
        """An op that ends once the copy has that ``asked`` leads to."""
        core = self._core
        self.check_usable()
        refuse(core, f"{asked.value} of a SyncedArray isn't known to be needed at each launch")
        explicit_line(core, stream)  # a bad one is refused before anything has changed
        turn = self._ask(False)
        context = self._context(user_instruction())
        try:
            if turn.is_held and self._look(asked).step is Step.COPY and asked is Asked.PUSH:
                self.host.check_usable()
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

        core.parking.submit(op, no_calls, line=None, start=start)
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
                if parked.op.state is OpState.PARKED:
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
            self._when_known(transfer, lambda: ended(transfer._error))
        else:
            assert job is not None
            pulled = job
            pulled.when_submitted(partial(self._submitted, turn, parked))
            pulled.when_ended(lambda: ended(pulled.error))

    def _submitted(self, turn: Turn, parked: Parked) -> None:
        self._turns.leave(turn)
        if not self.host.is_owned and not parked.has_left:
            # The caller's own memory: whoever waits, or leaves a scope, holds out (rule R8).
            self._core.start(parked.op)
            parked.op.rare().writes_host = True

    # -- changes at once -----------------------------------------------------------------------

    def adopt(self, data: Any, discard: bool) -> None:
        """See :meth:`SyncedArray.adopt`."""
        self.check_usable()
        self._check_idle("adopt()")
        if isinstance(data, DeviceArray):
            array: Any = self.device.check_adoptable(data)
            side, asked, adopt = Side.GPU, Asked.ADOPT_DEVICE, self.device.adopt
        else:
            array = self.host.check_adoptable(data)
            side, asked, adopt = Side.CPU, Asked.ADOPT_HOST, self.host.adopt  # type: ignore[assignment]
        self.look_at_state()
        if self.heads.look(asked).step is Step.REFUSE and not discard:
            raise ValueError(
                f"{asked.value}: the newest data of {self!r} is on the {side.other.value} alone: "
                "discard=True drops it"
            )
        adopt(array)
        self.heads.settle(side.head)
        self.host.note()

    def discard(self) -> None:
        """See :meth:`SyncedArray.discard`."""
        self.check_usable()
        self._check_idle("discard()")
        self.heads.settle(SyncedState.UNINITIALIZED)

    def close(self) -> None:
        """See :meth:`SyncedArray.close`."""
        self._core.check_here()
        if self._is_closed:
            return
        self._check_idle("close()")
        self._is_closed = True
        self.heads.settle(SyncedState.UNINITIALIZED)
        self.host.forget()
        self.device.forget()

    # -- writes ------------------------------------------------------------------------------

    def fail_write(self, side: Side, error: BaseException, origin: Origin) -> None:
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
