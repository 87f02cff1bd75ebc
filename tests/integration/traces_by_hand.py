"""Traces made by hand."""

from __future__ import annotations

from typing import Any

from streamflow.trace import EdgeReason, TracedEdge, TracedOp


def op(
    number: int, stream: str, start_s: float | None, end_s: float | None, **more: Any
) -> TracedOp:
    """An op that was called for and given to its stream at 0, and seen when it ended."""
    engine = stream if stream in ("h2d", "d2h") else "compute"
    facts: dict[str, Any] = {
        "kind": {"h2d": "put", "d2h": "get"}.get(engine, "launch"),
        "name": f"op{number}",
        "engine": engine if stream != "host" else None,
        "device": 0,
        "nbytes": 0,
        "submitted_s": 0.0,
        "issued_s": more.get("submitted_s", 0.0) if stream != "host" else None,
        "state": "submitted" if end_s is None else "done",
        "where": f"prog.py:{number}",
        "seen_s": end_s,
    }
    return TracedOp(id=number, stream=stream, start_s=start_s, end_s=end_s, **{**facts, **more})


def edge(
    src: int, dst: int, reason: str = "read-after-write", array: int | None = None
) -> TracedEdge:
    return TracedEdge(src, dst, EdgeReason(reason), True, array)
