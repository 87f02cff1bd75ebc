"""What each op waited for last, and the idle gaps of lanes that come of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streamflow.trace.model import EdgeReason, TracedEdge, TracedOp

__all__ = ["Gap", "Wait", "gaps", "lane_of", "waits"]

_NOTHING_SUBMITTED = "nothing was submitted"
_NOTHING_UNTIL = "nothing was submitted until {} ended"
_ENGINE_BUSY = "engine busy"
_DEVICE = "the device was late to begin"
_ONE_AT_A_TIME = ("h2d", "d2h")

_SOON_S = 2e-5  # between two pieces of work on one engine
_NUM_CAUSES_MAX = 3
_AT_ONCE_S = 2e-4  # a program that goes on within this goes on because of what it has seen

Lane = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why an op did not start earlier.

    Attributes
    ----------
    cause : str
        The reason of an edge, ``"engine busy"``, or what it was on the host, in words, with
        ``{}`` where the name of ``op`` belongs.
    op : int or None
        Id of the op that it waited for, or that the program had just seen end when it called
        for this one; None where that was none.
    """

    cause: str
    op: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran on a lane from ``start_s`` to ``end_s``, when op ``before`` started.

    ``waits`` are what that one waited for, what the op it waited for had waited for, and so on,
    as far back as the gap goes.
    """

    lane: Lane
    start_s: float
    end_s: float
    before: int
    waits: tuple[Wait, ...]


def lane_of(op: TracedOp) -> Lane:
    """Process, device and stream."""
    return op.process, op.device, op.stream


def waits(ops: Sequence[TracedOp], edges: Iterable[TracedEdge]) -> dict[int, Wait]:
    """What each started op waited for last, by id.

    The op before it that ended last, where that was after the program had called for it and the
    host had given it to its stream; what the host did, otherwise. An op that takes no time,
    such as an allocation, is passed over for what it waited for itself.
    """
    by_id = {op.id: op for op in ops}
    last: dict[int, tuple[float, bool, TracedEdge]] = {}
    for edge in edges:
        end_s, dst = by_id[edge.src].end_s, by_id[edge.dst]
        if end_s is None or dst.start_s is None or end_s > dst.start_s + _slack(dst.start_s):
            continue
        # Of two that ended together, the one that says more than "the stream's order".
        rank = (end_s, edge.reason is not EdgeReason.STREAM_ORDER)
        if edge.dst not in last or rank > last[edge.dst][:2]:
            last[edge.dst] = (*rank, edge)
    seen = _Seen(ops)
    found: dict[int, Wait] = {}
    for op in ops:
        if op.start_s is None:
            continue
        best = last.get(op.id)
        wait = _wait(op, best and best[0], best and best[2], seen)
        if wait.op is not None and not by_id[wait.op].duration_s:
            behind = found.get(wait.op, wait)
            is_order = wait.cause == EdgeReason.STREAM_ORDER.value and behind.op is not None
            wait = Wait(wait.cause, behind.op) if is_order else behind
        found[op.id] = wait
    _add_busy_engines(ops, by_id, found)
    return found


class _Seen:
    """The ops of each process by when the loop saw them end."""

    def __init__(self, ops: Iterable[TracedOp]) -> None:
        ended: dict[int, list[tuple[float, bool, int]]] = {}
        for op in ops:
            if op.seen_s is not None:
                key = (op.seen_s, op.engine is not None, op.id)
                ended.setdefault(op.process, []).append(key)
        self._ended = {process: sorted(keys) for process, keys in ended.items()}

    def just_before(self, op: TracedOp) -> int | None:
        """The op whose end the program had just seen when it called for ``op``."""
        ended = self._ended.get(op.process, [])
        until = (op.submitted_s + _slack(op.submitted_s), True, op.id)
        place = bisect_right(ended, until) - 1
        if place >= 0 and op.submitted_s - ended[place][0] <= _AT_ONCE_S:
            return ended[place][2] if ended[place][2] != op.id else None
        return None


def _given_s(op: TracedOp) -> float:
    """When the host had done its part."""
    return op.submitted_s if op.issued_s is None else max(op.issued_s, op.submitted_s)


def _wait(op: TracedOp, ended_s: float | None, edge: TracedEdge | None, seen: _Seen) -> Wait:
    given_s = _given_s(op)
    has_edge = edge is not None and ended_s is not None and ended_s > op.submitted_s
    if edge is not None and ended_s is not None and ended_s >= given_s:
        return Wait(edge.reason.value, edge.src)
    if edge is not None and has_edge and edge.reason is EdgeReason.CAPACITY:
        return Wait(edge.reason.value, edge.src)
    if op.needs and given_s > op.submitted_s:
        return Wait(f"on the host: {op.needs[-1]}")
    if given_s > op.submitted_s + _slack(given_s) and op.begun_s is not None:
        return Wait("on the host: staging")
    if edge is not None and has_edge:
        return Wait(edge.reason.value, edge.src)
    if op.start_s is not None and op.start_s - given_s > _SOON_S:
        return Wait(_DEVICE)
    return _not_called(op, seen)


def _not_called(op: TracedOp, seen: _Seen) -> Wait:
    before = seen.just_before(op)
    return Wait(_NOTHING_SUBMITTED if before is None else _NOTHING_UNTIL, before)


def _add_busy_engines(
    ops: Sequence[TracedOp], by_id: dict[int, TracedOp], found: dict[int, Wait]
) -> None:
    """Where an op started just when another stream's left its engine, that is the cause."""
    ends: dict[tuple[int, int, str], list[tuple[float, int]]] = {}
    for op in ops:
        if op.engine is not None and op.end_s is not None and op.duration_s:
            ends.setdefault((op.process, op.device, op.engine), []).append((op.end_s, op.id))
    for each in ends.values():
        each.sort()
    for op in ops:
        if op.engine is None or op.start_s is None:
            continue
        wait = found[op.id]
        behind_s = 0.0 if wait.op is None else by_id[wait.op].end_s or 0.0
        on_engine = ends.get((op.process, op.device, op.engine), [])
        place = bisect_right(on_engine, (op.start_s + _slack(op.start_s), op.id - 1)) - 1
        if place < 0:
            continue
        left_s, left = on_engine[place]
        is_later = left_s > max(_given_s(op), behind_s) + _slack(left_s)
        # Many kernels run at a time: only of one that ended at that very moment is it sure.
        soon_s = _SOON_S if op.engine in _ONE_AT_A_TIME else _slack(left_s)
        if left != op.id and is_later and op.start_s - left_s <= soon_s:
            found[op.id] = Wait(_ENGINE_BUSY, left)


