"""C10: whose current stream, scope and device an op gets, however tasks take turns."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from support import virtual

import streamflow as sf

NUM = 1000


async def warm_up(dev, kernel):
    """Have it compiled: an op that waits for a compiler has no lane yet."""
    await dev.launch(kernel, dev.zeros(4, np.float32), 4)


def test_c10_two_tasks_take_turns_inside_their_blocks(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            await warm_up(dev, add_one)
            fixed, wrong = dev.stream("fixed"), []

            async def work(name):
                stream, x = dev.stream(name), dev.zeros(4, np.float32)
                for n in range(NUM):
                    with stream:
                        await checkpoint()
                        found = [dev.launch(add_one, x, 4).stream]
                        if n % 100 == 0:
                            found += [dev.fill(x, 0).stream, dev.get(x).stream]
                        await checkpoint()
                        if set(found) != {name}:
                            wrong.append((name, n, found))
                        if n % 50 == 0:
                            immune = dev.launch(add_one, x, 4, stream=fixed)
                            if immune.stream != "fixed":
                                wrong.append((name, n, immune.stream))
                    await checkpoint()
                    if n % 50 == 0:
                        outside = dev.launch(add_one, x, 4)
                        if not outside.stream.startswith("compute"):
                            wrong.append((name, n, outside.stream))
                        await outside

            async with anyio.create_task_group() as group:
                for name in ("one", "two"):
                    group.start_soon(work, name)
            assert not wrong, wrong[:5]
            await dev.synchronize()

    run(main)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_c10_a_suspended_generator_that_holds_a_block(run, open_device, add_one, kind):
    """It runs in the task that drives it, so its block is that task's, and no other's."""

    async def main():
        async with open_device() as dev:
            await warm_up(dev, add_one)
            x, own, outer = dev.zeros(4, np.float32), dev.stream("own"), dev.stream("outer")

            def landing():
                return dev.launch(add_one, x, 4).stream

            def generator():
                with own:
                    yield landing()
                    yield landing()
                yield landing()

            async def agenerator():
                for found in generator():
                    yield found
                    await checkpoint()

            async def bystander():
                for _ in range(20):
                    assert landing().startswith("compute")
                    await checkpoint()

            async def step(steps):
                return next(steps) if kind == "generator" else await anext(steps)

            async def drive():
                with outer:
                    steps = generator() if kind == "generator" else agenerator()
                    assert await step(steps) == "own"
                    await checkpoint()
                    assert await step(steps) == "own"
                    assert await step(steps) == "outer"
                    assert landing() == "outer"
                    await (checkpoint() if kind == "generator" else steps.aclose())
                assert landing().startswith("compute")

            async with anyio.create_task_group() as group:
                group.start_soon(bystander)
                group.start_soon(drive)
            await dev.synchronize()

    run(main)


def test_c10_exits_out_of_order_leave_what_is_still_entered(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            await warm_up(dev, add_one)
            x = dev.zeros(4, np.float32)
            a, b, c = (dev.stream(name) for name in "abc")

            def landing():
                return dev.launch(add_one, x, 4).stream

            for stream in (a, b, c, a):
                stream.__enter__()
            assert landing() == "a"
            b.__exit__(None, None, None)
            assert landing() == "a"
            a.__exit__(None, None, None)  # the innermost of the two
            assert landing() == "c"
            a.__exit__(None, None, None)
            assert landing() == "c"
            c.__exit__(None, None, None)
            assert landing().startswith("compute")
            c.__exit__(None, None, None)  # once more: nothing to leave
            with a:
                async with b:  # which closes it at the end
                    assert landing() == "b"
                assert landing() == "a"
                a.close()
                assert landing().startswith("compute")
            await dev.synchronize()

    run(main)


def test_c10_a_task_started_inside_keeps_the_stream_it_was_started_on(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            await warm_up(dev, add_one)
            x, stream, other = dev.zeros(4, np.float32), dev.stream("s"), dev.stream("other")
            left, found = anyio.Event(), []

            async def child():
                found.append(dev.launch(add_one, x, 4).stream)
                await left.wait()
                with other:
                    found.append(dev.launch(add_one, x, 4).stream)
                found.append(dev.launch(add_one, x, 4).stream)

            async with anyio.create_task_group() as group:
                with stream:
                    group.start_soon(child)
                    await checkpoint()
                assert dev.launch(add_one, x, 4).stream.startswith("compute")
                left.set()
            await dev.synchronize()
            assert found == ["s", "other", "s"]

    run(main)


def test_c10_an_op_belongs_to_its_own_tasks_scope(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            wrong = []

            async def work(name):
                x = dev.zeros(4, np.float32)
                await x
                for n in range(NUM // 10):
                    async with dev.scope(name=name) as scope:
                        await checkpoint()
                        ops = [dev.launch(add_one, x, 4), dev.host(int)]
                        if not all(op._rare is None or op._rare.scope is scope for op in ops):
                            wrong.append((name, n))
                        await checkpoint()
                    if not all(op.done() for op in ops):
                        wrong.append((name, n, "left early"))
                    outside = dev.launch(add_one, x, 4)
                    if outside._rare is not None:
                        wrong.append((name, n, "outside"))
                    await checkpoint()

            async with anyio.create_task_group() as group:
                for name in ("one", "two"):
                    group.start_soon(work, name)
            assert not wrong, wrong[:5]

    run(main)


def test_c10_scopes_of_suspended_generators_in_two_tasks(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)

            async def steps(array, name):
                async with dev.scope(name=name) as scope:
                    for _ in range(20):
                        op = dev.launch(add_one, array, 4)
                        assert op._rare.scope is scope
                        yield op

            async def work(array, name):
                async with aclosing(steps(array, name)) as ops:
                    async for op in ops:
                        await checkpoint()
                        assert op._rare is None or op._rare.scope.name == name
                last = dev.launch(add_one, array, 4)
                assert last._rare is None

            async with anyio.create_task_group() as group:
                group.start_soon(work, x, "one")
                group.start_soon(work, y, "two")
            return await dev.get(x), await dev.get(y)

    assert [a.tolist() for a in run(main)] == [[21.0] * 4] * 2


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_c10_the_current_stream_and_scope_of_one_device_are_not_anothers(run, add_one, clock):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock=clock))
        async with (
            sf.Device(0, backend="sim", settings=settings) as zero,
            sf.Device(1, backend="sim", settings=settings) as one,
        ):
            wrong = []

            async def work(name, dev, other):
                x, y = dev.zeros(4, np.float32), other.zeros(4, np.float32)
                stream, theirs = dev.stream(name), other.stream(f"{name}, of the other")
                for n in range(NUM):
                    with stream, theirs if n % 2 else stream:
                        await checkpoint()
                        found = dev.launch(add_one, x, 4).stream, other.launch(add_one, y, 4).stream
                        expected = theirs.name if n % 2 else "compute"
                        if found[0] != name or not found[1].startswith(expected):
                            wrong.append((name, n, found))
                    await checkpoint()
                    if n % 100 == 0:
                        async with dev.scope(), other.scope() as scope:
                            other.launch(add_one, y, 4)
                            if scope.num_unfinished != 1:
                                wrong.append((name, n, scope))
                return x, y, dev, other

            results = []

            async def note(*args):
                results.append(await work(*args))

            async with anyio.create_task_group() as group:
                group.start_soon(note, "a", zero, one)
                group.start_soon(note, "b", one, zero)
            assert not wrong, wrong[:5]
            for x, y, dev, other in results:
                assert (await dev.get(x) == NUM).all()
                assert (await other.get(y) == NUM + NUM // 100).all()

    run(main)
