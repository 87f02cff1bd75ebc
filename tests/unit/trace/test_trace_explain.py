from __future__ import annotations

from traces_by_hand import edge, op

from streamflow.trace import Trace


def test_what_made_room_does_not_make_a_call_timely() -> None:
    trace = Trace.of(
        [
            op(1, "compute0", 0.0, 1.0),
            op(2, "compute0", None, None),
            op(3, "h2d", 3.0, 4.0, submitted_s=3.0),
        ],
        [edge(1, 3), edge(2, 3, "capacity")],
    )
    assert trace.explain(3).late_s == 2.0


def test_an_allocation_of_the_same_call_does_not_make_it_timely() -> None:
    called = {"submitted_s": 3.0}
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0),
            op(2, "compute0", 0.0, 3.0),
            op(3, "h2d", 3.0, 3.0, engine=None, **called),
            op(4, "h2d", 3.0, 4.0, **called),
        ],
        [edge(1, 3, "stream-order"), edge(3, 4, "allocation")],
    )
    told = trace.explain(4)
    assert told.late_s == trace.explain(3).late_s == 2.0
    assert "  called 0 s after the program saw the end of op2 on compute0" in told.lines


def test_an_allocation_called_for_before_is_one_to_come_after() -> None:
    trace = Trace.of(
        [op(1, "h2d", 1.0, 1.0, engine=None, submitted_s=1.0), op(2, "h2d", 3, 4, submitted_s=3.0)],
        [edge(1, 2, "allocation")],
    )
    assert trace.explain(2).late_s == 2.0


def test_the_order_of_a_lane_does_not_park_a_staged_copy() -> None:
    staged = op(2, "h2d", 3.0, 4.0, is_staged=True, begun_s=2.0, issued_s=3.5)
    trace = Trace.of(
        [op(1, "h2d", 0.0, 0.5, issued_s=1.0, seen_s=1.5), staged],
        [edge(1, 2, "stream-order")],
    )
    assert [wait.kind.value for wait in trace.explain(2).waits] == ["need", "staging"]


def test_of_two_that_were_seen_at_once_the_last_to_end_is_told() -> None:
    # It had to be seen that nothing uses the array any more: the copy before had ended long ago.
    trace = Trace.of(
        [
            op(1, "h2d", 0.0, 1.0, seen_s=3.0),
            op(2, "compute0", 1.0, 3.0, seen_s=3.0),
            op(3, "h2d", 3.0, 4.0, is_staged=True, begun_s=3.0, issued_s=3.5),
        ],
        [edge(1, 3, "write-after-write"), edge(2, 3, "write-after-read")],
    )
    assert [(wait.src and wait.src.id, wait.length_s) for wait in trace.explain(3).waits] == [
        (2, 3.0)
    ]


def test_staged_copies_that_take_turns_share_the_engine() -> None:
    ops = [op(n, "d2h", 0.0, 1.0 + n, is_staged=True, begun_s=0.0, nbytes=10**9) for n in range(2)]
    lines = str(Trace.of(ops).explain(1))
    assert "shared the d2h engine with op0 on d2h for 1.00 s of this" in lines
    assert "GB/s" not in lines  # what it would have been alone is not known


def test_a_finished_op_without_times_says_so() -> None:
    told = Trace.of([op(1, "h2d", None, None, state="done", seen_s=2.0)]).explain("op1")
    assert str(told).endswith("its times are not known")
    assert told.waits == ()


def test_where_it_was_and_how_fast() -> None:
    copy = op(1, "h2d", 0.5, 1.5, nbytes=2 * 10**9, scope="epoch", task="loader", seen_s=1.75)
    assert str(Trace.of([copy]).explain(1)) == (
        "op1 on h2d (put, 1.86 GiB): done\n"
        "  called for 0 s into the trace at prog.py:1 in scope epoch by task loader\n"
        "  waited 500 ms for the device to begin\n"
        "  ran 1.00 s on h2d (2 GB/s)\n"
        "  seen to have ended 250 ms later"
    )
