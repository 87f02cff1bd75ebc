"""C3: another thread keeps the GIL for long steps; every await still ends (R10)."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager

import anyio
import numpy as np
import pytest
from support import virtual

import streamflow as sf

BIG = np.ones(1 << 18, np.float32)


@contextmanager
def keeping_the_gil(step):
    """A thread that calls ``step()`` over and over; yields how often it has."""
    is_over, counts, errors = threading.Event(), [0], []

    def loop():
        try:
            while not is_over.is_set():
                step()
                counts[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()
    assert not errors, errors
    assert counts[0]


async def many_awaits(dev, add_one, num_streams=8, num=10):
    """Work of every kind on many streams, all of it awaited at the same time."""
    sums = []

    async def work(n):
        stream = dev.stream(f"s{n}")
        x = dev.zeros(1 << 10, np.float32, stream=stream)
        for _ in range(num):
            dev.launch(add_one, x, x.size, stream=stream)
            await stream.synchronize()
        y = await dev.put(BIG)
        total = await dev.host(np.sum, y)
        called = await dev.call(lambda stream, y: n, y)
        sums.append((float((await dev.get(x, stream=stream)).sum()), float(total), called))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for n in range(num_streams):
                group.start_soon(work, n)
        await dev.synchronize()
    assert sorted(sums) == [(float(num << 10), float(BIG.size), n) for n in range(num_streams)]


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_c3_awaits_end_while_a_thread_keeps_the_gil(run, add_one, clock):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock=clock))
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            numbers = range(20_000)  # one step inside ``sum``: nothing can interrupt it
            with keeping_the_gil(lambda: sum(numbers)):
                await many_awaits(dev, add_one, 4, 3)

    run(main)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["query", "synchronize", "mixed"])
def test_c3_awaits_end_while_a_thread_calls_the_driver_with_the_gil(run, add_one, call):
    """A host function into Python would wait for the GIL, and the thread for the function."""
    driver = ctypes.PyDLL("libcuda.so.1")  # keeps the GIL, unlike CDLL

    async def main():
        async with sf.Device(0, backend="cuda") as dev:
            context, known = ctypes.c_void_p(), threading.local()
            assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            busy = dev.stream("busy")
            handle = ctypes.c_void_p(busy.__cuda_stream__()[1])
            index, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()

            def step():
                if not hasattr(known, "context"):
                    known.context = driver.cuCtxSetCurrent(context)
                    assert known.context == 0
                if call != "synchronize":
                    assert driver.cuStreamQuery(handle) in (0, 600)
                    assert driver.cuCtxGetDevice(ctypes.byref(index)) == 0
                if call == "mixed":
                    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
                if call != "query":
                    assert driver.cuCtxSynchronize() == 0

            try:
                with keeping_the_gil(step):
                    await many_awaits(dev, add_one, 16, 5)
            finally:
                assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0

    run(main)


def test_c3_a_function_of_a_host_task_runs_on_a_thread_of_ours(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            name = await dev.host(lambda _: threading.current_thread().name, x)
            assert name.startswith("streamflow-host")

    run(main)
