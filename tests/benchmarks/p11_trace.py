"""P11: what tracing costs when it is off and when it is on, per op.

Off: against a copy of the package from which a script has taken every place that asks whether a
trace is being taken, over verbs that do nothing. On: the same calls inside ``dev.trace()``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import streamflow as sf
from tests.benchmarks import null
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device, noop, warm

_BATCH = 100
_ROOT = Path(__file__).resolve().parents[2]


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P11", "tracing off and on, per op")
    _compare_off(options, report)
    asyncio.run(_compare_on(options, report))
    return report


# -- off -------------------------------------------------------------------------------------


class _Strip(ast.NodeTransformer):
    """Makes every question whether something is traced, or anybody traces, a plain no."""

    _ASKED = frozenset(("instrument", "traced"))

    def __init__(self) -> None:
        self.num_found = 0

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        left, op = node.left, node.ops[0]
        is_asked = isinstance(left, ast.Attribute) and left.attr in self._ASKED
        if is_asked and isinstance(op, ast.IsNot | ast.Is):
            self.num_found += 1
            return ast.Constant(isinstance(op, ast.Is))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Calls that tell the tracer without asking first."""
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Attribute) and owner.attr == "tracer":
                self.num_found += 1
                return ast.Pass()
        return node


def stripped_copy(folder: Path) -> int:
    """Write the package without its hooks to ``folder``; returns how many there were."""
    package = folder / "streamflow"
    shutil.copytree(_ROOT / "streamflow", package, ignore=shutil.ignore_patterns("__pycache__"))
    num_found = 0
    for path in (package / "runtime").glob("*.py"):
        if path.stem == "tracer":
            continue
        strip = _Strip()
        tree = strip.visit(ast.parse(path.read_text(encoding="utf-8")))
        if strip.num_found:
            num_found += strip.num_found
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    return num_found


def _compare_off(options: Options, report: Report) -> None:
    num_rounds, num_reps = options.sized(30, 2), options.sized(200, 3)
    with tempfile.TemporaryDirectory() as folder:
        num_found = stripped_copy(Path(folder))
        if not num_found:
            raise AssertionError("the script found no hook to strip")
        report.note(f"{num_found} places were stripped")
        places = {"as it is": str(_ROOT), "stripped": folder}
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(num_rounds):
            for which in sorted(places, reverse=bool(number % 2)):
                for name, taken_ns in _in_a_process(places[which], num_reps).items():
                    found.setdefault(name, {}).setdefault(which, []).append(taken_ns)
    for name, by_place in found.items():
        for which, taken in by_place.items():
            report.add(f"{name}, {which}", Sample(tuple(taken), "ns"))
        ratios = [a / b for a, b in zip(by_place["as it is"], by_place["stripped"], strict=True)]
        ratio = statistics.median(ratios)
        report.target(f"off: {name} over the stripped copy", ratio, "x", at_most=1.05)


def _in_a_process(place: str, num_reps: int) -> dict[str, float]:
    program = (
        "from tests.benchmarks.p11_trace import measure_blocking; "
        f"measure_blocking({num_reps}, {place!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((place, str(_ROOT)))},
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_blocking(num_reps: int, place: str) -> None:
    """In a process of its own: print the nanoseconds of each call, least of all batches."""
    if Path(sf.__file__).parents[1] != Path(place).resolve():
        raise AssertionError(f"{sf.__file__} is not the copy under test")
    null.register()
    print(json.dumps(asyncio.run(_measure(num_reps))))


async def _measure(num_reps: int) -> dict[str, float]:
    best: dict[str, float] = {}
    async with sf.Device(0, backend="null") as dev:
        for name, call in _calls(dev).items():
            for _ in range(num_reps):
                best[name] = min(best.get(name, float("inf")), _time_ns(call))
                await dev.synchronize()
    return best


def _calls(dev: sf.Device) -> dict[str, Callable[[], object]]:
    x, y = dev.empty(1024, np.float32), dev.empty(1024, np.float32)
    stream = dev.stream("own")
    return {
        "dev.launch": lambda: dev.launch(noop, x, y, 5),
        "dev.launch, stream=": lambda: dev.launch(noop, x, y, 5, stream=stream),
        "empty + free": lambda: dev.empty(1024, np.uint8).free(),
    }


def _time_ns(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    for _ in range(_BATCH):
        call()
    return (time.perf_counter_ns() - start) / _BATCH


# -- on --------------------------------------------------------------------------------------


async def _compare_on(options: Options, report: Report) -> None:
    num_reps = options.sized(100, 3)
    async with device(options) as dev:
        await warm(dev)
        x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
        dev.stream("own")  # as for the others: named before the first call

        async def submit() -> float:
            taken = _time_ns(lambda: dev.launch(noop, x, y, 5)) / 1e3
            await dev.synchronize()
            return taken

        async def to_the_end() -> float:
            start = time.perf_counter_ns()
            for _ in range(_BATCH):
                dev.launch(noop, x, y, 5)
            await dev.synchronize()
            return (time.perf_counter_ns() - start) / _BATCH / 1e3

        for name, case in (("a launch", submit), ("a launch and its end", to_the_end)):
            off: list[float] = []
            on: list[float] = []
            for _ in range(num_reps + 2):
                off.append(await case())
                with dev.trace() as trace:
                    on.append(await case())
                _check(trace)
            report.add(f"{name}, off", Sample(tuple(off[2:]), "us"))
            report.add(f"{name}, on", Sample(tuple(on[2:]), "us"))
            ratio = statistics.median(a / b for a, b in zip(on[2:], off[2:], strict=True))
            report.target(f"on: {name} over off", ratio, "x", at_most=2)
        with dev.trace() as unread:  # records are made once
            await to_the_end()
        start = time.perf_counter()
        num_ops = len(unread.ops)
        taken_s = time.perf_counter() - start
        report.add("reading the trace, per op", Sample((taken_s / num_ops * 1e6,), "us"))


def _check(trace: Any) -> None:
    ops = trace.ops
    if len(ops) != _BATCH or any(op.duration_s is None for op in ops):
        raise AssertionError(f"the trace lacks something: {trace!r}")
