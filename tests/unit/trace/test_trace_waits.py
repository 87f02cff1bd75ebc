from __future__ import annotations

import pytest
from traces_by_hand import edge, op

from streamflow.trace import Trace, TracedEdge, TracedOp
from streamflow.trace.sentences import Sentence


def told(ops: list[TracedOp], edges: list[TracedEdge], which: int) -> list[str]:
    return [wait.text for wait in Trace.of(ops, edges).explain(which).waits]


def test_an_op_waits_for_what_ended_last_before_it() -> None:
    ops = [op(1, "compute0", 0.0, 1.0), op(2, "h2d", 0.0, 2.0), op(3, "compute0", 2.0, 3.0)]
    edges = [edge(1, 3, "write-after-read"), edge(2, 3)]
    assert told(ops, edges, 3) == ["waited 2.00 s for op2 on h2d: read after write"]


@pytest.mark.parametrize("order", [1, -1])
def test_data_says_more_than_the_order_of_a_stream(order: int) -> None:
    ops = [op(1, "compute0", 0.0, 1.0), op(2, "h2d", 0.0, 1.0), op(3, "compute0", 1.0, 2.0)]
    both = [edge(1, 3, "stream-order"), edge(2, 3)]
    assert told(ops, both[::order], 3) == ["waited 1.00 s for op2 on h2d: read after write"]


def test_a_copy_engine_may_take_a_moment_to_change_over() -> None:
    ops = [
        op(1, "a", 0.0, 1.0, engine="d2h"),
        op(2, "b", 1.25, 2.0, engine="d2h"),
    ]
    assert told(ops, [], 2) == [
        "waited 1.00 s for the d2h engine, which op1 on a had",
        "waited 250 ms for the device to begin",
    ]


def test_kernels_that_run_beside_each_other_do_not_wait_for_each_other() -> None:
    ops = [op(1, "compute0", 0.0, 1.0), op(2, "compute1", 1.0, 2.0)]
    assert told(ops, [], 2) == ["waited 1.00 s for the device to begin"]


def test_what_made_room_is_the_cause_of_parking() -> None:
    ops = [
        op(1, "compute0", 0.0, 1.0),
        op(2, "h2d", 1.0, 2.0, issued_s=1.0, needs=("room in the window",)),
    ]
    assert told(ops, [edge(1, 2, "capacity")], 2) == [
        "waited 1.00 s for room, which the end of op1 on compute0 made"
    ]


def test_the_program_of_another_process_did_not_see_it() -> None:
    late = op(3, "h2d", 2.0, 3.0, submitted_s=2.0)
    ops = [op(1, "h2d", 0.0, 1.0), op(2, "d2h", 0.0, 2.0, process=1), late]
    lines = Trace.of(ops).explain(3).lines
    assert "  called 1.00 s after all that it comes after had ended" in lines
    assert "  called 1.00 s after the program saw the end of op1 on h2d" in lines


def test_what_the_program_saw_before_the_last_end_did_not_make_it_late() -> None:
    ops = [
        op(1, "d2h", 0.0, 1.0),
        op(2, "h2d", 0.0, 2.0, seen_s=4.0),
        op(3, "h2d", 3.0, 4.0, submitted_s=3.0),
    ]
    assert "saw the end" not in str(Trace.of(ops).explain(3))


def test_a_sentence_keeps_braces_that_are_not_its_own() -> None:
    need = "the limit of scope {op} {length} {}"
    assert told([op(1, "h2d", 1.0, 2.0, issued_s=1.0, needs=(need,))], [], 1) == [
        f"waited 1.00 s for {need}"
    ]
    odd = op(1, "h2d", 0.0, 1.0, name="{array} {length}")
    words = str(Sentence("{length} of {op} on {array}", 1.0, odd, "{op}"))
    assert words == "1.00 s of {array} {length} on h2d on {op}"
