"""Where to look for completions, how closely, and for how long to spin (R11)."""

from __future__ import annotations

import pytest

from streamflow.scheduler.completion import Completion, Head, Looks
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


def take(completion: Completion, line: Timeline, *ends_s: float) -> None:
    """Let one head after the other end at these times, with another one behind it."""
    for end_s in ends_s:
        submit(line)
        line.retire(1)
        completion.moved(line, end_s)


# -- who wants what ----------------------------------------------------------------------------


def test_nothing_wanted_is_idle(completion: Completion, line: Timeline) -> None:
    submit(line)
    assert completion.is_idle
    assert completion.wanted() == completion.heads() == []
    assert not completion.done()
    assert completion.num_queries == 0


def test_the_head_of_a_wanted_timeline_is_looked_at(completion: Completion, line: Timeline) -> None:
    head = submit(line)
    submit(line)
    completion.want(line, 0.0)
    assert not completion.is_idle
    assert completion.wanted() == [line]
    assert [head.event for head in completion.heads()] == [head.event]


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


def test_a_turn_asks_each_wanted_head_once(completion: Completion, line: Timeline) -> None:
    for each in (line, Timeline(2), Timeline(3)):
        submit(each, False)
        submit(each, RuntimeError("asked"))
        completion.want(each, 0.0)
    completion.want(Timeline(4), 0.0)  # nothing is in flight there
    assert not completion.done()
    assert completion.num_queries == 3


def test_a_done_head_is_found_and_a_fault_is_raised(completion: Completion, line: Timeline) -> None:
    submit(line, True)
    completion.want(line, 0.0)
    assert completion.done() == [line]
    other = Timeline(2)
    submit(other, RuntimeError("fault"))
    completion.unwant(line)
    completion.want(other, 0.0)
    with pytest.raises(RuntimeError, match="fault"):
        completion.done()


# -- spinning ----------------------------------------------------------------------------------


def test_a_young_head_is_worth_spinning_for(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    assert completion.should_spin(10.4)
    assert not completion.should_spin(10.6)


def test_a_wanted_head_is_young_again(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    completion.want(line, 20.0)
    assert completion.should_spin(20.4)


def test_a_want_behind_a_watched_head_leaves_its_age(
    completion: Completion, line: Timeline
) -> None:
    submit(line)
    completion.want(line, 10.0)
    submit(line)
    completion.want(line, 20.0)
    assert not completion.should_spin(20.0)
    assert [head.since_s for head in completion.heads()] == [10.0]


def test_a_new_head_is_young(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    take(completion, line, 20.0)
    assert completion.should_spin(20.4)


def test_a_head_after_two_long_ones_gets_a_glance(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    take(completion, line, 20.0, 30.0)
    assert completion.should_spin(30.05)
    assert not completion.should_spin(30.1)


def test_a_short_head_earns_its_follower_the_spin(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 10.0)
    take(completion, line, 20.0, 30.0, 30.2)
    assert completion.should_spin(30.6)


def test_ops_that_are_seen_together_took_their_share(
    completion: Completion, line: Timeline
) -> None:
    """Three of 0.3 each, seen in one look, are not one that took longer than the bound."""
    submit(line)
    completion.want(line, 10.0)
    take(completion, line, 20.0)
    completion.moved(line, 20.9, 3)
    assert completion.should_spin(21.3)


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


def test_movement_of_a_timeline_nobody_wants_is_not_noted(
    completion: Completion, line: Timeline
) -> None:
    submit(line)
    completion.moved(line, 0.0)
    assert completion.is_idle


# -- the helper's naps -------------------------------------------------------------------------


def head(since_s: float = 0.0, before_s: float = 0.0, is_steady: bool = False) -> Head:
    return Head(FakeEvent(False), since_s, before_s, is_steady)


def test_the_nap_is_bounded_below() -> None:
    assert head().nap_s(0.0) == 50e-6


def test_the_nap_is_a_small_share_of_the_wait() -> None:
    assert head().nap_s(2.0) == pytest.approx(0.03)


def test_after_a_long_head_the_nap_is_a_share_of_that() -> None:
    assert head(before_s=10.0).nap_s(5.0) == pytest.approx(0.15)


def test_a_shorter_head_is_seen_a_quarter_late_at_most() -> None:
    assert head(before_s=10.0).nap_s(0.04) == pytest.approx(0.01)
    assert head(before_s=10.0, is_steady=True).nap_s(0.04) == pytest.approx(0.01)


def test_after_two_equal_heads_the_naps_grow_until_the_third_is_nearly_due() -> None:
    steady = head(before_s=10.0, is_steady=True)
    assert steady.nap_s(4.0) == pytest.approx(1.0)
    assert steady.nap_s(8.5) == pytest.approx(0.5)
    assert steady.nap_s(9.5) == pytest.approx(0.15)
    assert steady.nap_s(20.0) == pytest.approx(0.3)


def test_two_equal_heads_make_a_stream_steady(completion: Completion, line: Timeline) -> None:
    submit(line)
    completion.want(line, 0.0)
    take(completion, line, 10.0)
    assert not completion.heads()[0].is_steady
    take(completion, line, 20.5)
    assert completion.heads()[0].is_steady
    assert completion.heads()[0].before_s == 10.5
    take(completion, line, 25.0)
    assert not completion.heads()[0].is_steady


def test_the_youngest_head_decides_the_sleep() -> None:
    assert Looks([head(-2.0), head(0.0), head(-5.0)], 0.0).sleep_s(0.0) == 50e-6


def test_without_heads_the_sleep_is_the_shortest() -> None:
    assert Looks([], 0.0).sleep_s(7.0) == 50e-6


def test_an_old_head_is_not_asked_at_a_young_ones_pace() -> None:
    old, young = head(-10.0), head(0.0)
    looks = Looks([old, young], 0.0)
    assert looks.due(60e-6) == [young]
    assert looks.due(120e-6) == [young]
    assert looks.due(0.2) == [old, young]


def test_heads_almost_due_come_along() -> None:
    first, second = head(-2.0), head(-2.2)  # due after 30 and 33 ms
    looks = Looks([first, second], 0.0)
    assert looks.due(0.03) == [first, second]
    assert looks.sleep_s(0.03) > 0.029


# -- counting what is done ---------------------------------------------------------------------


def test_nothing_in_flight_makes_no_query(completion: Completion, line: Timeline) -> None:
    assert completion.count_done(line) == 0
    assert completion.num_queries == 0


def test_a_pending_head_takes_one_query(completion: Completion, line: Timeline) -> None:
    submit(line, False)
    submit(line, RuntimeError("asked"))
    assert completion.count_done(line) == 0
    assert completion.num_queries == 1


def test_one_query_of_the_newest_retires_everything(completion: Completion, line: Timeline) -> None:
    submit(line, True)
    submit(line, RuntimeError("asked"))
    submit(line, True)
    assert completion.count_done(line) == 3
    assert completion.num_queries == 2


def test_a_fault_is_raised_as_it_is(completion: Completion, line: Timeline) -> None:
    submit(line, RuntimeError("fault"))
    with pytest.raises(RuntimeError, match="fault"):
        completion.count_done(line)
