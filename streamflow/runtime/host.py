"""Host tasks: the user's own functions as ops of the graph (``dev.host``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import anyio

from streamflow.errors import OpCancelled
from streamflow.runtime.failures import placed
from streamflow.runtime.op import Op
from streamflow.runtime.parked import After, Parked, no_calls
from streamflow.scheduler.fair import FairQueue
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.workers import Workers

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["HostTasks", "is_async"]


class HostTasks:
    """Runs host functions once all they come after has ended: on threads, or on the loop.

    Threads are few, so tasks take turns between scopes; one that has no thread yet can be
    cancelled like any parked op.
    """

    def __init__(self, core: Core, workers: Workers) -> None:
        self._core = core
        self.workers = workers
        self._queue: FairQueue[Parked] = FairQueue("a worker thread")
        self._tasks: dict[Parked, Callable[[], Any]] = {}

    def submit(
        self,
        op: Op[Any],
        function: Callable[..., Any],
        args: Sequence[Any],
        after: After,
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        is_overwrite: bool = False,
    ) -> None:
        """Have ``function(*args)`` run; an op among ``args`` stands for its result."""
        context = copy_context()
        ops = [arg for arg in args if isinstance(arg, Op)]
        tickets = [*after.tickets, *(arg.ticket for arg in ops)]

        def start(parked: Parked) -> None:
            core = self._core
            pending = core.parking.flattened(parked.deps) + [arg.ticket for arg in ops]
            core.when_all_ended(pending, partial(self._ready, parked, function, args, context))

        self._core.parking.submit(
            op,
            no_calls,
            line=None,
            reads=reads,
            writes=writes,
            after=After(tickets, after.futures),
            is_overwrite=is_overwrite,
            start=start,
        )

    def _ready(
        self, parked: Parked, function: Callable[..., Any], args: Sequence[Any], context: Context
    ) -> None:
        if parked.has_left:
            return
        core = self._core
        if any(source.failure is not None for source in parked.sources):
            core.parking.ready(parked)  # which says what failed
            return
        values = [arg._result if isinstance(arg, Op) else arg for arg in args]
        if is_async(function):
            self._run_on_loop(parked, partial(function, *values), context)
            return
        key = parked.op.rare().scope

        def withdraw() -> None:
            self._queue.remove(key, parked)
            del self._tasks[parked]

        self._tasks[parked] = partial(context.run, function, *values)
        self._queue.push(key, parked)
        parked.need, parked.withdraw = self._queue.what, withdraw
        self._pump()

    def _pump(self) -> None:
        core, workers = self._core, self.workers
        while self._queue and workers.num_undelivered < workers.num_threads:
            parked = self._queue.pop()
            parked.need, parked.withdraw = "", None
            core.start(parked.op)
            workers.submit(
                parked.op.ticket.seq, self._tasks.pop(parked), partial(self._done, parked)
            )
            core.schedule_turn()

    def _done(self, parked: Parked, result: Any, error: BaseException | None) -> None:
        self._ended(parked, result, error)
        self._pump()

    def _ended(self, parked: Parked, result: Any, error: BaseException | None) -> None:
        op, parking = parked.op, self._core.parking
        if parked.has_left:  # the device was closed meanwhile
            return
        if error is None:
            op._result = result
            parking.host_done(parked)
        else:
            parking.drop(parked, placed(error, None, "dev.host"))

    def _run_on_loop(self, parked: Parked, function: Callable[[], Any], context: Context) -> None:
        core, op = self._core, parked.op

        async def run() -> None:
            try:
                result = await function()
            except GeneratorExit:  # dropped with its loop
                raise
            except anyio.get_cancelled_exc_class():
                raise  # gone() tells
            except BaseException as error:
                self._ended(parked, None, error)
            else:
                self._ended(parked, result, None)

        def gone() -> None:
            self._ended(parked, None, OpCancelled(f"{op.name} was cancelled before its end"))

        core.start(op)
        op.rare().stop = core.shell.spawn(run, context, gone)


def is_async(function: object) -> bool:
    """Whether calling ``function`` makes a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  (an object that is called)
    )
