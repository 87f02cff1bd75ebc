"""Sources and destinations that are page-locked already are used as they are."""

import gc
import threading
import weakref

import anyio
import anyio.to_thread
import numpy as np
import pytest
from page_locked_memory import page_locked_bytes
from support import error_of, turns, until, virtual, wanted

import streamflow as sf
from streamflow.errors import UpstreamFailed
from streamflow.memory import page_locked
from streamflow.runtime import host_memory

N = 1 << 19  # float32s: 2 MiB, above what is copied inline and what the driver is asked about
RNG = np.random.default_rng(7)


def counts(dev):
    core = dev._core
    return core.stagers.num_tasks, core.background.num_tasks, core.pinned.num_live


@pytest.mark.parametrize("is_known", [True, False], ids=["ours", "another library's"])
def test_cr10_a_source_that_is_pinned_is_not_staged(run, open_device, is_known):
    values = RNG.random(N, np.float32)

    async def main():
        async with open_device() as dev:
            with page_locked_bytes(dev, 4 * N, is_known=is_known) as (memory, _):
                source = memory.view(np.float32)
                source[:] = values
                before = counts(dev)
                x = await dev.put(source)
                y = dev.empty(N, np.float32)
                await dev.copy(y, source)
                assert counts(dev) == before
                source[:] = 0  # as `await x` has seen it read
                return await dev.get(x), await dev.get(y)

    for back in run(main):
        np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("is_known", [True, False], ids=["ours", "another library's"])
def test_cr10_an_out_that_is_pinned_is_written_as_it_is(run, open_device, is_known):
    values = RNG.random((2, N // 2), np.float32)

    async def main():
        async with open_device() as dev:
            with page_locked_bytes(dev, 4 * N + 8, is_known=is_known) as (memory, _):
                memory[:] = 0xA5
                x = await dev.put(values)
                before = counts(dev)
                out = memory[4:-4].view(np.float32).reshape(2, -1)
                assert await dev.get(x, out=out) is out
                assert counts(dev) == before
                return out.copy(), memory[:4].copy(), memory[-4:].copy()

    out, head, tail = run(main)
    np.testing.assert_array_equal(out, values)
    assert (np.concatenate([head, tail]) == 0xA5).all()


@pytest.mark.parametrize("source", ["a lease", "a result"])
def test_cr10_what_the_pool_has_given_is_used_as_it_is(run, open_device, source):
    """Large: the lease of a megabyte and more, the array that ``get`` returned."""
    values = RNG.random(N, np.float32)

    async def main():
        async with open_device() as dev:
            x = await dev.put(values)
            if source == "a lease":
                async with dev.pinned.lease(4 * N) as lease:
                    array = lease.array(N, np.float32)
                    array[:] = values
                    return await moved(dev, array)
            return await moved(dev, await dev.get(x))

    async def moved(dev, array):
        before = counts(dev)
        y = await dev.put(array)
        z = dev.zeros(N, np.float32)
        await dev.get(z, out=array)
        assert counts(dev) == before
        assert not array.any()
        return await dev.get(y)

    np.testing.assert_array_equal(run(main), values)


def test_c5_a_lease_is_not_anothers_before_its_copies_have_ended(run, open_device):
    """Released with a copy from it stalled: the device gets what was there."""

    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            async with dev.pinned.lease(1 << 20) as lease:
                lease.array()[:] = 7
                address = lease.address
                stall = open_device.stall(dev, stream)
                x = dev.put(lease.array(), stream=stream)
            async with dev.pinned.lease(1 << 20) as other:
                other.array()[:] = 8
                assert x.staged.done() or other.address != address
                stall.release()
                back = await dev.get(x)
            await turns()
            async with dev.pinned.lease(1 << 20) as again:
                assert again.address in (address, other.address)
            return back

    assert (run(main) == 7).all()


def test_cr10_a_result_of_a_host_task_that_is_pinned_is_not_staged(run):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 4 * N) as (memory, owner):
                x = dev.empty(N, np.float32)
                await x

                def fill():
                    source = memory.view(np.float32)
                    source[:] = 3
                    return source

                before = dev._core.stagers.num_tasks
                filled = dev.host(fill)
                dev.put(filled, out=x)
                await filled
                await x
                assert owner.region.reads  # a release waits for the copy
                assert dev._core.stagers.num_tasks == before
                return await dev.get(x)

    assert (run(main) == 3).all()


def test_r9_a_host_tasks_pinned_result_needs_nothing_of_a_failure_overwritten_since(run):
    async def main():
        async with virtual() as dev:
            whole = np.zeros(1 << 20, np.uint8)
            half = whole[: 1 << 19]
            async with dev.pin(whole), dev.pin(half):
                ones = await dev.full(1 << 20, 1, np.uint8)
                x = dev.zeros(1 << 19, np.uint8)
                dev.sim.fail(kind="copy_d2h", nth=1, sticky=False)
                assert isinstance(await error_of(dev.get(ones, out=whole)), sf.DeviceError)
                task = dev.host(lambda: half)
                dev.put(task, out=x)
                await task
                assert isinstance(await error_of(x), UpstreamFailed)
                await dev.get(ones[: 1 << 19], out=half)
                dev.put(dev.host(lambda: half), out=x)
                return await dev.get(x)

    assert (run(main) == 1).all()


def test_a_small_pinned_source_is_read_before_put_returns(run):
    """Results of ``get`` are pinned, which few programs know: they are read like any other."""

    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 4096, has_region=False) as (memory, _):
                memory[:] = 1
                x = dev.put(memory)
                memory[:] = 2
                return await dev.get(x)

    assert (run(main) == 1).all()


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_ops_on_one_lease_are_ordered_among_each_other(run, open_device, nbytes):
    """Out into a lease, in from it, out again: no await between them, on three streams."""
    values = RNG.integers(0, 255, nbytes, np.uint8)

    async def main():
        async with open_device() as dev:
            with page_locked_bytes(dev, nbytes) as (memory, owner):
                x, zeros = dev.put(values), dev.zeros(nbytes, np.uint8)
                streams = [dev.stream() for _ in range(3)]
                stall = open_device.stall(dev, streams[0])
                dev.get(x, out=memory, stream=streams[0])
                y = dev.put(memory, stream=streams[1])
                last = dev.get(zeros, out=memory, stream=streams[2])
                assert owner.region.last_write is last.ticket
                await turns()
                assert not last.done()
                stall.release()
                await last
                assert not memory.any()
                return await dev.get(y)

    np.testing.assert_array_equal(run(main), values)


