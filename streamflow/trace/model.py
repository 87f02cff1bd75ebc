"""The trace as data: ops, the edges between them, the arrays they touch, and memory in use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Contents",
    "EdgeReason",
    "TracedArray",
    "TracedDevice",
    "TracedEdge",
    "TracedMemory",
    "TracedOp",
]


class EdgeReason(Enum):
    """Why one op comes after another (rule R3).

    ``CAPACITY`` is no order of the program's: the end of the first op made the room, in a
    stream's window or a scope's budget, that the second one was waiting for.
    """

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_READ = "write-after-read"
    WRITE_AFTER_WRITE = "write-after-write"
    ALLOCATION = "allocation"
    AFTER = "after"
    STREAM_ORDER = "stream-order"
    FREE = "free"
    HOST = "host"
    CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op of a trace. Times are in seconds since the trace began.

    An op passes through ``submitted_s`` (called for), ``begun_s`` (its work on the host),
    ``issued_s`` (given to its stream), ``start_s`` and ``end_s`` (on the device) and
    ``seen_s`` (the loop knows, and whoever awaits it wakes), in this order as far as it has them.

    Attributes
    ----------
    id : int
        Unique in its trace.
    kind : str
        What it does: ``"put"``, ``"get"``, ``"copy"``, ``"fill"``, ``"launch"``, ``"empty"``, ..
    name : str
        As the user sees it.
    stream : str
        Of its stream or lane; ``"host"`` for one that never had any.
    engine : str or None
        The part of the device it occupies, ``"h2d"``, ``"d2h"`` or ``"compute"``; None for
        an op that occupies none, such as an allocation.
    device : int
        Index of its device.
    nbytes : int
        Bytes moved, allocated or freed; 0 where that has no meaning.
    submitted_s : float
        When the program called for it.
    start_s, end_s : float or None
        When the device ran it, or the host where it has no work on the device; None until that
        is known.
    state : str
        The last state reported.
    where : str or None
        The line that submitted it, as ``"file.py:12"``.
    begun_s : float or None
        When work for it began on the host: staging, a host function.
    issued_s : float or None
        When it was given to its stream; None for one that has parked until now, for one that
        parked until the trace was over, and for work on the host alone.
    seen_s : float or None
        When the loop saw it end.
    position : int
        Its place on its stream, in driver calls; 0 without one.
    scope, task : str or None
        Name of the innermost scope of its device, and of the task that called for it; no task
        for one that was called for before the trace began.
    needs : tuple of str
        What it waited for on the host besides other ops, in words and in that order.
    is_staged : bool
        Its bytes went through pinned chunks: the array on the host was pageable.
    reads, writes : tuple of int
        Ids of the arrays that it touches.
    process : int
        Which of the trace's processes it ran in.
    error : str or None
        What went wrong, in words, for one that failed or was cancelled.
    is_awaited : bool
        Somebody waited for it when it was seen to end: the program, or the runtime for it.
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
    begun_s: float | None = None
    issued_s: float | None = None
    seen_s: float | None = None
    position: int = 0
    scope: str | None = None
    task: str | None = None
    needs: tuple[str, ...] = ()
    is_staged: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    process: int = 0
    error: str | None = None
    is_awaited: bool = False

    @property
    def duration_s(self) -> float | None:
        """Time on the device in seconds; None until it is known."""
        if self.start_s is None or self.end_s is None:
            return None
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TracedEdge:
    """The op ``dst`` comes after the op ``src``.

    Attributes
    ----------
    src, dst : int
        Ids of ops.
    reason : EdgeReason
    issued : bool
        True where a device-side wait was made for it; False where earlier waits, or the order
        of one stream, already implied it (rule R4).
    array : int or None
        Id of the array that both touch; None where the reason is none of data.
    """

    src: int
    dst: int
    reason: EdgeReason
    issued: bool
    array: int | None = None


@dataclass(frozen=True, slots=True)
class TracedArray:
    """Device memory that ops of the trace touch.

    Attributes
    ----------
    id : int
        Number of the op that allocated it, which need not be in the trace.
    nbytes : int
        Of the part of it that is known.
    device, process : int
    where : str or None
        The line that made it; None if that was before the trace.
    """

    id: int
    nbytes: int
    device: int
    where: str | None
    process: int = 0


@dataclass(frozen=True, slots=True)
class TracedMemory:
    """Memory in use from ``time_s`` on, in bytes, on one device.

    ``nbytes`` is what arrays hold, as the device allocates and frees it. ``pinned_nbytes`` are
    results of ``get`` and staging in pinned memory, as last looked at.
    """

    time_s: float
    nbytes: int
    pinned_nbytes: int
    device: int
    process: int = 0


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """One device of a trace.

    Attributes
    ----------
    index : int
    name, backend : str
    is_virtual : bool
        Its times are the simulator's clock, not the host's.
    began_s : float
        Reading of the device's clock when the trace began.
    began_unix_s : float
        The time of day then, in seconds since 1970.
    process : int
        Of the trace's processes, from 0.
    process_key : str
        Tells processes apart over files.
    compute_lanes : int
        How many it has; 0 where that is not known.
    """

    index: int
    name: str
    backend: str
    is_virtual: bool
    began_s: float
    began_unix_s: float
    process: int = 0
    process_key: str = ""
    compute_lanes: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """All of a trace.

    ``loose`` are edges from ops that the trace doesn't have, such as another device's: merging
    traces finds their other end. ``num_dropped`` ops were older than the ring holds.
    """

    ops: tuple[TracedOp, ...]
    edges: tuple[TracedEdge, ...]
    arrays: tuple[TracedArray, ...] = ()
    memory: tuple[TracedMemory, ...] = ()
    devices: tuple[TracedDevice, ...] = ()
    loose: tuple[TracedEdge, ...] = ()
    num_dropped: int = 0
