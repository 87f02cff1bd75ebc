"""A quick look at what copies and calls take, for ``streamflow doctor`` and ``bench``.

Each figure of the runtime's stands beside the plain one, which the backend's own calls take in
the same run. On the simulator both are its model's, as far as the clock is its own.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import streamflow as sf
from streamflow.backends import open_backend
from streamflow.testing.measuring import NOOP, SPIN, Bench, Sizes

__all__ = ["DOUBLED", "SPIN_NS", "Calls", "Copies", "PipelineRun", "Quick", "measure"]

SPIN_NS = 20_000
"""The kernel that is waited for: long enough to be waited for at all."""

_NUM_BATCHES = 16

DOUBLED = sf.Kernel.from_source(
    """extern "C" __global__ void doubled(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}""",
    body=lambda x, y, n: np.multiply(x[:n], np.float32(2), out=y[:n]),
    access={"y": "write"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Seconds for ``nbytes``, from the call until its end is seen.

    ``h2d_s`` and ``d2h_s`` are plain copies from and to pinned memory; ``put_s`` and ``get_s``
    what awaiting ``put`` of a pageable array takes, and ``get`` into a new one.
    """

    nbytes: int
    h2d_s: float
    d2h_s: float
    put_s: float
    get_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Seconds of the host's.

    ``launch_s`` is one ``dev.launch`` of a row of them, ``plain_launch_s`` the backend's own;
    ``await_s`` a launch of a kernel of 20 us and the await of it, ``plain_sync_s`` the
    same with the backend's launch and a thread blocked in ``Event.sync``.
    """

    launch_s: float
    plain_launch_s: float
    await_s: float
    plain_sync_s: float

    @property
    def wake_up_s(self) -> float:
        """How much later the loop goes on than a blocked thread would."""
        return self.await_s - self.plain_sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A pipeline that copies in, computes and copies out: ``nbytes`` in, and as many out.

    ``elapsed_s`` is without a trace. ``overlap`` and ``ideal_s`` are of a second, traced run:
    :class:`~streamflow.Overlap` describes them.
    """

    nbytes: int
    elapsed_s: float
    overlap: float
    ideal_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """All of it; ``calls`` and ``pipeline`` are None where kernels can't be compiled."""

    copies: tuple[Copies, ...]
    calls: Calls | None
    pipeline: PipelineRun | None


def measure(
    backend: str, settings: sf.Settings, sizes: Sizes, *, has_compiler: bool, with_pipeline: bool
) -> Quick:
    """Measure device 0.

    Parameters
    ----------
    backend : str
        A backend's name, not ``"auto"``.
    settings : Settings
        Of the device.
    sizes : Sizes
        ``copies_nbytes``, ``num_calls`` and ``num_reps`` count, and ``staged_nbytes`` as what
        goes through the pipeline.
    has_compiler : bool
        Kernels can be compiled.
    with_pipeline : bool
        Run the pipeline too.

    Raises
    ------
    StreamflowError
        The device cannot be opened, or failed.
    """
    plain_copies, plain_calls = _plain_blocking(backend, settings, sizes, has_compiler)
    return asyncio.run(
        _with_runtime(
            sf.Device(0, backend=backend, settings=settings),
            sizes,
            plain_copies,
            plain_calls,
            with_pipeline and has_compiler,
        )
    )


# -- plain -----------------------------------------------------------------------------------


def _plain_blocking(
    name: str, settings: sf.Settings, sizes: Sizes, has_compiler: bool
) -> tuple[list[tuple[float, float]], tuple[float, float] | None]:
    backend = open_backend(name, 0, settings, "quick")
    try:
        with Bench(backend, sizes) as bench:
            return _plain_copies(bench), _plain_calls(bench) if has_compiler else None
    except Exception as error:  # the driver's own
        raise backend.translate(error, "measuring plain copies and launches") from error
    finally:
        backend.close()


def _plain_copies(bench: Bench) -> list[tuple[float, float]]:
    backend, first = bench.backend, bench.streams[0]
    host = bench.pinned(max(bench.sizes.copies_nbytes))
    found = []
    for nbytes in bench.sizes.copies_nbytes:
        with bench.device_memory(nbytes) as (there,):
            out = _waited(bench, partial(backend.copy_d2h, host, there, nbytes, first))
            into = _waited(bench, partial(backend.copy_h2d, there, host, nbytes, first))
        found.append((into, out))
    return found


