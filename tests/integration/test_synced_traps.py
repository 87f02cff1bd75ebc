"""What went wrong with Caffe's SyncedMemory, each as a test of ours; and copies that are shared."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from support import error_of, turns, virtual
from synced_support import (
    LARGE,
    Broken,
    N,
    State,
    broken_call,
    contents,
    fill_device,
    fill_host,
    in_state,
    reading,
    set_to_two,
)

import streamflow as sf

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
            for adopts in (False, True):
                if adopts:
                    m.adopt(dev.full(N, 1, np.float32), discard=True)
                    await m.pull()
                with pytest.raises(RuntimeError, match="block that reads"):
                    async with m.device() as d:
                        dev.fill(d, 2)
                assert m.state is State.HEAD_AT_CPU
                assert await contents(m) == 1
            rows = dev.full((2, N), 1, np.float32)
            m.adopt(rows[0], discard=True)
            async with m.device():
                dev.fill(rows[1], 2)  # somebody else's
            assert await contents(m) == 1
            del rows
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
