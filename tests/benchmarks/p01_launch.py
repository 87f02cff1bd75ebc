"""P1: what ``dev.launch`` adds to the bare launch. Two arrays, an int, one lane, no tracing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample, optional
from tests.benchmarks.rig import Bare, device, noop, warm

_BATCH = 100  # far below the window of 512 calls: nothing parks


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P1", "dev.launch against the bare launch, per launch")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    num_reps = max(options.num_reps, options.sized(100, 2))
    async with device(options) as dev:
        await warm(dev)
        x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
        stream = dev.stream("P1")
        await dev.launch(noop, x, y, 5)
        peers = _peers(dev, x.address, y.address) if options.is_cuda else []
        found: dict[str, list[float]] = {}

        def note(name: str, start_ns: int) -> None:
            found.setdefault(name, []).append((time.perf_counter_ns() - start_ns) / _BATCH / 1e3)

        launch, batch = dev.launch, range(_BATCH)
        for _ in range(num_reps + 2):
            start = time.perf_counter_ns()
            for _ in batch:
                op = launch(noop, x, y, 5)
            note("dev.launch", start)
            await op
            start = time.perf_counter_ns()
            for _ in batch:
                op = launch(noop, x, y, 5, stream=stream)
            note("dev.launch, stream=", start)
            await op
            start = time.perf_counter_ns()
            for _ in batch:
                op = launch(noop, x, y, 5, grid=4, block=256)
            note("dev.launch, grid= and block=", start)
            await op
            for name, call, sync in peers:
                start = time.perf_counter_ns()
                for _ in batch:
                    call()
                note(name, start)
                sync()
        # Between batches of one kind the others ran: the first two rounds warm all of them.
        median = {n: report.add(n, Sample(tuple(v[2:]), "us")) for n, v in found.items()}
        pairs = zip(found["dev.launch"][2:], found.get("cuda.core launch", [])[2:], strict=False)
        ours = median["dev.launch"]
        if differences := [a - b for a, b in pairs]:
            added = statistics.median(differences)
            report.target("dev.launch over cuda.core launch", added, "us", at_most=2.5)
            report.target("the same, aimed at", added, "us", at_most=2.0)
        if "torch add_" in median:
            report.target("dev.launch over torch add_", ours / median["torch add_"], "x", at_most=1)
        stream.close()


def _peers(
    dev: Any, x: int, y: int
) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    bare = Bare(dev)
    launch, stream, four, kernel, event = (
        bare.launch,
        bare.stream,
        bare.four,
        bare.noop,
        bare.event,
    )

    def launch_and_record() -> None:
        launch(stream, four, kernel, x, y, 5)
        stream.record(event)

    peers: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("cuda.core launch", lambda: launch(stream, four, kernel, x, y, 5), stream.sync),
        ("cuda.core launch + record", launch_and_record, stream.sync),
        ("cuda.core record", lambda: stream.record(event), stream.sync),
        ("cuda.core query", lambda: event.is_done, stream.sync),
    ]
    cupy, torch = optional("cupy"), optional("torch")
    if cupy is not None:
        raw = cupy.RawKernel(noop.spec.source, "noop")
        a, b, n = cupy.zeros(1024, cupy.float32), cupy.zeros(1024, cupy.float32), np.int32(5)
        side = cupy.cuda.Stream(non_blocking=True)

        def launch_raw() -> None:
            raw((4,), (256,), (a, b, n), stream=side)

        peers.append(("CuPy RawKernel", launch_raw, side.synchronize))
    if torch is not None:
        tensor = torch.zeros(1024, device="cuda")
        peers.append(("torch add_", lambda: tensor.add_(1.0), torch.cuda.synchronize))
    return peers
