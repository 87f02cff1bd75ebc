"""Memory that one can await: first come, first served; the ladder; what a shortage tells."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from support import turns, until, virtual

import streamflow as sf

MIB = 1 << 20


def small(**settings):
    return virtual(memory_nbytes=64 * MIB, **settings)


def test_it_returns_at_once_where_there_is_memory(run, open_device):
    async def main():
        async with open_device() as dev:
            x = await dev.alloc((4, 8), np.float32)
            assert (x.shape, x.dtype) == ((4, 8), np.float32)
            dev.fill(x, 3)
            assert (await dev.get(x) == 3).all()
            assert (await dev.alloc(0, np.float32)).shape == (0,)

    run(main)


@pytest.mark.parametrize("how", ["free", "drop", "cycle"])
def test_it_waits_until_somebody_gives_memory_back(run, how):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = [await dev.alloc(40 * MIB, np.uint8)]
            got = []

            async def want():
                got.append(await dev.alloc(40 * MIB, np.uint8))

            group.start_soon(want)
            await turns(20)
            assert not got
            (row,) = [row for row in dev.report().rows if row.kind == "alloc"]
            assert row.waits_for == f"{40 * MIB} bytes of memory"
            assert "test_alloc.py" in row.where
            if how == "free":
                held.pop().free()
            elif how == "drop":
                held.pop()  # and nobody calls the device any more
            else:
                held.append(held)
                del held
                gc.collect()
            await until(lambda: got)
            dev.fill(got[0], 1)
            assert (await dev.get(got[0][:4])).tolist() == [1] * 4

    run(main)


def test_it_waits_for_a_free_behind_a_stalled_use(run):
    async def main():
        async with small(reuse_allow_internal_dependencies=False) as dev:
            stream = dev.stream()
            x = dev.empty(40 * MIB, np.uint8)
            gate = dev.sim.gate(stream)
            dev.fill(x, 1, stream=stream)
            del x
            with pytest.raises(sf.OutOfDeviceMemory) as caught:
                dev.empty(40 * MIB, np.uint8)
            report = caught.value.report
            assert report.pending_nbytes == 40 * MIB
            assert "fill" in report.pending[0][0]
            assert "test_alloc.py" in report.pending[0][0]
            assert "await dev.alloc" in report.next_step
            got = []

            async def want():
                got.append(await dev.alloc(40 * MIB, np.uint8))

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await turns(20)
                assert not got
                gate.release()
            assert got[0].nbytes == 40 * MIB

    run(main)


def test_who_came_first_is_served_first_whatever_the_size(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = [dev.empty(20 * MIB, np.uint8) for _ in range(3)]
            order, arrays = [], []

            async def want(name, nbytes):
                x = await dev.alloc(nbytes, np.uint8)
                order.append((x.allocation.ticket.seq, name))  # not the order that tasks go on in
                arrays.append(x)

            group.start_soon(want, "large", 50 * MIB)
            await turns(3)
            group.start_soon(want, "small", 1 * MIB)
            await turns(20)
            held.pop()
            await turns(20)
            assert order == []  # the small one would fit, and comes later
            held.clear()
            await until(lambda: len(order) == 2)
            assert [name for _, name in sorted(order)] == ["large", "small"]

    run(main)


def test_waiting_in_one_resource_holds_nobody_up_in_another(run):
    async def main():
        class Other(sf.memory.DeviceMemoryResource):
            def _take(self, nbytes, alignment, place):
                address = place.backend.allocate_linear_blocking(nbytes)
                return sf.memory.Piece(self, address, nbytes, alignment)

            def _give(self, piece, place):
                place.backend.deallocate(piece.address, place.stream)

        async with small() as dev, anyio.create_task_group() as group:
            dev.empty(1).free()
            held = dev.empty(50 * MIB, np.uint8)
            group.start_soon(dev.alloc, 30 * MIB, np.uint8)
            await turns(10)
            with anyio.fail_after(5):
                x = await dev.alloc(4 * MIB, np.uint8, memory=Other())
            assert x.nbytes == 4 * MIB
            del held, x

    run(main)


def test_a_timeout_counts_the_devices_time_and_tells_who_holds_the_memory(run):
    async def main():
        async with small() as dev:
            held = SimpleNamespace(x=dev.empty(40 * MIB, np.uint8))  # by who knows whom else
            start_s = dev._core.clock_s()
            with pytest.raises(sf.DeadlineExceeded, match="no memory within 5") as caught:
                await dev.alloc(40 * MIB, np.uint8, timeout=5.0)
            assert isinstance(caught.value, TimeoutError)
            assert dev._core.clock_s() - start_s == pytest.approx(5.0)
            report = caught.value.report
            assert report.requested_nbytes == 40 * MIB
            assert report.holders[0][1:] == (40 * MIB, 1)
            assert "test_alloc.py" in report.holders[0][0]
            assert not dev._core.memory.queue.waiters
            with pytest.raises(sf.DeadlineExceeded):
                await dev.alloc(40 * MIB, np.uint8, timeout=0)
            assert held.x.nbytes

    run(main)


@pytest.mark.parametrize("timeout", [-1, float("nan"), True])
def test_a_timeout_that_is_none_is_refused(run, timeout):
    async def main():
        async with small() as dev:
            with pytest.raises(ValueError, match="timeout="):
                await dev.alloc(1, timeout=timeout)

    run(main)


def test_a_cancelled_wait_lets_the_next_go_on_and_leaks_nothing(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = dev.empty(40 * MIB, np.uint8)
            got = []

            async def want(nbytes, scope):
                with scope:
                    got.append(await dev.alloc(nbytes, np.uint8))

            first, second = anyio.CancelScope(), anyio.CancelScope()
            group.start_soon(want, 60 * MIB, first)
            await turns(3)
            group.start_soon(want, 20 * MIB, second)
            await turns(20)
            assert not got
            first.cancel()
            await until(lambda: got)
            assert got.pop().nbytes == 20 * MIB
            await dev.synchronize()
            assert dev.memory.used_nbytes == held.nbytes

    run(main)


def test_an_array_that_comes_with_a_cancellation_is_freed(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = [dev.empty(40 * MIB, np.uint8)]
            scope, got = anyio.CancelScope(), []

            async def want():
                with scope:
                    got.append(await dev.alloc(40 * MIB, np.uint8))

            group.start_soon(want)
            await turns(10)
            (waiter,) = dev._core.memory.queue.all_waiters()
            held.pop().free()
            while not waiter.has_ended:
                await turns(1)
            scope.cancel()
            await until(lambda: not dev._core.memory.queue.waiters)
            del waiter
            await turns(10)
            if not got:
                await dev.synchronize()
                assert dev.memory.used_nbytes == 0

    run(main)


def test_what_no_device_could_hold_is_refused_at_once(run):
    async def main():
        async with small() as dev:
            with pytest.raises(sf.OutOfDeviceMemory, match="the whole device has less"):
                await dev.alloc(65 * MIB, np.uint8)
            with pytest.raises(ValueError, match=r"2\*\*63"):
                await dev.alloc((1 << 40, 1 << 30))

    run(main)


def test_a_circle_of_waiters_is_told_at_once(run):
    async def main():
        async with small() as dev:
            outcomes = []

            async def hold():
                x = await dev.alloc(30 * MIB, np.uint8)
                await turns(5)
                try:
                    y = await dev.alloc(30 * MIB, np.uint8)
                except sf.OutOfDeviceMemory as error:
                    outcomes.append(str(error))
                else:
                    outcomes.append("served")
                    del y
                del x

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    group.start_soon(hold)
                    group.start_soon(hold)
            assert outcomes[0].endswith(
                "whoever holds memory waits for more, and no free is pending"
            )
            assert outcomes[1] == "served"

    run(main)


def test_a_producer_waits_for_consumers_that_hold_its_arrays(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            send, receive = anyio.create_memory_object_stream(100)
            seen = []

            async def produce():
                async with send:
                    for n in range(12):
                        x = await dev.alloc(20 * MIB, np.uint8)
                        dev.fill(x, n)
                        await send.send(x)
                        del x

            async def consume():
                async with receive:
                    await turns(200)  # all memory is in the stream meanwhile
                    async for x in receive:
                        seen.append(int((await dev.get(x[:1]))[0]))
                        await turns(20)
                        del x

            group.start_soon(produce)
            group.start_soon(consume)
        assert seen == list(range(12))

    run(main)


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_waiters_hear_of_the_devices_end(run, how, add_one):
    async def main():
        errors = []

        async def want(dev):
            try:
                await dev.alloc(40 * MIB, np.uint8)
            except sf.StreamflowError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            dev = small()
            try:
                async with dev:
                    held = dev.empty(40 * MIB, np.uint8)
                    group.start_soon(want, dev)
                    group.start_soon(want, dev)
                    await turns(20)
                    if how == "lost":
                        dev.sim.fail(kind="launch", sticky=True)
                        x = dev.zeros(4, np.float32)
                        dev.launch(add_one, x, 4)
                        await until(lambda: errors)
                    del held
            except sf.DeviceLost:
                assert how == "lost"
        expected = sf.Closed if how == "closed" else sf.DeviceLost
        assert [type(error) for error in errors] == [expected] * 2
        assert errors[0] is not errors[1]  # each has its own traceback

    run(main)


def test_the_array_belongs_to_the_waiters_scope_and_stream(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = [dev.empty(40 * MIB, np.uint8)]
            got = []

            async def want():
                stream = dev.stream("mine")
                async with dev.scope() as scope:
                    with stream:
                        x = await dev.alloc(40 * MIB, np.uint8)
                    assert x.allocation.stream == "mine"
                    assert "test_alloc.py" in x.allocation.where
                    got.append((x, scope))

            group.start_soon(want)
            await turns(10)
            held.clear()
        assert got[0][1].num_unfinished == 0

    run(main)


def test_a_limit_of_the_scope_still_holds(run):
    async def main():
        async with small() as dev, dev.scope(limit="1MiB"):
            with pytest.raises(sf.OutOfDeviceMemory, match="limit of scope"):
                await dev.alloc(2 * MIB, np.uint8)

    run(main)


def test_a_stream_closed_meanwhile_ends_the_wait(run):
    async def main():
        async with small() as dev, anyio.create_task_group() as group:
            held = [dev.empty(40 * MIB, np.uint8)]
            stream, errors = dev.stream(), []

            async def want():
                try:
                    await dev.alloc(40 * MIB, np.uint8, stream=stream)
                except sf.Closed as error:
                    errors.append(error)

            group.start_soon(want)
            await turns(10)
            stream.close()
            held.clear()
            await until(lambda: errors)

    run(main)


def test_many_tasks_share_little_memory(run):
    async def main():
        async with small() as dev:
            totals = []

            async def work(n):
                for step in range(6):
                    x = await dev.alloc((8 + 5 * (n % 4)) * MIB, np.uint8)
                    dev.fill(x, n + step)
                    totals.append(int((await dev.get(x[:1]))[0]) - n - step)
                    del x

            with anyio.fail_after(15):
                async with anyio.create_task_group() as group:
                    for n in range(16):
                        group.start_soon(work, n)
            assert totals == [0] * 96
            await dev.synchronize()
            assert dev.memory.used_nbytes == 0
            assert not dev._core.space.listeners

    run(main)


@pytest.mark.parametrize("holder", ["a device", "a limit both share", "a block"])
def test_what_others_on_the_gpu_hold_is_waited_for(run, holder):
    async def main():
        shared = None
        if holder == "a limit both share":
            shared = sf.memory.LimitingResourceAdaptor(sf.memory.CudaMemoryResource(), 50 * MIB)
        async with small(memory=shared) as a, small(memory=shared) as b:
            box, stream = [], a.stream()
            if holder == "a block":
                raw = sf.memory.CudaMemoryResource()
                box.append(raw.allocate(40 * MIB, stream=stream))
            else:
                box.append(a.empty(40 * MIB, np.uint8))
            got = []

            async def want():
                got.append(await b.alloc(40 * MIB, np.uint8))

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await turns(50)
                assert not got
                if holder == "a block":
                    raw.deallocate(box.pop(), stream=stream)
                else:
                    box.pop().free()
                with anyio.fail_after(10):
                    while not got:
                        await anyio.sleep(0.001)
            b.fill(got[0], 1)
            assert (await b.get(got.pop()[:4])).tolist() == [1] * 4

    run(main)
