"""Every test here runs on each loop; those that take ``open_device`` on each backend too."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import Program
from support import SPIN, Opener

import streamflow as sf

Main = Callable[[], Coroutine[Any, Any, Any]]


def _asyncio(main: Main) -> Any:
    return asyncio.run(main())


def _uvloop(main: Main) -> Any:
    import uvloop

    return uvloop.run(main())


def _trio(main: Main) -> Any:
    import trio

    return trio.run(main)


@pytest.fixture(autouse=True)
def young_heap() -> Iterator[None]:
    """Let ``gc.collect()`` in a test look at that test's objects, not at thousands of others'."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=[_asyncio, _uvloop, _trio], ids=["asyncio", "uvloop", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], Any]:
    """Run a coroutine function to its end on one of the loops."""
    return request.param


@pytest.fixture(params=["virtual", "wall", pytest.param("cuda", marks=pytest.mark.gpu)])
def open_device(request: pytest.FixtureRequest) -> Opener:
    """Open a device of one of the backends; the simulator with each of its clocks."""
    if request.param == "cuda":
        return Opener("cuda", "host")
    return Opener("sim", request.param)


@sf.kernel(
    """extern "C" __global__
    void saxpy(float a, const float* x, float* y, unsigned long long n) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n) y[i] += a * x[i];
    }"""
)
def saxpy_kernel(a: Any, x: Any, y: Any, n: Any) -> None:
    y[:n] += np.float32(a) * x[:n]


@sf.kernel(
    """extern "C" __global__ void add_one(float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += 1.0f;
    }"""
)
def add_one_kernel(y: Any, n: Any) -> None:
    y[:n] += np.float32(1)


@pytest.fixture
def saxpy() -> sf.Kernel:
    return saxpy_kernel


@pytest.fixture
def add_one() -> sf.Kernel:
    return add_one_kernel


@pytest.fixture
def spin() -> sf.Kernel:
    return SPIN


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["virtual", "wall", pytest.param("cuda", marks=pytest.mark.gpu)])
def program(request: pytest.FixtureRequest, loop: str, tmp_path: Path) -> Program:
    if request.param == "cuda":
        return Program(loop, "cuda", "", tmp_path)
    return Program(loop, "sim", request.param, tmp_path)
