"""What only a GPU can show of pinned and mapped memory: who is held up, what the driver says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamflow as sf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

NUM = 1 << 20

SPIN = sf.Kernel.from_source(
    """extern "C" __global__ void spin(double seconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }
        while (now - start < (long long)(seconds * 1e9));
    }"""
)
SUM = sf.Kernel.from_source(
    """extern "C" __global__ void sum(const float* x, float* y, int n) {
        float total = 0.0f;
        for (int i = 0; i < n; i++) total += x[i];
        *y = total;
    }"""
)


def floats() -> Any:
    return np.arange(NUM, dtype=np.float32)


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_r1_pinning_and_unpinning_hold_up_no_loop() -> None:
    """Both may wait for a running kernel: not so the loop."""

    async def main() -> None:
        x, other = floats(), floats()
        async with sf.Device(backend="cuda") as dev:
            await dev.launch(SPIN, 0.0, grid=1, block=1)
            pin, stream = await dev.pin(x), dev.stream()
            held = dev.launch(SPIN, 1.0, grid=1, block=1, stream=stream)
            unpinned, late = pin.unpin(), dev.pin(other)
            await turns(200)
            assert not held.done()
            await unpinned
            await (await late).unpin()
            await held

    asyncio.run(main())


def test_r1_copies_between_mapped_and_pinned_memory_hold_up_no_loop() -> None:
    async def main() -> None:
        x = np.zeros(NUM, np.float32)
        async with sf.Device(backend="cuda") as dev:
            m = await dev.mapped(NUM, np.float32)
            m.host[:] = floats()
            await dev.launch(SPIN, 0.0, grid=1, block=1)
            await dev.get(m)
            async with dev.pin(x):
                stream = dev.stream()
                held = dev.launch(SPIN, 1.0, grid=1, block=1, stream=stream)
                out = dev.get(m, out=x, stream=stream)
                assert not held.done()
                await out
                np.testing.assert_array_equal(x, floats())
                x[:] = 2
                held = dev.launch(SPIN, 1.0, grid=1, block=1, stream=stream)
                back = dev.put(x, out=m, stream=stream)
                assert not held.done()
                await back
            assert (m.host == 2).all()
            m.free()

    asyncio.run(main())


def test_a_kernel_reads_mapped_memory_of_every_size_class() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            y = dev.zeros(1, np.float32)
            for num in (1, 100, 1000, 16 << 10, 100_000, 1 << 20):
                m = await dev.mapped(num, np.float32)
                m.host[:] = 1
                dev.launch(SUM, m, y, num, grid=1, block=1)
                assert (await dev.get(y))[0] == num
                m.free()
            y.free()

    asyncio.run(main())


def test_what_the_driver_has_page_locked_says_so(tmp_path: Path) -> None:
    """Read-only files included, where the system takes them."""

    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            path = tmp_path / "data"
            floats().tofile(path)
            for x in (floats(), np.memmap(path, np.float32, "r"), np.memmap(path, np.float32, "c")):
                pin = dev.pin(x)
                try:
                    await pin
                except sf.DeviceError as refused:
                    said = str(refused)
                else:
                    said = ""
                if isinstance(x, np.memmap) and "page-lock" in said:
                    continue
                assert not said
                kind = sf.memory.pointer_attributes(x.ctypes.data, device=dev).kind
                assert kind is sf.memory.MemoryKind.HOST
                np.testing.assert_array_equal(await dev.get(dev.put(x)), x)
                await pin.unpin()

    asyncio.run(main())


def test_memory_that_the_driver_does_not_own_is_refused_once_and_stays_usable() -> None:
    async def main() -> None:
        x = floats()
        async with sf.Device(backend="cuda") as dev:
            backend = dev._core.backend
            with pytest.raises(sf.DeviceError, match="not registered"):
                try:
                    backend.unregister_host_blocking(x.ctypes.data)
                except Exception as error:
                    raise backend.translate(error, "unpinning") from error
            async with dev.pin(x):
                np.testing.assert_array_equal(await dev.get(dev.put(x)), x)

    asyncio.run(main())
