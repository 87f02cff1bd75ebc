"""``graph.update()``: the same ops over other arguments, from then on."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from support import turns

import streamflow as sf
from streamflow.errors import CaptureRefused

N = 256


def test_an_update_runs_over_other_arguments_from_then_on(run, open_device, add_one, saxpy):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            slow = dev.stream()

            def step(target, a):
                dev.launch(add_one, target, N)
                dev.launch(saxpy, a, target, target, N)

            with dev.capture() as graph:
                step(x, 1.0)
            stall = open_device.stall(dev, slow)
            dev.fill(x, 1, stream=slow)
            graph.launch()  # parked until the graph is built, and updated before that
            with graph.update():
                step(y, 3.0)
            graph.launch()
            with graph.update():
                step(y, 9.0)
            graph.launch()
            stall.release()
            assert (await dev.get(x))[0] == 4
            assert (await dev.get(y))[0] == 50

    run(main)


def test_a_launch_from_before_an_update_runs_what_was_captured_then(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            await graph.ready
            event = anyio.Event()
            before = graph.launch(after=event)
            with graph.update():
                dev.launch(add_one, y, N)
            after = graph.launch()
            await turns(100)
            assert not graph.ready.done()
            event.set()
            await sf.gather(before, after)
            assert (await dev.get(x) == 1).all()
            assert (await dev.get(y) == 1).all()

    run(main)


def test_an_update_waits_for_what_is_left_of_a_cancelled_launch(run, open_device):
    async def main():
        async with open_device() as dev:
            x, seen, start = dev.zeros(N, np.float32), [], anyio.Event()

            def step(value):
                dev.fill(x, value)
                dev.host(lambda values: seen.append(values[0]), x)
                dev.fill(x, 0)

            with dev.capture() as graph:
                step(1)
            assert graph.launch(after=start).cancel()  # its end: two ops are before it
            with graph.update():
                step(2)
            await turns(100)
            assert not graph.ready.done()
            start.set()
            await graph.ready
            await graph.launch()
            assert seen == [1, 2]

    run(main)


def test_an_update_outlives_a_scope_that_is_left_by_an_error(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            event = anyio.Event()
            graph.launch(after=event)  # which the update waits for
            with pytest.raises(ExceptionGroup):
                async with dev.scope():
                    with graph.update():
                        dev.launch(add_one, y, N)
                    dev.host(lambda: 1 / 0)
            event.set()
            await graph.launch()
            assert (await dev.get(y) == 1).all()

    run(main)


def test_an_update_may_take_another_number_of_driver_calls(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float64)
            with dev.capture() as graph:
                dev.fill(x, 0)
            await graph.launch()
            for value in (1.5, 0.0, 2.5):
                with graph.update():
                    dev.fill(x, value)
                await graph.launch()
                assert (await dev.get(x) == value).all()

    run(main)


def test_an_update_of_another_shape_is_refused_and_changes_nothing(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)

            def no_ops():
                pass

            def other_kind():
                dev.fill(x, 0)
                dev.launch(add_one, x, N)

            def other_edges():
                dev.launch(add_one, x, N)
                dev.launch(add_one, dev.zeros(N, np.float32), N)

            def more():
                for _ in range(3):
                    dev.launch(add_one, x, N)

            def with_host():
                dev.launch(add_one, x, N)
                dev.host(print)
                dev.launch(add_one, x, N)

            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                dev.launch(add_one, x, N)
            for body in (no_ops, other_kind, other_edges, more, with_host):
                with pytest.raises(CaptureRefused, match="was"), graph.update():
                    body()
            with pytest.raises(KeyError), graph.update():
                dev.launch(add_one, x, N)
                raise KeyError
            await graph.launch()
            assert (await dev.get(x))[0] == 2

    run(main)
