"""Sources and stages that the tests of pipelines share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
from conftest import add_one_kernel
from support import turns, until

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


async def nothing_is_left(dev: sf.Device, source: Any = None) -> None:
    """Wait until the source is closed and nothing lives on; fails by a timeout."""
    if source is not None:
        await until(lambda: source.is_closed)
    with anyio.fail_after(10):
        while True:
            gc.collect()
            await dev.synchronize()
            if not dev.live().keys() - {"stream"} and dev.pinned.stats().num_live == 0:
                return
            await turns(1)
