"""Our own Python: every call over a backend that does nothing. Needs no GPU."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

import streamflow as sf
from tests.benchmarks import null
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import noop

_BATCH = 100


def run(options: Options) -> Report:
    """Measure and print."""
    report = Report("overhead", "own Python per call, over verbs that do nothing")
    null.register()
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    found: dict[str, list[float]] = {}
    async with sf.Device(0, backend="null") as dev:
        core = dev._core
        backend, lane = core.backend, dev.lanes["compute0"].backend_stream
        x, y = dev.empty(1024, np.float32), dev.empty(1024, np.float32)
        stream = dev.stream("own")
        for _ in range(max(options.num_reps, options.sized(200, 2)) + 2):
            for name, call in (
                ("dev.launch", lambda: dev.launch(noop, x, y, 5)),
                ("dev.launch, stream=", lambda: dev.launch(noop, x, y, 5, stream=stream)),
                ("empty + free()", lambda: dev.empty(1 << 20, np.uint8).free()),
                ("empty + del", lambda: dev.empty(1 << 20, np.uint8)),
                ("the null launch itself", lambda: backend.launch(lane, x, noop, 1, 2, 5)),
                (
                    "the null allocate + deallocate themselves",
                    lambda: backend.deallocate(backend.allocate(None, 1, lane), lane),
                ),
            ):
                start = time.perf_counter_ns()
                for _ in range(_BATCH):
                    call()
                taken = (time.perf_counter_ns() - start) / _BATCH
                found.setdefault(name, []).append(taken)
                await dev.synchronize()
            await _await_pending(dev, x, y, found)
            op = dev.launch(noop, x, y, 5)
            start = time.perf_counter_ns()
            await op
            found.setdefault("await of a finished op", []).append(time.perf_counter_ns() - start)
        num_before = sum(len(line.inflight) for line in core.lines)
        for _ in range(10 * _BATCH):
            dev.empty(1 << 10, np.uint8).free()
        grown = sum(len(line.inflight) for line in core.lines) - num_before
        for name, values in found.items():
            report.add(name, Sample(tuple(values[2:]), "ns"))
        report.target("ops left in flight by 1 000 pairs, all done", grown, "", at_most=700)
        stream.close()


async def _await_pending(dev: Any, x: Any, y: Any, found: dict[str, list[float]]) -> None:
    """An op whose event is done one turn of the loop after the await began."""
    op = dev.launch(noop, x, y, 5)
    event = op.ticket.event
    event.is_done = False

    def end() -> None:
        event.is_done = True

    asyncio.get_running_loop().call_soon(end)
    start = time.perf_counter_ns()
    await op
    found.setdefault("await that waits for one turn", []).append(time.perf_counter_ns() - start)
