"""What a trace shows that could be better: each rule looks for one mistake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.index import EPS_S, Engine, Index, engine_of
from streamflow.trace.lanes import lane_of
from streamflow.trace.model import EdgeReason, TracedOp
from streamflow.trace.trace import Trace
from streamflow.trace.waits import Wait, WaitKind, array_in_words, waits_of

__all__ = ["Hint", "HintKind", "hints"]

PART_OF_RUN = 0.1
"""What costs less than this part of the time on the device is not worth a hint."""

PAGEABLE_NBYTES = 16 << 20
"""A pageable array from this size on is copied in several chunks: its staging shows."""
NUM_PAGEABLE = 3
"""Copies of such arrays, made by one line, before it is worth pinning them."""

NUM_REUSED = 3
"""Times that one array is overwritten while something still uses what was in it."""

NUM_ON_STREAM = 6
"""Ops that wait on one stream for something that they have nothing to do with."""

NUM_STARVED = 3
"""Staged copies that wait for staging while their engine has nothing to do."""
PART_STARVED = 0.25
"""Of the time on the device: the first chunk of each has to be copied by a thread all the same."""

SMALL_S = 10e-6
"""A launch costs the host a few microseconds: kernels shorter than this hardly hide it."""
NUM_SMALL = 64
"""Small launches before capturing them is worth the lines."""
NUM_REPEATED = 8
"""Times that each of their lines has been reached: a step that comes again."""

NUM_AWAITED = 8
"""Ops called for while the device had nothing to do, each after the end of another."""
PART_AWAITED = 0.7
"""Of all ops with work on an engine: below this, the program awaits once for several ops."""

NUM_FOR_ROOM = 3
"""Ops that wait for room in the limit of a scope."""


class HintKind(Enum):
    """The mistake that a hint names."""

    PAGEABLE = "pageable"
    FALSE_DEPENDENCY = "false-dependency"
    ONE_STREAM = "one-stream"
    STAGING = "staging"
    SMALL_OPS = "small-ops"
    AWAIT_EACH = "await-each"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that is worth a look.

    Attributes
    ----------
    kind : HintKind
    text : str
        What was seen, with its figures and lines, and what to try.
    ops : tuple of TracedOp
        Those it was seen on.
    """

    kind: HintKind
    text: str
    ops: tuple[TracedOp, ...]

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


class _Run:
    """What every rule looks at."""

    def __init__(self, trace: Trace) -> None:
        self.index = Index(trace)
        self.ran = [op for op in self.index.ops.values() if op.engine is not None and op.duration_s]
        starts = [op.start_s for op in self.ran if op.start_s is not None]
        ends = [op.end_s for op in self.ran if op.end_s is not None]
        self.span_s = max(ends, default=0.0) - min(starts, default=0.0)
        self.waits = {op.id: waits_of(self.index, op) for op in self.index.ops.values()}

    def is_worth(self, seconds: float, part: float = PART_OF_RUN) -> bool:
        return seconds > EPS_S and seconds >= part * self.span_s

    def idle_s(self, waits: Iterable[tuple[TracedOp, Wait]]) -> float:
        """How long the engines of ops had nothing to do while these waited.

        Time in which several ops waited for one engine counts once.
        """
        idle_s = 0.0
        until_s: dict[Engine, float] = defaultdict(float)
        for op, wait in sorted(waits, key=lambda each: each[1].start_s):
            engine = engine_of(op)
            if engine is None or wait.end_s is None:
                continue
            start_s = max(wait.start_s, until_s[engine])
            if wait.end_s > start_s:
                idle_s += wait.end_s - start_s - self.index.busy_s(engine, start_s, wait.end_s)
                until_s[engine] = wait.end_s
        return idle_s


def hints(trace: Trace) -> tuple[Hint, ...]:
    """See :meth:`Trace.hints <streamflow.trace.trace.Trace.hints>`."""
    run = _Run(trace)
    return tuple(hint for rule in _RULES for hint in rule(run))


