"""A SyncedArray in each state, and what is asked of it, for the tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import streamflow as sf
from streamflow.scheduler.synced_table import Asked

State = sf.SyncedState
N = 1000
LARGE = 1 << 20  # items: not read before a copy is submitted


class Broken(Exception):
    """What a body or a kernel raises."""


def broken_call(stream: Any, *arrays: Any) -> None:
    """For ``dev.call``: work that fails."""
    raise Broken("work on the device")


async def fill_host(m: sf.SyncedArray, value: float) -> None:
    async with m.host(write="all") as a:
        a[...] = value


async def fill_device(dev: sf.Device, m: sf.SyncedArray, value: float) -> None:
    async with m.device(write="all") as d:
        dev.fill(d, value)


async def contents(m: sf.SyncedArray) -> Any:
    """The one value that the array has everywhere, read on the host."""
    async with m.host() as a:
        values = set(a.ravel().tolist())
    assert len(values) == 1
    return values.pop()


async def in_state(
    dev: sf.Device, state: State, value: float, shape: Any = N, dtype: Any = np.float32
) -> sf.SyncedArray:
    """A new array in ``state``, with ``value`` in it where it has any."""
    m = sf.SyncedArray(dev, shape, dtype)
    if state in (State.HEAD_AT_CPU, State.SYNCED, State.POISONED):
        await fill_host(m, value)
    if state is State.HEAD_AT_GPU:
        await fill_device(dev, m, value)
    if state is State.SYNCED:
        await m.push()
    if state is State.POISONED:
        try:
            async with m.host(write=True) as a:
                a[:1] = 99
                raise Broken("body")
        except Broken:
            pass
    assert m.state is state
    return m


async def reading(block: Any) -> None:
    async with block:
        pass


def asking(dev: sf.Device, m: sf.SyncedArray, value: float) -> dict[Asked, Callable[[], Any]]:
    """How to ask for each row of the table; each is a function whose result may be awaited."""

    async def write_host(write: Any) -> None:
        async with m.host(write=write) as a:
            a[...] = value

    async def write_device(write: Any) -> None:
        async with m.device(write=write) as d:
            dev.fill(d, value)

    async def adopt(data: Any) -> None:
        m.adopt(data)

    async def discard() -> None:
        m.discard()

    async def transfer(submit: Callable[[], Awaitable[None]]) -> None:
        await submit()

    return {
        Asked.READ_HOST: lambda: reading(m.host()),
        Asked.READ_DEVICE: lambda: reading(m.device()),
        Asked.WRITE_HOST: lambda: write_host(True),
        Asked.WRITE_DEVICE: lambda: write_device(True),
        Asked.WRITE_ALL_HOST: lambda: write_host("all"),
        Asked.WRITE_ALL_DEVICE: lambda: write_device("all"),
        Asked.ADOPT_HOST: lambda: adopt(np.full(m.shape, value, m.dtype)),
        Asked.ADOPT_DEVICE: lambda: adopt(dev.full(m.shape, value, m.dtype)),
        Asked.PUSH: lambda: transfer(m.push),
        Asked.PULL: lambda: transfer(m.pull),
        Asked.DISCARD: discard,
    }


def set_to_two(stream: Any, y: Any) -> None:
    if isinstance(y, np.ndarray):  # the simulator's; elsewhere it is memory nobody fills here
        y[...] = 2
    else:
        fill_with_two(stream, y)


def fill_with_two(stream: Any, y: Any) -> None:
    """On CUDA: a 4-byte memset through the bindings."""
    from cuda.bindings import driver

    word = int(np.float32(2).view(np.uint32))
    (error,) = driver.cuMemsetD32Async(y.address, word, y.size, stream.handle)
    assert error == driver.CUresult.CUDA_SUCCESS
