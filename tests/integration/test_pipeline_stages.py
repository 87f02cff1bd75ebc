"""The stages of a pipeline on the host, and its order."""

from __future__ import annotations

import gc
import threading

import anyio
import numpy as np
import pytest
from pipelines import add_one_to, batches_of, nothing_is_left, refilling
from support import turns, until, virtual

import streamflow as sf


def firsts(outs):
    return [int(np.ravel(out)[0]) for out in outs]


def test_map_host_runs_on_worker_threads_in_order(run, open_device):
    names = set()

    def double(x):
        names.add(threading.current_thread().name)
        return x * 2

    async def main():
        async with open_device() as dev:
            pipeline = dev.pipeline(batches_of(9), depth=4).map_host(double, workers=3)
            pipeline = pipeline.map(add_one_to).to_host().map_host(double, workers=2)
            assert firsts([out async for out in pipeline]) == [4 * n + 2 for n in range(9)]
            assert all(name.startswith("streamflow-host") for name in names)
            assert pipeline.stats().stages[1].name == "double"
            assert pipeline.stats().stages[-2].name == "double 2"

    run(main)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_is_how_many_items_are_mapped_at_a_time(run, workers):
    async def main():
        num_running = most = 0
        release = anyio.Event()

        async def hold(x):
            nonlocal num_running, most
            num_running += 1
            most = max(most, num_running)
            await release.wait()
            num_running -= 1
            return x

        async with virtual(host_workers=8) as dev:
            items = aiter(dev.pipeline(batches_of(9), depth=6).map_host(hold, workers=workers))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, items)
                await turns(60)
                assert num_running == most == workers
                release.set()
            await items.aclose()

    run(main)


def test_the_source_is_pulled_while_a_stage_works_on_its_copy(run):
    async def main():
        async with virtual() as dev:
            release, seen = anyio.Event(), []

            async def hold(x):
                seen.append(x)
                await release.wait()
                return x

            pipeline = dev.pipeline(refilling(5), depth=3).map_host(hold, workers=3)
            async with pipeline.map(add_one_to) as items, anyio.create_task_group() as tasks:
                tasks.start_soon(anext, items)
                await until(lambda: len(seen) == 3)
                release.set()
            assert firsts(seen[:3]) == [0, 1, 2]

    run(main)


@pytest.mark.parametrize(("source_owns", "num_pulled"), [(False, 1), (True, 3)])
def test_a_lent_item_has_been_read_before_the_next_is_pulled(run, source_owns, num_pulled):
    pulled = []

    def source():
        buffer = np.zeros(1 << 16, np.float32)
        for number in range(4):
            pulled.append(number)
            buffer[:] = number
            yield buffer.copy() if source_owns else buffer

    async def main():
        async with virtual() as dev:
            gate = dev.sim.gate("h2d")  # no array is there yet to be copied to
            items = aiter(dev.pipeline(source, depth=3, source_owns=source_owns))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, items)
                await until(lambda: len(pulled) == num_pulled)
                await turns(60)
                assert len(pulled) == num_pulled
                gate.release()
            assert firsts([out async for out in items]) == [1, 2, 3]

    run(main)


@pytest.mark.parametrize("place", ["before", "after"])
def test_batch_unbatch_and_filter_on_either_side(run, open_device, place):
    def build(source):
        batched = source.filter(lambda x: x[0] % 3 != 1).batch(2)
        return batched.unbatch().batch(3).map_host(lambda x: x + 0)

    async def main():
        async with open_device() as dev:
            for refills in (False, True):
                source = dev.pipeline(refilling(10) if refills else batches_of(10), depth=2)
                if place == "before":
                    pipeline = build(source).map(add_one_to)
                else:
                    pipeline = build(source.map(lambda dev, x: x).to_host())
                outs = [out async for out in pipeline]
                plus = place == "before"
                wanted = [n + plus for n in range(10) if n % 3 != 1]
                assert [out.shape for out in outs] == [(3, 8), (3, 8), (1, 8)]
                assert np.concatenate(outs)[:, 0].tolist() == wanted
                del outs
                await nothing_is_left(dev)

    run(main)


def test_a_batch_of_thousands_of_items_that_are_there(run):
    async def main():
        async with virtual() as dev:
            for source in (batches_of(4500, 1), lambda: batches_of(4500, 1)):
                outs = [out async for out in dev.pipeline(source).batch(2000).map(add_one_to)]
                assert (np.concatenate(outs)[:, 0] == np.arange(1, 4501)).all()

    run(main)


def test_batches_of_dicts_hold_arrays_stacked_and_other_values_as_lists(run):
    async def main():
        async with virtual() as dev:
            items = [{"x": np.full(2, n, np.int64), "name": str(n), "y": n} for n in range(3)]
            outs = [out async for out in dev.pipeline(items).batch(2).map(lambda dev, x: x)]
            assert outs[0]["x"].tolist() == [[0, 0], [1, 1]]
            assert (outs[0]["name"], outs[0]["y"]) == (["0", "1"], [0, 1])
            assert (outs[1]["x"].tolist(), outs[1]["name"]) == ([[2, 2]], ["2"])

    run(main)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4), (0, 2), (2, 0)])
