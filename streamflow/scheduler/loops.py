"""The two thin shells around an event loop: asyncio (with uvloop) and trio.

Each offers the same five verbs, so nothing above knows which loop it is on. What they call back
runs in an empty context of the shell's own, never in that of the task which happened to
schedule it: such a task's current stream is nobody else's.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Protocol, cast

import anyio
import anyio.lowlevel

__all__ = ["AsyncioShell", "EndedShell", "Shell", "TrioShell", "current_shell"]


class Shell(Protocol):
    """What the runtime needs from a loop."""

    key: object
    """Equal for devices of one loop; unequal otherwise (rule R11)."""
    library: str
    """``"asyncio"`` or ``"trio"``."""
    thread: threading.Thread
    """The thread whose loop it is."""

    def current(self) -> object | None:
        """The loop that runs the calling thread, to compare with :attr:`key`, or None."""

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in the next turn. Loop thread only."""

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> bool:
        """Run ``callback`` in a later turn, from any thread. False if the loop has ended."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Run ``callback`` after ``delay_s`` by the loop's clock, unless cancelled before.

        Returns what cancels it, harmless to call again. Loop thread only.
        """

    def spawn(
        self,
        function: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        gone: Callable[[], object],
    ) -> Callable[[], None]:
        """Run ``function()``, which handles its own errors, as a task of the loop.

        Returns what cancels it. The task has no parent: it must end by itself. ``gone()`` is
        called if it ends by a cancellation, also where it had not begun.
        """

    def task(self) -> object:
        """The task that runs the caller; the shell itself where none does. Weakly referable."""

    def is_over(self) -> bool:
        """Whether the loop has ended for good. Any thread; on trio this wakes the loop."""

    def park(self) -> tuple[Callable[[], None], Callable[[bool], Awaitable[None]]]:
        """``(wake, wait)``: ``await wait(shielded)`` returns after ``wake()``.

        Unshielded, a cancellation ends the wait at once. Shielded, it is delivered
        only after ``wake()``. ``wake`` may be called before or after; twice is harmless.
        """


def _wake(future: Any) -> None:
    if not future.done():
        future.set_result(None)


class AsyncioShell:
    """asyncio and uvloop."""

    library = "asyncio"

    def __init__(self) -> None:
        import asyncio

        self._asyncio = asyncio
        self._loop = asyncio.get_running_loop()
        self.key: object = self._loop
        self.thread = threading.current_thread()
        # The C function behind get_running_loop(): it answers None where that would raise.
        self.current: Callable[[], object | None] = asyncio._get_running_loop
        self._context = Context()
        # A partial, since this runs once a turn: with a context it is no dearer than without.
        self.call_soon: Callable[[Callable[[], object]], Any] = partial(
            self._loop.call_soon, context=self._context
        )
        self._tasks: set[Any] = set()  # the loop itself holds tasks weakly

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, context=self._context)
        except RuntimeError:  # the loop is closed: nobody is left to tell (C12)
            return False
        return True

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Callable[[], None]:
        return self._loop.call_later(delay_s, callback, context=self._context).cancel

    def spawn(
        self,
        function: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        gone: Callable[[], object],
    ) -> Callable[[], None]:
        task = self._loop.create_task(function(), context=context)
        self._tasks.add(task)

        def done(task: Any) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                gone()

        task.add_done_callback(done, context=self._context)
        return cast(Callable[[], None], task.cancel)

    def task(self) -> object:
        return self._asyncio.current_task(self._loop) or self

    def is_over(self) -> bool:
        return self._loop.is_closed()

    def park(self) -> tuple[Callable[[], None], Callable[[bool], Awaitable[None]]]:
        future = self._loop.create_future()
        return partial(_wake, future), partial(self._wait, future)

    def _wait(self, future: Any, shielded: bool) -> Awaitable[None]:
        return self._wait_shielded(future) if shielded else future

    async def _wait_shielded(self, future: Any) -> None:
        cancellation = None
        # anyio would cancel again every turn; a native cancellation comes once.
        with anyio.CancelScope(shield=True):
            while not future.done():
                try:
                    # asyncio.wait() leaves the future alone when the task is cancelled.
                    await self._asyncio.wait((future,))
                except self._asyncio.CancelledError as error:
                    cancellation = error
        if cancellation is not None:
            try:
                raise cancellation
            finally:
                del cancellation  # its traceback holds this frame, and every caller's (C23)
        await anyio.lowlevel.checkpoint_if_cancelled()


