"""What a trace says of an op, on real programs: each of the things that may hold it up."""

from __future__ import annotations

import numpy as np
import pytest
from support import SPIN, error_of, until, virtual

import streamflow as sf

N = 1 << 18
Kind = sf.WaitKind


def spin(dev, seconds, **more):
    return dev.launch(SPIN, seconds, grid=1, block=1, **more)


def explained(run, program, **settings):
    """What ``program(dev)`` returns of its trace: an op of it, explained."""

    async def main():
        async with virtual(**settings) as dev:
            with dev.trace() as trace:
                op = await program(dev)
                await dev.synchronize()
            return trace.explain(op)

    return run(main)


def test_it_waits_for_a_copy_on_another_lane(run, add_one):
    async def program(dev):
        x = dev.put(np.ones(N, np.float32))
        return dev.launch(add_one, x, N)

    told = explained(run, program)
    (wait,) = told.waits
    assert (wait.kind, wait.reason) == (Kind.EDGE, sf.EdgeReason.READ_AFTER_WRITE)
    assert wait.src.kind == "put"
    assert (
        f"for {wait.src.name} on h2d: read after write on array #{wait.array} (1.00 MiB) made"
        in (wait.text)
    )
    assert "test_trace_explain.py:" in wait.text
    assert wait.text in str(told)


def test_it_waits_for_its_own_stream(run):
    async def program(dev):
        stream = dev.stream("mine")
        spin(dev, 1e-3, stream=stream, name="first")
        return spin(dev, 1e-3, stream=stream)

    (wait,) = explained(run, program).waits
    assert (wait.kind, wait.reason, wait.src.name) == (
        Kind.STREAM,
        sf.EdgeReason.STREAM_ORDER,
        "first",
    )
    assert wait.length_s == pytest.approx(1e-3)
    assert wait.text == "waited 1.00 ms for first on mine: stream order"


def test_a_free_before_it_is_not_what_it_waited_for(run, add_one):
    async def program(dev):
        for _ in range(4):
            x = dev.put(np.ones(N, np.float32))
            dev.launch(add_one, x, N)
            op = dev.get(x)
            del x  # freed behind the copy, on its lane
        return op

    told = explained(run, program, compute_lanes=1, window=64)
    names = [each.src.kind for each in told.waits if each.kind is Kind.STREAM]
    assert names == ["get"]


def test_of_two_the_one_that_ended_last_is_told(run):
    async def program(dev):
        first = spin(dev, 1e-3, name="short")
        second = spin(dev, 2e-3, name="long")
        return spin(dev, 1e-3, after=[second, first])

    (wait,) = explained(run, program).waits
    assert (wait.src.name, wait.reason) == ("long", sf.EdgeReason.AFTER)


def test_a_copy_waits_for_its_engine(run):
    async def main():
        async with virtual() as dev, dev.pinned.lease(4 * N) as lease:
            block = lease.array(N, np.float32)
            with dev.trace() as trace:
                arrays = [dev.put(block), dev.put(block, stream=dev.stream("other"))]
                for array in arrays:
                    await array
                _, second = (op for op in trace.ops if op.kind == "put")
                return trace.explain(second)

    told = run(main)
    assert told.engine_wait is not None
    assert told.engine_wait.src.kind == "put"
    assert "for the h2d engine" in str(told)
    assert told.engine_wait.length_s == pytest.approx(told.op.duration_s / 2)


def test_it_is_parked_behind_a_host_task(run):
    async def program(dev):
        slow = spin(dev, 1e-3)
        task = dev.host(lambda: None, after=[slow])
        return spin(dev, 1e-3, after=[task])

    told = explained(run, program)
    assert [wait.kind for wait in told.waits] == [Kind.PARKED]
    assert told.waits[0].reason is sf.EdgeReason.HOST
    assert told.waits[0].length_s == pytest.approx(1e-3)


def test_a_host_task_waits_for_the_end_to_be_seen(run):
    async def program(dev):
        return dev.host(lambda: None, after=[spin(dev, 1e-3, name="first")])

    (wait,) = explained(run, program).waits
    assert (wait.kind, wait.src.name) == (Kind.PARKED, "first")
    assert wait.length_s == pytest.approx(1e-3)
    assert wait.text.endswith(": after")


def test_staging_waits_for_the_end_to_be_seen(run):
    async def program(dev):
        x = dev.zeros(N, np.float32)
        first = spin(dev, 5e-3, name="first")
        await dev.put(np.ones(N, np.float32), out=x, after=[first])
        return max(held["trace"].ops, key=lambda op: (op.kind == "put", op.id))

    held = {}

    async def main():
        async with virtual() as dev:
            with dev.trace() as held["trace"]:
                op = await program(dev)
            return held["trace"].explain(op)

    (wait,) = run(main).waits
    assert (wait.kind, wait.src.name, wait.reason) == (Kind.PARKED, "first", sf.EdgeReason.AFTER)
    assert wait.text == "waited 5.00 ms for first on compute1: after"


