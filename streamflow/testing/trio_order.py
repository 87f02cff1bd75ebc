"""Trio's scheduler, made to depend on a seed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

__all__ = ["seeded_trio"]


_MANY = 1 << 40  # tasks


class _Dice(Random):
    """Orders the tasks of a turn by dice of their own.

    Seeding trio's dice is not enough: it throws them once a turn, and how many turns pass while
    a thread is at work differs between runs. Nor do trio's numbers of tasks do: they go on from
    one program of a process to the next.
    """

    def __init__(self, seed: int, first: int) -> None:
        super().__init__(seed)
        self._seed = seed
        self._first = first
        self._older: dict[int, int] = {}

    def shuffle(self, x: Any) -> None:
        """Sort the tasks ``x``, which come sorted by age: oldest first with seed 0."""
        x.sort(key=lambda task: self._place(task._counter))

    def _place(self, counter: int) -> tuple[float, int]:
        number = counter - self._first
        if number < 0:  # such as the one that anyio's plugin runs the tests of a module in
            number = self._older.setdefault(counter, len(self._older)) - _MANY
        return (Random(f"{self._seed}/{number}").random() if self._seed else 0.0), number


@contextmanager
def seeded_trio(seed: int) -> Iterator[None]:
    """Have trio run its tasks in the same order in every run of a program, inside the block.

    Trio shuffles the tasks of a turn on purpose, and offers no public way to seed that; the two
    names replaced here are those that its own support for Hypothesis goes by.
    """
    from trio._core import _run

    numbers: Any = _run.Task.__attrs_attrs__
    first = numbers._counter.default.factory()
    before = _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r = _Dice(seed, first)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
