"""How much of a stream's queue a launch of a graph takes: a bound from its nodes and edges.

Measured, not documented: see decision 49. Each number below is at least what any graph took there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["count_places"]


def count_places(own: Sequence[int | None], edges: Iterable[tuple[int, int]]) -> int:
    """How many places of a stream's queue the nodes of a graph take at most (rule R7).

    A straight run of kernels takes one: each but the first comes after one node alone, a kernel
    that nothing else comes after.

    Parameters
    ----------
    own : sequence of int or None
        By node: the places it takes, whatever is around it. None for a kernel.
    edges : iterable of (int, int)
        Of each edge the earlier and the later node. Two between the same nodes end a run.
    """
    num_before, num_after = [0] * len(own), [0] * len(own)
    before = [0] * len(own)
    for earlier, later in edges:
        num_after[earlier] += 1
        num_before[later] += 1
        before[later] = earlier
    num = 0
    for node, places in enumerate(own):
        if places is not None:
            num += places
            continue
        only = before[node]
        goes_on = num_before[node] == 1 and own[only] is None and num_after[only] == 1
        num += not goes_on
    return num
