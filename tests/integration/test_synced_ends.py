"""A SyncedArray whose device is closed or lost, or whose loop ends."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import anyio.to_thread
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual
from synced_support import Broken, State, asking, contents, in_state

import streamflow as sf
from streamflow.scheduler.synced_table import Asked


def test_a_lease_that_was_adopted_is_used_as_it_is_until_it_is_released(run, open_device):
    async def main():
        async with open_device() as dev:
            m = sf.SyncedArray(dev, 1 << 18, np.float32)
            async with dev.pinned.lease(m.nbytes) as lease:
                array = lease.array(m.shape, m.dtype)
                array[:] = 2
                m.adopt(array)
                assert m.host_is_pinned
                assert not m.owns_host
                await m.push()
            async with m.device(write=True) as d:
                dev.fill(d, 3)
            with pytest.raises(ValueError, match="released"):
                await m.pull()
            with pytest.raises(ValueError, match="released"):
                await m.host(write="all").__aenter__()
            assert m.state is State.HEAD_AT_GPU
            m.adopt(np.zeros(m.shape, m.dtype), discard=True)
            m.close()

    run(main)


def test_closing_the_device_gives_all_memory_back(run):
    async def main():
        dev = virtual()
        async with dev:
            m = await in_state(dev, State.SYNCED, 1, shape=1 << 20)
            with pytest.warns(ResourceWarning, match="1 array"):
                await dev.__aexit__(None, None, None)
        for call in (m.host, m.device, m.push, m.pull, m.discard):
            with pytest.raises(sf.Closed):
                call()
        m.close()
        with pytest.raises(sf.Closed):
            m.host()

    run(main)


def test_leaving_a_block_of_a_closed_or_lost_device_is_no_error(run):
    async def main():
        for loses in (False, True):
            dev = virtual()
            async with dev:
                m = await in_state(dev, State.HEAD_AT_CPU, 1)
                blocks = [m.host(), m.host()]
                for block in blocks:
                    await block.__aenter__()
                if loses:
                    dev.sim.fail("fill")
                    with pytest.raises(sf.DeviceLost):
                        await dev.zeros(3)
                    await blocks.pop().__aexit__(None, None, None)
            for block in blocks:
                await block.__aexit__(None, None, None)
            m.close()

    run(main)


def test_a_host_side_that_is_being_pinned_when_the_device_is_closed_is_told(run):
    async def main():
        heard = []
        async with anyio.create_task_group() as group:
            async with virtual() as dev:
                m = sf.SyncedArray(dev, 1 << 20, np.float32)

                async def read():
                    heard.append(await error_of(asking(dev, m, 0)[Asked.READ_HOST]()))

                group.start_soon(read)
                await until(lambda: m._pair._job is not None or heard)
            await until(lambda: heard)
            assert heard[0] is None or isinstance(heard[0], sf.Closed)
            m.close()
            assert m._pair.host.array is None

    run(main)


def test_c23_errors_of_blocks_that_are_kept_keep_no_memory(run):
    async def main():
        async with virtual() as dev:
            kept, known = [], []

            async def enter(arrays, side):
                known.append(weakref.ref(arrays[0]._pair))
                async with getattr(arrays.pop(), side)():
                    pass

            for side in ("host", "device"):
                m = [await in_state(dev, State.POISONED, 1)]
                kept.append(await error_of(enter(m, side)))
            with dev.sim.fail("copy_d2h", error=Broken("copy"), sticky=False):
                m = [await in_state(dev, State.HEAD_AT_GPU, 1)]
                kept.append(await error_of(enter(m, "host")))
            with dev.sim.out_of_memory():
                m = [await in_state(dev, State.HEAD_AT_CPU, 1)]
                kept.append(await error_of(enter(m, "device")))
            assert all(isinstance(error, sf.StreamflowError) for error in kept)
            gc.collect()
            assert [ref() for ref in known] == [None] * 4
            await dev.synchronize()
            assert not dev.live().keys() & {"array", "pinned block"}

    run(main)


@native
def test_c12_a_loop_that_ends_with_somebody_waiting_troubles_nobody(run, caplog):
    kept = []

    async def abandon():
        dev = virtual()
        await dev.__aenter__()
        m = await in_state(dev, State.HEAD_AT_CPU, 1)
        block = m.host(write=True)
        await block.__aenter__()
        tasks = [asyncio.ensure_future(asking(dev, m, 0)[Asked.READ_HOST]())]

        async def push():
            kept.append(m.push())

        tasks.append(asyncio.ensure_future(push()))
        await until(lambda: kept)
        kept.extend((dev, m, block, tasks))

    async def again():
        async with virtual() as dev:
            m = await in_state(dev, State.SYNCED, 1)
            assert await contents(m) == 1
            m.close()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()  # its tasks stay where they are
    run(again)
    assert not caplog.records  # it was given back
    for task in kept[-1]:
        task._log_destroy_pending = False
    kept.clear()
    gc.collect()


def test_a_lost_device_says_so_and_leaks_nothing(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=1 << 20)
            dev.sim.fail("copy_h2d")
            pushed = m.push()
            assert isinstance(await error_of(pushed), sf.DeviceLost)
            assert m.state is State.HEAD_AT_CPU
            for call in (m.host, m.device, m.push, m.pull):
                with pytest.raises(sf.DeviceLost):
                    call()
            m.close()
            await until(lambda: not dev.live().get("op"))

    run(main)


def test_those_who_wait_hear_that_the_device_was_closed(run):
    async def main():
        heard = []
        async with anyio.create_task_group() as group:
            async with virtual() as dev:
                m = await in_state(dev, State.HEAD_AT_CPU, 1)
                writing = m.host(write=True)
                await writing.__aenter__()

                async def read():
                    heard.append(await error_of(asking(dev, m, 0)[Asked.READ_HOST]()))

                async def push():
                    heard.append(await error_of(m.push()))

                group.start_soon(read)
                group.start_soon(push)
                await turns()
            await until(lambda: len(heard) == 2)
            assert all(isinstance(error, sf.Closed) for error in heard)
            await writing.__aexit__(None, None, None)

    run(main)
