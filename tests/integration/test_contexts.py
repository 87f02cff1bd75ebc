"""C10: whose context callbacks and the runtime's own turns run in."""

from __future__ import annotations

from contextvars import ContextVar

import anyio
import numpy as np
from anyio.lowlevel import checkpoint
from support import until

import streamflow as sf

WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


def test_c10_a_callback_submits_to_the_current_stream_of_the_task_that_added_it(
    run, open_device, add_one
):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(4, np.float32)
            await x
            landed = {}
            stall = dev.stream("stall")

            async def work(name):
                stream = dev.stream(name)
                with stream:
                    op = dev.launch(add_one, x, 4, stream=stall)

                    def then(_):
                        landed[name] = dev.launch(add_one, x, 4).stream

                    op.add_done_callback(then)
                    await checkpoint()
                    await op
                    op.add_done_callback(lambda _: landed.setdefault(f"{name}, ended", landing()))

            def landing():
                return dev.launch(add_one, x, 4).stream

            async with anyio.create_task_group() as group:
                for name in ("a", "b"):
                    group.start_soon(work, name)
            op = dev.launch(add_one, x, 4, stream=stall)
            op.add_done_callback(lambda _: landed.setdefault("none", landing()))
            await until(lambda: len(landed) == 5)
            await dev.synchronize()
            return landed

    landed = run(main)
    assert landed["a"] == landed["a, ended"] == "a"
    assert landed["b"] == landed["b, ended"] == "b"
    assert landed["none"].startswith("compute")


def test_c10_callbacks_see_a_copy_of_the_adders_context(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(4, np.float32)
            seen = []

            def look(_):
                seen.append(WHOSE.get())
                WHOSE.set("changed by a callback")

            op = dev.launch(add_one, x, 4)
            for name in ("first", "second"):
                WHOSE.set(name)
                op.add_done_callback(look)
            WHOSE.set("the task's")
            await op
            await until(lambda: len(seen) == 2)
            return seen, WHOSE.get()

    assert run(main) == (["first", "second"], "the task's")


def test_c10_the_runtimes_turns_run_in_no_tasks_context(run, add_one):
    """The reference body runs in the poller's turn on the virtual clock."""
    seen = []

    @sf.kernel("""extern "C" __global__ void look(float* y) {}""")
    def look(y):
        seen.append(WHOSE.get())

    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            x = dev.zeros(4, np.float32)
            WHOSE.set("a task's")
            await dev.launch(look, x, grid=1, block=1)
            dev._core.timers.call_later(1.0, lambda: seen.append(WHOSE.get()))
            await until(lambda: len(seen) == 2)

    run(main)
    assert seen == ["nobody's"] * 2


def test_c10_a_callback_that_is_taken_back_is_the_first_one_equal(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, called = dev.zeros(4, np.float32), []
            op = dev.launch(add_one, x, 4)
            for _ in range(2):
                op.add_done_callback(called.append)
            op.remove_done_callback(called.append)
            op.remove_done_callback(print)
            await op
            await until(lambda: called)
            for _ in range(5):
                await checkpoint()
            return len(called)

    assert run(main) == 1
