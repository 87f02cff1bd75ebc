"""How far ahead a pipeline runs, what it holds meanwhile, and how it is left (C8, C27, C28)."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from pipelines import add_one_to, batches_of, nothing_is_left, refilling
from support import error_of, native, turns, until, virtual

import streamflow as sf


class Watched:
    """A source that says how far it was pulled, and whether it was closed."""

    def __init__(self, num, size=8, fail_at=None):
        self.num, self.size, self.fail_at = num, size, fail_at
        self.num_pulled = 0
        self.is_closed = False

    def __call__(self):
        try:
            for number in range(self.num):
                if number == self.fail_at:
                    raise OSError(f"no item {number}")
                self.num_pulled += 1
                yield np.full(self.size, number, np.float32)
        finally:
            self.is_closed = True


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_c27_exactly_the_items_come_and_the_source_is_pulled_at_most_depth_ahead(
    run, open_device, depth
):
    async def main():
        async with open_device() as dev:
            for num in {0, 1, depth - 1, depth, depth + 1, 3 * depth}:
                for end in ("to_host", "on_device"):
                    source = Watched(num)
                    pipeline = dev.pipeline(source, depth=depth, source_owns=True).map(add_one_to)
                    num_seen = 0
                    async for out in getattr(pipeline, end)():
                        found = out if end == "to_host" else await dev.get(out)
                        num_seen += 1
                        assert found.tolist() == [num_seen] * 8
                        await turns(3)
                        assert source.num_pulled <= num_seen + depth
                    assert num_seen == num
                    assert source.is_closed

    run(main)


@pytest.mark.parametrize("drop_last", [False, True])
def test_c27_a_last_batch_that_is_not_full_is_kept_unless_it_is_dropped(run, drop_last):
    async def main():
        async with virtual() as dev:
            for num in range(8):
                pipeline = dev.pipeline(Watched(num)).batch(3, drop_last=drop_last).map(add_one_to)
                sizes = [len(out) async for out in pipeline]
                rest = [num % 3] if num % 3 and not drop_last else []
                assert sizes == [3] * (num // 3) + rest

    run(main)


@pytest.mark.parametrize("depth", [1, 2])
def test_c8_a_slot_returns_after_the_consumers_op_and_not_after_its_submission(run, depth):
    async def main():
        async with virtual() as dev:
            stream, source = dev.stream(), Watched(6, size=1 << 16)
            pipeline = dev.pipeline(source, depth=depth, source_owns=True).map(add_one_to)
            items = aiter(pipeline.on_device())
            gate = dev.sim.gate(stream)
            copies = [dev.get(await anext(items), stream=stream)]  # stalled; the item is dropped
            following = None
            async with anyio.create_task_group() as tasks:

                async def come_back():
                    nonlocal following
                    async for item in items:
                        copies.append(dev.get(item, stream=stream))
                        del item

                tasks.start_soon(come_back)
                await turns(50)
                assert source.num_pulled == depth
                assert len(copies) == depth
                gate.release()
            outs = [(await copy)[-1] for copy in copies]
            assert outs == [1, 2, 3, 4, 5, 6]

    run(main)


@pytest.mark.parametrize("depth", [1, 2])
def test_c8_a_stalled_consumer_sees_every_item_of_one_refilled_buffer(run, open_device, depth):
    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            stall = open_device.stall(dev, stream, 0.05)
            pipeline = dev.pipeline(refilling(6, 1 << 16), depth=depth).map(add_one_to).on_device()
            copies = []
            async with anyio.create_task_group() as tasks:

                async def consume():
                    async for item in pipeline:
                        copies.append(dev.get(item, stream=stream))
                        del item

                tasks.start_soon(consume)
                await turns(30)
                stall.release()
            assert [(await copy)[-1] for copy in copies] == [1, 2, 3, 4, 5, 6]

    run(main)


def test_c8_two_pipelines_stay_paired(run, open_device):
    async def main():
        async with open_device() as dev:
            first = dev.pipeline(refilling(20, 1 << 15), depth=1).map(add_one_to)
            second = dev.pipeline(refilling(20, 1 << 15), depth=3).map(add_one_to)
            async with first as one, second as other:
                async for a in one:
                    b = await anext(other)
                    assert (a == b).all()
                    del a, b

    run(main)


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_is_bounded_by_depth(run, open_device, depth):
    nbytes = 1 << 20

    def model(dev, x):
        y = dev.empty(x.shape, x.dtype)
        dev.copy(y, x)
        return y

    async def main():
        async with open_device(check_races=False) as dev:
            source = Watched(12, size=nbytes // 4)
            pipeline = dev.pipeline(source, depth=depth, source_owns=True).map(model)
            dev.memory.reset_high()
            assert await pipeline.run() == 12
            assert dev.memory.used_high_nbytes <= 2 * depth * nbytes
            if dev.backend == "sim":  # where what is reserved is what is in nobody's way yet
                assert dev.memory.reserved_high_nbytes <= 2 * depth * nbytes
            assert dev.pinned.stats().num_live == 0
            await dev.synchronize()
            assert dev.memory.used_nbytes == 0

    run(main)


def test_memory_is_bounded_by_the_limit_and_one_item_over_it_is_an_error(run, open_device):
    nbytes = 1 << 20

    def model(dev, x):
        y = dev.empty((2, *x.shape), x.dtype)
        dev.fill(y, 1)
        return x, y

    async def main():
        async with open_device(check_races=False) as dev:
            source = Watched(12, size=nbytes // 4)
            pipeline = dev.pipeline(source, depth=6, limit="7MiB", source_owns=True).map(model)
            dev.memory.reset_high()
            assert await pipeline.run() == 12
            assert dev.memory.used_high_nbytes <= 7 * nbytes
            if dev.backend == "sim":
                assert dev.memory.reserved_high_nbytes <= 7 * nbytes
            for limit in ("1000kB", "2MiB"):
                pipeline = dev.pipeline(source, limit=limit).map(model)
                with pytest.raises(sf.OutOfDeviceMemory, match="the pipeline's limit is"):
                    await pipeline.run()
            await dev.synchronize()
            assert dev.memory.used_nbytes == 0

    run(main)


def test_an_item_is_held_to_the_limit_by_what_it_takes_and_not_by_what_others_made(run):
    def grow_the_first(dev, x):
        return dev.zeros(8 * x.size, x.dtype) if x.size == 256 else x

    async def main():
        async with virtual() as dev:
            source = [np.ones(size, np.float32) for size in (256, 1024, 1024)]
            nbytes = 9 * 1024  # 1 KiB and 8 made of it; then 4 and nothing made
            pipeline = dev.pipeline(source, limit=nbytes).map(grow_the_first)
            dev.memory.reset_high()
            assert await pipeline.run() == 3
            assert dev.memory.used_high_nbytes <= nbytes

    run(main)


def test_items_that_pile_up_on_the_device_stay_within_the_limit(run):
    nbytes = 1 << 20

    def model(dev, x):
        y = dev.empty((2, *x.shape), x.dtype)
        dev.fill(y, 1)
        return y

    async def main():
        async with virtual() as dev:
            gate = dev.sim.gate("d2h")
            source = [np.zeros(nbytes, np.uint8)] * 6
            pipeline = dev.pipeline(source, depth=6, limit="7MiB").map(model)
            num = 0

            async def consume():
                nonlocal num
                num = await pipeline.run()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await turns(200)
                assert dev.memory.reserved_high_nbytes <= 7 * nbytes
                assert dev.pinned.stats().num_acquired == 2  # for the gets of two items
                gate.release()
            assert num == 6

    run(main)


def test_a_limit_does_not_hang_on_device_items_that_the_consumer_has_yet_to_get(run):
    async def main():
        async with virtual() as dev:
            source = Watched(12, size=1 << 10)
            for ordered in (True, False):
                pipeline = dev.pipeline(source, depth=4, limit=1 << 13, ordered=ordered)
                items = pipeline.map_host(lambda x: x, workers=3).on_device()
                seen = [(await dev.get(item))[0] async for item in items]
                assert sorted(seen) == list(range(12))

    run(main)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
@pytest.mark.parametrize("end", ["to_host", "on_device"])
def test_c28_a_break_pulls_nothing_more_and_closes_the_source(run, open_device, kind, end):
    async def main():
        async with open_device() as dev:
            source = Watched(50, size=1 << 15)

            async def async_items():
                for item in (items := source()):
                    try:
                        yield item
                    except BaseException:
                        items.close()
                        raise

            given = source if kind == "generator" else async_items
            pipeline = dev.pipeline(given, source_owns=True).map(add_one_to)
            async for out in getattr(pipeline, end)():
                assert out is not None
                break
            del out
            await nothing_is_left(dev, source)
            num_pulled = source.num_pulled
            assert num_pulled < 10
            await turns(20)
            assert source.num_pulled == num_pulled
            assert dev.memory.used_nbytes == 0

    run(main)


def test_c28_async_with_has_ended_all_when_it_is_left(run, open_device):
    async def main():
        async with open_device() as dev:
            for how in ("break", "raise", "close"):
                source = Watched(50, size=1 << 15)
                pipeline = dev.pipeline(source).map(add_one_to)
                try:
                    async with pipeline as items:
                        async for out in items:
                            del out
                            if how == "raise":
                                raise KeyError(how)
                            if how == "close":
                                await items.aclose()
                            else:
                                break
                except KeyError:
                    assert how == "raise"
                assert source.is_closed
                await nothing_is_left(dev)
                assert (await error_of(anext(items))).__class__ is StopAsyncIteration

    run(main)


def test_c28_an_exception_in_the_body_is_that_exception(run):
    async def main():
        async with virtual() as dev:
            source = Watched(50)
            with pytest.raises(KeyError, match="mine"):
                async for out in dev.pipeline(source).map(add_one_to):
                    del out
                    raise KeyError("mine")
            await nothing_is_left(dev, source)

    run(main)


def test_c28_cancelled_in_the_body_or_while_waiting(run, open_device):
    async def main():
        async with open_device() as dev:
            for place in ("body", "waiting"):
                source, stream = Watched(50, size=1 << 15), dev.stream()
                stall = open_device.stall(dev, stream, 0.1)

                def stalled(dev, x, stream=stream):
                    dev.fill(x, 1, stream=stream)
                    return x

                step = add_one_to if place == "body" else stalled
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:

                        async def consume(step=step, source=source):
                            async for out in dev.pipeline(source).map(step):
                                del out
                                await anyio.sleep_forever()

                        tasks.start_soon(consume)
                        while not source.num_pulled:  # one that has not begun has no finally
                            await turns(1)
                        await turns(30)
                        scope.cancel()
                stall.release()
                await nothing_is_left(dev, source)
                await dev.synchronize()

    run(main)


def test_c28_a_cancelled_wait_loses_no_item(run):
    async def main():
        async with virtual() as dev:
            gate = dev.sim.gate("compute0")
            async with dev.pipeline(batches_of(3)).map(add_one_to) as items:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await anext(items)
                gate.release()
                assert [out[0] async for out in items] == [1, 2, 3]

    run(main)


@native
def test_c28_a_native_cancellation_in_the_body(run):
    import asyncio

    async def main():
        async with virtual() as dev:
            source = Watched(50)

            async def consume():
                async for out in dev.pipeline(source).map(add_one_to):
                    del out
                    await asyncio.sleep(3600)

            task = asyncio.create_task(consume())
            await turns(40)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            await nothing_is_left(dev, source)

    run(main)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_c28_an_error_of_the_source_arrives_after_the_good_items(run, open_device, at, ordered):
    async def main():
        async with open_device() as dev:
            source, seen = Watched(9, fail_at=at), []
            with pytest.raises(OSError, match=f"no item {at}"):
                async for out in dev.pipeline(source, ordered=ordered).map(add_one_to):
                    seen.append(int(out[0]))
                    del out
            assert sorted(seen) == list(range(1, at + 1))
            assert source.is_closed
            await nothing_is_left(dev)

    run(main)


@pytest.mark.parametrize("how", ["with", "break"])
def test_c28_an_error_behind_the_item_at_which_a_run_is_left_is_nobodys(run, how):
    async def main():
        async with virtual() as dev:
            source = Watched(9, fail_at=1)
            pipeline = dev.pipeline(source, source_owns=True).map(add_one_to)
            if how == "with":
                async with pipeline as items:
                    await anext(items)
                    await until(lambda: source.is_closed)  # it has failed by now
            else:
                async for out in pipeline:
                    del out
                    await until(lambda: source.is_closed)
                    break
            await nothing_is_left(dev)

    run(main)
