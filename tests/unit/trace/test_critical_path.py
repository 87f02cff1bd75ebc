from __future__ import annotations

import pytest
from traces_by_hand import edge, op

from streamflow.trace import EdgeReason, Trace

RAW = EdgeReason.READ_AFTER_WRITE


def ids(trace: Trace) -> list[int]:
    return [step.op.id for step in trace.critical_path().steps]


def test_it_follows_the_predecessor_that_ended_last() -> None:
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0),
            op(2, "h2d", 1.0, 4.0),
            op(3, "compute0", 4.0, 5.0),
            op(4, "d2h", 5.0, 6.0),
            op(5, "compute1", 0.0, 5.5),
        ],
        [edge(1, 3), edge(2, 3), edge(3, 4), edge(1, 2, "stream-order")],
    )
    path = trace.critical_path()
    assert [(step.op.id, step.reason, step.wait_s, step.ran_s) for step in path.steps] == [
        (1, None, 0.0, 1.0),
        (2, EdgeReason.STREAM_ORDER, 0.0, 3.0),
        (3, RAW, 0.0, 1.0),
        (4, RAW, 0.0, 1.0),
    ]
    assert (path.length_s, path.busy_s, path.wait_s) == (6.0, 6.0, 0.0)


def test_of_two_that_ended_together_data_is_told() -> None:
    ops = [op(1, "h2d", 0.0, 1.0), op(2, "compute0", 0.0, 1.0), op(3, "compute0", 1.0, 2.0)]
    trace = Trace.of(ops, [edge(2, 3, "stream-order"), edge(1, 3)])
    assert [step.reason for step in trace.critical_path().steps] == [None, RAW]
    assert ids(trace) == [1, 3]


def test_a_copy_comes_after_the_one_that_had_its_engine() -> None:
    # Its start is when it could have begun: the engine is its own from 2.0 on.
    trace = Trace.of([op(1, "h2d", 0.0, 2.0), op(2, "h2d", 0.0, 3.0)])
    path = trace.critical_path()
    assert [(step.op.id, step.ran_s) for step in path.steps] == [(1, 2.0), (2, 1.0)]
    assert path.steps[1].why == "had the h2d engine"
    assert path.busy_s == path.length_s == 3.0


def test_kernels_beside_each_other_wait_for_no_engine() -> None:
    assert ids(Trace.of([op(1, "compute0", 0.0, 2.0), op(2, "compute1", 0.0, 3.0)])) == [2]


def test_a_call_after_an_await_comes_after_what_was_seen() -> None:
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0, seen_s=1.25),
            op(2, "h2d", 2.0, 3.0, submitted_s=1.75, issued_s=1.75),
        ]
    )
    path = trace.critical_path()
    first, second = path.steps
    assert (first.op.id, second.op.id, second.reason, second.wait_s) == (1, 2, None, 1.0)
    assert second.why == (
        "called for once that was seen; 250 ms until the end of op1 on h2d was seen; "
        "500 ms until the call; "
        "waited 250 ms for the device to begin"
    )
    assert (path.length_s, path.busy_s, path.wait_s) == (3.0, 2.0, 1.0)


def test_what_was_seen_at_the_same_time_as_a_later_call_is_no_reason() -> None:
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0),
            op(2, "compute0", 1.0, 1.0, submitted_s=1.0, engine=None),
            op(3, "h2d", 1.0, 2.0, submitted_s=1.0),
        ],
        [edge(2, 3, "allocation")],
    )
    assert ids(trace) == [1, 2, 3]


def test_a_stream_that_was_free_is_no_reason_for_a_late_call() -> None:
    trace = Trace.of(
        [op(1, "h2d", 0.0, 1.0), op(2, "h2d", 3.0, 4.0, submitted_s=2.5)],
        [edge(1, 2, "stream-order")],
    )
    _, step = trace.critical_path().steps
    assert step.reason is None
    assert step.why.startswith("called for once that was seen; 1.50 s until the call")


def test_the_program_goes_on_with_an_end_that_somebody_waited_for() -> None:
    awaited = op(1, "d2h", 0.0, 1.0, is_awaited=True)
    other = op(2, "h2d", 0.0, 1.5)
    trace = Trace.of([awaited, other, op(3, "compute0", 2.0, 3.0, submitted_s=2.0)])
    assert ids(trace) == [1, 3]


def test_what_was_called_for_later_can_not_have_been_awaited() -> None:
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 0.5),
            op(3, "h2d", 1.0, 2.0, submitted_s=1.0),
            op(5, "compute0", 1.0, 1.0, submitted_s=1.0, engine=None),
        ]
    )
    assert ids(trace) == [1, 3]


def test_a_staged_copy_has_its_own_streams() -> None:
    staged = op(3, "h2d", 1.0, 2.0, is_staged=True, begun_s=0.0)
    trace = Trace.of(
        [op(1, "compute0", 0.0, 1.0), op(2, "compute0", 0.0, 1.0), staged],
        [edge(1, 3, "stream-order"), edge(2, 3, "allocation")],
    )
    assert ids(trace) == [2, 3]


def test_it_ends_where_the_device_does_not_where_the_host_does() -> None:
    trace = Trace.of(
        [op(1, "h2d", 0.0, 1.0), op(2, "host", 1.0, 9.0, begun_s=1.0, kind="host")],
        [edge(1, 2, "after")],
    )
    assert ids(trace) == [1]


def test_work_on_the_host_may_be_on_it() -> None:
    trace = Trace.of(
        [
            op(1, "host", 0.0, 2.0, begun_s=0.0, kind="host"),
            op(2, "h2d", 2.5, 3.0, issued_s=2.25, needs=("a host task",)),
        ],
        [edge(1, 2, "host")],
    )
    path = trace.critical_path()
    assert [(step.op.id, step.wait_s) for step in path.steps] == [(1, 0.0), (2, 0.5)]
    assert path.steps[1].why == (
        "host; waited 250 ms for a host task; waited 250 ms for the device to begin"
    )


def test_ops_without_times_are_left_out() -> None:
    trace = Trace.of([op(1, "h2d", None, None), op(2, "d2h", 1.0, 2.0)], [edge(1, 2)])
    assert ids(trace) == [2]
    nothing = Trace.of([op(1, "h2d", None, None)]).critical_path()
    assert (nothing.steps, nothing.length_s, nothing.busy_s) == ((), 0.0, 0.0)
    assert "no op" in str(nothing)


def test_a_circle_in_a_damaged_trace_ends() -> None:
    trace = Trace.of(
        [op(1, "h2d", 0.0, 0.0), op(2, "h2d", 0.0, 0.0)], [edge(1, 2), edge(2, 1, "after")]
    )
    assert len(trace.critical_path().steps) == 2


def test_str_is_a_table() -> None:
    trace = Trace.of([op(1, "h2d", 0.0, 1.0), op(2, "d2h", 1.5, 2.0)], [edge(1, 2)])
    assert str(trace.critical_path()) == (
        "  wait     ran  op          why\n"
        "   0 s  1.00 s  op1 on h2d\n"
        "500 ms  500 ms  op2 on d2h  read-after-write; waited 500 ms for the device to begin\n"
        "length 2.00 s: busy 1.50 s, waiting 500 ms (25%)"
    )


@pytest.mark.parametrize("num", [3000])
def test_a_long_chain_is_no_recursion(num: int) -> None:
    ops = [op(i, "h2d", float(i), float(i + 1)) for i in range(num)]
    trace = Trace.of(ops, [edge(i, i + 1, "stream-order") for i in range(num - 1)])
    assert len(ids(trace)) == num
