"""dev.pipeline: items of a source through the device and out again, in order."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from pipelines import add_one_to, batches_of, refilling
from support import virtual

import streamflow as sf


def test_items_come_back_as_ndarrays_in_order(run, open_device):
    async def main():
        async with open_device() as dev:
            batches = [np.full(1 << 16, number, np.float32) for number in range(10)]
            outs = []
            async for out in dev.pipeline(batches).map(add_one_to):
                assert isinstance(out, np.ndarray)
                outs.append(out[[0, -1]].tolist())
            assert outs == [[number + 1] * 2 for number in range(10)]

    run(main)


async def _async_items(num):
    for number in range(num):
        yield np.full(8, number, np.float32)


async def _awaited_source():
    return batches_of(4)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: batches_of(4), "list"),
        (lambda: iter(batches_of(4)), "iterator"),
        (lambda: (batch for batch in batches_of(4)), "generator"),
        (lambda: lambda: batches_of(4), "function"),
        (lambda: lambda: _async_items(4), "function of an async generator"),
        (lambda: _async_items(4), "async generator"),
        (lambda: _awaited_source, "coroutine function"),
        (lambda: np.stack(batches_of(4)), "ndarray, row by row"),
    ],
)
def test_what_a_source_may_be(run, make, kind):
    async def main():
        async with virtual() as dev:
            outs = [out.tolist() async for out in dev.pipeline(make()).map(add_one_to)]
            assert outs == [[number + 1] * 8 for number in range(4)], kind

    run(main)


def test_a_memmap_is_cut_along_its_first_axis(run, open_device, tmp_path):
    data = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)
    data.tofile(tmp_path / "data.bin")

    async def main():
        mapped = np.memmap(tmp_path / "data.bin", np.float32, "r", shape=(10, 3))
        async with open_device() as dev:
            pipeline = dev.pipeline(mapped, batch_size=4).map(add_one_to)
            outs = [out async for out in pipeline]
            assert [out.shape for out in outs] == [(4, 3), (4, 3), (2, 3)]
            assert (np.concatenate(outs) == data + 1).all()

    run(main)


Pair = namedtuple("Pair", "x label")


@dataclass(frozen=True)
class Sample:
    image: Any
    name: str
    weights: dict[str, Any] = field(default_factory=dict)


def test_items_are_arrays_in_containers_and_other_values_go_along(run, open_device):
    a, b = np.arange(3, dtype=np.int32), np.float32([[1, 2]])
    items = [
        (a, b, 7),
        [a, None],
        {"a": a, "inner": {"b": b, "name": "x"}},
        Pair(a, "cat"),
        Sample(a, "dog", {"w": b}),
    ]

    async def main():
        async with open_device() as dev:
            seen = []

            def look(dev, item):
                seen.append(item)
                return item

            outs = [out async for out in dev.pipeline(items).map(look)]
            assert isinstance(seen[0][0], sf.DeviceArray)
            assert seen[3].label == "cat"
            first, second, third, fourth, fifth = outs
            assert first[0].tolist() == [0, 1, 2]
            assert first[1].tolist() == [[1, 2]]
            assert (type(first), first[2]) == (tuple, 7)
            assert (second[0].tolist(), second[1]) == ([0, 1, 2], None)
            assert third["inner"]["b"].tolist() == [[1, 2]]
            assert third["inner"]["name"] == "x"
            assert (type(fourth), fourth.label) == (Pair, "cat")
            assert (type(fifth), fifth.name) == (Sample, "dog")
            assert fifth.weights["w"].dtype == np.float32
            del outs, first, second, third, fourth, fifth, seen[:]

    run(main)


@pytest.mark.parametrize("size", [8, 1 << 16])
def test_a_source_that_refills_one_buffer_is_right_by_default(run, open_device, size):
    async def main():
        async with open_device() as dev:
            for build in (
                lambda p: p.map(add_one_to),
                lambda p: p.map_host(lambda item: item[:]).map(add_one_to),
                lambda p: p.filter(lambda item: True).map(add_one_to),
                lambda p: p.batch(1).unbatch().map(add_one_to),
                lambda p: p.zip(refilling(12, size)).map_host(lambda pair: pair[1]).map(add_one_to),
            ):
                outs = [int(out[-1]) async for out in build(dev.pipeline(refilling(12, size)))]
                assert outs == list(range(1, 13))

    run(main)


def test_several_maps_and_a_current_stream_that_is_not_theirs(run, open_device):
    async def main():
        async with open_device() as dev:
            lanes = []

            def look(dev, x):
                lanes.append(dev.fill(x, 3).stream)
                return x

            with dev.stream("mine"):
                pipeline = dev.pipeline(batches_of(3)).map(look).map(add_one_to, name="plus")
                assert [out.tolist() async for out in pipeline] == [[4.0] * 8] * 3
            assert all(lane.startswith("compute") for lane in lanes)

    run(main)


def test_run_calls_the_sink_and_counts(run, open_device):
    async def main():
        async with open_device() as dev:
            seen = []

            async def sink(out):
                seen.append(int(out[0]))

            pipeline = dev.pipeline(batches_of(5)).map(add_one_to)
            assert await pipeline.run(seen.append) == 5
            seen.clear()
            assert await pipeline.run(sink) == 5  # a list can be gone through again
            assert await pipeline.run(lambda out: sink(out)) == 5
            assert seen == [1, 2, 3, 4, 5] * 2
            assert await pipeline.run() == 5
            assert pipeline.stats().stages[0].num_items == 5

    run(main)
