"""What happens when work fails, is cancelled, or outlives its device (R6, R8, R9)."""

import gc

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import streamflow as sf


def virtual(**settings):
    return sf.Device(
        backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"), **settings)
    )


def test_a_refused_launch_fails_its_op_and_its_readers(run, add_one, saxpy):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(64, np.float32), dev.zeros(64, np.float32)
            dev.sim.fail(kind="launch", nth=1, sticky=False)
            bad = dev.launch(add_one, x, 64, name="bad")
            reader = dev.launch(saxpy, 1.0, x, y, 64, name="reader")
            overwritten = dev.zeros(64, np.float32)
            dev.copy(overwritten, x)
            cleared = dev.fill(overwritten, 5)  # a full overwrite clears the failure
            with pytest.raises(sf.LaunchFailed):
                await bad
            with pytest.raises(sf.UpstreamFailed, match="reader needs the result of bad") as e:
                await reader
            assert isinstance(e.value.__cause__, sf.LaunchFailed)
            with pytest.raises(sf.UpstreamFailed):
                await dev.get(y)
            await cleared
            assert dev.is_healthy
            return await dev.get(overwritten)

    assert (run(main) == 5).all()


def test_a_write_after_a_failed_write_still_waits_for_what_that_one_waited_for(run, add_one):
    async def main():
        async with virtual() as dev:
            slow = dev.stream()
            x = dev.put(np.arange(64, dtype=np.float32))
            await x
            gate = dev.sim.gate(slow)
            early = dev.get(x, stream=slow)  # reads x, held by the gate
            dev.sim.fail(kind="launch", nth=1, sticky=False)
            bad = dev.launch(add_one, x, 64)
            dev.fill(x, -1)
            await anyio.lowlevel.checkpoint()
            gate.release()
            with pytest.raises(sf.LaunchFailed):
                await bad
            return await early

    np.testing.assert_array_equal(run(main), np.arange(64))


