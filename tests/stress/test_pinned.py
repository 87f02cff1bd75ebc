"""Pinned bytes stay under the budget, whatever many tasks keep and drop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import streamflow.backends
from tests.stress.pinned import BUDGET_NBYTES, FIRST_NBYTES, PinnedSoak


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))


def check_that_it_was_tight(counts: Counter[str]) -> None:
    """The budget was used up, again and again: what is kept fell back, and leases waited."""
    print(dict(counts))
    assert counts["peak"] >= FIRST_NBYTES + BUDGET_NBYTES // 2
    assert counts["pinned"] > 100
    assert counts["pageable"] > 100
    assert counts["leased at once"] > 20
    assert counts["leased"] > 20
    assert counts["too late"] > 0


@pytest.mark.timeout(90)
def test_ten_thousand_transfers_stay_under_the_pinned_budget() -> None:
    counts = asyncio.run(PinnedSoak(1000, 10_000, 0).run())
    assert counts["transfers"] == 10_000
    check_that_it_was_tight(counts)


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_thousand_transfers_stay_under_the_pinned_budget(seed: int) -> None:
    counts = asyncio.run(PinnedSoak(1000, 100_000, seed).run())
    assert counts["transfers"] == 100_000
    check_that_it_was_tight(counts)
