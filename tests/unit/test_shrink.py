"""Delta debugging: nothing of what it keeps can be left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamflow.testing.shrink import shrink


@given(st.sets(st.integers(0, 60), max_size=6), st.integers(1, 61))
def test_it_keeps_what_is_needed_and_nothing_else(needed, num):
    items = range(max(num, max(needed, default=0) + 1))
    assert shrink(items, lambda part: needed <= set(part), 1000) == sorted(needed)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=12, unique=True))
def test_nothing_can_be_left_out_of_what_fails_for_other_reasons(items):
    def fails(part):  # two of even numbers, or any three
        return len([each for each in part if each % 2 == 0]) >= 2 or len(part) >= 3

    if fails(items):
        kept = shrink(items, fails, 1000)
        assert fails(kept)
        assert not any(fails(kept[:n] + kept[n + 1 :]) for n in range(len(kept)))


def test_it_stops_after_so_many_runs():
    runs = []

    def fails(part):
        runs.append(part)
        return 7 in part and 40 in part

    kept = shrink(range(64), fails, 5)
    assert len(runs) == 5
    assert {7, 40} <= set(kept)
    assert shrink(range(64), fails, 0) == list(range(64))


def test_what_fails_without_any_item_needs_none():
    assert shrink([1, 2, 3], lambda part: True, 10) == []
    assert shrink([], lambda part: True, 10) == []
