"""P9: replay of a chain of 1000 empty kernels, against the driver's own; and what building costs.

No compiler is assumed on the machine, so the floor is not a C program: it is the driver called
through ``cuda.bindings``, with handles made beforehand, on a graph that ``cuda.core`` captured of
the same kernels. Two Python calls for 1000 kernels: earlier, C and ``cuda.core`` measured alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import Bare, device, noop, warm

_IN_A_ROW = 20


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P9", "replay of a captured chain against cuGraphLaunch and an event")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    num_kernels = options.sized(1000, 8)
    num_reps = max(options.num_reps, options.sized(100, 2))
    found: dict[str, list[float]] = {}

    def note(name: str, start_ns: int, num: int = 1) -> None:
        found.setdefault(name, []).append((time.perf_counter_ns() - start_ns) / num / 1e3)

    async with device(options) as dev:
        await warm(dev)
        x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
        await dev.synchronize()
        floor = _Floor(dev, x.address, y.address, num_kernels) if options.is_cuda else None
        for _ in range(options.sized(10, 2)):
            await _build(dev, x, y, num_kernels, note)
            if floor is not None:
                floor.build(note)
        with dev.capture() as graph:
            for _ in range(num_kernels):
                dev.launch(noop, x, y, 5, grid=1, block=1)
        await graph.ready
        for _ in range(3):  # the first launch of each uploads it
            await graph.launch()
            if floor is not None:
                floor.replay(1)
        for _ in range(num_reps):
            start = time.perf_counter_ns()
            await graph.launch()
            note("await graph.launch()", start)
            if floor is not None:
                start = time.perf_counter_ns()
                floor.replay(1)
                note("floor: cuGraphLaunch + event", start)
            start = time.perf_counter_ns()
            for _ in range(_IN_A_ROW):
                op = graph.launch()
            await op
            note(f"graph.launch(), {_IN_A_ROW} in a row, each", start, _IN_A_ROW)
            if floor is not None:
                start = time.perf_counter_ns()
                floor.replay(_IN_A_ROW)
                note(f"floor, {_IN_A_ROW} in a row, each", start, _IN_A_ROW)
            start = time.perf_counter_ns()
            for _ in range(options.sized(100, 2)):
                op = dev.launch(noop, x, y, 5, grid=1, block=1)
            await op
            note("eager, 1000 kernels at the rate of 100", start, options.sized(100, 2))
            found["eager, 1000 kernels at the rate of 100"][-1] *= 1000
        graph.close()
        median = {name: report.add(name, Sample(tuple(v), "us")) for name, v in found.items()}
        report.note("the floor is the driver through cuda.bindings: no compiler is assumed here")
        if floor is not None:
            _judge(report, found, median)


def _judge(report: Report, found: dict[str, list[float]], median: dict[str, float]) -> None:
    pairs = (
        ("await graph.launch()", "floor: cuGraphLaunch + event"),
        (f"graph.launch(), {_IN_A_ROW} in a row, each", f"floor, {_IN_A_ROW} in a row, each"),
    )
    for ours, theirs in pairs:
        ratio = statistics.median(a / b for a, b in zip(found[ours], found[theirs], strict=True))
        report.target(f"{ours} over {theirs}", ratio, "x", at_most=1.05)
    ratio = median["built, per node: dev.capture()"] / median["built, per node: cuda.core"]
    report.note(f"dev.capture() builds in {ratio:.2f} times what cuda.core takes (no target)")


async def _build(dev: Any, x: Any, y: Any, num_kernels: int, note: Callable[..., None]) -> None:
    """Time a capture up to where it can be launched, and the backend's part of that alone."""
    start = time.perf_counter_ns()
    with dev.capture() as graph:
        for _ in range(num_kernels):
            dev.launch(noop, x, y, 5, grid=1, block=1)
    note("recorded on the loop, per node: dev.capture()", start, num_kernels)
    await graph.ready
    note("built, per node: dev.capture()", start, num_kernels)
    graph.close()
    backend = dev._core.backend
    kernel = backend.load_kernel_blocking(noop.spec)
    config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
    args = [
        backend.array_argument(array.address, (1024,), np.dtype(np.float32)) for array in (x, y)
    ]
    start = time.perf_counter_ns()
    made = backend.create_graph()
    deps: list[Any] = []
    for _ in range(num_kernels):
        deps = [
            backend.add_graph_node(
                made, lambda stream: backend.launch(stream, config, kernel, *args, 5), deps
            )
        ]
    executable = backend.instantiate_graph_blocking(made)
    note("built, per node: the backend's verbs alone", start, num_kernels)
    backend.close_graph(executable)
    backend.close_graph(made)


class _Floor:
    """The same kernels in a graph of cuda.core's, launched through cuda.bindings."""

    def __init__(self, dev: Any, x: int, y: int, num_kernels: int) -> None:
        self._bare = Bare(dev)
        self._args = x, y, 5
        self._num_kernels = num_kernels
        self._graph = self._capture()
        self._handle = self._graph.handle
        self._stream = self._bare.stream.handle
        self._event = self._bare.event.handle

    def build(self, note: Callable[..., None]) -> None:
        start = time.perf_counter_ns()
        graph = self._capture()
        note("built, per node: cuda.core", start, self._num_kernels)
        graph.close()

    def replay(self, num: int) -> None:
        """Launch ``num`` times and wait for the last."""
        driver, check = self._bare.driver, self._bare.check
        for _ in range(num):
            check(driver.cuGraphLaunch(self._handle, self._stream))
        check(driver.cuEventRecord(self._event, self._stream))
        check(driver.cuEventSynchronize(self._event))

    def _capture(self) -> Any:
        bare = self._bare
        builder = bare.device.create_graph_builder()
        builder.begin_building()
        for _ in range(self._num_kernels):
            bare.launch(builder, bare.one, bare.noop, *self._args)
        graph = builder.end_building().complete()
        builder.close()
        return graph