def _pageable(run: _Run) -> Iterable[Hint]:
    """Large arrays that are pageable, copied again and again by one line."""
    lines: dict[tuple[str, str | None], list[TracedOp]] = defaultdict(list)
    for op in run.ran:
        if op.is_staged and op.nbytes >= PAGEABLE_NBYTES:
            lines[op.kind, op.where].append(op)
    for (kind, where), ops in lines.items():
        if len(ops) >= NUM_PAGEABLE and run.is_worth(sum(op.duration_s or 0.0 for op in ops)):
            way = "into" if kind == "get" else "from"
            yield Hint(
                HintKind.PAGEABLE,
                f"{len(ops)} times {kind} of {_most(ops)} {way} a pageable array at "
                f"{where}: each byte is copied twice. Pin the array once with dev.pin(array), or "
                "fill a lease of dev.pinned",
                tuple(ops),
            )


def _false_dependency(run: _Run) -> Iterable[Hint]:
    """An array that is overwritten as a whole while something still uses the old contents."""
    found: dict[int, list[tuple[TracedOp, Wait]]] = defaultdict(list)
    for op in run.ran:
        for wait in run.waits[op.id]:
            if (
                wait.reason in (EdgeReason.WRITE_AFTER_READ, EdgeReason.WRITE_AFTER_WRITE)
                and wait.array is not None
                and _overwrites(run, op, wait.array)
            ):
                found[wait.array].append((op, wait))
    for array, waits in found.items():
        lost_s = run.idle_s(waits)
        if len(waits) >= NUM_REUSED and run.is_worth(lost_s):
            ops = [op for op, _ in waits]
            yield Hint(
                HintKind.FALSE_DEPENDENCY,
                f"{array_in_words(run.index, array)} was overwritten {len(ops)} times at "
                f"{_lines(ops)} while something still used what was in it: the {ops[0].engine} "
                f"engine had nothing to do for {spell_seconds(lost_s)} of that. Take turns with "
                "a second array, or make a new one each time",
                tuple(ops),
            )


def _overwrites(run: _Run, op: TracedOp, array: int) -> bool:
    known = run.index.arrays.get(array)
    return (
        array in op.writes
        and array not in op.reads
        and (known is None or op.nbytes >= known.nbytes)
        and not any(
            edge.array == array and edge.reason is EdgeReason.READ_AFTER_WRITE
            for edge, _ in run.index.sources(op)
        )
    )


def _one_stream(run: _Run) -> Iterable[Hint]:
    """A stream whose order makes work wait for other work that it has nothing to do with."""
    found: dict[tuple[int, int, str], list[tuple[TracedOp, Wait]]] = defaultdict(list)
    for op in run.ran:
        for wait in run.waits[op.id]:
            src = _by_order_only(run, op, wait)
            if src is not None and engine_of(src) != engine_of(op):
                found[lane_of(op)].append((op, wait))
    for (_, _, stream), waits in found.items():
        lost_s = run.idle_s(waits)
        if len(waits) >= NUM_ON_STREAM and run.is_worth(lost_s):
            ops = [op for op, _ in waits]
            yield Hint(
                HintKind.ONE_STREAM,
                f"{len(ops)} ops at {_lines(ops)} waited on stream {stream} for others, whose data "
                "they have nothing to do with, while their engines were idle for "
                f"{spell_seconds(lost_s)}: leave stream= out, and only data order them",
                tuple(ops),
            )


def _by_order_only(run: _Run, op: TracedOp, wait: Wait) -> TracedOp | None:
    """The op that ``op`` waited for on its own stream; None if data or the program asked for it."""
    src, reason = wait.src, wait.reason
    # A staged copy, which is on streams of its own, comes after a record on the one it was given.
    while src is not None and lane_of(src) == lane_of(op):
        if reason is not EdgeReason.STREAM_ORDER and src.kind != "record":
            return None
        if src.engine is not None:
            return src
        before = run.index.sources(src)
        src = next((each for edge, each in before if edge.reason is EdgeReason.STREAM_ORDER), None)
        reason = EdgeReason.STREAM_ORDER
    return None


