"""Arrays counted, limited and logged by adaptors, per resource and per task."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support import Opener, turns, until, virtual

import streamflow as sf
from streamflow.memory import (
    Counters,
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    LimitingResourceAdaptor,
    LogAction,
    LoggingResourceAdaptor,
    PoolMemoryResource,
    StatisticsResourceAdaptor,
    TrackingResourceAdaptor,
    read_log,
    using,
)

MIB = 1 << 20


def test_each_task_counts_the_arrays_it_makes(run: Any, open_device: Opener) -> None:
    async def worker(dev: sf.Device, stats: StatisticsResourceAdaptor, nbytes: int) -> None:
        with stats.counters() as counters:
            for _ in range(3):
                array = dev.zeros(nbytes, np.uint8)
                await array
                more = dev.put(np.full(nbytes, 7, np.uint8))
                await anyio.lowlevel.checkpoint()
                assert (await dev.get(more))[0] == 7
                array.free()
                more.free()
        await dev.synchronize()
        assert counters.total_bytes == 6 * nbytes
        assert (counters.peak_bytes, counters.peak_count) == (2 * nbytes, 2)
        assert (counters.current_bytes, counters.current_count) == (0, 0)

    async def main() -> None:
        stats = StatisticsResourceAdaptor(CudaAsyncMemoryResource())
        async with open_device() as dev:
            with using(stats):
                async with anyio.create_task_group() as group:
                    for nbytes in (1000, 10_000, 100_000):
                        group.start_soon(worker, dev, stats, nbytes)
            assert stats.resource_counts.total_bytes == 666_000
            assert stats.resource_counts.current_bytes == 0

    run(main)


def test_an_array_that_was_waited_for_counts_for_the_task_that_waited(run: Any) -> None:
    async def main() -> None:
        limited = LimitingResourceAdaptor(CudaMemoryResource(), MIB)
        stats = StatisticsResourceAdaptor(limited)
        found: list[Counters] = []

        async def want(dev: sf.Device) -> None:
            with stats.counters() as counters:
                found.append(counters)
                array = await dev.alloc(MIB, np.uint8)
            await array

        async with virtual() as dev:
            with using(stats), stats.counters() as mine:
                held = dev.empty(MIB, np.uint8)
            async with anyio.create_task_group() as group:
                with using(stats):
                    group.start_soon(want, dev)
                await until(lambda: found)
                await turns()
                assert found[0].total_bytes == 0
                held.free()  # serves the waiter, from this task
            assert found[0].total_bytes == MIB
            assert (mine.total_bytes, mine.current_bytes) == (MIB, 0)
            gc.collect()
            await dev.synchronize()
            assert found[0].current_bytes == limited.get_allocated_bytes() == 0

    run(main)


def test_a_limit_of_a_device_is_told_of(run: Any, open_device: Opener) -> None:
    async def main() -> None:
        limited = LimitingResourceAdaptor(CudaMemoryResource(), MIB)
        async with open_device() as dev:
            one = dev.empty(MIB // 2, np.uint8, memory=limited)
            with pytest.raises(sf.OutOfDeviceMemory, match="limit of 1048576 bytes"):
                dev.empty(MIB, np.uint8, memory=limited)
            one.free()
            dev.empty(MIB, np.uint8, memory=limited).free()

    run(main)


def test_a_program_is_logged(run: Any, open_device: Opener, tmp_path: Path) -> None:
    async def main() -> None:
        logged = LoggingResourceAdaptor(
            PoolMemoryResource(CudaMemoryResource(), 4 * MIB), tmp_path / "log.csv"
        )
        async with open_device() as dev:
            with using(logged):
                for turn in range(5):
                    array = dev.put(np.arange(1000 * (turn + 1)))
                    assert (await dev.get(array))[-1] == 1000 * (turn + 1) - 1
                    del array
            await dev.synchronize()
        logged.close()
        records = read_log(logged.get_file_name())
        made = [each for each in records if each.action is LogAction.ALLOCATE]
        assert [each.nbytes for each in made] == [8000 * (turn + 1) for turn in range(5)]
        assert len(records) == 10

    run(main)


def test_cr6_arrays_in_cycles_with_the_collector_at_every_allocation(run: Any) -> None:
    """Dropped arrays are freed from inside of other calls, through every adaptor."""

    class Holder:
        def __init__(self, array: sf.DeviceArray) -> None:
            self.array = array
            self.itself = self

    async def main() -> None:
        limited = LimitingResourceAdaptor(
            PoolMemoryResource(CudaMemoryResource(), 16 * MIB), "8MiB"
        )
        tracking = TrackingResourceAdaptor(limited)
        stats = StatisticsResourceAdaptor(tracking)
        async with virtual() as dev:
            with using(stats):
                threshold = gc.get_threshold()
                gc.set_threshold(1, 1, 1)
                try:
                    for turn in range(100):
                        holder = Holder(dev.zeros(64 * (turn + 1), np.uint8))
                        counts = stats.resource_counts
                        assert counts.current_bytes == tracking.get_allocated_bytes()
                        assert counts.current_count == len(tracking.get_outstanding_allocations())
                        assert limited.get_allocated_bytes() >= counts.current_bytes
                        if turn % 10 == 0:
                            assert not (await dev.get(holder.array)).any()
                    del holder
                finally:
                    gc.set_threshold(*threshold)
            gc.collect()
            await dev.synchronize()
            assert not tracking.get_outstanding_allocations()
            assert stats.resource_counts.current_bytes == limited.get_allocated_bytes() == 0
            assert stats.resource_counts.total_count == 100

    run(main)


def test_what_is_out_is_listed_by_the_line_that_made_it(run: Any) -> None:
    async def main() -> None:
        tracking = TrackingResourceAdaptor(CudaMemoryResource())
        async with virtual() as dev:
            array = dev.empty(100, np.uint8, memory=tracking)
            (known,) = tracking.get_outstanding_allocations().values()
            assert known.line.startswith("test_accounting.py:")
            array.free()
            assert not tracking.get_outstanding_allocations()

    run(main)
