"""What a trace says of an op: its times on host and device, whose it is, what it waited for."""

from __future__ import annotations

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


def edges_of(trace, op):
    traced = trace.op(op)
    return {
        (trace.op(edge.src).kind, edge.reason, edge.issued)
        for edge in trace.edges
        if edge.dst == traced.id
    }


def test_an_op_passes_through_its_times_in_order(run):
    async def main():
        async with virtual() as dev:
            with dev.trace() as trace:
                x = dev.zeros(1024, np.float32)
                op = dev.launch(work, x, 2)
                await op
                host = dev.host(lambda: None, after=op)
                await host
                pageable = dev.put(np.ones(1 << 20, np.float32))
                await pageable
            for each in trace.ops:
                times = (each.submitted_s, each.issued_s, each.start_s, each.end_s, each.seen_s)
                known = [time_s for time_s in times if time_s is not None]
                if not each.is_staged:
                    assert known == sorted(known), each
                assert each.state == "done"
            launched = trace.op(op)
            assert launched.duration_s == pytest.approx(2 * MILLI, rel=0.1)
            assert launched.engine == "compute"
            assert launched.position > 0
            hosted = trace.op(host)
            assert (hosted.stream, hosted.engine, hosted.issued_s) == ("host", None, None)
            assert hosted.begun_s is not None
            (put,) = (each for each in trace.ops if each.kind == "put")
            assert put.is_staged
            assert put.begun_s <= put.start_s <= put.end_s <= put.seen_s

    run(main)


