"""What the page is told of a trace: columns of small integers and a table of texts."""

from __future__ import annotations

import base64
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streamflow.runtime.units import spell_seconds
from streamflow.trace.critical import critical_path
from streamflow.trace.explain import sentences_of
from streamflow.trace.gaps import gap_sentences, idle_gaps
from streamflow.trace.groups import synopsis
from streamflow.trace.index import Index
from streamflow.trace.lanes import lane_of, natural
from streamflow.trace.layout import place
from streamflow.trace.looks import COLOURS, FAILED_COLOUR, printable
from streamflow.trace.model import Contents, EdgeReason, TracedOp
from streamflow.trace.sentences import Sentence, name_on
from streamflow.trace.trace import Trace
from streamflow.trace.waits import array_in_words

__all__ = ["page_data"]

NUM_OPS_DRAWN_MAX = 6000
"""With more ops the graph begins with groups of them."""

_NUM_GROUPS_MAX = 120
_NUM_GAPS_TOLD_MAX = 2000  # the longest; of the others a reader sees nothing
_NUM_TICKS = 2**30  # times fit in 32 bits
_PLACE_SCALE = 16  # places are sent as whole sixteenths of a row

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Edges: TypeAlias = "dict[tuple[int, int], Counter[int]]"  # how many of each reason

_REASONS = [reason.value for reason in EdgeReason]
_REASON_OF = {reason: index for index, reason in enumerate(EdgeReason)}


def page_data(trace: Trace) -> Json:
    """All that the page shows of ``trace``; streamflow/trace/page/data.js reads it."""
    contents = trace._read()
    texts = _Texts()
    clock = _Clock(contents)
    ops, lanes = contents.ops, _lanes(contents)
    place_of = {op.id: place for place, op in enumerate(ops)}
    touched = (edge.array for edge in contents.edges if edge.array is not None)
    arrays = {array: place for place, array in enumerate(dict.fromkeys(touched))}
    overlap = trace.overlap()
    index = Index(trace)
    table: dict[str, Json] = {
        "tick_s": clock.tick_s,
        "end": clock.end,
        "ops": _ops(ops, lanes, texts, clock),
        "edges": _edges(contents, place_of, arrays),
        "reasons": list(_REASONS),
        "lanes": _lane_titles(contents, lanes),
        "said": _said([[*sentences_of(index, op)] for op in ops], place_of, texts),
        "gaps": _gaps(index, lanes, place_of, texts, clock),
        "arrays": _pack(texts(array_in_words(index, each)) for each in arrays),
        "memory": _memory(contents, clock),
        "critical": _pack(place_of[step.op.id] for step in critical_path(trace).steps),
        "views": _views(trace, contents, place_of),
        "colours": {**COLOURS, "failed": FAILED_COLOUR},
        "num_dropped": contents.num_dropped,
        "title": printable(", ".join(dict.fromkeys(each.name for each in contents.devices))),
        "overlap": {
            "ratio": overlap.ratio,
            "span_s": overlap.span_s,
            "busy_s": dict(overlap.busy_s),
        },
    }
    # Behind all others, whose numbers in the table of texts stay small.
    table["names"] = _pack(texts(op.name) for op in ops)
    table["texts"] = list(texts.all)
    return table


# -- encodings ---------------------------------------------------------------------------------


class _Texts:
    """Each text once, as it can be shown."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}
        self._known: dict[str | None, int] = {None: -1}

    def __call__(self, text: str | None) -> int:
        if text in self._known:
            return self._known[text]
        assert text is not None
        number = self._known[text] = self.all.setdefault(printable(text), len(self.all))
        return number


class _Clock:
    """Seconds as whole ticks from the trace's begin; -1 where a time is not known."""

    def __init__(self, contents: Contents) -> None:
        last_s = 0.0
        for op in contents.ops:
            last_s = max(last_s, op.submitted_s, op.end_s or 0.0, op.seen_s or 0.0)
        for each in contents.memory:
            last_s = max(last_s, each.time_s)
        self.tick_s = max(1e-9, last_s / _NUM_TICKS)
        self.end = max(1, self(last_s))

    def __call__(self, moment_s: float | None) -> int:
        return -1 if moment_s is None else max(0, round(moment_s / self.tick_s))


def _pack(numbers: Iterable[int]) -> Json:
    """A column, in the narrowest integers that hold it."""
    values = list(numbers)
    low, high = min(values, default=0), max(values, default=0)
    for code, bits in (("b", 8), ("h", 16), ("i", 24), ("i", 32)):
        if -(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1):
            packed = array(code, values)
            if sys.byteorder == "big":
                packed.byteswap()
            written = bytearray(packed.tobytes())
            if bits == 24:
                del written[3::4]
            return {"bits": bits, "base64": base64.b64encode(written).decode("ascii")}
    return {"list": list(values)}  # bytes of large arrays


