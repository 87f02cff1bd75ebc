"""Real libraries as foreign code: CuPy and cuda.core on the stream that ``dev.call`` lends."""

import asyncio

import numpy as np
import pytest

import streamflow as sf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

N = 1 << 20


def test_cupy_works_on_arrays_of_ours():
    cupy = pytest.importorskip("cupy")

    def smooth(stream, x, y):
        with cupy.cuda.Stream.from_external(stream):
            x, y = cupy.asarray(x), cupy.asarray(y)
            y[...] = cupy.sqrt(x) + 2 * y
            return y.shape

    async def main():
        async with sf.Device(backend="cuda") as dev:
            source = np.arange(N, dtype=np.float32)
            x, y = dev.put(source), dev.zeros(N, np.float32)
            for _ in range(3):
                op = dev.call(smooth, x, y, writes=y)
            np.testing.assert_allclose(await dev.get(y), 7 * np.sqrt(source), rtol=1e-6)
            assert await op == (N,)

    asyncio.run(main())


def test_cupy_sees_zero_size_and_structured_arrays():
    cupy = pytest.importorskip("cupy")

    async def main():
        async with sf.Device(backend="cuda") as dev:
            pair = np.dtype([("a", "<i4"), ("b", "<f4")])
            for shape, dtype in (((0, 3), np.dtype("f4")), ((4,), pair)):
                x = dev.zeros(shape, dtype)
                found = await dev.call(lambda stream, x: cupy.asarray(x), x)
                assert (found.shape, found.dtype) == (shape, dtype)

    asyncio.run(main())


def test_cuda_core_takes_the_lent_stream():
    import cuda.core

    def copy(stream, dst, src):
        theirs = cuda.core.Device().create_stream(stream)  # by __cuda_stream__
        assert int(theirs.handle) == stream.handle
        from cuda.bindings import driver

        to, origin = (a.__cuda_array_interface__["data"][0] for a in (dst, src))
        (error,) = driver.cuMemcpyDtoDAsync(to, origin, src.nbytes, theirs.handle)
        assert not error

    async def main():
        async with sf.Device(backend="cuda") as dev:
            source = np.arange(N, dtype=np.float32)  # staged: the call parks
            x, y = dev.put(source), dev.empty(N, np.float32)
            op = dev.call(copy, y, x, writes=y)
            assert op.state is sf.OpState.PARKED
            assert np.array_equal(await dev.get(y), source)

    asyncio.run(main())


def test_a_driver_error_of_the_function_is_its_own():
    def wrong(stream, x):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: not ours")

    async def main():
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(N, np.float32)
            with pytest.raises(RuntimeError, match="not ours") as caught:
                await dev.call(wrong, x)
            assert type(caught.value) is RuntimeError
            assert dev.is_healthy
            await dev.fill(x, 1)

    asyncio.run(main())
