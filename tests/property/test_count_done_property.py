"""``count_done`` finds the done prefix of a stream in O(log n) queries."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamflow.scheduler.completion import Completion
from streamflow.scheduler.timeline import Ticket, Timeline


class FakeEvent:
    def __init__(self, is_done: bool, asked: list[FakeEvent]) -> None:
        self._is_done = is_done
        self._asked = asked

    @property
    def is_done(self) -> bool:
        self._asked.append(self)
        return self._is_done


def make(num: int, num_done: int) -> tuple[Timeline, list[FakeEvent]]:
    line = Timeline(1, name="s")
    asked: list[FakeEvent] = []
    for i in range(num):
        line.advance(Ticket(i), 2, FakeEvent(i < num_done, asked))
    return line, asked


def num_queries_max(num: int) -> int:
    """The head, the newest, a gallop up and a bisection down."""
    return 2 + 2 * ceil(log2(max(num, 1)) + 1)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(num=st.integers(0, 600), data=st.data())
def test_the_count_is_right_for_any_prefix(num: int, data: st.DataObject) -> None:
    num_done = data.draw(st.integers(0, num))
    line, _ = make(num, num_done)
    assert Completion(0.0).count_done(line) == num_done
    assert len(line.inflight) == num  # asking retires nothing


@settings(deadline=None, max_examples=300, derandomize=True)
@given(num=st.integers(1, 4096), data=st.data())
def test_the_number_of_queries_is_logarithmic(num: int, data: st.DataObject) -> None:
    num_done = data.draw(st.integers(0, num))
    line, asked = make(num, num_done)
    completion = Completion(0.0)
    completion.count_done(line)
    assert completion.num_queries == len(asked) <= num_queries_max(num)
    assert len(set(asked)) == len(asked)  # never the same event twice


@pytest.mark.parametrize("num", [1, 2, 64, 512])
def test_every_prefix_of_a_full_window_takes_few_queries(num: int) -> None:
    for num_done in range(num + 1):
        line, asked = make(num, num_done)
        assert Completion(0.0).count_done(line) == num_done
        assert len(asked) <= num_queries_max(num)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(num=st.integers(2, 600), few=st.integers(1, 8))
@example(num=600, few=1)
def test_a_few_done_at_the_old_end_take_few_queries_however_long_the_queue(
    num: int, few: int
) -> None:
    line, asked = make(num, min(few, num - 1))
    Completion(0.0).count_done(line)
    assert len(asked) <= 2 + 2 * ceil(log2(few) + 1)
