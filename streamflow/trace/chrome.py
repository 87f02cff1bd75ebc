"""A trace in Chrome's trace event format, which Perfetto and ``chrome://tracing`` show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import Any, TypeAlias

from streamflow.trace.lanes import Bar, device_title, lane_of, lanes_of
from streamflow.trace.looks import printable
from streamflow.trace.model import Contents, TracedEdge, TracedOp
from streamflow.trace.trace import Trace

__all__ = ["to_chrome"]

_Event: TypeAlias = dict[str, Any]
_Slice: TypeAlias = tuple[Bar, int, int]  # with its process and thread in the file


def to_chrome(trace: Trace) -> str:
    """The timeline as JSON: a process for each device, a thread for each row of each stream.

    Each op is one event: a complete one (``X``) where its times are known, an instant (``i``)
    where it was seen to end or called for where they are not. Those that took no time stand in
    a row of their own. Copies into pinned chunks are more events, of category ``staging``.
    An edge between streams is a flow from slice to slice, named for its reason; one that would
    lead back in time can't be written and is left out. Memory is a counter with two series.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.

    Returns
    -------
    str
        A JSON object. The same trace gives the same text.

    Source
    ------
    "Trace Event Format", the document that Perfetto's and Catapult's readers follow: times in
    microseconds, ``bp: "e"`` to bind to the slice around a flow's end.
    """
    contents = trace._read()
    document = {"displayTimeUnit": "ns", "traceEvents": [*_events(contents)]}
    # Not as ASCII: Perfetto shows an escaped letter as its escape.
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _events(contents: Contents) -> Iterator[_Event]:
    pids: dict[tuple[int, int], int] = {}
    slices: list[_Slice] = []
    staged: list[_Slice] = []
    tid = 0
    for lane in lanes_of(contents):
        key = (lane.process, lane.device)
        if key not in pids:
            pids[key] = len(pids) + 1
            yield from _named(pids[key], None, device_title(contents, *key), pids[key])
        pid = pids[key]
        rows = [*lane.rows, *([lane.marks] if lane.marks else [])]
        for number, row in enumerate(rows):
            tid += 1
            title = lane.title
            if row is lane.marks:
                title += " (took no time)"
            elif number:
                title += f" ({number + 1})"
            yield from _named(pid, tid, title, tid)
            found = staged if lane.is_staging else slices
            found.extend((bar, pid, tid) for bar in row)
    for bar, pid, tid in sorted(staged, key=_start):
        yield {**_complete(bar, pid, tid, "staging"), "args": {"op": bar.op.id}}
    yield from _slices_and_flows(contents, slices)
    for each in contents.memory:
        pid = pids.setdefault((each.process, each.device), len(pids) + 1)
        yield {
            "ph": "C",
            "pid": pid,
            "ts": _us(round(each.time_s * 1e9)),
            "name": "memory",
            "args": {"in use": each.nbytes, "pinned": each.pinned_nbytes},
        }


def _named(pid: int, tid: int | None, title: str, place: int) -> Iterator[_Event]:
    what = "process" if tid is None else "thread"
    at: _Event = {"ph": "M", "pid": pid, **({} if tid is None else {"tid": tid})}
    yield {**at, "name": f"{what}_name", "args": {"name": _text(title)}}
    yield {**at, "name": f"{what}_sort_index", "args": {"sort_index": place}}


def _slices_and_flows(contents: Contents, slices: Sequence[_Slice]) -> Iterator[_Event]:
    """Each slice, and right behind it the flows that end and begin there.

    A reader sorts by time only and binds a flow to the slice that it read last in its thread.
    """
    places = {each[0].op.id: each for each in slices}
    outgoing: dict[int, list[tuple[int, TracedEdge]]] = {}
    incoming: dict[int, list[tuple[int, TracedEdge]]] = {}
    for number, edge in enumerate(contents.edges):
        src, dst = places[edge.src][0], places[edge.dst][0]
        is_seen = lane_of(src.op) != lane_of(dst.op)
        if is_seen and src.start_ns <= max(dst.start_ns, dst.end_ns - 1):
            outgoing.setdefault(edge.src, []).append((number, edge))
            incoming.setdefault(edge.dst, []).append((number, edge))
    later: list[_Event] = []
    for bar, pid, tid in _in_order(slices, incoming):
        op = bar.op
        event = _complete(bar, pid, tid, "host" if op.stream == "host" else "op")
        if op.duration_s is None:
            del event["dur"]
            event |= {"ph": "i", "s": "t"}
        event["args"] = _args(op)
        yield event
        for number, edge in incoming.get(op.id, ()):
            at_ns = max(bar.start_ns, places[edge.src][0].start_ns)
            flow = _flow("f", edge, number, pid, tid, at_ns) | {"bp": "e"}
            if at_ns > bar.start_ns:
                later.append(flow)
            else:
                yield flow
        for number, edge in outgoing.get(op.id, ()):
            flow = _flow("s", edge, number, pid, tid, bar.start_ns)
            flow["args"] = {"issued": edge.issued, "array": edge.array}
            yield flow
    yield from later


def _in_order(
    slices: Sequence[_Slice], incoming: dict[int, list[tuple[int, TracedEdge]]]
) -> Iterator[_Slice]:
    """By start, and at one moment so that each comes behind those that it waited for."""
    for _, group in groupby(sorted(slices, key=_start), key=_start):
        together = list(group)
        places = {each[0].op.id: place for place, each in enumerate(together)}
        graph = {
            op_id: [edge.src for _, edge in incoming.get(op_id, ()) if edge.src in places]
            for op_id in places
        }
        if any(places[src] > place for op_id, place in places.items() for src in graph[op_id]):
            # No program makes a cycle; a reader would leave the flow out.
            with suppress(CycleError):
                order = [*TopologicalSorter(graph).static_order()]
                together = [together[places[each]] for each in order]
        yield from together


def _start(each: _Slice) -> int:
    return each[0].start_ns


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _complete(bar: Bar, pid: int, tid: int, category: str) -> _Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": _us(bar.start_ns),
        "dur": _us(bar.end_ns - bar.start_ns),
        "name": _text(bar.op.name),
        "cat": category,
    }


def _flow(phase: str, edge: TracedEdge, number: int, pid: int, tid: int, at_ns: int) -> _Event:
    return {
        "ph": phase,
        "pid": pid,
        "tid": tid,
        "ts": _us(at_ns),
        "id": number,
        "name": edge.reason.value,
        "cat": edge.reason.value,
    }


def _text(text: str) -> str:
    """``text`` as Perfetto can read it: a backslash before the closing quote stops it."""
    text = printable(text)
    return f"{text} " if text.endswith("\\") else text


def _args(op: TracedOp) -> _Event:
    args: _Event = {"op": op.id, "kind": op.kind, "state": op.state}
    if op.nbytes:
        args["bytes"] = op.nbytes
    for name, text in (("where", op.where), ("scope", op.scope), ("task", op.task)):
        if text is not None:
            args[name] = _text(text)
    if op.needs:
        args["needs"] = ", ".join(map(_text, op.needs))
    if op.is_staged:
        args["staged"] = True
    if op.issued_s is not None and op.start_s is not None:
        args["queued_us"] = round(max(0.0, op.start_s - op.issued_s) * 1e6, 3)
    return args
