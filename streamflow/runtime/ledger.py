"""What a device has done and holds right now, by kind and by the line that made it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamflow.backends.base import PoolInfo
from streamflow.backends.origin import describe
from streamflow.errors import Closed

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["DeviceStats", "device_stats", "live_handles"]


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Counters of one device since it was entered."""

    num_submitted: int
    num_finished: int
    num_pending: int
    """Parked or staging."""
    num_in_flight: int
    memory: PoolInfo
    """The device's own pool; all zero where it has none."""
    pinned_nbytes: int
    """Pinned bytes under the budget of results, live and cached."""
    num_parked: int
    """Ops that could not be submitted at once (rule R7)."""
    num_turns: int
    """Turns of the loop in which the poller looked for completions."""
    num_queries: int
    """Events asked on the loop: by the poller, by submissions, and by :meth:`Op.done`."""
    num_helper_queries: int
    """Events asked by the thread that watches what takes long; none of either while idle."""
    num_wakes: int
    """How often that thread woke the loop."""


def device_stats(core: Core) -> DeviceStats:
    """The counters of one device, without a query of its streams."""
    if core.is_closed:
        raise Closed(f"device {core.backend.index} is closed")
    pool = core.memory.pool
    memory = PoolInfo(0, 0, 0, 0, 0) if pool is None else core.backend.pool_info(pool)
    return DeviceStats(
        num_submitted=core.num_submitted,
        num_finished=core.num_finished,
        num_pending=len(core.pending_ops()),
        num_in_flight=sum(len(line.inflight) for line in core.lines),
        memory=memory,
        pinned_nbytes=core.pinned.counted_nbytes,
        num_parked=core.num_parked,
        num_turns=core.poller.num_turns,
        num_queries=core.completion.num_queries,
        num_helper_queries=core.poller.backoff.num_queries,
        num_wakes=core.poller.backoff.num_wakes,
    )


def live_handles(core: Core) -> dict[str, dict[str, int]]:
    """Counts of arrays, streams, unfinished ops, pins, pinned results; empty kinds are left out."""
    arrays = Counter(made._origin for _, _, made, _ in core.memory.live.values())
    ops = [*core.pending_ops(), *(t.op for line in core.lines for t in line.inflight)]
    ledger = {
        "array": Counter({describe(*origin): count for origin, count in arrays.items()}),
        "op": Counter(op.where for op in ops if op is not None),
        "stream": Counter(
            line.where for line in core.lines if line.is_ordered and line.stream is not None
        ),
        "pin": core.pins.where(),
        "pinned block": Counter(
            "streamflow" if holder is None else describe(*holder)  # type: ignore[misc]
            for holder in core.pinned.holders()
        ),
    }
    return {kind: dict(counts) for kind, counts in ledger.items() if counts}
