"""What went wrong with Caffe's SyncedMemory, each as a test of ours; and copies that are shared."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual
from synced_support import (
    Broken,
    N,
    State,
    broken_call,
    contents,
    fill_device,
    fill_host,
    in_state,
)

import streamflow as sf

LARGE = 1 << 20  # items: staged


# -- synced before the copy has ended ----------------------------------------------------------


@pytest.mark.parametrize("size", [N, LARGE])
def test_trap_synced_is_set_when_a_push_has_ended_and_not_before(run, open_device, size):
    async def main():
        async with open_device() as dev, dev.stream() as stream:
            m = await in_state(dev, State.HEAD_AT_CPU, 1, shape=size)
            stall = open_device.stall(dev, stream)
            pushed = m.push(stream=stream)
            await turns()
            assert m.state is State.HEAD_AT_CPU
            assert m.in_flight is not None
            assert not pushed.done()
            stall.release()
            await pushed
            assert m.state is State.SYNCED
            assert m.in_flight is None
            m.close()

    run(main)


@pytest.mark.parametrize("size", [N, LARGE])
def test_trap_synced_is_set_when_a_pull_has_ended_and_not_before(run, open_device, size):
    async def main():
        async with open_device() as dev, dev.stream() as stream:
            m = await in_state(dev, State.HEAD_AT_GPU, 1, shape=size)
            stall = open_device.stall(dev, stream)
            pulled = m.pull(stream=stream)
            await turns()
            assert m.state is State.HEAD_AT_GPU
            assert not pulled.done()
            stall.release()
            await pulled
            assert m.state is State.SYNCED
            assert await contents(m) == 1
            m.close()

    run(main)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("change", ["discard", "write", "adopt"])
def test_trap_a_copy_of_data_that_has_changed_since_makes_nothing_synced(run, to_device, change):
    async def main():
        async with virtual() as dev:
            state = State.HEAD_AT_CPU if to_device else State.HEAD_AT_GPU
            m = await in_state(dev, state, 1)
            gate = dev.sim.gate("h2d" if to_device else "d2h")
            copied = m.push() if to_device else m.pull()
            if change == "discard":
                m.discard()
                expected, value = State.UNINITIALIZED, 0
            elif change == "adopt":
                m.adopt(dev.full(N, 2, np.float32), discard=True)
                expected, value = State.HEAD_AT_GPU, 2
            else:
                await fill_device(dev, m, 2)
                expected, value = State.HEAD_AT_GPU, 2
            assert m.in_flight is None
            gate.release()
            await copied
            assert m.state is expected
            assert await contents(m) == value
            m.close()

    run(main)


# -- the head moves when the pointer is handed out ---------------------------------------------


@pytest.mark.parametrize("state", [State.HEAD_AT_CPU, State.SYNCED])
def test_trap_the_head_moves_when_a_block_is_left_and_not_when_it_is_entered(
    run, open_device, state
):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, state, 1)
            async with m.device(write=True) as d:
                assert m.state is State.HEAD_AT_CPU  # what there would be if this failed
                dev.fill(d, 2)
                assert m.state is State.HEAD_AT_CPU
            assert m.state is State.HEAD_AT_GPU
            assert await contents(m) == 2
            assert m.state is State.SYNCED
            async with m.host(write=True):
                assert m.state is State.HEAD_AT_GPU
            assert m.state is State.HEAD_AT_CPU
            m.close()

    run(main)


@pytest.mark.parametrize("write", [True, "all"])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.HEAD_AT_CPU, State.HEAD_AT_CPU),
        (State.SYNCED, State.HEAD_AT_CPU),
        (State.HEAD_AT_GPU, State.POISONED),
    ],
)
def test_trap_a_device_body_that_raises_has_not_written(
    run, open_device, state, after, writes, write
):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, state, 1)
            with pytest.raises(Broken):
                async with m.device(write=write) as d:
                    if writes:
                        dev.fill(d, 2)
                    raise Broken("body")
            if not writes:
                assert m.state is (State.HEAD_AT_CPU if after is State.HEAD_AT_CPU else state)
                assert await contents(m) == 1
            elif after is State.POISONED:
                assert m.state is after
                with pytest.raises(sf.UpstreamFailed, match="body") as caught:
                    await contents(m)
                assert isinstance(caught.value.__cause__, Broken)
                assert caught.value.__cause__.__traceback__ is None  # its frames hold arrays (C23)
            else:
                assert m.state is after
                assert await contents(m) == 1
                async with m.device() as d:
                    assert ((await dev.get(d)) == 1).all()
            m.close()

    run(main)


@pytest.mark.parametrize("write", [True, "all"])
@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.UNINITIALIZED, None),
        (State.HEAD_AT_CPU, State.POISONED),
        (State.SYNCED, State.HEAD_AT_GPU),
        (State.HEAD_AT_GPU, State.HEAD_AT_GPU),
    ],
)
def test_trap_a_host_body_that_raises_has_not_written(run, state, after, write):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, state, 1)
            with pytest.raises(Broken):
                async with m.host(write=write) as a:
                    a[: N // 2] = 2
                    raise Broken("body")
            if after is None:
                after_ = State.UNINITIALIZED if write == "all" else State.POISONED
            else:
                after_ = after
            assert m.state is after_
            if after_ is State.POISONED:
                with pytest.raises(sf.UpstreamFailed):
                    m.push()
                m.discard()
                assert await contents(m) == 0
            else:
                assert await contents(m) == (0 if after_ is State.UNINITIALIZED else 1)
            m.close()

    run(main)


# -- a failed kernel ---------------------------------------------------------------------------


def test_trap_a_failed_kernel_poisons_and_reads_raise_the_cause(run, open_device):
    async def main():
        async with open_device() as dev:
            for state in (State.HEAD_AT_CPU, State.HEAD_AT_GPU, State.SYNCED):
                m = await in_state(dev, state, 1)
                async with m.device(write=True) as d:
                    dev.call(broken_call, d)
                for block in (m.host, m.device, m.host, m.device):
                    error = await error_of(reading(block()))
                    assert isinstance(error, sf.UpstreamFailed)
                    assert isinstance(error.__cause__, Broken)
                    assert m.state is State.POISONED
                for transfer in (m.push, m.pull):
                    with pytest.raises(sf.UpstreamFailed):
                        transfer()
                for block in (m.host, m.device):
                    assert isinstance(await error_of(reading(block(write=True))), sf.UpstreamFailed)
                m.close()

    run(main)


async def reading(block):
    async with block:
        pass


@pytest.mark.parametrize(
    "cure", ["host", "device", "kernel", "discard", "adopt host", "adopt device"]
)
def test_a_whole_write_or_a_discard_clears_the_poison(run, open_device, add_one, cure):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 1)
            async with m.device(write=True) as d:
                failing = dev.call(broken_call, d)
            assert isinstance(await error_of(failing), Broken)
            assert m.state is State.POISONED
            if cure == "host":
                await fill_host(m, 2)
            elif cure == "device":
                await fill_device(dev, m, 2)
            elif cure == "kernel":  # which reads as well, as far as anybody knows
                async with m.device(write="all") as d:
                    dev.call(set_to_two, d)
            elif cure == "discard":
                m.discard()
            elif cure == "adopt host":
                m.adopt(np.full(N, 2, np.float32))
            else:
                m.adopt(dev.full(N, 2, np.float32))
            value = 0 if cure == "discard" else 2
            async with m.device(write=True) as d:
                if dev.backend == "sim" or cure != "kernel":
                    dev.launch(add_one, d, d.size)
                    value += 1
            assert await contents(m) == value
            m.close()

    run(main)


def set_to_two(stream, y):
    if isinstance(y, np.ndarray):  # the simulator's; elsewhere it is memory nobody fills here
        y[...] = 2
    else:
        fill_with_two(stream, y)


def fill_with_two(stream, y):
    """On CUDA: a 4-byte memset through the bindings."""
    from cuda.bindings import driver

    word = int(np.float32(2).view(np.uint32))
    (error,) = driver.cuMemsetD32Async(y.address, word, y.size, stream.handle)
    assert error == driver.CUresult.CUDA_SUCCESS


def test_a_kernel_that_fails_after_it_was_overwritten_poisons_nothing(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 1)
            gate = dev.sim.gate("compute0")
            async with m.device(write=True) as d:
                failing = dev.call(broken_call, d)
            async with m.device(write="all") as d:
                dev.call(set_to_two, d)  # comes after it, and doesn't need it
            gate.release()
            assert isinstance(await error_of(failing), Broken)
            assert await contents(m) == 2
            m.close()

    run(main)


def test_writing_in_a_block_that_reads_is_told(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.SYNCED, 1)
            with pytest.raises(RuntimeError, match="block that reads"):
                async with m.device() as d:
                    dev.fill(d, 2)
            assert m.state is State.HEAD_AT_CPU
            assert await contents(m) == 1
            m.close()

    run(main)


# -- views that are kept -----------------------------------------------------------------------


def test_trap_a_host_view_that_is_kept_is_read_only(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            async with m.host() as a:
                with pytest.raises(ValueError, match="read-only"):
                    a[0] = 2
            async with m.host(write=True) as b:
                b[0] = 1
            for view in (a, b):
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 2
            m.close()

    run(main)


@pytest.mark.parametrize("then", ["host", "device", "push"])
def test_trap_a_change_through_a_host_view_that_was_kept_is_found(run, then):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            async with m.host(write=True) as a:
                kept = a[10:20]
            kept[:] = 2
            with pytest.raises(sf.RaceDetected, match="a view of it was kept"):
                if then == "push":
                    m.push()
                else:
                    await reading(getattr(m, then)())
            m.close()

    run(main)


def test_trap_a_change_through_a_view_of_a_block_that_reads_is_found(run):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.SYNCED, 1)
            with pytest.raises(sf.RaceDetected):
                async with m.host() as a:
                    a.flags.writeable = True
                    a[0] = 2
            m.close()

    run(main)


def test_trap_a_device_view_that_is_kept_is_refused(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            for write in (False, True, "all"):
                async with m.device(write=write) as d:
                    parts = (d[: N // 2], d.reshape(2, N // 2), d.view(np.int32), *d.split(2))
                    with pytest.raises(ValueError, match="lent by a SyncedArray"):
                        d.free()
                    with pytest.raises(ValueError, match="lent by a SyncedArray"):
                        sf.SyncedArray(dev, N, np.float32).adopt(d)
                for kept in (d, *parts):
                    for use in (dev.get, lambda x: dev.fill(x, 1), lambda x: x.free(), reshaped):
                        with pytest.raises(sf.Closed, match="enter it again"):
                            use(kept)
                with pytest.raises(sf.Closed, match="enter it again"):
                    dev.launch(add_one, d, 1)
                with pytest.raises(sf.Closed, match="enter it again"):
                    dev.call(broken_call, d)
            m.close()

    run(main)


def reshaped(array):
    return array.reshape(-1)


def test_work_of_a_block_that_is_still_parked_when_it_is_left_runs_all_the_same(run, add_one):
    async def main():
        async with virtual() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            future = anyio.Event()
            async with m.device(write=True) as d:
                launched = dev.launch(add_one, d, N, after=future)
                called = dev.call(set_to_two, d, after=launched)
            assert launched.state is sf.OpState.PARKED
            pulled = m.pull()
            await turns()
            assert not pulled.done()
            future.set()
            await called
            assert await contents(m) == 2
            m.close()

    run(main)


# -- size zero, adopting -----------------------------------------------------------------------


def test_trap_size_zero_does_not_abort(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            m = sf.SyncedArray(dev, (3, 0), np.float32)
            async with m.device(write=True) as d:
                dev.launch(add_one, d, 0, grid=1, block=1)
            assert m.state is State.HEAD_AT_GPU
            await m.pull()
            assert m.state is State.SYNCED
            async with m.host() as a:
                assert a.shape == (3, 0)
            m.adopt(np.zeros((0, 3), np.float32))
            await m.push()
            assert m.state is State.SYNCED
            m.close()

    run(main)


def test_trap_adopting_drops_no_newer_data(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_GPU, 3)
            with pytest.raises(ValueError, match="newest data"):
                m.adopt(np.zeros(N, np.float32))
            assert m.state is State.HEAD_AT_GPU
            assert await contents(m) == 3
            m.close()

    run(main)


def test_an_array_that_a_copy_still_writes_is_not_adopted(run):
    async def main():
        async with virtual() as dev:
            mine = np.zeros(N, np.float32)
            m = sf.SyncedArray(dev, N, np.float32)
            m.adopt(mine)
            await fill_device(dev, m, 1)
            gate = dev.sim.gate("d2h")
            pulled = m.pull()
            m.discard()
            with pytest.raises(RuntimeError, match="still writes"):
                m.adopt(mine)
            gate.release()
            await pulled
            m.adopt(mine)
            assert await contents(m) == 1
            m.close()

    run(main)


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
            m = await in_state(dev, State.HEAD_AT_GPU, 1, shape=LARGE)
            future = anyio.Event()
            async with m.device(write=True) as d:
                dev.call(set_to_two, d, after=future)
            pulls = []
            with pytest.raises(Broken):
                async with dev.scope():
                    pulls.append(m.pull())
                    raise Broken("scope")
            pulls.append(m.pull())
            future.set()
            await pulls[1]
            assert m.state is State.SYNCED
            assert await contents(m) == 2
            m.close()

    run(main)


def test_push_twice_copies_once(run, open_device):
    async def main():
        async with open_device() as dev:
            m = await in_state(dev, State.HEAD_AT_CPU, 1)
            first, second = m.push(), m.push()
            op = m.in_flight
            assert op is not None
            third = m.push()
            assert m.in_flight is op
            await second
            assert first.done()
            assert m.state is State.SYNCED
            await third
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
