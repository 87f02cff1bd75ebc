"""Tools for testing: programs without a GPU, kernels against their bodies, backends on one."""

from __future__ import annotations

from streamflow.backends.sim.controls import Clock, Controls, Gate, Rule
from streamflow.backends.sim.memory_map import MemoryRow, MemoryState
from streamflow.backends.sim.report import Race, RaceKind, RacingOp
from streamflow.backends.sim.stall import Stall
from streamflow.config import SimOptions
from streamflow.testing.check import (
    EDGE_SIZES,
    SIZE,
    KernelMismatch,
    KernelNotChecked,
    KernelReport,
    check_kernel,
    check_kernel_async,
)
from streamflow.testing.explore import ExplorationFailed, Explored, explore

__all__ = [
    "EDGE_SIZES",
    "SIZE",
    "Clock",
    "Controls",
    "ExplorationFailed",
    "Explored",
    "Gate",
    "KernelMismatch",
    "KernelNotChecked",
    "KernelReport",
    "MemoryRow",
    "MemoryState",
    "Race",
    "RaceKind",
    "RacingOp",
    "Rule",
    "SimOptions",
    "Stall",
    "check_kernel",
    "check_kernel_async",
    "explore",
]
