"""Tasks over foreign code: order, parking, results and failures of ``dev.call`` (R2 to R9).

Each test runs with the function as the work (the simulator), with the function submitting
at once to a simulated stream, and, on a GPU, with the driver's own calls as foreign code.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from support import Opener, until

import streamflow as sf
import streamflow.backends
from streamflow.backends import register_backend
from streamflow.backends.sim.device import SimDevice
from streamflow.backends.sim.stream import SimStream

N = 256
BIG = np.arange(1 << 16, dtype=np.int32)  # staged


class AtOnce(SimDevice):
    """A simulated device whose streams other libraries submit to, as on CUDA."""

    is_cuda = True

    def call(self, stream, name, body, accesses, /, *args):
        self.counts["call"] += 1
        body(*args)

    def translate(self, error, doing):
        if "ILLEGAL_ADDRESS" in str(error) and not isinstance(error, sf.DeviceLost):
            return sf.DeviceLost(f"{doing}: {error}")
        return super().translate(error, doing)


def opener(where, monkeypatch):
    clock, _, way = where.partition(", ")
    if clock == "cuda":
        return Opener("cuda", "host")
    if way == "at once":
        monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))
        register_backend("sim", AtOnce)
    return Opener("sim", clock)


SIMULATED = ["virtual", "wall", "virtual, at once", "wall, at once"]


@pytest.fixture(params=[*SIMULATED, pytest.param("cuda", marks=pytest.mark.gpu)])
def open_device(request, monkeypatch):
    return opener(request.param, monkeypatch)


@pytest.fixture(params=SIMULATED)
def open_simulated(request, monkeypatch):
    return opener(request.param, monkeypatch)


def is_late(dev: sf.Device) -> bool:
    """Whether functions run when the device comes to them."""
    return not dev._core.backend.is_cuda


# -- the foreign library -----------------------------------------------------------------


def set_all(stream: sf.CallStream, x: Any, value: int) -> None:
    """Set every int32 of ``x``."""
    if isinstance(x, np.ndarray):
        x[...] = value
        return
    interface = x.__cuda_array_interface__
    (address, is_read_only), target = interface["data"], stream.backend_stream
    assert not is_read_only
    if isinstance(target, SimStream):
        target.device.fill(address, np.int32(value).tobytes(), x.size, target)
        return
    from cuda.bindings import driver

    (error,) = driver.cuMemsetD32Async(address, value, x.size, stream.handle)
    assert not error


def copy_into(stream: sf.CallStream, dst: Any, src: Any) -> None:
    """Copy ``src`` to ``dst``."""
    if isinstance(dst, np.ndarray):
        dst[...] = src
        return
    to, origin = (array.__cuda_array_interface__["data"][0] for array in (dst, src))
    target = stream.backend_stream
    if isinstance(target, SimStream):
        target.device.copy_d2d(to, origin, src.nbytes, target)
        return
    from cuda.bindings import driver

    (error,) = driver.cuMemcpyDtoDAsync(to, origin, src.nbytes, stream.handle)
    assert not error


def set_then_fail(stream: sf.CallStream, x: Any, value: int) -> None:
    set_all(stream, x, value)
    raise KeyError("half way")


# -- order -----------------------------------------------------------------------------------


def test_foreign_work_is_ordered_by_its_arrays(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.zeros(N, np.int32))
            op = dev.call(set_all, x, 7)
            y = dev.empty(N, np.int32)
            dev.call(copy_into, y, x, writes=y)
            assert (await dev.get(y)).tolist() == [7] * N
            assert await op is None
            assert (op.kind, op.name) == ("call", "set_all")

    run(main)


def test_later_uses_wait_for_what_the_function_submitted(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.zeros(N, np.int32))
            await x
            slow = dev.stream("slow")
            stall = open_device.stall(dev, slow)
            op = dev.call(set_all, x, 5, stream=slow)
            found = dev.get(x)
            assert not op.done()
            stall.release()
            assert (await found).tolist() == [5] * N
            assert op.stream == "slow"

    run(main)


def test_on_the_simulator_the_function_runs_when_the_device_comes_to_it(run, open_simulated):
    async def main():
        async with open_simulated() as dev:
            log = []
            gate = dev.sim.gate("compute0")
            op = dev.call(lambda stream: log.append("ran"))
            await anyio.lowlevel.checkpoint()
            assert log == ([] if is_late(dev) else ["ran"])
            gate.release()
            await op
            assert log == ["ran"]
            assert dev.sim.counters["call"] == 1

    run(main)


def test_foreign_work_waits_for_staging(run, open_device):
    async def main():
        async with open_device() as dev:
            x, y = dev.put(BIG), dev.empty(BIG.shape, np.int32)
            op = dev.call(copy_into, y, x, writes=y)
            assert op.state is sf.OpState.PARKED
            assert np.array_equal(await dev.get(y), BIG)

    run(main)


def test_an_array_may_be_freed_behind_a_parked_call(run, open_device):
    async def main():
        async with open_device() as dev:
            x, y = dev.put(BIG), dev.empty(BIG.shape, np.int32)
            op = dev.call(copy_into, y, x, writes=y)
            freed = x.free()
            assert op.state is sf.OpState.PARKED
            assert np.array_equal(await dev.get(y), BIG)
            await freed

    run(main)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, "xy"),
        ({"writes": "y"}, "y"),
        ({"reads": "x"}, "y"),
        ({"reads": "xy"}, ""),
        ({"writes": ""}, ""),
        ({"reads": "x", "writes": "y"}, "y"),
        ({"reads": "xy", "writes": "y"}, "y"),
        ({"reads": "z"}, "xy"),
        ({"writes": "z"}, "z"),
    ],
    ids=str,
)
def test_what_is_read_and_what_is_written(run, open_device, given, written):
    async def main():
        async with open_device() as dev:
            arrays = {name: dev.zeros(N, np.int32) for name in "xyz"}
            names = {what: [arrays[name] for name in given[what]] for what in given}
            used = {*"xy", *"".join(given.values())}
            op = dev.call(lambda stream, x, y: None, arrays["x"], arrays["y"], **names)
            for name, array in arrays.items():
                region = array._region
                assert (region.last_write is op.ticket) == (name in written)
                assert (op.ticket in region.reads) == (name in used - set(written))
            await op

    run(main)


def test_one_array_needs_no_sequence_and_a_view_counts_as_its_base(run, open_device):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.int32), dev.zeros(N, np.int32)
            op = dev.call(copy_into, y[:4], x[:4], reads=x, writes=y.reshape(2, -1))
            assert x._region.reads == [op.ticket]
            assert y._region.last_write is op.ticket
            await op

    run(main)


def test_a_call_never_counts_as_a_full_overwrite(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            failed = dev.call(set_then_fail, x, 1)
            with pytest.raises(KeyError):
                await failed
            with pytest.raises(sf.UpstreamFailed):
                await dev.call(set_all, x, 2, writes=x)

    run(main)


def test_after_orders_what_data_does_not_show(run, open_device):
    async def main():
        async with open_device() as dev:
            slow = dev.stream()
            stall = open_device.stall(dev, slow)
            first = dev.call(lambda stream: None, stream=slow)
            second = dev.call(lambda stream: None, after=first)
            assert not second.done()
            stall.release()
            await second
            assert first.done()

    run(main)


def test_empty_arrays_are_handed_over_too(run, open_device):
    async def main():
        async with open_device() as dev:

            def look(stream, x):
                if isinstance(x, np.ndarray):
                    return x.shape
                interface = x.__cuda_array_interface__
                assert interface["data"] == (0, False)
                return interface["shape"]

            assert await dev.call(look, dev.zeros((0, 3))) == (0, 3)

    run(main)


def test_calls_wait_for_room_in_the_window(run, open_device):
    async def main():
        async with open_device(window=40) as dev:
            slow = dev.stream()
            x = dev.zeros(N, np.int32)
            await x
            stall = open_device.stall(dev, slow)
            ops = [dev.call(set_all, x, value, stream=slow) for value in range(5)]
            await until(lambda: ops[0].state is sf.OpState.SUBMITTED)  # a GPU loads the stall
            assert ops[-1].state is sf.OpState.PARKED
            stall.release()
            assert (await dev.get(x)).tolist() == [4] * N

    run(main)


# -- results ---------------------------------------------------------------------------------


def test_what_the_function_returns_is_the_result(run, open_device):
    async def main():
        async with open_device() as dev:
            assert await dev.call(lambda stream, a, b: a + b, 3, 4) == 7
            handle = await dev.call(lambda stream: (stream.handle, stream.__cuda_stream__()))
            assert handle[1] == (0, handle[0])

    run(main)


def test_on_the_simulator_no_result_aliases_device_memory(run, open_device):
    async def main():
        async with open_device() as dev:
            if not is_late(dev):
                return
            x = dev.put(np.arange(N, dtype=np.int32))
            own = np.ones(3)
            op = dev.call(lambda stream, x: (x, [x[::2]], {"part": x[3:5].reshape(2, 1)}, own), x)
            whole, (every_other,), parts, kept = await op
            await dev.fill(x, -1)
            assert whole.tolist() == list(range(N))
            assert every_other.tolist() == list(range(0, N, 2))
            assert parts["part"].tolist() == [[3], [4]]
            assert kept is own

    run(main)


def test_the_stream_is_lent_until_the_function_returns(run, open_device):
    async def main():
        async with open_device() as dev:
            stream = await dev.call(lambda stream: stream)
            with pytest.raises(sf.Closed, match="lent until"):
                stream.__cuda_stream__()

    run(main)


def test_on_the_simulator_what_is_only_read_cannot_be_written(run, open_device):
    async def main():
        async with open_device() as dev:
            if not is_late(dev):
                return
            x = dev.zeros(N, np.int32)
            with pytest.raises(ValueError, match="read-only"):
                await dev.call(set_all, x, 1, reads=x)
            assert not (await dev.get(x)).any()

    run(main)


def test_arrays_offer_the_cuda_interface_only_where_they_are_cuda_memory(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros((3, 4), np.dtype([("a", "<i2"), ("b", "<f4")]))
            await x
            assert hasattr(x, "__cuda_array_interface__") is not is_late(dev)
            if is_late(dev):
                return
            assert x.__cuda_array_interface__ == {
                "shape": (3, 4),
                "typestr": "|V6",
                "descr": [("a", "<i2"), ("b", "<f4")],
                "data": (x.address, False),
                "strides": None,
                "stream": None,
                "version": 3,
            }
            assert "descr" not in dev.zeros(3).__cuda_array_interface__
            x.free()
            with pytest.raises(sf.Closed):
                x.__cuda_array_interface__  # noqa: B018

    run(main)


def test_lanes_and_streams_can_be_handed_to_other_libraries(run, open_device):
    async def main():
        async with open_device() as dev:
            for stream in (dev.stream(), dev.lanes["compute1"]):
                handle = int(stream.backend_stream.handle)
                assert stream.__cuda_stream__() == (0, handle)

    run(main)


def test_a_trace_shows_calls_as_compute(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            with dev.trace() as trace:
                await dev.call(set_all, x, 1, name="mine")
            (op,) = trace.ops
            assert (op.kind, op.engine, op.name, op.nbytes) == ("call", "compute", "mine", 4 * N)
            assert op.where.startswith("test_call.py:")

    run(main)


# -- failures ----------------------------------------------------------------------------------


def test_an_exception_fails_the_op_and_nothing_else(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            op = dev.call(set_then_fail, x, 1)
            with pytest.raises(KeyError, match="half way") as caught:
                await op
            told = "".join(traceback.format_exception(caught.value))
            assert "in set_then_fail" in told
            assert "half way" in told
            assert "foreign.py" not in told
            assert op.exception() is caught.value
            with pytest.raises(sf.UpstreamFailed) as upstream:
                await dev.get(x)
            assert upstream.value.__cause__ is caught.value
            assert dev.is_healthy
            await dev.fill(x, 3)  # overwrites it all
            assert (await dev.get(x)).tolist() == [3] * N

    run(main)


def test_what_was_submitted_before_the_exception_stays_ordered(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            await x
            slow = dev.stream()
            stall = open_device.stall(dev, slow)
            op = dev.call(set_then_fail, x, 1, stream=slow)
            found = dev.fill(x, 2)
            assert not found.done()
            stall.release()
            await found
            assert (await dev.get(x)).tolist() == [2] * N
            with pytest.raises(KeyError):
                await op

    run(main)


def test_on_the_simulator_ops_submitted_before_the_failure_run(run, open_device):
    async def main():
        async with open_device() as dev:
            if not is_late(dev):
                return
            x = dev.zeros(N, np.int32)
            with dev.sim.gate("compute0"):
                op = dev.call(set_then_fail, x, 1)
                before = dev.get(x)
            with pytest.raises(KeyError):
                await op
            assert (await before).tolist() == [1] * N
            with pytest.raises(sf.UpstreamFailed):
                await dev.get(x)

    run(main)


def test_a_parked_call_that_fails_fails_alone(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.put(BIG)
            op = dev.call(set_then_fail, x, 1)
            assert op.state is sf.OpState.PARKED
            with pytest.raises(KeyError):
                await op
            await dev.fill(x, 2)
            assert (await dev.get(x)).tolist() == [2] * BIG.size

    run(main)


def test_a_failure_nobody_looked_at_surfaces(run, open_device):
    async def main():
        async with open_device() as dev:
            dev.call(set_then_fail, dev.zeros(N, np.int32), 1)
            with pytest.raises(ExceptionGroup) as caught:
                await dev.synchronize()
            assert caught.group_contains(KeyError)

    run(main)


def test_c23_a_failed_call_that_is_kept_keeps_no_array(run, open_device):
    def chained(stream, x):
        try:
            set_then_fail(stream, x, 1)
        except KeyError as error:
            raise RuntimeError("in the end") from error

    def step(dev):
        x = dev.zeros(N, np.int32)
        op = dev.call(chained, x)
        while not op.done():  # seen from here: this frame and its array are on the stack
            dev._core.backend.advance(0)
        return op, weakref.ref(x)

    async def main():
        async with open_device() as dev:
            gc.disable()
            try:
                op, array = step(dev)
                error = op.exception()
                assert isinstance(error, RuntimeError)
                assert isinstance(error.__cause__, KeyError)
                assert array() is None
            finally:
                gc.enable()

    run(main)


def test_the_device_itself_is_out_of_reach_of_the_function(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            op = dev.call(lambda stream: dev.fill(x, 1))
            with pytest.raises(RuntimeError):  # WrongThread, on an engine's thread
                await op
            await dev.fill(x, 2)  # and is back in reach
            assert (await dev.get(x))[0] == 2

    run(main)


def test_an_interruption_at_the_submission_is_raised_there(run, open_device):
    def interrupted(stream, x):
        set_all(stream, x, 1)
        raise KeyboardInterrupt

    async def main():
        async with open_device() as dev:
            if is_late(dev):
                return
            x = dev.zeros(N, np.int32)
            with pytest.raises(KeyboardInterrupt):
                dev.call(interrupted, x)
            assert x.ready.state is sf.OpState.FAILED
            await dev.fill(x, 2)
            assert (await dev.get(x))[0] == 2

    run(main)


def test_a_cancelled_call_holds_nothing(run, open_device):
    class Argument:
        pass

    async def main():
        async with open_device() as dev:
            x = dev.put(BIG)
            argument = Argument()
            held = weakref.ref(argument)
            op = dev.call(lambda stream, x, argument: None, x, argument)
            del argument
            assert op.cancel()
            assert held() is None
            with pytest.raises(sf.OpCancelled):
                await op

    run(main)


def test_a_coroutine_that_a_function_returns_is_refused(run, open_device):
    async def work():
        raise AssertionError

    async def main():
        async with open_device() as dev:
            with pytest.raises(TypeError, match=r"dev\.host"):
                await dev.call(lambda stream: work())

    run(main)


async def coroutine_function(stream: Any) -> None:
    raise AssertionError


class AsyncCallable:
    async def __call__(self, stream: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda dev, x: dev.call(3), TypeError, "takes a function, found 3"),
        (lambda dev, x: dev.call(coroutine_function), TypeError, r"dev\.host"),
        (lambda dev, x: dev.call(AsyncCallable()), TypeError, r"dev\.host"),
        (lambda dev, x: dev.call(set_all, x, reads=3), TypeError, "reads= takes"),
        (lambda dev, x: dev.call(set_all, x, writes=[x, 3]), TypeError, "writes= takes"),
        (lambda dev, x: dev.call(set_all, x, writes=np.ones(3)), TypeError, "writes= takes"),
        (lambda dev, x: dev.call(set_all, x, reads=(), writes=()), ValueError, "argument 0, .*nei"),
        (lambda dev, x: dev.call(set_all, x, 1, stream="h2d"), TypeError, "stream= takes"),
        (lambda dev, x: dev.call(set_all, x, 1, after=[3]), TypeError, "after= takes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(run, open_device, make, error, match):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.int32)
            before = dev.stats().num_submitted
            with pytest.raises(error, match=match):
                make(dev, x)
            assert dev.stats().num_submitted == before
            await x

    run(main)


@pytest.mark.parametrize("where", ["argument", "reads", "writes"])
def test_arrays_that_cannot_be_used_are_refused(run, open_device, where):
    def call(dev, x):
        if where == "argument":
            return dev.call(set_all, x, 1)
        return dev.call(lambda stream: None, **{where: [x]})

    async def main():
        async with open_device() as dev, open_device() as other:
            x, y = dev.zeros(N, np.int32), other.zeros(N, np.int32)
            x.free()
            before = dev.stats().num_submitted
            with pytest.raises(sf.Closed, match="freed"):
                call(dev, x)
            with pytest.raises(ValueError, match="another device"):
                call(dev, y)
            assert dev.stats().num_submitted == before

    run(main)


def test_a_lost_or_closed_device_takes_no_calls(run, open_simulated, add_one):
    async def main():
        async with open_simulated() as dev:
            x = dev.zeros(N, np.float32)
            dev.sim.fail("launch")
            dev.launch(add_one, x, N)
            with pytest.raises(sf.DeviceLost):
                await dev.call(lambda stream, x: None, x)
            with pytest.raises(sf.DeviceLost):
                dev.call(lambda stream: None)
        with pytest.raises(sf.Closed):
            dev.call(lambda stream: None)

    run(main)


def test_a_sticky_fault_that_the_function_sees_loses_the_device(run, open_device):
    def faulting(stream):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    async def main():
        async with open_device() as dev:
            if is_late(dev) or open_device.backend != "sim":
                return
            before = dev.zeros(N, np.int32).ready
            with pytest.raises(sf.DeviceLost, match="running faulting"):
                await dev.call(faulting)
            assert not dev.is_healthy
            with pytest.raises(sf.DeviceLost):
                await before

    run(main)


def test_a_call_can_be_made_to_fail_by_the_controls(run, open_device):
    async def main():
        async with open_device() as dev:
            if not is_late(dev):
                return
            dev.sim.fail("call", name="mine", sticky=False)
            with pytest.raises(sf.LaunchFailed):
                await dev.call(lambda stream: None, name="mine")
            await dev.call(lambda stream: None, name="mine")

    run(main)
