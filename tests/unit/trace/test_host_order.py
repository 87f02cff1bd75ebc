"""What the program waited for before a call, as it is read off the times of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamflow.trace import TracedOp
from streamflow.trace.host_order import Call, calls

MS = 1e-3


def op(place: int, called_ms: float, seen_ms: float | None = None, *, task: str | None = "a"):
    end_s = None if seen_ms is None else seen_ms * MS
    return TracedOp(
        place, "launch", f"op {place}", "compute0", "compute", 0, 0, called_ms * MS,
        called_ms * MS, end_s, "done", None,
        seen_s=end_s, task=task, is_awaited=seen_ms is not None,
    )  # fmt: skip


def same(call: Call, after_call: int | None, after_call_ms: float, ends: list[tuple[int, float]]):
    assert call.after_call == after_call
    assert call.after_call_s == pytest.approx(after_call_ms * MS)
    assert [place for place, _ in call.after_ends] == [place for place, _ in ends]
    for (_, found_s), (_, wanted_ms) in zip(call.after_ends, ends, strict=True):
        assert found_s == pytest.approx(wanted_ms * MS)


def test_the_first_call_comes_when_it_came() -> None:
    same(calls([op(0, 2)])[0], None, 2, [])


def test_a_call_after_nothing_was_seen_takes_the_programs_own_time() -> None:
    same(calls([op(0, 0), op(1, 5)])[1], 0, 5, [])


def test_a_call_after_an_end_that_was_awaited_waits_for_it() -> None:
    same(calls([op(0, 0, 3), op(1, 3.5)])[1], 0, 0, [(0, 0.5)])


def test_all_ends_since_the_call_before_are_waited_for() -> None:
    found = calls([op(0, 0, 3), op(1, 0, 4), op(2, 4)])
    same(found[2], 1, 0, [(0, 0), (1, 0)])


def test_an_end_that_nobody_waited_for_holds_up_nothing() -> None:
    quiet = replace(op(0, 0, 3), is_awaited=False)
    same(calls([quiet, op(1, 3)])[1], 0, 3, [])


def test_an_end_that_was_seen_long_after_it_held_up_nothing() -> None:
    late = replace(op(0, 0, 3), end_s=1 * MS)
    same(calls([late, op(1, 3)])[1], 0, 3, [])


def test_a_task_waits_for_its_own_ops_rather_than_for_anothers() -> None:
    ops = [op(0, 0, 3), op(1, 0, 2.9, task="b"), op(2, 3)]
    same(calls(ops)[2], 0, 0, [(0, 0)])


def test_a_task_may_have_waited_for_anothers_ops() -> None:
    ops = [op(0, 0, 1), op(1, 0, 3, task="b"), op(2, 3)]
    same(calls(ops)[2], 0, 0, [(0, 0), (1, 0)])


def test_what_is_known_otherwise_is_taken_as_it_is() -> None:
    known = Call(None, 1.0, [])
    assert calls([op(0, 0, 3), op(1, 3)], {1: known})[1] is known