@pytest.mark.parametrize("kind", ["list", "refilling", "async"])
def test_zip_pairs_items_and_ends_with_the_shorter(run, lengths, kind):
    closed = []

    def make(num):
        if kind == "list":
            return batches_of(num)
        if kind == "refilling":
            return refilling(num)

        async def items():
            try:
                for batch in batches_of(num):
                    yield batch
            finally:
                closed.append(num)

        return items

    async def main():
        async with virtual() as dev:
            pipeline = dev.pipeline(make(lengths[0])).zip(make(lengths[1]))
            outs = [out async for out in pipeline.map(lambda dev, pair: pair)]
            assert [firsts(out) for out in outs] == [[n, n] for n in range(min(lengths))]
            if kind == "async":
                assert sorted(closed) == sorted(lengths)

    run(main)


def test_zip_of_results_and_labels(run):
    async def main():
        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(3)).map(add_one_to).to_host().zip(["a", "b", "c"])
            assert [(out[0], label) async for out, label in pipeline] == [
                (1, "a"),
                (2, "b"),
                (3, "c"),
            ]
            pipeline = dev.pipeline(batches_of(6)).to_host().zip(refilling(6)).batch(4)
            outs = [out async for out in pipeline]
            assert [out[1][:, 0].tolist() for out in outs] == [[0, 1, 2, 3], [4, 5]]

    run(main)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("ordered", [True, False])
def test_unordered_items_come_as_they_get_ready(run, ordered, place):
    async def main():
        release, seen = anyio.Event(), []

        async def hold_the_first(x):
            if x[0] == (place == "after"):
                await release.wait()
            return x

        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(6), depth=3, ordered=ordered)
            if place == "before":
                pipeline = pipeline.map_host(hold_the_first, workers=2).map(add_one_to)
            else:
                pipeline = pipeline.map(add_one_to).to_host().map_host(hold_the_first, workers=2)

            async def consume():
                seen.extend([int(out[0]) async for out in pipeline])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await turns(300)
                release.set()
            assert seen == ([1, 2, 3, 4, 5, 6] if ordered else [2, 3, 4, 5, 6, 1])

    run(main)


def test_a_pipeline_with_more_stages_leaves_the_one_it_was_made_of_alone(run):
    async def main():
        async with virtual() as dev:
            base = dev.pipeline(batches_of(2))
            one, two = base.map(add_one_to), base.map(add_one_to).map(add_one_to)
            assert firsts([out async for out in base]) == [0, 1]
            assert firsts([out async for out in one]) == [1, 2]
            assert firsts([out async for out in two]) == [2, 3]
            stages = "source > put > add_one_to > add_one_to 2 > get > consumer"
            assert repr(two) == f"<Pipeline {stages}>"

    run(main)


def test_an_outer_scope_limits_and_a_bar_counts(run):
    class Bar:
        def __init__(self):
            self.num, self.is_closed = 0, False

        def update(self, n=1):
            self.num += n

        def close(self):
            self.is_closed = True

    async def main():
        async with virtual() as dev, dev.scope(limit="1MiB"):
            bar = Bar()
            source = [np.zeros(1 << 17, np.float32)] * 6
            assert await dev.pipeline(source, progress=bar).map(add_one_to).run() == 6
            assert (bar.num, bar.is_closed) == (6, False)
            with pytest.raises(sf.OutOfDeviceMemory, match="limit of scope"):
                await dev.pipeline([np.zeros(1 << 20)]).run()

    run(main)


def test_serial_mode_and_other_devices_leave_a_pipeline_right(run):
    async def main():
        async with virtual(serial=True) as dev, virtual(1) as other:
            first = dev.pipeline(refilling(5, 1 << 15)).map(add_one_to)
            second = other.pipeline(refilling(5, 1 << 15)).map(add_one_to)
            async with first as one, second as two:
                assert firsts([out async for out in one]) == [1, 2, 3, 4, 5]
                assert firsts([out async for out in two]) == [1, 2, 3, 4, 5]

    run(main)


def test_c12_a_loop_that_ends_in_a_run_leaves_no_warning_and_no_thread(run):
    kept = []

    async def main():
        dev = virtual()
        await dev.__aenter__()
        items = aiter(dev.pipeline(refilling(50)).map(add_one_to))
        await anext(items)
        kept.extend((dev, items))

    async def after():
        async with virtual() as dev:  # takes back what the ended loop has left
            assert await dev.pipeline(batches_of(3)).run() == 3

    run(main)
    kept.clear()
    gc.collect()
    run(after)
