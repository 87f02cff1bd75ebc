"""What ops waited for, and the gaps of lanes."""

from __future__ import annotations

from typing import Any

from streamflow.trace.idle import Gap, Wait, gaps, waits
from streamflow.trace.model import EdgeReason, TracedEdge, TracedOp


def op(number: int, start_s: float | None, end_s: float | None, **others: Any) -> TracedOp:
    known: dict[str, Any] = {
        "kind": "launch",
        "name": f"op {number}",
        "stream": "compute0",
        "engine": "compute",
        "device": 0,
        "nbytes": 0,
        "submitted_s": 0.0,
        "state": "done",
        "where": None,
        "issued_s": 0.0,
    }
    return TracedOp(id=number, start_s=start_s, end_s=end_s, **{**known, **others})


def edge(src: int, dst: int, reason: EdgeReason = EdgeReason.READ_AFTER_WRITE) -> TracedEdge:
    return TracedEdge(src, dst, reason, issued=True)


def test_an_op_waits_for_what_ended_last_before_it() -> None:
    ops = [op(1, 0.0, 1.0), op(2, 0.0, 2.0, stream="h2d", engine="h2d"), op(3, 2.0, 3.0)]
    found = waits(ops, [edge(1, 3, EdgeReason.WRITE_AFTER_READ), edge(2, 3)])
    assert found[3] == Wait("read-after-write", 2)


def test_data_says_more_than_the_order_of_a_stream() -> None:
    ops = [op(1, 0.0, 1.0), op(2, 0.0, 1.0, stream="h2d", engine="h2d"), op(3, 1.0, 2.0)]
    both = [edge(1, 3, EdgeReason.STREAM_ORDER), edge(2, 3)]
    assert waits(ops, both)[3] == waits(ops, both[::-1])[3] == Wait("read-after-write", 2)


def test_an_op_called_for_late_waited_for_the_program() -> None:
    ops = [op(1, 0.0, 1.0, seen_s=1.5), op(2, 4.0, 5.0, submitted_s=4.0, issued_s=4.0)]
    assert waits(ops, [edge(1, 2)])[2] == Wait("nothing was submitted")


def test_a_program_that_goes_on_at_an_end_waited_for_it() -> None:
    ops = [op(1, 0.0, 1.0, seen_s=1.00005), op(2, 1.0001, 2.0, submitted_s=1.0001, issued_s=1.0001)]
    assert waits(ops, [])[2] == Wait("nothing was submitted until {} ended", 1)


def test_what_it_needed_on_the_host_is_named() -> None:
    ops = [op(1, 2.0, 3.0, issued_s=2.0, needs=("pinned memory",))]
    assert waits(ops, [])[1] == Wait("on the host: pinned memory")
    staged = [op(1, 2.0, 3.0, issued_s=2.0, begun_s=0.0)]
    assert waits(staged, [])[1] == Wait("on the host: staging")


def test_an_allocation_is_passed_over() -> None:
    nothing = {"engine": None, "kind": "empty", "stream": "h2d"}
    ops = [
        op(1, 0.0, 1.0, seen_s=1.0),
        op(2, 1.0, 1.0, submitted_s=1.0, issued_s=1.0, **nothing),
        op(3, 1.0, 2.0, submitted_s=1.0, issued_s=1.0),
    ]
    found = waits(ops, [edge(2, 3, EdgeReason.ALLOCATION)])
    assert found[3] == found[2] == Wait("nothing was submitted until {} ended", 1)


def test_another_stream_that_left_the_engine_then_is_the_cause() -> None:
    copies = {"engine": "h2d"}
    ops = [op(1, 0.0, 1.0, stream="a", **copies), op(2, 1.0, 2.0, stream="b", **copies)]
    assert waits(ops, [])[2] == Wait("engine busy", 1)


def test_a_copy_engine_may_take_a_moment_to_change_over() -> None:
    copies = {"engine": "d2h"}
    ops = [op(1, 0.0, 1.0, stream="a", **copies), op(2, 1.00001, 2.0, stream="b", **copies)]
    assert waits(ops, [])[2] == Wait("engine busy", 1)


def test_kernels_that_run_beside_each_other_do_not_wait_for_each_other() -> None:
    ops = [op(1, 0.0, 1.0), op(2, 1.00001, 2.0, stream="compute1")]
    assert waits(ops, [])[2] == Wait("the device was late to begin")


def test_what_made_room_is_the_cause_of_parking() -> None:
    ops = [
        op(1, 0.0, 1.0, seen_s=1.0),
        op(2, 1.2, 2.0, issued_s=1.1, needs=("room in the window",)),
    ]
    assert waits(ops, [edge(1, 2, EdgeReason.CAPACITY)])[2] == Wait("capacity", 1)


def test_the_program_of_another_process_did_not_see_it() -> None:
    ops = [
        op(1, 0.0, 1.0, seen_s=1.0),
        op(2, 1.0, 2.0, submitted_s=1.0, issued_s=1.0, process=1),
    ]
    assert waits(ops, [])[2] == Wait("nothing was submitted")


def test_an_op_without_times_has_no_wait() -> None:
    assert waits([op(1, None, None)], []) == {}


def test_gaps_lie_between_ops_of_a_lane_on_an_engine() -> None:
    ops = [
        op(1, 0.0, 1.0),
        op(2, 0.5, 3.0),  # overlaps
        op(3, 3.0, 4.0),  # follows at once
        op(4, 6.0, 7.0),
        op(5, 4.5, 4.5, engine=None),  # an allocation keeps no lane busy
        op(6, 0.0, 1.0, device=1),
        op(7, 2.0, 3.0, device=1),
        op(8, 0.0, 1.0, stream="host", engine=None),
        op(9, 2.0, 3.0, stream="host", engine=None),
    ]
    wait = (Wait("the device was late to begin"),)
    assert gaps(ops, waits(ops, [])) == [
        Gap((0, 0, "compute0"), 4.0, 6.0, 4, wait),
        Gap((0, 1, "compute0"), 1.0, 2.0, 7, wait),
    ]


def test_of_staging_and_a_late_call_a_gap_names_the_longer() -> None:
    ops = [
        op(1, 0.0, 1.0),
        op(2, 5.0, 6.0, submitted_s=4.0, begun_s=4.0, issued_s=5.0),
        op(3, 10.0, 11.0, submitted_s=7.0, begun_s=7.0, issued_s=10.0),
    ]
    late, staged = gaps(ops, waits(ops, []))
    assert late.waits == (Wait("nothing was submitted"),)
    assert staged.waits == (Wait("on the host: staging"),)


def test_the_causes_of_a_gap_go_back_as_far_as_it_goes() -> None:
    copy = {"stream": "h2d", "engine": "h2d", "kind": "put"}
    ops = [
        op(1, 0.0, 1.0),
        op(2, 0.5, 4.0, **copy),
        op(3, 4.0, 5.0, **copy),
        op(4, 5.0, 6.0),
    ]
    edges = [edge(3, 4), edge(2, 3, EdgeReason.STREAM_ORDER)]
    (gap,) = gaps(ops, waits(ops, edges))
    assert gap.waits == (Wait("read-after-write", 3), Wait("stream-order", 2))