class TrioShell:
    """trio."""

    library = "trio"

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self.key: object = self._token
        self.thread = threading.current_thread()
        self._context = Context()
        self._callbacks: deque[Callable[[], object]] = deque()
        self._runner: Any = None  # the system task, while it is parked
        self._has_runner = False

    def current(self) -> object | None:
        try:
            token: object = self._trio.lowlevel.current_trio_token()
        except RuntimeError:
            return None
        return token

    def call_soon(self, callback: Callable[[], object]) -> None:
        # run_sync_soon() would write to a socket each time: too dear for every turn.
        self._callbacks.append(callback)
        if not self._has_runner:
            try:
                self._trio.lowlevel.spawn_system_task(self._run_callbacks, context=Context())
            except RuntimeError:  # the run is over: nobody is left to tell (C12)
                self._callbacks.clear()
                return
            self._has_runner = True
        elif self._runner is not None:
            task, self._runner = self._runner, None
            self._trio.lowlevel.reschedule(task)

    async def _run_callbacks(self) -> None:
        """Run, in each turn, the callbacks that were there when it began."""
        lowlevel = self._trio.lowlevel

        def abort(_raise_cancel: Any) -> Any:
            self._runner = None
            return lowlevel.Abort.SUCCEEDED

        try:
            while True:
                for _ in range(len(self._callbacks)):
                    self._callbacks.popleft()()
                if self._callbacks:
                    await lowlevel.cancel_shielded_checkpoint()
                else:
                    self._runner = lowlevel.current_task()
                    await lowlevel.wait_task_rescheduled(abort)
        finally:
            self._has_runner = False  # trio ends system tasks once the main task has ended

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(self._context.run, callback)
        except self._trio.RunFinishedError:
            return False
        return True

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Callable[[], None]:
        scope = self._trio.CancelScope()

        async def sleep() -> None:
            with scope:
                await self._trio.sleep(delay_s)
            if not scope.cancel_called:  # not even between its end and this turn
                callback()

        with suppress(RuntimeError):  # the run is over: nobody is left to tell (C12)
            # A context of its own: a shared one may be entered by whoever calls us here.
            self._trio.lowlevel.spawn_system_task(sleep, context=Context())
        cancel: Callable[[], None] = scope.cancel
        return cancel

    def spawn(
        self,
        function: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        gone: Callable[[], object],
    ) -> Callable[[], None]:
        scope = self._trio.CancelScope()

        async def run() -> None:
            is_over = False
            try:
                with scope:
                    await function()
                    is_over = True
            finally:
                if not is_over:
                    gone()

        self._trio.lowlevel.spawn_system_task(run, context=context)
        return cast(Callable[[], None], scope.cancel)

    def task(self) -> object:
        try:
            task: object = self._trio.lowlevel.current_task()
        except RuntimeError:  # an instrument's, or a finaliser's, between two tasks
            return self
        return task

    def is_over(self) -> bool:
        try:
            self._token.run_sync_soon(_do_nothing, idempotent=True)  # trio has no other way to ask
        except self._trio.RunFinishedError:
            return True
        return False

    def park(self) -> tuple[Callable[[], None], Callable[[bool], Awaitable[None]]]:
        lowlevel = self._trio.lowlevel
        task: Any = None
        woken = False

        def wake() -> None:
            nonlocal task, woken
            woken = True
            if task is not None:
                waiting, task = task, None
                lowlevel.reschedule(waiting)

        async def wait(shielded: bool) -> None:
            nonlocal task

            def abort(_raise_cancel: Any) -> Any:
                nonlocal task
                if shielded:
                    return lowlevel.Abort.FAILED
                task = None
                return lowlevel.Abort.SUCCEEDED

            if not woken:
                task = lowlevel.current_task()
                await lowlevel.wait_task_rescheduled(abort)
            await lowlevel.checkpoint_if_cancelled()

        return wake, wait


class EndedShell:
    """Put in the place of a shell whose loop will never run again, or not in this process."""

    library = "none"

    def __init__(self, key: object) -> None:
        self.key = key
        self.thread = threading.current_thread()

    def current(self) -> None:
        return None  # so every check refuses

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Nobody is left to tell (C12)."""

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> bool:
        return False

    def task(self) -> object:
        return self

    def is_over(self) -> bool:
        return True

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Callable[[], None]:
        return _do_nothing

    def spawn(
        self,
        function: Callable[[], Coroutine[Any, Any, None]],
        context: Context,
        gone: Callable[[], object],
    ) -> Callable[[], None]:
        return _do_nothing

    def park(self) -> tuple[Callable[[], None], Callable[[bool], Awaitable[None]]]:
        raise RuntimeError("the event loop has ended: nothing can wait there")


def _do_nothing() -> None:
    return


def current_shell() -> Shell:
    """The shell of the loop that runs the caller.

    Raises
    ------
    RuntimeError
        No asyncio or trio loop is running in this thread.
    """
    trio = sys.modules.get("trio")
    if trio is not None:
        try:
            trio.lowlevel.current_trio_token()
        except RuntimeError:
            pass
        else:
            return TrioShell()
    try:
        return AsyncioShell()
    except RuntimeError:
        raise RuntimeError(
            "no running event loop here: enter the device inside asyncio or trio"
        ) from None
