"""Waiting: for several ops, for all, cancelled, and with callbacks (R8, R9, R11)."""

import asyncio
from contextlib import aclosing

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from support import turns, until, virtual

import streamflow as sf

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged


def test_gather_that_is_cancelled_waits_for_the_op_that_writes_the_callers_buffer(run):
    async def main():
        async with virtual() as dev:
            x, stream = dev.full(1 << 18, 3, np.float32), dev.stream()
            await x
            gate = dev.sim.gate(stream)
            dev.fill(x, 4, stream=stream)
            out, seen = np.zeros_like(BIG), []

            async def wait():
                try:
                    await sf.gather(dev.get(x), dev.get(x, out=out))
                finally:
                    seen.append(out.copy())

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await turns()
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await turns()
                    assert not seen
                    gate.release()
            assert (seen[0] == 4).all()

    run(main)


@pytest.mark.parametrize("how", ["as_completed", "gather", "cancelled"])
def test_leaving_a_wait_for_several_ops_early_leaves_nothing_behind(run, add_one, how):
    async def main():
        async with virtual() as dev:
            x, y, stream = dev.zeros(4, np.float32), dev.zeros(4, np.float32), dev.stream()
            await sf.gather(x.ready, y.ready)
            gate = dev.sim.gate(stream)
            stalled = [dev.launch(add_one, x, 4, stream=stream) for _ in range(3)]
            if how == "as_completed":
                async with aclosing(sf.as_completed([*stalled, dev.fill(y, 1)])) as ended:
                    async for op in ended:
                        assert op.kind == "fill"
                        break
            elif how == "gather":
                dev.sim.fail("launch", sticky=False)
                with pytest.raises(sf.LaunchFailed):
                    await sf.gather(*stalled, dev.launch(add_one, y, 4))
            else:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await sf.gather(*stalled)
            assert not any(op._rare.callbacks or op._rare.wakers for op in stalled)
            assert dev._core.completion.is_idle
            before = dev.sim.counters["is_done"]
            await turns()
            assert dev.sim.counters["is_done"] == before  # nobody asks, so nobody looks
            gate.release()
            await sf.gather(*stalled)
            assert dev._core.completion.is_idle
            return await dev.get(x)

    assert run(main).tolist() == [3, 3, 3, 3]


def test_synchronize_returns_although_another_task_keeps_submitting(run, add_one):
    async def main():
        async with virtual() as dev:
            num, is_over = 0, False

            async def produce():
                nonlocal num
                stream = dev.stream()
                x = dev.zeros(4, np.float32, stream=stream)
                ops = [dev.launch(add_one, x, 4, stream=stream) for _ in range(5)]
                while not is_over and num < 5000:  # never idle: five ops in flight at any time
                    ops.append(dev.launch(add_one, x, 4, stream=stream))
                    await ops.pop(0)
                    num += 1

            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(produce)
                await until(lambda: num > 10)
                with anyio.fail_after(20):
                    await dev.synchronize()
                is_over = True
            return num

    assert run(main) < 1000


def test_await_of_a_split_array_waits_for_its_parts(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream, woken = dev.zeros(1024, np.float32), dev.stream(), []
            await x
            first, second = x.split(2)
            gate = dev.sim.gate(stream)
            op = dev.launch(add_one, first, 512, stream=stream)
            await second  # a part of its own: not ordered behind the other

            async def wait():
                woken.append(await x)

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await turns()
                assert not woken
                assert not op.done()
                gate.release()
            assert woken == [x]
            assert op.done()

    run(main)


def test_fill_of_a_twelve_byte_item_goes_on_the_stream_it_is_given(run):
    dtype = np.dtype([("x", "f4"), ("y", "f4"), ("z", "f4")])

    async def main():
        async with virtual() as dev:
            stream = dev.stream("mine")
            for num in (4, 1 << 15):
                x = dev.empty(num, dtype, stream=stream)
                await x
                gate = dev.sim.gate(stream)
                op = dev.fill(x, (1, 2, 3), stream=stream)
                await turns()
                assert op.stream == "mine"
                assert not op.done()
                gate.release()
                with anyio.fail_after(20):
                    back = await dev.get(x)
                assert (back == np.array((1, 2, 3), dtype)).all()

    run(main)


def test_a_done_callback_that_raises_is_logged_and_the_loop_goes_on(run, add_one, caplog):
    async def main():
        async with virtual() as dev:
            x, called = dev.zeros(4, np.float32), []
            op = dev.launch(add_one, x, 4, name="mine")
            op.add_done_callback(lambda op: 1 / 0)
            op.add_done_callback(called.append)
            await op
            await until(lambda: called)
            op.add_done_callback(lambda op: called.append(dev.launch(add_one, x, 4)))
            op.add_done_callback(lambda op: 1 / 0)
            assert called == [op]  # on an op that has ended too: later, so that it may submit
            await until(lambda: len(called) == 2)
            await turns()
            return await dev.get(x)

    assert run(main).tolist() == [2, 2, 2, 2]
    assert caplog.text.count("a done callback of mine raised") == 2
    assert caplog.text.count("ZeroDivisionError") == 2


@pytest.mark.parametrize("how", ["await", "gather", "close"])
@pytest.mark.parametrize("by", ["scope", "task"])
def test_waiting_on_after_a_cancellation_does_not_turn_the_loop(add_one, how, by):
    """asyncio only: its queue of callbacks is empty while everybody waits."""

    async def main():
        dev, scopes, gates = virtual(), [], []

        async def wait():
            with anyio.CancelScope() as scope:
                async with dev:
                    x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
                    await x
                    gates.append(dev.sim.gate(stream))
                    dev.launch(add_one, x, 4, stream=stream)
                    op = dev.get(x, out=np.empty_like(BIG))
                    scopes.append(scope)
                    await {"await": lambda: op, "gather": lambda: sf.gather(op)}.get(
                        how, anyio.sleep_forever
                    )()

        task = asyncio.create_task(wait())
        await until(lambda: scopes)
        await turns()
        scopes[0].cancel() if by == "scope" else task.cancel()
        await turns()
        queued = [
            len(asyncio.get_running_loop()._ready) for _ in range(5) if not await checkpoint()
        ]
        assert not task.done()
        gates[0].release()
        await asyncio.wait((task,), timeout=20)
        assert task.cancelled() == (by == "task")
        return queued

    assert asyncio.run(main()) == [0] * 5