def test_an_op_knows_its_task_and_its_scope(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace() as trace:
                outside = dev.fill(x, 1)

                async def inside():
                    async with dev.scope(name="the scope"):
                        return await dev.fill(x, 2)

                async with anyio.create_task_group() as group:
                    group.start_soon(inside, name="the task")
                await outside
            first, second = (op for op in trace.ops if op.kind == "fill")
            assert (first.scope, second.scope) == (None, "the scope")
            assert "the task" in second.task
            assert first.task not in (None, second.task)

    run(main)


def test_edges_name_the_array_they_come_from(run):
    async def main():
        async with virtual() as dev:
            before = dev.zeros(16, np.float32)
            with dev.trace() as trace:
                x = dev.zeros(1024, np.float32)
                writing = dev.launch(work, x, 1, stream=dev.stream("a"))
                reading = dev.get(x)
                again = dev.launch(work, x, 1, stream=dev.stream("b"))
                alone = dev.launch(work, before, 1)
                await reading
                await again
                await alone
            array = next(each for each in trace.arrays if each.nbytes == 4096)
            assert array.where is not None
            assert array.where.startswith("test_trace.py:")
            by_ends = {(edge.src, edge.dst): edge for edge in trace.edges}
            read = by_ends[trace.op(writing).id, trace.op(reading).id]
            assert (read.reason, read.array, read.issued) == (
                EdgeReason.READ_AFTER_WRITE, array.id, True,
            )  # fmt: skip
            write = by_ends[trace.op(reading).id, trace.op(again).id]
            assert (write.reason, write.array) == (EdgeReason.WRITE_AFTER_READ, array.id)
            assert trace.op(alone).writes != trace.op(again).writes
            older = next(each for each in trace.arrays if each.id in trace.op(alone).writes)
            assert older.where is None  # made before the trace began

    run(main)


def test_a_host_step_is_a_reason_of_its_own(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace() as trace:
                step = dev.host(lambda: None)
                op = dev.fill(x, 1)
                op = dev.launch(work, x, 1, after=step)
                await op
            assert ("host", EdgeReason.HOST, False) in edges_of(trace, op)

    run(main)


def test_r7_what_lacked_room_says_what_it_waited_for_and_who_made_it(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(1024, np.float32)
            await dev.synchronize()
            with dev.trace() as trace:
                async with dev.scope(limit=8192):
                    ops = [dev.launch(work, x, 1) for _ in range(4)]
                assert all(op.done() for op in ops)
            waited = trace.op(ops[2])
            (need,) = waited.needs
            assert "8192" in need or "scope" in need, need
            assert (waited.issued_s or 0) > waited.submitted_s
            capacity = [edge for edge in trace.edges if edge.reason is EdgeReason.CAPACITY]
            assert {edge.dst for edge in capacity} == {trace.op(op).id for op in ops[2:]}
            for edge in capacity:
                assert trace.op(edge.src).seen_s <= trace.op(edge.dst).issued_s

    run(main)


def test_an_op_that_never_was_submitted_is_there_all_the_same(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace() as trace:
                future = anyio.Event()
                op = dev.launch(work, x, 1, after=future)
                await turns()
                parked = trace.op(op)
                assert (parked.state, parked.issued_s, parked.stream) == ("parked", None, "host")
                assert parked.needs
                assert "Event" in parked.needs[0]
                assert op.cancel()
            assert trace.op(op).state == "cancelled"
            assert trace.op(op).duration_s is None

    run(main)


def test_a_failed_op_is_traced_as_failed(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace() as trace:
                dev.sim.fail(kind="launch", nth=1, error=RuntimeError("planted"))
                op = dev.launch(work, x, 1)
                with pytest.raises(sf.StreamflowError):
                    await op
            assert trace.op(op).state == "failed"

    run(main)


def test_the_memory_curve_ends_where_it_began(run):
    async def main():
        async with virtual() as dev:
            kept = dev.zeros(1 << 10, np.uint8)
            await dev.synchronize()
            with dev.trace() as trace:
                x = dev.zeros(1 << 20, np.uint8)
                y = dev.zeros(1 << 21, np.uint8)
                got = await dev.get(x)
                x.free()
                await y.free()
                await dev.synchronize()
            curve = [each.nbytes for each in trace.memory]
            assert max(curve) == (1 << 10) + (1 << 20) + (1 << 21)
            assert curve[-1] == 1 << 10
            assert max(each.pinned_nbytes for each in trace.memory) >= got.nbytes
            assert [each.time_s for each in trace.memory] == sorted(
                each.time_s for each in trace.memory
            )
            kept.free()

    run(main)


def test_the_ring_keeps_the_newest_ops(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            with dev.trace(max_ops=3) as trace:
                ops = [dev.fill(x, number) for number in range(10)]
                await ops[-1]
            assert [op.id for op in trace.ops] == [trace.op(op).id for op in ops[-3:]]
            assert trace.num_dropped == 7

    run(main)


@pytest.mark.parametrize("max_ops", [0, -1, 2.5, "many"])
def test_a_ring_of_no_size_is_refused(run, max_ops):
    async def main():
        async with virtual() as dev:
            with pytest.raises(ValueError, match="max_ops"), dev.trace(max_ops=max_ops):
                pass
            with dev.trace():  # and the device can be traced
                pass

    run(main)


def test_traces_of_two_devices_merge_with_the_edges_between_them(run):
    async def main():
        async with virtual(devices=2) as dev, virtual(1, devices=2) as other:
            with dev.trace() as first, other.trace() as second:
                x = dev.zeros(1024, np.float32)
                op = dev.launch(work, x, 1)
                y = other.zeros(1024, np.float32)
                copied = other.copy(y, x)
                await copied
                last = other.launch(work, y, 1, after=op)
                await last
            assert not any(edge.src == first.op(op).id for edge in second.edges)
            merged = sf.Trace.merged([second, first])
            assert len(merged.ops) == len(first.ops) + len(second.ops)
            assert [device.index for device in merged.devices] == [1, 0]
            pairs = {(edge.src, edge.dst) for edge in merged.edges}
            devices = {each.id: each.device for each in merged.ops}
            assert any(devices[src] != devices[dst] for src, dst in pairs)
            by_name = {each.id: each for each in merged.ops}
            assert by_name[first.op(op).id].end_s <= by_name[second.op(last).id].start_s

    run(main)


def test_a_copy_occupies_the_engine_of_its_direction(run):
    async def main():
        async with virtual(devices=2) as dev, virtual(1, devices=2) as other:
            x, y, there = (each.zeros(1024, np.float32) for each in (dev, dev, other))
            host = np.ones(1024, np.float32)
            with dev.trace() as trace, other.trace() as others:
                ops = dev.copy(y, x), dev.copy(x, host), dev.copy(host, x)
                await sf.gather(*ops, dev.copy(there, y))  # by the host: neither sees the other
            engines = [trace.op(op).engine for op in ops]
            assert engines == ["compute", "h2d", "d2h"]
            by_host = {op.name: op.engine for op in (*trace.ops, *others.ops) if op.kind == "copy"}
            assert {"d2h", "h2d", None, "compute"} == {*by_host.values()}
            for name, engine in by_host.items():
                assert not name.endswith("to the host") or engine == "d2h"
                assert not name.endswith("from the host") or engine == "h2d"

    run(main)


def test_a_trace_holds_nothing_of_the_program(run):
    """C23: neither arrays nor results live on because a trace was taken of them."""
    import gc
    import weakref

    async def main():
        async with virtual() as dev:
            with dev.trace() as trace:
                x = dev.put(np.ones(1 << 10, np.float32))
                got = await dev.get(x)
                known = weakref.ref(x), weakref.ref(got)
                del x, got
                await dev.synchronize()
            gc.collect()
            assert [each() for each in known] == [None, None]
            assert len(trace.ops) >= 3
            assert dev.live() == {}

    run(main)


def test_an_op_from_before_the_trace_makes_room_all_the_same(run):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(1024, np.float32), dev.zeros(1024, np.float32)
            await dev.synchronize()
            own = dev.stream("own")
            async with dev.scope(limit=5000):
                gate = dev.sim.gate(own)
                first = dev.launch(work, x, 1, stream=own)
                with dev.trace() as trace:
                    await dev.put(np.ones(8, np.float32))
                    waits = dev.launch(work, y, 1)
                    gate.release()
                    await waits
            assert first.done()
            capacity = [edge for edge in trace._read().loose if edge.reason is EdgeReason.CAPACITY]
            assert [edge.dst for edge in capacity] == [trace.op(waits).id]
            assert not any(edge.reason is EdgeReason.CAPACITY for edge in trace.edges)

    run(main)


def test_c23_no_event_is_kept_of_what_has_ended(run):
    async def main():
        async with virtual() as dev:
            with dev.trace():
                notes = dev._core.instrument._notes
                await dev.get(dev.put(np.ones(1 << 20, np.float32)))
                await dev.synchronize()
                assert len(notes) >= 3
                assert all(
                    note.base is None and not note.starts and not note.ends for note in notes
                )

    run(main)
