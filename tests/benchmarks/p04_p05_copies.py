"""P4 and P5, a preview: ``put`` and ``get`` of 256 MiB against pinned and pageable copies."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample, interleave
from tests.benchmarks.rig import Bare, device, warm


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P4P5", "put and get of a pageable float32 array")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    nbytes = options.sized(256 << 20, 1 << 20)
    num_reps = options.sized(max(5, min(options.num_reps, 10)), 2)
    source = np.arange(nbytes // 4, dtype=np.float32)
    result = np.zeros_like(source)  # touched
    async with device(options) as dev:
        await warm(dev)
        on_device = dev.put(source)
        await on_device
        found: dict[str, list[float]] = {"put, out=": [], "get, out=": [], "get": []}
        for rep in range(num_reps + 1):
            for name in found:
                start = time.perf_counter()
                if name == "put, out=":
                    await dev.put(source, out=on_device)
                elif name == "get, out=":
                    await dev.get(on_device, out=result)
                else:
                    await dev.get(on_device)
                if rep:
                    found[name].append(nbytes / (time.perf_counter() - start) / 1e9)
        if not np.array_equal(source, result):
            raise AssertionError("what came back is not what was sent")
        if options.is_cuda:
            found |= interleave(num_reps, _peers(dev, source, result, on_device.address, nbytes))
        median = {n: report.add(n, Sample(tuple(v), "GB/s")) for n, v in found.items()}
        if options.is_cuda:
            put, get = median["put, out="], median["get, out="]
            report.target("put over pinned", put / median["pinned in"], "x", at_least=0.90)
            report.target("put over pageable", put / median["pageable in"], "x", at_least=3)
            report.target("get over pinned", get / median["pinned out"], "x", at_least=0.80)
            report.target("get over pageable", get / median["pageable out"], "x", at_least=5)


def _peers(
    dev: Any, source: Any, result: Any, address: int, nbytes: int
) -> list[tuple[str, Callable[[], float]]]:
    bare = Bare(dev)
    driver, stream = bare.driver, bare.stream
    handle = stream.handle
    pinned = bare.check(driver.cuMemHostAlloc(nbytes, 0))
    ctypes.memset(int(pinned), 1, nbytes)

    def timed(call: Callable[[], tuple[Any, ...]]) -> float:
        start = time.perf_counter()
        bare.check(call())
        stream.sync()
        return nbytes / (time.perf_counter() - start) / 1e9

    there, back = source.ctypes.data, result.ctypes.data
    return [
        (
            "pinned in",
            lambda: timed(lambda: driver.cuMemcpyHtoDAsync(address, pinned, nbytes, handle)),
        ),
        (
            "pinned out",
            lambda: timed(lambda: driver.cuMemcpyDtoHAsync(pinned, address, nbytes, handle)),
        ),
        ("pageable in", lambda: timed(lambda: driver.cuMemcpyHtoD(address, there, nbytes))),
        ("pageable out", lambda: timed(lambda: driver.cuMemcpyDtoH(back, address, nbytes))),
    ]
