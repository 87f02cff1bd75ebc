"""R1 in figures: how long a loop stands still while 1 GiB is staged in and out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import LOOPS, device, run_on, warm

_MOVES = ("put", "get, out=")


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("R1", "the loop's longest gap while 1 GiB is staged")
    nbytes = options.sized(1 << 30, 4 << 20)
    num_reps = options.sized(max(5, min(options.num_reps, 10)), 2)
    source = np.arange(nbytes // 4, dtype=np.float32)
    result = np.zeros_like(source)  # touched
    for loop in LOOPS:

        async def main() -> dict[str, list[list[float]]]:
            return await _measure(options, num_reps, source, result)

        found = run_on(loop, main)
        if found is None:
            report.note(f"{loop} is not installed")
            continue
        floor = report.add(f"{loop}: bare threads copy, longest gap", _sample(found["bare"], 0))
        for name in _MOVES:
            gap = report.add(f"{loop}: {name}, longest gap", _sample(found[name], 0))
            report.add(f"{loop}: {name}, longest call", _sample(found[name], 1))
            report.add(f"{loop}: {name}, took", _sample(found[name], 2))
            report.target(f"{loop}: {name}, longest gap", gap, "ms", at_most=5)
        for name in ("get", "get, pinning its block"):
            report.add(f"{loop}: {name}, longest gap", _sample(found[name], 0))
        if floor > 5:
            report.note(f"{loop}: the machine alone holds it up for {floor:.1f} ms")
    return report


async def _measure(
    options: Options, num_reps: int, source: Any, result: Any
) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    async with device(options) as dev:
        await warm(dev)
        on_device = await dev.put(source)

        async def bare() -> float:
            await _copy_by_threads(dev._core.settings.staging_threads, source, result)
            return 0.0

        async def put() -> float:
            start = time.perf_counter()
            array = dev.put(source, out=on_device)
            called = time.perf_counter() - start
            await array
            return called

        async def get() -> float:
            start = time.perf_counter()
            op = dev.get(on_device, out=result)
            called = time.perf_counter() - start
            await op
            return called

        async def get_pinned() -> float:
            await dev.get(on_device)
            return 0.0

        cases = dict(zip(("bare", *_MOVES, "get"), (bare, put, get, get_pinned), strict=True))
        for rep in range(num_reps + 1):
            for name, case in cases.items():
                figures = await _watched(case)
                if rep:  # the first round pins the chunks
                    found.setdefault(name, []).append(figures)
            await dev.pinned.trim()
            figures = await _watched(get_pinned)  # under a lock of the driver's, if it may be
            found.setdefault("get, pinning its block", []).append(figures)
    if not np.array_equal(source, result):
        raise AssertionError("what came back is not what was sent")
    return found


async def _copy_by_threads(num: int, source: Any, result: Any) -> None:
    """What the same bytes cost the loop when nothing but NumPy moves them."""
    parts = zip(np.array_split(source, num), np.array_split(result, num), strict=True)
    async with anyio.create_task_group() as group:
        for part, into in parts:
            group.start_soon(anyio.to_thread.run_sync, _copy, into, part)


def _copy(into: Any, part: Any) -> None:
    step = 2 << 20  # float32s of a chunk
    for start in range(0, len(part), step):
        np.copyto(into[start : start + step], part[start : start + step])


async def _watched(case: Callable[[], Awaitable[float]]) -> list[float]:
    """The longest time between two turns of the loop, of the call, and of all; in ms."""
    beats = [time.perf_counter()]

    async def beat() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            beats.append(time.perf_counter())

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        start = time.perf_counter()
        called = await case()
        taken = time.perf_counter() - start
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    gap = max(later - earlier for earlier, later in pairwise(beats))
    return [gap * 1e3, called * 1e3, taken * 1e3]


def _sample(figures: list[list[float]], column: int) -> Sample:
    return Sample(tuple(each[column] for each in figures), "ms")
