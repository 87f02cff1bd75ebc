"""What a trace says of ops that it saw only in part, and what it keeps of the rest."""

from __future__ import annotations

from concurrent.futures import Future

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf
from streamflow.trace import EdgeReason

MILLI = 1e-3


@sf.kernel('extern "C" __global__ void work(float* x, int ms) {}', cost=lambda x, ms: ms * MILLI)
def work(x, ms):
    x += 1


def rooms(trace):
    """Who made room for whom."""
    contents = trace._read()
    every = (*contents.edges, *contents.loose)
    return [(each.src, each.dst) for each in every if each.reason is EdgeReason.CAPACITY]


def test_the_op_that_a_future_named_is_a_reason(run):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(8, np.float32), dev.zeros(8, np.float32)
            await dev.synchronize()
            with dev.trace() as trace:
                first = dev.launch(work, x, 1, stream=dev.stream("a"))
                future = Future()
                op = dev.launch(work, y, 1, after=future, stream=dev.stream("b"))
                future.set_result(first)
                await op
            (edge,) = (each for each in trace.edges if each.src == trace.op(first).id)
            assert edge.dst == trace.op(op).id
            assert (edge.reason, edge.issued) == (EdgeReason.AFTER, True)

    run(main)


def test_room_that_is_made_after_the_trace_is_laid_to_nobody_in_it(run):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
            own = dev.stream("own")
            await dev.synchronize()
            async with dev.scope(limit=5000):
                gate = dev.sim.gate(own)
                with dev.trace() as trace:
                    await dev.host(lambda: None)  # its end is the last that the trace sees
                    dev.launch(work, x, 1, stream=own)
                    waits = dev.launch(work, y, 1)
                assert trace.op(waits).state == "parked"
                gate.release()
                await waits
            assert rooms(trace) == []

    run(main)


def test_an_op_that_went_after_the_trace_has_its_stream_and_no_times(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace() as trace:
                event = anyio.Event()
                op = dev.launch(work, x, 1, after=event, stream=dev.stream("own"))
            event.set()
            await op
            traced = trace.op(op)
            assert (traced.stream, traced.state) == ("own", "done")
            assert (traced.issued_s, traced.start_s, traced.end_s) == (None, None, None)

    run(main)


def test_an_op_from_before_the_trace_is_not_the_task_s_that_made_it_go(run):
    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(size, np.float32) for size in (1024, 1024, 8))
            own = dev.stream("own")
            await dev.synchronize()
            async with dev.scope(limit=5000):
                gate = dev.sim.gate(own)
                dev.launch(work, x, 1, stream=own)
                too_large = dev.launch(work, y, 1)
                behind = dev.launch(work, z, 1)
                with dev.trace() as trace:
                    assert too_large.cancel()
                    assert behind.state is sf.OpState.SUBMITTED
                    gate.release()
                    await behind
            traced = trace.op(behind)
            assert (traced.task, traced.scope) == (None, "scope")
            assert traced.submitted_s <= 0

    run(main)


def test_the_memory_curve_of_a_short_ring_is_that_of_the_device(run):
    async def main():
        async with virtual() as dev:
            kept = dev.empty(100, np.uint8)
            with dev.trace(max_ops=2) as trace:
                for _ in range(10):
                    dev.empty(1000, np.uint8).free()
                other = dev.empty(10, np.uint8)
                await dev.synchronize()
            assert trace.num_dropped == 19
            assert trace.memory[-1].nbytes == kept.nbytes + other.nbytes
            assert {each.nbytes for each in trace.memory} <= {100, 110, 1100}

    run(main)


