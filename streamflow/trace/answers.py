"""Questions about a trace, answered from its timed ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamflow.runtime.units import spell_seconds
from streamflow.trace.trace import Trace

__all__ = ["Overlap", "overlap"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How well a device's engines were kept busy at the same time. Times in seconds.

    Attributes
    ----------
    busy_s : mapping of str to float
        Per engine, how long at least one op ran on it. In a trace of several devices the
        keys are ``"gpu0:h2d"``, ``"gpu1:h2d"``, .., with ``"process1:"`` before them in one of
        several processes; else plain ``"h2d"``, ``"d2h"`` and ``"compute"``.
    overlapped_s : float
        The time saved: the sum of ``busy_s`` less the time when any engine was busy.
    span_s : float
        From the first start to the last end of any timed op of a device; work on the host
        is not the device's.
    ideal_s : float
        The busiest engine's time: no schedule of this work is shorter.
    ratio : float
        ``overlapped_s`` as a part of what could have been overlapped, the sum of
        ``busy_s`` less ``ideal_s``; from 0 to 1. It is 0.0 where a single engine (or none)
        was used, since there was nothing to overlap.
    """

    busy_s: Mapping[str, float]
    overlapped_s: float
    span_s: float
    ideal_s: float
    ratio: float

    def __str__(self) -> str:
        width = max([len("engine"), *map(len, self.busy_s)])
        lines = [f"{'engine':<{width}}  {'busy':>9}  of span"]
        for engine, busy_s in self.busy_s.items():
            part = busy_s / self.span_s if self.span_s else 0.0
            lines.append(f"{engine:<{width}}  {spell_seconds(busy_s):>9}  {part:6.0%}")
        lines.append(
            f"span {spell_seconds(self.span_s)}, ideal {spell_seconds(self.ideal_s)}, "
            f"overlapped {spell_seconds(self.overlapped_s)} ({self.ratio:.0%} of what could be)"
        )
        return "\n".join(lines)


def overlap(trace: Trace) -> Overlap:
    """How much of the copying and computing ran at the same time.

    Parameters
    ----------
    trace : Trace
        Ops that are not timed yet, or occupy no engine, are left out of ``busy_s``.

    Returns
    -------
    Overlap
        All zeros for a trace without timed ops.
    """
    ops = [op for op in trace.ops if op.stream != "host"]
    is_single_device = len({(op.process, op.device) for op in ops}) <= 1
    is_single_process = len({op.process for op in ops}) <= 1
    timed = [
        (op, op.start_s, op.end_s) for op in ops if op.start_s is not None and op.end_s is not None
    ]
    intervals: dict[str, list[tuple[float, float]]] = {}
    for op, start_s, end_s in timed:
        if op.engine is not None:
            key = op.engine if is_single_device else f"gpu{op.device}:{op.engine}"
            if not is_single_process:
                key = f"process{op.process}:{key}"
            intervals.setdefault(key, []).append((start_s, end_s))
    busy_s = {key: _union_length(intervals[key]) for key in sorted(intervals)}
    any_s = _union_length(each for part in intervals.values() for each in part)
    *others_s, ideal_s = sorted(busy_s.values()) or [0.0]
    # Summed, not subtracted: exactly zero where nothing could have been overlapped.
    possible_s = sum(others_s)
    overlapped_s = min(max(0.0, possible_s + ideal_s - any_s), possible_s)
    return Overlap(
        busy_s=busy_s,
        overlapped_s=overlapped_s,
        span_s=max((end for _, _, end in timed), default=0.0)
        - min((start for _, start, _ in timed), default=0.0),
        ideal_s=ideal_s,
        ratio=overlapped_s / possible_s if possible_s else 0.0,
    )


def _union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the line the intervals cover, counting shared parts once."""
    covered = 0.0
    run_start = run_end = float("-inf")
    for start, end in sorted(intervals):
        if start > run_end:
            if run_end > run_start:
                covered += run_end - run_start
            run_start, run_end = start, end
        elif end > run_end:
            run_end = end
    return covered + (run_end - run_start if run_end > run_start else 0.0)