@pytest.mark.parametrize("num", [64, N], ids=["small", "large"])
def test_strided_parts_of_a_lease_are_staged_and_ordered(run, num):
    values = np.arange(num, dtype=np.float32)

    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 8 * num) as (memory, _):
                pairs = memory.view(np.float32).reshape(num, 2)
                pairs[:] = -1
                x, stream = dev.put(values), dev.stream()
                await x
                gate = dev.sim.gate(stream)
                dev.get(x, out=pairs[:, 1], stream=stream)
                y = dev.put(pairs[:, 1])
                copied = dev.copy(pairs[:, 0], pairs[:, 1])  # on the host
                await turns()
                assert not copied.done()
                gate.release()
                await copied
                return await dev.get(y), pairs.copy()

    back, pairs = run(main)
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(pairs, np.stack([values, values], axis=1))


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
@pytest.mark.parametrize("has_region", [True, False], ids=["a lease", "a result, on a stream"])
def test_a_copy_to_all_of_pinned_memory_follows_one_to_parts_of_it(run, nbytes, has_region):
    """It is the host that writes those: the device is not to go on before it has."""

    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, nbytes, has_region=has_region) as (memory, _):
                stream = None if has_region else dev.stream()
                threes, zeros = dev.full(nbytes // 2, 3, np.uint8), dev.zeros(nbytes, np.uint8)
                await dev.synchronize()
                dev.get(threes, out=memory[::2], stream=stream)
                last = dev.get(zeros, out=memory, stream=stream)
                while dev._core.backend.advance(0):  # all that needs nobody's look
                    pass
                await last
                await dev.synchronize()
                return memory.copy()

    assert not run(main).any()


def test_a_copy_from_all_of_a_lease_follows_one_to_parts_of_it(run):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 4096) as (memory, _):
                memory[:] = 1
                dev.get(dev.full(2048, 3, np.uint8), out=memory[::2])
                return await dev.get(dev.put(memory))

    back = run(main)
    assert (back[::2] == 3).all()
    assert (back[1::2] == 1).all()


