"""The waits of every op cover the time from its call to its start, whatever the program."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support import virtual
from traces_by_hand import edge, op

import streamflow as sf

NUM = 1 << 12


@sf.kernel('extern "C" __global__ void f(float* x) {}', cost=lambda x: 20e-6)
def kernel(x):
    x += 1


moves = st.sampled_from(
    ["put", "get", "launch", "on stream", "host", "after host", "await", "free", "fill", "scope"]
)


def check(trace: sf.Trace) -> None:
    num = 0
    for traced in trace.ops:
        told = trace.explain(traced)
        if traced.start_s is None:
            continue
        num += 1
        for wait in told.waits:
            assert wait.end_s is not None
            assert wait.start_s < wait.end_s
        for wait, following in pairwise(told.waits):
            assert wait.end_s == following.start_s
        length_s = sum(wait.length_s for wait in told.waits)
        assert abs(length_s - (traced.start_s - traced.submitted_s)) < 1e-8
        if told.waits:
            assert told.waits[0].start_s == traced.submitted_s
            assert abs(told.waits[-1].end_s - traced.start_s) < 2e-9
    path = trace.critical_path()
    assert bool(path.steps) == bool(num)
    assert abs(sum(step.wait_s + step.ran_s for step in path.steps) - path.length_s) < 1e-6
    ends = [step.op.end_s for step in path.steps]
    assert ends == sorted(ends, key=lambda end_s: round(end_s * 1e9))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(moves, st.integers(0, 30)), max_size=25), st.sampled_from([4, 32]))
def test_in_programs(drawn: list[tuple[str, int]], window: int) -> None:
    async def main() -> sf.Trace:
        async with virtual(window=window) as dev:
            with dev.trace() as trace:
                stream = dev.stream("s")
                arrays = [dev.zeros(NUM, np.float32)]
                host: list[Any] = []
                ops: list[Any] = []
                for move, pick in drawn:
                    x = arrays[pick % len(arrays)]
                    if move == "put":
                        arrays.append(dev.put(np.ones(NUM, np.float32)))
                    elif move == "get":
                        ops.append(dev.get(x))
                    elif move == "launch":
                        ops.append(dev.launch(kernel, x))
                    elif move == "on stream":
                        ops.append(dev.launch(kernel, x, stream=stream))
                    elif move == "host":
                        host.append(dev.host(int, after=ops[-1:]))
                    elif move == "after host":
                        ops.append(dev.launch(kernel, x, after=host[-1:]))
                    elif move == "await" and ops:
                        await ops[pick % len(ops)]
                    elif move == "free" and len(arrays) > 1:
                        ops.append(arrays.pop().free())
                    elif move == "fill":
                        ops.append(dev.fill(x, 1))
                    elif move == "scope":
                        async with dev.scope(limit=2 * x.nbytes):
                            some = np.ones(NUM, np.float32)
                            ops.extend(dev.get(dev.put(some)) for _ in range(4))
                await dev.synchronize()
            return trace

    check(anyio.run(main))


times = st.integers(0, 12).map(lambda each: each / 4)


@st.composite
def traces(draw: st.DrawFn) -> sf.Trace:
    """Traces whose times need not make sense, as those of two clocks may not."""
    ops = []
    for number in range(draw(st.integers(0, 6))):
        submitted_s, issued_s, start_s, end_s = sorted(draw(st.tuples(*[times] * 4)))
        facts: dict[str, Any] = {"submitted_s": submitted_s, "issued_s": issued_s}
        if draw(st.booleans()):
            facts |= {"is_staged": True, "begun_s": submitted_s, "issued_s": end_s}
        if draw(st.booleans()):
            facts["needs"] = ("pinned memory",)
        stream = draw(st.sampled_from(["h2d", "d2h", "compute0", "s"]))
        if draw(st.integers(0, 4)) == 0:
            ops.append(op(number, stream, None, None, **facts, state="parked"))
        else:
            ops.append(op(number, stream, start_s, end_s, **facts))
    ids = st.integers(0, max(0, len(ops) - 1))
    reasons = st.sampled_from([each.value for each in sf.EdgeReason])
    drawn = draw(st.lists(st.tuples(ids, ids, reasons), max_size=10)) if len(ops) > 1 else []
    return sf.Trace.of(ops, [edge(*each) for each in drawn if each[0] != each[1]])


@settings(deadline=None)
@given(traces())
def test_in_traces_of_any_kind(trace: sf.Trace) -> None:
    for traced in trace.ops:
        told = trace.explain(traced)
        assert str(told)
        if traced.start_s is not None:
            length_s = sum(wait.length_s for wait in told.waits)
            assert abs(length_s - (traced.start_s - traced.submitted_s)) < 1e-8
    assert str(trace.critical_path())
