"""Tools for testing programs without a GPU, and backends with one."""

from __future__ import annotations

from streamflow.backends.sim.controls import Clock, Controls, Gate, Rule
from streamflow.backends.sim.report import Race, RaceKind, RacingOp
from streamflow.config import SimOptions

__all__ = [
    "Clock",
    "Controls",
    "Gate",
    "Race",
    "RaceKind",
    "RacingOp",
    "Rule",
    "SimOptions",
]