# -- tables ------------------------------------------------------------------------------------


def _lanes(contents: Contents) -> dict[tuple[int, int, str], int]:
    """Lanes by their place on the page: copies in, computing, copies out, the rest, the host."""
    order = {"h2d": 0, "compute": 1, "d2h": 2}
    engines: dict[tuple[int, int, str], Counter[str | None]] = {}
    for op in contents.ops:
        engines.setdefault(lane_of(op), Counter())[op.engine] += 1

    def key(lane: tuple[int, int, str]) -> tuple[int, int, int, list[tuple[int, str]]]:
        known = [engine for engine in engines[lane] if engine in order]
        place = min((order[engine] for engine in known if engine), default=3)
        return *lane[:2], 4 if lane[2] == "host" else place, natural(lane[2])

    return {lane: index for index, lane in enumerate(sorted(engines, key=key))}


def _lane_titles(contents: Contents, lanes: dict[tuple[int, int, str], int]) -> Json:
    has_processes = len({process for process, _, _ in lanes}) > 1
    has_devices = len({device for _, device, _ in lanes}) > 1
    return [
        (f"process {process} " if has_processes else "")
        + (f"gpu{device} " if has_devices or has_processes else "")
        + printable(stream)
        for process, device, stream in lanes
    ]


def _ops(
    ops: Sequence[TracedOp],
    lanes: dict[tuple[int, int, str], int],
    texts: _Texts,
    clock: _Clock,
) -> Json:
    looks = [*COLOURS]
    columns: dict[str, Callable[[TracedOp], int]] = {
        "id": lambda op: op.id,
        "kind": lambda op: texts(op.kind),
        "lane": lambda op: lanes[lane_of(op)],
        "on": lambda op: texts(name_on(op).removeprefix(op.name)),
        "engine": lambda op: looks.index(op.engine) if op.engine in looks else len(looks) - 1,
        "nbytes": lambda op: op.nbytes,
        "submitted": lambda op: clock(op.submitted_s),
        "begun": lambda op: clock(op.begun_s),
        "issued": lambda op: clock(op.issued_s),
        "start": lambda op: clock(op.start_s),
        "end": lambda op: clock(op.end_s),
        "seen": lambda op: clock(op.seen_s),
        "state": lambda op: texts(op.state),
        "where": lambda op: texts(op.where),
        "scope": lambda op: texts(op.scope),
        "task": lambda op: texts(op.task),
        "needs": lambda op: texts(", ".join(op.needs) or None),
        "staged": lambda op: int(op.is_staged),
    }
    return {name: _pack(map(column, ops)) for name, column in columns.items()}


def _edges(contents: Contents, place_of: dict[int, int], arrays: dict[int, int]) -> Json:
    edges = contents.edges
    return {
        "src": _pack(place_of[edge.src] for edge in edges),
        "dst": _pack(place_of[edge.dst] for edge in edges),
        "reason": _pack(_REASON_OF[edge.reason] for edge in edges),
        "issued": _pack(int(edge.issued) for edge in edges),
        "array": _pack(-1 if edge.array is None else arrays[edge.array] for edge in edges),
    }


def _said(
    each: Sequence[Sequence[Sentence]], place_of: dict[int, int], texts: _Texts
) -> dict[str, Json]:
    """Sentences without what many have in common: ``num`` of each, and which is the headline."""
    rows = [sentence for sentences in each for sentence in sentences]
    lengths_s = (sentence.length_s for sentence in rows)
    return {
        "num": _pack(map(len, each)),
        "headline": _pack(map(_longest, each)),
        "form": _pack(texts(sentence.form) for sentence in rows),
        "length": _pack(texts(None if each is None else spell_seconds(each)) for each in lengths_s),
        "op": _pack(-1 if (op := sentence.op) is None else place_of[op.id] for sentence in rows),
        "array": _pack(texts(sentence.array) for sentence in rows),
    }


def _longest(sentences: Sequence[Sentence]) -> int:
    """The first of those with the greatest length; -1 without any."""
    lengths_s = [sentence.length_s or 0.0 for sentence in sentences]
    return lengths_s.index(max(lengths_s)) if lengths_s else -1


