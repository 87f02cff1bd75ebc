"""What no graph can hold: refused by the call, with its line, and nothing is left of it (CR15)."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support import error_of, turns, virtual

import streamflow as sf
from streamflow.errors import CaptureRefused

N = 256
HERE = r"test_capture_refusals\.py:\d+"


class Bench:
    """A device with things to call wrongly."""

    def __init__(self, dev: sf.Device, add_one: Any, lease: Any) -> None:
        self.dev, self.add_one, self.lease = dev, add_one, lease
        self.x = dev.zeros(N, np.float32)
        self.wide = dev.zeros(4, np.complex128)
        self.outside = dev.fill(self.x, 1)
        self.stream = dev.stream()
        self.synced = sf.SyncedArray(dev, N, np.float32)
        self.pageable = np.zeros(N, np.float32)
        with dev.capture() as self.other:
            self.op_of_other = dev.launch(add_one, self.x, N)


async def awaits(awaitable: Any) -> None:
    await awaitable


async def synced_block(b: Bench) -> None:
    async with b.synced.device(write="all"):
        pass


REFUSED = {
    "await an op of the graph": lambda b: awaits(b.dev.launch(b.add_one, b.x, N)),
    "await an op from before": lambda b: awaits(b.outside),
    "await an array": lambda b: awaits(b.x),
    "await what is staged": lambda b: awaits(b.x.staged),
    "gather": lambda b: sf.gather(b.outside),
    "synchronize": lambda b: b.dev.synchronize(),
    "synchronize a stream": lambda b: b.stream.synchronize(),
    "wait until it is built": lambda b: awaits(b.other.ready),
    "get": lambda b: b.dev.get(b.x),
    "get into pageable memory": lambda b: b.dev.get(b.x, out=b.pageable),
    "copy to pageable memory": lambda b: b.dev.copy(b.pageable, b.x),
    "put": lambda b: b.dev.put(b.pageable),
    "put over an array": lambda b: b.dev.put(b.pageable, out=b.x),
    "put a result": lambda b: b.dev.put(b.dev.host(int), out=b.x),
    "copy from pageable memory": lambda b: b.dev.copy(b.x, b.pageable),
    "copy on the host": lambda b: b.dev.copy(b.pageable, b.pageable.copy()),
    "fill with a pattern that no memset has": lambda b: b.dev.fill(b.wide, 1j),
    "alloc": lambda b: b.dev.alloc(N),
    "mapped": lambda b: b.dev.mapped(N),
    "free of what was there before": lambda b: b.x.free(),
    "after an op from before": lambda b: b.dev.launch(b.add_one, b.x, N, after=b.outside),
    "after an op of another graph": lambda b: b.dev.launch(b.add_one, b.x, N, after=b.op_of_other),
    "after a future": lambda b: b.dev.launch(b.add_one, b.x, N, after=anyio.Event()),
    "a host step after an op from before": lambda b: b.dev.host(int, after=b.outside),
    "a host step over an op from before": lambda b: b.dev.host(print, b.outside),
    "a host step over an op of the graph": lambda b: b.dev.host(print, b.dev.fill(b.x, 0)),
    "a scalar from a host step": lambda b: b.dev.launch(b.add_one, b.x, b.dev.host(int)),
    "wait for an op from before": lambda b: b.stream.wait_for(b.outside),
    "a capture": lambda b: b.dev.capture().__enter__(),
    "an update": lambda b: b.other.update().__enter__(),
    "a launch of a graph": lambda b: b.other.launch(),
    "a block of a synced array": synced_block,
    "a push of a synced array": lambda b: b.synced.push(),
}


@asynccontextmanager
async def bench(open_device: Any, add_one: Any, **settings: Any) -> AsyncIterator[Bench]:
    async with open_device(**settings) as dev, dev.pinned.lease(4 * N) as lease:
        yield Bench(dev, add_one, lease)


@pytest.mark.parametrize("what", REFUSED)
def test_cr15_what_a_graph_cannot_hold_is_refused_with_the_line(run, open_device, add_one, what):
    async def main():
        async with bench(open_device, add_one) as b:
            dev = b.dev
            await b.other.launch()
            await dev.synchronize()
            live = dev.live().get("op")
            with pytest.raises(CaptureRefused, match=HERE), dev.capture() as graph:
                dev.launch(add_one, b.x, N)
                found = REFUSED[what](b)
                if hasattr(found, "__await__"):
                    await found
            with pytest.raises(sf.Closed):
                graph.launch()
            assert dev.live().get("op") == live
            # The device is as it was: eager work, and another capture.
            dev.launch(add_one, b.x, N)
            with dev.capture() as graph:
                dev.launch(add_one, b.x, N)
            await graph.launch()
            assert (await dev.get(b.x) == 4).all()
            await dev.synchronize()

    run(main)


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_that_is_caught_leaves_the_graph_as_it_was(run, add_one, what):
    async def main():
        async with bench(virtual, add_one) as b:
            dev = b.dev
            await b.outside
            with dev.capture() as graph:
                dev.fill(b.x, 5)
                try:
                    found = REFUSED[what](b)
                    if hasattr(found, "__await__"):
                        await found
                except CaptureRefused:
                    pass
                else:
                    raise AssertionError(what)
                dev.fill(b.x, 7)
            await graph.launch()
            assert (await dev.get(b.x) == 7).all()
            await dev.synchronize()

    run(main)


def test_after_in_a_capture_does_not_depend_on_what_has_ended(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            for is_ended in (False, True):
                op = dev.fill(x, 1)
                if is_ended:
                    await op
                with pytest.raises(CaptureRefused, match=HERE), dev.capture():
                    dev.launch(add_one, x, N, after=op)

    run(main)


def test_after_an_array_is_after_its_writes_in_the_graph_and_before(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            slow = dev.stream()
            with dev.capture() as graph:
                dev.launch(add_one, y, N, after=x)
                dev.fill(x, 3)
                dev.launch(add_one, y[:4], 4, after=[x], name="last")
            (last,) = (node for node in graph.nodes if node.name == "last")
            assert sorted(node.kind for node in last.deps) == ["fill", "launch"]
            await graph.ready
            stall = open_device.stall(dev, slow)
            dev.fill(x, 1, stream=slow)
            launch = graph.launch()
            assert not launch.done()
            stall.release()
            await launch

    run(main)


def test_results_of_captured_ops_are_the_launchs(run, open_device, add_one):
    async def main():
        async with bench(open_device, add_one) as b:
            dev = b.dev
            with dev.capture() as graph:
                op = dev.launch(add_one, b.x, N)
                step = dev.host(int)
                put = dev.put(b.lease.array(N, np.float32))
            for each in (op, step, put.staged):
                assert each.done()
                assert not each.cancel()
                error = await error_of(each)
                assert isinstance(error, CaptureRefused)
                assert "graph.launch()" in str(error)
                with pytest.raises(CaptureRefused):
                    each.result()
            called = []
            op.add_done_callback(called.append)
            later = dev.launch(add_one, b.x, N, after=op)
            assert isinstance(await error_of(later), sf.UpstreamFailed)
            await turns()
            assert called == [op]
            dev.fill(b.x, 0)
            await graph.launch()
            assert (await dev.get(b.x) == 1).all()
            await dev.synchronize()

    run(main)


def test_a_body_that_raises_leaves_nothing(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            await x
            live = dev.live()
            kept = []
            with pytest.raises(KeyError), dev.capture() as graph:
                inner = dev.zeros(N, np.float32)
                freed = dev.zeros(N, np.float32)
                freed.free()
                kept.append(freed)
                dev.call(lambda stream, array: None, x)
                dev.launch(add_one, inner, N)
                raise KeyError("of the body")
            del inner, freed
            with pytest.raises(sf.Closed, match="closed"):
                graph.launch()
            for look in ("nodes", "edges", "ready", "num_parts"):
                with pytest.raises(sf.Closed):
                    getattr(graph, look)
            gc.collect()
            await dev.synchronize()
            assert dev.live() == live
            assert kept[0].is_freed
            with pytest.raises(sf.Closed):
                dev.launch(add_one, kept[0], N)
            dev.launch(add_one, x, N)
            assert (await dev.get(x) == 1).all()

    run(main)


def test_a_graph_is_nothing_yet_inside_its_block(run, add_one):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as tasks:
            x = dev.zeros(N, np.float32)
            capture = dev.capture()
            with capture as graph:
                dev.launch(add_one, x, N)
                assert "being captured" in repr(graph)
                for look in ("nodes", "edges", "ready", "num_parts"):
                    with pytest.raises(RuntimeError, match="leave the block"):
                        getattr(graph, look)

                async def other():
                    with pytest.raises(RuntimeError, match="leave the block"):
                        graph.launch()
                    with pytest.raises(RuntimeError, match="leave the block"), graph.update():
                        pass

                tasks.start_soon(other)
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            with pytest.raises(RuntimeError, match="entered once"), capture:
                pass
            await graph.launch()

    run(main)


def test_arrays_of_another_device_have_no_place_in_a_graph(run, add_one):
    async def main():
        async with virtual() as dev, virtual(1) as other:
            x, theirs = dev.zeros(N, np.float32), other.zeros(N, np.float32)
            with dev.capture() as graph:
                with pytest.raises(CaptureRefused, match=HERE):
                    dev.copy(x, theirs)
                with pytest.raises(CaptureRefused, match=HERE):
                    dev.copy(theirs, x)
                with pytest.raises(ValueError, match="another device"):
                    dev.launch(add_one, theirs, N)
                with pytest.raises(CaptureRefused, match=HERE):
                    dev.launch(add_one, x, N, after=theirs)
                other.fill(theirs, 8)  # not of the device that captures: it runs
                dev.fill(x, 6)
            await graph.launch()
            assert (await other.get(theirs) == 8).all()
            assert (await dev.get(x) == 6).all()

    run(main)


def test_c40_two_devices_capture_in_one_task(run, add_one):
    async def main():
        async with virtual() as dev, virtual(1) as other:
            x, theirs = dev.zeros(N, np.float32), other.zeros(N, np.float32)
            with dev.capture() as one, other.capture() as two:
                dev.launch(add_one, x, N)
                other.fill(theirs, 8)
            assert (len(one.nodes), len(two.nodes)) == (1, 1)
            await sf.gather(one.launch(), two.launch())
            assert (await dev.get(x) == 1).all()
            assert (await other.get(theirs) == 8).all()

    run(main)
