"""``dev.captured(function)``: eager and captured can't be told apart."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from conftest import add_one_kernel as add_one
from conftest import saxpy_kernel as saxpy
from support import error_of, until, virtual

import streamflow as sf
from streamflow.errors import CaptureRefused, Closed, UpstreamFailed

N = 64

mul = sf.Kernel.from_source(
    """extern "C" __global__ void mul(const float* x, float* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i];
    }""",
    body=lambda x, y, a, n: y.__setitem__(slice(0, n), x[:n] * np.float32(a)),
    access={"y": "write"},
)


scaled = sf.Kernel.from_source(  # doesn't say that it overwrites all of y
    mul.spec.source.replace("mul", "scaled"), body=mul.spec.body
)


def model(dev: sf.Device, x: sf.DeviceArray, factor: float = 2.0) -> sf.DeviceArray:
    """A new array, by way of another one; ``x`` stays as it is."""
    y, z = dev.empty(x.shape, np.float32), dev.empty(x.shape, np.float32)
    dev.launch(mul, x, y, factor, x.size)
    dev.launch(add_one, y, y.size)
    dev.launch(scaled, y, z, 3.0, x.size)
    return z


def modelled(x: Any, factor: float = 2.0) -> Any:
    return (x * np.float32(factor) + 1) * np.float32(3)


def adding_to(dev: sf.Device, state: dict[str, sf.DeviceArray]) -> Callable[..., Any]:
    """A function that uses memory which it isn't given."""

    def step(x: sf.DeviceArray) -> sf.DeviceArray:
        dev.launch(add_one, x, N)
        dev.launch(saxpy, 1.0, x, state["total"], N)
        return state["total"]

    return step


def inputs(num: int, size: int = N) -> list[Any]:
    return [np.arange(size, dtype=np.float32) + number for number in range(num)]


def test_a_function_is_recorded_once_and_replayed_over_other_arrays(run, open_device):
    async def main():
        async with open_device() as dev:
            captured = dev.captured(model)
            kept = [dev.put(data) for data in inputs(6)]
            outs = [captured(dev, x) for x in kept]
            for x, out, data in zip(kept, outs, inputs(6), strict=True):
                assert np.array_equal(await dev.get(out), modelled(data))
                assert np.array_equal(await dev.get(x), data)
            assert (captured.num_recordings, captured.num_replays) == (1, 5)
            assert captured.__name__ == "model"
            del kept, outs, x, out

    run(main)


def test_the_function_itself_runs_only_to_be_recorded(run):
    async def main():
        calls = []

        def step(dev, x):
            calls.append(x.shape)
            dev.launch(add_one, x, x.size)

        async with virtual() as dev:
            captured = dev.captured(step)
            x = dev.zeros(N, np.float32)
            for _ in range(4):
                assert captured(dev, x) is None
            assert (await dev.get(x)).tolist() == [4] * N
            assert calls == [(N,)]
            del x

    run(main)


def test_writes_to_arguments_are_seen_in_the_callers_arrays(run, open_device):
    async def main():
        def step(dev, x, y):
            dev.launch(saxpy, 2.0, x, y, y.size)
            return y, y[8:16], x.reshape(8, 8), {"same": x}

        async with open_device() as dev:
            captured = dev.captured(step)
            for number in range(3):
                x = dev.put(np.full(N, number, np.float32))
                y = dev.full(N, 1, np.float32)
                mine, part, square, others = captured(dev, x, y)
                assert mine is y
                assert others == {"same": x}
                dev.fill(part, 50)
                expected = np.full(N, 1 + 2 * number, np.float32)
                expected[8:16] = 50
                assert np.array_equal(await dev.get(y), expected)
                dev.launch(add_one, x, N)
                assert np.array_equal(await dev.get(square), np.full((8, 8), number + 1))
            assert captured.num_recordings == 1
            del x, y, mine, part, square, others

    run(main)


