"""Trio's scheduler, made to depend on a seed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seeded_trio"]


@contextmanager
def seeded_trio(seed: int) -> Iterator[None]:
    """Have trio run its tasks in the same order in every run of a program, inside the block.

    Trio shuffles the tasks of a turn on purpose, and offers no public way to seed that; the two
    names used here are those that its own support for Hypothesis sets.
    """
    from trio._core import _run

    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    state = _run._r.getstate()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        _run._r.setstate(state)
