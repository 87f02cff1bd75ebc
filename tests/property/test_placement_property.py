"""The default placement is the documented rule, whatever the lanes look like."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.scheduler.placement import Placement, PlacementRequest, choose_lane
from streamflow.scheduler.timeline import Ticket, Timeline


def by_affinity(request: PlacementRequest) -> int:
    """The lane that last wrote an input, if that write is its tail; else the least loaded."""
    for lane, is_tail in request.inputs:
        if lane is not None and is_tail:
            return lane
    loads = [lane.num_outstanding for lane in request.lanes]
    return loads.index(min(loads))


@given(
    submissions=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3))),
    retired=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    inputs=st.lists(st.integers(0, 30)),
)
def test_the_choice_is_the_documented_one(
    submissions: list[tuple[int, int]], retired: list[int], inputs: list[int]
) -> None:
    lines = [Timeline(number, name=f"line{number}") for number in range(5)]
    tickets = []
    for seq, (number, num_calls) in enumerate(submissions):
        tickets.append(Ticket(seq))
        lines[number].advance(tickets[-1], num_calls, None)
    for line, num in zip(lines, retired, strict=True):
        line.retire(min(num, len(line.inflight)))
    lanes = lines[:3]  # the other two stand for h2d and an explicit stream
    after = [tickets[place] for place in inputs if place < len(tickets)]
    assert choose_lane(lanes, after) is Placement(lanes, by_affinity).pick("op", "launch", after)


@sf.kernel('extern "C" __global__ void touch(float* x) { x[threadIdx.x] += 1; }')
def touch(x):
    x += 1


STEPS = st.lists(st.tuples(st.sampled_from(["touch", "fill", "call", "end"]), st.integers(0, 4)))


@settings(deadline=None, max_examples=50)
@given(steps=STEPS)
def test_a_program_runs_on_the_same_lanes_as_with_the_rule_written_out(
    steps: list[tuple[str, int]],
) -> None:
    async def lanes_of(placement):
        config = sf.Settings(sim=sf.SimOptions(clock="virtual"), compute_lanes=3)
        async with sf.Device(backend="sim", settings=config, placement=placement) as dev:
            found = []
            arrays = [dev.put(np.zeros(8, np.float32)) for _ in range(5)]
            for what, place in steps:
                if what == "touch":
                    op = dev.launch(touch, arrays[place])
                elif what == "fill":
                    op = dev.fill(arrays[place], 2)
                elif what == "call":
                    op = dev.call(lambda stream, x: None, arrays[place])
                else:
                    await dev.synchronize()
                    continue
                found.append(op.stream)
            return found

    assert asyncio.run(lanes_of(None)) == asyncio.run(lanes_of(by_affinity))
