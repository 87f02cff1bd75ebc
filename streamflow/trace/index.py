"""Look-ups in a trace that several answers share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

from streamflow.trace.model import TracedArray, TracedEdge, TracedOp
from streamflow.trace.trace import Trace

__all__ = ["EPS_S", "SERIAL", "Engine", "Index", "engine_of"]

EPS_S = 1e-9
"""Times closer than this are the same: the two clocks of a trace round differently."""

SERIAL = ("h2d", "d2h")  # one copy at a time each; kernels run beside each other

Engine = tuple[int, int, str]
_Runs = tuple[list[float], list[float], list[float]]
_SeenKey = tuple[int, int, float]


def engine_of(op: TracedOp) -> Engine | None:
    """The part of a device that ``op`` occupies, unique in its trace; None without one."""
    return None if op.engine is None else (op.process, op.device, op.engine)


class Index:
    """A trace by id, by edge, by engine and by time; it takes one reading of the trace."""

    __slots__ = ("_ends", "_on_engine", "_runs", "_seen", "arrays", "edges_to", "ops")

    def __init__(self, trace: Trace) -> None:
        contents = trace._read()
        self.ops: dict[int, TracedOp] = {op.id: op for op in contents.ops}
        self.arrays: dict[int, TracedArray] = {array.id: array for array in contents.arrays}
        self.edges_to: dict[int, list[TracedEdge]] = {}
        for edge in contents.edges:
            self.edges_to.setdefault(edge.dst, []).append(edge)
        self._on_engine: dict[Engine, list[TracedOp]] = {}
        for op in contents.ops:
            engine = engine_of(op)
            if engine is not None and op.duration_s:
                self._on_engine.setdefault(engine, []).append(op)
        for ops in self._on_engine.values():
            ops.sort(key=_end)
        self._runs: dict[Engine, _Runs] = {}
        self._ends = {engine: [*map(_end, ops)] for engine, ops in self._on_engine.items()}
        self._seen: dict[int, list[tuple[_SeenKey, TracedOp]]] = {}
        ended = [op for op in contents.ops if op.seen_s is not None and op.duration_s is not None]
        # Nothing goes on because of an end that nobody waited for; older traces don't tell.
        awaited = [op for op in ended if op.is_awaited]
        for op in awaited or ended:
            self._seen.setdefault(op.process, []).append((_seen_key(op), op))
        for seen in self._seen.values():
            seen.sort(key=_first)

    def sources(self, op: TracedOp) -> Iterator[tuple[TracedEdge, TracedOp]]:
        """The edges that lead to ``op``, and where they come from."""
        for edge in self.edges_to.get(op.id, ()):
            yield edge, self.ops[edge.src]

    def engines(self) -> dict[Engine, list[TracedOp]]:
        """The ops that took time on each engine, by their ends."""
        return self._on_engine

    def busy_s(self, engine: Engine, start_s: float, end_s: float) -> float:
        """How much of a time ``engine`` had something to do."""
        return self._busy_until(engine, end_s) - self._busy_until(engine, start_s)

    def free_since(self, engine: Engine, at_s: float) -> float | None:
        """When what ``engine`` did before ``at_s`` had ended; ``at_s`` while it is busy.

        None if it had not done anything.
        """
        starts, ends, _ = self._runs_of(engine)
        place = bisect_right(starts, at_s - EPS_S)
        return min(ends[place - 1], at_s) if place else None

    def _busy_until(self, engine: Engine, at_s: float) -> float:
        starts, ends, before = self._runs_of(engine)
        place = bisect_right(starts, at_s)
        if not place:
            return 0.0
        return before[place - 1] + min(ends[place - 1], at_s) - starts[place - 1]

    def _runs_of(self, engine: Engine) -> _Runs:
        """When ``engine`` was busy, without a break: starts, ends, and how long before each."""
        runs = self._runs.get(engine)
        if runs is None:
            starts: list[float] = []
            ends: list[float] = []
            for op in sorted(self._on_engine.get(engine, ()), key=_start):
                if ends and _start(op) <= ends[-1]:
                    ends[-1] = max(ends[-1], _end(op))
                else:
                    starts.append(_start(op))
                    ends.append(_end(op))
            lengths = (end_s - start_s for start_s, end_s in zip(starts, ends, strict=True))
            runs = self._runs[engine] = starts, ends, [*accumulate(lengths, initial=0.0)]
        return runs

    def ended_on_engine(self, op: TracedOp, until_s: float) -> Iterator[TracedOp]:
        """Ops of the engine of ``op`` that ended by ``until_s``, the latest first."""
        engine = engine_of(op)
        ops = self._on_engine.get(engine, []) if engine is not None else []
        if not ops or engine is None:
            return
        for place in range(bisect_right(self._ends[engine], until_s + EPS_S) - 1, -1, -1):
            if ops[place].id != op.id:
                yield ops[place]

    def ran_behind(self, op: TracedOp) -> TracedOp | None:
        """The copy behind which ``op`` queued for its copy engine after its ``start_s``.

        A copy's ``start_s`` is when it could have begun; a copy engine takes one at a time.
        """
        if op.engine not in SERIAL or op.start_s is None or op.end_s is None:
            return None
        for other in self.ended_on_engine(op, op.end_s):
            if _end(other) <= op.start_s + EPS_S:
                break
            if _end(other) < op.end_s - EPS_S and _start(other) <= op.start_s + EPS_S:
                return other
        return None

    def seen_before(self, op: TracedOp) -> TracedOp | None:
        """The op whose end the loop saw last before ``op`` was called for.

        Of several that it saw at once, the last to end, and of these the longest.
        """
        seen = self._seen.get(op.process, [])
        until = (round(op.submitted_s / EPS_S) + 2, 0, 0.0)
        place = bisect_left(seen, until, key=_first)
        return next(
            (seen[at][1] for at in range(place - 1, -1, -1) if seen[at][1].id < op.id), None
        )


def _start(op: TracedOp) -> float:
    assert op.start_s is not None
    return op.start_s


def _end(op: TracedOp) -> float:
    assert op.end_s is not None
    return op.end_s


def _seen_key(op: TracedOp) -> _SeenKey:
    assert op.seen_s is not None
    return round(op.seen_s / EPS_S), round(_end(op) / EPS_S), op.duration_s or 0.0


def _first(pair: tuple[_SeenKey, TracedOp]) -> _SeenKey:
    return pair[0]
