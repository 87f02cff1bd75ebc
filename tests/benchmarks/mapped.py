"""mapped: a small input read from the host by the kernel against put + launch, end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any

import numpy as np

import streamflow as sf
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device

_SIZES = tuple(64 << (2 * step) for step in range(8))  # 64 B to 1 MiB
_PASSES = (1, 8)

Round = Callable[[], Awaitable[Any]]


@sf.kernel(
    """extern "C" __global__ void total(const volatile float* x, float* y, int n, int passes) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float sum = 0.0f;
        for (int k = 0; k < passes; k++) sum += x[i];
        y[i] = sum;
    }"""
)
def total(x: Any, y: Any, n: int, passes: int) -> None:
    y[:n] = np.float32(passes) * x[:n]


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("mapped", "write an input, run a kernel that reads it, see its end; per round")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    sizes = _SIZES[:2] if options.is_tiny else _SIZES
    num_rounds = options.sized(300, 3)
    async with device(options) as dev:
        y = dev.zeros(max(sizes) // 4, np.float32)
        for passes in _PASSES:
            pays_to = 0
            for nbytes in sizes:
                rounds = await _cases(dev, y, nbytes, passes)
                found: dict[str, list[float]] = {name: [] for name in rounds}
                for _ in range(options.num_reps + 1):  # in turn, so that drift meets all of them
                    for name, one in rounds.items():
                        found[name].append(await _round_us(one, num_rounds))
                median = {
                    name: report.add(
                        f"{name}, {nbytes} B, read {passes}x", Sample(tuple(times[1:]), "us")
                    )
                    for name, times in found.items()
                }
                if median["mapped"] < median["put"]:
                    pays_to = nbytes
            report.note(f"read {passes}x, mapped memory wins up to {pays_to} B")
        y.free()


async def _cases(dev: sf.Device, y: Any, nbytes: int, passes: int) -> dict[str, Round]:
    num = nbytes // 4
    source = np.arange(num, dtype=np.float32)
    x, m = dev.zeros(num, np.float32), await dev.mapped(num, np.float32)
    # Of the same memory: its block goes back when the last round has gone.
    held = await dev.mapped(num, np.float32)
    pinned = held.host

    async def put() -> None:
        dev.put(source, out=x)
        await dev.launch(total, x, y, num, passes)

    async def put_pinned() -> None:
        pinned[:] = source
        dev.put(pinned, out=x)
        await dev.launch(total, x, y, num, passes)

    async def mapped() -> None:
        m.host[:] = source
        await dev.launch(total, m, y, num, passes)

    return {"put": put, "put of pinned memory": put_pinned, "mapped": mapped}


async def _round_us(one: Round, num: int) -> float:
    start = perf_counter_ns()
    for _ in range(num):
        await one()
    return (perf_counter_ns() - start) / num / 1e3
