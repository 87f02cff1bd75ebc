"""Scopes: structured lifetimes, failures, cancellation, deadlines and admission (R8, R9)."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest
from support import native, turns, until, virtual

import streamflow as sf

# -- lifetimes ------------------------------------------------------------------------------


def test_everything_submitted_inside_has_ended_when_a_scope_is_left(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(1 << 18, np.float32)
            big = np.ones(1 << 18, np.float32)

            async def child():
                await turns(3)
                ops.append(dev.launch(add_one, x, x.size))

            async with anyio.create_task_group() as group:  # noqa: SIM117
                async with dev.scope(name="work") as scope:
                    ops = [dev.launch(add_one, x, x.size), dev.put(big, out=x).ready]
                    ops += [dev.host(np.sum, x), dev.get(x), dev.zeros(4).ready]
                    group.start_soon(child)
                    await until(lambda: len(ops) == 6)
                    assert scope.num_unfinished
            assert all(op.state is sf.OpState.DONE for op in ops)
            assert scope.num_unfinished == 0
            assert (await dev.get(x) == 2).all()

    run(main)


def test_a_scope_waits_for_its_own_ops_only(run, add_one):
    async def main():
        async with virtual() as dev:
            stream, x, y = dev.stream(), dev.zeros(4, np.float32), dev.zeros(4, np.float32)
            gate = dev.sim.gate(stream)
            outside = dev.launch(add_one, x, 4, stream=stream)
            dropped = dev.zeros(4, np.float32)
            dev.launch(add_one, dropped, 4, stream=stream)
            del dropped  # its free is the device's, though the scope submits it
            async with dev.scope():
                inside = dev.launch(add_one, y, 4)
            assert inside.done()
            assert not outside.done()
            gate.release()

    run(main)


def test_scopes_nest_and_belong_to_their_device_and_task(run, add_one):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            x, y = one.zeros(4, np.float32), two.zeros(4, np.float32)
            async with one.scope(name="outer") as outer:
                async with two.scope(name="other") as other:
                    async with one.scope(name="inner") as inner:
                        await turns()
                        one.launch(add_one, x, 4)
                        two.launch(add_one, y, 4)
                        assert (inner.num_unfinished, other.num_unfinished) == (1, 1)
                        assert outer.num_unfinished == 0
                    assert inner.num_unfinished == 0
                assert other.num_unfinished == 0
                one.launch(add_one, x, 4)
                assert outer.num_unfinished == 1

    run(main)


def test_work_of_a_child_task_that_outlives_the_scope_belongs_around_it(run, add_one):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as group:
            x, go, ops = dev.zeros(4, np.float32), anyio.Event(), []

            async def child():
                await go.wait()
                ops.append(dev.launch(add_one, x, 4))

            async with dev.scope(name="outer") as outer:
                async with dev.scope(name="inner") as inner:
                    group.start_soon(child)
                    await turns()
                go.set()
                await until(lambda: ops)
                assert (inner.num_unfinished, outer.num_unfinished) == (0, 1)
            assert ops[0].state is sf.OpState.DONE

    run(main)


def test_a_scope_held_by_a_suspended_generator_goes_in_any_order(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)

            async def generator():
                async with dev.scope(name="generator"):
                    yield dev.launch(add_one, x, 4)
                    yield dev.launch(add_one, x, 4)

            for _ in range(20):
                steps = generator()
                await anext(steps)
                async with dev.scope(name="late"):
                    await steps.aclose()
                    dev.launch(add_one, x, 4)
                async with dev.scope(name="after") as scope:
                    dev.launch(add_one, x, 4)
                    assert scope.num_unfinished == 1
            op = dev.launch(add_one, x, 4)
            assert op._rare is None  # of no scope
            await op

    run(main)


# -- failures -------------------------------------------------------------------------------


def test_a_failure_drops_the_parked_rest_and_surfaces_as_a_group_with_its_cause(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, never = dev.zeros(4, np.float32), dev.zeros(4, np.float32), anyio.Event()
            cause = RuntimeError("cause")

            def fails():
                raise ValueError("mine") from cause

            with pytest.raises(ExceptionGroup, match="scope 'work': 1 op failed") as caught:
                async with dev.scope(name="work"):
                    parked = dev.launch(add_one, x, 4, after=never)
                    host = dev.host(print, after=parked)
                    fine = dev.launch(add_one, y, 4)
                    bad = dev.host(fails)
            assert [type(error) for error in caught.value.exceptions] == [ValueError]
            assert caught.value.exceptions[0].__cause__ is cause
            assert any(
                "submitted at test_scopes.py" in n for n in caught.value.exceptions[0].__notes__
            )
            assert parked.state is host.state is sf.OpState.CANCELLED or host.exception()
            assert "fails" in str(parked.exception())
            assert (bad.state, fine.state) == (sf.OpState.FAILED, sf.OpState.DONE)
            await dev.synchronize()  # the scope has told already

    run(main)


def test_an_error_of_the_body_goes_on_alone_or_joined_by_failures_nobody_saw(run, add_one):
    async def main():
        async with virtual() as dev:
            x, never = dev.zeros(4, np.float32), anyio.Event()
            with pytest.raises(KeyError, match="body"):
                async with dev.scope():
                    parked = dev.launch(add_one, x, 4, after=never)
                    running = dev.launch(add_one, dev.zeros(4, np.float32), 4)
                    raise KeyError("body")
            assert (parked.state, running.state) == (sf.OpState.CANCELLED, sf.OpState.DONE)
            with pytest.raises(ZeroDivisionError):
                async with dev.scope():
                    await dev.host(lambda: 1 / 0)  # seen by the body itself
            with pytest.raises(ExceptionGroup) as caught:
                async with dev.scope():
                    op = dev.host(lambda: 1 / 0)
                    await until(op.done)
                    raise KeyError("body")
            kinds = [type(error) for error in caught.value.exceptions]
            assert kinds == [KeyError, ZeroDivisionError]

    run(main)


def test_a_failure_that_was_seen_does_not_surface_again(run):
    async def main():
        async with virtual() as dev:
            async with dev.scope():
                ops = [dev.host(lambda: 1 / 0), dev.host(int, 4)]
                ended = [op async for op in sf.as_completed(ops)]
                results = [op.exception() or op.result() for op in ended]
            assert {type(result) for result in results} == {ZeroDivisionError, int}

    run(main)


def test_a_device_lost_in_a_scope_surfaces_bare_and_once(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            dev.sim.fail("launch")
            with pytest.raises(sf.DeviceLost) as caught:
                async with dev.scope():
                    dev.launch(add_one, x, 4)
                    dev.launch(add_one, x, 4)
            assert caught.value.suspects == ("add_one",)

    run(main)


# -- cancellation (R8) -----------------------------------------------------------------------


def test_a_cancelled_scope_drops_what_is_parked_and_drains_what_was_submitted(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, stream = dev.zeros(4, np.float32), dev.zeros(4, np.float32), dev.stream()
            never, ops = anyio.Event(), []
            gate = dev.sim.gate(stream)
            async with anyio.create_task_group() as group:

                async def work():
                    async with dev.scope():
                        ops.append(dev.launch(add_one, x, 4, stream=stream))
                        ops.append(dev.launch(add_one, y, 4, after=never))
                        await ops[0]

                group.start_soon(work)
                await until(lambda: len(ops) == 2)
                await turns()
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await turns()
                    assert ops[1].state is sf.OpState.CANCELLED
                    assert not ops[0].done()
                    gate.release()
            assert ops[0].state is sf.OpState.DONE

    run(main)


@native
@pytest.mark.parametrize("when", ["in the body", "while draining"])
def test_a_native_cancellation_is_raised_bare_with_failures_as_notes(run, add_one, when):
    async def main():
        async with virtual() as dev:
            x, stream, ops = dev.zeros(4, np.float32), dev.stream(), []
            gate = dev.sim.gate(stream)

            async def work():
                async with dev.scope(name="work"):
                    ops.append(dev.host(lambda: 1 / 0))
                    ops.append(dev.launch(add_one, x, 4, stream=stream))
                    await until(ops[0].done)
                    if when == "in the body":
                        await ops[1]

            task = asyncio.create_task(work())
            await until(lambda: ops and ops[0].done())
            await turns()
            task.cancel()
            await turns()
            assert not task.done()
            task.cancel()  # again: no less shielded
            await turns()
            assert not task.done()
            gate.release()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert task.cancelled()
            assert any("ZeroDivisionError" in note for note in caught.value.__notes__)
            assert ops[1].state is sf.OpState.DONE

    run(main)


def test_the_drain_of_a_cancelled_scope_is_bounded_and_the_rest_is_the_devices(run, add_one):
    async def main():
        dev = virtual(close_timeout_s=0.05)
        with pytest.raises(sf.DeadlineExceeded, match="add_one") as caught:
            async with dev:
                x, stream = dev.zeros(4, np.float32), dev.stream()
                dev.sim.gate(stream)
                with anyio.CancelScope() as cancel_scope:
                    async with dev.scope():
                        op = dev.launch(add_one, x, 4, stream=stream)
                        cancel_scope.cancel()
                        await op
                assert cancel_scope.cancelled_caught
                assert not op.done()
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(op.exception(), sf.Closed)

    run(main)


def test_staging_stops_between_chunks_and_marks_its_destination_failed(run):
    async def main():
        async with virtual(staging_threads=1, staging_in_nbytes=1 << 16) as dev:
            source = np.ones(1 << 22, np.float32)
            with anyio.CancelScope() as cancel_scope:
                async with dev.scope():
                    big = dev.put(source)
                    await until(lambda: dev.sim.counters["copy_h2d"] > 0)
                    cancel_scope.cancel()
                    await big
            assert cancel_scope.cancelled_caught
            assert dev.sim.counters["copy_h2d"] < source.nbytes >> 16
            assert big.staged.done()
            with pytest.raises(sf.UpstreamFailed):
                await dev.get(big)
            again = dev.put(np.ones(4))  # the chunks are free again
            assert (await dev.get(again)).all()
            dev.put(source, out=big)  # a full overwrite clears the failure
            assert (await dev.get(big)).all()

    run(main)


def test_a_cancelled_scope_cancels_its_coroutines_and_lets_threads_end(run):
    async def main():
        async with virtual() as dev:
            with anyio.CancelScope() as cancel_scope:
                async with dev.scope():
                    op = dev.host(anyio.sleep_forever)
                    await until(lambda: op.state is sf.OpState.STAGING)
                    await turns()
                    cancel_scope.cancel()
                    await op
            assert cancel_scope.cancelled_caught
            assert op.state is sf.OpState.CANCELLED

    run(main)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_coroutine_that_has_hardly_begun_is_cancelled_with_its_scope(run, num_turns):
    async def main():
        async with virtual() as dev:
            with anyio.CancelScope() as cancel_scope:
                async with dev.scope():
                    op = dev.host(anyio.sleep_forever)
                    await turns(num_turns)
                    cancel_scope.cancel()
                    await op
            assert cancel_scope.cancelled_caught
            assert op.state is sf.OpState.CANCELLED

    run(main)


@native
def test_ops_whose_tasks_are_cancelled_by_a_stranger_end(run, add_one):
    async def main():
        async with virtual() as dev:
            x, never = dev.zeros(4, np.float32), anyio.Event()
            ops = [dev.host(anyio.sleep_forever), dev.launch(add_one, x, 4, after=never)]
            await turns()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            for op in ops:
                with pytest.raises(sf.OpCancelled):
                    await op

    run(main)


# -- deadlines -------------------------------------------------------------------------------


def test_a_deadline_cuts_a_stalled_body_and_says_what_had_not_ended(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream("stuck")
            gate = dev.sim.gate(stream)
            with pytest.raises(sf.DeadlineExceeded, match="scope 'late'") as caught:
                async with dev.scope(deadline=5.0, name="late"):
                    op = dev.launch(add_one, x, 4, stream=stream)
                    behind = dev.host(np.sum, x)
                    await behind
            assert isinstance(caught.value, TimeoutError)
            report = caught.value.report
            rows = {row.name: row for row in report.rows}
            assert rows["add_one"].stream == "stuck"
            assert rows["add_one"].scope == "late"
            assert rows["add_one"].where.startswith("test_scopes.py:")
            assert rows["add_one"].age_s == pytest.approx(5.0)
            assert "get" in rows["sum"].waits_for or "add_one" in rows["sum"].waits_for
            assert "add_one" in str(caught.value)
            assert behind.state is sf.OpState.CANCELLED
            assert not op.done()
            assert dev.sim.clock.now_s == pytest.approx(5.0)
            gate.release()
            await op

    run(main)


def test_a_deadline_bounds_the_drain_too(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            gate = dev.sim.gate(stream)
            with pytest.raises(sf.DeadlineExceeded):
                async with dev.scope(deadline=1.0):
                    op = dev.launch(add_one, x, 4, stream=stream)
            assert not op.done()
            gate.release()

    run(main)


def test_a_deadline_that_is_kept_costs_nothing(run, add_one):
    async def main():
        async with virtual() as dev:
            async with dev.scope(deadline=1e-3):
                await dev.launch(add_one, dev.zeros(4, np.float32), 4)
            assert dev.sim.clock.now_s < 1e-3
            await dev.launch(add_one, dev.zeros(4, np.float32), 4)

    run(main)


def test_a_deadline_waits_for_a_write_into_the_callers_memory(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream, out = dev.zeros(1 << 14, np.float32), dev.stream(), np.ones(1 << 14, "f4")
            await x
            gate = dev.sim.gate(stream)
            async with anyio.create_task_group() as group:

                async def release():
                    await until(lambda: ended)
                    gate.release()

                ended = []
                with pytest.raises(sf.DeadlineExceeded):
                    async with dev.scope(deadline=1.0):
                        op = dev.get(x, out=out, stream=stream)
                        group.start_soon(release)
                        dev.host(lambda: None)
                        try:
                            await anyio.sleep_forever()
                        finally:
                            ended.append(True)
                assert op.state is sf.OpState.DONE
                assert not out.any()

    run(main)


# -- admission -------------------------------------------------------------------------------


def test_a_limit_bounds_the_bytes_in_flight_and_everybody_gets_a_turn(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            arrays = [dev.zeros(1 << 10, np.float32) for _ in range(12)]
            async with dev.scope(limit="8KiB") as scope:
                ops = [dev.launch(add_one, a, a.size) for a in arrays]
                puts = [dev.put(np.ones(1 << 10, np.float32)) for _ in range(4)]
                assert sum(op.state is sf.OpState.PARKED for op in ops) >= 9
                every = sf.as_completed([*ops, *(p.ready for p in puts)])
                seen = [scope.in_flight_nbytes async for _ in every]
            assert len(seen) == 16
            assert max(seen) <= 8192
            assert scope.in_flight_nbytes == 0
            for a in (*arrays, *puts):
                assert (await dev.get(a) == 1).all()

    run(main)


def test_a_staged_put_is_admitted_before_it_is_staged(run):
    async def main():
        async with virtual() as dev:
            source = np.ones(1 << 18, np.float32)
            async with dev.scope(limit=source.nbytes):
                puts = [dev.put(source) for _ in range(3)]
                await until(lambda: puts[0].ready.state is sf.OpState.STAGING)
                assert [p.ready.state for p in puts[1:]] == [sf.OpState.PARKED] * 2
                assert "limit of scope" in str(dev.report())
                await puts[0]
            for p in puts:
                assert (await dev.get(p)).all()

    run(main)


def test_one_op_above_the_limit_fails_at_once_and_a_waiting_one_can_be_cancelled(run, add_one):
    async def main():
        async with virtual() as dev:
            small, large = dev.zeros(256, np.float32), dev.zeros(2048, np.float32)
            others = [dev.zeros(256, np.float32) for _ in range(2)]
            stream = dev.stream()
            gate = dev.sim.gate(stream)
            async with dev.scope(limit=4096, name="tight"):
                with pytest.raises(MemoryError, match=r"8192 bytes.*scope 'tight' is 4096"):
                    dev.launch(add_one, large, large.size)
                with pytest.raises(sf.OutOfDeviceMemory, match="put"):
                    dev.put(np.zeros(2048, np.float32))
                with pytest.raises(sf.OutOfDeviceMemory):
                    dev.empty(2048, np.float32)
                first = [dev.launch(add_one, small, 1, stream=stream) for _ in range(4)]
                waiting = [dev.launch(add_one, a, 1) for a in others]
                assert [op.state for op in waiting] == [sf.OpState.PARKED] * 2
                assert waiting[0].cancel()
                gate.release()
                await waiting[1]
            assert all(op.state is sf.OpState.DONE for op in first)
            assert (await dev.get(small))[0] == 4
            assert (await dev.get(others[1]))[0] == 1

    run(main)


def test_limits_of_nested_scopes_both_hold(run, add_one):
    async def main():
        async with virtual() as dev:
            arrays = [dev.zeros(256, np.float32) for _ in range(8)]
            async with dev.scope(limit=2048) as outer, dev.scope(limit=1024) as inner:
                ops = [dev.launch(add_one, a, a.size) for a in arrays]
                async for _ in sf.as_completed(ops):
                    assert inner.in_flight_nbytes <= 1024
                    assert outer.in_flight_nbytes <= 1024
            for a in arrays:
                assert (await dev.get(a) == 1).all()

    run(main)


@pytest.mark.parametrize("limit", ["", "many", "2 gigs", "-1GiB", "0", 0, -5, "1e400GB", "nanGB"])
def test_a_bad_limit_is_refused(run, limit):
    async def main():
        async with virtual() as dev:
            with pytest.raises(ValueError, match="limit"):
                dev.scope(limit=limit)

    run(main)


@pytest.mark.parametrize("deadline", [-1, 0, float("nan"), -float("inf")])
def test_a_bad_deadline_is_refused(run, deadline):
    async def main():
        async with virtual() as dev:
            with pytest.raises(ValueError, match="deadline"):
                dev.scope(deadline=deadline)

    run(main)


def test_values_of_another_type_and_a_second_entry_are_refused(run):
    async def main():
        async with virtual() as dev:
            for bad in (2.5, True, b"2GiB", [1]):
                with pytest.raises(TypeError, match="limit"):
                    dev.scope(limit=bad)
            for bad in ("5", True, None.__class__):
                with pytest.raises(TypeError, match="deadline"):
                    dev.scope(deadline=bad)
            scope = dev.scope()
            async with scope:
                pass
            with pytest.raises(RuntimeError, match="entered once"):
                async with scope:
                    pass
        with pytest.raises(sf.Closed):
            dev.scope()

    run(main)
