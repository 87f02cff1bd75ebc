"""The table of op states: what it promises as a whole, and that every state is reached."""

from __future__ import annotations

import pytest

from streamflow.scheduler.machine import (
    FINAL,
    TRANSITIONS,
    IllegalTransition,
    OpState,
    OpStep,
    step,
)


def story() -> str:
    return "copy#7 on h2d"


def reachable(state: OpState) -> set[OpState]:
    found: set[OpState] = set()
    waiting = [state]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += TRANSITIONS[here].values()
    return found


@pytest.mark.parametrize("state", OpState)
@pytest.mark.parametrize("happened", OpStep)
def test_a_step_is_in_the_table_or_refused_with_the_ops_story(state, happened):
    after = TRANSITIONS[state].get(happened)
    if after is not None:
        assert step(state, happened, story) is after
        return
    with pytest.raises(IllegalTransition, match=f"{state.value} cannot {happened.value}: copy#7"):
        step(state, happened, story)


def test_every_state_is_reached_and_every_op_can_end():
    assert reachable(OpState.PARKED) == set(OpState)
    for state in OpState:
        assert set(FINAL) & reachable(state)


def test_nothing_leaves_a_final_state():
    assert set(FINAL) == {OpState.DONE, OpState.FAILED, OpState.CANCELLED}
    assert not any(TRANSITIONS[state] for state in FINAL)


def test_what_was_submitted_cannot_be_cancelled_nor_go_back():
    assert reachable(OpState.SUBMITTED) == {OpState.SUBMITTED, OpState.DONE, OpState.FAILED}


def test_the_steps_that_hot_paths_write_out_are_those_of_the_table():
    assert TRANSITIONS[OpState.PARKED][OpStep.SUBMIT] is OpState.SUBMITTED
    assert TRANSITIONS[OpState.SUBMITTED][OpStep.COMPLETE] is OpState.DONE
