"""What a device holds right now, by kind and by the line that made it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamflow.runtime.origin import describe

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["live_handles"]


def live_handles(core: Core) -> dict[str, dict[str, int]]:
    """Counts of arrays, streams, unfinished ops and pinned results; empty kinds are left out."""
    arrays = Counter(live.origin for live in core.memory.live.values())
    ops = [*core.pending_ops(), *(t.op for line in core.lines for t in line.inflight)]
    ledger = {
        "array": Counter({describe(*origin): count for origin, count in arrays.items()}),
        "op": Counter(op.where for op in ops if op is not None),
        "stream": Counter(
            line.where for line in core.lines if line.is_ordered and line.stream is not None
        ),
        "pinned block": Counter(
            "streamflow" if holder is None else describe(*holder)  # type: ignore[misc]
            for holder in core.pinned.holders()
        ),
    }
    return {kind: dict(counts) for kind, counts in ledger.items() if counts}
