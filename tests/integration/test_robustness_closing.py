"""Entering and leaving a device: cancelled, stalled or twice, it closes completely (R8, R12)."""

import asyncio
import threading

import anyio
import numpy as np
import pytest
import uvloop
from support import error_of, turns, until, virtual

import streamflow as sf
from streamflow.backends.sim.device import SimDevice
from streamflow.backends.sim.worlds import _worlds
from streamflow.scheduler.loops import current_shell
from streamflow.scheduler.reaper import post_orphan

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged

native = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""Tests that call ``task.cancel()`` themselves: ``run`` takes a coroutine."""


def has_world():
    """Whether a simulated device is open on this loop."""
    return current_shell().key in _worlds


def assert_closed(dev):
    assert dev._core.is_closed
    assert dev._core.backend._is_closed
    assert not has_world()
    live = dev.live()
    assert {"op", "pinned block"}.isdisjoint(live)
    assert "array" not in live or not dev.is_healthy  # a lost device frees nothing any more


async def assert_next_device_works():
    async with virtual() as dev:
        assert dev.is_healthy
        assert (await dev.get(dev.put(BIG)) == 1).all()
    assert_closed(dev)


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
                    staged = dev.get(x, out=np.empty_like(BIG))  # parked behind the launch
                    group.start_soon(release_later, gate)
                    scope.cancel()
                    await op
            assert scope.cancelled_caught
            assert released.is_set()
        assert op.state is sf.OpState.DONE  # submitted, so drained (rule R8)
        assert staged.state is sf.OpState.CANCELLED
        assert_closed(dev)
        await assert_next_device_works()

    run(main)


@native
@pytest.mark.parametrize("when", ["in the body", "while closing"])
def test_leaving_while_cancelled_natively_twice_closes_completely(run, add_one, when):
    async def main():
        dev, gates = virtual(), []

        async def body():
            async with dev:
                x, stream = dev.zeros(64, np.float32), dev.stream()
                gates.append(dev.sim.gate(stream))
                op = dev.launch(add_one, x, 64, stream=stream)
                if when == "in the body":
                    await op

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
        assert dev._core.pinned.num_live == 1  # of the copy in flight: the device may write it yet
        assert not has_world()
        await assert_next_device_works()

    run(main)


def test_leaving_twice_does_nothing_the_second_time(run, monkeypatch):
    closed, closing = [], SimDevice.close
    monkeypatch.setattr(SimDevice, "close", lambda self: (closed.append(self), closing(self)))

    async def main():
        dev = virtual()
        async with dev:
            await dev.zeros(4)
        with anyio.fail_after(20):
            await dev.__aexit__(None, None, None)
        with pytest.raises(sf.Closed):
            dev.memory  # noqa: B018
        assert len(closed) == 1
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
        assert not has_world()
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
        await until(lambda: not has_world())
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
