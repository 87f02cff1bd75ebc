"""P10: what an op costs with 10 000 of them awaited at once against 100, and memory over many."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import streamflow as sf
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device, spin, warm

_NUM_STREAMS = 8


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P10", "awaits at once, one task each, spread over lanes and over streams")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    few, many = options.sized(100, 20), options.sized(10_000, 200)
    num_reps = options.sized(max(5, options.num_reps // 2), 1)
    num_grown = options.sized(1_000_000, 1000)
    async with device(options, sim=sf.SimOptions(clock="virtual")) as dev:
        await warm(dev)
        streams = [dev.stream(f"own{number}") for number in range(_NUM_STREAMS)]
        for where, places in (("lanes", [None]), ("8 streams", streams)):
            costs = {}
            for num in (few, many):
                taken = []
                for rep in range(num_reps + 1):
                    # As many ops in all, so that what the host does meanwhile hits both alike.
                    start = time.perf_counter()
                    for _ in range(many // num):
                        await _await_at_once(dev, num, places)
                    if rep:
                        taken.append((time.perf_counter() - start) / many * 1e6)
                costs[num] = report.add(
                    f"{where}: {num} at once", Sample(tuple(taken), "us per op")
                )
            ratio = costs[many] / costs[few]
            report.target(f"{where}: {many} at once over {few}, per op", ratio, "x", at_most=2)
        gc.collect()
        rss_mib = _rss_mib()
        for _ in range(num_grown // few):
            await _await_at_once(dev, few, streams)
        grown = report.add(
            f"memory grown by {num_grown} ops", Sample((_rss_mib() - rss_mib,), "MiB")
        )
        report.target(f"memory grown by {num_grown} ops", grown, "MiB", at_most=50)
        for stream in streams:
            stream.close()


async def _await_at_once(dev: Any, num: int, streams: list[Any]) -> None:
    async def one(stream: Any) -> None:
        await dev.launch(spin, 0, grid=1, block=1, stream=stream)

    async with asyncio.TaskGroup() as group:
        for place in range(num):
            group.create_task(one(streams[place % len(streams)]))


def _rss_mib() -> float:
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return float("nan")
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def profile(num: int = 10_000) -> None:
    """One round on the simulator, for a profiler to run."""

    async def main() -> None:
        async with device(Options("sim"), sim=sf.SimOptions(clock="virtual")) as dev:
            await _await_at_once(dev, num, [None])

    asyncio.run(main())
