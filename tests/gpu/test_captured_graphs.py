"""What only a GPU can show of captured graphs: the driver's own captures, and who disturbs them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import streamflow as sf
from streamflow.errors import CaptureRefused

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

N = 1 << 16

ADD_ONE = sf.Kernel.from_source(
    """extern "C" __global__ void add_one(float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += 1.0f;
    }"""
)
BROKEN = sf.Kernel.from_source("""extern "C" __global__ void broken(float* x) { no code }""")


async def still_works(dev: sf.Device) -> None:
    """Eagerly, and in another graph."""
    x = dev.zeros(N, np.float32)
    dev.launch(ADD_ONE, x, N)
    with dev.capture() as graph:
        dev.launch(ADD_ONE, x, N)
    await graph.launch()
    assert (await dev.get(x) == 2).all()
    await dev.synchronize()


def copies(dev: sf.Device, to: Any, origin: Any) -> Any:
    """A foreign function of two copies, one after the other."""
    copy = dev._core.backend.copy_d2d

    def submit(stream: sf.CallStream) -> None:
        half = to.nbytes // 2
        copy(to.address, origin.address, half, stream.backend_stream)
        copy(to.address + half, origin.address + half, half, stream.backend_stream)

    return submit


def test_a_foreign_function_is_called_once_and_replayed() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            calls = []
            submit = copies(dev, y, x)

            def foreign(stream: sf.CallStream) -> None:
                calls.append(threading.current_thread())
                submit(stream)

            with dev.capture() as graph:
                dev.launch(ADD_ONE, x, N)
                dev.call(foreign, reads=x, writes=y)
                dev.launch(ADD_ONE, y, N)
            for _ in range(3):
                graph.launch()
            assert (await dev.get(y) == 4).all()
            assert calls == [threading.current_thread()]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["raises", "raises midway", "waits"])
def test_a_foreign_function_that_goes_wrong_leaves_the_device_usable(how: str) -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            submit = copies(dev, y, x)

            def foreign(stream: sf.CallStream) -> None:
                if how != "raises":
                    submit(stream)
                if how == "waits":
                    stream.backend_stream.sync()  # which no capture can hold
                raise KeyError(how)

            with pytest.raises(Exception) as caught, dev.capture() as graph:  # noqa: PT011
                dev.launch(ADD_ONE, x, N)
                dev.call(foreign, reads=x, writes=y)
            assert not isinstance(caught.value, sf.DeviceLost)
            with pytest.raises(sf.Closed):
                graph.launch()
            assert (await dev.get(x) == 0).all()
            await still_works(dev)

    asyncio.run(main())


def test_c40_pinning_and_allocating_on_other_threads_disturb_no_capture() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(N, np.float32)
            backend = dev._core.backend
            stop, errors = threading.Event(), []

            def beside() -> None:
                """What no thread may do while another captures in the driver's global mode."""
                try:
                    backend.set_current()
                    while not stop.is_set():
                        block = backend.allocate_linear_blocking(1 << 20)
                        backend.free_linear_blocking(block)
                except Exception as error:
                    errors.append(error)

            thread = threading.Thread(target=beside)
            thread.start()
            try:
                for _ in range(20):
                    with dev.capture() as graph:
                        for _ in range(50):
                            dev.launch(ADD_ONE, x, N)
                        pin = dev.pin(np.zeros(1 << 20, np.float32))
                        dropped = dev.zeros(N, np.float32)
                        del dropped
                    async with pin:
                        await graph.launch()
            finally:
                stop.set()
                thread.join()
            assert errors == []
            assert (await dev.get(x) == 1000).all()

    asyncio.run(main())


def test_a_kernel_that_does_not_compile_is_told_by_the_launch() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture(name="step") as graph:
                dev.launch(BROKEN, x)
            with pytest.raises(sf.UpstreamFailed, match="step") as caught:
                await graph.launch()
            assert isinstance(caught.value.__cause__, sf.CompileFailed)
            await still_works(dev)

    asyncio.run(main())


def test_cr15_a_host_read_is_refused_and_the_device_goes_on() -> None:
    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(N, np.float32)
            here = r"test_captured_graphs\.py:\d+"
            with pytest.raises(CaptureRefused, match=here), dev.capture():
                dev.launch(ADD_ONE, x, N)
                dev.get(x)
            await still_works(dev)

    asyncio.run(main())
