"""P3: the processor time that waiting takes, and the queries it makes; none when idle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device, spin, warm

_NUM_STREAMS, _OPS_EACH = 8, 25


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P3", "200 ops on 8 streams wait; CPU of the whole process, queries")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    wait_s = 0.02 if options.is_tiny else 1.0
    num_reps = options.sized(5, 1)
    async with device(options) as dev:
        await warm(dev)
        streams = [dev.stream(f"wait{number}") for number in range(_NUM_STREAMS)]
        for shape, head_s, each_s in (
            ("one long kernel ahead of 24 short ones", wait_s, 0.0),
            ("25 kernels of equal length", wait_s / _OPS_EACH, wait_s / _OPS_EACH),
        ):
            shares, wall, on_loop, by_helper = [], [], [], []
            for _ in range(num_reps):
                before = dev.stats()
                taken, cpu_s = await _wait(dev, streams, head_s, each_s)
                after = dev.stats()
                shares.append(100 * cpu_s / taken)
                wall.append(taken)
                on_loop.append(float(after.num_queries - before.num_queries))
                by_helper.append(float(after.num_helper_queries - before.num_helper_queries))
            report.add(f"{shape}: wall time", Sample(tuple(wall), "s"))
            share = report.add(f"{shape}: CPU", Sample(tuple(shares), "% of a core"))
            report.add(f"{shape}: queries on the loop", Sample(tuple(on_loop), ""))
            report.add(f"{shape}: queries by the helper", Sample(tuple(by_helper), ""))
            report.target(f"CPU, {shape}", share, "% of a core", at_most=5)
        num = _num_queries(dev)
        await asyncio.sleep(wait_s / 2)
        report.target("queries while nothing is in flight", _num_queries(dev) - num, "", at_most=0)
        num = _num_queries(dev)
        op = dev.launch(spin, int(wait_s / 2 * 1e9), grid=1, block=1)
        await asyncio.sleep(wait_s / 4)
        num = _num_queries(dev) - num
        await op
        report.target("queries while nobody awaits what is in flight", num, "", at_most=0)
        for stream in streams:
            stream.close()


def _num_queries(dev: Any) -> int:
    stats = dev.stats()
    return int(stats.num_queries + stats.num_helper_queries)


async def _wait(dev: Any, streams: list[Any], head_s: float, each_s: float) -> tuple[float, float]:
    """(wall seconds, CPU seconds of every thread) of one round."""
    head_ns, each_ns = int(head_s * 1e9), int(each_s * 1e9)

    async def one(op: Any) -> None:
        await op

    start, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for place in range(_OPS_EACH):
            for stream in streams:
                ns = each_ns if place else head_ns
                op = dev.launch(spin, ns, grid=1, block=1, stream=stream)
                group.create_task(one(op))
    return time.perf_counter() - start, time.process_time() - cpu
