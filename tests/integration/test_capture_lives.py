"""What graphs hold and for how long, and failures of what is in them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import anyio
import numpy as np
import pytest
from support import error_of, turns, until, virtual

import streamflow as sf
from streamflow.capture.graph import _in_flight
from streamflow.errors import CaptureRefused, CompileFailed

N = 256


@pytest.fixture(autouse=True)
def no_launch_is_held() -> Any:
    yield
    assert not _in_flight


def made_and_closed(dev: sf.Device) -> tuple[int, int]:
    """How many graphs and executables a simulated device has made, and closed."""
    counts: Counter[str] = dev.sim.counters
    made = counts["create_graph"] + counts["instantiate_graph_blocking"]
    return made, counts["close_graph"]


async def all_closed(dev: sf.Device) -> None:
    """Wait until workers have closed every graph of the backend's."""
    gc.collect()

    def is_closed() -> bool:
        dev.empty(1)  # comes by what finalisers left
        made, closed = made_and_closed(dev)
        return made == closed > 0

    await until(is_closed)


# -- what a graph uses ----------------------------------------------------------------------------


def test_a_graph_keeps_its_arrays_and_notices_one_that_was_freed(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                dev.copy(y[:4], x[:4])
            known = weakref.ref(x._memory)
            del x
            gc.collect()
            assert known() is not None
            await graph.launch()
            y.free()
            with pytest.raises(sf.Closed, match="was freed"):
                graph.launch()

    run(main)


def test_an_update_replaces_what_was_freed(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            graph.launch()
            x.free()
            with pytest.raises(sf.Closed):
                graph.launch()
            with graph.update():
                dev.launch(add_one, y, N)
            await graph.launch()
            assert (await dev.get(y) == 1).all()

    run(main)


@pytest.mark.parametrize("kind", ["lease", "pin"])
def test_pinned_memory_that_was_given_back_closes_the_way(run, open_device, kind):
    async def main():
        async with open_device() as dev:
            x, mine = dev.zeros(N, np.float32), np.zeros(N, np.float32)
            lease = pin = None
            if kind == "lease":
                async with dev.pinned.lease(4 * N):
                    pass
                lease = dev.pinned.try_lease(4 * N)
                assert lease is not None
                mine = lease.array(N, np.float32)
            else:
                pin = dev.pin(mine)
                await pin
            mine[:] = 7
            with dev.capture() as graph:
                dev.put(mine, out=x)
                dev.get(x, out=mine)
            await graph.launch()
            if lease is not None:
                lease.release()
                with pytest.raises(sf.Closed, match="pinned memory"):
                    graph.launch()
                again = dev.pinned.try_lease(4 * N)  # the same block, perhaps
            else:
                assert pin is not None
                await pin.unpin()
                with pytest.raises(sf.Closed, match="pinned memory"):
                    graph.launch()
                again = await dev.pin(mine)
            with pytest.raises(sf.Closed, match="pinned memory"):
                graph.launch()
            if isinstance(again, sf.Lease):
                again.release()
            else:
                await again.unpin()
            assert (await dev.get(x) == 7).all()

    run(main)


def test_r6_memory_of_a_launch_in_flight_outlives_its_graph(run, open_device):
    async def main():
        async with open_device() as dev:
            slow = dev.stream()
            x = dev.zeros(N, np.float32)
            async with dev.pinned.lease(4 * N) as lease:
                source = lease.array(N, np.float32)
                source[:] = 5
                with dev.capture() as graph:
                    inner = dev.put(source)
                    dev.copy(x, inner)
                await graph.ready
                del inner
                stall = open_device.stall(dev, slow)
                launch = graph.launch(stream=slow)
                graph.close()
                del graph, source
            gc.collect()
            others = [dev.full(N, 9, np.float32) for _ in range(8)]
            stall.release()
            await launch
            assert (await dev.get(x) == 5).all()
            del others

    run(main)


@pytest.mark.parametrize("how", ["graph", "with a host step", "function"])
def test_r8_a_cancelled_await_waits_for_what_a_launch_writes_on_the_host(run, how):
    async def main():
        async with virtual() as dev:
            x, slow = dev.full(N, 3, np.float32), dev.stream()
            async with dev.pinned.lease(4 * N) as lease:
                mine = lease.array(N, np.float32)

                def step(x):
                    dev.get(x, out=mine)
                    return dev.fill(x, 3)

                with dev.capture() as graph:
                    step(x)
                    if how == "with a host step":
                        dev.host(int)
                captured = dev.captured(step)
                await captured(x)
                mine[:] = 0
                gate = dev.sim.gate(slow)
                left = []

                async def wait():
                    try:
                        with slow:
                            op = captured(x) if how == "function" else graph.launch()
                        await op
                    finally:
                        left.append(mine[0])

                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await turns()
                    group.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await turns()
                        assert left == []
                        gate.release()
                assert left == [3]
                assert (mine == 3).all()

    run(main)


def test_a_node_of_a_foreign_function_can_be_made_again(run, monkeypatch):
    """As where somebody else's wait for the whole device ended its capture."""

    async def main():
        async with virtual() as dev:
            kind = type(dev._core.backend)
            add = kind.add_graph_node

            def add_twice(backend, graph, run, deps):
                ended = backend.create_graph()
                add(backend, ended, run, ())
                backend.close_graph(ended)
                return add(backend, graph, run, deps)

            monkeypatch.setattr(kind, "add_graph_node", add_twice)
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.call(lambda stream, x, value: x.__setitem__(..., value), x, 5)
            await graph.launch()
            assert (await dev.get(x) == 5).all()

    run(main)


def test_r6_what_a_foreign_function_was_given_lives_with_the_graph(run, open_device):
    class Tensor:
        """As of another library."""

    async def main():
        async with open_device() as dev:
            x, tensor = dev.zeros(N, np.float32), Tensor()
            known = weakref.ref(tensor)
            with dev.capture() as graph:
                dev.call(lambda stream, x, tensor: None, x, tensor)
            await graph.ready
            del tensor
            gc.collect()
            assert known() is not None
            await graph.launch()
            graph.close()
            gc.collect()

            def is_gone():
                dev.empty(1)  # comes by what finalisers left
                return known() is None

            if open_device.clock != "wall":  # there a thread still has what it ran last
                await until(is_gone)

    run(main)


def test_a_host_step_may_be_given_any_array(run, open_device):
    async def main():
        async with open_device() as dev:
            seen = []
            with dev.capture() as graph:
                dev.host(seen.append, np.ones(3))
            await graph.launch()
            await graph.launch()
            assert len(seen) == 2

    run(main)


@pytest.mark.parametrize("how", ["closed", "dropped", "left"])
def test_a_graph_goes_while_its_launches_run(run, add_one, how):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            slow = dev.stream()
            with dev.capture() as graph:
                inner = dev.zeros(N, np.float32)
                dev.launch(add_one, x, N)
                dev.launch(add_one, inner, N)
                dev.call(lambda stream, x: x.__iadd__(1), x)
            del inner
            await graph.ready
            gate = dev.sim.gate(slow)
            launches = [graph.launch(stream=slow) for _ in range(3)]
            if how == "closed":
                graph.close()
                graph.close()  # it may be called again
                with pytest.raises(sf.Closed):
                    graph.launch()
                with pytest.raises(sf.Closed), graph.update():
                    pass
                assert "closed" in repr(graph)
            elif how == "left":
                with graph:
                    pass
            del graph
            gc.collect()
            dev.empty(1)
            await turns()
            made, closed = made_and_closed(dev)
            assert made == closed + 1  # the executable is in use
            gate.release()
            await sf.gather(*launches)
            assert (await dev.get(x) == 6).all()
            await all_closed(dev)
            await dev.synchronize()

    run(main)


def test_a_graph_closed_before_it_was_built_still_runs_what_was_launched(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            launch = graph.launch()
            graph.close()
            del graph
            gc.collect()
            await launch
            assert (await dev.get(x) == 1).all()

    run(main)


@pytest.mark.parametrize("when", ["unbuilt", "built", "launched"])
def test_a_device_closes_with_graphs_alive(run, open_device, add_one, when):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                inner = dev.zeros(N, np.float32)
                dev.launch(add_one, x, N)
                dev.call(lambda stream, x: None, x)
            if when != "unbuilt":
                await graph.ready
            if when == "launched":
                graph.launch()
        with pytest.raises(sf.Closed):
            graph.launch()
        with pytest.raises(sf.Closed), graph.update():
            pass
        assert inner.size == N
        graph.close()
        del graph, inner
        gc.collect()

    run(main)


def test_everything_of_the_backends_is_closed_in_the_end(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)

            def body():
                dev.call(lambda stream, x: None, x)
                dev.host(int)
                dev.launch(add_one, x, N)

            with dev.capture() as graph:
                body()
            await graph.launch()
            with graph.update():
                body()
            with pytest.raises(CaptureRefused), graph.update():
                body()
                body()
            with pytest.raises(KeyError), dev.capture():
                body()
                raise KeyError
            await graph.launch()
            del graph
            await all_closed(dev)

    run(main)


def test_r6_a_launch_that_is_left_behind_keeps_its_executable_and_memory(run, add_one):
    async def main():
        dev = virtual(close_timeout_s=0.02)
        await dev.__aenter__()
        x, slow = dev.zeros(N, np.float32), dev.stream()
        with dev.capture() as launched:
            inner = dev.full(N, 1, np.float32)
            dev.launch(add_one, x, N)
        await launched.ready
        known = weakref.ref(inner._memory)
        gate = dev.sim.gate(slow)
        launched.launch(stream=slow)
        with pytest.raises(TimeoutError, match="did not end"):
            await dev.__aexit__(None, None, None)
        del inner, launched
        gc.collect()
        assert known() is not None
        (run,) = _in_flight.values()
        assert run._executables is not None
        _in_flight.clear()
        gate.release()
        while dev._core.backend.advance(0):
            pass

    assert not _in_flight
    run(main)


def test_executables_that_an_update_replaced_are_closed(run, add_one):
    async def main():
        async with virtual() as dev:
            arrays = [dev.zeros(size, np.float32) for size in (N, 0)]
            with dev.capture() as graph:
                dev.launch(add_one, arrays[0], N)
            launches = []
            for number in range(1, 11):
                launches.append(graph.launch())
                with graph.update():  # with a kernel and without one, in turn
                    array = arrays[number % 2]
                    dev.launch(add_one, array, array.size)
            await sf.gather(*launches)
            await graph.ready
            assert (await dev.get(arrays[0]) == 5).all()
            gc.collect()

            def is_one_left():
                dev.empty(1)
                made, closed = made_and_closed(dev)
                return made == closed + 1

            await until(is_one_left)

    run(main)


# -- failures -------------------------------------------------------------------------------------

BROKEN = sf.Kernel.from_source(
    """extern "C" __global__ void broken(float* x) { this is no code; }""", body=lambda x: None
)


def test_a_kernel_that_does_not_compile_fails_the_launches(run, open_device, monkeypatch):
    async def main():
        async with open_device() as dev:
            if dev.backend == "sim":
                backend = dev._core.backend

                def refuse(spec):
                    raise CompileFailed("broken does not compile", log="line 1")

                monkeypatch.setattr(backend, "load_kernel", lambda spec: None)
                monkeypatch.setattr(backend, "load_kernel_blocking", refuse)
            x = dev.zeros(N, np.float32)
            for _ in range(2):  # compiling, and known to fail
                with dev.capture(name="step") as graph:
                    dev.launch(BROKEN, x)
                launch = graph.launch()
                error = await error_of(launch)
                assert isinstance(error, sf.UpstreamFailed)
                assert isinstance(error.__cause__, CompileFailed)
                assert "step" in str(error)
                assert isinstance(await error_of(graph.ready), CompileFailed)
                assert isinstance(await error_of(graph.launch()), sf.UpstreamFailed)
            dev.fill(x, 3)
            assert (await dev.get(x) == 3).all()
            await dev.synchronize()

    run(main)


def test_a_node_that_is_refused_fails_the_launch_and_later_readers(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            with dev.capture(name="step") as graph:
                dev.launch(add_one, x, N)
                dev.copy(y, x)
            await graph.ready
            dev.sim.fail(kind="copy_d2d", sticky=False)
            failed, reader = graph.launch(), dev.get(y)
            error = await error_of(failed)
            assert isinstance(error, sf.DeviceError)
            assert "step was submitted at test_capture_lives.py" in "".join(error.__notes__)
            assert isinstance(await error_of(reader), sf.UpstreamFailed)
            assert isinstance(await error_of(graph.launch()), sf.UpstreamFailed)  # it reads x
            dev.fill(x, 0)
            await graph.launch()
            assert (await dev.get(y) == 1).all()
            await dev.synchronize()

    run(main)


def test_r9_a_launch_that_overwrites_what_it_uses_clears_the_failure(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                inner = dev.empty(N, np.float32)
                dev.fill(inner, 1)
                left, right = inner.split(2)
                dev.launch(add_one, left, N // 2)
                dev.launch(add_one, right, N // 2)
                dev.copy(x, inner)
            await graph.ready
            dev.sim.fail(kind="fill", sticky=False)
            assert isinstance(await error_of(graph.launch()), sf.DeviceError)
            await graph.launch()
            assert (await dev.get(x) == 2).all()

    run(main)


def test_a_foreign_function_that_raises_fails_its_own_launch(run):
    async def main():
        async with virtual() as dev:
            x, num = dev.zeros(N, np.float32), 0

            def foreign(stream, x):
                nonlocal num
                num += 1
                if num == 2:
                    raise KeyError(f"call {num}")

            with dev.capture() as graph:
                dev.fill(x, 0)
                dev.call(foreign, x)
            await graph.ready
            dev.sim.fail(kind="fill", sticky=False, nth=1)
            launches = [graph.launch() for _ in range(4)]  # the first isn't submitted
            errors = [await error_of(op) for op in launches]
            assert isinstance(errors[0], sf.DeviceError)
            assert [type(error) for error in errors[1:]] == [type(None), KeyError, type(None)]
            await dev.synchronize()

    run(main)


def test_a_host_step_that_raises_ends_its_launch_and_no_other(run, open_device):
    async def main():
        async with open_device() as dev:
            x, num = dev.zeros(N, np.float32), 0

            def step():
                nonlocal num
                num += 1
                if num == 1:
                    raise KeyError("of the step")

            with dev.capture() as graph:
                dev.fill(x, 1)
                dev.host(step)
                dev.fill(x, 2)
            first, second = graph.launch(), graph.launch()
            error = await error_of(first)
            assert isinstance(error, sf.UpstreamFailed)
            assert isinstance(error.__cause__, KeyError)
            await second
            assert (await dev.get(x) == 2).all()
            await dev.synchronize()

    run(main)


def test_a_launch_that_failed_upstream_breaks_no_update(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)

            def fails():
                raise ValueError

            bad = dev.host(fails)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            launch = graph.launch(after=bad)
            with graph.update():
                dev.launch(add_one, y, N)
            again = graph.launch()
            assert isinstance(await error_of(launch), sf.UpstreamFailed)
            await again
            assert (await dev.get(y) == 1).all()
            await dev.synchronize()

    run(main)


def test_a_sticky_fault_in_a_node_loses_the_device(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            await graph.ready
            dev.sim.fail(kind="launch")
            assert isinstance(await error_of(graph.launch()), sf.DeviceLost)
            with pytest.raises(sf.DeviceLost):
                graph.launch()
            with pytest.raises(sf.DeviceLost), graph.update():
                pass
            graph.close()

    run(main)
