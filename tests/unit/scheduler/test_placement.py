"""Which compute lane a kernel goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamflow.scheduler.placement import (
    LaneLoad,
    Placement,
    PlacementRequest,
    choose_lane,
    least_loaded,
)
from streamflow.scheduler.timeline import Ticket, Timeline


def submit(line: Timeline, num_calls: int = 1) -> Ticket:
    ticket = Ticket(0)
    line.advance(ticket, num_calls, None)
    return ticket


def lanes() -> list[Timeline]:
    return [Timeline(i, name=f"compute{i}") for i in range(3)]


def test_the_first_of_idle_lanes_is_taken() -> None:
    a, b, c = lanes()
    assert least_loaded([a, b, c]) is a


def test_the_lane_with_the_fewest_calls_outstanding_is_taken() -> None:
    a, b, c = lanes()
    submit(a, 3)
    submit(b, 1)
    submit(c, 2)
    assert least_loaded([a, b, c]) is b


def test_completed_calls_are_no_load() -> None:
    a, b, c = lanes()
    for lane in (a, b, c):
        submit(lane)
    submit(b, 9)
    b.retire(2)
    assert least_loaded([a, b, c]) is b


def test_a_kernel_stays_behind_its_input() -> None:
    a, b, c = lanes()
    assert choose_lane([a, b, c], [submit(c)]) is c


def test_a_kernel_leaves_a_lane_where_its_input_is_not_the_tail() -> None:
    a, b, c = lanes()
    write = submit(a)
    submit(a)
    assert choose_lane([a, b, c], [write]) is b


def test_an_input_written_elsewhere_gives_no_affinity() -> None:
    a, b, c = lanes()
    submit(a)
    assert choose_lane([a, b, c], [submit(Timeline(9, name="h2d"))]) is b


def test_a_parked_input_gives_no_affinity() -> None:
    a, b, c = lanes()
    assert choose_lane([a, b, c], [Ticket(1)]) is a


def test_the_first_input_that_is_a_tail_decides() -> None:
    a, b, c = lanes()
    stale = submit(a)
    submit(a)
    assert choose_lane([a, b, c], [stale, submit(c), submit(b)]) is c


def test_a_placement_is_told_the_lanes_and_what_the_op_comes_after() -> None:
    a, b, c = lanes()
    stale = submit(b)
    asked = []

    def choose(request: PlacementRequest) -> int:
        asked.append(request)
        return 2

    inputs = [submit(Timeline(9, name="h2d")), stale, submit(b, 4), submit(c)]
    assert Placement([a, b, c], choose).pick("axpy", "launch", inputs) is c
    assert asked == [
        PlacementRequest(
            name="axpy",
            kind="launch",
            lanes=(LaneLoad("compute0", 0), LaneLoad("compute1", 5), LaneLoad("compute2", 1)),
            inputs=((None, True), (1, False), (1, True), (2, True)),
        )
    ]


def test_any_integer_type_will_do() -> None:
    a, b, c = lanes()
    assert Placement([a, b, c], lambda _: np.int64(1)).pick("op", "fill", ()) is b


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (3, ValueError),
        (-1, ValueError),
        (99, ValueError),
        (None, TypeError),
        (1.0, TypeError),
        ("0", TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_lane_is_refused_and_named(answer: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"the placement of axpy answered {answer!r}: "):
        Placement(lanes(), lambda _: answer).pick("axpy", "launch", ())


def test_what_the_function_raises_is_left_alone() -> None:
    def choose(_: PlacementRequest) -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Placement(lanes(), choose).pick("axpy", "launch", ())
