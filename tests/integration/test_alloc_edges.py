"""Waiting for memory at odd moments: refusals, circles, caches, and devices that end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from functools import partial
from types import SimpleNamespace
from weakref import ref

import anyio
import numpy as np
import pytest
from support import turns, until, virtual

import streamflow as sf

MIB = 1 << 20


def small(**settings):
    return virtual(memory_nbytes=64 * MIB, **settings)


@pytest.mark.parametrize(
    "make",
    [
        sf.memory.CudaMemoryResource,
        sf.memory.CudaAsyncMemoryResource,
        lambda: sf.memory.PoolMemoryResource(sf.memory.CudaMemoryResource(), MIB),
    ],
    ids=["cuda", "async", "pool"],
)
def test_a_refusal_keeps_nothing_of_its_callers_alive(run, make):
    async def main():
        async with small() as dev:
            held = dev.empty(40 * MIB, np.uint8, memory=(resource := make()))

            def ask():
                mine = np.empty(0)  # as an array would be, which nobody then waits for
                with contextlib.suppress(sf.OutOfDeviceMemory):
                    dev.empty(40 * MIB, np.uint8, memory=resource)
                    raise AssertionError("there was memory")
                return ref(mine)

            gc.disable()
            try:
                assert ask()() is None
            finally:
                gc.enable()
            del held

    run(main)


def test_what_a_resource_keeps_for_later_serves_who_would_wait_in_vain(run):
    async def main():
        bins = sf.memory.BinningMemoryResource(sf.memory.CudaMemoryResource())
        bins.add_bin(8 * MIB)
        async with small() as dev, anyio.create_task_group() as group:
            held = [dev.empty(8 * MIB, np.uint8, memory=bins) for _ in range(7)]
            group.start_soon(partial(dev.alloc, 40 * MIB, np.uint8, memory=bins))
            await turns(10)
            held.clear()  # the bin keeps them all

    run(main)


def test_equal_resources_with_limits_of_their_own_do_not_hold_each_other_up(run):
    async def main():
        upstream = sf.memory.CudaMemoryResource()
        a, b = (sf.memory.LimitingResourceAdaptor(upstream, 10 * MIB) for _ in range(2))
        assert a == b
        async with small() as dev, anyio.create_task_group() as group:
            held = dev.empty(10 * MIB, np.uint8, memory=a)
            group.start_soon(partial(dev.alloc, 8 * MIB, np.uint8, memory=a))
            await turns(10)
            x = await dev.alloc(8 * MIB, np.uint8, memory=b)
            assert x.nbytes == 8 * MIB
            del held

    run(main)


@pytest.mark.parametrize("how", ["a weak reference", "a coroutine", "a generator"])
def test_who_could_still_free_an_array_makes_no_circle(run, how):
    def suspended(x):
        yield
        assert x.nbytes

    async def waiting(x):
        await types.coroutine(suspended)(x)
        assert x.nbytes

    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            known = []

            async def hold():
                x = dev.empty(40 * MIB, np.uint8)
                if how == "a weak reference":
                    known.append(ref(x))
                else:
                    walk = (suspended if how == "a generator" else waiting)(x)
                    known.append(walk)
                    walk.send(None)
                    del x
                await dev.alloc(40 * MIB, np.uint8)

            group.start_soon(hold)
            await turns(50)
            thing = known.pop()
            if how == "a weak reference":
                thing().free()
            else:
                thing.close()

    run(main)


@pytest.mark.parametrize(
    ("holder", "step"),
    [
        ("a block", "freeing blocks of resources"),
        ("a device", "arrays of this GPU's other devices"),
    ],
)
def test_a_shortage_names_the_next_step(run, holder, step):
    async def main():
        async with small() as dev, small() as other:
            cuda = sf.memory.CudaMemoryResource()
            stream, block, x = dev.stream(), None, None
            if holder == "a block":
                block = cuda.allocate(50 * MIB, stream=stream)
            else:
                x = other.empty(50 * MIB, np.uint8)
            with pytest.raises(sf.OutOfDeviceMemory) as caught:
                dev.empty(40 * MIB, np.uint8)
            assert step in caught.value.report.next_step
            if block is not None:
                cuda.deallocate(block, stream=stream)
            del x

    run(main)


def test_who_has_waited_is_not_told_to_wait(run):
    async def main():
        async with small() as dev:
            held = [dev.empty(40 * MIB, np.uint8)]
            with pytest.raises(sf.OutOfDeviceMemory) as circle:
                await dev.alloc(40 * MIB, np.uint8)
            box = SimpleNamespace(held=held)
            with pytest.raises(sf.DeadlineExceeded) as late:
                await dev.alloc(40 * MIB, np.uint8, timeout=1)
            for caught in (circle, late):
                assert caught.value.report.next_step.startswith("dropping arrays")
                assert "await" not in caught.value.report.next_step
            assert box.held

    run(main)


@pytest.mark.parametrize("num_turns", range(8))
def test_an_array_dropped_while_the_device_drains_is_freed(run, num_turns):
    async def main():
        async with anyio.create_task_group() as group:

            async def work(dev, size):
                x = dev.zeros(size, np.uint8)
                await turns(num_turns)
                del x

            async with small() as dev:
                for k in range(4):
                    group.start_soon(work, dev, k + 1)
                await turns(2)
            assert dev._core.left_behind is None

    run(main)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_c12_a_device_whose_loop_ended_while_tasks_waited_is_given_back(caplog):
    pool = sf.memory.PoolMemoryResource(sf.memory.CudaMemoryResource(), 20 * MIB)
    kept = []

    async def leave_behind():
        dev = await small().__aenter__()
        kept.append([dev.empty(40 * MIB, np.uint8), dev.empty(8 * MIB, np.uint8, memory=pool)])
        loop = asyncio.get_running_loop()
        kept.extend(loop.create_task(dev.alloc(40 * MIB, np.uint8)) for _ in range(2))
        await turns(10)

    async def again():
        async with small() as dev:
            x = await dev.alloc(40 * MIB, np.uint8)
            y = await dev.alloc(8 * MIB, np.uint8, memory=pool)
            assert x.nbytes > y.nbytes

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_behind())
    loop.close()
    for task in kept[1:]:
        task._log_destroy_pending = False
    asyncio.run(again())
    kept.clear()
    del task
    gc.collect()
    assert not [record for record in caplog.records if record.name == "streamflow"]


def test_a_free_of_another_device_of_the_loop_serves_when_it_ends(run):
    async def main():
        async with small() as a, small() as b, anyio.create_task_group() as group:
            x, y = a.empty(40 * MIB, np.uint8), a.empty(1 * MIB, np.uint8)
            got, num = [], 0

            async def want():
                got.append(await b.alloc(40 * MIB, np.uint8))

            group.start_soon(want)
            await turns(5)
            a.fill(x, 1)
            del x
            while not got and num < 100:
                await a.fill(y, 1)  # time goes on, and nobody looks at the clock on the wall
                num += 1
            assert num < 20

    run(main)


OTHERS = pytest.mark.parametrize(
    "make",
    [
        sf.memory.CudaMemoryResource,
        sf.memory.CudaAsyncMemoryResource,
        lambda: sf.memory.PoolMemoryResource(sf.memory.CudaMemoryResource(), 40 * MIB),
    ],
    ids=["deferred", "cached", "pooled"],
)


@OTHERS
def test_what_other_resources_do_not_use_any_more_is_given_back(run, make):
    async def main():
        other = make()
        async with small() as dev:
            dev.empty(40 * MIB, np.uint8, memory=other).free()
            await dev.synchronize()
            dev.empty(40 * MIB, np.uint8)

    run(main)


@OTHERS
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_what_other_resources_give_back_is_waited_for(run, make, clock):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock=clock, memory_nbytes=64 * MIB))
        other = make()
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            dev.empty(40 * MIB, np.uint8, memory=other).free()
            with anyio.fail_after(20):
                await dev.alloc(40 * MIB, np.uint8)

    run(main)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_what_goes_back_to_another_resource_meanwhile_ends_the_wait(run, clock):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock=clock, memory_nbytes=64 * MIB))
        other = sf.memory.CudaAsyncMemoryResource()
        async with (
            sf.Device(0, backend="sim", settings=settings) as dev,
            anyio.create_task_group() as group,
        ):
            held = [dev.empty(40 * MIB, np.uint8, memory=other)]
            group.start_soon(dev.alloc, 40 * MIB, np.uint8)
            await turns(10)
            held.clear()  # its pool keeps it

    run(main)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sf.memory.LimitingResourceAdaptor(sf.memory.CudaMemoryResource(), 8 * MIB),
        lambda: sf.memory.PoolMemoryResource(sf.memory.CudaMemoryResource(), MIB, 8 * MIB),
        lambda: sf.memory.ArenaMemoryResource(sf.memory.CudaMemoryResource(), 8 * MIB),
        lambda: sf.memory.FixedSizeMemoryResource(sf.memory.CudaMemoryResource(), 8 * MIB, 1),
        lambda: sf.memory.CudaAsyncMemoryResource(max_size=8 * MIB),
        lambda: sf.memory.StatisticsResourceAdaptor(
            sf.memory.LimitingResourceAdaptor(sf.memory.CudaMemoryResource(), 8 * MIB)
        ),
    ],
    ids=["limit", "pool", "arena", "fixed size", "async", "an adaptor over a limit"],
)
def test_more_than_a_resource_ever_has_is_refused_at_once(run, make):
    async def main():
        resource = make()
        async with small() as dev:
            held = SimpleNamespace(x=dev.empty(MIB, np.uint8, memory=resource))
            with anyio.fail_after(5), pytest.raises(sf.OutOfDeviceMemory, match="never has that"):
                await dev.alloc(9 * MIB, np.uint8, memory=resource)
            del held.x
            await dev.alloc(4 * MIB, np.uint8, memory=resource)

    run(main)


def test_a_memory_error_of_a_users_resource_is_waited_for(run):
    async def main():
        taken = []

        def give(stream, nbytes, alignment, arg):
            if taken:
                raise MemoryError("one at a time")
            taken.append(nbytes)
            return 1 << 40

        resource = sf.memory.CallbackMemoryResource(give, lambda *args: taken.clear())
        async with small() as dev, anyio.create_task_group() as group:
            box = [dev.empty(64, np.uint8, memory=resource)]
            with pytest.raises(sf.OutOfDeviceMemory, match="one at a time"):
                dev.empty(64, np.uint8, memory=resource)
            group.start_soon(partial(dev.alloc, 64, np.uint8, memory=resource))
            await turns(20)
            assert dev._core.memory.queue.waiters
            box.clear()
            await until(lambda: not dev._core.memory.queue.waiters)

    run(main)