def test_a_failure_nobody_asks_about_surfaces_at_synchronize_and_at_exit(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(64, np.float32)
            dev.sim.fail(kind="launch", nth=1, sticky=False)
            dev.launch(add_one, x, 64, name="unseen")
            with pytest.raises(ExceptionGroup, match="1 op failed") as caught:
                await dev.synchronize()
            assert isinstance(caught.value.exceptions[0], sf.LaunchFailed)
            await dev.synchronize()  # said once
        dev = virtual()
        await dev.__aenter__()
        x = dev.zeros(64, np.float32)
        dev.sim.fail(kind="launch", nth=1, sticky=False)
        dev.launch(add_one, x, 64, name="unseen")
        with pytest.raises(ExceptionGroup, match="1 op failed"):
            await dev.__aexit__(None, None, None)

    run(main)


def test_c2_a_sticky_fault_reaches_every_waiter_and_leaves_other_devices_alone(run, add_one):
    async def main():
        async with (
            virtual() as dev,
            sf.Device(
                1, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"))
            ) as other,
        ):
            x, stream = dev.zeros(64, np.float32), dev.stream()
            dev.sim.fail(kind="launch", name="add_one", nth=1)
            bad = dev.launch(add_one, x, 64, stream=stream)
            behind = dev.launch(add_one, x, 64, stream=stream)
            waiting = stream.record()
            errors = []

            async def wait(op):
                try:
                    await op
                except sf.DeviceLost as error:
                    errors.append(error)

            with anyio.fail_after(20):
                async with anyio.create_task_group() as group:
                    for op in (bad, behind, waiting, dev.get(x)):
                        group.start_soon(wait, op)
            assert len(errors) == 4
            assert all("add_one" in error.suspects for error in errors)
            assert not dev.is_healthy
            with pytest.raises(sf.DeviceLost):
                dev.zeros(3)
            with pytest.raises(sf.DeviceLost):
                await dev.synchronize()
            assert "lost" in str(dev.report())
            return await other.get(other.full(3, 2.0))

    assert run(main).tolist() == [2, 2, 2]


def test_a_fault_nobody_saw_is_raised_on_leaving(run, add_one):
    async def main():
        dev = virtual()
        await dev.__aenter__()
        x = dev.zeros(64, np.float32)
        dev.sim.fail(kind="launch", nth=1)
        dev.launch(add_one, x, 64)
        with pytest.raises(sf.DeviceLost):
            await dev.__aexit__(None, None, None)

    run(main)


def test_cancelling_an_await_leaves_the_op_running(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(64, np.float32), dev.stream()
            gate = dev.sim.gate(stream)
            op = dev.launch(add_one, x, 64, stream=stream)
            with anyio.move_on_after(0.01) as scope:
                await op
            assert scope.cancelled_caught
            assert op.cancel() is False  # submitted: it cannot be taken back
            gate.release()
            await op
            return await dev.get(x)

    assert (run(main) == 1).all()


def test_an_await_that_writes_the_callers_memory_delivers_cancellation_after_the_write(run):
    async def main():
        async with virtual() as dev:
            for n in (64, 1 << 17):
                x, stream = dev.full(n, 3, np.int32), dev.stream()
                await x
                gate = dev.sim.gate(stream)
                out = np.zeros(n, np.int32)
                hold = dev.fill(x, 4, stream=stream)
                seen = []

                async def wait(x=x, out=out, seen=seen):
                    try:
                        await dev.get(out=out, array=x)
                    finally:
                        seen.append(out.copy())

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    for _ in range(5):
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()
                    assert not seen
                    gate.release()
                assert (seen[0] == 4).all()  # all of it, or none of it: never a late write
                await hold

    run(main)


def test_a_parked_op_can_be_cancelled_and_its_followers_fail(run, add_one):
    async def main():
        async with virtual(window=8) as dev:
            x, stream = dev.zeros(64, np.float32), dev.stream()
            gate = dev.sim.gate(stream)
            ops = [dev.launch(add_one, x, 64, stream=stream) for _ in range(20)]
            last = ops[-1]
            assert last.state is sf.OpState.PARKED
            assert last.cancel() is True
            assert last.state is sf.OpState.CANCELLED
            assert last.cancel() is False
            after = dev.get(x)
            gate.release()
            with pytest.raises(sf.OpCancelled):
                await last
            with pytest.raises(sf.UpstreamFailed):
                await after
            await ops[-2]

    run(main)


def test_c1_a_lease_in_flight_is_not_lent_again(run):
    """A D2H is stalled and its awaiter cancelled: its block is nobody else's until it ends."""

    async def main():
        async with virtual() as dev:
            x, stream = dev.put(np.arange(512, dtype=np.int64)), dev.stream()
            await x
            gate = dev.sim.gate(stream)
            late = dev.get(x, stream=stream)
            with anyio.move_on_after(0.01):
                await late
            del late
            others = [await dev.get(dev.full(512, k, np.int64)) for k in range(300)]
            gate.release()
            await dev.synchronize()
            for k, other in enumerate(others):
                assert (other == k).all()
            return await dev.get(x)

    np.testing.assert_array_equal(run(main), np.arange(512))


def test_c6_an_array_dropped_under_a_stalled_copy_keeps_its_bytes(run, add_one):
    async def main():
        async with virtual() as dev:
            a, b = dev.stream("a"), dev.stream("b")
            with a:
                x = dev.put(np.arange(4096, dtype=np.float32))
            await x
            gate = dev.sim.gate(b)
            host = dev.get(x, stream=b)
            del x
            with a:
                y = dev.full(4096, -1, np.float32)
            await y
            gate.release()
            return await host

    np.testing.assert_array_equal(run(main), np.arange(4096))


def test_arrays_dropped_everywhere_are_freed(run, add_one):
    async def main():
        async with virtual() as dev:
            for _ in range(50):
                x = dev.put(np.zeros(1 << 15, np.float32))
                dev.launch(add_one, x, x.size)
                view = x[:10].reshape(2, 5)
                del x
                await dev.get(view)
                del view
            await dev.synchronize()
            return dev.live(), dev.memory.used_nbytes, dev.memory.reserved_nbytes

    live, used, reserved = run(main)
    assert "array" not in live
    assert used == 0
    assert reserved <= 4 << 20


def test_a_failed_upload_fails_the_array(run, monkeypatch):
    async def main():
        async with virtual() as dev:
            dev.sim.fail(kind="copy_h2d", nth=1, sticky=False)
            x = dev.put(np.zeros(1 << 18))
            with pytest.raises(sf.DeviceError, match="staging"):
                await x
            with pytest.raises(sf.UpstreamFailed):
                await dev.get(x)
            again = dev.put(np.ones(1 << 18), out=x)
            assert (await dev.get(again)).all()

    run(main)


def test_leaving_with_stalled_work_is_bounded_and_said(run, add_one):
    async def main():
        dev = virtual(close_timeout_s=0.05)
        await dev.__aenter__()
        x, stream = dev.zeros(64, np.float32), dev.stream()
        dev.sim.gate(stream)
        dev.launch(add_one, x, 64, stream=stream)
        with pytest.raises(TimeoutError, match=r"close_timeout_s=0\.05"):
            await dev.__aexit__(None, None, None)

    run(main)


def test_a_body_that_raises_is_a_fault_with_its_cause(run):
    def body(x):
        raise ZeroDivisionError("in the kernel")

    broken = sf.Kernel.from_source(
        'extern "C" __global__ void broken(float* x) { x[0] = 1 / 0; }', body=body
    )

    async def main():
        async with virtual() as dev:
            op = dev.launch(broken, dev.zeros(4, np.float32))
            with pytest.raises(sf.DeviceLost, match="broken") as caught:
                await op
            causes, error = [], caught.value
            while error is not None:
                causes.append(type(error))
                error = error.__cause__
            assert ZeroDivisionError in causes

    run(main)


def test_after_an_op_of_a_lost_device_fails_with_its_upstream(run, add_one):
    async def main():
        async with (
            virtual() as ok,
            sf.Device(
                1, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"))
            ) as other,
        ):
            x = other.zeros(64, np.float32)
            other.sim.fail(kind="launch", nth=1)
            bad = other.launch(add_one, x, 64)
            with pytest.raises(sf.DeviceLost):
                await bad
            y = ok.zeros(64, np.float32)
            late = ok.launch(add_one, y, 64, after=[bad])
            with pytest.raises(sf.UpstreamFailed):
                await late

    run(main)


def test_overwriting_behind_a_failed_copy_on_a_closed_stream(run):
    async def main():
        async with virtual() as dev:
            stream = dev.stream()
            x = dev.zeros(1 << 18, stream=stream)
            dev.sim.fail(kind="copy_h2d", nth=1, sticky=False)
            dev.put(np.zeros(1 << 18), out=x, stream=stream)
            with pytest.raises(sf.DeviceError):
                await x.ready
            stream.close()
            dev.put(np.ones(1 << 18), out=x)
            return await dev.get(x)

    assert (run(main) == 1).all()


def test_c23_an_array_that_an_error_holds_is_freed_once_the_error_is_gone(run, add_one):
    """The error knows the frames it passed, and those the array whose use failed."""

    async def main():
        async with virtual() as dev:

            async def fails():
                x = dev.put(np.zeros(64, np.float32))
                dev.sim.fail(kind="launch", sticky=False)
                dev.launch(add_one, x, 64)
                await dev.get(x)

            with pytest.raises(sf.UpstreamFailed) as caught:
                await fails()
            caught.value.__cause__.with_traceback(None)
            assert "array" in dev.live()
            del caught
            gc.collect()
            await dev.synchronize()
            assert dev.live() == {}
            assert dev.memory.used_nbytes == 0

    run(main)


def test_a_report_leaves_out_what_has_ended(run, add_one):
    async def main():
        async with virtual() as dev:
            small = dev.zeros(64, np.float32)
            side = dev.stream("side")
            await small
            short = dev.launch(add_one, small, 64, stream=side)
            await dev.zeros(1 << 24, np.float32)  # takes longer
            assert short.state is sf.OpState.SUBMITTED  # nobody has looked
            assert dev.report().rows == ()
            assert "nothing is unfinished" in str(dev.report())
            assert short.state is sf.OpState.DONE

    run(main)
