"""Page-locked memory of other libraries is used as it is; managed memory is not page-locked."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import streamflow as sf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

N = 1 << 20  # float32s: 4 MiB
VALUES = np.random.default_rng(2).random(N, np.float32)
Array = np.ndarray[Any, np.dtype[np.float32]]


def on_gpu(main: Callable[[sf.Device], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with sf.Device(backend="cuda") as dev:
            await main(dev)

    asyncio.run(run())


def over(address: int) -> Array:
    return np.frombuffer((ctypes.c_char * (4 * N)).from_address(address), np.float32)


@contextmanager
def torch_pinned() -> Iterator[Array]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    yield torch.empty(N, dtype=torch.float32).pin_memory().numpy()


@contextmanager
def cupy_pinned() -> Iterator[Array]:
    yield pytest.importorskip("cupyx").empty_pinned(N, np.float32)


@contextmanager
def allocated(is_managed: bool) -> Iterator[Array]:
    driver = pytest.importorskip("cuda.bindings.driver")
    if is_managed:
        error, address = driver.cuMemAllocManaged(4 * N, 1)
        free = driver.cuMemFree
    else:
        error, address = driver.cuMemHostAlloc(4 * N, 0)
        free = driver.cuMemFreeHost
    assert not error
    yield over(int(address))
    free(address)


@contextmanager
def registered() -> Iterator[Array]:
    driver = pytest.importorskip("cuda.bindings.driver")
    memory = np.empty(4 * N + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    array = memory[start : start + 4 * N].view(np.float32)
    (error,) = driver.cuMemHostRegister(array.ctypes.data, 4 * N, 0)
    assert not error
    yield array
    driver.cuMemHostUnregister(array.ctypes.data)


PINNED = {
    "torch": torch_pinned,
    "CuPy": cupy_pinned,
    "the driver": lambda: allocated(False),
    "registered": registered,
}


def num_staged(dev: sf.Device) -> int:
    return dev._core.stagers.num_tasks


@pytest.mark.parametrize("whose", PINNED)
def test_cr10_pinned_memory_of_others_is_copied_as_it_is(whose: str) -> None:
    async def main(dev: sf.Device) -> None:
        with PINNED[whose]() as host:
            host[:] = VALUES
            x = await dev.put(host)
            host[:] = 0
            await dev.get(x, out=host)
            assert num_staged(dev) == 0
            np.testing.assert_array_equal(host, VALUES)
            await dev.get(x, out=host[::-1])  # in another layout it is staged
            assert num_staged(dev) > 0
            np.testing.assert_array_equal(host[::-1], VALUES)

    on_gpu(main)


def test_managed_memory_is_staged() -> None:
    async def main(dev: sf.Device) -> None:
        with allocated(True) as host:
            host[:] = VALUES
            x = await dev.put(host)
            assert num_staged(dev) > 0
            host[:] = 0
            await dev.get(x, out=host)
            np.testing.assert_array_equal(host, VALUES)
            await dev.synchronize()

    on_gpu(main)


def test_a_torch_tensor_is_a_source_and_one_on_the_gpu_is_not() -> None:
    torch = pytest.importorskip("torch")

    async def main(dev: sf.Device) -> None:
        tensor = torch.from_numpy(VALUES.copy()).pin_memory()
        x = await dev.put(tensor)
        assert num_staged(dev) == 0
        np.testing.assert_array_equal(await dev.get(x), VALUES)
        with pytest.raises(TypeError, match="on a GPU already"):
            dev.put(tensor.cuda())

    on_gpu(main)


def test_c5_a_torch_tensor_lives_until_its_copy_has_ended() -> None:
    torch = pytest.importorskip("torch")

    async def main(dev: sf.Device) -> None:
        stream, arrays = dev.stream(), []
        for value in range(8):  # each drops its source at once; torch would hand it out again
            tensor = torch.full((N,), float(value)).pin_memory()
            arrays.append(dev.put(tensor, stream=stream))
            del tensor
        for value, x in enumerate(arrays):
            assert (await dev.get(x) == value).all()

    on_gpu(main)
