"""What an op waited for between the call and its start on the device."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from streamflow.runtime.units import spell_bytes
from streamflow.trace.index import EPS_S, SERIAL, Index
from streamflow.trace.lanes import lane_of
from streamflow.trace.model import EdgeReason, TracedEdge, TracedOp
from streamflow.trace.sentences import Sentence

__all__ = ["Wait", "WaitKind", "array_in_words", "open_waits_of", "waits_of"]


class WaitKind(Enum):
    """What kept an op from starting."""

    PARKED = "parked"
    """An op before it was still parked itself, or is work on the host (rule R7)."""
    CAPACITY = "capacity"
    """Room in a stream's window or a scope's budget."""
    NEED = "need"
    """Something else on the host: a kernel that compiles, pinned memory, a future."""
    STAGING = "staging"
    """Its bytes were being copied into or out of pinned memory."""
    STREAM = "stream"
    """An earlier op of its own stream."""
    EDGE = "edge"
    """An op of another stream that it comes after."""
    ENGINE = "engine"
    """Another op had the copy engine."""
    DEVICE = "device"
    """Nothing that the trace knows: what the device takes to begin."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that an op waited for.

    Attributes
    ----------
    kind : WaitKind
    start_s, end_s : float
        In seconds since the trace began; ``end_s`` is None for a wait that isn't over.
    reason : EdgeReason or None
        Of the edge from ``src``; None where there is none.
    src : TracedOp or None
        The op that was waited for.
    array : int or None
        Id of the array that both ops touch.
    sentence : Sentence
        All of it; ``text`` has the words.
    """

    kind: WaitKind
    start_s: float
    end_s: float | None
    reason: EdgeReason | None
    src: TracedOp | None
    array: int | None
    sentence: Sentence

    @property
    def text(self) -> str:
        """All of it in words."""
        return str(self.sentence)

    @property
    def length_s(self) -> float:
        """How long it took; 0.0 for a wait that isn't over."""
        return 0.0 if self.end_s is None else self.end_s - self.start_s


_ENDED = ("done", "failed", "cancelled")
_NUM_HOPS_MAX = 8
_SAY_LITTLE = (EdgeReason.STREAM_ORDER, None)


@dataclass(frozen=True, slots=True)
class _Cause:
    """Something that lasted until ``until_s``: words around an op and an array."""

    until_s: float
    kind: WaitKind
    form: str
    src: TracedOp | None = None
    reason: EdgeReason | None = None
    array: int | None = None


def waits_of(index: Index, op: TracedOp) -> tuple[Wait, ...]:
    """The waits of ``op``, in order: they cover ``submitted_s`` to ``start_s`` without a gap.

    Of what was waited for at the same time, that which ended last is told: without the
    others nothing would have come earlier. Empty for an op that has not started.
    """
    return tuple(_wait(index, piece) for piece in _pieces(index, op))


def open_waits_of(index: Index, op: TracedOp) -> tuple[Wait, ...]:
    """What an op that has not ended waits for now: the ops before it, and what the host owes."""
    found: list[_Cause] = []
    for edge, src in index.sources(op):
        if edge.reason is not EdgeReason.CAPACITY and src.state not in _ENDED:
            is_parked = src.state in ("parked", "staging")
            kind = WaitKind.PARKED if is_parked else WaitKind.EDGE
            if kind is WaitKind.EDGE and lane_of(src) == lane_of(op):
                kind = WaitKind.STREAM
            form = f"{{op}}{_because(edge)} ({src.state})"
            found.append(_Cause(0.0, kind, form, src, edge.reason, edge.array))
    if op.state == "parked" and (op.needs or not found):
        found.append(_host_rest(op))
    elif op.state == "staging" and op.is_staged:
        found.append(_device_rest(op))
    return tuple(
        Wait(
            cause.kind,
            op.submitted_s,
            None,
            cause.reason,
            cause.src,
            cause.array,
            _say(index, f"{op.state}: waits for {cause.form}", cause),
        )
        for cause in found
    )


def array_in_words(index: Index, array: int) -> str:
    """``"array #3 (4.00 MiB) made at file.py:12"``, as far as it is known."""
    known = index.arrays.get(array)
    if known is None:
        return f"array #{array}"
    where = f" made at {known.where}" if known.where else ""
    return f"array #{array} ({spell_bytes(known.nbytes)}){where}"


_Piece = tuple[float, float, _Cause]


def _pieces(index: Index, op: TracedOp) -> Iterator[_Piece]:
    if op.start_s is None:
        return
    given_s = op.begun_s if op.is_staged or op.issued_s is None else op.issued_s
    given_s = op.start_s if given_s is None else min(given_s, op.start_s)
    # On the host: parked until whatever kept it there was gone. Then in its stream, or in the
    # hands of the staging threads.
    at_s = yield from _cover(op.submitted_s, given_s, _host_causes(index, op), _host_rest(op))
    yield from _cover(at_s, op.start_s, _device_causes(index, op), _device_rest(op))


