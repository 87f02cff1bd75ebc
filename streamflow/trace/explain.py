"""Why an op ran when it did, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.index import EPS_S, Index, engine_of
from streamflow.trace.model import EdgeReason, TracedOp
from streamflow.trace.trace import Trace
from streamflow.trace.waits import Wait, WaitKind, name_on, open_waits_of, waits_of

if TYPE_CHECKING:
    from streamflow.runtime.op import Op

__all__ = ["Explanation", "explain"]

_ENDED = ("done", "failed", "cancelled")
_PASSES_FAILURE = (EdgeReason.READ_AFTER_WRITE, EdgeReason.AFTER, EdgeReason.HOST)  # R9


@dataclass(frozen=True, slots=True)
class Explanation:
    """What happened to one op, from the call until the program knew its end.

    Attributes
    ----------
    op : TracedOp
    late_s : float
        How long before the call all that the op comes after had ended and its engine had
        nothing to do: time that was lost because it was called for late.
    waits : tuple of Wait
        From ``op.submitted_s`` to ``op.start_s`` without a gap. Of an op that has not started,
        what it waits for now, each without an ``end_s``.
    engine_wait : Wait or None
        How much of the time from ``op.start_s`` to ``op.end_s`` another copy had its engine, or
        shared it with the pieces of a staged one.
    wake_s : float or None
        From its end until the loop saw it.
    lines : tuple of str
        All of it in sentences.
    """

    op: TracedOp
    late_s: float
    waits: tuple[Wait, ...]
    engine_wait: Wait | None
    wake_s: float | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def explain(trace: Trace, which: Op[Any] | TracedOp | int | str) -> Explanation:
    """See :meth:`Trace.explain <streamflow.trace.trace.Trace.explain>`."""
    op = trace.op(which)
    index = Index(trace)
    late_s = _late(index, op)
    waits = waits_of(index, op)
    if op.start_s is None and op.state not in _ENDED:
        waits = open_waits_of(index, op)
    engine_wait = _engine_wait(index, op)
    wake_s = None
    if op.seen_s is not None and op.end_s is not None:
        wake_s = max(0.0, op.seen_s - op.end_s)
    lines = [
        _title(op),
        _called(index, op, late_s),
        *(wait.text for wait in waits),
        *_ran(op, engine_wait),
        *_ended(index, op, wake_s),
    ]
    return Explanation(op, late_s, waits, engine_wait, wake_s, (lines[0], *_indented(lines[1:])))


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _title(op: TracedOp) -> str:
    nbytes = f", {spell_bytes(op.nbytes)}" if op.nbytes else ""
    return f"{name_on(op)} ({op.kind}{nbytes}): {op.state}"


def _called(index: Index, op: TracedOp, late_s: float) -> str:
    line = f"called for {spell_seconds(op.submitted_s)} into the trace"
    for what, name in (("at", op.where), ("in scope", op.scope), ("by task", op.task)):
        if name is not None:
            line += f" {what} {name}"
    if late_s > EPS_S:
        line += f": {spell_seconds(late_s)} after all that it comes after had ended"
        program = index.seen_before(op)
        if program is not None and program.seen_s is not None:
            ago_s = max(0.0, op.submitted_s - program.seen_s)
            line += f", {spell_seconds(ago_s)} after the program saw the end of {name_on(program)}"
    return line


def _late(index: Index, op: TracedOp) -> float:
    ends: list[float] = []
    for edge, src in index.sources(op):
        if edge.reason is EdgeReason.CAPACITY:
            continue
        if src.end_s is None:
            return 0.0
        ends.append(src.end_s)
    engine = engine_of(op)
    free_s = None if engine is None else index.free_since(engine, op.submitted_s)
    if free_s is not None:
        ends.append(free_s)
    return max(0.0, op.submitted_s - max(ends)) if ends else 0.0


def _engine_wait(index: Index, op: TracedOp) -> Wait | None:
    other = index.ran_behind(op)
    if other is None or op.start_s is None or other.end_s is None:
        return None
    length = spell_seconds(other.end_s - op.start_s)
    what = f"the {op.engine} engine, which {name_on(other)} had"
    text = f"waited {length} of this for {what}"
    if op.is_staged:  # piece by piece, in turns
        text = f"shared the {op.engine} engine with {name_on(other)} for {length} of this"
    return Wait(WaitKind.ENGINE, op.start_s, other.end_s, None, other, None, what, text)


def _ran(op: TracedOp, engine_wait: Wait | None) -> Iterator[str]:
    if op.duration_s is None:
        return
    line = f"ran {spell_seconds(op.duration_s)}"
    if op.engine is not None:
        line += f" on {op.engine}"
    alone_s = op.duration_s - (0.0 if engine_wait is None else engine_wait.length_s)
    is_shared = op.is_staged and engine_wait is not None
    if op.engine in ("h2d", "d2h") and op.nbytes and alone_s > EPS_S and not is_shared:
        line += f" ({op.nbytes / alone_s * 1e-9:.3g} GB/s)"
    if op.is_staged:
        line += ", through pinned memory: the array on the host was pageable"
    yield line
    if engine_wait is not None:
        yield engine_wait.text


def _ended(index: Index, op: TracedOp, wake_s: float | None) -> Iterator[str]:
    if wake_s is not None:
        if wake_s > EPS_S and op.stream != "host":
            yield f"seen to have ended {spell_seconds(wake_s)} later"
    elif op.state == "done":
        yield "its times are not known"
    if op.state in ("failed", "cancelled"):
        culprits = [
            name_on(src)
            for edge, src in index.sources(op)
            if edge.reason in _PASSES_FAILURE and src.state in ("failed", "cancelled")
        ]
        why = f": {op.error}" if op.error else ""
        if culprits:
            why += f" (because of {', '.join(culprits)})"
        yield f"{op.state}{why}"
    elif op.state != "done" and op.start_s is None and not open_waits_of(index, op):
        yield f"{op.state}: not finished yet, and nothing that the trace knows is before it"
