"""What the program waited for before it called for an op: read off the times of a trace.

A trace tells when ops were called for and when somebody saw an op end for which he had waited,
but not who. A call that comes soon after such an end is taken to have waited for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamflow.trace.model import TracedOp

__all__ = ["Call", "Ends", "calls", "is_soon", "lag"]

_SOON_S = 100e-6
_SOON_SHARE = 0.1
"""A wake-up is no longer than this, or than this part of the time since the call before."""
_NUM_MAX = 64
"""Ends of others' ops that one call is made to wait for: those seen last."""


@dataclass(slots=True)
class Call:
    """When the program calls for an op: once all of these are so.

    Attributes
    ----------
    after_call : int or None
        Place of the call that comes before it.
    after_call_s : float
        How long after that, at least; without one, since the trace began.
    after_ends : list of (int, float)
        Places of ops, and how long after their ends the program has got here.
    sees_all : bool
        The program has looked at every stream, as ``dev.synchronize`` does.
    """

    after_call: int | None
    after_call_s: float
    after_ends: list[tuple[int, float]]
    sees_all: bool = False


def lag(op: TracedOp, since_s: float = float("-inf")) -> float:
    """How long after the end of ``op`` it was seen, by somebody who has looked ``since_s``."""
    if op.seen_s is None or op.end_s is None:
        return 0.0
    return max(0.0, op.seen_s - max(op.end_s, since_s))


def is_soon(seconds: float, gap_s: float) -> bool:
    """Whether that is how long a wake-up takes, at the end of a wait of up to ``gap_s``."""
    return seconds <= max(_SOON_S, _SOON_SHARE * gap_s)


def calls(ops: Sequence[TracedOp], known: Mapping[int, Call] | None = None) -> list[Call]:
    """How each op came to be called for.

    Parameters
    ----------
    ops : sequence of TracedOp
        In the order of their calls.
    known : mapping of int to Call
        Places of which that is known otherwise.
    """
    known = known or {}
    everybodys = Ends()
    each_tasks: dict[tuple[int, str], Ends] = {}
    for place, op in enumerate(ops):
        if op.is_awaited and op.seen_s is not None:
            everybodys.add(op.seen_s, place)
            if op.task is not None and place not in known:
                each_tasks.setdefault((op.process, op.task), Ends()).add(op.seen_s, place)
    everybodys.sort()
    for ends in each_tasks.values():
        ends.sort()
    found: list[Call] = []
    last: dict[tuple[int, str], int] = {}
    seen_s = float("-inf")  # by then all ops so far had been seen to end
    first = 0  # and those before this one also when another was called for
    for place, op in enumerate(ops):
        sees_all = first < place and seen_s <= op.submitted_s
        seen_s = max(seen_s, float("inf") if op.seen_s is None else op.seen_s)
        key = None if op.task is None else (op.process, op.task)
        if place in known:
            found.append(known[place])
            continue  # not its task's own doing
        before = None if key is None else last.get(key)
        if before is None and place:
            before = place - 1
        mine = None if key is None else each_tasks.get(key)
        found.append(call := _call(ops, place, before, mine, everybodys))
        if sees_all and call.after_ends:
            # On other lanes it may be one that nobody has waited for that ends last.
            least_s = min(seconds for _, seconds in call.after_ends)
            others = (each for each in range(first, place) if not ops[each].is_awaited)
            call.after_ends.extend((each, least_s) for each in others)
            call.sees_all = True
            first = place
        if key is not None:
            last[key] = place
    return found


class Ends:
    """Ends that somebody waited for, by when they were seen."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, seen_s: float, place: int) -> None:
        self._seen.append((seen_s, place))

    def sort(self) -> None:
        self._seen.sort()

    def within(self, from_s: float, to_s: float, place: int, *, is_open: bool) -> list[int]:
        """Ops before ``place`` that were seen in that time."""
        first = (bisect_right if is_open else bisect_left)(
            self._seen, (from_s, 1 << 62 if is_open else -1)
        )
        stop = bisect_right(self._seen, (to_s, 1 << 62))
        return [each for _, each in self._seen[first:stop] if each < place]


def _call(
    ops: Sequence[TracedOp], place: int, before: int | None, mine: Ends | None, all_: Ends
) -> Call:
    op = ops[place]
    if before is None:
        return Call(None, op.submitted_s, [])
    since_s = ops[before].submitted_s
    gap_s = max(0.0, op.submitted_s - since_s)
    # A task that has called can't wait for an end seen before; callbacks of one turn can.
    is_open = op.task is not None
    awaited = all_.within(since_s, op.submitted_s, place, is_open=is_open)[-_NUM_MAX:]
    if awaited and mine is not None:
        own = mine.within(since_s, op.submitted_s, place, is_open=is_open)
        if own and _seen(ops, awaited) - _seen(ops, own) <= 0.05 * gap_s:
            awaited = own
    if not awaited:
        return Call(before, gap_s, [])
    newest_s = _seen(ops, awaited)
    together = (each for each in awaited if (ops[each].seen_s or 0.0) >= newest_s - _SOON_S)
    newest_lag_s = min(lag(ops[each]) for each in together)
    if not is_soon(newest_lag_s, gap_s):
        # It had ended long before anybody asked: the time was the program's own.
        return Call(before, gap_s, [])
    own_s = op.submitted_s - newest_s
    # Of those that had ended before, the end was looked at late: that is no wake-up.
    return Call(
        before, 0.0, [(each, min(lag(ops[each]), newest_lag_s) + own_s) for each in awaited]
    )


def _seen(ops: Sequence[TracedOp], places: list[int]) -> float:
    return max(ops[place].seen_s or 0.0 for place in places)
