"""When an engine or a stream had nothing to do, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from streamflow.trace.index import EPS_S, Index, engine_of
from streamflow.trace.model import TracedOp
from streamflow.trace.sentences import Sentence
from streamflow.trace.waits import Wait, waits_of

__all__ = ["Gap", "gap_in_words", "gap_sentences", "idle_gaps"]

Place = tuple[int, int, str]

_NUM_BEHIND_MAX = 2


@dataclass(frozen=True, slots=True)
class Gap:
    """A time between two ops of an engine, or of a lane, when it had nothing to do.

    Attributes
    ----------
    place : (int, int, str)
        Process, device, and engine or stream.
    before, op : TracedOp
        The last one before it, and the one that ended it.
    """

    place: Place
    before: TracedOp
    op: TracedOp

    @property
    def start_s(self) -> float:
        """In seconds since the trace began."""
        return _end(self.before)

    @property
    def end_s(self) -> float:
        """In seconds since the trace began."""
        return _start(self.op)

    @property
    def length_s(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


def idle_gaps(
    index: Index, place_of: Callable[[TracedOp], Place | None] = engine_of
) -> tuple[Gap, ...]:
    """The gaps of every engine between its first op and its last, the longest first.

    With :func:`lane_of <streamflow.trace.lanes.lane_of>` as ``place_of``, those of every lane.
    """
    places: dict[Place, list[TracedOp]] = {}
    for op in chain.from_iterable(index.engines().values()):
        place = place_of(op)
        assert place is not None
        places.setdefault(place, []).append(op)
    gaps: list[Gap] = []
    for place, ops in places.items():
        ops.sort(key=_start)
        before = ops[0]
        for op in ops[1:]:
            if _start(op) - _end(before) > EPS_S:
                gaps.append(Gap(place, before, op))
            if _end(op) > _end(before):
                before = op
    return tuple(sorted(gaps, key=lambda gap: -gap.length_s))


def gap_in_words(index: Index, op: TracedOp, before: TracedOp | None) -> str:
    """What happened between the end of ``before`` and the start of ``op``, in words."""
    return "; ".join(map(str, gap_sentences(index, op, before)))


def gap_sentences(index: Index, op: TracedOp, before: TracedOp | None) -> Iterator[Sentence]:
    """What happened between the end of ``before`` and the start of ``op``, in that order.

    Behind the longest wait, what the op that was waited for had waited for meanwhile, and so on.
    """
    at_s = 0.0 if before is None else _end(before)
    if before is not None and op.submitted_s > at_s + EPS_S:
        program = index.seen_before(op)
        if program is not None and program.seen_s is not None:
            seen_s = min(program.seen_s, op.submitted_s)
            if seen_s > at_s + EPS_S:
                form = "{length} until the end of {op} was seen"
                yield Sentence(form, seen_s - at_s, program)
                at_s = seen_s
        if op.submitted_s > at_s + EPS_S:
            yield Sentence("{length} until the call", op.submitted_s - at_s)
            at_s = op.submitted_s
    waits = [*_since(index, op, at_s)]
    longest = max(waits, key=_length, default=None)
    for each in waits:
        yield replace(each[0].sentence, length_s=each[1])
        if each is longest:
            yield from _behind(index, each[0].src, at_s)


def _behind(index: Index, op: TracedOp | None, at_s: float) -> Iterator[Sentence]:
    """What ``op`` waited for longest after ``at_s``, what that one waited for, and so on."""
    for _ in range(_NUM_BEHIND_MAX):
        if op is None or op.start_s is None or op.start_s <= at_s + EPS_S:
            return
        longest = max(_since(index, op, at_s), key=_length, default=None)
        if longest is None:
            return
        sentence = longest[0].sentence
        yield replace(sentence, form=f"that one {sentence.form}", length_s=longest[1])
        op = longest[0].src


def _since(index: Index, op: TracedOp, at_s: float) -> Iterator[tuple[Wait, float]]:
    """What ``op`` waited for after ``at_s``, and how long of that time."""
    for wait in waits_of(index, op):
        # What lasted until then is told by the edge.
        if wait.end_s is not None and wait.end_s > at_s + EPS_S:
            yield wait, wait.end_s - max(wait.start_s, at_s)


def _length(part: tuple[Wait, float]) -> float:
    return part[1]


def _start(op: TracedOp) -> float:
    assert op.start_s is not None
    return op.start_s


def _end(op: TracedOp) -> float:
    assert op.end_s is not None
    return op.end_s
