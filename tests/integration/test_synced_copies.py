"""Copies of a SyncedArray in flight: who waits for them, who shares them, and whose turn it is."""

from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual
from synced_support import (
    LARGE,
    Broken,
    N,
    State,
    contents,
    fill_device,
    fill_host,
    in_state,
    reading,
    set_to_two,
)

import streamflow as sf
from streamflow.testing import explore

# -- nothing in flight is reused ---------------------------------------------------------------


@pytest.mark.parametrize("write", [True, "all"])
def test_a_host_writer_waits_for_the_copy_that_reads_the_memory(run, write):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=LARGE)
            gate = dev.sim.gate("h2d")
            async with m.device() as d:
                got = dev.get(d)
            entered = []

            async def write_it():
                async with m.host(write=write) as a:
                    entered.append(True)
                    a[:] = 2

            async with anyio.create_task_group() as group:
                group.start_soon(write_it)
                await turns()
                assert not entered
                gate.release()
            assert (await got == 1).all()
            assert await contents(m) == 2
            m.close()

    run(main)


def test_a_host_reader_does_not_wait_for_a_copy_that_only_reads(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            gate = dev.sim.gate("h2d")
            pushed = m.push()
            with anyio.fail_after(20):
                assert await contents(m) == 1
            gate.release()
            await pushed

            m.close()

    run(main)


def test_leaving_a_device_block_waits_for_no_kernel_and_the_next_host_read_does(
    run, open_device, add_one
):
    async def main():
        async with open_device() as dev, dev.stream() as stream:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            stall = open_device.stall(dev, stream)
            async with m.device(write=True) as d:
                launched = dev.launch(add_one, d, N, stream=stream)
            assert not launched.done()
            pulled = m.pull()
            stall.release()
            await pulled
            assert await contents(m) == 2
            m.close()

    run(main)


# -- sharing -----------------------------------------------------------------------------------


def test_two_tasks_share_one_copy_and_a_cancelled_one_takes_it_from_nobody(run):
    async def main():
        async with virtual() as dev:
            for adopted in (False, True):
                m = await in_state(dev, State.HEAD_AT_GPU, 1)
                if adopted:
                    m.adopt(np.zeros(N, np.float32), discard=True)
                    await fill_device(dev, m, 1)
                await dev.synchronize()
                gate = dev.sim.gate("d2h")
                copies = dev.stats().num_submitted
                values, scopes = [], []

                async def read(m=m, values=values, scopes=scopes):
                    with anyio.CancelScope() as scope:
                        scopes.append(scope)
                        values.append(await contents(m))

                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(read)
                    await until(lambda m=m: m.in_flight is not None)
                    op = m.in_flight
                    scopes[0].cancel()  # the one that had it submitted
                    await turns()
                    assert m.in_flight is op
                    assert not op.done()
                    assert dev.stats().num_submitted == copies + 1
                    gate.release()
                assert values == [1, 1]
                assert m.state is State.SYNCED
                m.close()

    run(main)


def test_leaving_a_scope_by_an_error_drops_no_copy_that_others_share(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.SYNCED, 1, shape=LARGE)
            future = anyio.Event()
            async with m.device(write=True) as d:
                dev.call(set_to_two, d, after=future)
            with pytest.raises(Broken):
                async with dev.scope():
                    first = m.pull()
                    op = m.in_flight
                    raise Broken("scope")
            assert first.state is sf.OpState.CANCELLED
            assert op is not None
            assert m.in_flight is op
            second = m.pull()
            future.set()
            await second
            assert op.done()
            assert m.state is State.SYNCED
            assert await contents(m) == 2
            m.close()

    run(main)


def test_push_twice_copies_once(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=LARGE)
            num_submitted = dev.stats().num_submitted
            first, second, third = m.push(), m.push(), m.push()
            await second
            assert first.done()
            assert m.state is State.SYNCED
            await third
            # An allocation and a copy, which may be over by the second push.
            assert dev.stats().num_submitted == num_submitted + 2
            m.close()

    run(main)


def test_a_copy_that_failed_is_told_once_and_tried_again(run):
    async def main():
        async with virtual() as dev:
            for to_device in (True, False):
                state = State.HEAD_AT_CPU if to_device else State.HEAD_AT_GPU
                m = await in_state(dev, state, 1)
                dev.sim.fail(
                    "copy_h2d" if to_device else "copy_d2h", error=Broken("copy"), sticky=False
                )
                copied = m.push() if to_device else m.pull()
                assert isinstance(await error_of(copied), sf.DeviceError)
                assert m.state is state
                assert m.in_flight is None

                await (m.push() if to_device else m.pull())
                assert m.state is State.SYNCED
                assert await contents(m) == 1
                m.close()

    run(main)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_refused_copy_is_told_at_once_and_shared_with_nobody(run, to_device):
    async def main():
        async with virtual() as dev:
            state = State.HEAD_AT_CPU if to_device else State.HEAD_AT_GPU
            m = await in_state(dev, state, 1)
            kind = "copy_h2d" if to_device else "copy_d2h"
            dev.sim.fail(kind, error=Broken("copy"), sticky=False)
            gate = dev.sim.gate("h2d" if to_device else "d2h")
            try:
                copied = m.push() if to_device else m.pull()
                with anyio.fail_after(5):
                    assert isinstance(await error_of(copied), sf.DeviceError)
                assert m.in_flight is None
                again = m.push() if to_device else m.pull()
            finally:
                gate.release()
            await again
            assert m.state is State.SYNCED
            assert await contents(m) == 1
            m.close()

    run(main)


# -- turns -------------------------------------------------------------------------------------


def test_writers_exclude_readers_first_come_first_served(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 0)
            order, open_now = [], []

            async def use(name, block, is_write):
                async with block:
                    assert not any(is_write or other for other in open_now)
                    open_now.append(is_write)
                    order.append(name)
                    await turns(3)
                    open_now.remove(is_write)

            async with anyio.create_task_group() as group, m.host():
                for name in range(12):
                    is_write = name % 4 == 3
                    side = (m.host, m.device)[name % 2]
                    before = len(m._pair._turns._waiting)
                    group.start_soon(use, name, side(write=is_write), is_write)
                    if name >= 3:  # from the first writer on, all have to wait
                        await until(lambda n=before: len(m._pair._turns._waiting) > n)
                    else:
                        await until(lambda n=name: len(order) > n)
            # Those who read together may come in any order.
            assert [sorted(order[n : n + 3]) for n in (0, 4, 8)] == [
                [0, 1, 2],
                [4, 5, 6],
                [8, 9, 10],
            ]
            assert order[3::4] == [3, 7, 11]
            m.close()

    run(main)


def test_a_report_names_the_blocks_that_wait_for_their_turn(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 0)

            async def write():
                async with m.device(write=True):
                    pass

            async with anyio.create_task_group() as group, m.host():
                group.start_soon(write)
                await until(lambda: dev.report().rows)
                (row,) = dev.report().rows
                assert (row.name, row.state) == ("write on the device", "waiting")
                assert row.where.startswith("test_synced_copies.py:")
                assert "its turn at <SyncedArray (1000,) float32" in str(dev.report())
            assert not [row for row in dev.report().rows if row.kind == "turn"]
            m.close()

    run(main)


def test_a_waiter_that_is_cancelled_blocks_nobody(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 0)
            done = []
            scope = anyio.CancelScope()

            async def write():
                with scope:
                    await reading(m.device(write=True))
                    done.append("writer")

            async def read():
                await reading(m.host())
                done.append("reader")

            async with anyio.create_task_group() as group, m.host():
                group.start_soon(write)
                await until(lambda: m._pair._turns._waiting)
                group.start_soon(read)
                await turns()
                assert done == []
                scope.cancel()
                await until(lambda: done)
                assert done == ["reader"]
            m.discard()

    run(main)


@native
def test_one_who_is_cancelled_as_the_turn_comes_gives_it_on(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 0)
            block = m.host(write=True)
            await block.__aenter__()
            writer = asyncio.create_task(reading(m.host(write=True)))
            await until(lambda: m._pair._turns._waiting)
            reader = asyncio.create_task(reading(m.host()))
            await turns()
            await block.__aexit__(None, None, None)  # the turn is the writer's now
            writer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writer
            with anyio.fail_after(20):
                await reader
            m.discard()

    run(main)


# -- what runs beside it ------------------------------------------------------------------------


def test_r8_a_pull_into_the_callers_own_memory_outlasts_a_cancellation(run):
    async def main():
        async with virtual() as dev:
            for pull in (lambda m: m.pull(), contents):
                m = sf.SyncedArray(dev, N, np.float32)
                mine = np.zeros(N, np.float32)
                m.adopt(mine)
                await fill_device(dev, m, 1)
                gate = dev.sim.gate("d2h")
                left = []

                async def wait(m=m, mine=mine, pull=pull, left=left):
                    with anyio.CancelScope() as scope:
                        left.append(scope)
                        try:
                            await pull(m)
                        finally:
                            left.append((mine == 1).all())

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await until(lambda m=m: m.in_flight is not None)
                    left[0].cancel()
                    await turns()
                    assert len(left) == 1
                    gate.release()
                assert left[1]
                m.close()

    run(main)


def test_an_old_copy_into_memory_that_was_replaced_holds_up_nobody(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 1)
            gate = dev.sim.gate("d2h")
            pulled = m.pull()
            m.adopt(np.full(N, 2, np.float32), discard=True)
            with anyio.fail_after(20):
                assert await contents(m) == 2
                await fill_host(m, 3)
            gate.release()
            await pulled
            assert m.state is State.HEAD_AT_CPU
            assert await contents(m) == 3
            m.close()

    run(main)


def test_a_small_copy_holds_up_no_host_writer(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            gate = dev.sim.gate("h2d")
            pushed = m.push()
            with anyio.fail_after(20):
                await fill_host(m, 2)
            async with m.device() as d:
                got = dev.get(d)
            gate.release()
            await pushed
            assert (await got == 2).all()
            m.close()

    run(main)


def test_zeros_that_come_too_late_leave_an_adopted_array_alone(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=LARGE)
            gate = dev.sim.gate("h2d")
            pushed = m.push()
            m.discard()
            async with anyio.create_task_group() as group:
                group.start_soon(contents, m)  # zeros, once the copy has read the memory
                await until(lambda: m._pair._job is not None)
                group.cancel_scope.cancel()
            mine = np.full(LARGE, 7, np.float32)
            m.adopt(mine)
            gate.release()
            await pushed
            assert await contents(m) == 7
            assert (mine == 7).all()
            m.close()

    run(main)


def test_r8_zeros_into_the_callers_own_memory_outlast_a_cancellation(run):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(np.ndarray):
        def __setitem__(self, key, value):
            begun.set()
            go_on.wait(10)
            super().__setitem__(key, value)

    async def main():
        async with virtual() as dev:
            m = sf.SyncedArray(dev, LARGE, np.float32)
            mine = np.ones(LARGE, np.float32)
            m.adopt(mine)
            m.discard()
            m._pair.host.array = mine.view(Slow)
            left = []

            async def read():
                try:
                    await contents(m)
                finally:
                    left.append((mine == 0).all())

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await until(begun.is_set)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await turns()
                assert not left
                go_on.set()
            assert left == [True]
            m.close()

    run(main)


def test_an_array_that_is_adopted_again_as_another_view_is_still_being_read(run):
    async def main():
        async with virtual() as dev, dev.pinned.lease(LARGE * 4) as lease:
            mine = lease.array((LARGE,), np.float32)
            mine[:] = 1
            m = sf.SyncedArray(dev, LARGE, np.float32)
            m.adopt(mine)
            gate = dev.sim.gate("h2d")
            pushed = m.push()
            m.discard()
            m.adopt(mine.reshape(2, -1))
            async with anyio.create_task_group() as group:
                group.start_soon(fill_host, m, 2)
                await turns()
                assert (mine == 1).all()
                gate.release()
            await pushed
            assert (mine == 2).all()
            m.close()

    run(main)


def test_memory_that_an_old_copy_has_written_is_zeroed_again(run):
    async def main():
        async with virtual(pinned_budget_nbytes=0) as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 3, shape=LARGE)
            gate = dev.sim.gate("d2h")
            pulled = m.pull()
            m.discard()
            gate.release()
            await pulled
            assert not m.host_is_pinned
            assert await contents(m) == 0
            m.close()

    run(main)


def test_the_device_side_comes_from_the_resource_in_use(run):
    async def main():
        async with virtual() as dev:
            counted = sf.memory.StatisticsResourceAdaptor(sf.memory.CudaMemoryResource())
            m = sf.SyncedArray(dev, N, np.float32)
            with sf.memory.using(counted):
                await fill_device(dev, m, 1)
            assert counted.allocation_counts.current_bytes >= m.nbytes
            m.close()
            await dev.synchronize()
            del counted

    run(main)


def test_no_room_on_the_device_is_told_and_nothing_is_lost(run):
    async def main():
        async with virtual(memory_nbytes=1 << 20) as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=LARGE)
            with pytest.raises(sf.OutOfDeviceMemory):
                m.push()
            assert isinstance(await error_of(reading(m.device(write=True))), sf.OutOfDeviceMemory)
            assert m.state is State.HEAD_AT_CPU
            assert await contents(m) == 1
            m.discard()  # nobody has a turn
            m.close()

    run(main)


