"""Losing, closing and entering a device: everything ends, and everything is given back (R6-R9)."""

import asyncio
import threading

import anyio
import numpy as np
import pytest
import uvloop
from anyio.lowlevel import checkpoint

import streamflow as sf
from streamflow.backends.sim.device import SimDevice
from streamflow.backends.sim.event import SimEvent
from streamflow.backends.sim.stream import SimStream
from streamflow.backends.sim.worlds import _worlds
from streamflow.scheduler.reaper import post_orphan

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged
LOST = (sf.DeviceLost, sf.UpstreamFailed)

native = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""Tests that call ``task.cancel()`` themselves: ``run`` takes a coroutine."""


def virtual(index=0, **settings):
    return sf.Device(index, backend="sim", settings=sf.Settings(sim_clock="virtual", **settings))


async def turns(num=20):
    for _ in range(num):
        await checkpoint()


async def until(is_so):
    with anyio.fail_after(20):
        while not is_so():
            await checkpoint()


async def error_of(op):
    """What awaiting ``op`` raises; a bounded wait."""
    with anyio.fail_after(20):
        try:
            await op
        except sf.StreamflowError as error:
            return error
    return None


def assert_closed(dev):
    assert dev._core.is_closed
    assert dev._core.backend._is_closed
    assert not _worlds
    assert {"array", "op", "pinned block"}.isdisjoint(dev.live())


async def assert_next_device_works():
    async with virtual() as dev:
        assert dev.is_healthy
        assert (await dev.get(dev.put(BIG)) == 1).all()
    assert_closed(dev)


# -- losing ------------------------------------------------------------------------------------


def test_c2_a_fault_with_staged_copies_parked_behind_it_ends_every_op(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
            await x
            gate = dev.sim.gate(stream)
            dev.sim.fail("launch")
            ops = [dev.launch(add_one, x, 4, stream=stream)]
            for _ in range(3):
                ops += [dev.copy(x, BIG), dev.get(x, out=np.empty_like(BIG)), dev.get(x)]
                ops += [dev.put(BIG, after=[x]).staged, dev.copy(BIG.copy(), BIG, after=[ops[-1]])]
                ops += [dev.launch(add_one, x, 4), dev.launch(add_one, x, 4, stream=stream)]
            assert {op.state for op in ops[1:]} <= {sf.OpState.PARKED, sf.OpState.STAGING}
            gate.release()
            errors = [await error_of(op) for op in ops]
            assert isinstance(errors[0], sf.DeviceLost)
            # Where nobody has begun to read a source, it may simply be changed again.
            assert all(isinstance(e, LOST) or op.kind == "staged" for op, e in zip(ops, errors))
            assert not dev._core.pending_ops()
            assert not dev.is_healthy
        assert_closed(dev)

    run(main)


@pytest.mark.parametrize("how", ["staged", "window", "put"])
def test_c2_what_waits_on_another_device_for_a_lost_one_fails_as_a_dependant(run, add_one, how):
    async def main():
        async with virtual(1) as other, virtual(window=4) as dev:
            x, y, stream = dev.zeros(1 << 18, np.float32), other.zeros(4, np.float32), dev.stream()
            await sf.gather(x.ready, y.ready)
            gate = dev.sim.gate(stream)
            dev.sim.fail("launch")
            bad = dev.launch(add_one, x, 4, stream=stream)
            if how == "staged":
                parked = dev.copy(x, BIG)
            else:
                parked = [dev.launch(add_one, x, 4, stream=stream) for _ in range(6)][-1]
            assert parked.state is sf.OpState.PARKED
            if how == "put":  # a staged copy there, which starts when the op here has ended
                behind = other.put(BIG, after=[bad]).ready
            else:
                behind = other.launch(add_one, y, 4, after=[parked])
            then = other.launch(add_one, other.zeros(4, np.float32), 4, after=[behind])
            assert behind.state is then.state is sf.OpState.PARKED
            gate.release()
            assert isinstance(await error_of(parked), LOST)
            assert isinstance(await error_of(bad), sf.DeviceLost)
            assert isinstance(await error_of(behind), sf.UpstreamFailed)
            assert isinstance(await error_of(then), sf.UpstreamFailed)
            assert (dev.is_healthy, other.is_healthy) == (False, True)
            return await other.get(other.full(3, 2.0))

    assert run(main).tolist() == [2, 2, 2]
    assert not _worlds


def test_c22_a_fault_names_its_op_and_closing_makes_way_for_a_healthy_device(run, add_one):
    async def main():
        async with virtual(window=4) as dev:
            x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
            dev.sim.fail("launch", nth=3)
            names = [f"op{n}" for n in range(10)]
            ops = [dev.launch(add_one, x, 4, stream=stream, name=name) for name in names]
            staged = dev.copy(x, BIG)
            dev.sim.gate("compute0")
            stalled = dev.get(dev.zeros(4))
            assert await error_of(ops[0]) is None
            assert await error_of(ops[1]) is None
            lost = await error_of(ops[2])
            assert isinstance(lost, sf.DeviceLost)
            assert "add_one" in lost.suspects
            for op in (*ops[3:], staged, stalled):
                assert isinstance(await error_of(op), LOST)
            for submit in (lambda: dev.launch(add_one, x, 4), lambda: dev.put(BIG), x.free):
                with pytest.raises(sf.DeviceLost):
                    submit()
            assert not dev.is_healthy
        assert_closed(dev)
        await assert_next_device_works()

    run(main)


def test_c22_out_of_memory_and_a_bad_launch_shape_do_not_poison(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            with dev.sim.out_of_memory(), pytest.raises(sf.OutOfDeviceMemory):
                dev.zeros(1 << 18)
            with pytest.raises((sf.LaunchFailed, ValueError)):
                await dev.launch(add_one, x, 4, block=1 << 20)
            assert dev.is_healthy
            return await dev.get(x)

    assert run(main).tolist() == [0, 0, 0, 0]


def test_a_poll_that_raises_anything_at_all_loses_the_device(run, add_one, monkeypatch):
    def is_done(self):
        raise sf.DeviceError("error 999")

    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            await x
            dev.sim.gate(stream)
            op = dev.launch(add_one, x, 4, stream=stream)
            with monkeypatch.context() as patch:
                patch.setattr(SimEvent, "is_done", property(is_done))
                assert isinstance(await error_of(op), sf.DeviceLost)
            assert isinstance(op.exception(), sf.DeviceLost)
            assert not dev.is_healthy
        assert_closed(dev)

    run(main)


@pytest.mark.parametrize("what", ["get", "put", "launch", "refused", "empty", "free"])
def test_an_op_whose_record_fails_loses_the_device_and_keeps_its_block(
    run, add_one, monkeypatch, what
):
    """The copy may be running, and nothing can tell when it ends: its block is nobody's."""

    def record(self, event):
        raise sf.DeviceError("out of host memory")

    async def main():
        async with virtual() as dev:
            x = dev.zeros(64, np.float32)
            await x
            submit = {
                "get": lambda: dev.get(x),
                "put": lambda: dev.copy(x, np.ones(64, np.float32)),
                "launch": lambda: dev.launch(add_one, x, 64),
                "refused": lambda: dev.get(x),
                "empty": lambda: dev.empty(4),
                "free": x.free,
            }[what]
            if what == "refused":
                dev.sim.fail("copy_d2h", sticky=False)
            with monkeypatch.context() as patch:
                patch.setattr(SimStream, "record", record)
                if what == "empty":
                    with pytest.raises(sf.DeviceLost, match="out of host memory"):
                        submit()
                else:
                    assert isinstance(await error_of(submit()), sf.DeviceLost)
            assert not dev.is_healthy
            with pytest.raises(sf.DeviceLost):
                await dev.synchronize()
        return dev.pinned.num_live

    assert run(main) == (what in ("get", "put", "refused"))
    assert not _worlds


