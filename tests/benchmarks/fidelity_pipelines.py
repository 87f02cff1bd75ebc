"""Calibration: predicted against measured times of three pipelines.

The device is calibrated first, in this process. Each pipeline is written once, over raw
verbs, and timed by the backend's own clock: on the GPU that is wall time, on the simulator
the time that it predicts with the profile just found. With --output the profile and all
figures are written there.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.backends.sim.cost import CostModel
from streamflow.config import Settings, SimOptions
from streamflow.testing.calibrate import calibrate, fit, save
from streamflow.testing.measurements import measure_host
from streamflow.testing.measuring import NOOP, Bench, Sizes
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
    backend = open_backend(backend_name, 0, settings, "measured")
    try:
        measured = {name: _repeat(backend, options, pipeline) for name, pipeline in PIPELINES}
        again = _measure_host_again(backend, sizes)
    finally:
        backend.close()
    profile["measurements_after"] = again
    for name, value in profile["runtime"].items():
        print(f"    runtime {name:<30} {value:.6g}")
    path = folder / "profile.json"
    save(profile, path)
    _compare_hosts(report, profile, again)
    found: dict[str, Any] = {}
    for name, pipeline in PIPELINES:
        backend = open_backend("sim", 0, Settings(sim=_predicting(str(path))), "predicted")
        try:
            submitted_s, predicted_s = _once(backend, options, pipeline)
        finally:
            backend.close()
        measured_ms = [1e3 * done_s for _, done_s in measured[name]]
        submitting_ms = [1e3 * each_s for each_s, _ in measured[name]]
        report.add(f"{name}: submitted", Sample(tuple(submitting_ms), "ms"))
        median_ms = report.add(f"{name}: measured", Sample(tuple(measured_ms), "ms"))
        report.add(f"{name}: predicted", Sample((1e3 * predicted_s,), "ms"))
        ratio = 1e3 * predicted_s / median_ms
        report.target(f"{name}: predicted off by", abs(ratio - 1) * 100, "%", at_most=15)
        found[name] = {
            "submitted_ms": submitting_ms,
            "submitted_predicted_ms": 1e3 * submitted_s,
            "measured_ms": measured_ms,
            "median_ms": median_ms,
            "predicted_ms": 1e3 * predicted_s,
            "ratio": ratio,
        }
    for name, each in found.items():
        print(
            f"  {name:<44} predicted {each['predicted_ms']:.3f} ms, "
            f"measured {each['median_ms']:.3f} ms, ratio {each['ratio']:.3f}"
        )
    text = json.dumps({"machine": profile["machine"], "pipelines": found}, indent=1)
    (folder / "pipelines.json").write_text(text + "\n", encoding="utf-8")


def _predicting(profile: str) -> SimOptions:
    return SimOptions(clock="virtual", predict=True, profile=profile, memory_nbytes=16 << 30)


def _measure_host_again(backend: Backend, sizes: Sizes) -> dict[str, Any]:
    """The host's costs once more: hosts have been seen to change their speed for minutes."""
    bench = Bench(backend, sizes)
    try:
        return {name: [times.as_dict()] for name, times in measure_host(bench)}
    finally:
        bench.close()


def _compare_hosts(report: Report, profile: dict[str, Any], again: dict[str, Any]) -> None:
    before = fit(profile["measurements"])
    after = fit(profile["measurements"] | again)
    for name in CostModel.names():
        if name.startswith("host_"):
            pair = [1e6 * fitted[name]["value"] for fitted in (before, after)]
            report.add(f"{name}, before and after", Sample(tuple(pair), "us"))


def _repeat(backend: Backend, options: Options, pipeline: Pipeline) -> list[tuple[float, float]]:
    num_reps = options.sized(max(5, min(options.num_reps, 9)), 2)
    bench = Bench(backend, Sizes())
    try:
        prepared = pipeline(bench, options.is_tiny)
        prepared()
        return [_timed(bench, prepared) for _ in range(num_reps)]
    finally:
        bench.close()


def _once(backend: Backend, options: Options, pipeline: Pipeline) -> tuple[float, float]:
    bench = Bench(backend, Sizes())
    try:
        return _timed(bench, pipeline(bench, options.is_tiny))
    finally:
        bench.close()


def _timed(bench: Bench, submit: Callable[[], None]) -> tuple[float, float]:
    """Seconds until all is submitted, and until it is done."""
    backend = bench.backend
    backend.synchronize_blocking()
    gc.collect()
    gc.disable()
    try:
        start_s = backend.clock_s()
        submit()
        submitted_s = backend.clock_s()
        bench.event.sync()
        return submitted_s - start_s, backend.clock_s() - start_s
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
    """2 000 tiny kernels in a chain, each with an event; it changes streams every eighth."""
    backend, streams = bench.backend, bench.streams
    num, window = (100, 16) if is_tiny else (2000, 256)
    address = bench.allocate(1 << 12, streams[0])
    streams[0].sync()
    x = backend.array_argument(address, (16,), np.dtype(np.float32))
    y = backend.array_argument(address + 2048, (16,), np.dtype(np.float32))
    ring = [backend.create_event() for _ in range(2 * window)]

    def call() -> None:
        stream = streams[0]
        for place in range(num):
            bench.launch(NOOP, stream, x, y, 5)
            event = ring[place % len(ring)]
            stream.record(event)
            if place % 8 == 7:
                stream = streams[place // 8 % 2]
                stream.wait(event)
            if place % window == window - 1 and place >= window:  # as a window bounds queues
                ring[(place - window) % len(ring)].sync()
        stream.record(bench.event)

    return call


PIPELINES: tuple[tuple[str, Pipeline], ...] = (
    ("transfer bound: copy in, kernel, copy out", transfer_bound),
    ("compute bound: fork and join", compute_bound),
    ("launch bound: a chain of tiny kernels", launch_bound),
)


def predict(profile: str) -> dict[str, float]:
    """Predicted milliseconds with a profile, for fitting again without a GPU."""
    found = {}
    options = Options("sim")
    for name, pipeline in PIPELINES:
        backend = open_backend("sim", 0, Settings(sim=_predicting(profile)), "predicted")
        try:
            found[name] = 1e3 * _once(backend, options, pipeline)[1]
        finally:
            backend.close()
    return found
