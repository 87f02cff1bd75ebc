"""Bad input: a clear error, before anything is submitted, and nothing lost or leaked."""

import asyncio
import threading

import numpy as np
import pytest
from support import configured

import streamflow as sf


def virtual(**settings):
    return configured({"clock": "virtual", **settings})


def test_unknown_backend(run):
    async def main():
        with pytest.raises(sf.BackendUnavailable, match=r"'metal'.*cuda, sim"):
            async with sf.Device(backend="metal"):
                pass

    run(main)


def test_device_out_of_range(run):
    async def main():
        with pytest.raises(ValueError, match="2"):
            async with sf.Device(7, backend="sim"):
                pass
        with pytest.raises(ValueError, match="negative"):
            sf.Device(-1)
        with pytest.raises(TypeError):
            sf.Device("0")

    run(main)


def test_broken_driver_raises_and_does_not_fall_back(run, monkeypatch):
    from streamflow.backends.cuda import probe

    def broken():
        raise sf.BackendUnavailable("the driver is there and does not start")

    monkeypatch.setattr(probe, "why_unavailable", broken)

    async def main():
        with pytest.raises(sf.BackendUnavailable, match="does not start"):
            async with sf.Device():
                pass

    run(main)


def test_no_driver_falls_back_with_one_warning_that_gives_the_reason(run, monkeypatch):
    from streamflow.backends.cuda import probe

    monkeypatch.setattr(probe, "why_unavailable", lambda: "no driver on this machine")

    async def main():
        dev = sf.Device()
        with pytest.warns(sf.SimulatorWarning, match="no driver on this machine") as warned:
            await dev.__aenter__()
        assert dev.backend == "sim"
        assert dev.why_simulated == "no driver on this machine"
        await dev.__aexit__(None, None, None)
        assert len(warned) == 1
        assert warned[0].filename == __file__

    run(main)


KERNEL_CALLS = {
    "too few": (lambda dev, k, x: dev.launch(k, 1.0, x), TypeError, "takes 4 arguments.*found 2"),
    "dtype": (
        lambda dev, k, x: dev.launch(k, 1.0, x, dev.empty(8, np.int32), 8),
        TypeError,
        r"'y' \(float\*\) takes float32, found int32",
    ),
    "ndarray": (
        lambda dev, k, x: dev.launch(k, 1.0, np.zeros(8, np.float32), x, 8),
        TypeError,
        "'x'.*DeviceArray, found ndarray.*dev.put",
    ),
    "float for int": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 2.5), TypeError, "'n'.*2.5"),
    "negative": (lambda dev, k, x: dev.launch(k, 1.0, x, x, -1), OverflowError, "'n'"),
    "too large": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 2**64), OverflowError, "'n'"),
    "string": (lambda dev, k, x: dev.launch(k, "a", x, x, 8), TypeError, "'a'"),
    "grid 0": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, grid=0), ValueError, "at least 1"),
    "grid": (
        lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, grid=(1, 65536), block=1),
        ValueError,
        "grid.y is 65536.*65535",
    ),
    "block": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, block=2048), ValueError, "block"),
    "threads": (
        lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, grid=1, block=(64, 64)),
        ValueError,
        "4096 threads",
    ),
    "shared": (
        lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, shared_bytes=1 << 20),
        ValueError,
        "shared_bytes",
    ),
    "not a kernel": (lambda dev, k, x: dev.launch(print, x), TypeError, "Kernel"),
    "grid type": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, grid="a"), TypeError, "grid="),
    "after": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, after=[3]), TypeError, "after="),
    "stream": (lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, stream=0), TypeError, "stream="),
    "lane": (
        lambda dev, k, x: dev.launch(k, 1.0, x, x, 8, stream=dev.lanes["h2d"]),
        TypeError,
        "stream=",
    ),
}


