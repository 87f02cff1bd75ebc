"""P8: a pinned lease of 1 MiB from the cache against CuPy's pinned pool and the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from tests.benchmarks.report import Options, Report, Sample, interleave, optional
from tests.benchmarks.rig import Bare, device, time_per_call_us, warm

_NBYTES = 1 << 20


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P8", "pinned lease of 1 MiB from the cache, acquire + release, per pair")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    num_reps = max(5, options.num_reps) if not options.is_tiny else 2
    num_pairs = options.sized(2000, 20)
    async with device(options) as dev:
        await warm(dev)
        pinned = dev.pinned
        async with pinned.lease(_NBYTES):
            pass
        before = pinned.stats()

        def pair() -> None:
            pinned.try_lease(_NBYTES).release()

        def pair_with_array() -> None:
            lease = pinned.try_lease(_NBYTES)
            lease.array()
            lease.release()

        names = {"try_lease + release": pair, "the same, with an array of it": pair_with_array}
        cases = [(name, _timed(call, num_pairs)) for name, call in names.items()]
        cases += _peers(dev, report, num_pairs) if options.is_cuda else []
        found = interleave(num_reps, cases)
        found["async with lease"] = [
            await _entered_us(pinned, num_pairs) for _ in range(num_reps + 1)
        ][1:]
        cost = pinned.stats().num_pins - before.num_pins
        report.target("pinned by the driver meanwhile", cost, "blocks", at_most=0)
        median = {n: report.add(n, Sample(tuple(v), "us")) for n, v in found.items()}
        _compare(options, report, median)


def _compare(options: Options, report: Report, median: dict[str, float]) -> None:
    ours = median["try_lease + release"]
    if not options.is_cuda:
        report.note("no GPU: neither CuPy's pool nor the driver is there to compare with")
        return
    cupy, driver = median.get("CuPy's pinned pool"), median["cuMemHostAlloc + cuMemFreeHost"]
    if cupy is not None:
        report.target("a lease over CuPy's", ours / cupy, "x", at_most=3)
    report.target("the driver's pair over a lease", driver / ours, "x", at_least=100)


def _timed(call: Callable[[], object], num: int) -> Callable[[], float]:
    return lambda: time_per_call_us(call, num)


async def _entered_us(pinned: Any, num: int) -> float:
    start = perf_counter_ns()
    for _ in range(num):
        async with pinned.lease(_NBYTES):
            pass
    return (perf_counter_ns() - start) / num / 1e3


def _peers(dev: Any, report: Report, num_pairs: int) -> list[tuple[str, Callable[[], float]]]:
    bare = Bare(dev)
    driver = bare.driver

    def driver_pair() -> None:
        bare.check(driver.cuMemFreeHost(bare.check(driver.cuMemHostAlloc(_NBYTES, 0))))

    peers = [("cuMemHostAlloc + cuMemFreeHost", _timed(driver_pair, max(5, num_pairs // 100)))]
    cupy, torch = optional("cupy"), optional("torch")
    if cupy is None:
        report.note("CuPy is not installed: no comparison with its pinned pool")
    else:
        pool = cupy.cuda.PinnedMemoryPool()
        peers.append(("CuPy's pinned pool", _timed(lambda: pool.malloc(_NBYTES), num_pairs)))
    if torch is not None:
        make, byte = torch.empty, torch.uint8
        peers.append(
            (
                "torch, cached",
                _timed(lambda: make(_NBYTES, dtype=byte, pin_memory=True), num_pairs),
            )
        )
    return peers
