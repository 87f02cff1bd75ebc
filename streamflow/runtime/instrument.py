"""What is noted of an op while a trace is taken, and what takes the notes."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, Protocol

__all__ = ["Instrument", "Note", "Ranges"]


class Note:
    """What is known of one traced op; filled in as it goes its way.

    Holds nothing of the program's but code: neither the op, nor arrays, nor a result (C23); and
    ``base``, ``starts`` and ``ends``, the events that time it, until it has ended.

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

    # Defaults of the class and no slots: most ops never set most of these, and setting them
    # all would double what a note costs (P11).
    begun_s: float | None = None
    issued_s: float | None = None
    seen_s: float | None = None
    span_s: tuple[float, float] | None = None  # on the device, since the trace began
    state = "parked"
    error: str | None = None
    stream: str | None = None
    position = 0
    scope: str | None = None
    task: str | None = None
    needs: Sequence[str] = ()
    is_staged = False
    is_awaited = False
    waited: Sequence[int] = ()
    reads: Sequence[tuple[int, int]] = ()
    writes: Sequence[tuple[int, int]] = ()
    allocated_nbytes = 0
    freed_nbytes = 0
    base: Any = None
    starts: Sequence[Any] = ()
    ends: Sequence[Any] = ()

    def __init__(
        self,
        seq: int,
        kind: str,
        label: str | None,
        origin: tuple[CodeType, int] | str,
        device: int,
        called_s: float,
    ) -> None:
        self.seq = seq
        self.kind = kind
        self.label = label
        self.origin = origin
        self.device = device
        self.called_s = called_s
        self.edges: list[tuple[int, str, int | None]] = []


class Ranges(Protocol):
    """Marks the calls of each op for a profiler, on the loop thread."""

    def push(self, note: Note) -> Any:
        """The calls of an op begin; inside them may be those of others."""

    def pop(self, note: Note) -> Any:
        """They have ended, well or not; told again of some."""


class Instrument(Protocol):
    """Hears of every op on the loop thread.

    Attributes
    ----------
    ranges : Ranges or None
        What hears of the calls of each op too.
    """

    ranges: Ranges | None

    def op_called(self, note: Note) -> Any:
        """An op was called for. Its note is filled in from now on."""

    def pinned(self, time_s: float, nbytes: int) -> Any:
        """Pinned memory in use has changed."""
