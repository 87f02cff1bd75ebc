"""What is noted of an op while a trace is taken, and what takes the notes."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, Protocol

__all__ = ["Instrument", "Note"]


class Note:
    """What is known of one traced op; filled in as it goes its way.

    Holds nothing of the program's but code: neither the op, nor arrays, nor a result (C23).

    Attributes
    ----------
    edges : list of (int, str, int or None)
        Number of an earlier op, the reason, and the array that is touched by both.
    waited : sequence of int
        Numbers of the ops for which a wait was made on the device.
    reads, writes : sequence of (int, int)
        Numbers of the ops that allocated the arrays, and how many bytes of each.
    freed_nbytes, allocated_nbytes : int
        What it gives back and takes.
    """

    __slots__ = (
        "allocated_nbytes",
        "begun_s",
        "called_s",
        "device",
        "edges",
        "freed_nbytes",
        "is_awaited",
        "is_staged",
        "issued_s",
        "kind",
        "label",
        "needs",
        "origin",
        "position",
        "reads",
        "scope",
        "seen_s",
        "seq",
        "span_s",
        "state",
        "stream",
        "task",
        "waited",
        "writes",
    )

    def __init__(
        self,
        seq: int,
        kind: str,
        label: str | None,
        origin: tuple[CodeType, int],
        device: int,
        called_s: float,
    ) -> None:
        self.seq = seq
        self.kind = kind
        self.label = label
        self.origin: tuple[CodeType, int] | str = origin
        self.device = device
        self.called_s = called_s
        self.begun_s: float | None = None
        self.issued_s: float | None = None
        self.seen_s: float | None = None
        self.span_s: tuple[float, float] | None = None  # on the device, since the trace began
        self.state = "parked"
        self.stream: str | None = None
        self.position = 0
        self.scope: str | None = None
        self.task: str | None = None
        self.needs: Sequence[str] = ()
        self.is_awaited = False
        self.is_staged = False
        self.edges: list[tuple[int, str, int | None]] = []
        self.waited: Sequence[int] = ()
        self.reads: Sequence[tuple[int, int]] = ()
        self.writes: Sequence[tuple[int, int]] = ()
        self.allocated_nbytes = 0
        self.freed_nbytes = 0


class Instrument(Protocol):
    """Hears of every op on the loop thread."""

    def op_called(self, note: Note) -> Any:
        """An op was called for. Its note is filled in from now on."""

    def pinned(self, time_s: float, nbytes: int) -> Any:
        """Pinned memory in use has changed."""
