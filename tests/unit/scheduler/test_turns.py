"""Readers together, writers alone, first come first served."""

from __future__ import annotations

from streamflow.scheduler.turns import Turn, Turns


def told(turn: Turn) -> list[Turn]:
    heard: list[Turn] = []
    turn.on_granted = lambda: heard.append(turn)
    return heard


def test_readers_go_together_and_a_writer_waits_for_all_of_them() -> None:
    turns = Turns()
    first, second = turns.ask(is_write=False), turns.ask(is_write=False)
    assert first.is_held
    assert second.is_held
    writer = turns.ask(is_write=True)
    heard = told(writer)
    turns.leave(first)
    assert not writer.is_held
    turns.leave(second)
    assert writer.is_held
    assert heard == [writer]


def test_a_reader_does_not_overtake_a_writer_that_waits() -> None:
    turns = Turns()
    first = turns.ask(is_write=False)
    writer, late = turns.ask(is_write=True), turns.ask(is_write=False)
    assert not late.is_held
    turns.leave(first)
    assert writer.is_held
    assert not late.is_held
    turns.leave(writer)
    assert late.is_held


def test_one_who_reads_already_reads_again_at_once() -> None:
    turns = Turns()
    first = turns.ask(is_write=False)
    writer = turns.ask(is_write=True)
    again = turns.ask(is_write=False, is_nested=True)
    assert again.is_held
    turns.leave(first)
    assert not writer.is_held
    turns.leave(again)
    assert writer.is_held


def test_a_waiter_that_leaves_blocks_nobody() -> None:
    turns = Turns()
    first, writer, late = (turns.ask(is_write=write) for write in (False, True, False))
    heard = told(writer)
    turns.leave(writer)
    assert late.is_held
    assert heard == []
    turns.leave(writer)
    turns.leave(first)
    turns.leave(late)
    assert not turns.is_busy


def test_those_who_wait_hear_that_it_is_over_and_those_who_have_a_turn_keep_it() -> None:
    turns = Turns()
    first = turns.ask(is_write=True)
    waiters = [turns.ask(is_write=False), turns.ask(is_write=True)]
    heard = [told(waiter) for waiter in waiters]
    turns.fail(lambda: ValueError("over"))
    assert heard == [[waiter] for waiter in waiters]
    assert all(isinstance(waiter.error, ValueError) for waiter in waiters)
    assert len({id(waiter.error) for waiter in waiters}) == 2
    assert turns.is_busy
    turns.leave(first)
    assert not turns.is_busy


def test_nobody_hears_of_anything_after_silence() -> None:
    turns = Turns()
    first, writer = turns.ask(is_write=True), turns.ask(is_write=True)
    heard = told(writer)
    turns.silence()
    turns.leave(first)
    assert heard == []
