"""Random programs: captured they give the bytes, and have the order, that they have eagerly."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import count
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions
from streamflow.testing.programs import Kind, Program, checksum
from streamflow.testing.strategies import programs

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}
NUM_LANES = 128  # more than a program has ops
quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Body:
    """A program as a function of what it puts, which can be captured.

    What the program reads are copies, taken at that place; an array that is put is the one
    given, unless the program frees it.
    """

    def __init__(self, program: Program, dev: sf.Device) -> None:
        self.steps = program.steps
        self._dev = dev
        self._freed = {step.names[0] for step in self.steps if step.kind is Kind.FREE}
        names = sorted({step.stream for step in self.steps} - {""})
        self.streams = {name: dev.stream(name) for name in names}

    def put(self, shift: int) -> dict[str, sf.DeviceArray]:
        """New arguments; ``shift`` 0 is what the program itself puts."""
        return {
            step.names[0]: self._dev.put(step.data() + np.asarray(shift, step.dtype))
            for step in self.steps
            if step.kind is Kind.PUT
        }

    def __call__(
        self, dev: sf.Device, given: dict[str, sf.DeviceArray]
    ) -> dict[str, sf.DeviceArray]:
        arrays: dict[str, sf.DeviceArray] = {}
        read: dict[str, sf.DeviceArray] = {}
        for step in self.steps:
            first, *others = step.names
            # Memory comes and goes on lanes: on a stream that would order what comes after.
            stream = self.streams.get(step.stream)
            match step.kind:
                case Kind.PUT if first not in self._freed:
                    arrays[first] = given[first]
                case Kind.PUT:
                    arrays[first] = dev.empty(step.size, step.dtype)
                    dev.copy(arrays[first], given[first], stream=stream)
                case Kind.FULL:
                    arrays[first] = dev.empty(step.size, step.dtype)
                    dev.fill(arrays[first], step.value, stream=stream)
                case Kind.FILL:
                    dev.fill(arrays[first], step.value, stream=stream)
                case Kind.LAUNCH:
                    assert step.kernel is not None
                    args = [arrays[arg] if isinstance(arg, str) else arg for arg in step.args]
                    dev.launch(step.kernel, *args, stream=stream)
                case Kind.COPY:
                    dev.copy(arrays[first], arrays[others[0]], stream=stream)
                case Kind.SPLIT:
                    *parts, base = step.names
                    arrays.update(zip(parts, arrays[base].split(len(parts)), strict=True))
                case Kind.GET | Kind.HOST:
                    seen = arrays[first]
                    read[step.result] = dev.empty(seen.shape, seen.dtype)
                    dev.copy(read[step.result], seen, stream=stream)
                case Kind.FREE:
                    for name in others:
                        del arrays[name]
                    arrays.pop(first).free()
        return {**read, **arrays}

    async def results(self, arrays: dict[str, sf.DeviceArray]) -> dict[str, Any]:
        """What ``Program.expected`` has by the same names."""
        hosts = {step.result for step in self.steps if step.kind is Kind.HOST}
        found = {name: (await self._dev.get(array)).copy() for name, array in arrays.items()}
        return {name: checksum(x) if name in hosts else x for name, x in found.items()}

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def open_device(seed: int, schedule: str = "", **more: Any) -> sf.Device:
    sim = SimOptions(clock="virtual", seed=seed, memory_nbytes=64 << 20, schedule=schedule)
    known = Settings(sim=sim, close_timeout_s=2.0, **more.pop("settings", {}))
    return sf.Device(0, backend="sim", settings=known, **more)


RUN_BY_THE_DEVICE = ("launch", "fill", "copy")

Pairs = set[tuple[int, int]]


def closed(num: int, edges: Iterable[tuple[int, int]]) -> Pairs:
    """All pairs of which the second comes after the first, by way of others too."""
    before: list[set[int]] = [set() for _ in range(num)]
    for src, dst in sorted(edges, key=lambda edge: edge[1]):
        before[dst] |= {src, *before[src]}
    return {(src, dst) for dst in range(num) for src in before[dst]}


@settings(quick, max_examples=120)
@given(program=programs(max_steps=24))
def test_a_graph_has_the_nodes_and_the_order_of_an_eager_run(program: Program) -> None:
    async def main() -> None:
        lanes = count()
        # No two ops share a lane, whose order is none that was asked for.
        placement = {"placement": lambda request: next(lanes) % NUM_LANES}
        with anyio.fail_after(8):
            async with open_device(0, compute_lanes=NUM_LANES, **placement) as dev:
                body = Body(program, dev)
                given = body.put(0)
                await dev.synchronize()
                with dev.trace() as trace:
                    kept = body(dev, given)
                    eager, traced = trace.ops, trace.edges  # while nothing of it has ended
                with dev.capture() as graph:
                    made = body(dev, given)
                assert next(lanes) < 2 * NUM_LANES
                ops = {
                    op.id: place
                    for place, op in enumerate(op for op in eager if op.kind in RUN_BY_THE_DEVICE)
                }
                assert [node.kind for node in graph.nodes] == [
                    op.kind for op in eager if op.id in ops
                ]
                places = {op.id: place for place, op in enumerate(eager)}
                found = closed(
                    len(eager),
                    (
                        (places[edge.src], places[edge.dst])
                        for edge in traced
                        if edge.src in places and edge.dst in places
                    ),
                )
                order = [op.id for op in eager]
                expected = {
                    (ops[order[src]], ops[order[dst]])
                    for src, dst in found
                    if order[src] in ops and order[dst] in ops
                }
                nodes = {node: place for place, node in enumerate(graph.nodes)}
                edges = [(nodes[src], nodes[dst]) for src, dst in graph.edges]
                assert closed(len(nodes), edges) == expected
                event(f"{len(expected) // 50 * 50} pairs or more")
                graph.close()
                body.close()
                del kept, given, made
                gc.collect(0)

    anyio.run(main)


@pytest.mark.parametrize("loop", LOOPS)
@settings(quick, max_examples=40)
@given(
    program=programs(max_steps=24),
    seed=st.integers(0, 3),
    window=st.sampled_from([4, 512]),
    schedule=st.sampled_from(["", "random:3", "priority-inverting:1", "starved:2"]),
)
def test_captured_programs_give_the_bytes_of_eager_ones(
    loop: str, program: Program, seed: int, window: int, schedule: str
) -> None:
    async def main() -> None:
        with anyio.fail_after(8):
            async with open_device(seed, schedule, settings={"window": window}) as dev:
                body = Body(program, dev)
                captured = dev.captured(body, name="program")
                calls = [(shift, captured(dev, body.put(shift))) for shift in (0, 1, 0, 2)]
                for shift, arrays in calls:  # all were on their way at a time
                    found = await body.results(arrays)
                    equal(found, await body.results(body(dev, body.put(shift))))
                    if shift == 0:
                        equal(found, program.expected())
                assert (captured.num_recordings, captured.num_replays) == (1, 3)
                event(f"{len(program.steps) // 8 * 8} steps or more")
                await dev.synchronize()  # a launch holds its graph until it has ended
                calls.clear()
                arrays.clear()
                captured.clear()
                body.close()
                gc.collect(0)
                await dev.synchronize()
                assert dev.live() == {}
                assert dev.memory.used_nbytes == 0

    anyio.run(main, **LOOPS[loop])
