"""Random pins and unpins of parts of one array, against a model that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.backends.memory import MemoryKind
from streamflow.memory.page_locked import Staged, find
from streamflow.memory.registered import num_registered

NUM = 64
BOUNDS = st.integers(0, NUM)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pin"), BOUNDS, BOUNDS, st.integers(0, 1)),
        st.tuples(st.just("unpin"), st.integers(0, 20), st.just(0), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 20), st.just(0), st.just(0)),
        st.tuples(st.just("copy"), BOUNDS, BOUNDS, st.integers(0, 1)),
    ),
    max_size=30,
)


@dataclass
class Range:
    start: int
    stop: int
    count: int = 0


class Model:
    """Which elements are registered, in which ranges, and for how many pins."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def pin(self, start: int, stop: int) -> Range | None:
        """The range that serves a pin; None where it is to be refused."""
        for known in self.ranges:
            if known.start < stop and start < known.stop:
                if not (known.start <= start and stop <= known.stop):
                    return None
                known.count += 1
                return known
        self.ranges.append(Range(start, stop, 1))
        return self.ranges[-1]

    def unpin(self, known: Range) -> None:
        known.count -= 1
        if not known.count:
            self.ranges.remove(known)

    def holds(self, at: int) -> bool:
        return any(known.start <= at < known.stop for known in self.ranges)


async def play(steps: list[Any]) -> None:
    options = sf.SimOptions(clock="virtual", devices=2)
    chosen = sf.Settings(sim=options)
    x = np.arange(NUM, dtype=np.float32)
    model, pins = Model(), []
    async with (
        sf.Device(0, backend="sim", settings=chosen) as one,
        sf.Device(1, backend="sim", settings=chosen) as other,
    ):
        devices = (one, other)
        for what, first, second, which in steps:
            start, stop = sorted((first, second))
            if what == "pin":
                await _pin(devices[which], x, start, stop, model, pins)
            elif what == "copy":
                await _copy(devices[which], x[start:stop])
            elif pins:
                pin, known = pins.pop(first % len(pins))
                if what == "drop":
                    await _drop(pin, devices)
                else:
                    await pin.unpin()
                del pin
                if known is not None:
                    model.unpin(known)
            _check(one, x, model)
        for pin, _ in pins:
            await pin.unpin()
        assert num_registered() == 0
    np.testing.assert_array_equal(x, np.arange(NUM, dtype=np.float32))


async def _pin(dev: sf.Device, x: Any, start: int, stop: int, model: Model, pins: Any) -> None:
    if start == stop:
        pins.append((await dev.pin(x[start:stop]), None))
        return
    known = model.pin(start, stop)
    try:
        pin = await dev.pin(x[start:stop])
    except ValueError:
        assert known is None
    else:
        assert known is not None
        pins.append((pin, known))


async def _drop(pin: sf.Pin, devices: Any) -> None:
    """As its finaliser does, but for the warning."""
    pin._hold.is_left = True
    pin._pins.post(pin._hold)
    for dev in devices:
        await dev.synchronize()


async def _copy(dev: sf.Device, part: Any) -> None:
    y = dev.put(part)  # staged, where only a part of it is pinned
    np.testing.assert_array_equal(await dev.get(y), part)


def _check(dev: sf.Device, x: Any, model: Model) -> None:
    assert num_registered() == len(model.ranges)
    attributes: Callable[[int], Any] = dev._core.backend.pointer_attributes
    for at in range(NUM):
        expected = MemoryKind.HOST if model.holds(at) else MemoryKind.UNREGISTERED
        assert attributes(x[at:].ctypes.data).kind is expected
        usable = find(x[at : at + 1])
        assert (usable is not None) is model.holds(at)
        assert not isinstance(usable, Staged)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_cr11_pins_count_as_the_model_does(steps: list[Any]) -> None:
    asyncio.run(play(steps))
