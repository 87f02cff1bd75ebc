"""Each hint names the mistake that was planted, and no other; right programs get none."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from support import virtual

import streamflow as sf

N = 1 << 20  # 4 MiB: about 0.1 ms each way
S = 1e-4


@sf.kernel('extern "C" __global__ void work(float* x) {}', cost=lambda x: S)
def work(x):
    x += 1


@sf.kernel('extern "C" __global__ void tiny(float* x) {}', cost=lambda x: 3e-6)
def tiny(x):
    x[:1] += 1


def hinted(run, program, **settings):
    """The hints on what ``program(dev)`` does."""

    async def main():
        async with virtual(**settings) as dev:
            with dev.trace() as trace:
                await program(dev)
                await dev.synchronize()
            return trace.hints()

    return run(main)


def line_of(program, text):
    """Where in this file ``program`` has ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = program.__code__.co_firstlineno
    number = next(i for i, line in enumerate(lines, 1) if i >= first and text in line)
    return f"{Path(__file__).name}:{number}"


def check(hints, kind, *words):
    assert [hint.kind.value for hint in hints] == [kind], [str(hint) for hint in hints]
    (hint,) = hints
    for word in words:
        assert word in hint.text, hint.text
    assert hint.ops
    assert str(hint) == f"{kind}: {hint.text}"


# -- planted mistakes ------------------------------------------------------------------------


def test_large_pageable_arrays(run):
    async def program(dev):
        source = np.ones(8 * N, np.float32)
        for _ in range(6):
            x = dev.put(source)
            dev.launch(work, x)
            del x
        await dev.synchronize()

    hints = hinted(run, program)
    check(hints, "pageable", "6 times put of 32.0 MiB", line_of(program, "dev.put("), "dev.pin(")


def test_one_array_reused_for_every_block(run):
    async def program(dev):
        async with dev.pinned.lease(4 * N) as lease:
            source = lease.array(N, np.float32)
            x = dev.empty(N, np.float32)
            for _ in range(8):
                dev.put(source, out=x)
                dev.launch(work, x)
            await dev.synchronize()

    hints = hinted(run, program)
    place = line_of(program, "dev.empty(")
    check(hints, "false-dependency", f"made at {place}", "overwritten 7 times", "second array")
    assert {op.kind for op in hints[0].ops} == {"put"}


@pytest.mark.parametrize("is_pinned", [True, False])
def test_everything_on_one_stream(run, is_pinned):
    async def program(dev):
        async with dev.pinned.lease(4 * N) as lease:
            source = lease.array(N, np.float32) if is_pinned else np.ones(N, np.float32)
            stream = dev.stream("only")
            for _ in range(8):
                x = dev.put(source, stream=stream)
                dev.launch(work, x, stream=stream)
                dev.get(x, stream=stream)
            await dev.synchronize()

    check(hinted(run, program), "one-stream", "waited on stream only", "leave stream= out")


def test_a_step_of_small_kernels(run):
    async def program(dev):
        x = dev.zeros(N, np.float32)
        for _ in range(40):
            dev.launch(tiny, x)
            dev.launch(tiny, x)
        await dev.synchronize()

    check(hinted(run, program), "small-ops", "80 launches", "3.00 us each", "dev.captured(")


def test_an_await_after_each_op(run):
    async def program(dev):
        source = np.ones(N, np.float32)
        for _ in range(6):
            x = dev.put(source)
            await x
            await dev.launch(work, x)
            await dev.get(x)

    check(hinted(run, program), "await-each", "17 of 18 ops", "Submit ahead")


def test_a_limit_that_is_too_small(run):
    async def program(dev):
        async with dev.scope(limit=4 * N, name="tight"):
            for _ in range(8):
                x = dev.put(np.ones(N, np.float32))
                dev.launch(work, x)
                dev.get(x)
                del x
            await dev.synchronize()

    check(hinted(run, program), "memory", "the limit of scope 'tight'", "larger limit")


# -- right programs --------------------------------------------------------------------------


def test_a_pipeline(run):
    async def program(dev):
        def model(dev, x):
            dev.launch(work, x)
            return x

        async for _ in dev.pipeline([np.ones(N, np.float32)] * 16, depth=3).map(model):
            pass

    assert hinted(run, program) == ()


def test_a_loader_and_a_step_that_is_awaited(run):
    async def program(dev):
        weights = dev.zeros(16, np.float32)
        for _ in range(3):
            async for rows in dev.pipeline(np.ones((8, N), np.float32), batch_size=1).on_device():
                dev.launch(work, rows)
                dev.launch(work, weights)
            await dev.get(weights)

    assert hinted(run, program) == ()


def test_a_captured_step(run):
    async def program(dev):
        @dev.captured
        def step(x):
            for _ in range(4):
                dev.launch(tiny, x)

        x = dev.zeros(N, np.float32)
        for _ in range(100):
            step(x)
        await dev.get(x)

    assert hinted(run, program) == ()


def test_synced_arrays(run):
    async def program(dev):
        pair = [sf.SyncedArray(dev, N, np.float32) for _ in range(2)]
        for turn in range(12):
            m = pair[turn % 2]
            async with m.host(write="all") as a:
                a[:] = turn
            async with m.device(write=True) as d:
                dev.launch(work, d)
            async with m.host() as a:
                assert a[0] == turn + 1
        for m in pair:
            m.close()

    assert hinted(run, program) == ()


def test_two_arrays_that_take_turns(run):
    async def program(dev):
        async with dev.pinned.lease(4 * N) as lease:
            source = lease.array(N, np.float32)
            arrays = [dev.empty(N, np.float32) for _ in range(3)]
            for number in range(12):
                x = arrays[number % 3]
                dev.put(source, out=x)
                dev.launch(work, x)
            await dev.synchronize()

    assert hinted(run, program) == ()


def test_a_stream_whose_ops_belong_together(run):
    async def program(dev):
        stream = dev.stream("chain")
        x = dev.zeros(N, np.float32, stream=stream)
        for _ in range(12):
            dev.launch(work, x, stream=stream)
        await dev.get(x, stream=stream)

    assert hinted(run, program) == ()


def test_double_buffering_as_in_the_example(run):
    async def program(dev):
        source, window = np.empty(N, np.float32), deque()
        for _ in range(12):
            if len(window) == 2:
                await window.popleft()
            x = dev.put(source)
            dev.launch(work, x)
            window.append(dev.get(x))
            await x.staged
            del x
        await sf.gather(*window)

    assert hinted(run, program) == ()


def test_an_empty_trace(run):
    async def program(dev):
        pass

    assert hinted(run, program) == ()
    assert sf.Trace.of([]).hints() == ()
