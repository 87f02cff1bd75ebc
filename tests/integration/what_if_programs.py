"""Programs whose times are known, for traces that are asked what would be if."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
from support import virtual

import streamflow as sf

Program = Callable[[sf.Device], Awaitable[None]]

WORK = sf.Kernel.from_source(
    'extern "C" __global__ void work(float* x, double seconds) {}',
    body=lambda x, seconds: None,
    cost=lambda x, seconds: float(seconds),
)
ADD = sf.Kernel.from_source(
    'extern "C" __global__ void add(const float* x, float* y, double seconds) {}',
    body=lambda x, y, seconds: None,
    cost=lambda x, y, seconds: float(seconds),
)
MIB = 1 << 20


async def traced(program: Program, **settings: Any) -> sf.Trace:
    """A trace of ``program`` on a device with these settings."""
    async with virtual(**settings) as dev:
        with dev.trace() as trace:
            await program(dev)
            await dev.synchronize()
    return trace


def span(trace: sf.Trace) -> float:
    starts = [op.start_s for op in trace.ops if op.start_s is not None]
    ends = [op.end_s for op in trace.ops if op.end_s is not None]
    return max(ends) - min(starts)


def ones(nbytes: int = MIB) -> np.ndarray[Any, Any]:
    return np.ones(nbytes // 4, np.float32)


async def independent(dev: sf.Device) -> None:
    arrays = [dev.empty(1000, np.float32) for _ in range(13)]
    await sf.gather(*[dev.launch(WORK, x, (1 + n % 5) * 1e-4) for n, x in enumerate(arrays)])


async def fork_join(dev: sf.Device) -> None:
    for _ in range(4):
        arrays = [dev.put(ones()) for _ in range(6)]
        for n, x in enumerate(arrays):
            dev.launch(WORK, x, (1 + n) * 1e-4)
        await sf.gather(*map(dev.get, arrays))


async def rounds(dev: sf.Device) -> None:
    """Each round ends when all lanes are idle, whichever is the last."""
    arrays = [dev.empty(1000, np.float32) for _ in range(7)]
    for _ in range(5):
        for n, x in enumerate(arrays):
            dev.launch(WORK, x, (1 + n) * 5e-5)
        await dev.synchronize()


async def some_on_streams(dev: sf.Device) -> None:
    """Lanes that are through long before the streams are looked at when these are."""
    named = [dev.stream(str(number)) for number in range(3)]
    arrays = [dev.zeros(1000, np.float32) for _ in range(9)]
    for _ in range(4):
        for n, x in enumerate(arrays):
            dev.launch(WORK, x, (1 + n % 4) * 1e-4, stream=named[n % 3] if n < 4 else None)
    await dev.synchronize()


def pipeline(depth: int, nbytes: int = MIB) -> Program:
    async def program(dev: sf.Device) -> None:
        items = [ones(nbytes)] * 12

        def work(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
            dev.launch(WORK, x, 1e-3)
            return x

        async for _ in dev.pipeline(items, depth=depth).map(work):
            pass

    return program


def host_stages(depth: int) -> Program:
    """A generator, a stage on the host before the device, and one after it."""

    async def program(dev: sf.Device) -> None:
        def work(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
            dev.launch(WORK, x, 1e-3)
            return x

        made = dev.pipeline((ones() for _ in range(12)), depth=depth)
        async for _ in made.map_host(np.negative).map(work).to_host().map_host(np.negative):
            pass

    return program


async def two_tasks(dev: sf.Device) -> None:
    import anyio

    async def one(seconds: float) -> None:
        for _ in range(4):
            x = dev.put(ones())
            dev.launch(WORK, x, seconds)
            await dev.get(x)

    async with anyio.create_task_group() as group:
        group.start_soon(one, 3e-4)
        group.start_soon(one, 5e-4)


async def streams(dev: sf.Device) -> None:
    own = [dev.stream() for _ in range(3)]
    arrays = [dev.put(ones()) for _ in range(6)]
    for _ in range(3):
        for n, x in enumerate(arrays):
            dev.launch(WORK, x, 1e-4 * (n + 1), stream=own[n % 3])
    await sf.gather(*map(dev.get, arrays))


async def host_tasks(dev: sf.Device) -> None:
    for _ in range(5):
        x = dev.put(ones())
        dev.launch(WORK, x, 2e-4)
        await dev.host(np.sum, x)


async def limited(dev: sf.Device) -> None:
    async with dev.scope(limit="2MiB"):
        for _ in range(10):
            x = dev.put(ones())
            dev.launch(WORK, x, 1e-4)
            await dev.get(x)


async def windowed(dev: sf.Device) -> None:
    x, stream = dev.empty(4, np.float32), dev.stream()
    for _ in range(1500):
        dev.launch(WORK, x, 1e-6, stream=stream)


def random_program(seed: int) -> Program:
    """Forty steps over some arrays: kernels, copies either way, fills, and some awaits."""

    async def program(dev: sf.Device) -> None:
        rng = Random(seed)
        num = rng.randint(2, 8)
        arrays = [dev.put(ones(rng.choice([400, 1 << 17, MIB]))) for _ in range(num)]
        for _ in range(40):
            draw = rng.random()
            if draw < 0.7:
                x, y = rng.sample(arrays, 2)
                dev.launch(ADD, x, y, rng.choice([1, 2, 3, 5]) * 1e-4)
            elif draw < 0.78:
                arrays[rng.randrange(num)] = dev.put(ones())
            elif draw < 0.86:
                dev.get(rng.choice(arrays))
            elif draw < 0.92:
                arrays[rng.randrange(num)] = dev.zeros(1 << 18, np.float32)
            elif draw < 0.95:
                await sf.gather(*map(dev.get, arrays))
            else:
                await dev.get(rng.choice(arrays))
        await sf.gather(*map(dev.get, arrays))

    return program
