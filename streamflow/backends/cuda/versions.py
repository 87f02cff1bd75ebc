"""Which driver is there and how many devices it has, for reports."""

from __future__ import annotations

import re
from pathlib import Path

from cuda.bindings import driver

__all__ = ["driver_versions", "num_devices"]

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def driver_versions() -> tuple[str, str]:
    """(the driver's own version, the CUDA version that it supports); "not known" if not told."""
    try:
        text = _KERNEL_MODULE.read_text(encoding="utf-8")
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    except OSError:
        found = None
    error, version = driver.cuDriverGetVersion()
    cuda = "not known" if error else f"{version // 1000}.{version % 1000 // 10}"
    return (found[1] if found else "not known"), cuda


def num_devices() -> int:
    """How many the driver sees; 0 where it does not say."""
    error, count = driver.cuDeviceGetCount()
    return 0 if error else int(count)
