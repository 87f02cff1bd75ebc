"""The trace as data: ops, edges, and the view of them that the user holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from streamflow.trace.answers import Overlap

__all__ = ["EdgeReason", "Trace", "TracedEdge", "TracedOp"]


class EdgeReason(Enum):
    """Why one op comes after another (rule R3)."""

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_READ = "write-after-read"
    WRITE_AFTER_WRITE = "write-after-write"
    ALLOCATION = "allocation"
    AFTER = "after"
    STREAM_ORDER = "stream-order"
    FREE = "free"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op of a trace. Times are in seconds since the trace began.

    Attributes
    ----------
    id : int
        Unique in its trace.
    kind : str
        What it does: ``"put"``, ``"get"``, ``"copy_h2d"``, ``"fill"``, ``"launch"``, ``"call"``, ..
    name : str
        As the user sees it.
    stream : str
        Of its stream or lane.
    engine : str or None
        The part of the device it occupies, ``"h2d"``, ``"d2h"`` or ``"compute"``; None for
        an op that occupies none, such as an allocation.
    device : int
        Index of its device.
    nbytes : int
        Bytes moved or allocated; 0 where that has no meaning.
    submitted_s : float
        When the host submitted it.
    start_s, end_s : float or None
        When the device ran it; None until that is known.
    state : str
        The last state reported.
    where : str or None
        The line that submitted it, as ``"file.py:12"``.
    """

    id: int
    kind: str
    name: str
    stream: str
    engine: str | None
    device: int
    nbytes: int
    submitted_s: float
    start_s: float | None
    end_s: float | None
    state: str
    where: str | None

    @property
    def duration_s(self) -> float | None:
        """Time on the device in seconds; None until it is known."""
        if self.start_s is None or self.end_s is None:
            return None
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TracedEdge:
    """The op ``dst`` comes after the op ``src``.

    ``issued`` is True where a device-side wait was made for it; False where earlier waits,
    or the order of one stream, already implied it (rule R4).
    """

    src: int
    dst: int
    reason: EdgeReason
    issued: bool


Contents: TypeAlias = tuple[tuple[TracedOp, ...], tuple[TracedEdge, ...]]


class Trace:
    """The ops of a piece of a program and the edges between them.

    ``dev.trace()`` makes one; it may be read while it is still being recorded.

    Parameters
    ----------
    read : callable
        Returns the ops and the edges as they are now.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Contents]) -> None:
        self._read = read

    @classmethod
    def of(cls, ops: tuple[TracedOp, ...], edges: tuple[TracedEdge, ...] = ()) -> Trace:
        """A finished trace, made by hand.

        Parameters
        ----------
        ops : tuple of TracedOp
        edges : tuple of TracedEdge
            Both ends of each are among ``ops``.
        """
        return cls(lambda: (ops, edges))

    @property
    def ops(self) -> tuple[TracedOp, ...]:
        """In order of submission."""
        return self._read()[0]

    @property
    def edges(self) -> tuple[TracedEdge, ...]:
        """In the order they were found; both ends are in :attr:`ops`."""
        return self._read()[1]

    def overlap(self) -> Overlap:
        """How much of the copying and computing ran at the same time."""
        # Here and below: the modules that read a trace import this one.
        from streamflow.trace.answers import overlap

        return overlap(self)

    def save(self, path: str | os.PathLike[str], *, max_ops: int = 5000) -> None:
        """Write the task graph to a file whose ending chooses the format.

        Parameters
        ----------
        path : str or os.PathLike
            Ends in ``.dot`` (Graphviz) or ``.mmd`` (Mermaid).
        max_ops : int
            Refuse to write more ops than this: layout tools take minutes beyond a few
            thousand. Mermaid's viewers stop at 500 edges unless told otherwise.

        Raises
        ------
        ValueError
            Another ending, or too many ops. Nothing is written.
        """
        from streamflow.trace.dot import to_dot
        from streamflow.trace.mermaid import to_mermaid

        writers = {".dot": to_dot, ".mmd": to_mermaid}
        path = Path(path)
        writer = writers.get(path.suffix.lower())
        if writer is None:
            raise ValueError(
                f"cannot tell the format of {path.name!r}: its name must end in one of "
                f"{', '.join(writers)}"
            )
        num_ops = len(self.ops)
        if num_ops > max_ops:
            raise ValueError(
                f"the trace has {num_ops} ops, more than max_ops={max_ops}: "
                "trace a shorter piece of the program, or pass a larger max_ops"
            )
        path.write_text(writer(self), encoding="utf-8", newline="\n")

    def __repr__(self) -> str:
        ops, edges = self._read()
        return f"<Trace of {len(ops)} ops, {len(edges)} edges>"
