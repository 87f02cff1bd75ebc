"""What the benchmarks share: kernels, loops, and the bare CUDA calls of the peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import streamflow as sf
from streamflow.config import Settings
from tests.benchmarks.report import Options, optional

__all__ = ["LOOPS", "Bare", "Case", "device", "interleaved", "noop", "run_on", "spin"]

Case = Callable[[], Awaitable[Any]]


@sf.kernel("""extern "C" __global__ void noop(const float* x, float* y, int n) {}""")
def noop(x: Any, y: Any, n: int) -> None:
    pass


@sf.kernel(
    """extern "C" __global__ void spin(long long ns) {
        if (ns == 0) return;
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
    }""",
    cost=lambda ns: ns * 1e-9,
)
def spin(ns: int) -> None:
    """One block of one thread that keeps its stream busy for ``ns`` nanoseconds."""


LOOPS = ("asyncio", "uvloop", "trio")


def run_on(loop: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run ``main`` on a loop of that name; None where it is not installed."""
    if loop == "asyncio":
        return asyncio.run(main())  # type: ignore[arg-type]
    module = optional(loop)
    if module is None:
        return None
    return module.run(main()) if loop == "uvloop" else module.run(main)


def device(options: Options, **settings: Any) -> sf.Device:
    """The device under test; the simulator runs by the wall clock unless told otherwise."""
    return sf.Device(0, backend=options.backend, settings=Settings.from_environment(**settings))


async def warm(dev: sf.Device) -> None:
    """Load both kernels, and launch each once."""
    x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)
    await dev.launch(noop, x, y, 1)
    await dev.launch(spin, 0, grid=1, block=1)


async def interleaved(num_reps: int, cases: dict[str, Case]) -> dict[str, list[float]]:
    """Seconds of every case, in turn, so that drift meets all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for rep in range(num_reps + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            result = await case()
            taken = time.perf_counter() - start
            del result  # dropped each round, as P6 has it
            if rep:  # the first round warms up
                found[name].append(taken)
    return found


class Bare:
    """The same device through ``cuda.core`` and ``cuda.bindings`` alone.

    Parameters
    ----------
    dev : Device
        Entered, on CUDA; lends its compiled kernels.
    """

    def __init__(self, dev: sf.Device) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, EventOptions, LaunchConfig, StreamOptions, launch

        self.driver = driver
        self.launch = launch
        self.device = Device(0)
        self.device.set_current()
        self.stream = self.device.create_stream(options=StreamOptions(nonblocking=True))
        self.event = self.device.create_event(EventOptions(timing_enabled=False))
        self.one = LaunchConfig(grid=1, block=1)
        self.four = LaunchConfig(grid=4, block=256)
        backend = dev._core.backend
        self.noop = backend.load_kernel_blocking(noop.spec)
        self.spin = backend.load_kernel_blocking(spin.spec)

    def spin_and_sync(self, ns: int) -> None:
        """Launch, record, wait: what ``Event.sync`` costs."""
        self.launch(self.stream, self.one, self.spin, ns)
        self.stream.record(self.event)
        self.event.sync()

    def spin_device_us(self, ns: int) -> float:
        """How long the spin kernel really runs, by the device's own clock."""
        from cuda.core import EventOptions

        timing = EventOptions(timing_enabled=True)
        start, end = self.device.create_event(timing), self.device.create_event(timing)
        self.stream.record(start)
        self.launch(self.stream, self.one, self.spin, ns)
        self.stream.record(end)
        end.sync()
        return float(end - start) * 1e3

    def check(self, result: tuple[Any, ...]) -> Any:
        """The value of a driver call, or its error raised."""
        if result[0]:
            raise RuntimeError(f"the driver answered {result[0]!r}")
        return result[1] if len(result) > 1 else None


def time_per_call_us(call: Callable[[], Any], num: int) -> float:
    """Microseconds per call over a plain loop of ``num``, the loop's own cost included."""
    counter = range(num)
    start = time.perf_counter_ns()
    for _ in counter:
        call()
    return (time.perf_counter_ns() - start) / num / 1e3
