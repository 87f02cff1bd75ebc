"""What the race checker found, in words: both ops, both lines, the missing edge, the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Race", "RaceKind", "RacingOp"]


class RaceKind(Enum):
    """What is wrong with a use of memory."""

    USE_BEFORE_ALLOCATION = "use before allocation"
    USE_AFTER_FREE = "use after free"
    READ_WRITE = "unordered read and write"
    WRITE_WRITE = "unordered writes"
    HOST_CHANGE = "host change of memory in flight"
    NEVER_WRITTEN = "read of memory never written"


_EDGE = "nothing orders {second} after {first}: {there} has not waited for {here}"
_ORDER = (
    "pass after= the one to the other, await the one before the other is called, or name the "
    "array in reads= or writes= of dev.call; between streams of your own, `wait_for` its record"
)
_REMEDIES = {
    RaceKind.USE_BEFORE_ALLOCATION: (
        _EDGE,
        "use it on the stream it was allocated on, or on one that has waited for an event there",
    ),
    RaceKind.USE_AFTER_FREE: (
        "{second} was called for after {first} had given the memory back",
        "free after the last use: on its stream, or on one that has waited for it",
    ),
    RaceKind.READ_WRITE: (_EDGE, _ORDER),
    RaceKind.WRITE_WRITE: (_EDGE, _ORDER),
    RaceKind.HOST_CHANGE: (
        "the memory differs from what it was when {second} was submitted",
        "await array.staged, or the copy, before you change its source; or put a copy of it",
    ),
    RaceKind.NEVER_WRITTEN: (
        "no kernel, copy or fill ordered before {second} has written it",
        "use dev.zeros instead of dev.empty, or order the write before the read",
    ),
}


@dataclass(frozen=True, slots=True)
class RacingOp:
    """One side of a race.

    Attributes
    ----------
    name : str
        The op's name; on raw verbs the kernel's, or the kind of work.
    verb : str
        ``"reads"``, ``"writes"``, ``"allocates"`` or ``"frees"``.
    where : str
        File and line of the call that submitted it.
    stream : str
        Name of its stream or lane.
    """

    name: str
    verb: str
    where: str
    stream: str

    def __str__(self) -> str:
        return f"{self.name} ({self.where}) on {self.stream}"


@dataclass(frozen=True, slots=True)
class Race:
    """A use of memory that nothing orders after what it needs. Prints as text.

    Attributes
    ----------
    kind : RaceKind
    first : RacingOp or None
        What came first: the other use, the allocation or the free. None where the host is
        the other side.
    second : RacingOp
        What was found to race with it.
    start, stop : int
        The bytes in question, from the start of the allocation.
    device : int
        Index of the device whose memory it is; of the op's, for host memory.
    """

    kind: RaceKind
    first: RacingOp | None
    second: RacingOp
    start: int
    stop: int
    device: int

    def __str__(self) -> str:
        first, second = self.first, self.second
        edge, remedy = _REMEDIES[self.kind]
        if second.verb == "frees" and first is not None and first.verb != "frees":
            edge = _EDGE
        names = {"second": second.name, "there": second.stream}
        if first is not None:
            names |= {"first": first.name, "here": first.stream}
        lines = [f"{self.kind.value}, bytes {self.start} to {self.stop}, device {self.device}:"]
        lines += [f"  {op} {op.verb} them" for op in (first, second) if op is not None]
        lines += [f"  missing: {edge.format(**names)}", f"  remedy: {remedy}"]
        return "\n".join(lines)