# -- leaving -----------------------------------------------------------------------------------


def test_leaving_under_a_cancelled_scope_drains_and_closes_before_it_is_delivered(run, add_one):
    async def main():
        dev = virtual()
        released = anyio.Event()
        async with anyio.create_task_group() as group:

            async def release_later(gate):
                await turns()
                assert not dev._core.is_closed
                released.set()
                gate.release()

            with anyio.CancelScope() as scope:
                async with dev:
                    stream = dev.stream()
                    x = dev.put(BIG)
                    await x
                    gate = dev.sim.gate(stream)
                    op = dev.launch(add_one, x, 4, stream=stream)
                    staged = dev.get(x, out=np.empty_like(BIG))
                    group.start_soon(release_later, gate)
                    scope.cancel()
                    await op
            assert scope.cancelled_caught
            assert released.is_set()
        assert op.state is staged.state is sf.OpState.DONE
        assert_closed(dev)
        await assert_next_device_works()

    run(main)


@native
def test_leaving_while_cancelled_natively_twice_closes_completely(run, add_one):
    async def main():
        dev, gates = virtual(), []

        async def body():
            async with dev:
                x, stream = dev.zeros(64, np.float32), dev.stream()
                gates.append(dev.sim.gate(stream))
                await dev.launch(add_one, x, 64, stream=stream)

        task = asyncio.create_task(body())
        await until(lambda: gates)
        for _ in range(2):
            await turns()
            task.cancel()
        await turns()
        assert not task.done()
        assert not dev._core.is_closed
        gates[0].release()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        assert task.cancelled()
        assert_closed(dev)

    run(main())


