"""Traces of a GPU: device times that keep the order of their edges, and show what overlaps."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import streamflow as sf
from streamflow.trace import EdgeReason

pytestmark = pytest.mark.gpu

NUM = 16
NBYTES = 16 << 20

_SOURCE = """extern "C" __global__ void busy(float* x, int steps, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i];
    for (int step = 0; step < steps; ++step) value = __fmaf_rn(value, 0.9999f, 0.5f);
    x[i] = value;
}"""


@sf.kernel(_SOURCE)
def busy(x: Any, steps: int, n: int) -> None:
    x += 1


async def traced(is_ordered: bool = False) -> tuple[sf.Trace, sf.Op[Any]]:
    """Copies in from pinned memory, kernels, copies out; on one stream if ``is_ordered``."""
    async with sf.Device(0, backend="cuda") as dev:
        source = np.ones(NBYTES // 4, np.float32)
        async with dev.pin(source):
            stream = dev.stream("one") if is_ordered else None

            async def work() -> sf.Op[Any]:
                ops = []
                for _ in range(NUM):
                    x = dev.put(source, stream=stream)
                    launched = dev.launch(busy, x, 2000, x.size, stream=stream)
                    ops.append(dev.get(x, stream=stream))
                    del x
                await sf.gather(*ops)
                await dev.synchronize()
                return launched

            await work()  # compiles, and pins memory for the results
            with dev.trace() as trace:
                launched = await work()
        return trace, launched


def test_copies_and_kernels_are_seen_to_overlap() -> None:
    trace, launched = asyncio.run(traced())
    overlap = trace.overlap()
    assert set(overlap.busy_s) == {"h2d", "compute", "d2h"}
    assert overlap.ratio > 0.3, str(overlap)
    assert overlap.span_s < sum(overlap.busy_s.values())
    assert trace.critical_path().steps
    assert "ran" in str(trace.explain(launched))
    assert trace.op(launched).engine == "compute"


def test_one_stream_is_seen_not_to_overlap() -> None:
    trace, _ = asyncio.run(traced(is_ordered=True))
    assert trace.overlap().ratio < 0.05, str(trace.overlap())


@pytest.mark.parametrize("is_ordered", [False, True])
def test_device_times_keep_the_order_of_the_edges(is_ordered: bool) -> None:
    trace, _ = asyncio.run(traced(is_ordered))
    ops = {op.id: op for op in trace.ops}
    assert {op.state for op in trace.ops} == {"done"}
    num_seen = 0
    for edge in trace.edges:
        src, dst = ops[edge.src], ops[edge.dst]
        if edge.reason is EdgeReason.CAPACITY or src.end_s is None or dst.start_s is None:
            continue
        num_seen += 1
        # Events tell the time to about half a microsecond.
        assert src.end_s <= dst.start_s + 2e-6, (edge, src, dst)
    assert num_seen >= 3 * NUM


def test_timing_events_are_used_again() -> None:
    async def main() -> None:
        async with sf.Device(0, backend="cuda") as dev:
            x = dev.zeros(1024, np.float32)
            with dev.trace() as trace:
                for _ in range(20):
                    ops = [dev.launch(busy, x, 50, x.size) for _ in range(100)]
                    await ops[-1]
                    await dev.synchronize()
            launches = [op for op in trace.ops if op.kind == "launch"]
            assert len(launches) == 2000
            spans = sorted((op.start_s, op.end_s) for op in launches)
            # One array: they ran one after the other, each at a time of its own.
            assert all(first[1] <= second[0] + 2e-6 for first, second in pairwise(spans))

    asyncio.run(main())