def test_results_are_the_callers(run, open_device):
    async def main():
        def step(dev, x):
            y = dev.empty(2 * N, np.float32)
            dev.copy(y[:N], x)
            dev.fill(y[N:], 9)
            return y[:N], y[4:8], y

        async with open_device() as dev:
            captured = dev.captured(step)
            x = dev.zeros(N, np.float32)
            first = captured(dev, x)
            dev.launch(add_one, x, N)
            second = captured(dev, x)
            dev.fill(first[1], 5)  # memory that the results of one call share
            assert (await dev.get(first[0]))[:9].tolist() == [0, 0, 0, 0, 5, 5, 5, 5, 0]
            assert (await dev.get(first[2]))[3:9].tolist() == [0, 5, 5, 5, 5, 0]
            assert (await dev.get(second[2])).tolist() == [1] * N + [9] * N
            first[2].free()
            assert (await dev.get(captured(dev, x)[1])).tolist() == [1] * 4
            del x, first, second

    run(main)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((np.zeros(8, "f4"),), (np.zeros(9, "f4"),)),
        ((np.zeros(8, "f4"),), (np.zeros(8, "i4"),)),
        ((np.zeros(8, "f4"),), (np.zeros((2, 4), "f4"),)),
        ((np.zeros(8, "f4"), 1), (np.zeros(8, "f4"), 1.0)),
        ((np.zeros(8, "f4"), 1), (np.zeros(8, "f4"), True)),
        ((np.zeros(8, "f4"), 0.0), (np.zeros(8, "f4"), -0.0)),
        ((np.zeros(8, "f4"), 0j), (np.zeros(8, "f4"), -0j)),
        ((np.zeros(8, "f4"), np.float32(0)), (np.zeros(8, "f4"), np.float32(-0.0))),
        (([np.zeros(8, "f4")],), ((np.zeros(8, "f4"),),)),
        (({"a": np.zeros(8, "f4")},), ({"b": np.zeros(8, "f4")},)),
        (("a", np.zeros(8, "f4")), (np.zeros(8, "f4"), "a")),
    ],
)
def test_other_signatures_are_recorded_anew(run, one, other):
    async def main():
        def device(item):
            if isinstance(item, np.ndarray):
                return dev.put(item)
            if isinstance(item, dict):
                return {key: device(part) for key, part in item.items()}
            return type(item)(map(device, item)) if isinstance(item, (tuple, list)) else item

        async with virtual() as dev:
            captured = dev.captured(lambda *args: None)
            for args in (one, other, one, other):
                captured(*map(device, args))
            assert (captured.num_recordings, captured.num_replays) == (2, 2)

    run(main)


