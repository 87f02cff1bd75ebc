"""Graphs beside other tasks, the poller and the collector (C40), and in the runtime's modes."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import numpy as np
import pytest
from support import error_of, virtual, wanted

import streamflow as sf
from streamflow.errors import CaptureRefused

N = 256


# -- other tasks ----------------------------------------------------------------------------------


def test_c40_other_tasks_the_poller_and_the_collector_do_not_disturb(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            x, other = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            dropped = [dev.zeros(N, np.float32) for _ in range(4)]
            pins = [await dev.pin(np.zeros(N, np.float32))]
            done = []

            async def beside():
                mine = np.ones(1 << 18, np.float32)
                async with dev.pin(mine), dev.pinned.lease(1 << 17):
                    y = dev.put(mine)
                    for _ in range(3):
                        dev.launch(add_one, y, y.size)
                        dev.launch(add_one, other, N)
                    assert (await dev.get(y) == 4).all()  # the poller runs
                z = await dev.alloc(N, np.float32)
                dev.fill(z, 3)
                z.free()
                with dev.capture() as graph:  # of its own
                    dev.launch(add_one, other, N)
                await graph.launch()
                await dev.synchronize()
                done.append(True)

            with stream:
                for y in dropped:
                    dev.launch(add_one, y, N)
                async with anyio.create_task_group() as tasks:
                    with dev.capture() as graph:
                        dev.launch(add_one, x, N)
                        dropped.pop()
                        y = None
                        tasks.start_soon(beside)
                        with pytest.warns(ResourceWarning):
                            pins.clear()
                        dev.launch(add_one, x, N)
                        dropped.clear()
                        gc.collect()
                        inner = dev.full(N, 2, np.float32)  # frees what was dropped
                        with anyio.fail_after(20):
                            while not done:
                                await anyio.sleep(0.001)
                        dev.copy(x[:4], inner[:4])
            assert [node.kind for node in graph.nodes] == ["launch", "launch", "fill", "copy"]
            await graph.launch()
            np.testing.assert_array_equal((await dev.get(x))[:6], [2] * 6)
            assert (await dev.get(other) == 4).all()
            await dev.synchronize()

    run(main)


def test_c40_a_pin_in_the_block_is_no_part_of_the_graph(run, open_device):
    async def main():
        async with open_device() as dev:
            x, mine = dev.zeros(N, np.float32), np.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.fill(x, 1)
                pin = dev.pin(mine)
            assert len(graph.nodes) == 1
            async with pin:
                assert pin.is_pinned
            await graph.launch()

    run(main)


def test_callbacks_in_the_block_submit_as_always(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            op, called = dev.fill(y, 1), []
            op.add_done_callback(lambda _: called.append(dev.launch(add_one, y, N)))
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                with anyio.fail_after(20):
                    while not called:
                        await anyio.sleep(0.001)
            await called[0]
            assert len(graph.nodes) == 1
            assert (await dev.get(y) == 2).all()

    run(main)


def test_a_cancelled_block_is_left_like_one_that_raises(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with anyio.CancelScope() as scope:
                with dev.capture() as graph:
                    dev.launch(add_one, x, N)
                    scope.cancel()
                    await anyio.sleep(1)
            assert scope.cancelled_caught
            with pytest.raises(sf.Closed):
                graph.launch()
            dev.launch(add_one, x, N)
            assert (await dev.get(x) == 1).all()

    run(main)


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_the_device_may_go_inside_the_block(run, add_one, how):
    async def main():
        dev = virtual()
        await dev.__aenter__()
        x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
        with dev.capture() as known:
            dev.launch(add_one, x, N)

        async def beside():
            if how == "closed":
                await dev.__aexit__(None, None, None)
            else:
                dev.sim.fail(kind="fill")
                with pytest.raises(sf.DeviceLost):
                    await dev.fill(y, 1)

        with dev.capture() as graph:
            dev.launch(add_one, x, N)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(beside)
        assert "closed" in repr(graph)  # it was not built
        update = known.update()
        with pytest.raises(sf.Closed if how == "closed" else sf.DeviceLost), update:
            pass
        for each in (graph, known):
            with pytest.raises(sf.Closed if how == "closed" else sf.DeviceLost):
                each.launch()
        await dev.__aexit__(None, None, None)

    run(main)


# -- with the rest of the runtime -----------------------------------------------------------------


def test_launches_end_before_their_scope_and_captured_ops_are_none_of_it(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            await x
            async with dev.scope() as scope:
                with dev.capture() as graph:
                    dev.launch(add_one, x, N)
                    dev.host(int)
                    with pytest.raises(CaptureRefused):
                        dev.get(x)
                await graph.ready
                assert scope.num_unfinished == 0
                launches = [graph.launch() for _ in range(3)]
                assert scope.num_unfinished > 0
            assert all(op.done() for op in launches)
            assert (await dev.get(x) == 3).all()

    run(main)


def test_a_scope_inside_the_block(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                async with dev.scope(limit=64 * N):
                    y = dev.zeros(N, np.float32)
                    dev.launch(add_one, y, N)
                dev.copy(x, y)
            await graph.launch(after=x)
            assert (await dev.get(x) == 1).all()

    run(main)


def test_a_launch_takes_its_share_of_a_limit(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            graphs = []
            for array in (x, y):
                with dev.capture() as graph:
                    dev.launch(add_one, array, N)
                    dev.launch(add_one, array, N)
                await graph.ready
                graphs.append(graph)
            with dev.capture() as both:
                dev.copy(x, y)
            stream = dev.stream()
            gate = dev.sim.gate(stream)
            async with dev.scope(limit=4 * N) as scope:
                first = graphs[0].launch(stream=stream)
                second = graphs[1].launch()
                assert scope.in_flight_nbytes == 4 * N
                assert second.state is sf.OpState.PARKED
                with pytest.raises(sf.OutOfDeviceMemory, match="graph"):
                    both.launch()
                wanted(first)
                gate.release()
                await second
            assert (await dev.get(y) == 2).all()

    run(main)


def test_a_traced_launch_has_its_edges(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture(name="step") as graph:
                dev.launch(add_one, x, N)
            with dev.trace() as trace:
                dev.fill(x, 1)
                await graph.launch()
                await dev.get(x)
            names = {op.id: op.name.partition("#")[0] for op in trace.ops}
            edges = {(names.get(edge.src), names.get(edge.dst)) for edge in trace.edges}
            assert ("fill", "step") in edges
            assert ("step", "get") in edges
            (op,) = (op for op in trace.ops if op.name == "step")
            assert op.where is not None
            assert op.where.startswith("test_capture_beside.py")

    run(main)


@pytest.mark.parametrize("settings", [{"serial": True}, {"debug": True}], ids=["serial", "debug"])
def test_modes(run, open_device, add_one, settings: dict[str, Any]):
    async def main():
        async with open_device(**settings) as dev, dev.pinned.lease(4 * N) as lease:
            source = lease.array(N, np.float32)
            x, seen = dev.zeros(N, np.float32), []
            with dev.capture() as graph:
                dev.put(source, out=x)
                dev.launch(add_one, x, N)
                dev.host(lambda x: seen.append(float(x[0])), x)
                dev.launch(add_one, x, N)
            for value in range(3):
                source[:] = value
                await graph.launch()
            assert seen == [1, 2, 3]
            assert (await dev.get(x) == 4).all()
            await dev.synchronize()

    run(main)


def test_calls_on_another_thread_are_refused(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            for call in (graph.launch, graph.close, dev.capture, graph.update().__enter__):
                with pytest.raises(sf.WrongThread):
                    await anyio.to_thread.run_sync(call)
            await graph.launch()

    run(main)


def test_launches_beyond_the_window_park_and_go_on(run, open_device, add_one):
    async def main():
        async with open_device(window=8) as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            launches = [graph.launch() for _ in range(50)]
            assert launches[-1].state is sf.OpState.PARKED
            assert (await dev.get(x) == 50).all()

    run(main)


def test_r1_no_line_is_looked_up_for_what_is_recorded(run, add_one, monkeypatch):
    """That takes as long as the function is, for each op of it."""

    async def main():
        async with virtual() as dev:
            x, looked_up = dev.zeros(N, np.float32), []
            monkeypatch.setattr("streamflow.runtime.op.describe", lambda *_: looked_up.append(1))
            with dev.capture() as graph:
                op = dev.launch(add_one, x, N)
            await graph.launch()
            assert looked_up == []
            monkeypatch.undo()
            assert "test_capture_beside.py" in str(await error_of(op))
            assert "was captured" in repr(op.exception())

    run(main)
