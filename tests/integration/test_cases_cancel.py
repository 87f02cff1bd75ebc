"""C1: an await of stalled work is cancelled; what the work uses is nobody else's until it ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support import native, turns, until

import streamflow as sf

SMALL, BIG = 1 << 12, 1 << 18  # 16 KiB: one pinned block; 1 MiB: chunks, or a block pinned for it
KINDS = ["put", "big put", "get", "big get", "get into", "big get into", "launch"]


class Stalled:
    """One piece of work behind a stall, and what must be true of it in the end."""

    def __init__(self, dev, stream, kind, add_one):
        self.dev = dev
        self.kind = kind
        self.size = BIG if kind.startswith("big") else SMALL
        self.source = np.arange(self.size, dtype=np.float32)
        self.array = None
        self.out = np.full_like(self.source, -1)
        self._stream = stream
        self._add_one = add_one

    async def prepare(self):
        self.array = self.dev.put(self.source)
        await self.array
        if "put" in self.kind:
            await self.dev.fill(self.array, -1)

    def submit(self):
        dev, x, stream = self.dev, self.array, self._stream
        if "put" in self.kind:
            return dev.copy(x, self.source, stream=stream)
        if "into" in self.kind:
            return dev.get(x, out=self.out, stream=stream)
        if "get" in self.kind:
            return dev.get(x, stream=stream)
        return dev.launch(self._add_one, x, x.size, stream=stream)

    async def lend_again(self):
        """Ask for pinned and device memory of the same size, and write to all of it."""
        dev, n = self.dev, self.size
        filled = [dev.full(n, k, np.float32) for k in range(6)]
        results = [await dev.get(x) for x in filled]
        sources = [np.full(n, 100 + k, np.float32) for k in range(6)]
        puts = [await dev.put(source) for source in sources]
        return results, puts

    async def check(self, op, lent):
        results, puts = lent
        for k, (result, put) in enumerate(zip(results, puts, strict=True)):
            assert (result == k).all()
            assert (await self.dev.get(put) == 100 + k).all()
        if op.state is sf.OpState.CANCELLED:  # it was parked when its scope was left (R8)
            if "put" in self.kind:
                with pytest.raises(sf.UpstreamFailed):
                    await self.dev.get(self.array)
                self.dev.fill(self.array, 0)  # a full overwrite makes it good again
                assert not (await self.dev.get(self.array)).any()
            else:
                assert (self.out == -1).all()
            return
        expected = self.source + 1 if self.kind == "launch" else self.source
        np.testing.assert_array_equal(await self.dev.get(self.array), expected)
        if "into" in self.kind:
            np.testing.assert_array_equal(self.out, self.source)
        elif "get" in self.kind:
            np.testing.assert_array_equal(op.result(), self.source)


async def assert_nothing_is_held(dev, used_nbytes):
    for _ in range(20):  # a loop's own machinery may let go of a cancelled task a little later
        gc.collect()
        await dev.synchronize()
        await dev.synchronize()  # frees that the first one submitted
        if {"op", "array", "pinned block"}.isdisjoint(dev.live()):
            break
        await anyio.lowlevel.checkpoint()
    assert {"op", "array", "pinned block"}.isdisjoint(dev.live()), dev.live()
    assert dev._core.pinned.num_live == 0
    assert dev.memory.used_nbytes == used_nbytes
    assert dev._core.completion.is_idle


@pytest.mark.parametrize("through", ["await", "scope"])
@pytest.mark.parametrize("kind", KINDS)
def test_c1_a_cancelled_await_leaves_its_memory_to_its_work(
    run, open_device, add_one, kind, through
):
    async def one(dev):
        stream, ops, scopes, caught = dev.stream("stalled"), [], [], []
        case = Stalled(dev, stream, kind, add_one)
        await case.prepare()
        stall = open_device.stall(dev, stream)

        async def work():
            with anyio.CancelScope() as cancel_scope:
                scopes.append(cancel_scope)
                async with AsyncExitStack() as stack:
                    if through == "scope":
                        await stack.enter_async_context(dev.scope())
                    ops.append(case.submit())
                    await ops[0]
            caught.append(cancel_scope.cancelled_caught)

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await until(lambda: ops)
            await turns()
            scopes[0].cancel()
            await turns()
            lent = await case.lend_again()
            if dev.backend == "sim":
                assert ops[0].state in (sf.OpState.CANCELLED, *UNFINISHED)
            stall.release()
        assert caught == [True]
        await dev.synchronize()
        await case.check(ops[0], lent)

    async def main():
        async with open_device() as dev:
            used_nbytes = dev.memory.used_nbytes
            for _ in range(2):  # the second time with what the first gave back
                await one(dev)
                await assert_nothing_is_held(dev, used_nbytes)

    run(main)


UNFINISHED = (sf.OpState.PARKED, sf.OpState.STAGING, sf.OpState.SUBMITTED)


@native
@pytest.mark.parametrize("kind", KINDS)
def test_c1_a_task_that_is_cancelled_natively(run, open_device, add_one, kind):
    async def one(dev):
        stream, ops = dev.stream("stalled"), []
        case = Stalled(dev, stream, kind, add_one)
        await case.prepare()
        stall = open_device.stall(dev, stream)

        async def work():
            ops.append(case.submit())
            await ops[0]

        task = asyncio.create_task(work())
        await until(lambda: ops)
        await turns()
        task.cancel()
        lent = await case.lend_again()
        # The cancellation waits for a write into the caller's own memory, and for nothing else.
        if dev.backend == "sim":
            assert task.done() == ("into" not in kind)
        stall.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        await dev.synchronize()
        await case.check(ops[0], lent)

    async def main():
        async with open_device() as dev:
            used_nbytes = dev.memory.used_nbytes
            await one(dev)
            await assert_nothing_is_held(dev, used_nbytes)

    run(main)


@pytest.mark.parametrize("kind", ["put", "big put", "get", "big get", "launch"])
def test_c1_a_keyboard_interrupt_in_an_await(run, open_device, add_one, kind):
    begun, checked, wakes = threading.Event(), [], []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored here

    def interrupt():
        if begun.wait(20):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            wakes[0](lambda: None)  # the signal may come just before the loop begins to wait

    async def main():
        async with open_device(close_timeout_s=5.0) as dev:
            wakes.append(dev._core.shell.call_soon_threadsafe)
            stream = dev.stream("stalled")
            case = Stalled(dev, stream, kind, add_one)
            await case.prepare()
            stall = open_device.stall(dev, stream)
            op = case.submit()
            try:
                begun.set()
                await op
                await anyio.sleep_forever()  # a GPU's stall may end first
            finally:
                with anyio.CancelScope(shield=True):
                    lent = await case.lend_again()
                    stall.release()
                    await op
                    await case.check(op, lent)
                    checked.append(kind)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main)
    finally:
        signal.signal(signal.SIGINT, handler)
        thread.join()
    assert checked == [kind]
