"""P7: ``empty`` and ``free`` of 1 MiB against the driver's own allocation and free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample, optional
from tests.benchmarks.rig import Bare, device, warm

_NBYTES, _BATCH = 1 << 20, 100


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P7", "empty + free of 1 MiB, per pair")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    num_reps = max(options.num_reps, options.sized(100, 2))
    async with device(options) as dev:
        await warm(dev)
        dev.empty(4, np.uint8).free()  # with it go the frees that warm() has left
        _check_calls(dev, report)
        await dev.synchronize()
        peers = _peers(dev) if options.is_cuda else []
        found: dict[str, list[float]] = {}

        def note(name: str, start_ns: int) -> None:
            found.setdefault(name, []).append((time.perf_counter_ns() - start_ns) / _BATCH / 1e3)

        empty, batch = dev.empty, range(_BATCH)
        for _ in range(num_reps + 2):
            start = time.perf_counter_ns()
            for _ in batch:
                empty(_NBYTES, np.uint8).free()
            note("empty + free()", start)
            await dev.synchronize()
            start = time.perf_counter_ns()
            for _ in batch:
                empty(_NBYTES, np.uint8)
            note("empty + del", start)
            await dev.synchronize()
            for name, call, sync in peers:
                start = time.perf_counter_ns()
                for _ in batch:
                    call()
                note(name, start)
                sync()
        median = {n: report.add(n, Sample(tuple(v[2:]), "us")) for n, v in found.items()}
        raw = median.get("cuMemAllocAsync + cuMemFreeAsync")
        if raw is not None:
            for name in ("empty + free()", "empty + del"):
                report.target(f"{name} over the driver's pair", median[name] / raw, "x", at_most=3)


def _check_calls(dev: Any, report: Report) -> None:
    """One real allocation and one real free each: nothing of this is a cache of ours."""
    backend = dev._core.backend
    allocate, deallocate = backend.allocate, backend.deallocate
    calls = {"allocate": 0, "deallocate": 0}

    def counting_allocate(*args: Any) -> int:
        calls["allocate"] += 1
        return int(allocate(*args))

    def counting_deallocate(*args: Any) -> None:
        calls["deallocate"] += 1
        deallocate(*args)

    backend.allocate, backend.deallocate = counting_allocate, counting_deallocate
    try:
        for _ in range(10):
            dev.empty(_NBYTES, np.uint8).free()
    finally:
        del backend.allocate, backend.deallocate
    for name, num in calls.items():
        report.target(f"calls of {name} per pair", num / 10, "", at_most=1, at_least=1)


def _peers(dev: Any) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    bare = Bare(dev)
    driver, stream, event = bare.driver, bare.stream, bare.event
    allocate, free, handle = driver.cuMemAllocAsync, driver.cuMemFreeAsync, stream.handle
    # The default pool gives memory back at every synchronisation unless told not to; ours
    # never does, so neither shall theirs.
    pool = bare.check(driver.cuDeviceGetDefaultMemPool(0))
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    bare.check(driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**63 - 1)))

    def pair() -> None:
        _, address = allocate(_NBYTES, handle)
        free(address, handle)

    backend, own, lane = dev._core.backend, dev._core.memory.pool, dev.lanes["compute0"]
    target = lane.backend_stream

    def pair_of_ours() -> None:
        backend.deallocate(backend.allocate(own, _NBYTES, target), target)

    def two_records() -> None:
        stream.record(event)
        stream.record(event)

    peers: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("cuMemAllocAsync + cuMemFreeAsync", pair, stream.sync),
        ("backend.allocate + deallocate alone", pair_of_ours, target.sync),
        ("two event records", two_records, stream.sync),
    ]
    rmm, cupy, torch = optional("rmm"), optional("cupy"), optional("torch")
    if rmm is not None:
        resource = rmm.mr.CudaAsyncMemoryResource()

        def pair_of_rmm() -> None:
            resource.deallocate(resource.allocate(_NBYTES), _NBYTES)

        peers.append(("RMM async", pair_of_rmm, bare.device.sync))
    if cupy is not None:
        peers.append(("CuPy empty, cached", lambda: cupy.empty(_NBYTES, cupy.uint8), stream.sync))
    if torch is not None:
        make, byte = torch.empty, torch.uint8
        peers.append(
            ("torch empty, cached", lambda: make(_NBYTES, dtype=byte, device="cuda"), stream.sync)
        )
    return peers