def test_the_memory_curve_begins_with_the_trace(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(1 << 20, np.uint8)
            got = await dev.get(x)
            await dev.synchronize()
            with dev.trace() as trace:
                pass
            (first,) = trace.memory
            assert (first.time_s, first.nbytes) == (0.0, x.nbytes)
            assert first.pinned_nbytes >= got.nbytes

    run(main)


def test_c23_a_trace_keeps_no_stream_that_the_program_dropped(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            tracer = dev._core.tracer
            with dev.trace():
                for _ in range(30):
                    async with dev.stream("own") as own:
                        await dev.launch(work, x, 1, stream=own)
                await dev.fill(x, 1)
                assert len(tracer._last) < 10
            assert not tracer._last

    run(main)


def test_closing_a_device_closes_the_events_of_its_traces(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            for _ in range(2):
                with dev.trace():
                    await dev.launch(work, x, 1)
            tracer = dev._core.tracer
            events = [*tracer._events, tracer._base]
            assert len(events) > 1
        assert all(event.is_closed for event in events)

    run(main)


def test_a_trace_may_end_after_its_device(run):
    async def main():
        async with virtual() as dev:
            tracing = dev.trace()
            trace = tracing.__enter__()
            x = dev.zeros(8, np.float32)
            op = dev.launch(work, x, 1)
        tracing.__exit__(None, None, None)
        assert trace.op(op).duration_s == pytest.approx(MILLI)
        assert {each.state for each in trace.ops} == {"done"}

    run(main)


def test_trio_calls_that_no_task_makes_are_traced():
    trio = pytest.importorskip("trio")

    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            ops = []

            class Caller(trio.abc.Instrument):
                def before_io_wait(self, timeout):  # between two tasks
                    if not ops:
                        ops.append(dev.launch(work, x, 1))

            with dev.trace() as trace:
                trio.lowlevel.add_instrument(Caller())
                await turns(100)
                (op,) = ops
                await op
            assert trace.op(op).task is None

    trio.run(main)


def test_parts_of_a_copy_by_the_host_are_on_the_copy_engines(run):
    async def main():
        async with virtual(devices=2) as dev, virtual(1, devices=2) as other:
            with dev.trace() as first, other.trace() as second:
                x, y = dev.zeros(1 << 20, np.uint8), other.empty(1 << 20, np.uint8)
                await other.copy(y, x)
            parts = [op for trace in (first, second) for op in trace.ops if op.kind == "copy"]
            assert [(op.device, op.engine) for op in parts] == [(0, "d2h"), (1, "h2d")]
            z = dev.empty(1 << 20, np.uint8)
            with dev.trace() as trace:
                await dev.copy(z, x)
            assert [op.engine for op in trace.ops] == ["compute"]

    run(main)


def test_no_task_calls_for_the_free_of_a_dropped_array(run):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(8, np.float32), dev.zeros(8, np.float32)
            await dev.synchronize()
            with dev.trace() as trace:
                del x
                await dev.fill(y, 1)  # which comes by
            free, fill = trace.ops
            assert (free.kind, free.task) == ("free", None)
            assert fill.task is not None

    run(main)


def test_a_call_that_raised_is_over_in_the_trace(run):
    async def main():
        def pick(request):
            raise LookupError("no lane")

        async with virtual(placement=pick) as dev:
            x = dev.empty(8, np.float32, stream=dev.stream("own"))
            with dev.trace() as trace, pytest.raises(LookupError):
                dev.launch(work, x, 1)
            (op,) = trace.ops
            assert (op.state, op.error) == ("failed", "LookupError: no lane")
            assert trace.ops is trace.ops

    run(main)


def test_the_runtime_s_events_have_no_times_after_refused_calls(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            await dev.synchronize()
            with dev.trace():
                for _ in range(3):
                    dev.sim.fail(kind="launch", error=RuntimeError("planted"), sticky=False)
                    with pytest.raises(sf.StreamflowError):
                        await dev.launch(work, x, 1)
                    await dev.fill(x, 0)
            await dev.synchronize()
            assert not any(event.is_timing for event in dev._core.events)

    run(main)


def test_r9_a_trace_of_a_device_that_a_fault_has_lost_says_so(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            dev.sim.fail(kind="launch", error=RuntimeError("planted"))
            dev.launch(work, x, 1)
            while dev._core.backend.advance(0):  # the fault happens, and nobody has looked
                pass
            with pytest.raises(sf.DeviceLost), dev.trace():
                pass
            assert dev._core.lost is not None

    with pytest.raises(sf.DeviceLost):
        run(main)
