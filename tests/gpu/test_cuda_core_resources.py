"""cuda.core's own resources and buffers, with ours underneath and on top."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import streamflow as sf
from streamflow import memory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

NBYTES = 1 << 20


def on_device(main: Any) -> None:
    async def run() -> None:
        async with sf.Device(backend="cuda") as dev:
            await main(dev)

    asyncio.run(run())


def used(dev: sf.Device, resource: Any) -> int:
    return int(dev._core.backend.pool_info(resource.pool_handle()).used_nbytes)


def test_cuda_cores_buffers_lie_in_our_memory() -> None:
    async def main(dev: sf.Device) -> None:
        ours = memory.CudaAsyncMemoryResource()
        stream = dev.stream("S")
        raw = stream.backend_stream
        theirs = memory.to_cuda_core(ours)
        one, two = (theirs.allocate(NBYTES, stream=raw) for _ in range(2))
        assert one.memory_resource is theirs
        assert (one.is_device_accessible, one.is_host_accessible) == (True, False)
        assert one.device_id == 0
        assert used(dev, ours) == 2 * NBYTES
        one.fill(42, stream=raw)
        two.copy_from(one, stream=raw)
        made = one.copy_to(stream=raw)  # cuda.core allocates this one itself, from ours
        assert made.memory_resource is theirs
        assert used(dev, ours) == 3 * NBYTES
        await stream.synchronize()
        for buffer in (one, two, made):
            buffer.close(raw)
        ours.trim()
        assert used(dev, ours) == 0

    on_device(main)


def test_a_collected_buffer_is_freed_by_our_next_call() -> None:
    async def main(dev: sf.Device) -> None:
        ours = memory.CudaAsyncMemoryResource()
        stream = dev.stream("S")
        theirs = memory.to_cuda_core(ours)
        buffer = theirs.allocate(NBYTES, stream=stream.backend_stream)
        buffer.fill(1, stream=stream.backend_stream)
        del buffer
        gc.collect()
        assert used(dev, ours) == NBYTES
        ours.deallocate(ours.allocate(256, stream=stream), stream=stream)
        assert used(dev, ours) == 0
        await stream.synchronize()

    on_device(main)


def test_equal_buffers_are_not_mixed_up() -> None:
    async def main(dev: sf.Device) -> None:
        ours = memory.CudaAsyncMemoryResource()
        raw = dev.stream("S").backend_stream
        theirs = memory.to_cuda_core(ours)
        one = theirs.allocate(NBYTES, stream=raw)
        one.close()
        two = theirs.allocate(NBYTES, stream=raw)
        one.close()
        two.fill(1, stream=raw)
        raw.sync()
        assert used(dev, ours) == NBYTES
        two.close()
        ours.trim()
        assert used(dev, ours) == 0

    on_device(main)


def test_no_bytes_and_a_buffer_that_outlives_its_device() -> None:
    kept: list[Any] = []

    async def main(dev: sf.Device) -> None:
        theirs = memory.to_cuda_core(memory.CudaMemoryResource())
        raw = dev.stream("S").backend_stream
        empty = theirs.allocate(0, stream=raw)
        assert int(empty.handle or 0) == 0
        empty.close()
        kept.append(theirs.allocate(NBYTES, stream=raw))

    on_device(main)
    kept.pop().close()
    gc.collect()


def their_resources() -> dict[str, Any]:
    from cuda.core import (
        Device,
        DeviceMemoryResource,
        DeviceMemoryResourceOptions,
        LegacyPinnedMemoryResource,
        PinnedMemoryResource,
    )

    return {
        "device pool": lambda: DeviceMemoryResource(
            Device(0), options=DeviceMemoryResourceOptions()
        ),
        "pinned pool": PinnedMemoryResource,
        "legacy pinned": LegacyPinnedMemoryResource,
    }


@pytest.mark.parametrize("name", ["device pool", "pinned pool", "legacy pinned"])
@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "under a pool"])
def test_cuda_cores_resource_is_an_upstream_of_ours(name: str, pooled: bool) -> None:
    async def main(dev: sf.Device) -> None:
        theirs = their_resources()[name]()
        inner = memory.from_cuda_core(theirs, device=dev)
        assert inner.is_stream_ordered == name.endswith("pool")
        resource = memory.PoolMemoryResource(inner, "8MiB") if pooled else inner
        stream = dev.stream("S")
        backend, raw = dev._core.backend, stream.backend_stream
        blocks = [resource.allocate(NBYTES, stream=stream) for _ in range(3)]
        assert len({block.address for block in blocks}) == 3
        for block in blocks:
            assert block.address % 256 == 0
            if name != "pinned pool":  # theirs lets no device in: a memset is refused
                backend.fill(block.address, b"\x07", NBYTES, raw)
        for block in blocks:
            resource.deallocate(block, stream=stream)
        await stream.synchronize()
        resource.trim()
        inner.trim()
        dev._core.space.wait_released_blocking()
        assert not inner._live or pooled

    on_device(main)


def test_the_devices_default_pool_is_left_as_found() -> None:
    async def main(dev: sf.Device) -> None:
        backend = dev._core.backend
        before = backend.pool_info(backend.default_pool()).release_threshold_nbytes
        ours = memory.CudaAsyncMemoryResource()
        stream = dev.stream("S")
        buffer = memory.to_cuda_core(ours).allocate(NBYTES, stream=stream.backend_stream)
        buffer.close()
        ours.trim()
        after = backend.pool_info(backend.default_pool()).release_threshold_nbytes
        assert after == before

    on_device(main)