def test_nan_and_equal_values_share_a_recording(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(lambda *args, **kwargs: None)
            for _ in range(3):
                captured(float("nan"), "ab" + str(1), complex(0, float("nan")), b=2, a=(1, None))
            captured(float("nan"), "ab1", complex(0, float("nan")), a=(1, None), b=2)
            assert (captured.num_recordings, captured.num_replays) == (1, 3)

    run(main)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Item:
    name: str
    pixels: Any


def test_arrays_in_containers(run):
    async def main():
        def step(dev, pair, item, *, scale):
            out = dev.empty(N, np.float32)
            dev.launch(mul, pair.left, out, scale, N)
            dev.launch(saxpy, 1.0, pair.right[0], out, N)
            dev.launch(saxpy, 1.0, item.pixels, out, N)
            return Pair(out, item), [item.name, pair.right]

        async with virtual() as dev:
            captured = dev.captured(step)
            for number in range(3):
                a, b, c = (dev.full(N, number + k, np.float32) for k in range(3))
                pair, (name, right) = captured(dev, Pair(a, [b]), Item("x", c), scale=4.0)
                assert (await dev.get(pair.left))[0] == 4 * number + 2 * number + 3
                assert isinstance(pair, Pair)
                assert pair.right == Item("x", c)
                assert (name, right) == ("x", [b])
            assert captured.num_recordings == 1
            del a, b, c, pair, right

    run(main)


def test_mapped_arrays_as_arguments(run, open_device):
    async def main():
        async with open_device() as dev:
            captured = dev.captured(partial(dev.launch, add_one))
            x = await dev.mapped(N, np.float32)
            for value in (1, 2):
                await x.idle()
                x.host[:] = value
                captured(x, N)
                await x.idle()
                assert (x.host == value + 1).all()
            y = dev.zeros(N, np.float32)
            captured(y, N)
            assert (await dev.get(y) == 1).all()
            assert captured.num_recordings == 1

    run(main)


def test_arguments_that_share_memory(run, open_device):
    async def main():
        def step(dev, x, y, parts):
            dev.launch(add_one, x, x.size)
            dev.launch(add_one, y, y.size)
            dev.launch(saxpy, 10.0, x[: parts[0].size], parts[0], parts[0].size)
            dev.fill(parts[1][1:], 3)

        async with open_device() as dev:
            captured = dev.captured(step)
            found = []
            for function in (step, captured, captured):
                whole = dev.put(np.arange(N, dtype=np.float32))
                others = dev.put(np.arange(20, dtype=np.float32))
                x = whole[1:20]
                function(dev, x, whole[3:9], others.split(2))
                function(dev, x, x, [dev.zeros(4, np.float32), others[3:9]])
                found.append((await dev.get(whole)).tolist() + (await dev.get(others)).tolist())
            assert found[0] == found[1] == found[2]
            assert captured.num_recordings == 2
            del whole, others, x

    run(main)


def test_arrays_that_share_memory_stay_aligned_as_they_were(run):
    async def main():
        seen = []

        async with virtual() as dev:
            captured = dev.captured(lambda *arrays: seen.extend(x.address % 16 for x in arrays))
            whole = dev.zeros(N, np.float32)
            captured(whole[1:20], whole[4:9], whole[3:8])
            captured(whole[2:21], whole[5:10], whole[4:9])
            captured(whole[5:24], whole[8:13], whole[7:12])
            assert seen == [4, 0, 12, 8, 4, 0]
            assert captured.num_replays == 1
            del whole

    run(main)


def test_arrays_beside_each_other_are_not_copied_whole(run):
    async def main():
        def step(dev, x, y):
            dev.launch(add_one, y, y.size)
            dev.launch(saxpy, 1.0, y, x, x.size)

        async with virtual() as dev:
            captured = dev.captured(step)
            table = dev.zeros((1000, N), np.float32)
            for number in range(0, 1000, 250):
                captured(dev, table[number], table[number + 249])
            await dev.synchronize()
            assert dev.memory.snapshot().used_nbytes <= table.nbytes + 4 * N * 4
            got = await dev.get(table)
            assert got[:, 0].nonzero()[0].tolist() == [0, 249, 250, 499, 500, 749, 750, 999]
            assert captured.num_recordings == 1
            del table

    run(main)


def test_what_is_around_the_function_is_used_in_place(run, open_device):
    async def main():
        async with open_device() as dev:
            total = dev.zeros(N, np.float32)
            step = dev.captured(adding_to(dev, {"total": total}))
            for number in range(4):
                assert step(dev.full(N, number, np.float32)) is total
            assert (await dev.get(total))[0] == 10
            # Given as an argument too, a copy of it would be another array than it is.
            step(total)
            assert (await dev.get(total))[0] == 22
            assert step.num_recordings == 1
            del total

    run(main)


def test_what_is_around_the_function_may_be_replaced_once_it_was_freed(run):
    async def main():
        async with virtual() as dev:
            state = {"total": dev.zeros(N, np.float32)}
            step = dev.captured(adding_to(dev, state))
            x = dev.full(N, 1, np.float32)
            step(x)
            state.pop("total").free()
            with pytest.raises(KeyError):
                step(x)
            state["total"] = dev.full(N, 10, np.float32)
            step(x)
            step(x)
            assert (await dev.get(state["total"]))[0] == 10 + 3 + 4
            assert (step.num_recordings, step.num_replays) == (2, 1)
            del state, x

    run(main)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (np.zeros(3), r"ndarray of \(3,\) float64 there first"),
        ({1, 2}, "hashable ones only: found set"),
        (bytearray(2), "hashable ones only: found bytearray"),
    ],
)
def test_arguments_that_have_no_signature(run, argument, error):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(lambda x: None)
            with pytest.raises(TypeError, match=error):
                captured(argument)
            with pytest.raises(TypeError, match=error):
                captured([argument])
            with pytest.raises(TypeError, match="is another one at each call"):
                captured(dev.host(int))
            assert captured.num_recordings == 0

    run(main)


def test_bad_functions_and_sizes(run):
    async def suspended():
        pass

    def generator():
        yield

    async def main():
        async with virtual() as dev:
            for bad in (suspended, generator, 3):
                with pytest.raises(TypeError, match="a plain function that submits"):
                    dev.captured(bad)
            for size in (0, -1):
                with pytest.raises(ValueError, match="at least 1"):
                    dev.captured(model, maxsize=size)
            with pytest.raises(TypeError, match="a bool"):
                dev.captured(model, maxsize=True)

    run(main)


