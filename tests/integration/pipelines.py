"""Sources and stages that the tests of pipelines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from conftest import add_one_kernel

import streamflow as sf


def batches_of(num: int, size: int = 8) -> list[Any]:
    """Arrays of 0, of 1, and so on."""
    return [np.full(size, number, np.float32) for number in range(num)]


def refilling(num: int, size: int = 8) -> Callable[[], Iterator[Any]]:
    """A source that has one buffer for all its items."""

    def source() -> Iterator[Any]:
        buffer = np.zeros(size, np.float32)
        for number in range(num):
            buffer[:] = number
            yield buffer

    return source


def add_one_to(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
    """A stage that changes its item in place."""
    dev.launch(add_one_kernel, x, x.size)
    return x
