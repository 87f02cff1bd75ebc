"""Programs with a bug that a plain run doesn't show, one of each kind, and a right one."""

from __future__ import annotations

import numpy as np

import streamflow as sf

N = 1024
SETTINGS = sf.Settings(
    staging_threads=2,
    staging_in_nbytes=65536,
    sim=sf.SimOptions(clock="virtual", check_races=False),  # exploring alone has to find them
)


@sf.kernel(
    """extern "C" __global__ void scale(float* x, float c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= c;
    }"""
)
def scale(x, c, n):
    x[:n] *= np.float32(c)


@sf.kernel(
    """extern "C" __global__ void slow(float* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] += 1.0f;
    }""",
    cost=lambda x, n: 1e-3,
)
def slow(x, n):
    x[:n] += np.float32(1)


class Library:
    """Somebody else's GPU code, which remembers an array that it was shown once."""

    def bind(self, stream: sf.CallStream, x: np.ndarray) -> None:
        self.x = x

    def add(self, stream: sf.CallStream, y: np.ndarray) -> None:
        y += self.x


async def missing_edge(dev: sf.Device) -> None:
    """``add`` reads what ``scale`` writes, but its call doesn't say so."""
    library = Library()
    x, y = dev.put(np.ones(N, np.float32)), dev.put(np.full(N, 2, np.float32))
    await dev.call(library.bind, x, reads=[x], writes=[])
    dev.launch(scale, x, 3.0, N, stream=dev.stream("a"))
    dev.call(library.add, y, writes=[y], stream=dev.stream("b"))
    assert (await dev.get(y))[0] == 5


async def early_reuse(dev: sf.Device) -> None:
    """The source is refilled when another op has ended, and not after ``await x.staged``."""
    source = np.ones(1 << 18, np.float32)  # 16 chunks, and four pinned ones to pass through
    y = dev.zeros(N, np.float32)
    x = dev.put(source)
    await dev.launch(slow, y, N)  # "the copy must be over by then"
    source[:] = 2
    assert (await dev.get(x) == 1).all()


async def late_free(dev: sf.Device) -> None:
    """``add`` still reads what was freed: the free waits for the uses that it knows of."""
    library = Library()
    x, y = dev.put(np.ones(N, np.float32)), dev.put(np.full(N, 2, np.float32))
    await dev.call(library.bind, x, reads=[x], writes=[])
    dev.launch(slow, x, N, stream=dev.stream("a"))
    x.free()
    dev.call(library.add, y, writes=[y], stream=dev.stream("b"))
    assert (await dev.get(y))[0] == 3


async def right(dev: sf.Device) -> None:
    """The same moves, each with what the others leave out."""
    library = Library()
    x, y = dev.put(np.ones(N, np.float32)), dev.put(np.full(N, 2, np.float32))
    await dev.call(library.bind, x, reads=[x], writes=[])
    dev.launch(scale, x, 3.0, N, stream=dev.stream("a"))

    def add(stream: sf.CallStream, y: np.ndarray, x: np.ndarray) -> None:
        library.add(stream, y)

    last = dev.call(add, y, x, reads=[x], writes=[y], stream=dev.stream("b"))
    source = np.ones(1 << 16, np.float32)
    z = dev.put(source)
    await z.staged
    source[:] = 2
    x.free()
    await last
    assert (await dev.get(y))[0] == 5
    assert (await dev.get(z) == 1).all()


BUGS = {bug.__name__: bug for bug in (missing_edge, early_reuse, late_free)}
