"""The chain of ops, and of waits between them, that made a run as long as it was."""

from __future__ import annotations

from dataclasses import dataclass

from streamflow.runtime.units import spell_seconds
from streamflow.trace.gaps import gap_in_words
from streamflow.trace.index import EPS_S, SERIAL, Index
from streamflow.trace.model import EdgeReason, TracedOp
from streamflow.trace.sentences import name_on
from streamflow.trace.trace import Trace

__all__ = ["CriticalPath", "Step", "critical_path"]


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the path.

    Attributes
    ----------
    op : TracedOp
    reason : EdgeReason or None
        Of the edge from the step before; None for the first, and where the step before had the
        copy engine, or was what the program waited for before it called for this op.
    wait_s : float
        From the end of the step before until this op ran; of the first, from its call.
        A copy that queued for its engine after its ``start_s`` ran from when it had it.
    ran_s : float
        How long it ran.
    why : str
        Why it came after the step before, and what the wait was, in words.
    """

    op: TracedOp
    reason: EdgeReason | None
    wait_s: float
    ran_s: float
    why: str


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What bounds a run: to make the run shorter, shorten something here. Times in seconds.

    Attributes
    ----------
    steps : tuple of Step
        In the order in which they ran; empty for a trace without timed ops.
    length_s : float
        From the call of the first step to the end of the last.
    busy_s : float
        How much of this the ops of the path ran.
    """

    steps: tuple[Step, ...]
    length_s: float
    busy_s: float

    @property
    def wait_s(self) -> float:
        """How much of the length no op of the path ran."""
        return self.length_s - self.busy_s

    def __str__(self) -> str:
        if not self.steps:
            return "no op of the trace has ended on the device: there is no critical path"
        rows = [("wait", "ran", "op", "why")]
        rows.extend(
            (spell_seconds(step.wait_s), spell_seconds(step.ran_s), name_on(step.op), step.why)
            for step in self.steps
        )
        wide = [max(len(row[place]) for row in rows) for place in range(3)]
        lines = [
            f"{wait:>{wide[0]}}  {ran:>{wide[1]}}  {name:<{wide[2]}}  {why}".rstrip()
            for wait, ran, name, why in rows
        ]
        part = self.wait_s / self.length_s if self.length_s else 0.0
        lines.append(
            f"length {spell_seconds(self.length_s)}: busy {spell_seconds(self.busy_s)}, "
            f"waiting {spell_seconds(self.wait_s)} ({part:.0%})"
        )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a step came after. Of two that ended together the lower ``rank`` is told."""

    op: TracedOp
    reason: EdgeReason | None
    rank: int
    why: str


_RANKS = (
    EdgeReason.READ_AFTER_WRITE,
    EdgeReason.AFTER,
    EdgeReason.HOST,
    EdgeReason.WRITE_AFTER_WRITE,
    EdgeReason.WRITE_AFTER_READ,
    EdgeReason.CAPACITY,
    EdgeReason.STREAM_ORDER,
    EdgeReason.ALLOCATION,
    EdgeReason.FREE,
)
_ENGINE_RANK = _RANKS.index(EdgeReason.STREAM_ORDER)
_PROGRAM_RANK = len(_RANKS)


def critical_path(trace: Trace) -> CriticalPath:
    """What bounds the run: backwards from the op that ends last on the device.

    The step before an op is the latest to end of these: what an edge makes it come after, the
    copy that had its engine, and, where it was called for only later than all of them had ended,
    the op that the program saw last before the call.

    Parameters
    ----------
    trace : Trace
        Ops that have no times are left out.
    """
    index = Index(trace)
    last = _last(index)
    if last is None:
        return CriticalPath((), 0.0, 0.0)
    steps: list[Step] = []
    busy_s = 0.0
    told = {last.id}
    op = last
    while True:
        begin_s, before = _before(index, op)
        ran_s = _end(op) - begin_s
        busy_s += ran_s
        if before is None or before.op.id in told:
            start_s = min(op.submitted_s, begin_s)
            steps.append(Step(op, None, begin_s - start_s, ran_s, gap_in_words(index, op, None)))
            break
        gap = gap_in_words(index, op, before.op)
        wait_s = begin_s - _end(before.op)
        if wait_s <= EPS_S:
            wait_s = 0.0
        why = f"{before.why}; {gap}" if gap else before.why
        steps.append(Step(op, before.reason, wait_s, ran_s, why))
        op = before.op
        told.add(op.id)
    length_s = _end(last) - start_s
    if length_s - busy_s <= EPS_S:
        busy_s = length_s
    return CriticalPath(tuple(reversed(steps)), length_s, busy_s)


def _last(index: Index) -> TracedOp | None:
    timed = [op for op in index.ops.values() if op.duration_s is not None]
    ran = [op for op in timed if op.engine is not None]
    return max(ran or timed, key=_end, default=None)


def _before(index: Index, op: TracedOp) -> tuple[float, _Before | None]:
    """When ``op`` really ran from, and what it came after."""
    assert op.start_s is not None
    engine = index.ran_behind(op)
    if engine is not None:
        return _end(engine), _Before(engine, None, _ENGINE_RANK, f"had the {op.engine} engine")
    found = [
        _Before(src, edge.reason, _RANKS.index(edge.reason), edge.reason.value)
        for edge, src in index.sources(op)
        if src.duration_s is not None
        and _end(src) <= op.start_s + EPS_S
        and not (op.is_staged and edge.reason is EdgeReason.STREAM_ORDER)  # has its own streams
    ]
    given_s = op.begun_s if op.is_staged else op.issued_s
    if op.engine in SERIAL and given_s is not None:
        other = next(index.ended_on_engine(op, op.start_s), None)
        if other is not None and _end(other) > given_s + EPS_S:
            found.append(_Before(other, None, _ENGINE_RANK, f"had the {op.engine} engine"))
    if all(_end(each.op) <= op.submitted_s + EPS_S for each in found):
        program = index.seen_before(op)  # the program may have awaited it before this call
        if program is not None:
            # The stream was free long since: its order held nothing back.
            found = [each for each in found if each.reason is not EdgeReason.STREAM_ORDER]
            why = "called for once that was seen"
            found.append(_Before(program, None, _PROGRAM_RANK, why))
    latest_s = max((_end(each.op) for each in found), default=0.0) - EPS_S
    latest = (each for each in found if _end(each.op) >= latest_s)
    return op.start_s, min(latest, key=lambda each: each.rank, default=None)


def _end(op: TracedOp) -> float:
    assert op.end_s is not None
    return op.end_s