def _staging(run: _Run) -> Iterable[Hint]:
    """Staged copies that wait for threads or chunks while their engine is idle."""
    found: dict[str, list[tuple[TracedOp, Wait]]] = defaultdict(list)
    for op in run.ran:
        for wait in run.waits[op.id]:
            if (
                op.engine is not None
                and wait.kind is WaitKind.STAGING
                and run.idle_s([(op, wait)]) > EPS_S
            ):
                found[op.engine].append((op, wait))
    for engine, waits in found.items():
        lost_s = run.idle_s(waits)
        if len(waits) >= NUM_STARVED and run.is_worth(lost_s, PART_STARVED):
            ops = [op for op, _ in waits]
            yield Hint(
                HintKind.STAGING,
                f"{len(ops)} copies of pageable arrays at {_lines(ops)} waited "
                f"{spell_seconds(lost_s)} for staging while the {engine} engine had nothing to "
                "do: give it more threads (staging_threads), or pin the arrays",
                tuple(ops),
            )


def _small_ops(run: _Run) -> Iterable[Hint]:
    """The same few kernels of a few microseconds, launched over and over."""
    small = [op for op in run.ran if op.kind == "launch" and (op.duration_s or 0.0) < SMALL_S]
    lines: dict[str | None, list[TracedOp]] = defaultdict(list)
    for op in small:
        lines[op.where].append(op)
    ops = [op for each in lines.values() if len(each) >= NUM_REPEATED for op in each]
    if len(ops) >= NUM_SMALL and 2 * len(ops) >= len(run.ran):
        mean_s = sum(op.duration_s or 0.0 for op in ops) / len(ops)
        yield Hint(
            HintKind.SMALL_OPS,
            f"{len(ops)} launches at {_lines(ops)} ran {spell_seconds(mean_s)} each: their calls "
            "take as long as they do. Record the step once, with dev.captured(function) or "
            "dev.capture(), and launch all of it at once",
            tuple(ops),
        )


def _await_each(run: _Run) -> Iterable[Hint]:
    """Ops that are called for one at a time, each after the end of the one before."""
    called = sorted(run.ran, key=lambda op: (op.submitted_s, op.id))
    alone: list[TracedOp] = []
    busy_until_s = float("inf")
    for op in called:
        if busy_until_s <= op.submitted_s + EPS_S:
            alone.append(op)
        ended_s = op.end_s or 0.0
        busy_until_s = ended_s if op is called[0] else max(busy_until_s, ended_s)
    if len(alone) >= NUM_AWAITED and len(alone) >= PART_AWAITED * (len(called) - 1):
        yield Hint(
            HintKind.AWAIT_EACH,
            f"{len(alone)} of {len(called)} ops, at {_lines(alone)}, were called for only when "
            "all before them had ended: the device waited for the program each time. Submit "
            "ahead and await the last result; the order follows from the data",
            tuple(alone),
        )


def _memory(run: _Run) -> Iterable[Hint]:
    """Ops that wait for room in a limit on memory."""
    found: list[tuple[TracedOp, float]] = []
    for op in run.index.ops.values():
        if any(need.startswith(_MEMORY_NEEDS) for need in op.needs):
            room_s = sum(
                wait.length_s
                for wait in run.waits[op.id]
                if wait.kind in (WaitKind.CAPACITY, WaitKind.NEED)
            )
            if room_s > EPS_S:
                found.append((op, room_s))
    lost_s = sum(room_s for _, room_s in found)
    if len(found) >= NUM_FOR_ROOM and run.is_worth(lost_s):
        ops = [op for op, _ in found]
        words = ", ".join(dict.fromkeys(need for op in ops for need in op.needs))
        yield Hint(
            HintKind.MEMORY,
            f"{len(ops)} ops at {_lines(ops)} waited {spell_seconds(lost_s)} in all for {words}: "
            "a larger limit lets them start sooner",
            tuple(ops),
        )


_MEMORY_NEEDS = "the limit of scope "

_RULES: tuple[Callable[[_Run], Iterable[Hint]], ...] = (
    _pageable,
    _false_dependency,
    _one_stream,
    _staging,
    _small_ops,
    _await_each,
    _memory,
)


def _lines(ops: Sequence[TracedOp]) -> str:
    """The lines that called for ``ops``, in words."""
    lines = list(dict.fromkeys(op.where for op in ops if op.where is not None))
    shown = ", ".join(lines[:3]) or "unknown lines"
    return shown + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _most(ops: Sequence[TracedOp]) -> str:
    return spell_bytes(max(op.nbytes for op in ops))
