"""Leases of pinned memory: taking, waiting in turn, giving back what no op uses any more."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import warnings

import anyio
import numpy as np
import pytest

import streamflow as sf
from streamflow.memory import page_locked
from streamflow.runtime.registry import _open
from streamflow.scheduler.reaper import run_orphans_blocking
from tests.integration.support import error_of, turns, until, virtual

MIB = 1 << 20


def num_live(dev):
    return dev.pinned.stats().num_live


async def assert_all_is_back(dev):
    await dev.synchronize()
    gc.collect()
    dev._core.drain_dropped()
    stats = dev.pinned.stats()
    assert (stats.num_live, stats.num_parked, stats.num_waiting) == (0, 0, 0)
    assert stats.pinned_nbytes == stats.cached_nbytes <= stats.budget_nbytes


def test_a_lease_is_memory_until_the_block_is_left(run, open_device):
    async def main():
        async with open_device() as dev:
            async with dev.pinned.lease("2MiB") as lease:
                assert lease.nbytes == 2 * MIB
                array = lease.array((512, 1024), np.float32)
                assert array.shape == (512, 1024)
                assert array.ctypes.data == lease.address
                array[:] = 7
                assert lease.array(dtype=np.float32).sum() == 7 * 512 * 1024
                assert dev.live()["pinned block"]
            assert lease.is_released
            assert "released" in repr(lease)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match="was released"):
                lease.array(4)
            await assert_all_is_back(dev)

    run(main)


def test_try_lease_neither_waits_nor_pins(run, open_device):
    async def main():
        async with open_device() as dev:
            assert dev.pinned.try_lease(3 * MIB) is None
            small = dev.pinned.try_lease(1000)
            assert small.nbytes == 1000
            small.release()
            async with dev.pinned.lease(3 * MIB):
                before = dev.pinned.stats().num_pins
            again = dev.pinned.try_lease(np.int64(3 * MIB))
            assert dev.pinned.stats().num_pins == before
            again.release()
            nothing = dev.pinned.try_lease(0)
            assert nothing.array((0, 3), np.float32).shape == (0, 3)
            nothing.release()
            await assert_all_is_back(dev)

    run(main)


def test_bad_requests_are_told_before_anything_happens(run):
    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            for ask in (dev.pinned.try_lease, dev.pinned.lease):
                for nbytes in (-1, 5 * MIB, 2**63, 2**64, "1GiB", "lots"):
                    with pytest.raises(ValueError, match=r"budget|-1|lots"):
                        ask(nbytes)
                for nbytes in (True, 1.5, None):
                    with pytest.raises(TypeError):
                        ask(nbytes)
            with pytest.raises(ValueError, match="timeout"):
                dev.pinned.lease(1, timeout=-1)
            lease = dev.pinned.try_lease(100)
            for shape, dtype in ((26, np.float32), ((-1,), np.uint8), (101, np.uint8)):
                with pytest.raises(ValueError, match=r"fit|negative"):
                    lease.array(shape, dtype)
            with pytest.raises(TypeError, match="object"):
                lease.array(4, object)
            lease.release()
            with pytest.raises(ValueError, match="released already"):
                lease.release()
            request = dev.pinned.lease(100)
            async with request:
                pass
            with pytest.raises(RuntimeError, match="entered once"):
                await request.__aenter__()
            await assert_all_is_back(dev)
        with pytest.raises(sf.Closed):
            dev._pinned.try_lease(1)

    run(main)


def test_a_lease_may_be_released_inside_its_block(run):
    async def main():
        async with virtual() as dev:
            async with dev.pinned.lease(MIB) as lease:
                lease.release()
                assert num_live(dev) == 0
            await assert_all_is_back(dev)

    run(main)


def test_another_thread_may_not_use_the_pool(run):
    async def main():
        async with virtual() as dev:
            lease = dev.pinned.try_lease(100)
            for call in (lease.release, lambda: dev.pinned, lambda: dev.pinned.lease(1)):
                with pytest.raises(sf.WrongThread):
                    await anyio.to_thread.run_sync(call)
            assert not lease.is_released
            lease.release()
            await assert_all_is_back(dev)

    run(main)


def test_a_released_lease_goes_back_when_the_ops_on_it_have_ended(run, open_device):
    """R6: until then the block is nobody's, and a trim leaves it alone."""

    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            async with dev.pinned.lease(MIB) as lease:
                source = lease.array(dtype=np.uint8)
                source[:] = 5
                address = lease.address
                stall = open_device.stall(dev, stream)
                array = dev.put(source, stream=stream)
            del source
            assert dev.pinned.stats().num_parked == 1
            await dev.pinned.trim()
            async with dev.pinned.lease(MIB) as other:
                assert other.address != address
                other.array()[:] = 9
            stall.release()
            assert (await dev.get(array) == 5).all()
            await assert_all_is_back(dev)
            assert await dev.pinned.trim() == dev.pinned.stats().pinned_nbytes + 2 * MIB
            array.free()

    run(main)