def gaps(ops: Sequence[TracedOp], found: Mapping[int, Wait]) -> list[Gap]:
    """Where lanes that work on an engine had nothing to run, between two of their ops.

    Parameters
    ----------
    ops : sequence of TracedOp
    found : mapping of int to Wait
        What :func:`waits` says of them.
    """
    lanes: dict[Lane, list[tuple[float, float, int]]] = {}
    for place, op in enumerate(ops):
        if op.engine is not None and op.start_s is not None and op.end_s is not None:
            lanes.setdefault(lane_of(op), []).append((op.start_s, op.end_s, place))
    seen = _Seen(ops)
    by_id = {op.id: op for op in ops}
    idle = []
    for lane, spans in lanes.items():
        spans.sort()
        busy_until_s = spans[0][1]
        for start_s, end_s, place in spans:
            if start_s > busy_until_s + _slack(start_s):
                causes = _causes(ops[place], found, by_id, busy_until_s, seen)
                idle.append(Gap(lane, busy_until_s, start_s, ops[place].id, causes))
            busy_until_s = max(busy_until_s, end_s)
    return idle


def _causes(
    op: TracedOp,
    found: Mapping[int, Wait],
    by_id: Mapping[int, TracedOp],
    since_s: float,
    seen: _Seen,
) -> tuple[Wait, ...]:
    causes: list[Wait] = []
    while len(causes) < _NUM_CAUSES_MAX:
        wait = _longest(op, found[op.id], since_s, seen)
        causes.append(wait)
        if wait.op is None or wait.cause == _NOTHING_UNTIL:
            break
        op = by_id[wait.op]
        if op.start_s is None or op.start_s <= since_s + _slack(since_s):
            break
    return tuple(causes)


def _longest(op: TracedOp, wait: Wait, since_s: float, seen: _Seen) -> Wait:
    """``wait``, unless more of the gap had gone by before the program called for the op."""
    assert op.start_s is not None
    if wait.op is None and op.submitted_s - since_s > op.start_s - op.submitted_s:
        return _not_called(op, seen)
    return wait


def _slack(moment_s: float) -> float:
    """Less than this is no time: sums of floating-point numbers differ."""
    return 1e-9 + abs(moment_s) * 1e-12