@pytest.mark.parametrize("what", KERNEL_CALLS)
def test_launch_arguments_and_geometry(run, saxpy, what):
    call, error, match = KERNEL_CALLS[what]

    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            x = dev.zeros(8, np.float32)
            await x
            before = dev.sim.counters["launch"]
            with pytest.raises(error, match=match):
                call(dev, saxpy, x)
            assert dev.sim.counters["launch"] == before
            dev.launch(saxpy, 1.0, x, x, 8)
            await dev.synchronize()

    run(main)


def test_kernels_that_cannot_run(run, spin):
    bodiless = sf.Kernel.from_source('extern "C" __global__ void f(float* x) { x[0] = 1; }')

    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            x = dev.empty(1, np.float32)
            with pytest.raises(ValueError, match="grid= and block="):
                dev.launch(spin, 0.0)
            with pytest.raises(sf.LaunchFailed, match="no reference body"):
                dev.launch(bodiless, x)
            assert dev.sim.counters["launch"] == 0

    run(main)


HOST_CALLS = {
    "object": (lambda dev: dev.put(np.array([object()])), TypeError, "object"),
    "datetime": (lambda dev: dev.put(np.array(["2020"], "M8[D]")), TypeError, "datetime64"),
    "string": (lambda dev: dev.put(np.array(["abc"])), TypeError, "<U3"),
    "empty dtype": (lambda dev: dev.empty(3, object), TypeError, "object"),
    "fill vector": (lambda dev: dev.full(3, [1, 2], np.int32), TypeError, "scalar"),
    "fill float": (lambda dev: dev.full(3, 1.5, np.int32), TypeError, "not an integer"),
    "fill range": (lambda dev: dev.full(3, 300, np.uint8), OverflowError, "300"),
    "get": (lambda dev: dev.get(np.zeros(3)), TypeError, "DeviceArray, found ndarray"),
    "out list": (lambda dev: dev.get(dev.empty(3), out=[0, 0, 0]), TypeError, "ndarray"),
    "out dtype": (
        lambda dev: dev.get(dev.empty(3), out=np.zeros(3, np.float32)),
        TypeError,
        "float32",
    ),
    "out read-only": (
        lambda dev: dev.get(dev.empty(2), out=np.frombuffer(b"0" * 16, np.float64)),
        ValueError,
        "read-only",
    ),
    "put out": (lambda dev: dev.put(np.zeros(3), out=dev.empty(4)), ValueError, r"\(4,\)"),
    "copy": (lambda dev: dev.copy(dev.empty(3), dev.empty(4)), ValueError, "shape"),
    "put of a device array": (lambda dev: dev.put(dev.empty(3)), TypeError, "dev.copy"),
    "slice step": (lambda dev: dev.empty(9)[::2], ValueError, "step 1"),
    "index": (lambda dev: dev.empty(9)[9], IndexError, "out of range"),
    "reshape": (lambda dev: dev.empty(9).reshape(2, 5), ValueError, "reshape"),
    "view": (lambda dev: dev.empty(3, np.int8).view(np.int16), ValueError, "multiple"),
    "priority": (lambda dev: dev.stream(priority=3), ValueError, "priority"),
}


@pytest.mark.parametrize("what", HOST_CALLS)
def test_arrays_and_host_data(run, what):
    call, error, match = HOST_CALLS[what]

    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            with pytest.raises(error, match=match):
                call(dev)
            await dev.synchronize()  # nothing failed behind our back
            return sum(dev.live().get("op", {}).values())

    assert run(main) == 0


def test_freed_and_closed_objects(run, saxpy):
    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            x = dev.zeros(8, np.float32)
            view = x[2:4]
            x.free()
            for use in (
                lambda: dev.launch(saxpy, 1.0, x, x, 8),
                lambda: dev.get(view),
                lambda: dev.put(np.zeros(8, np.float32), out=x),
                lambda: dev.fill(x, 0),
                x.free,
                view.free,
                lambda: x[:2],
            ):
                with pytest.raises(sf.Closed, match="freed"):
                    use()
            stream = dev.stream()
            stream.close()
            for use in (
                stream.record,
                lambda: dev.zeros(4, stream=stream),
                stream.__enter__,
            ):
                with pytest.raises(sf.Closed, match="closed"):
                    use()
            y = dev.zeros(8)
        for use in (lambda: dev.zeros(8), lambda: dev.get(y), dev.stream, y.free):
            with pytest.raises(sf.Closed, match="closed"):
                use()
        with pytest.raises(sf.Closed, match="enter"):
            sf.Device(backend="sim").zeros(3)

    run(main)


