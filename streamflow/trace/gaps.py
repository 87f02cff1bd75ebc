"""When an engine had nothing to do, and why."""

from __future__ import annotations

from dataclasses import dataclass

from streamflow.runtime.units import spell_seconds
from streamflow.trace.index import EPS_S, Index
from streamflow.trace.model import TracedOp
from streamflow.trace.trace import Trace
from streamflow.trace.waits import waits_of

__all__ = ["Gap", "gap_in_words", "idle_gaps"]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time between two ops of an engine when it had nothing to do.

    Attributes
    ----------
    process, device : int
    engine : str
    start_s, end_s : float
        In seconds since the trace began.
    op : TracedOp
        The one that ended it.
    why : str
        What that op waited for meanwhile, in words.
    """

    process: int
    device: int
    engine: str
    start_s: float
    end_s: float
    op: TracedOp
    why: str

    @property
    def length_s(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


def idle_gaps(trace: Trace) -> tuple[Gap, ...]:
    """The gaps of every engine between its first op and its last, the longest first."""
    index = Index(trace)
    gaps: list[Gap] = []
    for (process, device, engine), ops in index.engines().items():
        ordered = sorted(ops, key=_start)
        before = ordered[0]
        for op in ordered[1:]:
            from_s, to_s = _end(before), _start(op)
            if to_s - from_s > EPS_S:
                why = gap_in_words(index, op, before)
                gaps.append(Gap(process, device, engine, from_s, to_s, op, why))
            if _end(op) > from_s:
                before = op
    return tuple(sorted(gaps, key=lambda gap: -gap.length_s))


def gap_in_words(index: Index, op: TracedOp, before: TracedOp | None) -> str:
    """What happened between the end of ``before`` and the start of ``op``, in words."""
    from_s = 0.0 if before is None else _end(before)
    parts: list[str] = []
    if before is not None and op.submitted_s > from_s + EPS_S:
        seen_s = before.seen_s
        if seen_s is not None and from_s + EPS_S < seen_s <= op.submitted_s:
            parts.append(f"{spell_seconds(seen_s - from_s)} until its end was seen")
            from_s = seen_s
        if op.submitted_s > from_s + EPS_S:
            parts.append(f"{spell_seconds(op.submitted_s - from_s)} until the call")
    for wait in waits_of(index, op):
        # What lasted until the end of `before` is told by the edge.
        if wait.end_s is not None and wait.end_s > from_s + EPS_S:
            length = spell_seconds(wait.end_s - max(wait.start_s, from_s))
            parts.append(f"waited {length} for {wait.what}")
    return "; ".join(parts)


def _start(op: TracedOp) -> float:
    assert op.start_s is not None
    return op.start_s


def _end(op: TracedOp) -> float:
    assert op.end_s is not None
    return op.end_s