def _plain_calls(bench: Bench) -> tuple[float, float]:
    backend, first, floats = bench.backend, bench.streams[0], np.dtype(np.float32)
    with bench.device_memory(1024, 1024) as (a, b):
        x, y = (backend.array_argument(each, (256,), floats) for each in (a, b))
        launch_s = bench.host_times(bench.launch_call(NOOP, first, x, y, 5)).median_s
    return launch_s, _waited(bench, partial(bench.spin, first, SPIN_NS * 1e-9))


def _waited(bench: Bench, call: Callable[[], object]) -> float:
    """Seconds until a thread that is blocked in ``Event.sync`` goes on."""
    first, event, clock_s = bench.streams[0], bench.event, bench.backend.clock_s
    found = []
    for _ in range(bench.sizes.num_reps + 1):
        start_s = clock_s()
        call()
        first.record(event)
        event.sync()
        found.append(clock_s() - start_s)
    return statistics.median(found[1:])


# -- with the runtime ------------------------------------------------------------------------


async def _with_runtime(
    device: sf.Device,
    sizes: Sizes,
    plain_copies: list[tuple[float, float]],
    plain_calls: tuple[float, float] | None,
    with_pipeline: bool,
) -> Quick:
    async with device as dev:
        copies = []
        for nbytes, (h2d_s, d2h_s) in zip(sizes.copies_nbytes, plain_copies, strict=True):
            put_s, get_s = await _copies(dev, nbytes, sizes.num_reps)
            copies.append(Copies(nbytes=nbytes, h2d_s=h2d_s, d2h_s=d2h_s, put_s=put_s, get_s=get_s))
        calls = None if plain_calls is None else await _calls(dev, sizes, plain_calls)
        pipeline = await _pipeline(dev, sizes.staged_nbytes) if with_pipeline else None
        return Quick(copies=tuple(copies), calls=calls, pipeline=pipeline)


async def _copies(dev: sf.Device, nbytes: int, num_reps: int) -> tuple[float, float]:
    clock_s = _clock(dev)
    source = np.ones(nbytes, np.uint8)
    array = await dev.put(source)
    puts, gets = [], []
    for _ in range(num_reps + 1):
        start_s = clock_s()
        await dev.put(source, out=array)
        put_s = clock_s()
        result = await dev.get(array)
        gets.append(clock_s() - put_s)
        puts.append(put_s - start_s)
        del result  # its block serves the next
    return statistics.median(puts[1:]), statistics.median(gets[1:])


async def _calls(dev: sf.Device, sizes: Sizes, plain: tuple[float, float]) -> Calls:
    clock_s = _clock(dev)
    noop, spin = sf.Kernel(NOOP), sf.Kernel(SPIN)
    x, y = dev.zeros(256, np.float32), dev.zeros(256, np.float32)
    await dev.launch(noop, x, y, 5)
    launches, awaits = [], []
    for _ in range(sizes.num_reps + 1):
        start_s = clock_s()
        for _ in range(sizes.num_calls):
            op = dev.launch(noop, x, y, 5)
        launches.append((clock_s() - start_s) / sizes.num_calls)
        await op
        start_s = clock_s()
        await dev.launch(spin, SPIN_NS, grid=1, block=1)
        awaits.append(clock_s() - start_s)
    return Calls(
        launch_s=statistics.median(launches[1:]),
        plain_launch_s=plain[0],
        await_s=statistics.median(awaits[1:]),
        plain_sync_s=plain[1],
    )


async def _pipeline(dev: sf.Device, nbytes: int) -> PipelineRun:
    num = max(1, nbytes // 4 // _NUM_BATCHES)
    batches = [np.ones(num, np.float32)] * _NUM_BATCHES

    def model(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
        y = dev.empty(num, np.float32)
        dev.launch(DOUBLED, x, y, num)
        return y

    async def run() -> float:
        start_s = _clock(dev)()
        async for _ in dev.pipeline(batches).map(model):
            pass
        return _clock(dev)() - start_s

    await run()  # compiles, and takes memory
    elapsed_s = await run()
    with dev.trace() as trace:
        await run()
        await dev.synchronize()
    overlap = trace.overlap()
    return PipelineRun(
        nbytes=num * 4 * _NUM_BATCHES,
        elapsed_s=elapsed_s,
        overlap=overlap.ratio,
        ideal_s=overlap.ideal_s,
    )


def _clock(dev: sf.Device) -> Callable[[], float]:
    backend: Any = dev._core.backend
    clock_s: Callable[[], float] = backend.clock_s
    return clock_s
