"""Long runs of a pipeline on the virtual clock: memory stays flat, the slow stage is found."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import SPIN, virtual

import streamflow as sf

NUM_LONG = 10_000
NUM_SHORT = 150
SIZE = 64
FAST_S, SLOW_S = 20e-6, 400e-6
COPY_NBYTES = 4 * SIZE

WORK = sf.Kernel.from_source(
    """extern "C" __global__ void work(float* x, double seconds, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] += 1.0f;
    }""",
    body=lambda x, seconds, n: np.add(x, np.float32(1), out=x),
    cost=lambda x, seconds, n: seconds,
)


def add_one(stream: sf.Stream, seconds: float) -> Callable[[sf.Device, Any], Any]:
    """A stage whose kernels run one after the other: on lanes, those of two items overlap."""

    def work(dev: sf.Device, x: Any) -> Any:
        dev.launch(WORK, x, seconds, SIZE, stream=stream)
        return x

    return work


def test_ten_thousand_batches_take_no_more_memory_than_a_few() -> None:
    depth = 3
    held: dict[int, int] = {}

    def source() -> Iterator[Any]:
        buffer = np.empty(SIZE, np.float32)
        for number in range(NUM_LONG):
            buffer[:] = number
            yield buffer

    async def main() -> sf.PipelineStats:
        async with virtual(check_races=False) as dev:
            work = add_one(dev.stream("work"), FAST_S)
            pipeline = dev.pipeline(source, depth=depth).map(work, name="work")
            number = 0
            async for result in pipeline:
                assert result[0] == result[-1] == number + 1
                number += 1
                del result
                if number in (NUM_LONG // 5, NUM_LONG):
                    gc.collect()
                    held[number] = sys.getallocatedblocks()
            assert number == NUM_LONG
            assert dev.memory.snapshot().used_high_nbytes <= (depth + 1) * 512
            assert set(dev.live()) <= {"stream"}, dev.live()
            return pipeline.stats()

    stats = asyncio.run(main())
    early, late = held.values()
    assert late - early < NUM_LONG // 10  # an object kept of each item would be 8 000
    assert {stage.num_items for stage in stats.stages} == {NUM_LONG}
    by_name = {stage.name: stage for stage in stats.stages}
    assert by_name["work"].busy_s >= NUM_LONG * FAST_S * 0.99
    assert by_name["put"].nbytes == by_name["get"].nbytes == NUM_LONG * COPY_NBYTES


STAGES = ("source", "prepare", "put", "work", "get", "store", "consumer")


@pytest.mark.parametrize("slowest", STAGES)
def test_the_slowest_stage_is_the_bottleneck(
    slowest: str, run: Callable[[Callable[[], Awaitable[Any]]], Any]
) -> None:
    rates = {
        f"{rate}_rate": COPY_NBYTES / (SLOW_S if stage == slowest else FAST_S)
        for rate, stage in (("h2d", "put"), ("d2h", "get"))
    }

    async def main() -> sf.PipelineStats:
        async with virtual(rates=rates) as dev:
            slow, working = dev.stream("slow"), dev.stream("work")

            async def pass_time() -> None:
                """Virtual time passes for ops only, and stands still for worker threads."""
                await dev.launch(SPIN, SLOW_S, grid=1, block=1, stream=slow)

            async def slow_source() -> AsyncIterator[Any]:
                for item in source():
                    await pass_time()
                    yield item

            async def slow_pass(item: Any) -> Any:
                await pass_time()
                return item

            def host(stage: str) -> Any:
                return slow_pass if stage == slowest else lambda item: item

            pipeline = (
                dev.pipeline(slow_source if slowest == "source" else source, source_owns=True)
                .map_host(host("prepare"), name="prepare")
                .map(add_one(working, SLOW_S if slowest == "work" else FAST_S), name="work")
                .to_host()
                .map_host(host("store"), name="store")
            )
            async for _ in pipeline:
                if slowest == "consumer":
                    await pass_time()
            return pipeline.stats()

    def source() -> Iterator[Any]:
        for number in range(NUM_SHORT):
            yield np.full(SIZE, number, np.float32)

    stats = run(main)
    print(stats)
    assert stats.bottleneck == slowest
    assert stats.ideal_s == pytest.approx(NUM_SHORT * SLOW_S, rel=0.1)
    assert stats.overlap > 0.85
    others = [stage.busy_s for stage in stats.stages if stage.name != slowest]
    assert max(others) < stats.ideal_s / 4
