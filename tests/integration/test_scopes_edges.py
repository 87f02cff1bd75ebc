"""Scopes where it is easy to go wrong: refused calls, late work, orders of dropping."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual

import streamflow as sf

BIG = np.ones(1 << 18, np.float32)


def no_lane(request):
    raise LookupError("no lane")


def test_a_refused_call_leaves_nothing_in_its_scope(run, add_one):
    async def main():
        async with virtual() as dev, virtual(placement=no_lane) as other:
            x, y, closed = dev.zeros(4, np.float32), dev.zeros(4, np.float32), dev.stream()
            z = other.put(np.zeros(4, np.float32))
            closed.close()
            async with dev.scope() as scope, other.scope() as misplaced:
                with dev.sim.out_of_memory():
                    for call in (lambda: dev.empty(1 << 20), lambda: dev.put(BIG)):
                        with pytest.raises(sf.OutOfDeviceMemory):
                            call()
                for call in (
                    lambda: dev.fill(x, 1, stream=closed),
                    lambda: dev.copy(x, y, stream=closed),
                    lambda: x.free(stream=closed),
                    lambda: dev.launch(add_one, x, 4, stream=closed),
                ):
                    with pytest.raises(sf.Closed):
                        call()
                for call in (
                    lambda: other.launch(add_one, z, 4),
                    lambda: other.fill(z, 1),
                    lambda: other.empty(4),
                ):
                    with pytest.raises(LookupError, match="no lane"):
                        call()
                assert (scope.num_unfinished, misplaced.num_unfinished) == (0, 0)
            assert not x.is_freed
            await dev.launch(add_one, x, 4)
            await x.free()

    run(main)


def test_work_parked_behind_what_is_dropped_is_dropped_too(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, stream, never = (
                dev.zeros(4, np.float32),
                dev.zeros(4, np.float32),
                dev.stream(),
                anyio.Event(),
            )
            with pytest.raises(KeyError):
                async with dev.scope():
                    ops = [
                        dev.launch(add_one, x, 4, stream=stream, after=never),
                        dev.launch(add_one, y, 4, stream=stream),
                    ]
                    raise KeyError
            assert [op.state for op in ops] == [sf.OpState.CANCELLED] * 2
            assert dev.sim.counters["launch"] == 0

    run(main)


def test_what_is_submitted_between_the_last_end_and_the_exit_is_waited_for(run, add_one):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as group:
            x, event, ops = dev.zeros(4, np.float32), anyio.Event(), []

            async def first():
                await turns(3)
                event.set()

            async def child():
                await event.wait()
                ops.append(dev.launch(add_one, x, 4))
                ops.append(dev.host(turns))

            async with dev.scope():
                group.start_soon(child)
                dev.host(first)
            await until(lambda: len(ops) == 2)  # trio may run the child after us
            await sf.gather(*ops)

    run(main)


def test_a_lost_device_ends_everybody_who_waits_for_a_limit(run, add_one):
    async def main():
        dev = virtual()
        await dev.__aenter__()
        arrays = [dev.zeros(4, np.float32) for _ in range(400)]
        dev.sim.fail("launch")
        with pytest.raises(sf.DeviceLost):
            async with dev.scope(limit=16):
                ops = [dev.launch(add_one, a, 4) for a in arrays]
        assert {op.state for op in ops} == {sf.OpState.FAILED}
        await dev.__aexit__(None, None, None)

    run(main)


def test_what_waits_for_a_limit_fails_with_its_source(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, go = dev.zeros(4, np.float32), dev.zeros(4, np.float32), anyio.Event()
            stream = dev.stream()

            async def fails():
                await go.wait()
                raise ValueError("no data")

            source = dev.host(fails)
            gate = dev.sim.gate(stream)
            async with dev.scope(limit=16):
                dev.launch(add_one, y, 4, stream=stream)
                waiting = dev.launch(add_one, x, 4, after=source)
                go.set()
                await until(source.done)
                gate.release()
                assert isinstance(await error_of(waiting), sf.UpstreamFailed)

    run(main)


def test_every_scope_whose_work_was_lost_says_so(run, add_one):
    async def main():
        dev = virtual()
        await dev.__aenter__()
        told = []

        async def work():
            x = dev.zeros(4, np.float32)
            try:
                async with dev.scope():
                    dev.launch(add_one, x, 4)
            except sf.DeviceLost:
                told.append(True)

        dev.sim.fail("launch")
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(work)
        assert told == [True, True]
        await dev.__aexit__(None, None, None)

    run(main)


def test_synchronize_leaves_other_tasks_scopes_their_failures(run):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as group:
            go = anyio.Event()

            async def work():
                with pytest.raises(ExceptionGroup) as caught:
                    async with dev.scope():
                        dev.host(lambda: 1 / 0)
                        await go.wait()
                assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
                seen.append(True)

            seen = []
            group.start_soon(work)
            await turns(40)
            await dev.synchronize()
            go.set()
            await until(lambda: seen)

    run(main)


def test_one_failure_of_two_scopes_surfaces_in_both(run, add_one):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as group:
            future, told = anyio.Future(), []

            async def work():
                x = dev.zeros(4, np.float32)
                with pytest.raises(ExceptionGroup):
                    async with dev.scope():
                        dev.launch(add_one, x, 4, after=future)
                told.append(True)

            group.start_soon(work)
            group.start_soon(work)
            await turns()
            future.exception = ValueError("shared")
            await until(lambda: len(told) == 2)

    run(main)


def test_a_cancelled_scope_outlasts_writes_even_when_its_deadline_passes(run):
    async def main():
        async with virtual() as dev:
            x, out, stream = dev.zeros(1 << 10, np.float32), np.ones(1 << 10, "f4"), dev.stream()
            await x
            gate = dev.sim.gate(stream)
            done = []
            async with anyio.create_task_group() as group:

                async def work():
                    async with dev.scope(deadline=0.3) as scope:
                        dev.get(x, out=out, stream=stream)
                        scopes.append(scope)
                        await anyio.sleep_forever()

                async def watch():
                    await work()
                    done.append(True)

                scopes = []
                group.start_soon(watch)
                await until(lambda: scopes)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await until(lambda: dev.sim.clock.now_s >= 0.3)
                    await turns()
                    assert out.all()
                    assert scopes[0].num_unfinished == 1
                    gate.release()
            assert not out.any()
            assert not done

    run(main)


@native  # trio refuses to close such a generator in another task
def test_an_abandoned_generator_with_a_deadline_cancels_nobody(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)

            async def generator():
                async with dev.scope(deadline=1e-3):
                    yield dev.launch(add_one, x, 4)
                    yield dev.launch(add_one, x, 4)

            steps = generator()
            await anext(steps)
            async with anyio.create_task_group() as group:

                async def close():
                    try:
                        await steps.aclose()
                    except BaseException as error:
                        closed.append(type(error).__name__)
                    else:
                        closed.append("quietly")

                closed = []
                group.start_soon(close)  # in another task than entered it
                await until(lambda: closed)
            gc.collect()
            for _ in range(5):
                await dev.launch(add_one, x, 4)
            assert dev.sim.clock.now_s < 1.0

    run(main)


@native
def test_gather_cancelled_twice_outlasts_every_write(run):
    import asyncio

    async def main():
        async with virtual() as dev:
            x = dev.zeros(1 << 10, np.float32)
            await x
            streams = [dev.stream() for _ in range(2)]
            gates = [dev.sim.gate(stream) for stream in streams]
            outs = [np.ones(1 << 10, np.float32) for _ in range(2)]
            ops = [dev.get(x, out=o, stream=s) for o, s in zip(outs, streams, strict=True)]
            task = asyncio.create_task(sf.gather(*ops))
            for _ in range(2):
                await turns()
                task.cancel()
            gates[0].release()
            await turns(50)
            assert not task.done()
            gates[1].release()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not any(out.any() for out in outs)

    run(main)


def test_an_overwritten_staging_failure_is_not_raised_again(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(1 << 18, np.float32)
            dev.sim.fail(kind="copy_h2d", sticky=False)
            dev.put(BIG, out=x)
            assert isinstance(await error_of(x), sf.DeviceError)
            await dev.fill(x, 7)
            assert (await (await x)[:4].ready) is None
            assert (await dev.get(x) == 7).all()

    run(main)


def test_long_chains_of_cancelled_ops_are_no_recursion(run, add_one):
    async def main():
        async with virtual() as dev:
            y, never = dev.zeros(4, np.float32), anyio.Event()
            ops = [dev.launch(add_one, y, 4, after=never if n == 0 else ()) for n in range(1500)]
            for op in reversed(ops):
                assert op.cancel()
            dev.fill(y, 3)
            assert (await dev.get(y)).tolist() == [3, 3, 3, 3]
            future = anyio.Future()
            first = dev.launch(add_one, y, 4, after=future)
            behind = dev.launch(add_one, y, 4)
            assert behind.cancel()
            future.return_value = behind  # which comes after first itself
            assert isinstance(await error_of(first), sf.UpstreamFailed)
            dev.fill(y, 4)
            assert (await dev.get(y)).tolist() == [4, 4, 4, 4]

    run(main)


def test_an_event_of_another_library_is_refused(run):
    import asyncio

    import trio

    async def main():
        async with virtual() as dev:
            for event in (asyncio.Event, trio.Event):
                item = event()
                if type(item).__module__.startswith(dev._core.shell.library):
                    continue
                with pytest.raises(ValueError, match="and this event loop"):
                    dev.host(print, after=item)

    run(main)


def test_reads_of_a_failed_call_are_waited_for(run, monkeypatch):
    """What it submitted before it failed is running (rule R6)."""
    from streamflow.backends import register_backend
    from streamflow.backends.sim.device import SimDevice

    class AtOnce(SimDevice):
        is_cuda = True

        def call(self, stream, name, body, accesses, /, *args):
            body(*args)

    monkeypatch.setattr("streamflow.backends._OPENERS", dict(sf.backends._OPENERS))
    register_backend("sim", AtOnce)

    async def main():
        async with virtual() as dev:
            x, y, stream = dev.zeros(64, np.int32), dev.zeros(64, np.int32), dev.stream()
            dev.fill(x, 1)
            await dev.synchronize()
            gate = dev.sim.gate(stream)

            def fails(lent, x, y):
                backend = dev._core.backend
                backend.copy_d2d(y.address, x.address, x.nbytes, lent.backend_stream)
                raise KeyError

            op = dev.call(fails, x, y, reads=x, writes=y, stream=stream)
            dev.fill(x, 9)
            x.free()
            await turns()
            again = dev.full(64, 7, np.int32)
            await turns()
            gate.release()
            assert isinstance(await error_of(op), KeyError)
            await again
            await dev.synchronize()
            found = dev._core.backend.gpu.memory.bytes_at(y.address, y.nbytes)
            assert np.asarray(found).view(np.int32).tolist() == [1] * 64

    run(main)