@pytest.mark.parametrize("way", ["from it", "to it", "from a host task's"])
def test_work_of_the_host_on_a_lease_has_its_place_in_the_order(run, way):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 1 << 20) as (memory, _):
                x, y = await dev.put(np.full(1 << 20, 3, np.uint8)), dev.zeros(1 << 20, np.uint8)
                plain, stream = np.full(1 << 20, 4, np.uint8), dev.stream()
                gate = dev.sim.gate(stream)
                if way == "from it":
                    dev.get(x, out=memory, stream=stream)
                    last = dev.copy(plain, memory)
                elif way == "to it":
                    y = dev.put(memory, stream=stream)
                    last = dev.copy(memory, plain)
                else:
                    dev.get(x, out=memory, stream=stream)
                    task = dev.host(lambda: memory)
                    dev.put(task, out=y)
                    last = y.ready
                    await task
                wanted(last)
                await turns(40)
                assert not last.done()
                gate.release()
                await last
                return plain, memory.copy(), await dev.get(y)

    plain, memory, y = run(main)
    if way == "from it":
        assert (plain == 3).all()
    elif way == "to it":
        assert (memory == 4).all()
        assert not y.any()
    else:
        assert (y == 3).all()


def test_an_array_that_goes_on_past_pinned_memory_is_not_taken_for_pinned(run, monkeypatch):
    array = np.ones(1 << 21, np.uint8)

    async def main():
        async with virtual() as dev:
            backend = dev._core.backend
            known, pageable = backend.pointer_attributes, array.ctypes.data + array.nbytes // 2
            with page_locked_bytes(dev, 4096, is_known=False) as (memory, _):
                pinned = memory.ctypes.data
                monkeypatch.setattr(
                    backend, "pointer_attributes", lambda at: known(pinned if at < pageable else at)
                )
                return await dev.get(await dev.put(array))

    assert run(main).all()


def test_a_failed_write_of_a_lease_fails_its_readers(run):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 1 << 20) as (memory, _):
                x = await dev.put(memory)
                dev.sim.fail(kind="copy_d2h", nth=1, sticky=False)
                bad = dev.get(x, out=memory)
                read = dev.put(memory)
                assert isinstance(await error_of(bad), sf.DeviceError)
                assert isinstance(await error_of(read), UpstreamFailed)
                await dev.get(x, out=memory)  # a write needs nothing of what was there
                await dev.put(memory)
                assert not host_memory._in_flight  # nor is what failed kept for ever

    run(main)


def test_a_released_lease_is_refused_before_anything_is_submitted(run):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 1 << 20) as (memory, owner):
                x, plain = await dev.put(memory), np.zeros_like(memory)
                owner.is_released = True
                before, live = dev.stats().num_submitted, dev.live()
                for call in (
                    lambda: dev.put(memory),
                    lambda: dev.get(x, out=memory),
                    lambda: dev.copy(memory, plain),
                    lambda: dev.copy(plain, memory),
                ):
                    with pytest.raises(ValueError, match="released"):
                        call()
                assert dev.stats().num_submitted == before
                assert dev.live() == live

    run(main)


def test_c5_a_pinned_source_lives_until_its_copy_has_retired(run, open_device):
    async def main():
        async with open_device() as dev:
            with page_locked_bytes(dev, 1 << 20, has_region=False) as (memory, _):
                memory[:] = 9

                class Array(np.ndarray):  # of which there can be weak references
                    pass

                source = memory.view(Array)
                gone = weakref.ref(source)
                stream = dev.stream()
                stall = open_device.stall(dev, stream)
                x = dev.put(source, stream=stream)
                staged = x.staged
                del source
                gc.collect()
                held = list(host_memory._in_flight.values())
                assert any(np.shares_memory(array, memory) for array in held)
                assert not staged.done()
                del held
                stall.release()
                await staged
                gc.collect()
                assert gone() is None
                assert not host_memory._in_flight
                return await dev.get(x)

    assert (run(main) == 9).all()