def test_arrays_that_are_gone_or_elsewhere(run):
    async def main():
        async with virtual(0, devices=2) as dev, virtual(1, devices=2) as other:
            captured = dev.captured(model)
            x, y = dev.zeros(N, np.float32), other.zeros(N, np.float32)
            captured(dev, x)
            with pytest.raises(ValueError, match="for another device"):
                captured(dev, y)
            x.free()
            with pytest.raises(Closed, match="was freed"):
                captured(dev, x)
            del x, y

    run(main)


def test_a_function_that_fails_leaves_nothing_behind(run):
    async def main():
        fails = [True]

        def step(dev, x):
            y = dev.zeros(1 << 16, np.float32)
            dev.launch(add_one, x, N)
            if fails:
                fails.pop()
                raise RuntimeError("oh")
            return y

        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            used = dev.memory.snapshot().used_nbytes
            captured = dev.captured(step)
            with pytest.raises(RuntimeError, match="oh"):
                captured(dev, x)
            gc.collect()
            await dev.synchronize()
            assert dev.memory.snapshot().used_nbytes == used
            assert captured.num_recordings == 0
            captured(dev, x)
            assert (await dev.get(x))[0] == 1
            del x

    run(main)


def test_what_a_graph_cannot_hold_is_refused_with_its_line(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            captured = dev.captured(lambda x: dev.get(x))
            with pytest.raises(
                CaptureRefused, match=r"test_captured.py:\d+.*get reads on the host"
            ):
                captured(x)
            with pytest.raises(CaptureRefused, match="it frees only what was allocated in it"):
                dev.captured(lambda x: x.free())(x)
            with pytest.raises(CaptureRefused, match="has no result in a graph"):
                dev.captured(lambda x: dev.call(lambda stream, x: 3, x))(x)
            assert (await dev.get(x))[0] == 0
            del x

    run(main)


def test_an_op_among_the_results_ends_with_the_call(run, open_device):
    async def main():
        async with open_device() as dev:
            captured = dev.captured(lambda x: dev.launch(add_one, x, N, name="last"))
            x = dev.zeros(N, np.float32)
            for number in range(1, 4):
                assert await captured(x) is None
                assert x.ready.done()
                assert (await dev.get(x))[0] == number
            del x

    run(main)


def test_a_failed_argument_fails_its_own_call_only(run):
    async def main():
        def broken():
            raise ValueError("no data")

        async with virtual() as dev:
            captured = dev.captured(model)
            bad, good = dev.zeros(N, np.float32), dev.full(N, 1, np.float32)
            captured(dev, good)
            dev.put(dev.host(broken), out=bad)
            failed, well = captured(dev, bad), captured(dev, good)  # before it is known
            assert (await dev.get(well)).tolist() == [9] * N
            error = await error_of(failed)
            assert isinstance(error, UpstreamFailed)
            assert "no data" in str(error)
            dev.fill(bad, 1)
            assert (await dev.get(captured(dev, bad))).tolist() == [9] * N
            assert captured.num_recordings == 1
            del bad, good, failed, well

    run(main)


def test_an_argument_that_is_overwritten_need_not_have_contents(run):
    async def main():
        def broken():
            raise ValueError("no data")

        async with virtual() as dev:

            @dev.captured
            def step(x, out):
                dev.launch(mul, x, out, 2.0, N)

            x, out = dev.full(N, 4, np.float32), dev.empty(N, np.float32)
            source = dev.host(broken)
            dev.put(source, out=out)
            step(x, out)
            assert (await dev.get(out)).tolist() == [8] * N
            with pytest.raises(ValueError, match="no data"):
                await source
            del x, out

    run(main)


def test_within_a_capture_the_function_is_recorded_there(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            inner = dev.captured(lambda x: dev.launch(add_one, x, N))
            outer = dev.captured(lambda x: inner(x))
            with dev.capture() as graph:
                inner(x)
                inner(x)
            await graph.launch()
            await outer(x)
            assert (await dev.get(x))[0] == 3
            assert len(graph.nodes) == 2
            assert inner.num_recordings == 0
            del x, graph

    run(main)


def test_the_oldest_signature_goes_and_memory_stays_flat(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(model, maxsize=2)
            peak = []
            for number in range(60):  # not awaited: launches of what has gone are on their way
                size = N * (1 + number % 3)
                x = dev.full(size, number, np.float32)
                out = captured(dev, x)
                expected = np.full(size, number, np.float32)
                if number % 10 == 9:
                    assert np.array_equal(await dev.get(out), modelled(expected))
                    await dev.synchronize()
                    gc.collect()
                    peak.append(dev.memory.snapshot().used_nbytes)
            assert captured.num_recordings == 60
            captured(dev, dev.zeros(3 * N, np.float32))
            assert captured.num_replays == 1
            assert max(peak) < 30 * N * 4 * 3
            captured.clear()
            del x, out
            gc.collect()
            await dev.synchronize()
            assert dev.memory.snapshot().used_nbytes == 0
            assert dev.live() == {}

    run(main)


def test_a_thousand_calls_with_new_arrays_hold_none_of_them(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(model)
            used = []
            for number in range(1000):
                out = captured(dev, dev.full(N, number, np.float32))
                if number % 100 == 99:
                    assert (await dev.get(out))[0] == modelled(np.float32(number))
                    await dev.synchronize()
                    used.append((dev.memory.snapshot().used_nbytes, len(dev.live()["array"])))
            assert len(set(used)) == 1
            assert (captured.num_recordings, captured.num_replays) == (1, 999)
            del out

    run(main)


def test_leaving_the_device_forgets_the_recordings(run):
    async def main():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with virtual() as dev:
                captured = dev.captured(model)
                assert (await dev.get(captured(dev, dev.zeros(N, np.float32))))[0] == 3
            with pytest.raises(Closed):
                captured(dev, None)

    run(main)


def test_an_explicit_stream_orders_the_call(run, open_device):
    async def main():
        async with open_device() as dev:
            captured = dev.captured(model)
            stream = dev.stream("mine")
            x = dev.zeros(N, np.float32)
            await dev.get(captured(dev, x))
            held = open_device.stall(dev, stream, 0.05)
            with stream:
                out = captured(dev, x)
            assert out.ready.stream is stream or out.ready.stream == "mine"
            assert not out.ready.done()
            held.release()
            assert (await dev.get(out))[0] == 3
            stream.close()
            del x, out

    run(main)


def test_calls_from_many_tasks(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(model)
            found = {}

            async def call(number):
                x = dev.full(N, number, np.float32)
                await anyio.lowlevel.checkpoint()
                found[number] = float((await dev.get(captured(dev, x)))[0])

            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(call, number)
            assert found == {number: (2 * number + 1) * 3 for number in range(20)}
            assert captured.num_recordings == 1

    run(main)


def test_memory_that_runs_short_leaves_no_half_call(run):
    async def main():
        async with virtual(memory_nbytes=1 << 20) as dev:
            size = 1 << 16  # floats: 256 KiB
            captured = dev.captured(lambda x: model(dev, x))
            x = dev.zeros(size, np.float32)
            with pytest.raises(sf.OutOfDeviceMemory):
                captured(x)
            gc.collect()
            await dev.synchronize()
            assert dev.memory.snapshot().used_nbytes == x.nbytes
            small = dev.zeros(N, np.float32)
            assert (await dev.get(captured(small)))[0] == 3
            del x, small

    run(main)


def test_host_steps_run_in_each_replay(run, open_device):
    async def main():
        seen = []

        def step(dev, x):
            dev.launch(add_one, x, N)
            dev.host(lambda values: seen.append(float(values[0])), x)
            dev.launch(add_one, x, N)
            return x

        async with open_device() as dev:
            captured = dev.captured(step)
            for number in (10, 20, 30):
                x = captured(dev, dev.full(N, number, np.float32))
                assert (await dev.get(x))[0] == number + 2
            assert seen == [11, 21, 31]
            assert captured.num_recordings == 1
            del x

    run(main)


def test_an_argument_that_only_the_host_reads(run, open_device):
    async def main():
        seen = []

        def step(dev, x, y):
            dev.host(lambda values: seen.append(float(values[0])), x)
            dev.fill(y, 1)
            dev.host(lambda values: seen.append(float(values[0])), y)

        async with open_device() as dev:
            captured = dev.captured(step)
            for number in (10, 20, 30):
                y = dev.empty(N, np.float32)
                captured(dev, dev.full(N, number, np.float32), y)
                assert (await dev.get(y) == 1).all()
            await dev.synchronize()
            assert seen == [10, 1, 20, 1, 30, 1]
            del y

    run(main)


def test_a_function_that_calls_itself(run):
    async def main():
        async with virtual() as dev:

            def step(num, x):
                if num:
                    captured(num - 1, x)
                dev.launch(add_one, x, N)

            captured = dev.captured(step)
            x = dev.zeros(N, np.float32)
            captured(3, x)
            captured(3, x)
            assert (await dev.get(x))[0] == 8
            assert (captured.num_recordings, captured.num_replays) == (1, 1)
            del x
        step.__closure__[0].cell_contents.clear()

    run(main)


def test_arrays_without_elements(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(lambda x, y: (x, dev.empty((0, 3)), y[0:0], [y]))
            for _ in range(3):
                x, y = dev.zeros(0, np.float32), dev.zeros(N, np.float32)
                mine, new, none, (other,) = captured(x, y)
                assert mine is x
                assert other is y
                assert (new.shape, new.dtype, none.shape) == ((0, 3), np.float64, (0,))
                assert (await dev.get(new)).size == (await dev.get(none)).size == 0
            assert captured.num_recordings == 1
            del x, y, mine, new, none, other

    run(main)


@pytest.mark.parametrize(
    "settings", [{"serial": True}, {"debug": True}, {"window": 2}, {"compute_lanes": 1}], ids=str
)
def test_other_settings_change_nothing(run, settings):
    async def main():
        async with virtual(**settings) as dev:
            captured = dev.captured(model)
            with dev.trace() as trace:
                async with dev.scope(limit="1MiB"):
                    outs = [captured(dev, dev.put(data)) for data in inputs(10)]
            for out, data in zip(outs, inputs(10), strict=True):
                assert np.array_equal(await dev.get(out), modelled(data))
            names = [op.name for op in trace.ops if op.kind in ("copy", "graph")]
            assert names == ["model in", "model", "model out"] * 10
            del outs, out

    run(main)


def test_a_stream_that_was_current_at_the_recording_need_not_be_there_later(run):
    async def main():
        async with virtual() as dev:
            captured = dev.captured(model)
            stream = dev.stream("gone")
            x = dev.zeros(N, np.float32)
            with stream:
                captured(dev, x)
            await stream.synchronize()
            stream.close()
            assert (await dev.get(captured(dev, x)))[0] == 3
            assert captured.num_recordings == 1
            del x

    run(main)


# -- pipelines -----------------------------------------------------------------------------------


def test_a_pipeline_whose_device_stage_is_captured(run, open_device):
    async def main():
        async with open_device() as dev:
            captured = dev.captured(model)
            batches = inputs(12, 1 << 15)  # staged
            pipeline = dev.pipeline(batches, depth=3).map(captured)
            outs = [out async for out in pipeline]
            for data, out in zip(batches, outs, strict=True):
                assert np.array_equal(out, modelled(data))
            assert (captured.num_recordings, captured.num_replays) == (1, 11)
            assert "model" in [stage.name for stage in pipeline.stats().stages]
            del outs, out

    run(main)


def test_ragged_items_of_a_pipeline_and_changes_in_place(run):
    async def main():
        def step(dev, item):
            dev.launch(add_one, item["x"], item["x"].size)
            return item

        async with virtual() as dev:
            captured = dev.captured(step)
            table = np.arange(110, dtype=np.float32)
            items = [{"x": table[n : n + 20]} for n in range(0, 110, 20)]
            outs = [out["x"] async for out in dev.pipeline(items).map(captured)]
            assert np.array_equal(np.concatenate(outs), table + 1)
            assert (captured.num_recordings, captured.num_replays) == (2, 4)
            del outs

    run(main)


def test_a_pipeline_on_the_device_with_a_captured_consumer(run):
    async def main():
        async with virtual() as dev:
            total = dev.zeros(N, np.float32)
            add = dev.captured(partial(dev.launch, saxpy, 1.0), name="add")
            loader = dev.pipeline([np.full(N, k, np.float32) for k in range(8)]).on_device()
            async for x in loader:
                add(x, total, N)
            assert (await dev.get(total))[0] == 28
            assert add.num_recordings == 1
            await until(lambda: dev.stats().num_pending == 0)
            del total, x

    run(main)