@pytest.mark.parametrize("serial", [True, False])
def test_it_works_in_serial_mode_and_while_a_trace_is_recorded(run, serial):
    async def main():
        async with virtual(serial=serial) as dev:
            with dev.trace() as trace:
                for size in (N, LARGE):
                    m = await in_state(dev, State.SYNCED, 1, shape=size)
                    async with m.device(write=True) as d:
                        dev.call(set_to_two, d)
                    await m.pull()
                    assert await contents(m) == 2
                    m.close()
            assert {"put", "get"} <= {op.kind for op in trace.ops}

    run(main)


@pytest.mark.parametrize("strategy", ["random", "priority-inverting", "starved"])
@pytest.mark.parametrize("size", [8, 20_000])
def test_every_order_that_hardware_may_choose_gives_the_same_data(loop, strategy, size):
    async def program(dev):
        m = sf.SyncedArray(dev, size, np.float32)
        seen = []

        async def read():
            for _ in range(3):
                async with m.host() as a:
                    seen.append(set(a.tolist()))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for value in range(1, 4):
                async with m.device(write="all") as d:
                    dev.fill(d, value)
                m.push()
                async with m.device() as d:
                    got = dev.get(d)
                async with m.host(write=True) as a:
                    assert set(a.tolist()) == {value}
                    a += 10
                assert set((await got).tolist()) == {value}
                await m.push()
        assert all(len(values) == 1 for values in seen)
        assert await contents(m) == 13
        m.close()

    explore(program, seeds=15, strategy=strategy, loop=loop)
