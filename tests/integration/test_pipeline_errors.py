"""What goes wrong in a pipeline, and how its consumer hears of it."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import numpy as np
import pytest
from pipelines import add_one_to, batches_of, nothing_is_left
from support import turns, until, virtual

import streamflow as sf


async def outcome_of(pipeline):
    """The first elements of the items that came, and what was raised after them."""
    seen = []
    try:
        async for out in pipeline:
            seen.append(np.ravel(out)[0].item())
            del out
    except Exception as error:
        return seen, error
    return seen, None


@pytest.mark.parametrize("place", ["map_host", "filter", "map", "after"])
def test_an_error_of_a_stage_arrives_after_the_good_items(run, open_device, place):
    def fail_at_two(x):
        if x[0] == 2 + (place == "after"):
            raise KeyError("two")
        return x

    numbers = iter(range(100))

    def fail_on_device(dev, x):
        if next(numbers) == 2:
            raise KeyError("two")
        return add_one_to(dev, x)

    async def main():
        async with open_device() as dev:
            source = dev.pipeline(batches_of(9), depth=4)
            pipeline = {
                "map_host": lambda: source.map_host(fail_at_two, workers=3).map(add_one_to),
                "filter": lambda: source.filter(lambda x: fail_at_two(x) is x).map(add_one_to),
                "map": lambda: source.map(fail_on_device),
                "after": lambda: source.map(add_one_to).to_host().map_host(fail_at_two),
            }[place]()
            seen, error = await outcome_of(pipeline)
            assert seen == [1, 2]
            assert isinstance(error, KeyError)
            assert any("fail_" in note for note in error.__notes__)
            await nothing_is_left(dev)

    run(main)


def test_a_failing_op_is_traced_to_its_stage_and_leaves_the_device_usable(run):
    async def main():
        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(6)).map(add_one_to, name="model").map(add_one_to)
            dev.sim.fail(kind="launch", nth=5, error=sf.LaunchFailed("no"), sticky=False)
            seen, error = await outcome_of(pipeline)
            assert seen == [2, 3]
            told = f"{error!r} {error.__notes__}"
            assert "stage 'model' of the pipeline, item 2" in told
            assert isinstance(error, (sf.UpstreamFailed, sf.LaunchFailed))
            seen, error = await outcome_of(pipeline)
            assert (seen, error) == ([2, 3, 4, 5, 6, 7], None)
            await nothing_is_left(dev)

    run(main)


def test_a_failing_op_drops_nothing_of_the_good_items_before_it(run):
    async def main():
        async with virtual() as dev:
            items = [np.zeros(1 << 16, np.float32), np.zeros(8, np.float32)]
            gate = dev.sim.gate("h2d")  # the first one is large, and parks
            dev.sim.fail(kind="launch", error=sf.LaunchFailed("no"), sticky=False)
            outcome = []

            async def consume():
                outcome.extend(await outcome_of(dev.pipeline(items).map(add_one_to)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await turns(50)
                gate.release()
            seen, error = outcome
            assert seen == [1]
            assert "item 1" in f"{error.__notes__}"

    run(main)


def test_work_that_fails_beside_the_items_surfaces_at_the_end_of_the_run(run):
    async def main():
        async with virtual() as dev:

            def log(dev, x):
                dev.call(lambda stream, a: 1 / 0, x, reads=x)
                return x

            pipeline = dev.pipeline(batches_of(2)).map(log)
            with pytest.raises(ExceptionGroup, match="pipeline: 2 ops failed"):
                await pipeline.run()
            await dev.synchronize()  # and nowhere else

    run(main)


def test_a_sticky_fault_ends_the_run_with_device_lost(run):
    async def main():
        source_closed = []

        def source():
            try:
                yield from batches_of(9)
            finally:
                source_closed.append(True)

        with pytest.raises(sf.DeviceLost):
            async with virtual() as dev:
                dev.sim.fail(kind="launch", nth=3, sticky=True)
                async for out in dev.pipeline(source).map(add_one_to):
                    del out
        await until(lambda: source_closed)

    run(main)


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_the_device_meanwhile_ends_the_run_and_closes_the_source(
    run, open_device, is_async
):
    closed = []

    def source():
        try:
            for number in range(100):
                yield np.full(1 << 15, number, np.float32)
        finally:
            closed.append(threading.current_thread().name)

    async def async_source():
        try:
            for number in range(100):
                yield np.full(1 << 15, number, np.float32)
        finally:
            closed.append("loop")

    async def main():
        async with open_device() as dev:
            items = aiter(dev.pipeline(async_source if is_async else source).map(add_one_to))
            await anext(items)
            await turns(10)
        await until(lambda: closed)
        with pytest.raises((StopAsyncIteration, sf.Closed)):
            await anext(items)
        await items.aclose()

    run(main)


def test_the_device_is_closed_while_the_consumer_waits(run):
    async def main():
        errors = []
        async with anyio.create_task_group() as tasks, virtual() as dev:
            gate = dev.sim.gate("h2d")

            async def consume():
                errors.append((await outcome_of(dev.pipeline(batches_of(3)).map(add_one_to)))[1])

            tasks.start_soon(consume)
            await turns(20)
            gate.release()
        assert isinstance(errors[0], sf.Closed)

    run(main)


def test_a_failing_source_is_not_blamed_on_the_item_that_gave_its_buffer_back(run):
    async def source():
        yield np.zeros(8, np.float32)  # small: read at the put, which has the next one pulled
        raise KeyError("one")

    async def main():
        async with virtual() as dev:
            seen, error = await outcome_of(dev.pipeline(source).map(add_one_to))
            assert seen == [1]
            assert isinstance(error, KeyError)
            assert not any("belongs to" in note for note in error.__notes__)

    run(main)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("place", ["map_host", "map", "after"])
def test_a_stage_that_runs_out_of_something_does_not_end_the_items(run, kind, place):
    def run_out(*given):
        raise kind("seven")

    async def main():
        async with virtual() as dev:
            source = dev.pipeline(batches_of(3))
            pipeline = {
                "map_host": lambda: source.map_host(run_out),
                "map": lambda: source.map(run_out),
                "after": lambda: source.to_host().map_host(run_out),
            }[place]()
            with pytest.raises(RuntimeError, match=r"a stage raised Stop.*seven") as caught:
                await pipeline.run()
            assert isinstance(caught.value.__cause__, kind)

    run(main)


def test_an_exit_in_a_stage_is_raised_to_the_consumer(run):
    def leave(dev, x):
        raise SystemExit(3)

    async def main():
        async with virtual() as dev:
            with pytest.raises(SystemExit):
                await dev.pipeline(batches_of(3)).map(leave).run()
            await nothing_is_left(dev)

    run(main)


@pytest.mark.parametrize("end", ["to_host", "on_device"])
def test_a_source_that_hangs_is_left_by_cancelling_it(run, end):
    async def main():
        async with virtual() as dev:
            ended = []

            async def source():
                yield np.zeros(8, np.float32)
                try:
                    await anyio.sleep_forever()
                finally:
                    ended.append(True)

            begun_s = time.monotonic()
            async with getattr(dev.pipeline(source).map(add_one_to), end)() as items:
                await anext(items)
                await turns(10)
            assert ended
            assert time.monotonic() - begun_s < 5  # and not after close_timeout_s
            await nothing_is_left(dev)

    run(main)


def test_an_error_in_the_sources_clean_up_is_told(run):
    async def main():
        async with virtual() as dev:

            def source():
                try:
                    yield from batches_of(9)
                finally:
                    raise OSError("can't close")

            with pytest.raises(OSError, match="can't close"):
                async with dev.pipeline(source).map(add_one_to) as items:
                    await anext(items)

    run(main)


BAD = [
    (lambda dev: dev.pipeline([], depth=0), ValueError, "depth is at least 1"),
    (lambda dev: dev.pipeline([], depth=True), TypeError, "depth is an integer"),
    (lambda dev: dev.pipeline([], depth=2.5), TypeError, "depth is an integer"),
    (lambda dev: dev.pipeline([], limit=0), ValueError, "limit is above 0"),
    (lambda dev: dev.pipeline([], limit="much"), ValueError, "a limit is a number of bytes"),
    (lambda dev: dev.pipeline(7), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline(None), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline("ab"), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline(np.float32(1)), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline(np.zeros(())), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline(dev.zeros(3)), TypeError, "source is an iterable"),
    (lambda dev: dev.pipeline([], batch_size=2), TypeError, "batch_size= cuts"),
    (lambda dev: dev.pipeline(np.zeros(3), batch_size=0), ValueError, "batch_size is at least 1"),
    (lambda dev: dev.pipeline([]).map(3), TypeError, "map takes a function"),
    (lambda dev: dev.pipeline([]).map(asyncio.sleep), TypeError, "plain function"),
    (lambda dev: dev.pipeline([]).map_host(abs, workers=0), ValueError, "workers is at least 1"),
    (lambda dev: dev.pipeline([]).filter(asyncio.sleep), TypeError, "plain function"),
    (lambda dev: dev.pipeline([]).batch(0), ValueError, "n is at least 1"),
    (lambda dev: dev.pipeline([]).zip(3), TypeError, "source is an iterable"),
    (
        lambda dev: dev.pipeline([]).map(add_one_to).batch(2),
        ValueError,
        r"call \.to_host\(\) first",
    ),
    (lambda dev: dev.pipeline([]).map(add_one_to).map_host(abs), ValueError, "on the device"),
    (lambda dev: dev.pipeline([]).to_host().map(add_one_to), ValueError, r"before \.to_host"),
    (lambda dev: dev.pipeline([]).to_host().to_host(), ValueError, "back on the host"),
    (lambda dev: dev.pipeline([]).on_device().map_host(abs), ValueError, "which is the end"),
    (lambda dev: dev.pipeline([]).stats(), RuntimeError, "has not run yet"),
]


@pytest.mark.parametrize(("build", "kind", "words"), BAD)
def test_what_is_refused_at_the_call(run, build, kind, words):
    async def main():
        async with virtual() as dev:
            with pytest.raises(kind, match=words):
                build(dev)

    run(main)


RUNS = [
    (lambda dev: dev.pipeline([np.array([object()])]), TypeError, "cannot be moved to a device"),
    (lambda dev: dev.pipeline(["a"]), TypeError, "item 0 has no ndarray"),
    (lambda dev: dev.pipeline([()]), TypeError, "item 0 has no ndarray"),
    (lambda dev: dev.pipeline(lambda: 3), TypeError, "has to return an iterable"),
    (lambda dev: _maps(dev, lambda dev, x: None), TypeError, "returned NoneType None"),
    (lambda dev: _maps(dev, lambda dev, x: np.zeros(3)), TypeError, "is on the host: dev.put it"),
    (lambda dev: _maps(dev, lambda dev, x: dev.fill(x, 1)), TypeError, "returned the op"),
    (lambda dev: _maps(dev, lambda dev, x: [x, (x.free(),)[1:]]), sf.Closed, "was freed"),
    (lambda dev: _maps(dev, lambda x: x), TypeError, "positional argument"),
    (
        lambda dev: dev.pipeline([np.zeros(3), np.zeros(4)]).batch(2),
        ValueError,
        r"ragged batch: its item 1 has ndarray \(4,\) float64 where its first has",
    ),
    (
        lambda dev: dev.pipeline([np.zeros(3), np.zeros(3, np.int8)]).batch(2),
        ValueError,
        "ragged batch",
    ),
    (
        lambda dev: dev.pipeline([(np.zeros(3),), (np.zeros(3), 1)]).batch(2),
        ValueError,
        "has 2 leaves, its first 1",
    ),
    (lambda dev: dev.pipeline([np.float32(3)]).unbatch(), ValueError, "a first axis to go along"),
    (
        lambda dev: dev.pipeline([(np.zeros(3), np.zeros(4))]).unbatch(),
        ValueError,
        r"first axes of \[3, 4\]",
    ),
]


def _maps(dev, fn):
    return dev.pipeline(batches_of(3)).map(fn)


@pytest.mark.parametrize(("build", "kind", "words"), RUNS)
@pytest.mark.parametrize("end", ["to_host", "on_device"])
def test_what_a_run_refuses_in_its_place(run, build, kind, words, end):
    async def main():
        async with virtual() as dev:
            with pytest.raises(kind, match=words):
                await getattr(build(dev), end)().run()
            await nothing_is_left(dev)

    run(main)


def test_an_iterator_is_gone_through_once(run):
    async def main():
        async with virtual() as dev:
            for source in (iter(batches_of(2)), (batch for batch in batches_of(2))):
                pipeline = dev.pipeline(source).map(add_one_to)
                assert await pipeline.run() == 2
                with pytest.raises(RuntimeError, match="was gone through already"):
                    aiter(pipeline)
                with pytest.raises(RuntimeError, match="was gone through already"):
                    aiter(pipeline.map(add_one_to))

    run(main)


def test_one_run_has_one_consumer_and_one_thread(run):
    async def main():
        async with virtual() as dev:
            gate = dev.sim.gate("h2d")
            pipeline = dev.pipeline(batches_of(2)).map(add_one_to)
            items, errors = aiter(pipeline), []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, items)
                await turns(3)
                with pytest.raises(RuntimeError, match="two tasks wait"):
                    await anext(items)

                def elsewhere():
                    for call in (
                        lambda: aiter(pipeline),
                        lambda: dev.pipeline([]),
                        lambda: items.__anext__().send(None),
                    ):
                        try:
                            call()
                        except sf.WrongThread as error:
                            errors.append(error)

                await anyio.to_thread.run_sync(elsewhere)
                assert len(errors) == 3
                gate.release()
            await items.aclose()

    run(main)
