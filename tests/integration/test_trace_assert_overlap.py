"""``trace.assert_overlap`` as a test in CI has it."""

from __future__ import annotations

import numpy as np
import pytest
from support import SPIN, virtual

import streamflow as sf

N = 1 << 20


@sf.kernel('extern "C" __global__ void work(float* x) {}', cost=lambda x: 1e-4)
def work(x):
    x += 1


def traced(run, program):
    async def main():
        async with virtual() as dev:
            with dev.trace() as trace:
                await program(dev)
                await dev.synchronize()
            return trace

    return run(main)


async def pipelined(dev):
    def model(dev, x):
        dev.launch(work, x)
        return x

    async for _ in dev.pipeline([np.ones(N, np.float32)] * 24, depth=6).map(model):
        pass


async def one_at_a_time(dev):
    for _ in range(8):
        x = dev.put(np.ones(N, np.float32))
        await x
        await dev.launch(work, x)
        await dev.get(x)


def test_it_passes_where_all_overlaps(run):
    trace = traced(run, pipelined)
    trace.assert_overlap()
    trace.assert_overlap(0.9)
    trace.assert_overlap(0)


def test_it_fails_with_the_table_the_gaps_and_the_hints(run):
    trace = traced(run, one_at_a_time)
    with pytest.raises(AssertionError) as caught:
        trace.assert_overlap(0.5)
    text = str(caught.value)
    assert text.startswith("overlapped 0.0% of what could be, wanted 50.0%\n")
    assert str(trace.overlap()) in text
    gaps = text.partition("longest gaps:\n")[2].partition("hints:")[0].splitlines()
    assert len(gaps) == 5
    assert "until the end of work on compute0 was seen" in gaps[0]
    assert "test_trace_assert_overlap.py:" in gaps[0]
    assert text.rpartition("hints:\n")[2].strip().startswith("await-each: ")


def test_it_says_that_one_engine_was_used(run):
    async def program(dev):
        await dev.launch(SPIN, 1e-3, grid=1, block=1)

    with pytest.raises(AssertionError, match="one engine was used: there was nothing to overlap"):
        traced(run, program).assert_overlap()


def test_it_says_that_nothing_has_times():
    with pytest.raises(AssertionError, match="none of the 0 ops"):
        sf.Trace.of([]).assert_overlap(0)


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), True, "0.9", None])
def test_a_ratio_that_is_none(ratio):
    with pytest.raises(ValueError, match="ratio must be a number from 0 to 1"):
        sf.Trace.of([]).assert_overlap(ratio)
