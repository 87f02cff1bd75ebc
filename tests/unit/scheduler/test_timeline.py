"""Positions, watermarks, clocks and the waits that follow from them (R4)."""

from __future__ import annotations

from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits


def submit(line: Timeline, *after: Ticket, num_calls: int = 1) -> Ticket:
    waits = needed_waits(line, after)
    line.join(waits)
    ticket = Ticket(0)
    line.advance(ticket, num_calls, object())
    return ticket


def lines(num: int) -> list[Timeline]:
    return [Timeline(i, name=f"s{i}") for i in range(num)]


def test_an_op_takes_the_position_of_its_last_driver_call() -> None:
    (line,) = lines(1)
    assert [submit(line, num_calls=n).position for n in (1, 3, 2)] == [1, 4, 6]
    assert line.num_outstanding == 6


def test_retiring_moves_the_watermark_to_the_newest_retired() -> None:
    (line,) = lines(1)
    a, b, c = (submit(line, num_calls=2) for _ in range(3))
    assert line.retire(2) == [a, b]
    assert (line.watermark, line.num_outstanding, list(line.inflight)) == (4, 2, [c])
    assert (a.is_passed, b.is_passed, c.is_passed) == (True, True, False)


def test_retiring_nothing_changes_nothing() -> None:
    (line,) = lines(1)
    submit(line)
    assert line.retire(0) == []
    assert line.watermark == 0


def test_a_stream_orders_its_own_ops_without_waits() -> None:
    (line,) = lines(1)
    assert needed_waits(line, [submit(line)]) == []


def test_an_op_elsewhere_needs_a_wait() -> None:
    a, b = lines(2)
    ticket = submit(a)
    assert needed_waits(b, [ticket]) == [ticket]


def test_what_has_completed_needs_no_wait() -> None:
    a, b = lines(2)
    ticket = submit(a)
    a.retire(1)
    assert needed_waits(b, [ticket]) == []


def test_a_wait_is_issued_once() -> None:
    a, b = lines(2)
    ticket = submit(a)
    submit(b, ticket)
    assert needed_waits(b, [ticket]) == []


def test_waiting_for_an_op_does_not_order_what_is_queued_behind_it() -> None:
    a, b = lines(2)
    first, second = submit(a), submit(a)
    submit(b, first)
    assert needed_waits(b, [second]) == [second]


def test_an_older_op_of_a_stream_is_implied_by_a_newer_one() -> None:
    a, b = lines(2)
    old, new = submit(a), submit(a)
    assert needed_waits(b, [old, new]) == [new]
    assert needed_waits(b, [new, old]) == [new]


def test_what_a_ticket_had_seen_is_implied_by_waiting_for_it() -> None:
    a, b, c = lines(3)
    first = submit(a)
    second = submit(b, first)
    assert needed_waits(c, [first, second]) == [second]
    assert needed_waits(c, [second, first]) == [second]
    submit(c, second)
    assert needed_waits(c, [first]) == []


def test_a_ticket_holds_what_its_stream_had_seen_at_its_position_only() -> None:
    a, b, c = lines(3)
    early = submit(b)
    first = submit(a)
    submit(b, first)  # b sees a only after `early`
    assert needed_waits(c, [first, early]) == [first, early]


def test_one_newcomer_may_imply_several_tickets() -> None:
    a, b, c, d = lines(4)
    first, second = submit(a), submit(b)
    third = submit(c, first, second)
    assert needed_waits(d, [first, second, third]) == [third]


def test_the_same_ticket_twice_is_waited_for_once() -> None:
    a, b = lines(2)
    ticket = submit(a)
    assert needed_waits(b, [ticket, ticket]) == [ticket]


def test_joining_leaves_out_what_has_completed() -> None:
    a, b, c = lines(3)
    submit(c, submit(a))
    a.retire(1)
    submit(c, submit(b))
    assert set(c.clock) == {b}


def test_joining_makes_a_new_clock() -> None:
    a, b = lines(2)
    ticket = submit(b, submit(a))
    seen = dict(ticket.seen)
    submit(b, submit(a))
    assert dict(ticket.seen) == seen != dict(b.clock)


def test_joining_a_ticket_that_had_seen_oneself_adds_nothing() -> None:
    a, b = lines(2)
    back = submit(b, submit(a))
    a.join([back])
    assert a.clock == {b: back.position}


def test_a_parked_ticket_is_neither_passed_nor_failed() -> None:
    ticket = Ticket(1)
    assert ticket.is_parked
    assert not ticket.is_passed
    assert repr(ticket) == "<Ticket #1 parked>"


def test_a_ticket_that_failed_before_submission_is_not_parked() -> None:
    ticket = Ticket(1)
    assert ticket.is_parked
    assert repr(ticket) == "<Ticket #1 parked>"
    ticket.failure, ticket.inherited = RuntimeError(), ()
    assert not ticket.is_parked
    assert repr(ticket) == "<Ticket #1 never submitted>"


def test_forgetting_drops_the_op_its_event_and_its_clock() -> None:
    a, b = lines(2)
    ticket = submit(b, submit(a))
    ticket.op = object()
    ticket.forget()
    assert (ticket.op, ticket.event, dict(ticket.seen)) == (None, None, {})
    assert ticket.position
