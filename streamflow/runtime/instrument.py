"""What a recorder must offer; called only while a trace is being taken."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Instrument"]


class Instrument(Protocol):
    """Hears of every op on the loop thread. Reasons are the values of ``trace.EdgeReason``."""

    def op_submitted(
        self,
        op_id: int,
        kind: str,
        name: str,
        stream_name: str,
        engine: str | None,
        device_index: int,
        nbytes: int,
        where: str | None,
        now_s: float,
    ) -> None:
        """An op was called for; it may still be parked."""

    def edge(self, src_id: int, dst_id: int, reason: str, issued: bool) -> None:
        """``dst`` comes after ``src``; ``issued`` if a device-side wait was made for it."""

    def op_timed(self, op_id: int, start_s: float, end_s: float) -> None:
        """When the device worked on it, in seconds since the trace began."""

    def op_done(self, op_id: int, state: str) -> None:
        """The op reached a final state."""
