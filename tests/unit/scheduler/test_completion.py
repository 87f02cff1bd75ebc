"""Where to look for completions, and for how long to spin (R11)."""

from __future__ import annotations

import pytest

from streamflow.scheduler.completion import Completion, count_done, sleep_s
from streamflow.scheduler.timeline import Ticket, Timeline


class FakeEvent:
    def __init__(self, is_done: bool | BaseException) -> None:
        self._is_done = is_done

    @property
    def is_done(self) -> bool:
        if isinstance(self._is_done, BaseException):
            raise self._is_done
        return self._is_done


def submit(line: Timeline, is_done: bool | BaseException = False) -> Ticket:
    ticket = Ticket(0)
    line.advance(ticket, 1, FakeEvent(is_done))
    return ticket


@pytest.fixture
def line() -> Timeline:
    return Timeline(1, name="s")


@pytest.fixture
def completion() -> Completion:
    return Completion(spin_s=0.5)


def test_nothing_wanted_is_idle(completion: Completion, line: Timeline) -> None:
    submit(line)
    assert completion.is_idle
    assert completion.wanted() == completion.heads() == []


def test_the_head_of_a_wanted_timeline_is_looked_at(completion: Completion, line: Timeline) -> None:
    head = submit(line)
    submit(line)
    completion.want(line, 0.0)
    assert not completion.is_idle
    assert completion.wanted() == [line]
    assert completion.heads() == [head]


def test_the_last_want_taken_back_ends_the_looking(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 0.0)
    completion.want(line, 0.0)
    completion.unwant(line)
    assert completion.wanted() == [line]
    completion.unwant(line)
    assert completion.is_idle


def test_clearing_forgets_every_want(completion: Completion, line: Timeline) -> None:
    completion.want(line, 0.0)
    completion.want(line, 0.0)
    completion.clear()
    assert completion.is_idle
    assert line.wants == 0


def test_a_young_head_is_worth_spinning_for(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    assert completion.should_spin(10.4)
    assert not completion.should_spin(10.6)


def test_a_new_want_makes_the_head_young_again(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    completion.want(line, 20.0)
    assert completion.should_spin(20.4)
    assert completion.ages_s(21.0) == [1.0]


def test_a_new_head_is_young(completion: Completion, line: Timeline) -> None:
    submit(line)
    submit(line)
    completion.want(line, 10.0)
    line.retire(1)
    completion.moved(line, 20.0)
    assert completion.should_spin(20.4)


def test_the_youngest_head_decides_whether_to_spin(completion: Completion, line: Timeline) -> None:
    other = Timeline(2, name="t")
    submit(line)
    submit(other)
    completion.want(line, 0.0)
    completion.want(other, 10.0)
    assert completion.should_spin(10.4)


def test_a_timeline_with_nothing_in_flight_is_no_reason_to_spin(
    completion: Completion, line: Timeline
) -> None:
    completion.want(line, 10.0)
    assert not completion.should_spin(10.0)
    assert completion.heads() == []
    assert completion.ages_s(11.0) == []


def test_movement_of_a_timeline_nobody_wants_is_not_noted(
    completion: Completion, line: Timeline
) -> None:
    submit(line)
    completion.moved(line, 0.0)
    assert completion.is_idle


def test_the_sleep_is_bounded_below() -> None:
    assert sleep_s([0.0]) == 50e-6


def test_the_sleep_is_a_small_share_of_the_wait() -> None:
    assert sleep_s([2.0]) == pytest.approx(0.03)


def test_the_youngest_head_decides_the_sleep() -> None:
    assert sleep_s([2.0, 0.0, 5.0]) == 50e-6


def test_nothing_in_flight_makes_no_query(line: Timeline) -> None:
    assert count_done(line) == 0


def test_a_pending_head_takes_one_query(line: Timeline) -> None:
    submit(line, False)
    submit(line, RuntimeError("asked"))
    assert count_done(line) == 0


def test_one_query_of_the_newest_retires_everything(line: Timeline) -> None:
    submit(line, True)
    submit(line, RuntimeError("asked"))
    submit(line, True)
    assert count_done(line) == 3


def test_a_fault_is_raised_as_it_is(line: Timeline) -> None:
    submit(line, RuntimeError("fault"))
    with pytest.raises(RuntimeError, match="fault"):
        count_done(line)