def test_ops_on_one_lease_are_ordered_among_each_other(run, open_device):
    """R3: copy out into it, then in from it, on two stalled lanes."""

    async def main():
        async with open_device() as dev:
            first = dev.put(np.arange(MIB // 4, dtype=np.float32))
            await first
            slow, fast = dev.stream(), dev.stream()
            async with dev.pinned.lease(MIB) as lease:
                host = lease.array(first.shape, np.float32)
                host[:] = -1
                stall = open_device.stall(dev, slow)
                out = dev.get(first, out=host, stream=slow)
                second = dev.put(host, stream=fast)
                third = dev.put(host, stream=fast)
                back = dev.get(first, out=host, stream=fast)
                stall.release()
                for op in (out, back):
                    await op
                for array in (second, third):
                    assert (await dev.get(array) == np.arange(MIB // 4)).all()
            del host
            await assert_all_is_back(dev)

    run(main)


def test_a_stale_view_is_refused_and_its_bytes_are_overwritten(run):
    async def main():
        async with virtual() as dev:
            async with dev.pinned.lease(MIB) as lease:
                array = lease.array(dtype=np.float32)
                array[:] = 1
                view = array[10:20]
            target = dev.zeros(10, np.float32)
            await target
            assert (view.view(np.uint8) == 0xDB).all()
            for submit in (
                lambda: dev.put(view),
                lambda: dev.put(array),
                lambda: dev.get(target, out=view),
                lambda: dev.copy(target, view),
            ):
                with pytest.raises(ValueError, match=r"lease was released|read-only"):
                    submit()
            async with dev.pinned.lease(MIB) as again:
                assert again.address == array.ctypes.data
                with pytest.raises(ValueError, match="lease was released"):
                    dev.put(view)
            target.free()
            await assert_all_is_back(dev)

    run(main)


# -- waiting -----------------------------------------------------------------------------------


def test_who_waits_is_served_first_come_first_served_whatever_the_sizes(run):
    async def main():
        async with virtual(pinned_budget_nbytes=8 * MIB) as dev:
            held, order = [], []
            for _ in range(4):
                request = dev.pinned.lease(2 * MIB)
                held.append(await request.__aenter__())

            async def want(name, nbytes):
                async with dev.pinned.lease(nbytes):
                    order.append(name)
                    await turns(3)

            async with anyio.create_task_group() as group:
                for n, (name, nbytes) in enumerate(
                    [("large", 7 * MIB), ("small", 2 * MIB), ("middle", 4 * MIB)]
                ):
                    group.start_soon(want, name, nbytes)
                    await until(lambda n=n: dev.pinned.stats().num_waiting == n + 1)
                held.pop().release()
                await turns()
                assert order == []  # the small one fits, and does not overtake
                assert dev.pinned.try_lease(2 * MIB) is None
                while held:
                    held.pop().release()
            assert order[0] == "large"  # the others fit together, in any order on trio
            assert sorted(order) == ["large", "middle", "small"]
            await assert_all_is_back(dev)

    run(main)


def test_results_do_not_take_what_somebody_waits_for(run):
    """Results have another way, through pageable memory."""

    async def main():
        async with virtual(pinned_budget_nbytes=8 * MIB) as dev:
            array, got = dev.zeros(2 * MIB, np.uint8), []
            results = [await dev.get(array) for _ in range(4)]

            async def want():
                async with dev.pinned.lease(6 * MIB):
                    got.append(dev.pinned.stats().pinned_nbytes)

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await until(lambda: dev.pinned.stats().num_waiting == 1)
                for _ in range(3):
                    results.pop(0)
                    results.append(await dev.get(array))
                assert all((result == 0).all() for result in results)
            assert got == [8 * MIB]
            array.free()
            del results
            await assert_all_is_back(dev)

    run(main)


def test_a_wait_ends_with_its_timeout_by_the_clock_of_the_device(run):
    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            async with dev.pinned.lease(4 * MIB):
                with pytest.raises(sf.DeadlineExceeded, match=r"1048576 bytes within 30 s"):
                    async with dev.pinned.lease(MIB, timeout=30):
                        pass
                with pytest.raises(TimeoutError):
                    async with dev.pinned.lease(MIB, timeout=0):
                        pass
            async with dev.pinned.lease(MIB, timeout=30):
                pass
            await assert_all_is_back(dev)

    run(main)


def test_a_cancelled_waiter_lets_the_next_one_go_on(run):
    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            served = []

            async def want(nbytes, scope):
                with scope:
                    async with dev.pinned.lease(nbytes):
                        served.append(nbytes)

            first = anyio.CancelScope()
            async with anyio.create_task_group() as group, dev.pinned.lease(2 * MIB):
                group.start_soon(want, 4 * MIB, first)
                await until(lambda: dev.pinned.stats().num_waiting == 1)
                group.start_soon(want, 2 * MIB, anyio.CancelScope())
                await until(lambda: dev.pinned.stats().num_waiting == 2)
                first.cancel()
                await until(lambda: served == [2 * MIB])
            await assert_all_is_back(dev)

    run(main)


def test_a_waiter_cancelled_while_its_block_is_being_pinned_gives_it_back(run):
    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            blocks, is_pinning = dev._core.pinned, []
            pin = blocks._allocate_blocking

            def pin_late(nbytes):
                is_pinning.append(nbytes)
                return pin(nbytes)

            blocks._allocate_blocking = pin_late
            scope = anyio.CancelScope()

            async def want():
                with scope:
                    async with dev.pinned.lease(3 * MIB):
                        raise AssertionError("cancelled before")

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await until(lambda: is_pinning)
                scope.cancel()
            await until(lambda: dev.pinned.stats().cached_nbytes == 3 * MIB)
            async with dev.pinned.lease(3 * MIB):
                assert is_pinning == [3 * MIB]
            await assert_all_is_back(dev)

    run(main)


def test_memory_that_cannot_be_pinned_is_told_to_who_waits_and_the_pool_goes_on(run):
    async def main():
        async with virtual() as dev:
            blocks = dev._core.pinned
            pin = blocks._allocate_blocking

            def refuse(nbytes):
                raise MemoryError("planted")

            blocks._allocate_blocking = refuse
            with pytest.raises(sf.DeviceError, match=r"pinning 1048576 bytes.*planted"):
                async with dev.pinned.lease(MIB):
                    pass
            blocks._allocate_blocking = pin
            async with dev.pinned.lease(MIB):
                pass
            await assert_all_is_back(dev)

    run(main)


def test_a_wait_hears_of_copies_that_nobody_awaits(run):
    """R2, R11: the poller runs while somebody waits for a lease."""

    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            array = dev.zeros(4 * MIB, np.uint8)
            await array
            dev.get(array)  # dropped: its block comes back when it has ended
            async with dev.pinned.lease(4 * MIB, timeout=60):
                pass
            async with dev.pinned.lease(4 * MIB) as lease:
                lease_view = lease.array()
                dev.put(lease_view, out=array)
            async with dev.pinned.lease(4 * MIB, timeout=60):
                pass
            array.free()
            await assert_all_is_back(dev)

    run(main)


def test_a_block_that_comes_back_while_the_queue_looks_is_not_missed(run):
    """A finaliser on another thread, just after the budget was found used up."""

    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            array = dev.zeros(4 * MIB, np.uint8)
            results = [await dev.get(array)]
            blocks = dev._core.pinned
            reserve = blocks.reserve

            def reserve_late(nbytes, *, is_waiter=False):
                is_reserved = reserve(nbytes, is_waiter=is_waiter)
                thread = threading.Thread(target=results.clear)
                thread.start()
                thread.join()
                return is_reserved

            blocks.reserve = reserve_late
            with anyio.fail_after(10):
                async with dev.pinned.lease(4 * MIB):
                    pass
            array.free()
            await assert_all_is_back(dev)

    run(main)


def test_a_result_that_is_collected_wakes_the_loop_as_from_another_thread(run, monkeypatch):
    """R12: the finaliser may run in the midst of the loop's own work."""

    async def main():
        async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
            array = dev.zeros(4 * MIB, np.uint8)
            results, got = [await dev.get(array)], []

            async def want():
                async with dev.pinned.lease(4 * MIB):
                    got.append(None)

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await until(lambda: dev.pinned.stats().num_waiting == 1)
                with monkeypatch.context() as patched:
                    patched.setattr(dev._core.shell, "call_soon", lambda _: got.append("call_soon"))
                    results.clear()
            assert got == [None]
            array.free()
            await assert_all_is_back(dev)

    run(main)


def test_r11_another_loop_copies_from_and_to_a_lease_as_any_memory(run, open_device):
    """It can't be waited for by the release, nor wait for this loop's ops."""
    errors = []

    async def other(array):
        async with sf.Device(0, backend="sim") as dev:
            x = dev.put(array)
            await x.staged
            assert (await dev.get(x) == 5).all()
            dev.fill(x, 6)
            op = dev.get(x, out=array)
            assert page_locked.find(array).region is None
            await op

    def work(array):
        try:
            asyncio.run(other(array))
        except BaseException as error:
            errors.append(error)

    async def main():
        async with virtual() as dev:
            async with dev.pinned.lease(2 * MIB) as lease:
                array = lease.array()
                array[:] = 5
                mine = await dev.put(array)
                await anyio.to_thread.run_sync(work, array)
                assert (array == 6).all()
                region = lease._block.region  # knows of this loop's ops alone
                assert [read.timeline.owner for read in region.reads] == [dev._core]
                assert region.last_write.timeline.owner is None
            assert errors == []
            mine.free()
            del array
            await assert_all_is_back(dev)

    run(main)


# -- ends ----------------------------------------------------------------------------------------


def ranges():
    """The addresses at which anything is page-locked, but for what was dropped."""
    gc.collect()
    run_orphans_blocking()
    return set(page_locked._starts)


def pinning_late(dev, verb):
    """Has ``dev`` pin, or unpin, only once the second event is set; the first: it has begun."""
    blocks, has_begun, may_go = dev._core.pinned, threading.Event(), threading.Event()
    call = getattr(blocks, verb)

    def late(at):
        has_begun.set()
        may_go.wait(20)
        return call(at)

    setattr(blocks, verb, late)
    return has_begun, may_go


def test_closing_the_device_tells_whose_memory_is_being_pinned(run):
    async def main():
        told, before = [], ranges()

        async def want(dev):
            with pytest.raises(sf.Closed, match="was closed"):
                async with dev.pinned.lease(2 * MIB):
                    pass
            told.append(True)

        async with anyio.create_task_group() as group:
            async with sf.Device(0, backend="sim") as dev:
                has_begun, may_go = pinning_late(dev, "_allocate_blocking")
                group.start_soon(want, dev)
                await until(has_begun.is_set)

                async def pin():
                    await until(lambda: told)
                    may_go.set()

                group.start_soon(pin)
            assert told == [True]
            assert ranges() <= before

    run(main)


@pytest.mark.parametrize("what", ["lease", "trim"])
def test_c12_a_loop_may_end_while_its_memory_is_pinned_or_unpinned(what, caplog):
    """Who waited is on the loop that ended: nobody is woken, and the device is given back."""
    kept, before = [], ranges()

    async def leave_it():
        dev = await sf.Device(0, backend="sim").__aenter__()
        if what == "lease":
            events = pinning_late(dev, "_allocate_blocking")

            async def want():
                async with dev.pinned.lease(2 * MIB):
                    raise AssertionError
        else:
            async with dev.pinned.lease(2 * MIB):
                pass
            events = pinning_late(dev, "_free_blocking")

            async def want():
                await dev.pinned.trim()

        kept.extend((asyncio.ensure_future(want()), dev._core))
        await until(events[0].is_set)
        return events[1]

    async def another():
        async with sf.Device(0, backend="sim"):
            pass

    loop = asyncio.new_event_loop()
    may_go = loop.run_until_complete(leave_it())
    loop.close()
    may_go.set()
    while kept[1].background.num_busy:
        pass
    with caplog.at_level(logging.ERROR, "streamflow"):
        asyncio.run(another())
    assert caplog.records == []
    assert kept[1] not in _open
    kept[0]._log_destroy_pending = False
    kept.clear()
    gc.collect()
    asyncio.run(another())  # which unpins what the task had
    assert ranges() <= before


def test_a_lease_that_is_dropped_after_its_device_is_unpinned_by_a_later_one(run):
    async def main():
        before = ranges()
        async with virtual() as dev:
            kept = [await dev.pinned.lease(MIB).__aenter__(), dev.pinned.try_lease(100)]
        assert len(ranges() - before) == 2
        for _ in range(2):
            with pytest.warns(ResourceWarning, match="never released"):
                kept.pop()
        async with virtual():
            pass
        assert ranges() <= before

    run(main)


def test_a_lease_that_was_dropped_comes_back_with_a_warning(run):
    async def main():
        async with virtual() as dev:
            lease = dev.pinned.try_lease(1000)
            kept = [lease]
            del lease
            with pytest.warns(ResourceWarning, match=r"never released, made at .*test_leases"):
                kept.clear()
            await assert_all_is_back(dev)

    run(main)


def test_closing_the_device_tells_who_waits(run):
    async def main():
        told = []

        async def want(dev):
            try:
                async with dev.pinned.lease(4 * MIB):
                    pass
            except sf.Closed as error:
                told.append(str(error))

        async with (
            anyio.create_task_group() as group,
            virtual(pinned_budget_nbytes=4 * MIB) as dev,
        ):
            request = dev.pinned.lease(MIB)
            lease = await request.__aenter__()
            group.start_soon(want, dev)
            await until(lambda: dev.pinned.stats().num_waiting == 1)
        assert len(told) == 1
        array = lease.array(4, np.uint8)
        lease.release()  # after its device: harmless
        assert array.shape == (4,)

    run(main)


def test_a_lost_device_tells_who_waits_and_leases_still_go_back(run, add_one):
    async def main():
        with pytest.raises(sf.DeviceLost):
            async with virtual(pinned_budget_nbytes=4 * MIB) as dev:
                errors = []

                async def want():
                    try:
                        async with dev.pinned.lease(4 * MIB):
                            pass
                    except sf.DeviceLost as error:
                        errors.append(error)

                async with (
                    anyio.create_task_group() as group,
                    dev.pinned.lease(MIB) as lease,
                ):
                    group.start_soon(want)
                    await until(lambda: dev.pinned.stats().num_waiting == 1)
                    dev.sim.fail(kind="launch", sticky=True)
                    x = dev.put(lease.array(MIB // 4, np.float32))
                    assert await error_of(dev.launch(add_one, x, 4)) is not None
                assert len(errors) == 1
                assert dev.pinned.stats().num_parked == 0
                await dev.synchronize()

    run(main)


def test_leases_of_two_devices_are_apart(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            async with one.pinned.lease(MIB) as mine, two.pinned.lease(MIB) as other:
                mine.array()[:] = 1
                other.array()[:] = 2
                there = two.put(mine.array(dtype=np.uint8))  # pinned memory is everybody's
                assert (await two.get(there) == 1).all()
            await assert_all_is_back(one)
            await assert_all_is_back(two)

    run(main)


def test_a_trim_can_be_cancelled_and_says_what_it_gave_back(run):
    async def main():
        async with virtual() as dev:
            async with dev.pinned.lease(2 * MIB), dev.pinned.lease(3 * MIB):
                assert await dev.pinned.trim() == 0
            with anyio.CancelScope() as scope:
                scope.cancel()
                await dev.pinned.trim()
            await assert_all_is_back(dev)
            with warnings.catch_warnings():
                assert await dev.pinned.trim("1MiB") == 0
            assert dev.pinned.stats().pinned_nbytes == 0
            for keep in (-1, True, "x"):
                with pytest.raises((ValueError, TypeError)):
                    await dev.pinned.trim(keep)

    run(main)