def test_it_is_parked_for_room_in_a_window(run):
    async def program(dev):
        stream = dev.stream("mine")
        ops = [spin(dev, 1e-3, stream=stream) for _ in range(12)]
        return ops[-1]

    told = explained(run, program, window=8)
    kinds = [wait.kind for wait in told.waits]
    assert kinds[0] is Kind.CAPACITY
    assert "room, which the end of" in told.waits[0].text
    assert sum(wait.length_s for wait in told.waits) == pytest.approx(11e-3)


def test_it_is_parked_for_room_in_a_scope(run):
    held = {}

    async def program(dev):
        async with dev.scope(limit=4 * N):
            for _ in range(2):
                held["get"] = dev.get(dev.put(np.ones(N, np.float32)))
            await held["get"]
        return held["get"]

    told = explained(run, program)
    assert any(wait.kind in (Kind.CAPACITY, Kind.PARKED) for wait in told.waits), str(told)


def test_it_was_called_for_late(run):
    async def program(dev):
        x = dev.zeros(N, np.float32)
        await x
        await spin(dev, 1e-3, name="awaited", stream=dev.stream("other"))
        return dev.get(x)

    told = explained(run, program)
    assert told.late_s == pytest.approx(1e-3, rel=0.2)
    assert "after all that it comes after had ended" in str(told)
    assert "after the program saw the end of awaited on other" in str(told)


def test_what_has_not_started_says_what_it_waits_for(run):
    async def main():
        async with virtual() as dev:
            stream = dev.stream("gated")
            gate = dev.sim.gate(stream)
            with dev.trace() as trace:
                first = spin(dev, 1e-3, stream=stream, name="first")
                second = spin(dev, 1e-3, name="second", after=[first])
                third = dev.host(lambda: None, after=[second])
                fourth = spin(dev, 1e-3, name="fourth", after=[third])
                told = [trace.explain(op) for op in (second, third, fourth)]
                gate.release()
                await fourth
                (over,) = trace.explain(fourth).waits
                assert over.end_s is not None
            return told

    second, third, fourth = run(main)
    (wait,) = second.waits
    assert (wait.kind, wait.src.name, wait.end_s) == (Kind.EDGE, "first", None)
    assert "submitted: waits for first on gated: after (submitted)" in str(second)
    assert third.waits[0].src.name == "second"
    assert fourth.waits[0].kind is Kind.PARKED
    assert "parked: waits for" in str(fourth)
    assert "on the host: host (parked)" in str(fourth)


def test_a_failure_names_its_reason_and_a_follower_what_failed(run, add_one):
    async def main():
        async with virtual() as dev:
            dev.sim.fail(kind="launch", name="broken", sticky=False)
            with dev.trace() as trace:
                x = dev.zeros(N, np.float32)
                bad = dev.launch(add_one, x, N, name="broken")
                follower = dev.get(x)
                for op in (bad, follower):
                    assert await error_of(op) is not None
            return trace.explain(bad), trace.explain(follower)

    bad, follower = run(main)
    assert "failed: " in str(bad)
    assert bad.op.error in str(bad)
    assert "(because of broken on compute0)" in str(follower)
    assert "UpstreamFailed" in str(follower)


def test_what_was_cancelled_says_so(run):
    async def main():
        async with virtual() as dev:
            stream = dev.stream("gated")
            gate = dev.sim.gate(stream)
            with dev.trace() as trace:
                task = dev.host(lambda: None, after=[spin(dev, 1e-3, stream=stream)])
                op = spin(dev, 1e-3, after=[task])
                assert op.cancel()
                gate.release()
                await task
                await until(op.done)
            return trace.explain(op)

    told = run(main)
    assert told.waits == ()
    assert str(told).splitlines()[-1].strip().startswith("cancelled: OpCancelled")


def test_a_wake_up_on_the_hosts_clock_is_told(run, open_device):
    async def main():
        async with open_device() as dev:
            with dev.trace() as trace:
                op = spin(dev, 1e-3)
                await op
            return trace.explain(op)

    told = run(main)
    assert told.wake_s is not None
    assert told.wake_s >= 0.0
    assert ("seen to have ended" in str(told)) == (told.wake_s > 1e-9)


def test_an_op_that_the_trace_does_not_have(run):
    async def main():
        async with virtual() as dev:
            before = spin(dev, 1e-3)
            with dev.trace() as trace:
                pass
            await before
            with pytest.raises(LookupError, match="no op"):
                trace.explain(before)

    run(main)
