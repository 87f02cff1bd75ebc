"""Trio's scheduler, made to depend on a seed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

__all__ = ["seeded_trio"]


class _Dice(Random):
    """Orders the tasks of a turn by dice of their own.

    Seeding trio's dice is not enough: it throws them once a turn, and how many turns pass while
    a thread is at work differs between runs.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed
        self._first: int | None = None

    def shuffle(self, x: Any) -> None:
        """Sort the tasks ``x``: oldest first with seed 0."""
        if self._first is None:
            self._first = min(task._counter for task in x)
        x.sort(key=lambda task: self._place(task._counter - self._first))

    def _place(self, number: int) -> tuple[float, int]:
        return (Random(f"{self._seed}/{number}").random() if self._seed else 0.0), number


@contextmanager
def seeded_trio(seed: int) -> Iterator[None]:
    """Have trio run its tasks in the same order in every run of a program, inside the block.

    Trio shuffles the tasks of a turn on purpose, and offers no public way to seed that; the two
    names used here are those that its own support for Hypothesis goes by.
    """
    from trio._core import _run

    before = _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r = _Dice(seed)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
