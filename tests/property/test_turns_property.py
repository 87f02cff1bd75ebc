"""Turns against the plainest model of a fair lock."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamflow.scheduler.turns import Turn, Turns


class TurnsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.queue: list[Turn] = []  # all that have not left, in the order they came
        self.told: list[Turn] = []
        self.waited: set[Turn] = set()

    @rule(is_write=st.booleans())
    def ask(self, is_write: bool) -> None:
        turn = self.turns.ask(is_write=is_write)
        self.queue.append(turn)
        if not turn.is_held:
            self.waited.add(turn)
            turn.on_granted = lambda: self.told.append(turn)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.queue:
            turn = data.draw(st.sampled_from(self.queue))
            self.queue.remove(turn)
            self.turns.leave(turn)
            self.turns.leave(turn)

    @invariant()
    def who_holds_is_as_in_the_model(self) -> None:
        """The first ones hold: one writer, or all readers up to the first writer."""
        expected: list[Turn] = []
        for turn in self.queue:
            if turn.is_write and expected:
                break
            expected.append(turn)
            if turn.is_write:
                break
        assert [turn for turn in self.queue if turn.is_held] == expected
        assert self.turns.is_busy == bool(self.queue)
        for turn in self.queue:
            if turn in self.waited:
                assert self.told.count(turn) == turn.is_held


TestTurns = TurnsMachine.TestCase
