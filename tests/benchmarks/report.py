"""Rows of figures, the machine they were taken on, and how both are printed."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Options", "Report", "Sample", "describe_machine", "interleave"]

_PACKAGES = (
    "streamflow-cuda",
    "numpy",
    "anyio",
    "cuda-core",
    "cuda-bindings",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torch",
    "rmm-cu13",
    "rmm-cu12",
    "uvloop",
    "trio",
)


@dataclass(frozen=True, slots=True)
class Options:
    """How a benchmark is run.

    Attributes
    ----------
    backend : str
        ``"cuda"``, or ``"sim"`` where a benchmark can say something without a GPU.
    num_reps : int
        Repetitions of each figure; 5 at least when figures are to be believed.
    is_tiny : bool
        Sizes that only show that the benchmark still runs.
    output : Path or None
        A folder for files that a benchmark writes besides its rows.
    """

    backend: str = "cuda"
    num_reps: int = 20
    is_tiny: bool = False
    output: Path | None = None

    @property
    def is_cuda(self) -> bool:
        return self.backend == "cuda"

    def sized(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full


@dataclass(frozen=True, slots=True)
class Sample:
    """Repetitions of one figure, in ``unit``."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return (
            f"{_short(self.median)} {self.unit} "
            f"({_short(min(self.values))} to {_short(max(self.values))}, n={len(self.values)})"
        )


@dataclass(slots=True)
class Report:
    """What one benchmark has found."""

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, sample: Sample) -> float:
        """Add a row of figures; returns its median."""
        self.rows.append(
            {"name": name, "median": sample.median, "unit": sample.unit, "values": sample.values}
        )
        print(f"  {name:<52} {sample}", flush=True)
        return sample.median

    def target(self, what: str, found: float, unit: str, *, at_most: float | None = None,
               at_least: float | None = None) -> None:  # fmt: skip
        """Compare a figure with its target."""
        is_hit = (at_most is None or found <= at_most) and (at_least is None or found >= at_least)
        wanted = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
        self.targets.append(
            {"what": what, "found": found, "unit": unit, "wanted": wanted, "is_hit": is_hit}
        )
        unit = f" {unit}" if unit else ""
        print(
            f"  {'HIT   ' if is_hit else 'MISSED'} {what}: {_short(found)}{unit}, "
            f"wanted {wanted}{unit}",
            flush=True,
        )

    def table(self, title: str, columns: Sequence[str], rows: dict[str, list[Sample]]) -> None:
        """Print medians as a table; each cell becomes a row of figures."""
        print(f"  {title}")
        width = max(10, *(len(column) + 2 for column in columns))
        print(f"  {'':<10}" + "".join(f"{column:>{width}}" for column in columns))
        for name, cells in rows.items():
            shown = "".join(f"{_short(cell.median):>{width}}" for cell in cells)
            print(f"  {name:<10}{shown}", flush=True)
            for column, cell in zip(columns, cells, strict=True):
                self.rows.append(
                    {
                        "name": f"{title}: {name}, {column.strip()}",
                        "median": cell.median,
                        "unit": cell.unit,
                        "values": cell.values,
                    }
                )

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  note: {text}", flush=True)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def interleave(
    num_reps: int, cases: Sequence[tuple[str, Callable[[], float]]]
) -> dict[str, list[float]]:
    """Run every case once per repetition, in turn, so that drift meets all of them alike."""
    found: dict[str, list[float]] = {name: [] for name, _ in cases}
    for rep in range(num_reps + 1):
        for name, case in cases:
            value = case()
            if rep:  # the first round warms up
                found[name].append(value)
    return found


def describe_machine(backend: str) -> dict[str, Any]:
    """Card, driver, versions and date, as the system says."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load": _load(),
        "os": platform.platform(),
        "python": platform.python_version() + ("" if _has_gil() else " (free-threaded)"),
        "commit": _commit(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" not in found and (torch := optional("torch")) is not None:
        found["torch"] = torch.__version__
    if backend == "cuda":
        found |= _describe_card()
    return found


def optional(name: str) -> Any:
    """A module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import that fails half way is not there either
        if not isinstance(error, ImportError):
            print(f"  note: {name} does not import: {type(error).__name__}: {error}")
        return None


def save(path: str, machine: dict[str, Any], options: Options, reports: list[Report]) -> None:
    """Write everything as JSON."""
    text = {
        "machine": machine,
        "options": asdict(options) | {"output": str(options.output)},
        "reports": [report.as_dict() for report in reports],
    }
    Path(path).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _describe_card() -> dict[str, Any]:
    asked = "name,driver_version,pstate,clocks.sm,clocks.max.sm,persistence_mode"
    found: dict[str, Any] = {}
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        cards = [line.split(", ") for line in text.strip().splitlines()]
        found["card"] = f"{len(cards)} x {cards[0][0]}"
        found["driver"] = cards[0][1]
        found["card state"] = ", ".join(cards[0][2:])
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        found["card"] = f"nvidia-smi: {error}"
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if not error:
        found["cuda of the driver"] = f"{version // 1000}.{version % 1000 // 10}"
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _load() -> str:
    try:
        return " ".join(f"{each:.2f}" for each in os.getloadavg())
    except OSError:
        return "not known"


def _has_gil() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"
    return found.stdout.strip()


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
