"""What a device says about itself: counters, handles, and a page for whoever debugs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from streamflow.backends.base import PoolInfo
from streamflow.runtime.core import Core

__all__ = ["DeviceStats", "live", "report", "stats"]


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Counters of one device since it was entered."""

    num_submitted: int
    num_finished: int
    num_pending: int
    """Parked or staging."""
    num_in_flight: int
    memory: PoolInfo
    pinned_nbytes: int
    """Pinned bytes under the budget of results, live and cached."""


def stats(core: Core, memory: PoolInfo) -> DeviceStats:
    """``Device.stats``."""
    return DeviceStats(
        num_submitted=core.num_submitted,
        num_finished=core.num_finished,
        num_pending=len(core.pending_ops()),
        num_in_flight=sum(len(line.inflight) for line in core.lines),
        memory=memory,
        pinned_nbytes=core.pinned.counted_nbytes,
    )


def live(core: Core) -> dict[str, int]:
    """``Device.live``."""
    counts: Counter[str] = Counter()
    counts["array"] = len(core.memory.live)
    counts["pinned block"] = core.pinned.num_live
    counts["stream"] = sum(line.is_ordered and line.stream is not None for line in core.lines)
    counts["op"] = len(core.pending_ops()) + sum(len(line.inflight) for line in core.lines)
    return {kind: count for kind, count in counts.items() if count}


def report(core: Core, title: str) -> str:
    """``Device.report``."""
    health = "healthy" if core.lost is None else f"lost: {core.lost}"
    rows = [f"{title}, {health}"]
    rows += [
        f"  {line.name}: {len(line.inflight)} in flight, oldest {line.inflight[0].op.name}"
        for line in core.lines
        if line.inflight and line.inflight[0].op is not None
    ]
    rows += [f"  {op.state.value}: {op.name}" for op in core.pending_ops()]
    return "\n".join(rows)
