"""The states of an op: what the table promises, and that every op of a program keeps to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.runtime import core as core_module
from streamflow.scheduler.machine import (
    FINAL,
    TRANSITIONS,
    IllegalTransition,
    OpState,
    OpStep,
    step,
)

States = list[tuple[OpState, OpStep, OpState]]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(steps=st.lists(st.sampled_from(OpStep), max_size=12))
def test_any_steps_end_once_and_illegal_ones_change_nothing(steps: list[OpStep]) -> None:
    state, finals, was_submitted = OpState.PARKED, [], False
    for number, happened in enumerate(steps):
        legal = TRANSITIONS[state].get(happened)
        if legal is None:
            with pytest.raises(IllegalTransition, match=f"{state.value} cannot.*story {number}"):
                step(state, happened, lambda number=number: f"story {number}")
            continue
        before, state = state, step(state, happened, lambda: pytest.fail("asked for a story"))
        assert state is legal is not before
        assert not finals, "a final state has no way out"
        was_submitted |= state is OpState.SUBMITTED
        if state in FINAL:
            finals.append(state)
        assert not (was_submitted and state is OpState.CANCELLED)
    assert len(finals) <= 1


def test_every_state_is_reached_and_every_final_one_is_final() -> None:
    found, new = {OpState.PARKED}, {OpState.PARKED}
    while new:
        new = {after for state in new for after in TRANSITIONS[state].values()} - found
        found |= new
    assert found == set(OpState)
    assert set(FINAL) == {OpState.DONE, OpState.FAILED, OpState.CANCELLED}


@sf.kernel('extern "C" __global__ void bump(int* x, int n) { if (threadIdx.x < n) x[0] += 1; }')
def bump(x, n):
    x[:n] += 1


class Recorded:
    """Every step that the runtime takes an op by; the op is told apart by its story's owner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[int, States] = defaultdict(list)
        self.ops: list[sf.Op[Any]] = []  # alive, so that no id is given twice

        def recorded(state: OpState, happened: OpStep, story: Callable[[], str]) -> OpState:
            op: Any = story.__self__  # type: ignore[attr-defined]
            after = step(state, happened, story)
            self.ops.append(op)
            self.steps[id(op)].append((state, happened, after))
            return after

        monkeypatch.setattr(core_module, "step", recorded)

    def check(self) -> set[OpState]:
        ended = set()
        for op in {id(op): op for op in self.ops}.values():
            steps = self.steps[id(op)]
            # A launch that goes at once is submitted without a call.
            assert steps[0][0] in (OpState.PARKED, OpState.SUBMITTED)
            for (_, _, after), (before, _, _) in pairwise(steps):
                assert after is before
            for before, happened, after in steps:
                assert TRANSITIONS[before][happened] is after
            finals = [after for _, _, after in steps if after in FINAL]
            assert len(finals) <= 1
            # What nobody asks for takes submitted -> done without a call.
            assert op.state in FINAL
            assert finals == [op.state] or (not finals and op.state is OpState.DONE)
            if OpState.SUBMITTED in {after for _, _, after in steps}:
                assert op.state is not OpState.CANCELLED
            ended.add(op.state)
        return ended


def fails(x: np.ndarray) -> None:
    raise ZeroDivisionError


async def random_program(dev: sf.Device, random: Random) -> None:
    """Ops of every kind that fail, are cancelled, park, and are dropped."""
    arrays = [dev.zeros(num, np.int32) for num in (16, 16, 20_000)]
    streams, ops, events = [dev.stream(), dev.stream()], [], []
    for _ in range(40):
        x, options = random.choice(arrays), {}
        if random.random() < 0.5:
            options["stream"] = random.choice(streams)
        if random.random() < 0.3:
            events.append(anyio.Event())
            options["after"] = events[-1]
        kind = random.randrange(7)
        if kind == 0:
            ops.append(dev.copy(x, np.ones(x.size, np.int32), **options))
        elif kind == 1:
            ops.append(dev.get(x, **options))
        elif kind == 2:
            ops.append(dev.host(fails if random.random() < 0.5 else len, x))
        elif kind == 3 and ops:
            random.choice(ops).cancel()
        elif kind == 4 and events:
            random.choice(events).set()
        elif kind == 5:
            rule = dev.sim.fail(kind="launch", sticky=False)
            ops.append(dev.launch(bump, x, x.size, **options))
            rule.clear()
        else:
            ops.append(dev.launch(bump, x, x.size, **options))
        if random.random() < 0.2:
            await anyio.lowlevel.checkpoint()
    for event in events:
        event.set()
    for op in ops:
        with suppress(sf.StreamflowError, ZeroDivisionError):
            await op
    await dev.synchronize()


def test_every_op_of_random_programs_keeps_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = set()

    async def main(seed: int) -> None:
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual", seed=seed), window=8)
        async with sf.Device(backend="sim", settings=settings) as dev:
            await random_program(dev, Random(seed))

    for seed in range(30):
        with monkeypatch.context() as patch:
            recorded = Recorded(patch)
            anyio.run(main, seed)
            ended |= recorded.check()
    assert ended == set(FINAL)
