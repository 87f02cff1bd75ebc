"""The states of a SyncedArray: every cell of the table, and what a copy's end may change."""

from __future__ import annotations

from itertools import product

import pytest

from streamflow.scheduler.synced_table import TABLE, Asked, Heads, Side, Step, SyncedState

UNINIT, CPU, GPU, SYNCED, POISONED = SyncedState

# The table as it is specified, in words of its own: a row per op, a cell per state.
SPECIFIED = """
READ_HOST        | zeros>CPU  | CPU         | D2H>SYNCED  | SYNCED | raise
READ_DEVICE      | zeros>GPU  | H2D>SYNCED  | GPU         | SYNCED | raise
WRITE_HOST       | zeros>CPU  | CPU         | D2H>CPU     | CPU    | raise
WRITE_DEVICE     | zeros>GPU  | H2D>GPU     | GPU         | GPU    | raise
WRITE_ALL_HOST   | CPU        | CPU         | CPU         | CPU    | CPU
WRITE_ALL_DEVICE | GPU        | GPU         | GPU         | GPU    | GPU
ADOPT_HOST       | CPU        | CPU         | refuse>GPU  | CPU    | CPU
ADOPT_DEVICE     | GPU        | refuse>CPU  | GPU         | GPU    | GPU
PUSH             | refuse>UN  | H2D>SYNCED  | GPU         | SYNCED | raise
PULL             | refuse>UN  | CPU         | D2H>SYNCED  | SYNCED | raise
DISCARD          | UN         | UN          | UN          | UN     | UN
"""
STATES = {"UN": UNINIT, "CPU": CPU, "GPU": GPU, "SYNCED": SYNCED}
STEPS = {"zeros": Step.ZEROS, "D2H": Step.COPY, "H2D": Step.COPY, "refuse": Step.REFUSE}
CELLS = [
    (Asked[row[0].strip()], state, text.strip())
    for row in (line.split("|") for line in SPECIFIED.strip().splitlines())
    for state, text in zip(SyncedState, row[1:], strict=True)
]


@pytest.mark.parametrize(
    ("asked", "state", "text"),
    CELLS,
    ids=[f"{asked.name}-{state.name}" for asked, state, _ in CELLS],
)
def test_cell(asked: Asked, state: SyncedState, text: str) -> None:
    cell = TABLE[asked][state]
    if text == "raise":
        assert (cell.step, cell.then) == (Step.RAISE, POISONED)
        return
    step, _, then = text.rpartition(">")
    assert cell.step is STEPS.get(step, Step.NOTHING)
    assert cell.then is STATES[then]


def test_the_table_is_whole() -> None:
    assert {(asked, state) for asked, state, _ in CELLS} == set(product(Asked, SyncedState))
    assert all(set(row) == set(SyncedState) for row in TABLE.values())


def test_a_copy_goes_to_the_side_that_was_asked_for_from_the_other() -> None:
    for asked, state in product(Asked, SyncedState):
        if TABLE[asked][state].step is Step.COPY:
            side = Side.CPU if asked.name in ("READ_HOST", "WRITE_HOST", "PULL") else Side.GPU
            assert state is side.other.head


def heads(state: SyncedState) -> Heads:
    made = Heads()
    made.settle(state, ValueError("poison") if state is POISONED else None)
    return made


@pytest.mark.parametrize("side", Side)
def test_synced_only_when_the_copy_has_ended_well(side: Side) -> None:
    made = heads(side.other.head)
    made.begin_copy("copy")
    assert made.state is side.other.head
    assert made.copy == "copy"
    assert made.end_copy("copy", is_well=True)
    assert (made.state, made.copy) == (SYNCED, None)


@pytest.mark.parametrize("side", Side)
def test_a_copy_that_failed_changes_nothing(side: Side) -> None:
    made = heads(side.other.head)
    made.begin_copy("copy")
    assert not made.end_copy("copy", is_well=False)
    assert (made.state, made.copy) == (side.other.head, None)


@pytest.mark.parametrize("side", Side)
def test_a_copy_of_an_older_version_changes_nothing(side: Side) -> None:
    for change in (
        lambda made: made.settle(UNINIT),
        lambda made: made.begin_write(side),
        lambda made: (made.begin_write(side.other), made.end_write(side.other)),
        lambda made: (made.begin_write(side), made.end_write(side)),
    ):
        made = heads(side.other.head)
        made.begin_copy("copy")
        change(made)
        before = made.state
        assert made.copy is None
        assert not made.end_copy("copy", is_well=True)
        assert made.state is before
        assert made.state is not SYNCED


@pytest.mark.parametrize(("state", "side"), list(product(SyncedState, Side)))
def test_a_write_counts_at_its_end_and_not_before(state: SyncedState, side: Side) -> None:
    made = heads(state)
    made.begin_write(side)
    is_new_head = state is not side.head and made.state is side.head
    assert not is_new_head
    made.end_write(side)
    assert made.state is side.head
    assert made.cause is None


@pytest.mark.parametrize(("state", "side"), list(product(SyncedState, Side)))
def test_a_write_that_fails_leaves_the_other_side_or_poison(state: SyncedState, side: Side) -> None:
    made = heads(state)
    cause, failure = made.cause, KeyError("body")
    made.begin_write(side)
    made.fail_write(side, failure)
    if state is side.head:
        assert (made.state, made.cause) == (POISONED, failure)
    elif state in (SYNCED, side.other.head):
        assert (made.state, made.cause) == (side.other.head, None)
    else:
        assert (made.state, made.cause) == (state, cause)
