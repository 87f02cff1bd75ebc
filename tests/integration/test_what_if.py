"""``trace.what_if``: what it says against what a run with other settings takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import virtual
from what_if_programs import (
    MIB,
    WORK,
    Program,
    fork_join,
    host_stages,
    host_tasks,
    independent,
    limited,
    ones,
    pipeline,
    rounds,
    some_on_streams,
    span,
    streams,
    traced,
    two_tasks,
    windowed,
)

import streamflow as sf

Run = Callable[..., Any]

PROGRAMS = {
    "independent": independent,
    "fork-join": fork_join,
    "pipeline": pipeline(3),
    "shallow": pipeline(1),
    "host-stages": host_stages(3),
    "two-tasks": two_tasks,
    "streams": streams,
    "host-tasks": host_tasks,
    "limited": limited,
    "windowed": windowed,
    "rounds": rounds,
    "some-on-streams": some_on_streams,
}
every_program = pytest.mark.parametrize("name", PROGRAMS)
some_programs = pytest.mark.parametrize("name", ["independent", "fork-join", "pipeline"])


def both(run: Run, first: Program, then: Program, others: dict[str, Any], **settings: Any) -> Any:
    """Traces of the program as it is, and of what it would be."""

    async def main() -> tuple[sf.Trace, sf.Trace]:
        return await traced(first, **settings), await traced(then, **{**settings, **others})

    return run(main)


@every_program
def test_nothing_changed_gives_the_same_times(run: Run, name: str) -> None:
    trace = run(lambda: traced(PROGRAMS[name]))
    found = trace.what_if()
    assert found.before_s == span(trace)
    assert found.span_s == pytest.approx(span(trace), rel=0.02)
    assert found.speedup == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"two-tasks"}))  # trio's turns differ
@pytest.mark.parametrize(("lanes", "others"), [(1, 2), (8, 2), (2, 4), (4, 1), (2, 2)])
def test_lanes_are_chosen_as_a_run_chooses_them(
    run: Run, name: str, lanes: int, others: int
) -> None:
    program = PROGRAMS[name]
    trace, real = both(run, program, program, {"compute_lanes": others}, compute_lanes=lanes)
    found = trace.what_if(compute_lanes=others)
    assert found.span_s == pytest.approx(span(real), rel=0.1)
    used = {op.stream for op in found.trace.ops if op.stream.startswith("compute")}
    assert used <= {f"compute{n}" for n in range(others)}


@some_programs
@pytest.mark.parametrize("field", ["h2d_rate", "d2h_rate"])
@pytest.mark.parametrize("rate", [5e9, 2e10, 2e11])
def test_rates(run: Run, name: str, field: str, rate: float) -> None:
    program = PROGRAMS[name]
    trace, real = both(run, program, program, {"rates": {field: rate}})
    assert trace.what_if(**{field: rate}).span_s == pytest.approx(span(real), rel=0.1)


@pytest.mark.parametrize("nbytes", [MIB, 16 * MIB])
def test_a_rate_where_copies_are_the_bottleneck(run: Run, nbytes: int) -> None:
    async def program(dev: sf.Device) -> None:
        await sf.gather(*[dev.put(ones(nbytes // (1 + n % 2))).ready for n in range(8)])

    trace, real = both(run, program, program, {"rates": {"h2d_rate": 1e10}})
    assert trace.what_if(h2d_rate=1e10).span_s == pytest.approx(span(real), rel=0.1)
    assert span(real) > 3 * span(trace)


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_kernel_speed(run: Run, speed: float) -> None:
    def program(factor: float) -> Program:
        async def steps(dev: sf.Device) -> None:
            for _ in range(3):
                arrays = [dev.put(ones()) for _ in range(6)]
                for n, x in enumerate(arrays):
                    dev.launch(WORK, x, (1 + n) * 1e-4 / factor)
                await sf.gather(*map(dev.get, arrays))

        return steps

    trace, real = both(run, program(1.0), program(speed), {})
    assert trace.what_if(kernel_speed=speed).span_s == pytest.approx(span(real), rel=0.1)


def test_one_copy_engine_for_both_directions(run: Run) -> None:
    async def program(dev: sf.Device) -> None:
        ops = []
        for _ in range(8):
            x = dev.zeros(MIB, np.uint8)
            ops += [dev.get(x), dev.put(np.ones(MIB, np.uint8)).ready]
        await sf.gather(*ops)

    trace, real = both(run, program, program, {"copy_engines": 1})
    assert span(real) > 1.5 * span(trace)
    assert trace.what_if(copy_engines=1).span_s == pytest.approx(span(real), rel=0.1)


def test_one_kernel_at_a_time(run: Run) -> None:
    trace, real = both(run, independent, independent, {"compute_slots": 1})
    assert trace.what_if(compute_slots=1).span_s == pytest.approx(span(real), rel=0.1)


@pytest.mark.parametrize("make", [pipeline, host_stages])
@pytest.mark.parametrize(("depth", "other"), [(1, 3), (3, 1), (2, 4), (3, 20)])
def test_depth(run: Run, make: Callable[[int], Program], depth: int, other: int) -> None:
    trace, real = both(run, make(depth), make(other), {})
    assert trace.what_if(depth=other).span_s == pytest.approx(span(real), rel=0.1)


def test_depth_and_lanes_together(run: Run) -> None:
    trace, real = both(run, pipeline(1), pipeline(4), {"compute_lanes": 2})
    found = trace.what_if(depth=4, compute_lanes=2)
    assert found.span_s == pytest.approx(span(real), rel=0.1)
    assert found.changes == "compute_lanes=2, depth=4"


def test_depth_uses_the_lanes_that_were_there(run: Run) -> None:
    trace, real = both(run, pipeline(1), pipeline(3), {}, compute_lanes=1)
    assert {op.stream for op in trace.ops if op.kind == "launch"} == {"compute0"}
    assert trace.what_if(depth=3).span_s == pytest.approx(span(real), rel=0.1)


def test_the_consumer_keeps_its_pace(run: Run) -> None:
    async def program(dev: sf.Device) -> None:
        x = dev.empty(4, np.float32)
        async for _ in dev.pipeline([ones(8 * MIB)] * 10, depth=3).map(lambda dev, item: item):
            await dev.launch(WORK, x, 1e-3)

    faster = {"h2d_rate": 1e12, "d2h_rate": 1e12}
    trace, real = both(run, program, program, {"rates": faster})
    found = trace.what_if(**faster)
    assert found.span_s == pytest.approx(span(real), rel=0.05)
    # Nor are items called for any sooner than it comes for them.
    last = [[op for op in each.ops if op.kind == "put"][-1] for each in (found.trace, real)]
    assert last[0].submitted_s == pytest.approx(last[1].submitted_s, rel=0.1)


def test_what_follows_a_synchronize_waits_for_every_stream(run: Run) -> None:
    def program(kernel_s: float) -> Program:
        async def steps(dev: sf.Device) -> None:
            x, y = dev.zeros(4, np.float32), dev.zeros(64 * MIB, np.uint8)
            for _ in range(3):
                dev.launch(WORK, x, kernel_s)  # on the first of the streams: it has ended by then
                dev.get(y[:MIB])
                await dev.synchronize()
                dev.get(y)
                await dev.synchronize()

        return steps

    trace, real = both(run, program(1e-5), program(2e-3), {})
    assert trace.what_if(kernel_speed=1 / 200).span_s == pytest.approx(span(real), rel=0.1)


def test_the_times_of_the_program_itself_stay(run: Run) -> None:
    async def program(dev: sf.Device) -> None:
        for _ in range(4):
            await dev.launch(WORK, dev.empty(4, np.float32), 1e-3)
            dev.sim.clock.advance(2e-3)

    trace = run(lambda: traced(program))
    assert trace.what_if(kernel_speed=1e6).span_s == pytest.approx(span(trace) - 4e-3, rel=0.02)


def test_everything_else_works_on_the_predicted_trace(run: Run) -> None:
    trace = run(lambda: traced(fork_join))
    predicted = trace.what_if(compute_lanes=1).trace
    assert [op.id for op in predicted.ops] == sorted(op.id for op in trace.ops)
    assert predicted.overlap().span_s == span(predicted)
    assert predicted.devices[0].compute_lanes == 1
    assert predicted.memory[-1].nbytes == trace.memory[-1].nbytes
    again = predicted.what_if(compute_lanes=4)
    assert again.span_s == pytest.approx(span(trace), rel=0.1)


def test_the_predicted_edges_hold_in_the_predicted_times(run: Run) -> None:
    trace = run(lambda: traced(fork_join))
    predicted = trace.what_if(compute_lanes=2, h2d_rate=1e10).trace
    ops = {op.id: op for op in predicted.ops}
    of_data = {(e.src, e.dst) for e in trace.edges if e.array is not None}
    assert of_data == {(e.src, e.dst) for e in predicted.edges if e.array is not None}
    for edge in predicted.edges:
        src, dst = ops[edge.src], ops[edge.dst]
        assert src.end_s is not None
        assert dst.end_s is not None
        assert src.end_s <= dst.end_s + 1e-12, edge
        if edge.issued:
            assert (src.stream, src.device) != (dst.stream, dst.device)


def test_several_devices_share_a_clock(run: Run) -> None:
    async def main() -> sf.Trace:
        async with virtual(0) as a, virtual(1) as b:
            with a.trace() as first, b.trace() as second:
                x, y = a.put(ones()), b.empty(MIB // 4, np.float32)
                a.launch(WORK, x, 3e-4)
                b.copy(y, x)
                b.launch(WORK, y, 2e-4)
                await sf.gather(a.get(x), b.get(y))
                await a.synchronize()
                await b.synchronize()
        return sf.Trace.merged([first, second])

    trace = run(main)
    assert trace.what_if().span_s == pytest.approx(span(trace), rel=0.02)
    assert trace.what_if(kernel_speed=2).span_s == pytest.approx(span(trace) - 2.5e-4, rel=0.02)


def test_no_memory_is_made(run: Run) -> None:
    trace = run(lambda: traced(fork_join))
    large = sf.Trace.of(
        [replace(op, nbytes=op.nbytes << 20) for op in trace.ops],
        trace.edges,
        trace.arrays,
        devices=trace.devices,
    )  # 6 TiB of them
    assert large.what_if(compute_lanes=4).span_s == pytest.approx(span(trace), rel=0.1)


def test_asked_inside_a_running_loop_while_its_device_is_open(run: Run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            with dev.trace() as trace:
                await dev.launch(WORK, dev.empty(4, np.float32), 1e-3)
                before_s = dev.sim.clock.now_s
                assert trace.what_if(kernel_speed=2).span_s == pytest.approx(5e-4)
                assert dev.sim.clock.now_s == before_s

    run(main)


def test_in_words(run: Run) -> None:
    trace = run(lambda: traced(independent, compute_lanes=1))
    assert str(trace.what_if(compute_lanes=2)) == (
        "with compute_lanes=2: 1.90 ms instead of 3.60 ms (1.89 times as fast)"
    )
    found = trace.what_if(compute_lanes=1)
    assert str(trace.what_if()).startswith("with nothing changed: 3.60 ms")
    assert found.replayed_s == pytest.approx(found.before_s, rel=0.02)
    staged = run(lambda: traced(fork_join)).what_if(h2d_rate=1e11)
    assert staged.changes == (
        "h2d_rate=1e+11, also where pageable copies go only as fast as the host stages them"
    )
    off = replace(found, replayed_s=2e-3)  # a trace that doesn't tell all
    assert "don't trust it far: with nothing changed it would be 2.00 ms" in str(off)


def test_a_trace_tells_which_ends_somebody_waited_for(run: Run) -> None:
    async def main() -> sf.Trace:
        async with virtual(compute_lanes=3) as dev:
            with dev.trace() as trace:
                x = dev.empty(4, np.float32)
                dev.launch(WORK, x, 1e-4, name="nobody's")
                await dev.launch(WORK, x, 1e-4, name="awaited")
                called = dev.launch(WORK, x, 1e-4, name="called back")
                called.add_done_callback(lambda op: None)
                await called
                left = [dev.launch(WORK, x, 1e-4, name=f"left {n}") for n in range(2)]
                await dev.synchronize()
                assert all(op.done() for op in left)
        return trace

    trace = run(main)
    assert trace.devices[0].compute_lanes == 3
    awaited = {op.name for op in trace.ops if op.is_awaited}
    assert awaited == {"awaited", "called back", "left 1"}  # the newest of its stream


# -- bad input ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> sf.Trace:
    import asyncio

    return asyncio.run(traced(independent))


@pytest.mark.parametrize("name", ["compute_lanes", "copy_engines", "compute_slots", "depth"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_count_that_is_none(
    small: sf.Trace, name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        small.what_if(**{name: value})


@pytest.mark.parametrize("name", ["h2d_rate", "d2h_rate", "kernel_speed"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("fast", TypeError)],
)
def test_a_rate_that_is_none(
    small: sf.Trace, name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        small.what_if(**{name: value})


def test_three_copy_engines(small: sf.Trace) -> None:
    with pytest.raises(ValueError, match="copy_engines is 1 or 2, found 3"):
        small.what_if(copy_engines=3)


def test_what_it_does_not_know(small: sf.Trace) -> None:
    with pytest.raises(TypeError, match="lanes"):
        small.what_if(lanes=2)  # type: ignore[call-arg]


def test_depth_without_a_pipeline(small: sf.Trace) -> None:
    with pytest.raises(ValueError, match="depth=2: the trace shows no pipeline"):
        small.what_if(depth=2)


def test_no_timed_ops(small: sf.Trace) -> None:
    untimed = sf.Trace.of([replace(op, start_s=None, end_s=None) for op in small.ops])
    for trace in (untimed, sf.Trace.of([])):
        with pytest.raises(ValueError, match="no op of the trace has its times"):
            trace.what_if()


def test_failed_ops(small: sf.Trace) -> None:
    ops = [replace(op, state="failed") if op.kind == "launch" else op for op in small.ops]
    with pytest.raises(ValueError, match=r"13 ops of the trace have failed \(work first\)"):
        sf.Trace.of(ops).what_if()


def test_dropped_ops(run: Run) -> None:
    async def main() -> sf.Trace:
        async with virtual() as dev:
            with dev.trace(max_ops=5) as trace:
                await independent(dev)
        return trace

    with pytest.raises(ValueError, match=r"ops of the trace were dropped.*raise max_ops"):
        run(main).what_if()


def test_several_processes(small: sf.Trace) -> None:
    ops = [replace(op, process=n % 2) for n, op in enumerate(small.ops)]
    with pytest.raises(ValueError, match="several processes"):
        sf.Trace.of(ops).what_if()