def test_closing_with_stalled_work_ends_its_awaiters_and_writes_nothing_later(run, add_one):
    async def main():
        dev = virtual(close_timeout_s=0.05)
        await dev.__aenter__()
        x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
        small = dev.zeros(64, np.float32)
        await sf.gather(x.ready, small.ready)
        gate = dev.sim.gate(stream)
        outs = [np.zeros(1 << 18, np.float32), np.zeros(64, np.float32), np.zeros(4)]
        ops = [
            dev.launch(add_one, x, 4, stream=stream),  # in flight
            dev.get(small, out=outs[1], stream=stream),
            dev.get(x, out=outs[0]),  # parked, staged
            dev.copy(x, BIG),
            dev.launch(add_one, x, 4),
            dev.copy(outs[2], np.ones(4), after=[x]),
        ]
        errors = []

        async def wait(op):
            errors.append(await error_of(op))

        async with anyio.create_task_group() as group:
            for op in ops:
                group.start_soon(wait, op)
            await turns()
            with pytest.raises(TimeoutError, match=r"close_timeout_s=0\.05"):
                await dev.__aexit__(None, None, None)
        assert len(errors) == len(ops)
        assert all(isinstance(error, (sf.Closed, sf.UpstreamFailed)) for error in errors)
        assert isinstance(ops[0].exception(), sf.Closed)
        gate.release()
        await turns()
        assert not any(out.any() for out in outs)
        assert dev.pinned.num_live == 1  # of the copy in flight: the device may write it yet
        assert not _worlds
        await assert_next_device_works()

    run(main)


def test_leaving_twice_does_nothing_the_second_time(run):
    async def main():
        dev = virtual()
        async with dev:
            await dev.zeros(4)
        with anyio.fail_after(20):
            await dev.__aexit__(None, None, None)
        with pytest.raises(sf.Closed):
            dev.memory  # noqa: B018
        assert_closed(dev)

    run(main)


@native
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_c12_a_loop_may_end_with_stalled_work_and_another_one_runs(
    run, add_one, monkeypatch, ending
):
    uncaught, kept = [], []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    async def main():
        dev = virtual()
        await dev.__aenter__()
        x, stream = dev.zeros(64, np.float32), dev.stream()
        kept.append(dev.sim.gate(stream))
        kept.append(dev.launch(add_one, x, 64, stream=stream))
        kept.append(dev.put(BIG, after=[kept[-1]]))
        kept.append(dev)
        await turns()
        if ending == "raises":
            raise KeyError("main")

    if ending == "raises":
        with pytest.raises(KeyError, match="main"):
            run(main())
    else:
        run(main())
    kept[0].release()
    dev = kept[-1]
    kept.clear()
    try:

        async def again():
            async with virtual() as dev:
                return await dev.get(dev.put(BIG))

        assert (run(again()) == 1).all()
        assert not uncaught
    finally:
        dev._core.backend.close()


# -- entering ----------------------------------------------------------------------------------


class SlowOpening:
    """Opening a simulated device takes until :attr:`go_on` is set."""

    def __init__(self, monkeypatch):
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        opening = SimDevice.__init__

        def open_slowly(device, *args):
            self.has_begun.set()
            self.go_on.wait(20)
            opening(device, *args)

        monkeypatch.setattr(SimDevice, "__init__", open_slowly)


@native
def test_entering_that_is_cancelled_natively_leaves_nothing_open(run, monkeypatch):
    slow = SlowOpening(monkeypatch)
    closed = []
    closing = SimDevice.close
    monkeypatch.setattr(SimDevice, "close", lambda self: (closing(self), closed.append(self)))

    async def main():
        task = asyncio.create_task(virtual().__aenter__())
        await until(slow.has_begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.go_on.set()
        await until(lambda: closed)
        assert not _worlds
        await assert_next_device_works()

    run(main())


def test_entering_under_a_cancelled_scope_leaves_nothing_open(run, monkeypatch):
    slow = SlowOpening(monkeypatch)

    async def main():
        async with anyio.create_task_group() as group:

            async def cancel():
                await until(slow.has_begun.is_set)
                scope.cancel()
                slow.go_on.set()

            with anyio.CancelScope() as scope:
                group.start_soon(cancel)
                async with virtual():
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
        await until(lambda: not _worlds)
        await assert_next_device_works()

    run(main)


def test_two_tasks_that_enter_one_device_at_once_are_told(run):
    async def main():
        dev, seen = virtual(), []

        async def enter():
            try:
                seen.append(await dev.__aenter__())
            except RuntimeError as error:
                seen.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            group.start_soon(enter)
        assert dev in seen
        assert any("entered once" in str(each) for each in seen)
        await dev.zeros(4)
        await dev.__aexit__(None, None, None)
        assert_closed(dev)

    run(main)


def test_clean_up_of_an_older_device_that_raises_does_not_break_the_next(run, caplog):
    ran = []
    post_orphan(lambda: 1 / 0)
    post_orphan(lambda: ran.append(1))

    async def main():
        await assert_next_device_works()

    run(main)
    assert ran == [1]
    assert "clean-up of a closed device failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
