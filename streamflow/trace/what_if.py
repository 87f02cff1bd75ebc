"""What a program would take with other rates, lanes or depth: its trace, run once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from streamflow.config import Settings, SimOptions
from streamflow.runtime.units import spell_seconds
from streamflow.trace.durations import Rates, durations
from streamflow.trace.host_order import calls
from streamflow.trace.items import item_calls
from streamflow.trace.model import (
    Contents,
    EdgeReason,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)
from streamflow.trace.rerun import Machine, Times, rerun
from streamflow.trace.trace import Trace

__all__ = ["WhatIf", "what_if"]

_HOST_WORKERS = 4
_PART_OFF = 0.05
"""A replay that is further off without any change isn't to be trusted with one."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What would change. Times in seconds.

    Attributes
    ----------
    trace : Trace
        With the times, lanes and edges that are predicted; pinned memory is left out.
    span_s : float
        From the first start to the last end of its ops.
    before_s : float
        The same of the trace that was asked.
    speedup : float
        ``before_s`` over ``span_s``: above 1 it would be faster.
    replayed_s : float
        The same of a replay with nothing changed. Where that is far from ``before_s``, the trace
        doesn't tell all that the program waited for, and ``span_s`` may be as far off.
    changes : str
        What was asked, in words.
    """

    trace: Trace
    span_s: float
    before_s: float
    replayed_s: float
    changes: str

    @property
    def speedup(self) -> float:
        """How many times as fast it would be."""
        return self.before_s / self.span_s if self.span_s else 1.0

    def __str__(self) -> str:
        line = (
            f"with {self.changes}: {spell_seconds(self.span_s)} instead of "
            f"{spell_seconds(self.before_s)} ({self.speedup:.2f} times as fast)"
        )
        if abs(self.replayed_s - self.before_s) > _PART_OFF * self.before_s:
            line += (
                f"; don't trust it far: with nothing changed it would be "
                f"{spell_seconds(self.replayed_s)}, so the trace doesn't tell all"
            )
        return line


def what_if(
    trace: Trace,
    *,
    compute_lanes: int | None = None,
    h2d_rate: float | None = None,
    d2h_rate: float | None = None,
    kernel_speed: float | None = None,
    copy_engines: int | None = None,
    compute_slots: int | None = None,
    depth: int | None = None,
) -> WhatIf:
    """See :meth:`Trace.what_if <streamflow.trace.trace.Trace.what_if>`."""
    counts = {
        "compute_lanes": compute_lanes,
        "copy_engines": copy_engines,
        "compute_slots": compute_slots,
        "depth": depth,
    }
    rates = {"h2d_rate": h2d_rate, "d2h_rate": d2h_rate, "kernel_speed": kernel_speed}
    for name, count in counts.items():
        _check_count(name, count)
    for name, rate in rates.items():
        _check_rate(name, rate)
    ops = _replayed(trace)
    known = {op.id for op in ops}
    edges = [edge for edge in trace.edges if edge.src in known and edge.dst in known]
    indices = sorted({op.device for op in ops})
    sim = SimOptions(
        clock="virtual",
        check_races=False,
        devices=len(indices),
        copy_engines=copy_engines or 2,
        compute_slots=compute_slots or SimOptions().compute_slots,
    )
    chooses_lanes = compute_lanes is not None or depth is not None
    machine = Machine(
        settings=Settings(sim=sim),
        devices=indices,
        compute_lanes=(compute_lanes or _num_lanes(trace, ops)) if chooses_lanes else None,
        host_workers=max(_HOST_WORKERS, _most_at_a_time([op for op in ops if op.kind == "host"])),
    )
    times = rerun(
        ops,
        [*edges, *_thinned_reads(ops, edges)] if chooses_lanes else edges,
        calls(ops, item_calls(ops, depth)),
        durations(ops, Rates()),
        durations(ops, Rates(h2d_rate, d2h_rate, kernel_speed or 1.0)),
        machine,
    )
    told = [f"{name}={each:g}" for name, each in (counts | rates).items() if each is not None]
    if any(op.is_staged and rates.get(f"{op.engine}_rate") is not None for op in ops):
        told.append("also where pageable copies go only as fast as the host stages them")
    predicted = _predicted(trace, ops, edges, times, compute_lanes)
    span_s = _span_s(predicted.ops)
    return WhatIf(
        trace=predicted,
        span_s=span_s,
        before_s=_span_s(ops),
        replayed_s=what_if(trace).span_s if told else span_s,
        changes=", ".join(told) or "nothing changed",
    )


def _check_count(name: str, count: object) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} takes an int, found {count!r}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, found {count}")
    if name == "copy_engines" and count > 2:
        raise ValueError(f"copy_engines is 1 or 2, found {count}")


def _check_rate(name: str, rate: object) -> None:
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"{name} takes a number, found {rate!r}")
    if not (rate > 0 and isfinite(rate)):
        raise ValueError(f"{name} must be positive and finite, found {rate}")


def _replayed(trace: Trace) -> list[TracedOp]:
    """The ops that have their times, in the order of their calls; raises what speaks against it."""
    if trace.num_dropped:
        raise ValueError(
            f"{trace.num_dropped} ops of the trace were dropped, and what waited for them is not "
            "known: trace a shorter piece, or raise max_ops"
        )
    failed = [op for op in trace.ops if op.state == "failed"]
    if failed:
        raise ValueError(
            f"{len(failed)} ops of the trace have failed ({failed[0].name} first): what they would "
            "have taken is not known"
        )
    if len({op.process for op in trace.ops}) > 1:
        raise ValueError("the trace is of several processes: ask the trace of each")
    ops = [op for op in trace.ops if op.start_s is not None and op.end_s is not None]
    if not ops:
        raise ValueError(
            "no op of the trace has its times: wait for the work inside the block that is traced"
        )
    return sorted(ops, key=lambda op: op.submitted_s)


def _num_lanes(trace: Trace, ops: Sequence[TracedOp]) -> int:
    """How many compute lanes there were."""
    told = [device.compute_lanes for device in trace.devices if device.compute_lanes]
    if told:
        return max(told)
    used = [op.stream.removeprefix("compute") for op in ops if op.stream.startswith("compute")]
    seen = [int(number) + 1 for number in used if number.isdecimal()]
    return max([Settings().compute_lanes, *seen])


def _most_at_a_time(ops: Sequence[TracedOp]) -> int:
    changes = [(op.start_s or 0.0, 1) for op in ops] + [(op.end_s or 0.0, -1) for op in ops]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _thinned_reads(ops: Sequence[TracedOp], edges: Sequence[TracedEdge]) -> list[TracedEdge]:
    """Edges from reads that a later one on the same lane stood for: now their lanes may differ."""
    by_id = {op.id: op for op in ops}
    written: dict[tuple[int, int], int] = {}  # by array and reader: the write it has read
    readers: dict[tuple[int, int, str], list[int]] = {}
    for edge in edges:
        if edge.array is not None and edge.reason in (
            EdgeReason.READ_AFTER_WRITE,
            EdgeReason.ALLOCATION,
        ):
            written[edge.array, edge.dst] = max(edge.src, written.get((edge.array, edge.dst), 0))
    for (array, reader), write in written.items():
        if array in by_id[reader].reads:
            readers.setdefault((array, write, by_id[reader].stream), []).append(reader)
    found: list[TracedEdge] = []
    for edge in edges:
        if edge.reason in (EdgeReason.WRITE_AFTER_READ, EdgeReason.FREE):
            array = -1 if edge.array is None else edge.array
            write = written.get((array, edge.src), -1)
            stands_for = readers.get((array, write, by_id[edge.src].stream), [])
            found.extend(replace(edge, src=each) for each in stands_for if each < edge.src)
    return found


def _span_s(ops: Sequence[TracedOp]) -> float:
    starts = [op.start_s for op in ops if op.start_s is not None]
    ends = [op.end_s for op in ops if op.end_s is not None]
    return max(ends) - min(starts)


# -- the predicted trace ---------------------------------------------------------------------


def _predicted(
    trace: Trace,
    ops: Sequence[TracedOp],
    edges: Sequence[TracedEdge],
    times: Sequence[Times],
    compute_lanes: int | None,
) -> Trace:
    made = [_moved(op, its) for op, its in zip(ops, times, strict=True)]
    waited = {
        (ops[src].id, op.id) for op, its in zip(ops, times, strict=True) for src in its.waited
    }
    kept = [
        replace(edge, issued=(edge.src, edge.dst) in waited)
        for edge in edges
        if edge.reason is not EdgeReason.STREAM_ORDER
    ]
    told = {(edge.src, edge.dst) for edge in kept}
    newest: dict[tuple[int, str], int] = {}
    for op in sorted(made, key=lambda op: op.position):
        if op.stream != "host":
            src = newest.get((op.device, op.stream))
            if src is not None and (src, op.id) not in told:
                kept.append(TracedEdge(src, op.id, EdgeReason.STREAM_ORDER, False))
            newest[op.device, op.stream] = op.id
    made.sort(key=lambda op: (op.submitted_s, op.id))
    place = {op.id: number for number, op in enumerate(made)}
    kept.sort(key=lambda edge: place[edge.dst])
    devices: Sequence[TracedDevice] = trace.devices
    if compute_lanes is not None:
        devices = [replace(device, compute_lanes=compute_lanes) for device in devices]
    arrays: Sequence[TracedArray] = trace.arrays
    contents = Contents(
        tuple(made), tuple(kept), tuple(arrays), _memory(trace, made), tuple(devices)
    )
    return Trace(lambda: contents)


def _moved(op: TracedOp, its: Times) -> TracedOp:
    seen_s = None
    if op.seen_s is not None and op.end_s is not None:
        # Nobody looked for the end of the others: when they would be seen says nothing.
        seen_s = its.end_s + (max(0.0, op.seen_s - op.end_s) if op.is_awaited else 0.0)
    return replace(
        op,
        stream=its.stream or op.stream,
        position=its.position,
        submitted_s=its.called_s,
        begun_s=its.begun_s,
        issued_s=its.issued_s,
        start_s=its.start_s,
        end_s=its.end_s,
        seen_s=seen_s,
    )


def _memory(trace: Trace, ops: Sequence[TracedOp]) -> tuple[TracedMemory, ...]:
    """The memory curve, as allocations and frees would run."""
    found: list[TracedMemory] = []
    for index in sorted({op.device for op in ops}):
        changes = [
            (op.start_s or 0.0, op.nbytes) if op.kind == "empty" else (op.end_s or 0.0, -op.nbytes)
            for op in ops
            if op.device == index and op.kind in ("empty", "free")
        ]
        last = [each.nbytes for each in trace.memory if each.device == index][-1:] or [0]
        nbytes = last[0] - sum(change for _, change in changes)
        for at_s, change in sorted(changes):
            nbytes += change
            found.append(TracedMemory(at_s, nbytes, 0, index))
    return tuple(sorted(found, key=lambda each: each.time_s))