def test_array_of_another_device_and_another_loop(run, saxpy):
    async def main():
        async with (
            sf.Device(0, backend="sim", settings=virtual()) as one,
            sf.Device(1, backend="sim", settings=virtual()) as two,
        ):
            x = two.zeros(8, np.float32)
            for use in (
                lambda: one.launch(saxpy, 1.0, x, x, 8),
                lambda: one.get(x),
                lambda: one.zeros(3, stream=two.stream()),
            ):
                with pytest.raises(ValueError, match="another device"):
                    use()
            await two.synchronize()

            def elsewhere():
                async def inner():
                    async with sf.Device(0, backend="sim", settings=virtual()) as third:
                        with pytest.raises(ValueError, match="another"):
                            third.get(x)
                        with pytest.raises(ValueError, match="another event loop"):
                            third.copy(third.zeros(8, np.float32), x)
                        own = third.zeros(1)
                        with pytest.raises(ValueError, match="another event loop"):
                            third.get(own, after=[x.allocation])

                asyncio.run(inner())

            failures = []

            def guarded():
                try:
                    elsewhere()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            thread.join()
            assert not failures, failures

    run(main)


def test_calls_from_another_thread(run):
    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            x = dev.zeros(8)
            op = dev.get(x)
            errors = []

            def use():
                for call in (lambda: dev.zeros(3), lambda: dev.get(x), x.free, op.cancel):
                    try:
                        call()
                    except sf.WrongThread as error:
                        errors.append(str(error))

            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            await op
            return errors

    errors = run(main)
    assert len(errors) == 4
    assert all("another thread or loop" in error for error in errors)


def test_a_device_of_an_ended_loop(run):
    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            return dev, dev.zeros(3)

    dev, array = run(main)

    async def later():
        with pytest.raises(sf.WrongThread):
            dev.get(array)

    run(later)


def test_entering_needs_a_loop_and_happens_once(run):
    with pytest.raises(RuntimeError, match="no running event loop"):
        sf.Device(backend="sim").__aenter__().send(None)

    async def main():
        dev = sf.Device(backend="sim", settings=virtual())
        async with dev:
            pass
        with pytest.raises(RuntimeError, match="once"):
            async with dev:
                pass

    run(main)


def test_out_of_memory_raises_at_the_call_and_is_not_sticky(run):
    async def main():
        async with sf.Device(backend="sim", settings=virtual(memory_nbytes=1 << 26)) as dev:
            held = dev.empty(1 << 25, np.uint8)
            with pytest.raises(sf.OutOfDeviceMemory, match="67108864 bytes"):
                dev.empty(1 << 26, np.uint8)
            with pytest.raises(MemoryError):
                dev.put(np.zeros(1 << 26, np.uint8))
            del held
            again = dev.empty(1 << 25, np.uint8)
            assert dev.is_healthy
            with dev.sim.out_of_memory(), pytest.raises(sf.OutOfDeviceMemory):
                dev.zeros(3)
            await again

    run(main)


def test_settings_are_checked():
    for bad in ({"compute_lanes": 0}, {"window": -1}, {"clock": "sundial"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            configured(bad)
    with pytest.raises(ValueError, match="STREAMFLOW_WINDOW='many'"):
        sf.Settings.from_environment({"STREAMFLOW_WINDOW": "many"})
    assert sf.Settings.from_environment({"STREAMFLOW_WINDOW": "64"}).window == 64