def _cover(
    at_s: float, until_s: float, causes: Iterable[_Cause], rest: _Cause
) -> Generator[_Piece, None, float]:
    """What lasted longest of ``causes``, then ``rest``. Returns where it has come to."""
    held = [each for each in causes if at_s + EPS_S < each.until_s <= until_s + EPS_S]
    if held:
        last_s = max(each.until_s for each in held) - EPS_S
        # Data say more than the order of a stream, and that more than the engine does; and of
        # several that were seen to end at once, it is the last to end.
        latest = (each for each in held if each.until_s >= last_s)
        cause = min(latest, key=lambda each: (each.reason in _SAY_LITTLE, -_src_end(each)))
        stop_s = min(cause.until_s, until_s)
        if until_s - stop_s <= EPS_S:
            stop_s = until_s
        yield at_s, stop_s, cause
        at_s = stop_s
    if until_s - at_s > EPS_S:
        yield at_s, until_s, rest
        at_s = until_s
    return at_s


def _src_end(cause: _Cause) -> float:
    return (cause.src.end_s if cause.src is not None else None) or 0.0


def _host_causes(index: Index, op: TracedOp) -> Iterator[_Cause]:
    """What may have kept ``op`` parked (rule R7), and until when."""
    for edge, src in index.sources(op):
        if edge.reason is EdgeReason.CAPACITY:
            if src.seen_s is not None:
                form = "room, which the end of {op} made"
                yield _Cause(src.seen_s, WaitKind.CAPACITY, form, src, edge.reason)
        elif edge.reason is not EdgeReason.STREAM_ORDER or not (op.needs or op.is_staged):
            # Work on the host may begin only when what is before it is seen to have ended.
            is_seen = src.stream == "host" or op.issued_s is None
            if op.is_staged and op.begun_s is not None and src.seen_s is not None:
                is_seen = is_seen or src.seen_s <= op.begun_s + EPS_S
            told_s = src.seen_s if is_seen else src.issued_s
            if told_s is not None:
                until = "" if is_seen else " to be submitted"
                form = f"{{op}}{until}{_because(edge)}"
                yield _Cause(told_s, WaitKind.PARKED, form, src, edge.reason, edge.array)


def _host_rest(op: TracedOp) -> _Cause:
    """What else may keep ``op`` parked."""
    return _Cause(0.0, WaitKind.NEED, ", then ".join(op.needs) or "the host to submit it")


def _device_causes(index: Index, op: TracedOp) -> Iterator[_Cause]:
    """What may have kept ``op`` waiting in its stream, and until when."""
    for edge, src in index.sources(op):
        if src.end_s is None or edge.reason is EdgeReason.CAPACITY:
            continue
        if edge.reason is EdgeReason.STREAM_ORDER and op.is_staged:
            continue  # its chunks are on streams of their own
        is_same = lane_of(src) == lane_of(op)
        if is_same and edge.reason is EdgeReason.STREAM_ORDER:
            src = _that_ran(index, src)
        assert src.end_s is not None
        kind = WaitKind.STREAM if is_same else WaitKind.EDGE
        yield _Cause(src.end_s, kind, f"{{op}}{_because(edge)}", src, edge.reason, edge.array)
    assert op.start_s is not None
    if op.engine in SERIAL and not op.is_staged:  # which begins with its first staged chunk
        for other in index.ended_on_engine(op, op.start_s):
            assert other.end_s is not None
            form = f"the {op.engine} engine, which {{op}} had"
            yield _Cause(other.end_s, WaitKind.ENGINE, form, other)
            return


def _that_ran(index: Index, op: TracedOp) -> TracedOp:
    """The op of the stream of ``op`` that kept it busy until ``op``, if that took no time."""
    for _ in range(_NUM_HOPS_MAX):
        if op.duration_s is None or op.duration_s > EPS_S:
            break
        before = next(
            (
                src
                for _, src in index.sources(op)
                if lane_of(src) == lane_of(op)
                and src.end_s is not None
                and src.duration_s is not None
                and abs(src.end_s - (op.end_s or 0.0)) <= EPS_S
            ),
            None,
        )
        if before is None:
            break
        op = before
    return op


def _device_rest(op: TracedOp) -> _Cause:
    if op.is_staged:
        return _Cause(0.0, WaitKind.STAGING, "its bytes to pass through pinned memory")
    return _Cause(0.0, WaitKind.DEVICE, "the device to begin")


def _because(edge: TracedEdge) -> str:
    words = edge.reason.value.replace("-", " ")
    return f": {words}" if edge.array is None else f": {words} on {{array}}"


def _say(index: Index, form: str, cause: _Cause, length_s: float | None = None) -> Sentence:
    array = None if cause.array is None else array_in_words(index, cause.array)
    return Sentence(form, length_s, cause.src, array)


def _wait(index: Index, piece: _Piece) -> Wait:
    start_s, end_s, cause = piece
    return Wait(
        cause.kind,
        start_s,
        end_s,
        cause.reason,
        cause.src,
        cause.array,
        _say(index, f"waited {{length}} for {cause.form}", cause, end_s - start_s),
    )
