"""Kernels and host functions of the soak: whole numbers modulo 2**32, exact on every machine."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import numpy as np

import streamflow as sf


class Boom(Exception):
    """What a function of the soak raises on purpose."""


def cost_s(*args: Any) -> float:
    return 1e-6 * (1 + int(args[-1]) % 7)


@sf.kernel(
    """extern "C" __global__ void step(int* x, int n, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = (int)(5u * (unsigned)x[i] + (unsigned)c);
}""",
    cost=cost_s,
)
def step(x, n, c):
    x[:n] = 5 * x[:n] + c


@sf.kernel(
    """extern "C" __global__ void mix(const int* x, int* y, int n, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (int)(3u * (unsigned)y[i] + (unsigned)x[i] + (unsigned)c);
}""",
    cost=cost_s,
)
def mix(x, y, n, c):
    y[:n] = 3 * y[:n] + x[:n] + c


@sf.kernel(
    """extern "C" __global__ void __launch_bounds__(32) refused(int* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = -1;
}"""
)
def refused(x, n):
    """Launched with more threads than it is compiled for, which a driver refuses."""
    x[:n] = -1


REFUSED_BLOCK = 64


def checksum(x: np.ndarray, c: int) -> int:
    return int((x.astype(np.int64).sum() + c) % 97)


async def checksum_async(x: np.ndarray, c: int) -> int:
    await anyio.lowlevel.checkpoint()
    return checksum(x, c)


def fails(*_: Any) -> None:
    raise Boom("a host task")


async def fails_async(*_: Any) -> None:
    await anyio.lowlevel.checkpoint()
    raise Boom("a host task on the loop")


def call_step(stream: Any, x: np.ndarray, c: int) -> int:
    """``dev.call``: on the simulator it is the work itself."""
    x[:] = 5 * x + c
    return checksum(x, c)


def call_fails(stream: Any, x: np.ndarray) -> None:
    raise Boom("a call")
