"""Every memory resource on the GPU: it allocates, computes and frees, or says why it can't.

With ``STREAMFLOW_RESULTS`` set, the table goes to that file as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamflow as sf
from streamflow import memory
from streamflow.backends.base import Access, KernelSpec, Parameter
from streamflow.memory import Location, MemoryAdvice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

NUM = 1 << 16
NBYTES = 4 * NUM

ADD_ONE = KernelSpec(
    name="add_one",
    parameters=(
        Parameter("x", "unsigned int*", np.dtype(np.uint32), Access.READ_WRITE),
        Parameter("n", "unsigned long long", np.dtype(np.uint64), None),
    ),
    source="""extern "C" __global__ void add_one(unsigned int* x, unsigned long long n) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n) x[i] += 1;
    }""",
)


def callback(dev: sf.Device) -> Any:
    backend = dev._core.backend
    pool = backend.create_pool(release_threshold_nbytes=0)
    return memory.CallbackMemoryResource(
        lambda stream, nbytes, alignment, arg: backend.allocate(pool, nbytes, stream),
        lambda stream, address, nbytes, alignment, arg: backend.deallocate(address, stream),
    )


def over(kind: Callable[..., Any], *options: Any) -> Callable[[sf.Device], Any]:
    return lambda dev: kind(memory.CudaMemoryResource(), *options)


MAKERS: dict[str, Callable[[sf.Device], Any]] = {
    "CudaMemoryResource": lambda dev: memory.CudaMemoryResource(),
    "CudaAsyncMemoryResource": lambda dev: memory.CudaAsyncMemoryResource(),
    "CudaAsyncMemoryResource(enable_ipc=True)": lambda dev: memory.CudaAsyncMemoryResource(
        enable_ipc=True
    ),
    "CudaAsyncViewMemoryResource": lambda dev: memory.CudaAsyncViewMemoryResource(
        dev._core.backend.create_pool(release_threshold_nbytes=0)
    ),
    "CudaAsyncManagedMemoryResource": lambda dev: memory.CudaAsyncManagedMemoryResource(),
    "ManagedMemoryResource": lambda dev: memory.ManagedMemoryResource(),
    "PinnedHostMemoryResource": lambda dev: memory.PinnedHostMemoryResource(),
    "SystemMemoryResource": lambda dev: memory.SystemMemoryResource(),
    "SamHeadroomMemoryResource": lambda dev: memory.SamHeadroomMemoryResource("1GiB"),
    "CallbackMemoryResource": callback,
    "PoolMemoryResource": over(memory.PoolMemoryResource, "64MiB"),
    "ArenaMemoryResource": over(memory.ArenaMemoryResource, "64MiB"),
    "FixedSizeMemoryResource": over(memory.FixedSizeMemoryResource),
    "BinningMemoryResource": over(memory.BinningMemoryResource, 16, 22),
}


def why_not(name: str, dev: sf.Device) -> str | None:
    """The words of the documented error, where this device has not got what it takes."""
    has = dev._core.backend.memory_support()
    if name.startswith("CudaAsync") and not has.has_pools:
        return "no stream-ordered memory pools"
    if "enable_ipc" in name and not has.pool_handle_types:
        return "shared with other processes"
    if name == "CudaAsyncManagedMemoryResource" and not has.has_concurrent_managed_access:
        return "concurrent managed access"
    if name == "CudaAsyncManagedMemoryResource" and not has.has_managed_pools:
        return "CUDA 13"
    if name == "ManagedMemoryResource" and not has.has_managed_memory:
        return "no managed memory"
    if name in ("SystemMemoryResource", "SamHeadroomMemoryResource"):
        return None if has.has_pageable_access else "plain memory"
    return None


@pytest.fixture(scope="module")
def table() -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    yield rows
    target = os.environ.get("STREAMFLOW_RESULTS")
    if target:
        Path(target).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def add_one(dev: sf.Device, address: int, stream: Any) -> None:
    backend = dev._core.backend
    kernel = backend.load_kernel_blocking(ADD_ONE)
    config = backend.launch_config((NUM // 256, 1, 1), (256, 1, 1), 0)
    backend.launch(stream, config, kernel, address, NUM)


def read_back(dev: sf.Device, address: int, stream: Any) -> np.ndarray[Any, Any]:
    backend = dev._core.backend
    host = backend.allocate_pinned_blocking(NBYTES)
    try:
        backend.copy_d2h(host, address, NBYTES, stream)
        stream.sync()
        return np.ctypeslib.as_array((ctypes.c_uint32 * NUM).from_address(host)).copy()
    finally:
        backend.free_pinned_blocking(host)


@pytest.mark.parametrize("name", list(MAKERS))
def test_it_allocates_computes_and_frees_or_says_why_not(
    name: str, table: list[dict[str, Any]]
) -> None:
    row: dict[str, Any] = {
        "resource": name,
        "allocates": False,
        "computes": False,
        "frees": False,
        "error": None,
    }
    table.append(row)

    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            missing = why_not(name, dev)
            try:
                resource = MAKERS[name](dev)
                stream = dev.stream("S")
                block = resource.allocate(NBYTES, stream=stream)
            except sf.DeviceError as error:
                row["error"] = f"{type(error).__name__}: {error}"
                if missing is None or missing not in str(error):
                    raise
                return
            assert missing is None
            row["allocates"] = True
            assert block.address % 256 == 0
            backend, raw = dev._core.backend, stream.backend_stream
            backend.fill(block.address, b"\x29\x00\x00\x00", NUM, raw)
            add_one(dev, block.address, raw)
            found = read_back(dev, block.address, raw)
            assert (found == 42).all()
            row["computes"] = True
            if resource.is_host_accessible:
                there = (ctypes.c_uint32 * NUM).from_address(block.address)
                assert there[NUM - 1] == 42
                there[0] = 7
                add_one(dev, block.address, raw)
                assert read_back(dev, block.address, raw)[0] == 8
            attributes = backend.pointer_attributes(block.address)
            assert attributes.is_device_accessible or "System" in name or "Sam" in name
            resource.deallocate(block, stream=stream)
            with pytest.raises(ValueError, match="freed already"):
                resource.deallocate(block, stream=stream)
            again = resource.allocate(NBYTES, stream=stream, alignment=512)
            assert again.address % 512 == 0
            backend.fill(again.address, b"\x29\x00\x00\x00", NUM, raw)
            resource.deallocate(again, stream=stream)
            one = resource.allocate_sync(NBYTES)
            backend.fill(one.address, b"\x01", NBYTES, raw)
            resource.deallocate_sync(one)
            await stream.synchronize()
            for _ in range(2):
                resource.trim()
                dev._core.space.wait_released_blocking()
            live = getattr(resource, "_live", {})
            assert not live
            row["frees"] = True

    asyncio.run(main())


def test_a_deferred_free_does_not_wait_for_the_device() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            resource = memory.CudaMemoryResource()
            stream, busy = dev.stream("S"), dev.stream("busy")
            warm = resource.allocate(NBYTES, stream=stream)
            add_one(dev, warm.address, stream.backend_stream)
            await dev.launch(SPIN, 0.0, grid=1, block=1, stream=stream)  # compiled from now on
            dev.launch(SPIN, 0.5, grid=1, block=1, stream=busy)
            dev.launch(SPIN, 0.2, grid=1, block=1, stream=stream)
            done = busy.record()
            resource.deallocate(warm, stream=stream)
            resource.trim()
            assert not done.done()  # freeing waited for neither
            assert resource.pending_nbytes == NBYTES
            await stream.synchronize()
            resource.trim()
            assert not done.done()
            assert resource.pending_nbytes == 0
            await done
            dev._core.space.wait_released_blocking()

    asyncio.run(main())


SPIN = sf.Kernel.from_source(
    """extern "C" __global__ void spin(double seconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }
        while (now - start < (long long)(seconds * 1e9));
    }"""
)


def test_managed_memory_takes_prefetches_and_advice_or_says_why_not() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            has = dev._core.backend.memory_support()
            resource = memory.ManagedMemoryResource()
            stream = dev.stream("S")
            if not has.has_managed_memory:
                with pytest.raises(sf.DeviceError, match="no managed memory"):
                    resource.allocate(NBYTES, stream=stream)
                return
            block = resource.allocate(NBYTES, stream=stream)
            if has.has_concurrent_managed_access:
                resource.prefetch(block, dev, stream)
                resource.prefetch(block, "host", stream)
                resource.advise(block, MemoryAdvice.READ_MOSTLY)
                resource.advise(block, MemoryAdvice.PREFERRED_LOCATION, Location("host"))
            else:
                with pytest.raises(sf.DeviceError, match="concurrent managed access"):
                    resource.prefetch(block, dev, stream)
            add_one(dev, block.address, stream.backend_stream)
            await stream.synchronize()
            resource.deallocate(block, stream=stream)

    asyncio.run(main())


def test_an_initial_size_and_a_bound_are_kept() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            resource = memory.CudaAsyncMemoryResource("64MiB", max_size="128MiB")
            stream = dev.stream("S")
            block = resource.allocate(NBYTES, stream=stream)
            info = dev._core.backend.pool_info(resource.pool_handle())
            assert info.reserved_nbytes >= 64 << 20
            with pytest.raises(sf.OutOfDeviceMemory):
                resource.allocate(1 << 30, stream=stream)
            resource.deallocate(block, stream=stream)
            await stream.synchronize()
            default = dev._core.backend.pool_info(dev._core.backend.default_pool())
            assert default.release_threshold_nbytes == 0  # left as found

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [2**62, 2**40])
@pytest.mark.parametrize(
    "make",
    [memory.CudaMemoryResource, memory.CudaAsyncMemoryResource, memory.PinnedHostMemoryResource],
)
def test_too_much_is_out_of_memory_and_not_sticky(make: Any, nbytes: int) -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            resource = make()
            stream = dev.stream("S")
            with pytest.raises(sf.OutOfDeviceMemory):
                resource.allocate(nbytes, stream=stream)
            block = resource.allocate(NBYTES, stream=stream)
            add_one(dev, block.address, stream.backend_stream)
            await stream.synchronize()
            resource.deallocate(block, stream=stream)
            assert dev.is_healthy

    asyncio.run(main())
