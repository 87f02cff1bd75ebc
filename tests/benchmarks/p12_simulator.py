"""P12: ops per second on the simulator, virtual clock, empty bodies; and whether it stays so."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import numpy as np

import streamflow as sf
from streamflow.config import Settings, SimOptions
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import noop

_BATCH = 256


@sf.kernel("""extern "C" __global__ void nothing() {}""")
def nothing() -> None:
    pass


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P12", "the simulator, virtual clock, empty bodies")
    sizes = (200, 400) if options.is_tiny else (10_000, 100_000, 1_000_000)
    rates: dict[int, float] = {}
    for size in sizes:
        num_reps = options.sized(5 if size < 1_000_000 else 1, 1)
        found = [asyncio.run(_batched(size)) for _ in range(num_reps)]
        rate = report.add(f"{size} ops, awaited {_BATCH} at a time", _rates(found))
        report.add(f"{size} ops: memory grown", Sample(tuple(f[1] for f in found), "MiB"))
        report.target(f"{size} ops", rate, "ops/s", at_least=50_000)
        rates[size] = rate
    report.target(
        f"linear: time per op at {sizes[-1]} over {sizes[0]} ops",
        rates[sizes[0]] / rates[sizes[-1]],
        "x",
        at_most=1.1,
    )
    report.target("memory grown over the longest run", found[-1][1], "MiB", at_most=50)
    size = sizes[1]
    for name, shape in (("each awaited", _one_by_one), ("all at once", _flood),
                        ("two arrays each", _with_arrays)):  # fmt: skip
        found = [asyncio.run(shape(size)) for _ in range(options.sized(5, 1))]
        report.add(f"{size} ops, {name}", _rates(found))
    _compare_checker(options, report, size)
    few, many = options.sized(2_000, 100), options.sized(8_000, 400)
    slow = [
        min(asyncio.run(_parked_readers(size)) for _ in range(options.sized(5, 1)))
        for size in (few, many)
    ]
    report.add(f"submitting each of {few} parked readers of one array", Sample((slow[0],), "us"))
    report.add(f"submitting each of {many} parked readers", Sample((slow[1],), "us"))
    report.target("many parked readers over few, per op", slow[1] / slow[0], "x", at_most=2)
    return report


def _compare_checker(options: Options, report: Report, size: int) -> None:
    """The race checker off and on, in turns."""
    for name, shape in (("no arrays", _batched), ("two arrays each", _with_arrays)):
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.sized(5, 1)):
            for is_on, rates in found.items():
                rates.append(asyncio.run(shape(size, check_races=is_on)))
        off = report.add(f"{size} ops, {name}, checker off", _rates(found[False]))
        on = report.add(f"{size} ops, {name}, checker on", _rates(found[True]))
        report.note(f"{name}: an op takes {off / on:.2f} times as long with the checker on")


def _rates(found: list[tuple[float, float]]) -> Sample:
    return Sample(tuple(each[0] for each in found), "ops/s")


def _open(check_races: bool = False) -> sf.Device:
    options = SimOptions(clock="virtual", check_races=check_races)
    return sf.Device(0, backend="sim", settings=Settings.from_environment(sim=options))


async def _batched(num_ops: int, *, check_races: bool = False) -> tuple[float, float]:
    """(ops per second, MiB grown) of launches awaited in batches."""
    async with _open(check_races) as dev:
        await _launch(dev, _BATCH)
        gc.collect()
        rss, start = _rss_mib(), time.perf_counter()
        for _ in range(num_ops // _BATCH):
            await _launch(dev, _BATCH)
        await _launch(dev, num_ops % _BATCH or 1)
        rate = num_ops / (time.perf_counter() - start)
        return rate, _rss_mib() - rss


async def _launch(dev: sf.Device, num: int) -> None:
    for _ in range(num):
        dev.launch(nothing, grid=1, block=1)
    await dev.synchronize()


async def _one_by_one(num_ops: int) -> tuple[float, float]:
    async with _open() as dev:
        start = time.perf_counter()
        for _ in range(num_ops):
            await dev.launch(nothing, grid=1, block=1)
        return num_ops / (time.perf_counter() - start), 0.0


async def _flood(num_ops: int) -> tuple[float, float]:
    """Far more than the windows hold: most park (rule R7)."""
    async with _open() as dev:
        start = time.perf_counter()
        await _launch(dev, num_ops)
        return num_ops / (time.perf_counter() - start), 0.0


async def _with_arrays(num_ops: int, *, check_races: bool = False) -> tuple[float, float]:
    async with _open(check_races) as dev:
        pairs = [(dev.zeros(16, np.float32), dev.zeros(16, np.float32)) for _ in range(8)]
        start = time.perf_counter()
        for first in range(0, num_ops, _BATCH):
            for place in range(first, min(first + _BATCH, num_ops)):
                dev.launch(noop, *pairs[place % 8], 5)
            await dev.synchronize()
        return num_ops / (time.perf_counter() - start), 0.0


async def _parked_readers(num_ops: int) -> float:
    """Microseconds to submit each of many launches that read one array behind a gate."""
    async with _open() as dev:
        x, y = dev.zeros(16, np.float32), dev.zeros(16, np.float32)
        stream = dev.stream("gated")
        await dev.launch(noop, x, y, 5, stream=stream)
        with dev.sim.gate(stream):
            start = time.perf_counter()
            for _ in range(num_ops):
                dev.launch(noop, x, y, 5, stream=stream)
            taken = time.perf_counter() - start
        await stream.synchronize()
        return taken / num_ops * 1e6


def _rss_mib() -> float:
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return float("nan")
    return int(fields[1]) * 4096 / (1 << 20)


def profile(num_ops: int = 20_000) -> None:
    """The batched shape alone, for a profiler to run."""
    asyncio.run(_batched(num_ops))
