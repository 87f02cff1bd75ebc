"""Tools for testing: kernels against their bodies, and the backend contract to subclass."""

from streamflow.backends.sim.memory_map import MemoryRow, MemoryState
from streamflow.backends.sim.stall import Stall
from streamflow.testing.check import (
    EDGE_SIZES,
    SIZE,
    KernelMismatch,
    KernelNotChecked,
    KernelReport,
    check_kernel,
    check_kernel_async,
)

__all__ = [
    "EDGE_SIZES",
    "SIZE",
    "KernelMismatch",
    "KernelNotChecked",
    "KernelReport",
    "MemoryRow",
    "MemoryState",
    "Stall",
    "check_kernel",
    "check_kernel_async",
]
