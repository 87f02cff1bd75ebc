"""SyncedArray: its table on a device, ownership, views, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle

import anyio
import anyio.to_thread
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual
from synced_support import (
    Broken,
    N,
    State,
    asking,
    contents,
    fill_device,
    fill_host,
    in_state,
)

import streamflow as sf
from streamflow.scheduler.synced_table import TABLE, Asked, Step

WRITES = [asked for asked in Asked if "WRITE" in asked.name or "ADOPT" in asked.name]


@pytest.mark.parametrize("asked", Asked, ids=lambda asked: asked.name)
def test_every_cell_of_the_table(run, open_device, asked):
    async def main():
        async with open_device() as dev:
            for state in State:
                m = await in_state(dev, state, 3)
                cell = TABLE[asked][state]
                error = await error_of(asking(dev, m, 5)[asked]())
                if cell.step is Step.RAISE:
                    assert isinstance(error, sf.UpstreamFailed)
                    assert isinstance(error.__cause__, Broken)
                    assert m.state is State.POISONED
                    continue
                if cell.step is Step.REFUSE:
                    assert isinstance(error, ValueError)
                    assert m.state is state
                    continue
                assert error is None
                if cell.then is not m.state:  # a copy to the device is not waited for
                    await m.in_flight
                assert m.state is cell.then
                kept = 0 if state in (State.UNINITIALIZED, State.POISONED) else 3
                expected = 0 if asked is Asked.DISCARD else 5 if asked in WRITES else kept
                assert await contents(m) == expected
                m.close()

    run(main)


def test_newer_data_is_dropped_with_discard_only(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 3)
            mine = np.full(N, 7, np.float32)
            with pytest.raises(ValueError, match="discard=True"):
                m.adopt(mine)
            assert m.owns_host
            assert await contents(m) == 3
            await fill_device(dev, m, 4)
            m.adopt(mine, discard=True)
            assert m.state is State.HEAD_AT_CPU
            assert await contents(m) == 7
            theirs = dev.full(N, 9, np.float32)
            with pytest.raises(ValueError, match="discard=True"):
                m.adopt(theirs)
            m.adopt(theirs, discard=True)
            assert await contents(m) == 9
            m.close()
            del theirs

    run(main)


@pytest.mark.parametrize("nbytes", [4, 64 << 10, 3 << 20])
def test_the_data_goes_round_whatever_its_size(run, open_device, add_one, nbytes):
    async def main():
        async with open_device() as dev:
            m = sf.SyncedArray(dev, nbytes // 4, np.float32)
            async with m.host(write="all") as a:
                a[:] = np.arange(a.size, dtype=np.float32)
            for _ in range(3):
                async with m.device(write=True) as d:
                    dev.launch(add_one, d, d.size)
            async with m.host(write=True) as a:
                assert np.array_equal(a, np.arange(a.size, dtype=np.float32) + 3)
                a *= 2
            async with m.device() as d:
                got = await dev.get(d)
            assert np.array_equal(got, 2 * (np.arange(a.size, dtype=np.float32) + 3))
            m.close()

    run(main)


@pytest.mark.parametrize("shape", [0, (), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", ["<f4", ">i4", [("a", "u1"), ("b", "<f8")], "?"])
def test_every_shape_and_dtype(run, shape, dtype):
    async def main():
        async with virtual() as dev:
            m = sf.SyncedArray(dev, shape, dtype)
            expected = np.ones(m.shape, m.dtype)
            async with m.host() as a:
                assert np.array_equal(a, np.zeros(m.shape, m.dtype))
            async with m.host(write="all") as a:
                a[...] = expected
            async with m.device(write=True) as d:
                assert (d.shape, d.dtype) == (m.shape, m.dtype)
            async with m.host() as a:
                assert (a.shape, a.dtype) == (m.shape, m.dtype)
                assert np.array_equal(a, expected)
            m.discard()
            async with m.device() as d:
                assert np.array_equal(await dev.get(d), np.zeros(m.shape, m.dtype))
            with pytest.raises(ValueError, match="nothing was ever written"):
                sf.SyncedArray(dev, shape, dtype).push()
            mine = np.array(expected)
            m.adopt(mine, discard=True)
            await m.push()
            assert m.state is State.SYNCED
            m.close()

    run(main)


# -- ownership -------------------------------------------------------------------------------


def test_an_adopted_host_array_is_used_in_place_and_never_freed(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            m = sf.SyncedArray(dev, (2, N // 2), np.float32)
            await fill_host(m, 1)
            assert m.owns_host
            base = np.zeros((2, N), np.float32)
            mine = base[:, ::2]  # every second element: what lies between is not ours
            m.adopt(mine)
            assert not m.owns_host
            assert not m.host_is_pinned
            async with m.device(write=True) as d:
                dev.launch(add_one, d, d.size)
            async with m.host() as a:
                assert np.shares_memory(a, mine)
            assert (mine == 1).all()
            assert (base[:, 1::2] == 0).all()
            m.close()
            gc.collect()
            assert (mine == 1).all()

    run(main)


def test_an_adopted_device_array_is_used_in_place_and_never_freed(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 1)
            mine = dev.full((10, N // 10), 2, np.float32)
            m.adopt(mine)
            assert not m.owns_device
            assert await contents(m) == 2
            await fill_device(dev, m, 3)
            m.close()
            gc.collect()
            assert not mine.is_freed
            assert (await dev.get(mine) == 3).all()
            m.close()
            del mine

    run(main)


def test_memory_of_ours_that_is_replaced_is_freed_after_the_copy_that_uses_it(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=1 << 20)
            gate = dev.sim.gate("h2d")
            pushed = m.push()
            assert not pushed.done()
            taken = dev.live()["pinned block"]
            m.adopt(np.full(1 << 20, 2, np.float32))
            m.adopt(dev.full(1 << 20, 3, np.float32), discard=True)
            gc.collect()
            assert dev.live()["pinned block"] == taken
            gate.release()
            await pushed
            await dev.synchronize()
            assert not {line for line in dev.live().get("pinned block", {}) if "synced" in line}
            assert m.state is State.HEAD_AT_GPU  # the old copy has changed nothing
            assert await contents(m) == 3
            m.close()

    run(main)


def test_both_sides_go_with_the_last_reference_or_with_close(run, open_device):
    async def main():
        async with open_device() as dev:
            for drop in (False, True):
                m = await in_state(dev, State.SYNCED, 1, shape=1 << 18)
                assert {"array", "pinned block"} <= dev.live().keys()
                if drop:
                    m.close()
                else:
                    m.close()
                    m.close()
                    with pytest.raises(sf.Closed):
                        m.host()
                    with pytest.raises(sf.Closed):
                        m.push()
                gc.collect()
                await dev.synchronize()
                assert not dev.live().keys() & {"array"}
                assert not any(
                    "synced_support" in line for line in dev.live().get("pinned block", ())
                )

    run(main)


def test_host_memory_is_pinned_within_the_budget_and_pageable_beyond(run, open_device):
    async def main():
        async with open_device(pinned_budget_nbytes=1 << 20) as dev:
            small, large = (sf.SyncedArray(dev, n, np.uint8) for n in (512 << 10, 8 << 20))
            assert not small.host_is_pinned  # there is no memory yet
            for m in (small, large):
                await fill_host(m, 1)
                await m.push()
                await fill_device(dev, m, 2)
                assert await contents(m) == 2
            assert small.host_is_pinned
            assert not large.host_is_pinned
            small.close()
            large.close()

    run(main)


def test_copying_the_object_is_refused(run):
    async def main():
        async with virtual() as dev:
            m = sf.SyncedArray(dev, 3)
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="not copied"):
                    attempt(m)

    run(main)


# -- what is refused -------------------------------------------------------------------------


def test_bad_arguments_are_refused_before_anything_is_submitted(run, open_device):
    async def main():
        async with open_device() as dev:
            before = dev.stats().num_submitted
            for shape, dtype, error in (
                (-1, "f4", ValueError),
                ((2, -3), "f4", ValueError),
                (2**62, "f8", ValueError),
                (True, "f4", TypeError),
                (1.5, "f4", TypeError),
                (3, object, TypeError),
                (3, "U4", TypeError),
            ):
                with pytest.raises(error):
                    sf.SyncedArray(dev, shape, dtype)
            with pytest.raises(TypeError, match="takes a Device"):
                sf.SyncedArray(None, 3)
            m = sf.SyncedArray(dev, (2, 3), "f4")
            for write in ("none", 1.5, None, [], "ALL"):
                for block in (m.host, m.device):
                    with pytest.raises(ValueError, match="write="):
                        block(write=write)
            for data, error in (
                (np.zeros(5, "f4"), ValueError),
                (np.zeros(6, "f8"), TypeError),
                (np.zeros((3, 4), "f4")[:, ::2], ValueError),  # 6 items, in no shape of (2, 3)
                (np.broadcast_to(np.float32(0), (2, 3)), ValueError),
                ([[1, 2, 3], [4, 5, 6]], TypeError),
            ):
                with pytest.raises(error):
                    m.adopt(data)
            with pytest.raises(TypeError):
                m.push(stream="h2d")
            assert m.state is State.UNINITIALIZED
            assert dev.stats().num_submitted == before
            array = dev.zeros(6, "f8")
            for data, error in ((array, TypeError), (array[:5].view("f4"), ValueError)):
                with pytest.raises(error):
                    m.adopt(data)
            gone = dev.zeros(6, "f4")
            gone.free()
            with pytest.raises(sf.Closed):
                m.adopt(gone)
            m.close()
            del array, data

    run(main)


def test_another_device_is_refused_and_two_arrays_work_side_by_side(run):
    async def main():
        async with virtual(0) as first, virtual(1) as second:
            here, there = sf.SyncedArray(first, N, "f4"), sf.SyncedArray(second, N, "f4")
            with pytest.raises(ValueError, match="another device"):
                here.device(dev=second)
            with pytest.raises(ValueError, match="another device"):
                here.adopt(second.zeros(N, "f4"))
            await fill_host(here, 1)
            with second.stream() as stream, pytest.raises(ValueError, match="another device"):
                here.push(stream=stream)
            async with here.device(dev=first) as d:
                with pytest.raises(ValueError, match="another device"):
                    second.launch(sf.Kernel.from_source(NOTHING, body=lambda y: None), d)
            await fill_device(second, there, 2)
            async with here.device(write=True) as d, there.device() as e:
                first.copy(d, e)
            assert await contents(here) == await contents(there) == 2
            await stream.synchronize()
            stream.close()
            here.close()
            there.close()

    run(main)


NOTHING = 'extern "C" __global__ void nothing(float* y) {}'


# -- turns -----------------------------------------------------------------------------------


def test_an_array_in_a_block_is_not_changed_at_once(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            for block in (m.host, m.device):
                async with block():
                    for change in (m.discard, m.close, lambda: m.adopt(np.zeros(N, "f4"))):
                        with pytest.raises(RuntimeError, match="in a block"):
                            change()
            assert await contents(m) == 1

    run(main)


def test_a_task_that_would_wait_for_itself_is_told(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            async with m.host() as a, m.device() as d, m.host() as again:
                assert a[0] == again[0] == 1
                assert (await dev.get(d))[0] == 1
                await m.push()
                with pytest.raises(RuntimeError, match="excludes"):
                    await m.host(write=True).__aenter__()
            async with m.device(write=True):
                for attempt in (m.push, m.pull):
                    with pytest.raises(RuntimeError, match="excludes"):
                        attempt()
                with pytest.raises(RuntimeError, match="excludes"):
                    await m.device().__aenter__()
            block = m.host()
            async with block:
                pass
            with pytest.raises(RuntimeError, match="once"):
                await block.__aenter__()
            m.discard()  # nothing is held

    run(main)


def test_a_copy_waits_for_its_turn_and_says_so(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            ops = []

            async def push():
                ops.append(m.push())

            async with anyio.create_task_group() as group, m.host(write=True) as a:
                for _ in range(2):
                    group.start_soon(push)
                await until(lambda: len(ops) == 2)
                assert {op.state for op in ops} == {sf.OpState.PARKED}
                assert any("its turn" in row.waits_for for row in dev.report().rows)
                assert ops[0].cancel()
                a[:] = 2
            await ops[1]
            assert m.state is State.SYNCED
            async with m.device() as d:
                assert ((await dev.get(d)) == 2).all()
            with anyio.fail_after(20):
                await fill_host(m, 3)  # the one that was cancelled has no turn
            m.close()

    run(main)


def test_a_failure_that_shows_when_the_turn_comes_is_the_ops(run):
    async def main():
        async with virtual() as dev:
            m = sf.SyncedArray(dev, N, np.float32)
            ops = []

            async def push():
                ops.append(m.push())

            async with anyio.create_task_group() as group:
                with pytest.raises(Broken):
                    async with m.host(write="all"):
                        group.start_soon(push)
                        await until(lambda: ops)
                        raise Broken("body")
            assert isinstance(await error_of(ops[0]), ValueError)  # nothing was written
            m.close()

    run(main)


def test_a_call_from_another_thread_is_refused(run):
    async def main():
        async with virtual() as dev:
            m = sf.SyncedArray(dev, 3)
            for call in (m.host, m.device, m.push, m.discard, m.close, lambda: m.state):
                with pytest.raises(sf.WrongThread):
                    await anyio.to_thread.run_sync(call)

    run(main)


# -- the end of the device ---------------------------------------------------------------------


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


@native
def test_c12_a_loop_that_ends_with_somebody_waiting_troubles_nobody(run):
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

    run(abandon)
    run(again)
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
