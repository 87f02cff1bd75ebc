from __future__ import annotations

from traces_by_hand import edge, op

from streamflow.trace import Trace, overlap
from streamflow.trace.gaps import idle_gaps


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
    first, second = idle_gaps(trace)
    assert (first.engine, first.start_s, first.end_s, first.op.id) == ("compute", 4.0, 5.0, 5)
    assert first.why == "waited 1.00 s for the device to begin"
    assert (second.engine, second.start_s, second.end_s, second.op.id) == ("h2d", 1.0, 1.5, 2)
    assert second.why == "250 ms until the call; waited 250 ms for the device to begin"


def test_devices_and_processes_have_engines_of_their_own() -> None:
    trace = Trace.of([op(1, "h2d", 0.0, 1.0), op(2, "h2d", 2.0, 3.0, process=1)])
    assert idle_gaps(trace) == ()
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
    (gap,) = idle_gaps(Trace.of(ops, [edge(2, 3)]))
    assert gap.why == ("waited 500 ms for op2 on h2d to be submitted: read after write")
