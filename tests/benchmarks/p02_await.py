"""P2: what an await adds to ``Event.sync``, on each loop, for kernels of 0, 20 and 200 us."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from tests.benchmarks.report import Options, Report, Sample, optional
from tests.benchmarks.rig import LOOPS, Bare, device, run_on, spin, warm

_DURATIONS_US = (0, 20, 200)


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P2", "await dev.launch(spin) against launch + record + Event.sync")
    num_reps = max(options.num_reps, options.sized(300, 5))
    for loop in LOOPS:
        found = run_on(loop, lambda loop=loop: _run(options, report, loop, num_reps))
        if found is None:
            report.note(f"{loop} is not installed")
            continue
        for duration_us in _DURATIONS_US:
            _judge(report, loop, duration_us, found)
    return report


async def _run(options: Options, report: Report, loop: str, num_reps: int) -> dict[Any, Any]:
    found: dict[Any, list[float]] = {}
    async with device(options) as dev:
        await warm(dev)
        bare = Bare(dev) if options.is_cuda else None
        for duration_us in _DURATIONS_US:
            ns = duration_us * 1000
            if bare is not None and loop == "asyncio":
                real = Sample(tuple(bare.spin_device_us(ns) for _ in range(20)), "us")
                report.add(f"spin {duration_us} us, by the device's clock", real)
            for rep in range(num_reps + 10):
                taken: dict[str, float] = {}
                start = time.perf_counter_ns()
                await dev.launch(spin, ns, grid=1, block=1)
                taken["ours"] = (time.perf_counter_ns() - start) / 1e3
                if bare is not None:
                    start = time.perf_counter_ns()
                    bare.spin_and_sync(ns)
                    taken["sync"] = (time.perf_counter_ns() - start) / 1e3
                    if loop != "trio":
                        running = asyncio.get_running_loop()
                        start = time.perf_counter_ns()
                        bare.launch(bare.stream, bare.one, bare.spin, ns)
                        bare.stream.record(bare.event)
                        await running.run_in_executor(None, bare.event.sync)
                        taken["executor"] = (time.perf_counter_ns() - start) / 1e3
                if rep >= 10:
                    for name, value in taken.items():
                        found.setdefault((name, duration_us), []).append(value)
                # So that every round starts from a loop that has nothing to do.
                await (optional("trio").sleep(0) if loop == "trio" else asyncio.sleep(0))
    return found


def _judge(report: Report, loop: str, duration_us: int, found: dict[Any, Any]) -> None:
    for name, label in (
        ("ours", "await dev.launch"),
        ("sync", "Event.sync"),
        ("executor", "run_in_executor(Event.sync)"),
    ):
        if (name, duration_us) in found:
            values = tuple(found[name, duration_us])
            report.add(f"{loop}, {duration_us} us: {label}", Sample(values, "us"))
    if ("sync", duration_us) not in found:
        return
    ours, sync = found["ours", duration_us], found["sync", duration_us]
    added = statistics.median(a - b for a, b in zip(ours, sync, strict=True))
    report.target(f"{loop}, {duration_us} us: await over Event.sync", added, "us", at_most=10)
    if ("executor", duration_us) in found:
        executor = found["executor", duration_us]
        theirs = statistics.median(a - b for a, b in zip(executor, sync, strict=True))
        ratio = theirs / added if added > 0 else float("inf")
        report.target(
            f"{loop}, {duration_us} us: the executor's overhead over ours", ratio, "x", at_least=5
        )