def _gaps(
    index: Index,
    lanes: dict[tuple[int, int, str], int],
    place_of: dict[int, int],
    texts: _Texts,
    clock: _Clock,
) -> Json:
    idle = idle_gaps(index, lane_of)
    told = [[*gap_sentences(index, gap.op, gap.before)] for gap in idle[:_NUM_GAPS_TOLD_MAX]]
    return {
        "lane": _pack(lanes[gap.place] for gap in idle),
        "start": _pack(clock(gap.start_s) for gap in idle),
        "end": _pack(clock(gap.end_s) for gap in idle),
        "before": _pack(place_of[gap.op.id] for gap in idle),
        **_said([*told, *([] for _ in idle[_NUM_GAPS_TOLD_MAX:])], place_of, texts),
    }


def _memory(contents: Contents, clock: _Clock) -> Json:
    curves: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for each in contents.memory:
        step = (clock(each.time_s), each.nbytes, each.pinned_nbytes)
        curve = curves.setdefault((each.process, each.device), [])
        if curve and curve[-1][0] == step[0]:
            curve.pop()  # only the last of one moment is ever seen
        curve.append(step)
    has_processes = len({process for process, _ in curves}) > 1
    has_devices = len(curves) > 1
    return [
        {
            "title": (f"process {process} " if has_processes else "")
            + (f"gpu{device}" if has_devices else ""),
            "time": _pack(time for time, _, _ in curve),
            "used": _pack(used for _, used, _ in curve),
            "pinned": _pack(pinned for _, _, pinned in curve),
        }
        for (process, device), curve in sorted(curves.items())
    ]


# -- views of the graph ------------------------------------------------------------------------


def _views(trace: Trace, contents: Contents, place_of: dict[int, int]) -> Json:
    """The graph as ops where they are few enough, by scope, by name, and in groups."""
    ops = contents.ops
    views: list[Json] = []
    if len(ops) <= NUM_OPS_DRAWN_MAX:
        merged = _merged(contents, place_of, range(len(ops)))
        views.append({"key": "ops", **_drawn(len(ops), merged)})
    else:
        of_op = [0] * len(ops)
        summary = synopsis(trace, max_groups=_NUM_GROUPS_MAX)
        order = sorted(summary.groups, key=lambda group: min(map(place_of.__getitem__, group.ops)))
        for number, group in enumerate(order):
            for op_id in group.ops:
                of_op[place_of[op_id]] = number
        labels = [group.label.removeprefix(f"{group.num_ops} x ") for group in order]
        views.append(_grouped("synopsis", labels, of_op, contents, place_of))
    for key, label_of in (("scope", _scope_label), ("name", _name_label)):
        numbers: dict[str, int] = {}
        of_op = [numbers.setdefault(label_of(op), len(numbers)) for op in ops]
        if len(numbers) <= NUM_OPS_DRAWN_MAX:
            views.append(_grouped(key, [*numbers], of_op, contents, place_of))
    return views


def _scope_label(op: TracedOp) -> str:
    return "outside of scopes" if op.scope is None else op.scope


def _name_label(op: TracedOp) -> str:
    return op.kind if op.name.rpartition("#")[0] == op.kind else op.name


def _grouped(
    key: str,
    labels: Sequence[str],
    of_op: Sequence[int],
    contents: Contents,
    place_of: dict[int, int],
) -> Json:
    drawn = _drawn(len(labels), _merged(contents, place_of, of_op))
    return {"key": key, "labels": list(map(printable, labels)), "of_op": _pack(of_op), **drawn}


def _merged(contents: Contents, place_of: dict[int, int], of_op: Sequence[int]) -> Edges:
    """The edges between nodes, and how many of the trace's each stands for."""
    edges: Edges = {}
    for edge in contents.edges:
        src, dst = of_op[place_of[edge.src]], of_op[place_of[edge.dst]]
        if src != dst:
            edges.setdefault((src, dst), Counter())[_REASON_OF[edge.reason]] += 1
    return edges


def _drawn(num_nodes: int, edges: Edges) -> dict[str, Json]:
    placed = place(num_nodes, list(edges))
    bends = [placed.bends.get(edge, []) for edge in edges]

    def scaled(numbers: Iterable[float]) -> Json:
        return _pack(round(number * _PLACE_SCALE) for number in numbers)

    order = _REASON_OF[EdgeReason.STREAM_ORDER]
    return {
        "scale": _PLACE_SCALE,
        "x": scaled(placed.x),
        "y": scaled(placed.y),
        "band": _pack(placed.band),
        "src": _pack(src for src, _ in edges),
        "dst": _pack(dst for _, dst in edges),
        # The reason that says most: any other than the order of a stream.
        "reason": _pack(
            max(reasons, key=lambda reason: (reason != order, reasons[reason]))
            for reasons in edges.values()
        ),
        "num": _pack(reasons.total() for reasons in edges.values()),
        "num_bends": _pack(map(len, bends)),
        "bend_x": scaled(x for route in bends for x, _ in route),
        "bend_y": scaled(y for route in bends for _, y in route),
    }
