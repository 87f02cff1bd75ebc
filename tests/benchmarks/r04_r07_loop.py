"""Rules R4 and R7 in figures: an await of one op of many, and a loop that never stands still."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device, noop, spin, warm


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("R4R7", "awaiting the kth of many; 5 000 launches behind a stalled kernel")
    asyncio.run(_exactness(options, report))
    asyncio.run(_heartbeat(options, report))
    return report


async def _exactness(options: Options, report: Report) -> None:
    num_ops, kth, each_s = options.sized(100, 20), options.sized(10, 3), 2e-3
    async with device(options) as dev:
        await warm(dev)
        stream = dev.stream("exact")
        taken = []
        for _ in range(options.sized(5, 1)):
            start = time.perf_counter()
            ops = [
                dev.launch(spin, int(each_s * 1e9), grid=1, block=1, stream=stream)
                for _ in range(num_ops)
            ]
            await ops[kth - 1]
            taken.append((time.perf_counter() - start) * 1e3)
            await stream.synchronize()
        sample = Sample(tuple(taken), "ms")
        found = report.add(f"await op {kth} of {num_ops}, each of 2 ms", sample)
        late_us = (found - kth * each_s * 1e3) * 1e3
        report.target("how late it is known", late_us, "us", at_most=2000)
        stream.close()


async def _heartbeat(options: Options, report: Report) -> None:
    num_launches = options.sized(5_000, 1_500)
    stall_s = 0.02 if options.is_tiny else 1.0
    async with device(options) as dev:
        await warm(dev)
        x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
        stream = dev.stream("stalled")
        await dev.launch(noop, x, y, 1, stream=stream)
        gaps, calls, totals = [], [], []
        for _ in range(options.sized(5, 1)):
            beats = [time.perf_counter()]
            beating = asyncio.create_task(_beat(beats))
            await asyncio.sleep(0)
            start = time.perf_counter()
            dev.launch(spin, int(stall_s * 1e9), grid=1, block=1, stream=stream)
            longest = 0.0
            for number in range(num_launches):
                before = time.perf_counter()
                op = dev.launch(noop, x, y, 5, stream=stream)
                longest = max(longest, time.perf_counter() - before)
                if number % 10 == 9:
                    await asyncio.sleep(0)
            submitted = time.perf_counter() - start
            await op
            totals.append(time.perf_counter() - start)
            beating.cancel()
            gaps.append(max(b - a for a, b in pairwise(beats)) * 1e3)
            calls.append(longest * 1e3)
        report.add(
            f"{num_launches} launches behind a {stall_s:g} s kernel", Sample((submitted,), "s")
        )
        report.add("until all were done", Sample(tuple(totals), "s"))
        report.add("longest single call of dev.launch", Sample(tuple(calls), "ms"))
        gap = report.add("longest gap between two turns of the loop", Sample(tuple(gaps), "ms"))
        report.target("the loop's longest gap", gap, "ms", at_most=50)
        stream.close()


async def _beat(beats: list[float]) -> Any:
    while True:
        await asyncio.sleep(0)
        beats.append(time.perf_counter())
