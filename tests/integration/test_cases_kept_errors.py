"""C23: exceptions are kept, of every kind and from every place; the memory is not."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import numpy as np
import pytest
from support import native, turns, until, virtual

import streamflow as sf

NBYTES, NUM = 10_000_000, 20


def fails(*_):
    raise ValueError("of the function")


async def fails_later(*_):
    await anyio.lowlevel.checkpoint()
    raise ValueError("of the coroutine")


async def plain(dev, x):
    await x
    del x
    raise KeyError("mine")


async def chained(dev, x):
    op = dev.host(fails, x)
    del x
    try:
        await op
    except ValueError as error:
        raise RuntimeError("mine") from error


async def in_a_group(dev, x):
    ops = [dev.host(fails, x), dev.host(fails, x), dev.host(fails_later, x)]
    del x
    errors = []
    for op in ops:
        try:
            await op
        except ValueError as error:
            errors.append(error)
    raise ExceptionGroup("mine", errors)


async def at_synchronize(dev, x):
    dev.host(fails, x)
    dev.call(fails, x)
    del x
    await dev.synchronize()


async def out_of_memory(dev, x):
    await x
    del x
    dev.empty(1 << 60, np.uint8)


async def in_a_host_task(dev, x):
    op = dev.host(fails, x)
    del x
    await op


async def in_a_coroutine_of_a_host_task(dev, x):
    op = dev.host(fails_later, x)
    del x
    await op


async def in_a_call(dev, x):
    op = dev.call(fails, x)
    del x
    await op


async def upstream(dev, x):
    dev.call(fails, x, writes=x)
    op = dev.get(x)
    del x
    await op


async def in_gather(dev, x):
    work = sf.gather(dev.get(x), dev.host(fails, x))
    del x
    await work


async def in_a_scope(dev, x):
    async with dev.scope():
        dev.host(fails, x)
        dev.get(x)
        del x


async def in_the_body_of_a_scope(dev, x):
    async with dev.scope(limit="1GiB"):
        dev.host(fails, x)
        op = dev.launch(KERNEL, x.view(np.float32), 4, after=anyio.Event())
        del x
        raise KeyError(op.name)


async def past_a_deadline(dev, x):
    async with dev.scope(deadline=0.01):
        dev.launch(KERNEL, x.view(np.float32), 4, after=anyio.Event())
        del x
        await anyio.sleep_forever()


async def by_a_cancelled_op(dev, x):
    op = dev.launch(KERNEL, x.view(np.float32), 4, after=anyio.Event())
    del x
    assert op.cancel()
    await op


async def by_a_timeout(dev, x):
    op = dev.launch(KERNEL, x.view(np.float32), 4, after=anyio.Event())
    del x
    try:
        with anyio.fail_after(0.01):
            await op
    finally:
        assert op.cancel()


KERNEL = sf.Kernel.from_source(
    'extern "C" __global__ void touch(float* x, int n) { if (threadIdx.x < n) x[0] = 1.f; }',
    body=lambda x, n: None,
)
PROGRAMS = [
    plain,
    chained,
    in_a_group,
    at_synchronize,
    out_of_memory,
    in_a_host_task,
    in_a_coroutine_of_a_host_task,
    in_a_call,
    upstream,
    in_gather,
    in_a_scope,
    in_the_body_of_a_scope,
    past_a_deadline,
    by_a_cancelled_op,
    by_a_timeout,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_c23_kept_exceptions_hold_no_device_memory(run, open_device, program):
    async def main():
        async with open_device() as dev:
            await dev.launch(KERNEL, dev.zeros(4, np.float32), 4)
            await dev.synchronize()
            baseline, kept = dev.memory.used_nbytes, []
            for _ in range(NUM):
                try:
                    await program(dev, dev.zeros(NBYTES, np.uint8))
                except Exception as error:
                    kept.append(error)
                gc.collect()
                try:
                    await dev.synchronize()
                except ExceptionGroup as group:
                    kept.append(group)
                await dev.synchronize()
                await turns(3)
                assert dev.memory.used_nbytes == baseline
                # A block that a worker was pinning for a dropped op comes back a moment later.
                await until(lambda: {"array", "op", "pinned block"}.isdisjoint(dev.live()))
            assert len(kept) >= NUM

    run(main)


@native
@pytest.mark.parametrize("kind", ["launch", "get into"])
def test_c23_a_cancellation_makes_no_cycle(run, add_one, kind):
    """Its traceback holds the caller's frames: nothing of ours may keep it alive."""

    async def main():
        async with virtual() as dev:
            stream = dev.stream()
            gate = dev.sim.gate(stream)

            async def work():
                x = dev.zeros(4, np.float32)
                alive.append(weakref.ref(x))
                if kind == "launch":
                    await dev.launch(add_one, x, 4, stream=stream)
                else:
                    await dev.get(x, out=np.empty(4, np.float32), stream=stream)

            alive = []
            task = asyncio.create_task(work())
            await turns()
            task.cancel()
            await turns()
            gate.release()
            await asyncio.wait([task])
            assert task.cancelled()
            del task
            assert alive[0]() is None

    gc.collect()
    gc.disable()
    try:
        run(main)
    finally:
        gc.enable()
