"""Ops of a trace once more on the machine: queues, workers, and calls that can't be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamflow.config import Settings, SimOptions
from streamflow.trace import EdgeReason, TracedEdge, TracedOp
from streamflow.trace.host_order import Call
from streamflow.trace.rerun import Machine, Times, rerun


def op(place: int, stream: str = "compute0", **known: object) -> TracedOp:
    engine = "h2d" if stream == "h2d" else "compute"
    made = {
        "id": place, "kind": "launch", "name": "", "stream": stream, "engine": engine,
        "device": 0, "nbytes": 0, "submitted_s": 0.0, "start_s": 0.0, "end_s": 1.0,
        "state": "done", "where": None, "issued_s": 0.0, "position": 2 * place + 2,
    }  # fmt: skip
    return TracedOp(**{**made, **known})  # type: ignore[arg-type]


def times(
    ops: Sequence[TracedOp],
    edges: Sequence[TracedEdge] = (),
    calls: Sequence[Call] | None = None,
    lanes: int | None = None,
) -> list[Times]:
    sim = SimOptions(clock="virtual", check_races=False, devices=1)
    measured = {each.id: each.duration_s or 0.0 for each in ops}
    if calls is None:
        calls = [Call(place - 1 if place else None, 0.0, []) for place in range(len(ops))]
    machine = Machine(Settings(sim=sim), [0], lanes, 4)
    return rerun(ops, edges, calls, measured, measured, machine)


def test_one_stream_keeps_its_order() -> None:
    assert [each.start_s for each in times([op(0), op(1), op(2)])] == [0, 1, 2]


def test_a_second_lane_takes_every_other_op() -> None:
    found = times([op(0), op(1), op(2)], lanes=2)
    assert [each.stream for each in found] == ["compute0", "compute1", "compute0"]
    assert [each.start_s for each in found] == [0, 0, 1]


def test_an_op_goes_behind_its_only_input() -> None:
    edge = TracedEdge(0, 2, EdgeReason.READ_AFTER_WRITE, False, 7)
    found = times([op(0), op(1), op(2)], [edge], lanes=3)
    assert (found[2].stream, found[2].start_s, found[2].waited) == ("compute0", 1, [])


def test_a_wait_is_made_between_lanes() -> None:
    edges = [TracedEdge(n, 2, EdgeReason.READ_AFTER_WRITE, False, n) for n in range(2)]
    found = times([op(0), op(1, end_s=3.0), op(2)], edges, lanes=2)
    assert (found[2].stream, found[2].start_s, found[2].waited) == ("compute0", 3, [1])


def test_the_worker_of_a_staged_copy_takes_its_time() -> None:
    staged = op(0, "h2d", begun_s=0.0, start_s=0.25, end_s=1.0, is_staged=True)
    (found,) = times([staged])
    assert (found.begun_s, found.start_s, found.end_s) == pytest.approx((0.0, 0.25, 1.0))


def test_a_worker_that_waited_for_another_copy_does_not() -> None:
    first = op(0, "h2d", begun_s=0.0, end_s=1.0, is_staged=True)
    second = op(1, "h2d", begun_s=0.0, start_s=0.5, end_s=2.0, is_staged=True)
    found = times([first, second])
    assert [each.start_s for each in found] == [0, 1]


def test_calls_that_would_wait_for_each_other_are_made_in_order() -> None:
    calls = [Call(None, 0.0, [(1, 0.0)]), Call(0, 0.0, [(0, 0.5)])]
    found = times([op(0), op(1)], calls=calls)
    assert [each.called_s for each in found] == [0, 1.5]
