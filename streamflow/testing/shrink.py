"""Delta debugging: the fewest of some items that still make a test fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shrink"]

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], max_runs: int) -> list[T]:
    """A part of ``items`` that ``fails``, none of which can be left out.

    Parameters
    ----------
    items : sequence
        They fail, all together.
    fails : callable
        Tells whether some of them, in order, still do.
    max_runs : int
        How often it is called at most; what is left then may not be the fewest.

    Source
    ------
    Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002: the
    minimising algorithm, without its test of single parts, which the complements make up for.
    """
    kept = list(items)
    num_parts = 2
    num_runs = 0
    if kept and max_runs:
        num_runs += 1
        if fails([]):
            return []
    while kept and num_runs < max_runs:
        size = -(-len(kept) // num_parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            num_runs += 1
            if rest and fails(rest):
                kept = rest
                num_parts = max(num_parts - 1, 2)
                break
            if num_runs >= max_runs:
                return kept
        else:
            if size == 1:
                return kept
            num_parts = min(2 * num_parts, len(kept))
    return kept
