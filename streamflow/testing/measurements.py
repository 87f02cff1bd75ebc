"""What calibration asks a device: copies, kernels, and what the host spends in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

import streamflow as sf
from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings
from streamflow.testing.measuring import EMPTY, NOOP, STALL_S_PER_CALL, Bench, Sizes, Times

__all__ = [
    "LOOP_KEY",
    "Measurements",
    "Say",
    "measure",
    "measure_host",
    "measure_peers",
    "measure_runtime",
]

Measurements: TypeAlias = dict[str, list[dict[str, Any]]]
"""By name: one entry for each size, as :meth:`~streamflow.testing.measuring.Times.as_dict`."""

Say: TypeAlias = Callable[[str], None]

LOOP_KEY = "calibrate"
"""Devices opened with it may copy between each other."""


def measure(backend: Backend, sizes: Sizes, say: Say = lambda line: None) -> Measurements:
    """Everything that :func:`fit` needs, but copies between devices.

    Parameters
    ----------
    backend : Backend
        Open, and idle.
    sizes : Sizes
        How much is measured.
    say : callable
        Told each measurement as it is done.
    """
    found: Measurements = {}
    with Bench(backend, sizes) as bench:
        bench.warm_up()
        for measured in (_copies, _device_work, _kernels, measure_host):
            for name, times in measured(bench):
                found.setdefault(name, []).append(times.as_dict())
                say(_line(name, times))
    return found


def _copies(bench: Bench) -> Iterator[tuple[str, Times]]:
    backend, sizes = bench.backend, bench.sizes
    one, two = bench.streams[:2]
    largest = max(*sizes.copies_nbytes, *sizes.duplex_nbytes)
    up, down = bench.pinned(largest), bench.pinned(largest)
    with bench.device_memory(largest, largest) as (a, b):
        # Pinned memory is touched before it is timed.
        backend.copy_d2h(up, a, largest, one)
        backend.copy_d2h(down, b, largest, one)
        for nbytes in sizes.copies_nbytes:
            copy_in = partial(backend.copy_h2d, a, up, nbytes, one)
            copy_out = partial(backend.copy_d2h, down, b, nbytes, one)
            yield "h2d", bench.device_times(1, copy_in, nbytes=nbytes)
            yield "d2h", bench.device_times(1, copy_out, nbytes=nbytes)
        for nbytes in sizes.duplex_nbytes:
            copy_in = partial(backend.copy_h2d, a, up, nbytes, one)
            copy_out = partial(backend.copy_d2h, down, b, nbytes, two)
            into, out = bench.duplex_times(8, (copy_in, copy_out), nbytes)
            yield "h2d_duplex", into
            yield "d2h_duplex", out


def _device_work(bench: Bench) -> Iterator[tuple[str, Times]]:
    backend, first = bench.backend, bench.streams[0]
    for nbytes in bench.sizes.device_nbytes:
        with bench.device_memory(nbytes, nbytes) as (a, b):
            copy = partial(backend.copy_d2d, b, a, nbytes, first)
            fill = partial(backend.fill, a, b"\1\2\3\4", nbytes // 4, first)
            yield "d2d", bench.device_times(1, copy, nbytes=nbytes)
            yield "fill", bench.device_times(1, fill, nbytes=nbytes)


def _kernels(bench: Bench) -> Iterator[tuple[str, Times]]:
    streams, num = bench.streams, bench.sizes.num_calls
    first, second = streams[:2]

    def empties() -> None:
        for _ in range(num):
            bench.launch(EMPTY, first)

    def empties_spread() -> None:
        for place in range(num):
            bench.launch(EMPTY, streams[place % 4])

    def recorded() -> None:
        for _ in range(num):
            bench.launch(EMPTY, first)
            first.record(bench.event)

    def hops() -> None:
        for place in range(num):
            here, there = (first, second) if place % 2 == 0 else (second, first)
            bench.launch(EMPTY, here)
            here.record(bench.event)
            there.wait(bench.event)

    yield "kernel_empty", bench.device_times(num, empties)
    yield "kernel_empty_4_streams", bench.device_times(num, empties_spread, streams)
    yield "kernel_and_record", bench.device_times(num, recorded)
    yield "kernel_record_wait_on_another_stream", bench.device_times(num, hops, (first, second))
    for ns in (20_000, 100_000, 500_000):
        spin = partial(bench.spin, first, ns * 1e-9)
        yield f"spin_{ns // 1000}_us", bench.device_times(1, spin)
    for nbytes in bench.sizes.arrays_nbytes:
        # An array pair for each stream: kernels that share arrays would share the cache.
        with bench.device_memory(*([nbytes] * 8)) as arrays:
            calls = [
                bench.scale_call(streams[place], arrays[2 * place], arrays[2 * place + 1], nbytes)
                for place in range(4)
            ]

            alone = partial(_call_in_turn, calls[:1], 8)
            spread = partial(_call_in_turn, calls, 8)
            yield "kernel_streaming", bench.device_times(8, alone, nbytes=2 * nbytes)
            times = bench.device_times(8, spread, streams, nbytes=2 * nbytes)
            yield "kernel_streaming_4_streams", times


def _call_in_turn(calls: Sequence[Callable[[], None]], num: int) -> None:
    for place in range(num):
        calls[place % len(calls)]()


def measure_host(bench: Bench) -> Iterator[tuple[str, Times]]:
    """What the host spends in each call, by ``host_`` names.

    Parameters
    ----------
    bench : Bench
        An idle device.
    """
    backend, event = bench.backend, bench.event
    first, second = bench.streams[:2]
    host_times = bench.host_times
    stall_s = 50e-6 + STALL_S_PER_CALL * bench.sizes.num_calls

    def stall_second() -> None:
        bench.spin(second, stall_s)
        second.record(event)

    with bench.device_memory(1 << 20, 1 << 20) as (a, b):
        up = bench.pinned(1 << 20)
        x = backend.array_argument(a, (256,), np.dtype(np.float32))
        y = backend.array_argument(b, (256,), np.dtype(np.float32))
        yield "host_launch_0_arguments", host_times(bench.launch_call(EMPTY, first))
        yield "host_launch_3_arguments", host_times(bench.launch_call(NOOP, first, x, y, 5))
        yield "host_copy_h2d", host_times(partial(backend.copy_h2d, a, up, 4096, first))
        yield "host_copy_d2h", host_times(partial(backend.copy_d2h, up, a, 4096, first))
        yield "host_copy_d2d", host_times(partial(backend.copy_d2d, b, a, 4096, first))
        yield "host_fill", host_times(partial(backend.fill, a, b"\1\2\3\4", 1024, first))
        yield "host_record", host_times(partial(first.record, event))
        yield "host_wait", host_times(partial(first.wait, event), before=stall_second)
        yield "host_query_pending", host_times(lambda: event.is_done, before=stall_second)
        yield "host_query_done", host_times(lambda: event.is_done)
        made: list[Any] = []
        create, close = backend.create_event, lambda: made.pop().close()
        yield "host_create_event", host_times(lambda: made.append(create()), after=made.clear)
        made.clear()
        yield (
            "host_close_event",
            host_times(
                close,
                before=lambda: made.extend(create() for _ in range(bench.sizes.num_calls)),
            ),
        )
    addresses: list[int] = []
    allocate, free, pool = backend.allocate, backend.deallocate, bench.pool

    def give_back() -> None:
        while addresses:
            free(addresses.pop(), first)

    def take() -> None:
        addresses.append(allocate(pool, 1 << 16, first))

    yield "host_allocate", host_times(take, after=give_back)

    def take_all() -> None:
        for _ in range(bench.sizes.num_calls):
            take()

    yield "host_free", host_times(lambda: free(addresses.pop(), first), before=take_all)
    for ns in (0, 20_000, 200_000):
        yield f"host_spin_{ns // 1000}_us_and_sync", _spin_and_sync(bench, ns)


def _spin_and_sync(bench: Bench, ns: int) -> Times:
    first, event, clock_s = bench.streams[0], bench.event, bench.backend.clock_s
    found = []
    for _ in range(bench.sizes.num_reps * 5 + 1):
        start_s = clock_s()
        bench.spin(first, ns * 1e-9)
        first.record(event)
        event.sync()
        found.append(clock_s() - start_s)
    return Times(tuple(found[1:]))


def measure_peers(opened: Backend, settings: Settings, sizes: Sizes, say: Say) -> Measurements:
    """Copies from one device to the next of the same backend, where there is one.

    Parameters
    ----------
    opened : Backend
        The one that copies.
    settings : Settings
        What it was opened with.
    sizes : Sizes
        How much is measured.
    say : callable
        Told each measurement as it is done.
    """
    try:
        other = open_backend(opened.name, opened.index + 1, settings, LOOP_KEY)
    except ValueError:  # there is no second device
        return {}
    found: Measurements = {}
    try:
        with Bench(other, sizes) as there, Bench(opened, sizes) as here:
            stream = here.streams[0]
            for nbytes in sizes.device_nbytes:
                with here.device_memory(nbytes) as (a,), there.device_memory(nbytes) as (b,):
                    copy = partial(
                        opened.copy_peer, b, other.index, a, opened.index, nbytes, stream
                    )
                    times = here.device_times(1, copy, nbytes=nbytes)
                found.setdefault("peer", []).append(times.as_dict())
                say(_line("peer", times))
    finally:
        other.close()
    return found


async def measure_runtime(backend: str, settings: Settings, sizes: Sizes) -> dict[str, float]:
    """What the public API reaches on top: staged copies and the cost of a launch.

    No part of the cost model: the simulator runs the runtime itself.

    Parameters
    ----------
    backend : str
        A backend's name.
    settings : Settings
        Of the device.
    sizes : Sizes
        How much is measured.
    """
    kernel = sf.Kernel(NOOP)
    nbytes = sizes.staged_nbytes
    source = np.ones(nbytes // 4, np.float32)
    result = np.zeros_like(source)  # touched
    found: dict[str, list[float]] = {}
    async with sf.Device(0, backend=backend, settings=settings) as dev:
        clock_s = dev._core.backend.clock_s
        array = await dev.put(source)
        x, y = dev.zeros(256, np.float32), dev.zeros(256, np.float32)
        await dev.launch(kernel, x, y, 5)
        for _ in range(sizes.num_reps + 1):
            start_s = clock_s()
            await dev.put(source, out=array)
            put_s = clock_s()
            await dev.get(array, out=result)
            get_s = clock_s()
            await dev.get(array)
            end_s = clock_s()
            for _ in range(sizes.num_calls):
                op = dev.launch(kernel, x, y, 5)
            launched_s = clock_s()
            await op
            for name, taken_s in (
                ("put_bytes_per_s", put_s - start_s),
                ("get_into_out_bytes_per_s", get_s - put_s),
                ("get_bytes_per_s", end_s - get_s),
                ("launch_s", (launched_s - end_s) / sizes.num_calls),
            ):
                found.setdefault(name, []).append(taken_s)
    medians = {name: float(np.median(values[1:])) for name, values in found.items()}
    return {
        name: taken_s if name == "launch_s" else nbytes / taken_s
        for name, taken_s in medians.items()
    }


def _line(name: str, times: Times) -> str:
    low, high = min(times.values_s), max(times.values_s)
    size = f"{times.nbytes:>12,} bytes" if times.nbytes else " " * 18
    rate = f"  {times.nbytes / times.median_s / 1e9:9.2f} GB/s" if times.nbytes else ""
    return (
        f"{name:<38} {size}  {times.median_s * 1e6:11.3f} us "
        f"({low * 1e6:.3f} to {high * 1e6:.3f}){rate}"
    )
