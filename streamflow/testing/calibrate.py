"""Calibration: measure a device, and write the profile that the simulator predicts it by.

:func:`measure` asks the device, :func:`fit` turns what it has answered into the figures of the
cost model, and needs no device: a profile keeps its measurements, so that it can be fitted
again. ``streamflow doctor --calibrate`` runs both.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamflow.backends import choose_backend, open_backend
from streamflow.backends.base import Backend
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.profile import FORMAT, VERSION, figure_name
from streamflow.config import Settings
from streamflow.errors import BackendUnavailable
from streamflow.testing.measurements import (
    LOOP_KEY,
    Measurements,
    Say,
    measure,
    measure_peers,
    measure_runtime,
)
from streamflow.testing.measuring import Sizes

__all__ = ["calibrate", "choose_gpu", "describe", "fit", "save"]

_NUMBERS = re.compile(r"\[([-+.,\de\s]+)\]")


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
        How much is measured. By default about half a minute on a GPU, and 4 GiB of its memory.
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
    opened = open_backend(backend, index, settings, LOOP_KEY)
    try:
        machine = describe(opened)
        found = measure(opened, sizes, say)
        found |= measure_peers(opened, settings, sizes, say)
    finally:
        opened.close()
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine,
        "figures": fit(found),
        "runtime": asyncio.run(measure_runtime(backend, settings, sizes)),
        "measurements": found,
    }


def choose_gpu(backend: str) -> str:
    """The backend to calibrate.

    Parameters
    ----------
    backend : str
        As ``Device`` takes it.

    Raises
    ------
    BackendUnavailable
        There is no GPU, or the simulator was asked for.
    """
    name, reason = choose_backend(backend)
    if name == "sim":
        raise BackendUnavailable(
            "calibrating measures a GPU; "
            + (f"there is none: {reason}" if reason else "the simulator has only its profile")
        )
    return name


def save(profile: Mapping[str, Any], path: Path) -> None:
    """Write a profile as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(profile, indent=1)
    # Repetitions on one line each: the file is for people too.
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")


def describe(backend: Backend) -> dict[str, Any]:
    """Card, driver, host, versions and date, as the system says."""
    found: dict[str, Any] = {
        "card": backend.properties.name,
        "backend": backend.name,
        "host_cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "os": platform.system(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "streamflow-cuda": "a checkout",
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
    if more_s <= less_s:  # noise: better a rate of one size than none
        return 0.0, more / more_s
    rate = (more - less) / (more_s - less_s)
    rests_s = [seconds - nbytes / rate for nbytes, seconds in points[:2]]
    return max(0.0, sum(rests_s) / len(rests_s)), rate


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "not known"
