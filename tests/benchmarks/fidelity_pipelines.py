"""Calibration: predicted against measured times of three pipelines.

The device is calibrated first, in this process. Each pipeline is written once, over raw
verbs, and timed by the backend's own clock: on the GPU that is wall time, on the simulator
the time that it predicts with the profile just found, and with the host's costs as they
were around each repetition. With --output the profile and all figures are written there.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings, SimOptions
from streamflow.testing.calibrate import calibrate, fit, save
from streamflow.testing.measurements import Measurements, measure_host
from streamflow.testing.measuring import NOOP, Bench, Sizes, Times
from tests.benchmarks.report import Options, Report, Sample

_TINY = Sizes(
    copies_nbytes=(1 << 12, 1 << 20, 1 << 22),
    duplex_nbytes=(1 << 20, 1 << 22),
    device_nbytes=(1 << 20, 1 << 22),
    arrays_nbytes=(1 << 20, 1 << 22),
    staged_nbytes=1 << 20,
    num_calls=50,
    num_reps=3,
)
_SPINS_S = (100e-6, 150e-6, 200e-6, 120e-6)


def run(options: Options) -> Report:
    """Calibrate, predict, measure and compare."""
    report = Report("calibration", "predicted against measured times of three pipelines")
    with nullcontext(options.output) if options.output else TemporaryDirectory() as folder:
        _run(options, report, Path(folder))
    return report


def _run(options: Options, report: Report, folder: Path) -> None:
    sizes = _TINY if options.is_tiny else Sizes()
    backend_name = options.backend
    print("  measurements:")
    # What stands for the GPU where there is none: the simulator with the shipped profile.
    settings = Settings(sim=_predicting("h200"))
    profile = calibrate(
        backend_name, sizes=sizes, settings=settings, say=lambda line: print(f"    {line}")
    )
    for name, value in profile["runtime"].items():
        print(f"    runtime {name:<30} {value:.6g}")
    backend = open_backend(backend_name, 0, settings, "measured")
    try:
        measured, between = _measure(backend, options, sizes)
    finally:
        backend.close()
    save(profile, folder / "profile.json")
    found: dict[str, Any] = {}
    for name, times in measured.items():
        submitting_ms, measured_ms = zip(*times, strict=True)
        report.add(f"{name}: submitted", Sample(submitting_ms, "ms"))
        report.add(f"{name}: measured", Sample(measured_ms, "ms"))
        found[name] = {"submitted_ms": submitting_ms, "measured_ms": measured_ms}
    predicted = _predict_each(profile, between, folder, is_tiny=options.is_tiny)
    for name, each in found.items():
        each["predicted_ms"] = predicted[name]
        report.add(f"{name}: predicted", Sample(tuple(predicted[name]), "ms"))
        pairs = zip(predicted[name], each["measured_ms"], strict=True)
        each["ratios"] = [predicted_ms / measured_ms for predicted_ms, measured_ms in pairs]
        each["ratio"] = ratio = float(np.median(each["ratios"]))
        report.target(f"{name}: predicted off by", abs(ratio - 1) * 100, "%", at_most=15)
    for name, each in found.items():
        low, high = min(each["ratios"]), max(each["ratios"])
        print(f"  {name:<44} predicted over measured {each['ratio']:.3f} ({low:.3f} to {high:.3f})")
    text = json.dumps({"machine": profile["machine"], "pipelines": found}, indent=1)
    (folder / "pipelines.json").write_text(text + "\n", encoding="utf-8")


def _predicting(profile: str) -> SimOptions:
    return SimOptions(
        clock="virtual",
        predict=True,
        profile=profile,
        memory_nbytes=16 << 30,
        check_races=False,  # what these kernels compute is nobody's business
    )


def _measure(
    backend: Backend, options: Options, sizes: Sizes
) -> tuple[dict[str, list[tuple[float, float]]], Measurements]:
    """Milliseconds of each pipeline (see :func:`_timed`), and the host's costs in between.

    Hosts have been seen to change their speed, for minutes or for moments.
    """
    num_reps = options.sized(max(5, min(options.num_reps, 9)), 2)
    between: dict[str, list[float]] = {}
    benches = {name: Bench(backend, sizes) for name, _ in PIPELINES}
    host = Bench(backend, replace(sizes, num_reps=1))
    try:
        calls = {name: make(benches[name], options.is_tiny) for name, make in PIPELINES}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for rep in range(num_reps + 1):
            for name, call in calls.items():
                times_ms = _timed(benches[name], call)
                if rep:  # the first round warms up
                    found[name].append(times_ms)
            for name, times in measure_host(host):
                between.setdefault(name, []).extend(times.values_s)
    finally:
        for bench in (*benches.values(), host):
            bench.close()
    return found, {name: [Times(tuple(found)).as_dict()] for name, found in between.items()}


def _predict_each(
    profile: dict[str, Any], between: Measurements, folder: Path, *, is_tiny: bool
) -> dict[str, list[float]]:
    """Predicted milliseconds of each repetition, with the host as it was just before and after.

    Hosts change their speed, for minutes or for moments: what a profile says of the host is
    right as long as it stays as it was.
    """
    found: dict[str, list[float]] = {name: [] for name, _ in PIPELINES}
    num_reps = len(next(iter(between.values()))[0]["values_s"]) - 1
    for rep in range(num_reps):
        around = {
            name: [Times(tuple(entries[0]["values_s"][rep : rep + 2])).as_dict()]
            for name, entries in between.items()
        }
        figures = fit(profile["measurements"] | around)
        save(profile | {"figures": figures}, folder / "around.json")
        for name, (_, milliseconds) in predict(
            str(folder / "around.json"), is_tiny=is_tiny
        ).items():
            found[name].append(milliseconds)
    (folder / "around.json").unlink()
    return found


def predict(profile: str, *, is_tiny: bool = False) -> dict[str, tuple[float, float]]:
    """Predicted milliseconds of each pipeline, as :func:`_timed`; needs no GPU."""
    found = {}
    for name, make in PIPELINES:
        backend = open_backend("sim", 0, Settings(sim=_predicting(profile)), "predicted")
        try:
            bench = Bench(backend, Sizes())
            found[name] = _timed(bench, make(bench, is_tiny))
            bench.close()
        finally:
            backend.close()
    return found


def _timed(bench: Bench, submit: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds until all is submitted, and until it is done."""
    backend = bench.backend
    backend.synchronize_blocking()
    gc.collect()
    gc.disable()
    try:
        start_s = backend.clock_s()
        submit()
        submitted_s = backend.clock_s()
        bench.event.sync()
        return 1e3 * (submitted_s - start_s), 1e3 * (backend.clock_s() - start_s)
    finally:
        gc.enable()