def test_r6_what_a_device_left_behind_may_still_read_is_kept(run):
    async def main():
        dev = virtual(close_timeout_s=0.02)
        await dev.__aenter__()
        with page_locked_bytes(dev, 1 << 20) as (memory, _):
            stream = dev.stream()
            gate = dev.sim.gate(stream)
            dev.put(memory, stream=stream)
            with pytest.raises(TimeoutError, match="did not end"):
                await dev.__aexit__(None, None, None)
            try:
                assert any(
                    np.shares_memory(array, memory) for array in host_memory._in_flight.values()
                )
            finally:
                host_memory._in_flight.clear()
                gate.release()
                while dev._core.backend.advance(0):
                    pass

    run(main)


def test_r8_cancelling_the_await_of_a_direct_get_waits_for_the_write(run, open_device):
    async def main():
        async with open_device() as dev:
            with page_locked_bytes(dev, 1 << 20, has_region=False) as (memory, _):
                x = await dev.put(np.full(1 << 20, 5, np.uint8))
                stream = dev.stream()
                stall = open_device.stall(dev, stream)
                op = dev.get(x, out=memory, stream=stream)
                seen = []

                async def waiting():
                    try:
                        await op
                    finally:
                        seen.append(memory.all())

                async with anyio.create_task_group() as group:
                    group.start_soon(waiting)
                    await turns()
                    group.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await turns()
                        assert not seen
                        stall.release()
                        await until(lambda: seen)
                return seen

    assert run(main) == [True]


def test_a_copy_that_failed_does_not_keep_the_memory_it_was_to_write(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            out = await dev.get(x)  # pinned: the next copy goes there directly
            with dev.sim.fail("copy_d2h", error=ValueError("no copy"), sticky=False):
                assert isinstance(await error_of(dev.get(x, out=out)), sf.DeviceError)
            known = weakref.ref(out)
            del out
            await dev.synchronize()
            gc.collect()
            assert known() is None
            assert "pinned block" not in dev.live()
            del x

    run(main)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_c12_what_a_loop_left_in_flight_is_let_go_once_it_has_ended(run, clock):
    left = []

    def opened():
        return sf.Device(backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock=clock)))

    async def main():
        dev = opened()
        await dev.__aenter__()
        source, stream = await dev.get(dev.full(1 << 20, 3, np.uint8)), dev.stream()
        gate = dev.sim.gate(stream)
        x = dev.put(source, stream=stream)
        left.extend((dev, gate, dev.get(x, out=source)))

    async def another():
        async with opened():
            pass

    run(main)
    run(another)
    assert len(host_memory._in_flight) == 2  # stalled: nothing is let go
    left[1].release()
    for _ in range(100):
        run(another)
        if not host_memory._in_flight:
            break
    assert not host_memory._in_flight
    assert left[0]._core.backend._is_closed


def test_r11_a_lease_of_another_loop_is_an_ordinary_array(run):
    """That loop won't wait for this one's copies before it hands the memory on."""
    leased, may_end = [], threading.Event()

    async def main():
        async with virtual() as dev:
            lease, array = leased
            array[:] = 6
            before = counts(dev)
            x = await dev.put(array)
            await dev.get(dev.zeros(1 << 20, np.uint8), out=array)
            assert counts(dev) != before
            assert lease._block._region is None or not lease._block._region.reads
            assert not array.any()
            return await dev.get(x)

    async def elsewhere():
        async with virtual() as dev, dev.pinned.lease(1 << 20) as lease:
            leased.extend((lease, lease.array()))
            is_there.set()
            await anyio.to_thread.run_sync(may_end.wait)

    is_there = threading.Event()
    thread = threading.Thread(target=anyio.run, args=(elsewhere,))
    thread.start()
    try:
        assert is_there.wait(20)
        assert (run(main) == 6).all()
    finally:
        may_end.set()
        thread.join(20)
        leased.clear()


def test_what_is_pinned_and_must_be_staged_all_the_same_is(run):
    async def main():
        async with virtual() as dev:
            with page_locked_bytes(dev, 1 << 21) as (memory, owner):
                owner.usable_at = lambda address, nbytes: page_locked.Staged(owner.region)
                memory[:] = 2
                before = counts(dev)
                x = await dev.put(memory)
                assert counts(dev) != before
                assert [read.op for read in owner.region.reads] == [None]  # it has ended
                return await dev.get(x)

    assert (run(main) == 2).all()
