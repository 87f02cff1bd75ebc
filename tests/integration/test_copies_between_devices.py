"""``dev.copy`` between devices: straight where one reaches the other, else by the host."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

import anyio
import numpy as np
import pytest
from support import configured, error_of, turns, until, virtual, wanted

import streamflow as sf
from streamflow.backends.memory import PoolAccess

CHUNK = 65536
WAYS = ["granted by the source", "granted by the destination", "by the host"]


def pool_of(dev):
    return dev._core.memory.pool


def grant(owner, other, access=PoolAccess.READ_WRITE):
    owner._core.backend.set_pool_access_blocking(pool_of(owner), other.index, access)


def pair(**settings):
    return virtual(0, **settings), virtual(1, **settings)


def counted(dev):
    counters = dev.sim.counters
    return {verb: counters[verb] for verb in ("copy_peer", "copy_d2h", "copy_h2d", "copy_d2d")}


def change(dev, before):
    return {verb: num - before[verb] for verb, num in counted(dev).items() if num != before[verb]}


def prepare(way, src, dst):
    if way == WAYS[0]:
        grant(src, dst, PoolAccess.READ)
    elif way == WAYS[1]:
        grant(dst, src)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_stream", [False, True])
def test_it_takes_the_way_that_is_open(run, way, asked, on_stream):
    async def main():
        one, two = pair()
        async with one, two:
            prepare(way, one, two)
            x, y = one.put(np.arange(100.0)), two.zeros(100)
            await sf.gather(x.ready, y.ready)
            before = counted(one), counted(two)
            dev = one if asked == "source" else two
            stream = dev.stream() if on_stream else None
            op = dev.copy(y, x, stream=stream)
            assert op._core is dev._core
            await op
            took = change(one, before[0]), change(two, before[1])
            if way == WAYS[2]:
                assert took == ({"copy_d2h": 1}, {"copy_h2d": 1})
            else:
                assert took == (
                    ({"copy_peer": 1}, {}) if asked == "source" else ({}, {"copy_peer": 1})
                )
            assert (await two.get(y)).tolist() == list(range(100))

    run(main)


def test_access_to_read_does_not_let_a_device_push(run):
    async def main():
        one, two = pair()
        async with one, two:
            grant(two, one, PoolAccess.READ)
            x, y = one.put(np.arange(4.0)), two.zeros(4)
            await one.copy(y, x)
            assert counted(one)["copy_peer"] == 0
            await two.copy(x, y)  # the other way round, it is the source's
            assert counted(two)["copy_peer"] == 1

    run(main)


def test_two_devices_on_one_gpu_need_no_peer(run):
    async def main():
        async with virtual(0) as one, virtual(0) as again:
            x, y = one.put(np.arange(8.0)), again.zeros(8)
            await again.copy(y, x)
            assert counted(again)["copy_peer"] == counted(again)["copy_d2h"] == 0
            assert counted(again)["copy_d2d"] == 1
            assert (await again.get(y)).tolist() == list(range(8))

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 9 * CHUNK + 5])
def test_arrays_of_any_size_arrive_whole_through_two_blocks(run, nbytes, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            data = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
            x, y = one.put(data), two.zeros(nbytes, np.uint8)
            dev = one if asked == "source" else two
            op = dev.copy(y, x)
            one.fill(x, 0)  # ordered after every chunk
            result = await two.get(y)
            assert result.tobytes() == data.tobytes()
            await op
            del result
            assert counted(one)["copy_d2h"] == -(-nbytes // CHUNK)
            await dev.synchronize()
            assert dev._core.pinned.num_live == 0

    run(main)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["source", "destination"])
def test_nothing_to_copy_is_an_op_all_the_same(run, way, asked):
    async def main():
        one, two = pair()
        async with one, two:
            prepare(way, one, two)
            x, y = one.empty((0, 3)), two.empty((0, 3))
            dev = one if asked == "source" else two
            await dev.copy(y, x, after=dev.host(turns))
            assert not any(counted(dev).values())

    run(main)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["source", "destination"])
def test_c6_the_copy_is_ordered_on_both_devices(run, add_one, way, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            prepare(way, one, two)
            num = CHUNK  # floats: four chunks
            x, y = one.zeros(num, np.float32), two.zeros(num, np.float32)
            await sf.gather(x.ready, y.ready)
            slow_one, slow_two = one.stream(), two.stream()
            gates = one.sim.gate(slow_one), two.sim.gate(slow_two)
            one.launch(add_one, x, num, stream=slow_one)  # the write that it reads
            reader = two.get(y, stream=slow_two)  # the read that it overwrites
            dev = one if asked == "source" else two
            op = dev.copy(y, x)
            one.fill(x, 9)  # waits for the read of x
            later = two.launch(add_one, y, num)
            wanted(op, later)
            await turns(50)
            assert not op.done()
            gates[0].release()
            await turns(50)
            assert not op.done()  # y is still being read
            assert not later.done()
            gates[1].release()
            assert set((await reader).tolist()) == {0}
            assert set((await two.get(y)).tolist()) == {2}
            await op
            assert set((await one.get(x)).tolist()) == {9}

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_c6_dropped_arrays_stay_until_the_copy_has_ended(run, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            data = np.arange(4 * CHUNK, dtype=np.uint8)
            x, y = await one.put(data), two.zeros(data.size, np.uint8)
            await y.ready
            lane = two.lanes["h2d"] if asked == "destination" else one.lanes["d2h"]
            dev = two if asked == "destination" else one
            gate = dev.sim.gate(lane)
            dev.copy(y, x)
            del x
            again = one.full(data.size, 255, np.uint8)
            await turns()
            gate.release()
            assert (await two.get(y)).tobytes() == data.tobytes()
            del again

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_stream_keeps_its_order_around_the_copy(run, add_one, asked):
    async def main():
        one, two = pair()
        async with one, two:
            x, y = one.put(np.arange(4.0)), two.zeros(4)
            z = (one if asked == "source" else two).zeros(4, np.float32)
            await sf.gather(x.ready, y.ready, z.ready)
            dev, other = (one, two) if asked == "source" else (two, one)
            stream, lane = dev.stream(), other.lanes["h2d" if asked == "source" else "d2h"]
            gate, far = dev.sim.gate(stream), other.sim.gate(lane)
            dev.launch(add_one, z, 4, stream=stream)
            op = dev.copy(y, x, stream=stream)
            end = stream.record()
            wanted(op)
            await turns(50)
            assert counted(other)["copy_h2d" if asked == "source" else "copy_d2h"] == 1
            far.release()
            await turns(50)
            assert not op.done()
            gate.release()
            await op
            far = other.sim.gate(lane)
            op = dev.copy(y, x, stream=stream)
            last = dev.launch(add_one, z, 4, stream=stream)
            await end
            wanted(op, last)
            await turns(50)
            assert not op.done()
            assert not last.done()  # program order: after the whole copy
            far.release()
            await last
            assert op.done()

    run(main)


def test_what_a_stream_copies_is_read_after_its_earlier_work(run, add_one):
    async def main():
        one, two = pair()
        async with one, two:
            x, y, z = one.put(np.arange(4.0)), two.zeros(4), two.zeros(4, np.float32)
            await sf.gather(x.ready, y.ready, z.ready)
            stream = two.stream()
            gate = two.sim.gate(stream)
            two.launch(add_one, z, 4, stream=stream)
            op = two.copy(y, x, stream=stream)
            overwritten = one.fill(x, 9)
            wanted(overwritten)
            await turns(50)
            assert not overwritten.done()  # x has not been read
            gate.release()
            await sf.gather(op, overwritten)
            assert (await two.get(y)).tolist() == [0, 1, 2, 3]

    run(main)


def test_a_lane_does_not_wait_for_the_other_device(run):
    async def main():
        one, two = pair()
        async with one, two:
            x, y = one.put(np.arange(4.0)), two.zeros(4)
            await sf.gather(x.ready, y.ready)
            gate = two.sim.gate(two.lanes["h2d"])
            op = one.copy(y, x)
            with anyio.fail_after(20):
                assert (await one.get(x)).tolist() == [0, 1, 2, 3]  # by the same lane d2h
            assert not op.done()
            gate.release()
            await op

    run(main)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_failed_source_fails_the_copy_and_its_readers(run, way, asked):
    async def main():
        one, two = pair()
        async with two, one:
            prepare(way, one, two)
            x, y = one.zeros(4), two.zeros(4)

            def bad():
                raise KeyError("bad")

            failing = one.host(bad)
            fed = one.copy(x, np.zeros(4), after=failing)
            dev = one if asked == "source" else two
            op = dev.copy(y, x)
            read = two.get(y)
            assert isinstance(await error_of(failing), KeyError)
            for each in (fed, op, read):
                error = await error_of(each)
                assert isinstance(error, sf.UpstreamFailed)
                assert isinstance(error.__cause__, KeyError)
            two.fill(y, 1)  # a full overwrite clears it
            assert (await two.get(y)).tolist() == [1] * 4

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("lost", ["source", "destination"])
def test_c2_a_lost_device_fails_the_copy_and_not_the_other_device(run, add_one, asked, lost):
    async def main():
        one, two = virtual(0, staging_in_nbytes=CHUNK), virtual(1, staging_in_nbytes=CHUNK)
        bad, good = (one, two) if lost == "source" else (two, one)
        await bad.__aenter__()
        async with good:
            x, y = one.zeros(3 * CHUNK, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            n = bad.zeros(4, np.float32)
            await sf.gather(x.ready, y.ready, n.ready)
            gates = (
                one.sim.gate(one.lanes["d2h"]) if lost == "source" else None,
                two.sim.gate(two.lanes["h2d"]) if lost == "destination" else None,
            )
            op = (one if asked == "source" else two).copy(y, x)
            bad.sim.fail("launch")
            fault = bad.launch(add_one, n, 4, stream=bad.stream())
            assert isinstance(await error_of(fault), sf.DeviceLost)
            error = await error_of(op)
            if not isinstance(error, sf.DeviceLost):
                assert isinstance(error, sf.UpstreamFailed)
                assert isinstance(error.__cause__, sf.DeviceLost)
            del gates
            w = good.full(4, 5, np.float32)
            assert (await good.get(w)).tolist() == [5] * 4
            if lost == "source":
                y2 = two.fill(y, 3)
                await y2
            assert good.is_healthy
            await good.synchronize()
            await until(lambda: not good._core.abroad)
        await bad.__aexit__(None, None, None)

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_copy_that_waits_for_a_host_task_can_be_cancelled(run, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            x, y = one.zeros(3 * CHUNK, np.uint8), two.full(3 * CHUNK, 7, np.uint8)
            dev = one if asked == "source" else two
            go_on = anyio.Event()
            op = dev.copy(y, x, after=dev.host(go_on.wait))
            await turns()
            assert op.state is sf.OpState.PARKED
            assert op.cancel()
            assert isinstance(await error_of(op), sf.OpCancelled)
            assert op.cancel() is False
            go_on.set()
            await one.synchronize()
            await two.synchronize()
            assert counted(one)["copy_d2h"] == counted(two)["copy_h2d"] == 0
            assert dev._core.pinned.num_live == 0
            two.fill(y, 1)
            assert set((await two.get(y)).tolist()) == {1}

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_copy_that_has_begun_to_write_cannot_be_cancelled(run, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK, window=64)
        async with one, two:
            num = 60
            x, y = one.full(num * CHUNK, 4, np.uint8), two.zeros(num * CHUNK, np.uint8)
            await sf.gather(x.ready, y.ready)
            gate = two.sim.gate(two.lanes["h2d"])
            dev = one if asked == "source" else two
            op = dev.copy(y, x)  # more chunks than the window has room for
            await turns()
            assert op.cancel() is False
            gate.release()
            await op
            assert set((await two.get(y)).tolist()) == {4}

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])  # for no block, and for one of two
@pytest.mark.parametrize("nbytes", [100, 3 * CHUNK])
def test_with_no_pinned_memory_to_spare_it_goes_through_pageable_memory(run, asked, nbytes, budget):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK * 2, pinned_budget_nbytes=budget)
        async with one, two:
            data = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
            x, y = one.put(data), two.zeros(nbytes, np.uint8)
            dev = one if asked == "source" else two
            stream = dev.stream()
            op = dev.copy(y, x, stream=stream)
            assert op._core is dev._core
            await op
            assert one._core.pinned.counted_nbytes == two._core.pinned.counted_nbytes == 0
            assert (await two.get(y)).tobytes() == data.tobytes()

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_memory_that_cannot_be_pinned_fails_the_copy_alone(run, asked, monkeypatch):
    async def main():
        one, two = pair(staging_in_nbytes=4 * CHUNK)
        async with one, two:
            x, y = one.zeros(3 * CHUNK, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            await sf.gather(x.ready, y.ready)
            dev = one if asked == "source" else two

            def refuse(nbytes):
                raise MemoryError("no page can be locked")

            before = dev._core.pinned.counted_nbytes
            dev._core.pinned._allocate_blocking, kept = refuse, dev._core.pinned._allocate_blocking
            op = dev.copy(y, x)
            error = await error_of(op)
            root = error.__cause__ if isinstance(error, sf.UpstreamFailed) else error
            assert "no page can be locked" in str(root) or "no page" in str(root.__cause__)
            dev._core.pinned._allocate_blocking = kept
            assert dev._core.pinned.counted_nbytes == before
            await one.synchronize()
            await two.synchronize()
            await dev.copy(y, x)

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_failure_that_nobody_saw_is_told_by_the_device_that_was_asked(run, asked):
    async def main():
        one, two = pair(staging_in_nbytes=4 * CHUNK)
        async with one, two:
            x, y = one.zeros(3 * CHUNK, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            dev, other = (one, two) if asked == "source" else (two, one)

            def refuse(nbytes):
                raise MemoryError("no page can be locked")

            dev._core.pinned._allocate_blocking, kept = refuse, dev._core.pinned._allocate_blocking
            dev.copy(y, x)
            with pytest.raises(ExceptionGroup):
                await dev.synchronize()
            await other.synchronize()
            dev._core.pinned._allocate_blocking = kept

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("closed_first", ["source", "destination"])
def test_closing_either_device_waits_for_the_copy(run, asked, closed_first):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        await one.__aenter__()
        await two.__aenter__()
        x, y = one.full(5 * CHUNK, 6, np.uint8), two.zeros(5 * CHUNK, np.uint8)
        op = (one if asked == "source" else two).copy(y, x)
        result = two.get(y)
        first, last = (one, two) if closed_first == "source" else (two, one)
        await x.free()
        y.free()
        await first.__aexit__(None, None, None)
        await last.__aexit__(None, None, None)
        assert op.exception() is None
        assert set(result.result().tolist()) == {6}

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
def test_leaving_by_an_error_drops_what_has_not_begun(run, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        with pytest.raises(KeyError):
            async with one, two:
                x, y = one.zeros(5 * CHUNK, np.uint8), two.zeros(5 * CHUNK, np.uint8)
                dev = one if asked == "source" else two
                dev.copy(y, x, after=anyio.Event())
                await turns()
                raise KeyError

    run(main)


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_arrays_that_do_not_match_are_refused_before_anything(run, wrong):
    async def main():
        one, two = pair()
        async with one, two:
            x = one.zeros((2, 3), np.float32)
            y = two.zeros((3, 2), np.float32) if wrong == "shape" else two.zeros((2, 3), np.int32)
            with pytest.raises(ValueError if wrong == "shape" else TypeError):
                two.copy(y, x)
            x.free()
            with pytest.raises(sf.Closed):
                two.copy(y, x)
            assert counted(two)["copy_h2d"] == counted(one)["copy_d2h"] == 0

    run(main)


@pytest.mark.parametrize("way", WAYS)
def test_it_works_on_the_wall_clock_too(run, way):
    async def main():
        devices = [
            sf.Device(
                index,
                backend="sim",
                settings=configured({"clock": "wall", "staging_in_nbytes": CHUNK}),
            )
            for index in (0, 1)
        ]
        async with devices[0] as one, devices[1] as two:
            prepare(way, one, two)
            data = np.arange(7 * CHUNK, dtype=np.uint32)
            x, y = one.put(data), two.zeros(data.size, np.uint32)
            for dev in (one, two):
                dev.copy(y, x)
                dev.copy(x, y)
            assert (await one.get(x)).tobytes() == data.tobytes()

    run(main)


def test_serial_mode_and_many_copies_both_ways(run):
    async def main():
        for serial in (False, True):
            one, two = pair(staging_in_nbytes=CHUNK, serial=serial)
            async with one, two:
                xs = [one.full(CHUNK + 3, n, np.uint8) for n in range(6)]
                ys = [two.empty(CHUNK + 3, np.uint8) for _ in xs]
                ops = [(one, two)[n % 2].copy(ys[n], xs[n]) for n in range(6)]
                back = [(one, two)[n % 2].copy(xs[n], ys[(n + 1) % 6]) for n in range(6)]
                results = [one.get(x) for x in xs]
                for n, result in enumerate(results):
                    assert set((await result).tolist()) == {(n + 1) % 6}
                await sf.gather(*ops, *back)

    run(main)


def test_the_op_belongs_to_the_scope_it_was_called_in(run):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            x, y = one.full(3 * CHUNK, 6, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            for dev in (one, two):
                async with dev.scope():
                    op = dev.copy(y, x)
                assert op.done()

    run(main)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["source", "destination"])
def test_a_copy_in_flight_keeps_no_array_alive(run, way, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            prepare(way, one, two)
            x, y = one.zeros(3 * CHUNK, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            await sf.gather(x.ready, y.ready)
            slow = one.stream()
            gate = one.sim.gate(slow)
            one.fill(x, 4, stream=slow)
            op = (one if asked == "source" else two).copy(y, x)
            seen = weakref.ref(x), weakref.ref(y)
            del x, y
            assert seen[0]() is None
            assert seen[1]() is None
            again = one.full(3 * CHUNK, 1, np.uint8), two.full(3 * CHUNK, 1, np.uint8)
            await turns()
            gate.release()
            await op
            for dev, array in zip((one, two), again, strict=True):
                assert set((await dev.get(array)).tolist()) == {1}

    run(main)


@pytest.mark.parametrize("asked", ["source", "destination"])
@pytest.mark.parametrize("way", WAYS)
def test_a_future_that_is_cancelled_cancels_the_copy(run, way, asked):
    async def main():
        one, two = pair(staging_in_nbytes=CHUNK)
        async with one, two:
            prepare(way, one, two)
            x, y = one.zeros(3 * CHUNK, np.uint8), two.zeros(3 * CHUNK, np.uint8)
            future: Future[None] = Future()
            op = (one if asked == "source" else two).copy(y, x, after=future)
            await turns()
            future.cancel()
            assert isinstance(await error_of(op), sf.OpCancelled)
            two.fill(y, 1)
            assert set((await two.get(y)).tolist()) == {1}
            assert counted(one)["copy_d2h"] == 0

    run(main)