# -- the pipelines -------------------------------------------------------------------------

Pipeline = Callable[[Bench, bool], Callable[[], None]]


def transfer_bound(bench: Bench, is_tiny: bool) -> Callable[[], None]:
    """24 chunks of 32 MiB: in, a kernel, out, over four streams of pinned memory."""
    backend = bench.backend
    nbytes, num_chunks = (1 << 18, 8) if is_tiny else (32 << 20, 24)
    lanes = []
    for stream in bench.streams:
        up, down = bench.pinned(nbytes), bench.pinned(nbytes)
        x = bench.allocate(nbytes, stream)
        y = bench.allocate(nbytes, stream)
        lanes.append((stream, up, down, x, y, bench.scale_call(stream, x, y, nbytes)))

    def call() -> None:
        for place in range(num_chunks):
            stream, up, down, x, y, scale = lanes[place % len(lanes)]
            backend.copy_h2d(x, up, nbytes, stream)
            scale()
            backend.copy_d2h(down, y, nbytes, stream)
        for stream in bench.streams[1:]:
            stream.record(bench.event)
            bench.streams[0].wait(bench.event)
        bench.streams[0].record(bench.event)

    return call


def compute_bound(bench: Bench, is_tiny: bool) -> Callable[[], None]:
    """Fork and join: on each of four streams two streaming kernels and one of fixed time."""
    backend, streams = bench.backend, bench.streams
    nbytes, num_rounds = (1 << 20, 2) if is_tiny else (128 << 20, 16)
    first = streams[0]
    events = [backend.create_event() for _ in range(len(streams) + 1)]
    calls = []
    for stream in streams:
        x = bench.allocate(nbytes, stream)
        y = bench.allocate(nbytes, stream)
        there = bench.scale_call(stream, x, y, nbytes)
        calls.append((there, bench.scale_call(stream, y, x, nbytes)))

    def call() -> None:
        for _ in range(num_rounds):
            bench.spin(first, 100e-6)
            first.record(events[-1])
            for stream, event, pair, spin_s in zip(streams, events, calls, _SPINS_S, strict=False):
                if stream is not first:
                    stream.wait(events[-1])
                for streaming in pair:
                    streaming()
                bench.spin(stream, spin_s)
                if stream is not first:
                    stream.record(event)
            for event in events[1:-1]:
                first.wait(event)
        first.record(bench.event)

    return call


def launch_bound(bench: Bench, is_tiny: bool) -> Callable[[], None]:
    """2 000 tiny kernels in a chain, each with an event; it changes streams every eighth.

    The calls are made ready beforehand, so that next to none of the time is Python's.
    """
    backend, streams = bench.backend, bench.streams
    num, window = (100, 16) if is_tiny else (2000, 256)
    address = bench.allocate(1 << 12, streams[0])
    streams[0].sync()
    x = backend.array_argument(address, (16,), np.dtype(np.float32))
    y = backend.array_argument(address + 2048, (16,), np.dtype(np.float32))
    ring = [backend.create_event() for _ in range(2 * window)]
    calls: list[Callable[[], object]] = []
    stream = streams[0]
    for place in range(num):
        event = ring[place % len(ring)]
        calls += bench.launch_call(NOOP, stream, x, y, 5), partial(stream.record, event)
        if place % 8 == 7:
            stream = streams[place // 8 % 2]
            calls.append(partial(stream.wait, event))
        if place % window == window - 1 and place >= window:  # as a window bounds queues
            calls.append(ring[(place - window) % len(ring)].sync)
    calls.append(partial(stream.record, bench.event))

    def call() -> None:
        for each in calls:
            each()

    return call


PIPELINES: tuple[tuple[str, Pipeline], ...] = (
    ("transfer bound: copy in, kernel, copy out", transfer_bound),
    ("compute bound: fork and join", compute_bound),
    ("launch bound: a chain of tiny kernels", launch_bound),
)
