"""Queues that take turns, and budgets: nothing lost, nobody starved, never over the limit."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamflow.scheduler.budget import Budget, parse_nbytes
from streamflow.scheduler.fair import FairQueue

KEYS = st.sampled_from([None, "a", "b", "c"])


class FairQueueModel(RuleBasedStateMachine):
    """Against a plain list of arrivals for each key, and the turns counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue("a turn")
        self.model: dict[object, deque[int]] = {}
        self.passed: dict[object, dict[object, int]] = {}  # turns of others while it waited
        self.num = 0

    @rule(key=KEYS)
    def push(self, key: object) -> None:
        self.queue.push(key, self.num)
        if key not in self.model:
            self.model[key], self.passed[key] = deque(), {}
        self.model[key].append(self.num)
        self.num += 1

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        expected = self.queue.peek()
        item = self.queue.pop()
        assert item == expected
        (key,) = (key for key, items in self.model.items() if item in items)
        assert self.model[key].popleft() == item, "first come first served within a key"
        for other in self.model:
            if other != key:
                turns = self.passed[other]
                turns[key] = turns.get(key, 0) + 1
                assert turns[key] == 1, f"{key} went twice while {other} waited"
        self.passed[key] = {}
        if not self.model[key]:
            del self.model[key]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=str)))
        item = data.draw(st.sampled_from(sorted(self.model[key])))
        self.queue.remove(key, item)
        self.model[key].remove(item)
        if not self.model[key]:
            del self.model[key]

    @invariant()
    def nothing_is_lost(self) -> None:
        left = sorted(item for items in self.model.values() for item in items)
        assert sorted(self.queue) == left
        assert len(self.queue) == len(left)
        assert bool(self.queue) == bool(left)


LIMIT = 100


class BudgetModel(RuleBasedStateMachine):
    """Everybody asks once, waits or runs, and gives back what they took."""

    def __init__(self) -> None:
        super().__init__()
        self.budget: Budget[int] = Budget(LIMIT, "a limit")
        self.sizes: dict[int, int] = {}
        self.running: list[int] = []
        self.waiting: dict[int, object] = {}
        self.in_front: dict[int, int] = {}  # of the same key, when it came
        self.overtaken: dict[int, Counter[object]] = {}
        self.num = 0

    def admitted(self, items: list[int]) -> None:
        for item in items:
            key = self.waiting.pop(item)
            older = [o for o, k in self.waiting.items() if k == key and o < item]
            assert not older, "overtaken within one key"
            for other in self.waiting:
                if other < item:
                    turns = self.overtaken[other]
                    turns[key] += 1
                    assert turns[key] <= self.in_front[other] + 1, "kept waiting out of turn"
            self.running.append(item)

    @rule(key=KEYS, nbytes=st.integers(0, LIMIT) | st.just(LIMIT))
    def request(self, key: object, nbytes: int) -> None:
        item, self.num = self.num, self.num + 1
        self.sizes[item] = nbytes
        could = not self.waiting and self.used + nbytes <= LIMIT
        assert self.budget.request(key, item, nbytes) == could
        if could:
            self.running.append(item)
        else:
            self.in_front[item] = sum(other == key for other in self.waiting.values())
            self.overtaken[item] = Counter()
            self.waiting[item] = key

    @property
    def used(self) -> int:
        return sum(self.sizes[item] for item in self.running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.running.remove(item)
        self.admitted(self.budget.release(self.sizes[item]))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        self.admitted(self.budget.withdraw(self.waiting.pop(item), item))

    @invariant()
    def the_limit_holds_and_nothing_is_lost(self) -> None:
        assert self.budget.used_nbytes == self.used <= LIMIT
        assert sorted(self.budget.queue) == sorted(self.waiting)

    @invariant()
    def whoever_is_next_has_a_reason_to_wait(self) -> None:
        if self.waiting:
            assert self.used + self.sizes[self.budget.queue.peek()] > LIMIT

    def teardown(self) -> None:
        """Everybody is admitted in the end, however large."""
        while self.running:
            item = self.running.pop()
            self.admitted(self.budget.release(self.sizes[item]))
        assert not self.waiting
        assert self.budget.used_nbytes == 0


quick = settings(deadline=None, max_examples=150, stateful_step_count=40, derandomize=True)
TestFairQueue = FairQueueModel.TestCase
TestFairQueue.settings = quick
TestBudget = BudgetModel.TestCase
TestBudget.settings = quick


@settings(deadline=None, max_examples=100, derandomize=True)
@given(sizes=st.lists(st.integers(1, LIMIT), min_size=1, max_size=60))
def test_a_request_for_all_of_it_is_next_however_many_small_ones_come_later(
    sizes: list[int],
) -> None:
    budget: Budget[str] = Budget(LIMIT, "a limit")
    assert budget.request(None, "first", 1)
    assert not budget.request(None, "all", LIMIT)
    for number, nbytes in enumerate(sizes):
        assert not budget.request(None, f"small {number}", nbytes)
    assert budget.release(1) == ["all"]


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@settings(deadline=None, derandomize=True)
@given(
    num=st.integers(1, 10**6),
    unit=st.sampled_from(sorted(UNITS)),
    space=st.sampled_from(["", " ", "_"]),
    change=st.sampled_from([str, str.lower, str.upper]),
)
def test_sizes_in_words(num: int, unit: str, space: str, change: type[str]) -> None:
    assert parse_nbytes(change(f"{num}{space}{unit}")) == num * UNITS[unit]
    assert parse_nbytes(num) == parse_nbytes(np.int64(num)) == num


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.5 GB", 1_500_000_000), ("0.5KiB", 512), ("1e3", 1000), (" 7 ", 7)]
)
def test_sizes_with_a_point(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1 XB", "nanGB", "infGB", "2 GiB or so"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a limit is"):
        parse_nbytes(text)


@pytest.mark.parametrize("wrong", [True, 1.5, None, b"1"])
def test_what_is_no_number_of_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="a limit is an int"):
        parse_nbytes(wrong)  # type: ignore[arg-type]
