"""Calibration: measure a device, and write the profile that the simulator predicts it by.

:func:`measure` asks the device, :func:`fit` turns what it has answered into the figures of the
cost model, and needs no device: a profile keeps its measurements, so that it can be fitted
again. ``streamflow doctor --calibrate`` runs both.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import streamflow as sf
from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.profile import FORMAT, VERSION, figure_name
from streamflow.config import Settings
from streamflow.testing.measuring import EMPTY, NOOP, STALL_S_PER_CALL, Bench, Sizes, Times

__all__ = ["Measurements", "calibrate", "describe", "fit", "measure", "measure_runtime", "save"]

Measurements: TypeAlias = dict[str, list[dict[str, Any]]]
"""By name: one entry for each size, as :meth:`~streamflow.testing.measuring.Times.as_dict`."""

Say: TypeAlias = Callable[[str], None]


def calibrate(
    backend: str,
    *,
    index: int = 0,
    sizes: Sizes | None = None,
    settings: Settings | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure a device and fit its profile.

    Parameters
    ----------
    backend : str
        A backend's name, not ``"auto"``.
    index : int
        Which device of it.
    sizes : Sizes, optional
        How much is measured. By default about half a minute on a GPU, and 2 GiB of its memory.
    settings : Settings, optional
        What the backend is opened with; by default the environment's.
    say : callable
        Told each measurement as it is done.

    Returns
    -------
    dict
        The profile, ready for :func:`save`.

    Raises
    ------
    BackendUnavailable
        The backend cannot start here.
    """
    settings = settings or Settings.from_environment()
    sizes = sizes or Sizes()
    opened = open_backend(backend, index, settings, "calibrate")
    try:
        machine = describe(opened)
        found = measure(opened, sizes, say)
        found |= _measure_peers(opened, backend, settings, sizes, say)
    finally:
        opened.close()
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine,
        "figures": fit(found),
        "measurements": found,
    }


