"""Pictures of random programs: their edges are the scheduler's, and those are the program's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pictured import all_edges, crossing, dot_edges, mermaid_edges, svg_edges

import streamflow as sf
from streamflow.config import Settings, SimOptions
from streamflow.testing import strategies
from streamflow.testing.programs import Kind, Program
from streamflow.trace import EdgeReason
from streamflow.trace.chrome import to_chrome
from streamflow.trace.groups import synopsis

quick = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    phases=[Phase.generate],  # shrinking takes minutes, and says less than the trace
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DATA = {
    EdgeReason.READ_AFTER_WRITE,
    EdgeReason.WRITE_AFTER_READ,
    EdgeReason.WRITE_AFTER_WRITE,
    EdgeReason.ALLOCATION,
    EdgeReason.FREE,
}


def traced(program: Program, seed: int, window: int) -> sf.Trace:
    async def main() -> sf.Trace:
        configuration = Settings(sim=SimOptions(clock="virtual", seed=seed), window=window)
        with anyio.fail_after(10):
            async with sf.Device(0, backend="sim", settings=configuration) as dev:
                with dev.trace() as trace:
                    await program.run(dev)
                    await dev.synchronize()
        return trace

    return anyio.run(main)


traces = st.builds(
    traced, strategies.programs(), seed=st.integers(0, 3), window=st.sampled_from([8, 512])
)


@settings(quick, max_examples=20)
@given(trace=traces)
def test_edges_in_pictures_are_the_schedulers(trace: sf.Trace) -> None:
    assert dot_edges(trace) == mermaid_edges(trace) == all_edges(trace)
    assert svg_edges(trace) == crossing(trace)


@settings(quick, max_examples=8)
@given(trace=traces)
def test_flows_in_perfetto_are_the_edges_between_streams(trace: sf.Trace) -> None:
    from perfetto_engine import Processor

    with Processor(to_chrome(trace)) as processor:
        assert processor.flows() == crossing(trace)
        assert {*processor.slices("op"), *processor.slices("host")} == {op.id for op in trace.ops}
        assert processor.complaints() == []


@quick
@given(trace=traces, max_groups=st.integers(1, 30))
def test_c48_groups_hold_each_op_and_each_edge_once(trace: sf.Trace, max_groups: int) -> None:
    found = synopsis(trace, max_groups=max_groups)
    assert len(found.groups) <= max_groups
    grouped = sorted(op for group in found.groups for op in group.ops)
    assert grouped == sorted(op.id for op in trace.ops)
    home = {op: group.id for group in found.groups for op in group.ops}
    counts: dict[tuple[Any, ...], int] = {}
    for edge in trace.edges:
        key = home[edge.src], home[edge.dst], edge.reason
        counts[key] = counts.get(key, 0) + 1
    assert {(edge.src, edge.dst, edge.reason): edge.num for edge in found.edges} == counts


@quick
@given(trace=traces)
def test_each_edge_of_data_has_its_reason_in_what_the_two_ops_touch(trace: sf.Trace) -> None:
    ops = {op.id: op for op in trace.ops}
    places = {op.id: place for place, op in enumerate(trace.ops)}  # as they were called for
    for edge in trace.edges:
        src, dst = ops[edge.src], ops[edge.dst]
        if edge.reason is EdgeReason.STREAM_ORDER:
            assert src.position < dst.position
        elif edge.reason is not EdgeReason.CAPACITY:
            assert places[src.id] < places[dst.id]
        if edge.reason not in DATA:
            assert edge.array is None
        elif edge.array is None:  # memory that a free gave back
            assert (src.kind, edge.reason) == ("free", EdgeReason.ALLOCATION)
        else:
            is_reader = edge.reason is EdgeReason.WRITE_AFTER_READ
            is_read = edge.array in src.reads
            assert edge.array in src.writes or is_read
            assert is_read if is_reader else True
            assert edge.array in (*dst.reads, *dst.writes)
            if edge.reason is EdgeReason.ALLOCATION:
                assert src.id == edge.array
            if edge.reason is EdgeReason.FREE:
                assert dst.kind == "free"


@settings(quick, max_examples=60)
@given(program=strategies.programs(), seed=st.integers(0, 3), window=st.sampled_from([8, 512]))
def test_edges_imply_every_hazard_of_the_program(program: Program, seed: int, window: int) -> None:
    if any(step.kind is Kind.SPLIT for step in program.steps):
        return  # of parts the trace tells the whole only
    trace = traced(program, seed, window)
    ops = {op.id: op for op in trace.ops}
    before: dict[int, set[int]] = {op: set() for op in ops}
    places = {op: place for place, op in enumerate(ops)}
    for edge in sorted(trace.edges, key=lambda edge: places[edge.dst]):
        if edge.reason is not EdgeReason.CAPACITY:
            before[edge.dst] |= {edge.src, *before[edge.src]}
    last_write: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for op in trace.ops:
        touched = (*op.reads, *op.writes)
        wanted = [last_write[array] for array in touched if array in last_write]
        for array in op.writes:
            wanted += reads.get(array, [])
        for src in wanted:
            seen_s = ops[src].seen_s
            is_over = seen_s is not None and seen_s < op.submitted_s
            assert src in before[op.id] or is_over, (src, op)
        for array in op.reads:
            reads.setdefault(array, []).append(op.id)
        for array in op.writes:
            last_write[array] = op.id
            reads[array] = []


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_stream_order_joins_neighbours_of_one_stream(num_lanes: int) -> None:
    async def main() -> sf.Trace:
        configuration = Settings(sim=SimOptions(clock="virtual"), compute_lanes=num_lanes)
        async with sf.Device(0, backend="sim", settings=configuration) as dev:
            with dev.trace() as trace:
                for _ in range(6):
                    dev.full(64, 1, "float32")
                await dev.synchronize()
        return trace

    trace = anyio.run(main)
    positions: dict[str, list[tuple[int, int]]] = {}
    for op in trace.ops:
        positions.setdefault(op.stream, []).append((op.position, op.id))
    ordered = {(edge.src, edge.dst) for edge in trace.edges}
    for line in positions.values():
        ids = [op_id for _, op_id in sorted(line)]
        assert set(pairwise(ids)) <= ordered
