"""The shells around asyncio, uvloop and trio keep the same promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from streamflow.scheduler.loops import AsyncioShell, EndedShell, Shell, TrioShell, current_shell

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return lambda main: anyio.run(main, **LOOPS[request.param])


async def settle() -> None:
    for _ in range(10):
        await checkpoint()


class Waiter:
    """A task that waits, and what became of it."""

    def __init__(self, wait: Callable[[bool], Awaitable[None]], shielded: bool) -> None:
        self._wait = wait
        self._shielded = shielded
        self.scope = anyio.CancelScope()
        self.state = "waiting"

    async def __call__(self) -> None:
        with self.scope:
            try:
                await self._wait(self._shielded)
            except anyio.get_cancelled_exc_class():
                self.state = "cancelled"
                raise
            self.state = "woken"


@pytest.mark.parametrize("loop", LOOPS)
def test_the_shell_is_of_the_loop_that_runs(loop: str) -> None:
    async def main() -> Shell:
        return current_shell()

    shell = anyio.run(main, **LOOPS[loop])
    assert type(shell) is (TrioShell if loop == "trio" else AsyncioShell)


def test_outside_a_loop_there_is_no_shell() -> None:
    with pytest.raises(RuntimeError, match="asyncio or trio"):
        current_shell()


def test_shells_of_one_loop_have_equal_keys(run: Run) -> None:
    async def main() -> None:
        assert current_shell().key == current_shell().key

    run(main)


def test_shells_of_different_loops_have_different_keys(run: Run) -> None:
    async def main() -> Shell:
        return current_shell()

    first, second = run(main), run(main)  # both alive, so no id is reused
    assert first.key != second.key


def test_a_shell_knows_which_loop_runs_here(run: Run) -> None:
    async def main() -> Shell:
        shell = current_shell()
        assert shell.current() == shell.key
        assert await anyio.to_thread.run_sync(shell.current) is None
        return shell

    shell = run(main)
    assert shell.current() is None

    async def elsewhere() -> bool:
        return shell.current() in (None, shell.key)

    assert not run(elsewhere)


def test_a_wake_ends_the_wait(run: Run) -> None:
    async def main() -> None:
        for shielded in (False, True):
            wake, wait = current_shell().park()
            waiter = Waiter(wait, shielded)
            async with anyio.create_task_group() as group:
                group.start_soon(waiter)
                await settle()
                assert waiter.state == "waiting"
                wake()
            assert waiter.state == "woken"

    run(main)


def test_a_wake_before_the_wait_is_not_lost(run: Run) -> None:
    async def main() -> None:
        for shielded in (False, True):
            wake, wait = current_shell().park()
            wake()
            with anyio.fail_after(20):
                await wait(shielded)

    run(main)


def test_waking_again_is_harmless(run: Run) -> None:
    async def main() -> None:
        wake, wait = current_shell().park()
        waiter = Waiter(wait, False)
        async with anyio.create_task_group() as group:
            group.start_soon(waiter)
            await settle()
            wake()
            wake()
            await settle()
            wake()
        assert waiter.state == "woken"
        await settle()

    run(main)


def test_an_unshielded_wait_is_cancelled_at_once(run: Run) -> None:
    async def main() -> None:
        wake, wait = current_shell().park()
        waiter = Waiter(wait, False)
        async with anyio.create_task_group() as group:
            group.start_soon(waiter)
            await settle()
            waiter.scope.cancel()
            await settle()
            assert waiter.state == "cancelled"
        wake()  # nobody waits any more
        await settle()

    run(main)


def test_a_shielded_wait_delivers_the_cancellation_after_the_wake(run: Run) -> None:
    async def main() -> None:
        wake, wait = current_shell().park()
        waiter = Waiter(wait, True)
        async with anyio.create_task_group() as group:
            group.start_soon(waiter)
            await settle()
            waiter.scope.cancel()
            await settle()
            assert waiter.state == "waiting"
            wake()
            await settle()
            assert waiter.state == "cancelled"

    run(main)


def test_asyncio_delivers_one_of_many_cancellations_after_the_wake() -> None:
    import asyncio

    async def main() -> None:
        wake, wait = current_shell().park()
        task = asyncio.ensure_future(wait(True))
        await settle()
        for _ in range(3):
            task.cancel()
            await settle()
            assert not task.done()
        wake()
        await settle()
        assert task.cancelled()

    asyncio.run(main())


def test_a_wake_from_another_thread_goes_through_the_loop(run: Run) -> None:
    async def main() -> None:
        shell = current_shell()
        wake, wait = shell.park()
        thread = threading.Thread(target=shell.call_soon_threadsafe, args=(wake,))
        thread.start()
        with anyio.fail_after(20):
            await wait(False)
        thread.join()

    run(main)


def test_a_callback_runs_in_a_later_turn(run: Run) -> None:
    async def main() -> None:
        shell = current_shell()
        log: list[str] = []
        shell.call_soon(lambda: log.append("soon"))
        assert shell.call_soon_threadsafe(lambda: log.append("threadsafe")) is not False
        assert log == []
        await settle()
        assert sorted(log) == ["soon", "threadsafe"]

    run(main)


def test_callbacks_run_in_the_order_they_were_given(run: Run) -> None:
    async def main() -> None:
        shell = current_shell()
        log: list[int] = []
        for number in range(20):
            shell.call_soon_threadsafe(lambda number=number: log.append(number))
        await settle()
        assert log == list(range(20))

    run(main)


def test_telling_a_loop_that_has_ended_returns_false(run: Run) -> None:
    async def main() -> Shell:
        return current_shell()

    shell = run(main)
    called: list[int] = []
    assert shell.call_soon_threadsafe(lambda: called.append(1)) is False
    assert called == []


def test_c12_a_loop_is_over_once_it_has_ended_and_not_before(run: Run) -> None:
    async def main() -> Shell:
        shell = current_shell()
        assert not shell.is_over()
        assert not await anyio.to_thread.run_sync(shell.is_over)
        return shell

    assert run(main).is_over()


def test_an_ended_shell_refuses_everybody_and_tells_nobody(run: Run) -> None:
    async def main() -> None:
        called: list[bool] = []
        shell = EndedShell(current_shell().key)
        assert shell.current() is not shell.key
        assert shell.is_over()
        assert not shell.call_soon_threadsafe(lambda: called.append(True))
        shell.call_soon(lambda: called.append(True))
        with pytest.raises(RuntimeError, match="has ended"):
            shell.park()
        await settle()
        assert not called

    run(main)


# -- timers, and the context that callbacks run in ---------------------------------------------

TASKS: ContextVar[str] = ContextVar("tasks", default="nobody's")


def test_a_timer_calls_once_and_not_before(run: Run) -> None:
    async def main() -> None:
        shell, log = current_shell(), []
        wake, wait = shell.park()
        start = time.monotonic()
        shell.call_later(0.02, lambda: (log.append(time.monotonic() - start), wake()))
        assert log == []
        with anyio.fail_after(20):
            await wait(False)
        await settle()
        assert len(log) == 1
        assert log[0] > 0.015  # a loop may round to its clock's milliseconds

    run(main)


def test_timers_call_in_the_order_they_are_due(run: Run) -> None:
    async def main() -> None:
        shell = current_shell()
        log: list[int] = []
        wake, wait = shell.park()
        shell.call_later(0.06, wake)
        for milliseconds in (40, 2, 20):
            shell.call_later(milliseconds * 1e-3, lambda n=milliseconds: log.append(n))
        with anyio.fail_after(20):
            await wait(False)
        assert log == [2, 20, 40]

    run(main)


def test_a_cancelled_timer_never_calls(run: Run) -> None:
    async def main() -> None:
        shell = current_shell()
        log: list[str] = []
        wake, wait = shell.park()
        cancel = shell.call_later(0.002, lambda: log.append("called"))
        shell.call_later(0.02, wake)
        cancel()
        cancel()
        with anyio.fail_after(20):
            await wait(False)
        await settle()
        assert log == []
        gone = shell.call_later(0.0, lambda: log.append("zero"))
        while not log:
            await checkpoint()
        gone()  # harmless

    run(main)


def test_a_timer_cancelled_in_the_turn_it_is_due_never_calls() -> None:
    """trio alone can have woken its task already."""
    import trio
    import trio.testing

    async def main() -> None:
        shell, log = current_shell(), []
        cancels = [shell.call_later(1.0, lambda n=n: (log.append(n), cancel_all())) for n in (0, 1)]

        def cancel_all() -> None:
            for cancel in cancels:
                cancel()

        await trio.sleep(2.0)
        assert len(log) == 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_trios_mock_clock_moves_timers() -> None:
    import trio
    import trio.testing

    clock = trio.testing.MockClock()

    async def main() -> None:
        log: list[float] = []
        current_shell().call_later(3600.0, lambda: log.append(trio.current_time()))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(3599.0)
        await trio.testing.wait_all_tasks_blocked()
        assert log == []
        clock.jump(1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert len(log) == 1

    trio.run(main, clock=clock)


def test_a_timer_left_when_the_loop_ends_is_dropped(run: Run) -> None:
    async def main() -> tuple[Shell, Callable[[], None]]:
        shell = current_shell()
        return shell, shell.call_later(3600.0, lambda: None)

    shell, cancel = run(main)
    cancel()
    assert not shell.call_soon_threadsafe(lambda: None)


def test_callbacks_run_in_no_tasks_context(run: Run) -> None:
    """Neither in that of the task that scheduled them nor in that which started the loop."""

    async def main() -> list[str]:
        shell = current_shell()
        log: list[str] = []

        def look() -> None:
            log.append(TASKS.get())

        TASKS.set("mine")
        shell.call_soon(look)
        shell.call_soon_threadsafe(look)
        shell.call_later(0.0, look)
        while len(log) < 3:
            await checkpoint()
        shell.call_soon(look)  # trio: the system task is there already
        await anyio.to_thread.run_sync(lambda: shell.call_soon_threadsafe(look))
        while len(log) < 5:
            await checkpoint()
        return log

    token = TASKS.set("the loop's")
    try:
        assert run(main) == ["nobody's"] * 5
    finally:
        TASKS.reset(token)
