"""P13: what ``import streamflow`` costs beyond NumPy and anyio, and that it wakes no driver."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys

from tests.benchmarks.report import Options, Report, Sample

_BASE = "import numpy, anyio"
_TIMED = """
import sys, time
{first}
start = time.perf_counter()
import streamflow
print((time.perf_counter() - start) * 1e3)
import streamflow.device
bad = sorted(name for name in sys.modules if name.split(".")[0] in
             ("cuda", "cupy", "torch", "numba", "trio", "uvloop", "dask"))
print(",".join(bad))
if sys.platform == "linux":
    with open("/proc/self/maps") as lines:
        print(any("libcuda.so" in line or "libcuda-" in line for line in lines))
"""


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P13", "import streamflow")
    num_reps = max(options.sized(15, 1), min(options.num_reps, 40) if not options.is_tiny else 1)
    beyond, alone, woken = [], [], set()
    for rep in range(num_reps + (not options.is_tiny)):
        for first, into in ((f"{_BASE}", beyond), ("", alone)):
            lines = _python("-c", _TIMED.format(first=first)).splitlines()
            if rep or options.is_tiny:
                into.append(float(lines[0]))
            woken.update(filter(None, lines[1].split(",")))
            if len(lines) > 2 and lines[2] == "True":
                woken.add("libcuda.so")
    report.add("with NumPy and anyio there already", Sample(tuple(beyond), "ms"))
    report.add("in a fresh interpreter", Sample(tuple(alone), "ms"))
    report.target("import beyond NumPy and anyio", statistics.median(beyond), "ms", at_most=100)
    report.target("drivers and frameworks woken", len(woken), "", at_most=0)
    if woken:
        report.note("woken: " + ", ".join(sorted(woken)))
    for own_us, name in _dearest():
        report.note(f"{own_us / 1e3:6.2f} ms  {name}")
    return report


def _dearest() -> list[tuple[int, str]]:
    """The modules that took longest themselves, by -X importtime, NumPy and anyio apart."""
    code = f"{_BASE}\nimport sys; print('-- ours', file=sys.stderr, flush=True)\nimport streamflow"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
    )
    ours = done.stderr.partition("-- ours")[2]
    rows = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)", ours)
    return sorted(((int(own), name) for own, name in rows), reverse=True)[:8]


def _python(*args: str) -> str:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=True
    ).stdout