def save(profile: Mapping[str, Any], path: Path) -> None:
    """Write a profile as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")


def describe(backend: Backend) -> dict[str, Any]:
    """Card, driver, host, versions and date, as the system says."""
    found: dict[str, Any] = {
        "card": backend.properties.name,
        "backend": backend.name,
        "host_cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    for package in ("streamflow-cuda", "cuda-core", "cuda-bindings", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if backend.is_cuda:
        from streamflow.backends.cuda.versions import driver_versions

        found["driver"], found["cuda"] = driver_versions()
    return found


# -- measuring -----------------------------------------------------------------------------


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
    bench = Bench(backend, sizes)
    found: Measurements = {}
    try:
        for measured in (_copies, _device_work, _kernels, measure_host):
            for name, times in measured(bench):
                found.setdefault(name, []).append(times.as_dict())
                say(_line(name, times))
    finally:
        bench.close()
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
        yield "host_launch_0_arguments", host_times(lambda: bench.launch(EMPTY, first))
        yield "host_launch_3_arguments", host_times(lambda: bench.launch(NOOP, first, x, y, 5))
        yield "host_copy_h2d", host_times(lambda: backend.copy_h2d(a, up, 4096, first))
        yield "host_copy_d2h", host_times(lambda: backend.copy_d2h(up, a, 4096, first))
        yield "host_copy_d2d", host_times(lambda: backend.copy_d2d(b, a, 4096, first))
        yield "host_fill", host_times(lambda: backend.fill(a, b"\1\2\3\4", 1024, first))
        yield "host_record", host_times(lambda: first.record(event))
        yield "host_wait", host_times(lambda: first.wait(event), before=stall_second)
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


def _measure_peers(
    opened: Backend, name: str, settings: Settings, sizes: Sizes, say: Say
) -> Measurements:
    try:
        other = open_backend(name, opened.index + 1, settings, "calibrate")
    except ValueError:  # there is no second device
        return {}
    found: Measurements = {}
    try:
        there, here = Bench(other, sizes), Bench(opened, sizes)
        try:
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
            here.close()
            there.close()
    finally:
        other.close()
    return found


async def measure_runtime(
    backend: str, *, nbytes: int = 1 << 28, num_reps: int = 5, num_launches: int = 200
) -> dict[str, float]:
    """What the public API reaches on top: staged copies and the cost of an op.

    No part of the cost model: the simulator runs the runtime itself.

    Parameters
    ----------
    backend : str
        A backend's name.
    nbytes : int
        Size of the pageable array.
    num_reps : int
        Repetitions, after one that warms up; medians count.
    num_launches : int
        Launches in a row; below the window of a stream.
    """
    kernel = sf.Kernel(NOOP)
    source = np.ones(nbytes // 4, np.float32)
    result = np.zeros_like(source)
    found: dict[str, list[float]] = {}
    async with sf.Device(0, backend=backend) as dev:
        clock_s = dev._core.backend.clock_s
        array = await dev.put(source)
        x, y = dev.zeros(256, np.float32), dev.zeros(256, np.float32)
        await dev.launch(kernel, x, y, 5)
        for _ in range(num_reps + 1):
            start_s = clock_s()
            await dev.put(source, out=array)
            put_s = clock_s()
            await dev.get(array, out=result)
            get_s = clock_s()
            await dev.get(array)
            end_s = clock_s()
            for _ in range(num_launches):
                op = dev.launch(kernel, x, y, 5)
            launched_s = clock_s()
            await op
            for name, taken_s in (
                ("put_s", put_s - start_s),
                ("get_into_out_s", get_s - put_s),
                ("get_s", end_s - get_s),
                ("launch_s", (launched_s - end_s) / num_launches),
            ):
                found.setdefault(name, []).append(taken_s)
    medians = {name: float(np.median(values[1:])) for name, values in found.items()}
    rates = {
        f"{name.removesuffix('_s')}_bytes_per_s": nbytes / medians[name] if medians[name] else 0.0
        for name in ("put_s", "get_into_out_s", "get_s")
    }
    return {**rates, "launch_s": medians["launch_s"]}


# -- fitting ---------------------------------------------------------------------------------


def fit(found: Measurements) -> dict[str, dict[str, Any]]:
    """The figures of a profile.

    Parameters
    ----------
    found : dict
        What :func:`measure` has returned, or a profile's ``measurements``.

    Returns
    -------
    dict
        By figure: its value and its source. What was not measured is taken from the shipped
        profile and called assumed.
    """
    latencies_s, values = [], {}
    for direction in ("h2d", "d2h"):
        latency_s, values[f"{direction}_rate"] = _line_through(found[direction])
        latencies_s.append(latency_s)
        _, values[f"{direction}_duplex_rate"] = _line_through(found[f"{direction}_duplex"])
    values["copy_latency_s"] = sum(latencies_s) / len(latencies_s)
    values["kernel_s"] = _median_s(found, "kernel_empty")
    for name, measured in (
        ("d2d_rate", "d2d"),
        ("fill_rate", "fill"),
        ("memory_rate", "kernel_streaming"),
        ("peer_rate", "peer"),
    ):
        if measured in found:
            _, values[name] = _line_through(found[measured])
    values |= _fit_host(found)
    assumed = CostModel.load("h200", {})
    return {
        figure_name(name): {"value": values[name], "source": "measured"}
        if name in values
        else {"value": getattr(assumed, name), "source": "assumed"}
        for name in CostModel.names()
    }


def _fit_host(found: Measurements) -> dict[str, float]:
    none_s = _median_s(found, "host_launch_0_arguments")
    three_s = _median_s(found, "host_launch_3_arguments")
    record_s = _median_s(found, "host_record")
    argument_s = max(0.0, (three_s - none_s) / 3)
    device_s = _median_s(found, "spin_20_us")
    waited_s = _median_s(found, "host_spin_20_us_and_sync")
    copies = ("host_copy_h2d", "host_copy_d2h")
    return {
        "host_launch_s": none_s,
        "host_argument_s": argument_s,
        "host_copy_s": sum(_median_s(found, name) for name in copies) / len(copies),
        "host_fill_s": _median_s(found, "host_fill"),
        "host_record_s": record_s,
        "host_wait_s": _median_s(found, "host_wait"),
        "host_query_s": _median_s(found, "host_query_done"),
        "host_allocate_s": _median_s(found, "host_allocate"),
        "host_free_s": _median_s(found, "host_free"),
        # The kernel starts once its launch has returned; the record runs beside it.
        "host_sync_s": max(0.0, waited_s - none_s - argument_s - device_s),
    }


def _median_s(found: Measurements, name: str) -> float:
    return float(found[name][0]["median_s"])


def _line_through(entries: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(fixed seconds, bytes per second) of work whose time is linear in its size.

    The rate is the slope between the two largest sizes, which no cache holds; the fixed part
    is what the two smallest take beyond that.
    """
    points = sorted((float(entry["nbytes"]), float(entry["median_s"])) for entry in entries)
    if len(points) == 1:
        return 0.0, points[0][0] / points[0][1]
    (less, less_s), (more, more_s) = points[-2:]
    if more_s <= less_s:
        raise ValueError(f"{more:.0f} bytes took no longer than {less:.0f}: the device is not idle")
    rate = (more - less) / (more_s - less_s)
    rests_s = [seconds - nbytes / rate for nbytes, seconds in points[:2]]
    return max(0.0, sum(rests_s) / len(rests_s)), rate


def _line(name: str, times: Times) -> str:
    low, high = min(times.values_s), max(times.values_s)
    size = f"{times.nbytes:>12,} bytes" if times.nbytes else " " * 18
    rate = f"  {times.nbytes / times.median_s / 1e9:9.2f} GB/s" if times.nbytes else ""
    return (
        f"{name:<38} {size}  {times.median_s * 1e6:11.3f} us "
        f"({low * 1e6:.3f} to {high * 1e6:.3f}){rate}"
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "not known"
