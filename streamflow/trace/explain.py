"""Why an op ran when it did, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.index import EPS_S, Index, engine_of
from streamflow.trace.model import EdgeReason, TracedOp
from streamflow.trace.sentences import Sentence, name_on
from streamflow.trace.trace import Trace
from streamflow.trace.waits import Wait, WaitKind, open_waits_of, waits_of

if TYPE_CHECKING:
    from streamflow.runtime.op import Op

__all__ = ["Explanation", "explain", "sentences_of"]

_NUM_HOPS_MAX = 3
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
    waits = _waits(index, op)
    engine_wait = _engine_wait(index, op)
    wake_s = None
    if op.seen_s is not None and op.end_s is not None:
        wake_s = max(0.0, op.seen_s - op.end_s)
    told = [
        _called(op),
        *_program(index, op, late_s),
        *(wait.sentence for wait in waits),
        *_ran(op, engine_wait),
        *_seen(op, wake_s),
        *_ended(index, op),
    ]
    lines = (_title(op), *(f"  {each}" for each in told))
    return Explanation(op, late_s, waits, engine_wait, wake_s, lines)


def sentences_of(index: Index, op: TracedOp) -> Iterator[Sentence]:
    """What :func:`explain` says of ``op`` beside its facts."""
    yield from _program(index, op, _late(index, op))
    for wait in _waits(index, op):
        yield wait.sentence
    engine_wait = _engine_wait(index, op)
    if engine_wait is not None:
        yield engine_wait.sentence
    yield from _ended(index, op)


def _waits(index: Index, op: TracedOp) -> tuple[Wait, ...]:
    is_open = op.start_s is None and op.state not in _ENDED
    return open_waits_of(index, op) if is_open else waits_of(index, op)


def _title(op: TracedOp) -> str:
    nbytes = f", {spell_bytes(op.nbytes)}" if op.nbytes else ""
    return f"{name_on(op)} ({op.kind}{nbytes}): {op.state}"


def _called(op: TracedOp) -> str:
    line = f"called for {spell_seconds(op.submitted_s)} into the trace"
    for what, name in (("at", op.where), ("in scope", op.scope), ("by task", op.task)):
        if name is not None:
            line += f" {what} {name}"
    return line


def _program(index: Index, op: TracedOp, late_s: float) -> Iterator[Sentence]:
    if late_s <= EPS_S:
        return
    yield Sentence("called {length} after all that it comes after had ended", late_s)
    program = index.seen_before(op)
    if program is not None and program.seen_s is not None:
        ago_s = max(0.0, op.submitted_s - program.seen_s)
        if ago_s <= late_s + EPS_S:
            yield Sentence("called {length} after the program saw the end of {op}", ago_s, program)


def _late(index: Index, op: TracedOp) -> float:
    ends = [*_ends_before(index, op, op.submitted_s)]
    if inf in ends:
        return 0.0
    engine = engine_of(op)
    free_s = None if engine is None else index.free_since(engine, op.submitted_s)
    if free_s is not None:
        ends.append(free_s)
    return max(0.0, op.submitted_s - max(ends)) if ends else 0.0


def _ends_before(
    index: Index, op: TracedOp, call_s: float, num_hops: int = _NUM_HOPS_MAX
) -> Iterator[float]:
    """When what ``op`` comes after ended; infinity for what has not.

    What was called for at ``call_s`` too, and took no time, is passed over: the allocation of a
    copy is a part of the same call.
    """
    for edge, src in index.sources(op):
        if edge.reason is EdgeReason.CAPACITY:
            continue
        ended_s = inf if src.end_s is None else src.end_s
        if num_hops and call_s - EPS_S <= src.submitted_s and ended_s <= call_s + EPS_S:
            yield from _ends_before(index, src, call_s, num_hops - 1)
        else:
            yield ended_s


def _engine_wait(index: Index, op: TracedOp) -> Wait | None:
    other = index.ran_behind(op)
    if other is None or op.start_s is None or other.end_s is None:
        return None
    form = f"waited {{length}} of this for the {op.engine} engine, which {{op}} had"
    if op.is_staged:  # piece by piece, in turns
        form = f"shared the {op.engine} engine with {{op}} for {{length}} of this"
    sentence = Sentence(form, other.end_s - op.start_s, other)
    return Wait(WaitKind.ENGINE, op.start_s, other.end_s, None, other, None, sentence)


def _ran(op: TracedOp, engine_wait: Wait | None) -> Iterator[str | Sentence]:
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
        yield engine_wait.sentence


def _seen(op: TracedOp, wake_s: float | None) -> Iterator[str]:
    if wake_s is not None and wake_s > EPS_S and op.stream != "host":
        yield f"seen to have ended {spell_seconds(wake_s)} later"


def _ended(index: Index, op: TracedOp) -> Iterator[Sentence]:
    if op.state == "done" and (op.seen_s is None or op.end_s is None):
        yield Sentence("its times are not known")
    if op.state in ("failed", "cancelled"):
        culprits = [
            name_on(src)
            for edge, src in index.sources(op)
            if edge.reason in _PASSES_FAILURE and src.state in ("failed", "cancelled")
        ]
        why = f": {op.error}" if op.error else ""
        if culprits:
            why += f" (because of {', '.join(culprits)})"
        yield Sentence(f"{op.state}{why}")
    elif op.state != "done" and op.start_s is None and not open_waits_of(index, op):
        yield Sentence(
            f"{op.state}: not finished yet, and nothing that the trace knows is before it"
        )
