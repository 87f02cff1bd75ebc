from __future__ import annotations

from traces_by_hand import edge, op

from streamflow.trace import Trace, overlap
from streamflow.trace.gaps import Gap, gap_in_words, idle_gaps
from streamflow.trace.index import Index
from streamflow.trace.lanes import lane_of


def why(index: Index, gap: Gap) -> str:
    return gap_in_words(index, gap.op, gap.before)


def test_gaps_lie_between_ops_of_one_engine() -> None:
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0),
            op(2, "h2d", 1.5, 2.0, submitted_s=1.25, issued_s=1.25),
            op(3, "compute0", 0.0, 4.0),
            op(4, "compute1", 1.0, 2.0),
            op(5, "compute1", 5.0, 6.0),
        ],
        [edge(3, 5, "after")],
    )
    index = Index(trace)
    first, second = idle_gaps(index)
    assert (first.place, first.start_s, first.end_s, first.op.id) == (
        (0, 0, "compute"),
        4.0,
        5.0,
        5,
    )
    assert why(index, first) == "waited 1.00 s for the device to begin"
    assert (second.place, second.start_s, second.end_s, second.op.id) == (
        (0, 0, "h2d"),
        1.0,
        1.5,
        2,
    )
    assert why(index, second) == "250 ms until the call; waited 250 ms for the device to begin"


def test_devices_and_processes_have_engines_of_their_own() -> None:
    trace = Trace.of([op(1, "h2d", 0.0, 1.0), op(2, "h2d", 2.0, 3.0, process=1)])
    assert idle_gaps(Index(trace)) == ()
    assert overlap(trace).busy_s == {"process0:gpu0:h2d": 1.0, "process1:gpu0:h2d": 1.0}


def test_work_on_the_host_is_no_part_of_the_span_of_a_device() -> None:
    trace = Trace.of([op(1, "compute0", 0.0, 1.0), op(2, "host", 1.0, 9.0, device=1)])
    assert overlap(trace).span_s == 1.0
    assert overlap(trace).busy_s == {"compute": 1.0}


def test_a_wait_that_began_before_the_gap_is_told_for_the_gap_only() -> None:
    # The copy's end was on the device before its op was on its lane: others were parked behind it.
    ops = [
        op(1, "compute0", 0.0, 3.0),
        op(2, "h2d", 1.0, 2.0, is_staged=True, begun_s=0.0, issued_s=3.5),
        op(3, "compute0", 3.5, 4.0, issued_s=3.5),
    ]
    index = Index(Trace.of(ops, [edge(2, 3)]))
    (gap,) = idle_gaps(index)
    expected = "waited 500 ms for op2 on h2d to be submitted: read after write"
    assert why(index, gap) == expected


def test_lanes_have_gaps_of_their_own() -> None:
    ops = [
        op(1, "compute0", 0.0, 1.0),
        op(2, "compute0", 0.5, 3.0),  # overlaps
        op(3, "compute0", 3.0, 4.0),  # follows at once
        op(4, "compute0", 6.0, 7.0),
        op(5, "compute0", 4.5, 4.5, engine=None),  # an allocation keeps no lane busy
        op(6, "compute1", 0.0, 7.0),
        op(7, "host", 0.0, 1.0),
        op(8, "host", 2.0, 3.0),
    ]
    index = Index(Trace.of(ops))
    assert idle_gaps(index) == ()
    (gap,) = idle_gaps(index, lane_of)
    assert (gap.place, gap.start_s, gap.end_s) == ((0, 0, "compute0"), 4.0, 6.0)


def test_a_gap_before_a_late_call_says_whose_end_the_program_saw() -> None:
    ops = [
        op(1, "d2h", 0.0, 3.0, seen_s=3.5),
        op(2, "h2d", 0.0, 1.0),
        op(3, "h2d", 4.0, 5.0, submitted_s=4.0),
    ]
    index = Index(Trace.of(ops))
    (gap,) = idle_gaps(index)
    assert why(index, gap) == "2.50 s until the end of op1 on d2h was seen; 500 ms until the call"


def test_a_gap_says_what_the_op_that_was_waited_for_had_waited_for() -> None:
    ops = [
        op(1, "compute0", 0.0, 1.0),
        op(2, "h2d", 0.5, 4.0),
        op(3, "h2d", 4.0, 5.0),
        op(4, "compute0", 5.5, 6.0),
    ]
    index = Index(Trace.of(ops, [edge(3, 4), edge(2, 3, "stream-order")]))
    (gap,) = idle_gaps(index, lane_of)
    assert why(index, gap).split("; ") == [
        "waited 4.00 s for op3 on h2d: read after write",
        "that one waited 3.00 s for op2 on h2d: stream order",
        "waited 500 ms for the device to begin",
    ]
