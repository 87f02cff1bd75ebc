"""The registry where devices are open: the current one is the task's own."""

from __future__ import annotations

import anyio
import pytest
from support import virtual

from streamflow.memory import (
    CudaMemoryResource,
    StatisticsResourceAdaptor,
    get_current_device_resource,
    get_per_device_resource,
    registry,
    reset_per_device_resource,
    set_current_device_resource,
    set_per_device_resource,
    using,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_set", {})
    monkeypatch.setattr(registry, "_initial", {})


def test_the_current_device_is_that_of_the_task(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            assert get_current_device_resource().device == 1  # entered last
            mine = CudaMemoryResource()
            with one.stream():
                assert get_current_device_resource().device == 0
                set_current_device_resource(mine)

                async def other():
                    with two.stream():
                        assert get_current_device_resource() is get_per_device_resource(1)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(other)
                assert get_current_device_resource() is mine
            assert get_per_device_resource(one) is get_per_device_resource(0) is mine
            assert get_per_device_resource(two) is not mine
            assert reset_per_device_resource(one) is mine

    run(main)


def test_a_resource_of_another_open_device_is_refused(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            bound, used = CudaMemoryResource(device=two), CudaMemoryResource()
            used.allocate(256, stream=two.stream())
            for resource in (bound, used):
                with pytest.raises(ValueError, match="made for device 1"):
                    set_per_device_resource(one, resource)
                set_per_device_resource(two, resource)
            reset_per_device_resource(two)

    run(main)


def test_blocks_stay_with_the_resource_they_came_from(run):
    async def main():
        async with virtual(0) as dev:
            mine, stream = CudaMemoryResource(), dev.stream()
            set_per_device_resource(dev, mine)
            block = get_per_device_resource(dev).allocate(256, stream=stream)
            reset_per_device_resource(dev)
            assert get_per_device_resource(dev) is not mine
            assert block.resource is mine
            block.resource.deallocate(block, stream=stream)

    run(main)


def test_arrays_that_live_keep_what_was_set_when_they_were_made(run):
    async def main():
        async with virtual(0) as dev:
            free = dev._core.backend.memory_info()[0]
            mine = CudaMemoryResource()
            set_per_device_resource(dev, mine)
            x = dev.full(64, 3, "u1")
            assert dev.sim.counters["allocate_linear_blocking"] == 1
            reset_per_device_resource(dev)
            y = dev.full(64, 4, "u1")
            assert dev.sim.counters["allocate_linear_blocking"] == 1
            assert set((await dev.get(x)).tolist()) == {3}
            assert set((await dev.get(y)).tolist()) == {4}
            x.free()
            await dev.synchronize()
            mine.trim()
            assert dev.sim.counters["free_linear_blocking"] == 1
            assert dev._core.backend.memory_info()[0] >= free - (2 << 20)

    run(main)


def test_on_the_simulator_a_resource_serves_one_loop_and_says_so(run):
    async def main():
        resource = CudaMemoryResource()
        async with virtual() as dev:
            resource.allocate(256, stream=dev.stream())

            async def elsewhere():
                async with virtual() as other:
                    with pytest.raises(ValueError, match="of another event loop"):
                        other.empty(64, memory=resource)

            await anyio.to_thread.run_sync(anyio.run, elsewhere)

    run(main)


def test_each_device_takes_from_the_innermost_resource_that_serves_it(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            counted = [
                StatisticsResourceAdaptor(CudaMemoryResource(device=dev)) for dev in (one, two)
            ]
            with using(counted[0]), using(counted[1]):
                kept = one.empty(64), one.empty(64), two.empty(64)
            assert [each.allocation_counts.current_count for each in counted] == [2, 1]
            del kept

    run(main)
