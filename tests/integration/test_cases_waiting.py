"""Ops in the waiting functions of asyncio, anyio and streamflow: results, failures, timeouts."""

from __future__ import annotations

import asyncio
import gc

import anyio
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual

import streamflow as sf

SOON_S = 0.02  # a timeout that is meant to run out, of an op that is stalled


def refuse():
    raise ValueError("refused")


async def assert_nothing_is_left(dev):
    gc.collect()
    await dev.synchronize()
    assert {"op", "pinned block"}.isdisjoint(dev.live()), dev.live()
    assert dev._core.completion.is_idle
    before = dev.stats().num_queries
    await turns()
    assert dev.stats().num_queries == before  # nobody asks, so nobody looks


# -- results and the first failure -----------------------------------------------------------


def test_gather_gives_results_in_the_order_asked_for(run, open_device, add_one):
    async def main():
        async with open_device(close_timeout_s=5.0) as dev:
            x, stream = dev.full(4, 7, np.float32), dev.stream()
            await x
            stall = open_device.stall(dev, stream, 0.05)
            slow = dev.get(x, stream=stream)
            waiting = [slow, dev.host(int, 1), dev.launch(add_one, dev.zeros(4, np.float32), 4)]
            dev.host(stall.release, after=waiting[1])
            first, second, third, again, _ = await sf.gather(*waiting, slow, dev.fill(x, 0))
            assert again is first
            assert (first.tolist(), second, third) == ([7] * 4, 1, None)
            assert await sf.gather() == []
            del slow, waiting, first, again
            await assert_nothing_is_left(dev)

    run(main)


def test_gather_raises_the_first_failure_at_once_and_the_rest_goes_on(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            with dev.sim.gate(stream):
                slow = dev.launch(add_one, x, 4, stream=stream)
                later = dev.host(refuse, after=slow)
                with pytest.raises(ValueError, match="refused"):
                    await sf.gather(slow, later, dev.host(refuse))
                assert not slow.done()
            await slow
            assert isinstance(await error_of(later), ValueError)
            await assert_nothing_is_left(dev)

    run(main)


def test_as_completed_gives_every_op_once_in_the_order_of_their_ends(run, add_one):
    async def main():
        async with virtual() as dev:
            x, streams = dev.zeros(4, np.float32), [dev.stream() for _ in range(3)]
            await x
            gates = [dev.sim.gate(stream) for stream in streams]
            ops = [dev.get(x, stream=stream) for stream in streams]
            failing = dev.host(refuse)
            found = []
            async for op in sf.as_completed([*ops, failing, ops[0]]):
                found.append(op)
                if gates:
                    gates.pop().release()
            assert found == [failing, *reversed(ops)]
            assert isinstance(failing.exception(), ValueError)
            assert [op async for op in sf.as_completed([])] == []
            del op, ops, found
            await assert_nothing_is_left(dev)

    run(main)


@native
def test_asyncios_gather_and_wait_take_ops(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.full(4, 3, np.float32)
            results = await asyncio.gather(dev.get(x), dev.host(int, 5), dev.host(int, 6))
            assert (results[0].tolist(), results[1:]) == ([3] * 4, [5, 6])
            found = await asyncio.gather(dev.host(refuse), dev.host(int), return_exceptions=True)
            assert (type(found[0]), found[1]) == (ValueError, 0)
            task = asyncio.ensure_future(dev.host(int, 8))
            done, pending = await asyncio.wait([task, asyncio.ensure_future(dev.get(x))])
            assert (task.result(), len(done), len(pending)) == (8, 2, 0)
            assert await asyncio.wait_for(dev.host(int, 9), 20) == 9
            assert await asyncio.shield(dev.host(int, 10)) == 10
            async with asyncio.TaskGroup() as group:
                task = group.create_task(awaited(dev.host(int, 11)))
            assert task.result() == 11
            del results, found, task, done, pending
            await assert_nothing_is_left(dev)

    run(main)


async def awaited(op):
    return await op


# -- timeouts detach -------------------------------------------------------------------------


async def by_fail_after(op):
    with anyio.fail_after(SOON_S):
        await op


async def by_move_on_after(op):
    with anyio.move_on_after(SOON_S) as scope:
        await op
    assert scope.cancelled_caught
    raise TimeoutError


async def by_gather(op):
    with anyio.fail_after(SOON_S):
        await sf.gather(op, op)


async def by_as_completed(op):
    with anyio.fail_after(SOON_S):
        async for _ in sf.as_completed([op]):
            raise AssertionError


async def by_wait_for(op):
    await asyncio.wait_for(op, SOON_S)


async def by_timeout(op):
    async with asyncio.timeout(SOON_S):
        await op


async def by_wait_for_gather(op):
    await asyncio.wait_for(asyncio.gather(op, op), SOON_S)


ANYWHERE = [by_fail_after, by_move_on_after, by_gather, by_as_completed]
ASYNCIO_ONLY = [by_wait_for, by_timeout, by_wait_for_gather]


async def check_a_timeout(dev, add_one, time_out):
    x, stream = dev.zeros(4, np.float32), dev.stream()
    await x
    gate = dev.sim.gate(stream)
    op = dev.launch(add_one, x, 4, stream=stream)
    other = dev.get(x)  # waits for the launch
    for waited in (op, other, op):
        with pytest.raises(TimeoutError):
            await time_out(waited)
        assert not waited.done()
    await turns()
    assert not any((op._rare.wakers, op._rare.callbacks))
    assert dev._core.completion.is_idle
    gate.release()
    assert (await other).tolist() == [1] * 4
    await op
    with pytest.raises(TimeoutError):  # the same of a parked one
        await time_out(dev.host(print, after=(never := anyio.Event())))
    never.set()
    del op, other, waited
    await assert_nothing_is_left(dev)


@pytest.mark.parametrize("time_out", ANYWHERE)
def test_a_timeout_detaches_and_the_op_goes_on(run, add_one, time_out):
    async def main():
        async with virtual() as dev:
            await check_a_timeout(dev, add_one, time_out)

    run(main)


@native
@pytest.mark.parametrize("time_out", ASYNCIO_ONLY)
def test_a_timeout_of_asyncio_detaches_and_the_op_goes_on(run, add_one, time_out):
    async def main():
        async with virtual() as dev:
            await check_a_timeout(dev, add_one, time_out)

    run(main)


@native
def test_a_task_that_awaits_an_op_may_be_awaited_with_a_timeout_and_again(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            gate = dev.sim.gate(stream)
            task = asyncio.ensure_future(dev.launch(add_one, x, 4, stream=stream))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(task), SOON_S)
            gate.release()
            await task
            await assert_nothing_is_left(dev)

    run(main)


def test_many_waiters_of_one_op_are_all_told_and_some_may_leave(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream, told, left = dev.zeros(4, np.float32), dev.stream(), [], []
            gate = dev.sim.gate(stream)
            op = dev.launch(add_one, x, 4, stream=stream)

            async def wait(n, timeout_s):
                with anyio.move_on_after(timeout_s):
                    await op
                    told.append(n)
                    return
                left.append(n)

            async with anyio.create_task_group() as group:
                for n in range(20):
                    group.start_soon(wait, n, SOON_S if n % 2 else None)
                # In any order: trio starts tasks by chance, so ten may wait before ten have left.
                await until(lambda: len(left) == 10 and len(op._rare.wakers) == 10)
                gate.release()
            assert sorted(left) == list(range(1, 20, 2))
            assert sorted(told) == list(range(0, 20, 2))
            await assert_nothing_is_left(dev)

    run(main)
