"""The rows of a timeline: one lane for each stream, more rows where its ops overlap."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from streamflow.trace.model import Contents, TracedOp

__all__ = ["Bar", "Lane", "device_title", "lane_of", "lanes_of", "natural"]

_ENGINES = {"h2d": 0, "compute": 1, "d2h": 2}
_NONE, _HOST, _STAGING = 3, 4, 5
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Bar:
    """The time an op took, on the device or in one of the host's threads."""

    op: TracedOp
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream of one device of one process.

    Attributes
    ----------
    process, device : int
    title : str
        The stream's name; ``"host"`` for work on the host, ``"host: staging"`` for copies
        into pinned chunks.
    rows : tuple of tuple of Bar
        By start; the bars of one row don't overlap. Each op of the stream that took time is in
        one row.
    marks : tuple of Bar
        Ops that took no time, by start, and those whose times are not known: they stand where
        the loop saw them end, else where they were given to the stream or called for.
    is_staging : bool
        Its bars are copies into pinned chunks, of ops that have their own bars elsewhere.
    """

    process: int
    device: int
    title: str
    rows: tuple[tuple[Bar, ...], ...]
    marks: tuple[Bar, ...]
    is_staging: bool


def lane_of(op: TracedOp) -> tuple[int, int, str]:
    """Process, device, and stream or lane: work on the host has the stream ``"host"``."""
    return op.process, op.device, op.stream


def lanes_of(contents: Contents) -> tuple[Lane, ...]:
    """The lanes of a trace: by process and device, copies in first, the host last."""
    streams: dict[tuple[int, int, str], list[TracedOp]] = {}
    staging: dict[tuple[int, int], list[Bar]] = {}
    for op in contents.ops:
        streams.setdefault(lane_of(op), []).append(op)
        if op.is_staged and op.begun_s is not None and op.issued_s is not None:
            bar = Bar(op, _ns(op.begun_s), _ns(op.issued_s))
            if bar.end_ns > bar.start_ns:
                staging.setdefault((op.process, op.device), []).append(bar)
    ranked = []
    for (process, device, stream), ops in streams.items():
        bars = [_bar(op) for op in ops]
        rows = _rows(bar for bar in bars if bar.end_ns > bar.start_ns)
        marks = tuple(sorted((bar for bar in bars if bar.end_ns == bar.start_ns), key=_start))
        engines = Counter(op.engine for op in ops if op.engine is not None)
        rank = (
            _ENGINES.get(max(engines, key=lambda each: engines[each]), _NONE) if engines else _NONE
        )
        rank = _HOST if stream == "host" else rank
        ranked.append(((process, device, rank, natural(stream)), stream, rows, marks))
    for (process, device), bars in staging.items():
        ranked.append(((process, device, _STAGING, []), "host: staging", _rows(bars), ()))
    ranked.sort(key=lambda each: each[0])
    return tuple(
        Lane(process, device, title, rows, marks, rank == _STAGING)
        for (process, device, rank, _), title, rows, marks in ranked
    )


def device_title(contents: Contents, process: int, device: int) -> str:
    """What a picture calls a device."""
    names = {(each.process, each.index): each.name for each in contents.devices}
    title = f"gpu{device}"
    if (process, device) in names:
        title = f"{title}: {names[process, device]}"
    has_processes = len({op.process for op in contents.ops}) > 1
    return f"process {process}, {title}" if has_processes else title


def _bar(op: TracedOp) -> Bar:
    if op.start_s is not None and op.end_s is not None:
        start_ns = _ns(op.start_s)
        return Bar(op, start_ns, max(start_ns, _ns(op.end_s)))
    at_s = next(each for each in (op.seen_s, op.issued_s, op.submitted_s) if each is not None)
    return Bar(op, _ns(at_s), _ns(at_s))


def _ns(time_s: float) -> int:
    # Whole: what ends where the next begins does so in the file, too.
    return round(time_s * 1e9)


def _start(bar: Bar) -> int:
    return bar.start_ns


def _rows(bars: Iterable[Bar]) -> tuple[tuple[Bar, ...], ...]:
    """Each bar in the first row that is free at its start."""
    rows: list[list[Bar]] = []
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # until when, and which row
    for bar in sorted(bars, key=_start):
        while taken and taken[0][0] <= bar.start_ns:
            heappush(free, heappop(taken)[1])
        if not free:
            free.append(len(rows))
            rows.append([])
        number = heappop(free)
        rows[number].append(bar)
        heappush(taken, (bar.end_ns, number))
    return tuple(map(tuple, rows))


def natural(text: str) -> list[tuple[int, str]]:
    """Sorts ``"compute10"`` behind ``"compute9"``."""
    return [
        (int(part), "") if number % 2 else (-1, part)
        for number, part in enumerate(_NUMBER.split(text))
    ]
