"""Who used which bytes, for the race checker.

Uses are kept for each stretch of memory between two bounds that somebody used: the last
write and, for each stream, the last read since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from streamflow.backends.origin import caller

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.races import RaceChecker

__all__ = ["HostUse", "Segment", "Shadow", "Use"]

_NUM_SEGMENTS_MAX = 1024
_NUM_WORLDS_KEPT = 16


class Use:
    """What one command does with memory, as a report tells it."""

    __slots__ = ("code", "label", "lasti", "position", "stream_id", "stream_name", "verb", "world")

    label: str
    code: CodeType
    lasti: int

    def __init__(
        self, checker: RaceChecker, command: Command, verb: str, like: Use | None = None
    ) -> None:
        stream = command.stream
        self.stream_id = stream.id
        self.stream_name = stream.name
        self.position = stream.num_submitted + 1
        self.world = checker.serial
        self.verb = verb
        if like is not None:  # the same command's other use
            self.label, self.code, self.lasti = like.label, like.code, like.lasti
            return
        doing = checker.doing()
        if doing is None:
            frame = caller(3)
            self.label = command.label
            self.code = frame.f_code
            self.lasti = frame.f_lasti
        else:
            self.label, self.code, self.lasti = doing


class HostUse(Use):
    """What the host does with memory itself, in the thread that calls now."""

    __slots__ = ()

    def __init__(self, checker: RaceChecker, label: str, verb: str) -> None:
        self.stream_id = self.position = 0
        self.stream_name = "the host"
        self.world = checker.serial
        self.verb = verb
        doing = checker.doing()
        if doing is None:
            frame = caller(3)
            self.label, self.code, self.lasti = label, frame.f_code, frame.f_lasti
        else:
            self.label, self.code, self.lasti = doing


class _Over(Use):
    """A write that everything comes after."""

    __slots__ = ()

    def __init__(self) -> None:
        self.stream_id = self.position = self.world = 0


_OVER = _Over()


class Segment:
    """Bytes up to ``stop`` that were always used together."""

    __slots__ = ("reads", "stop", "write")

    def __init__(self, stop: int, write: Use | None, reads: dict[int, Use]) -> None:
        self.stop = stop
        self.write = write
        self.reads = reads


class Shadow:
    """The uses of one allocation, or of one block of the host's.

    ``is_opaque``: the host may write there unseen, or nothing tells when it was allocated, so
    nothing counts as never written. ``device`` is the index of the device whose memory it is;
    None for the host's. ``by_world``: each checker has a shadow of its own of memory that is
    the process's, since threads of several loops may use it at a time; None where one may.
    """

    __slots__ = (
        "allocated",
        "by_world",
        "device",
        "freed",
        "is_opaque",
        "nbytes",
        "num_max",
        "segments",
        "starts",
    )

    def __init__(
        self, nbytes: int, allocated: Use | None = None, device: int | None = None
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self.allocated = allocated
        self.is_opaque = allocated is None or device is None
        self.freed: Use | None = None
        self.starts = [0]
        self.segments = [Segment(nbytes, None, {})]
        self.num_max = _NUM_SEGMENTS_MAX
        self.by_world: dict[int, Shadow] | None = None

    def of(self, world: int) -> Shadow:
        """The one that the checker numbered ``world`` alone looks at and changes."""
        known = self.by_world
        if known is None:
            return self
        found = known.get(world)
        if found is None:
            for ended in list(known)[:-_NUM_WORLDS_KEPT]:
                known.pop(ended, None)
            found = known.setdefault(world, Shadow(self.nbytes))
        return found

    def cut(self, at: int) -> int:
        """The index of the segment that starts at ``at``, split off if it has to be."""
        index = bisect_right(self.starts, at) - 1
        if self.starts[index] == at:
            return index
        whole = self.segments[index]
        if at >= whole.stop:
            return index + 1
        self.starts.insert(index + 1, at)
        self.segments.insert(index + 1, Segment(whole.stop, whole.write, dict(whole.reads)))
        whole.stop = at
        return index + 1

    def writes(self, start: int, stop: int) -> Iterator[Use | None]:
        """The last write of each stretch that has bytes from ``start`` up to ``stop``."""
        index = bisect_right(self.starts, start) - 1
        while index < len(self.starts) and self.starts[index] < stop:
            yield self.segments[index].write
            index += 1

    def merge(self, is_over: Callable[[Use], bool]) -> None:
        """Forget uses that are over, and join neighbours that differ in nothing else."""
        starts, segments = self.starts, self.segments
        self.starts, self.segments = [], []
        for start, segment in zip(starts, segments, strict=True):
            segment.reads = {i: use for i, use in segment.reads.items() if not is_over(use)}
            if segment.write is not None and is_over(segment.write):
                segment.write = _OVER
            last = self.segments[-1] if self.segments else segment
            if last is not segment and last.write is segment.write and last.reads == segment.reads:
                last.stop = segment.stop
            else:
                self.starts.append(start)
                self.segments.append(segment)
        self.num_max = max(_NUM_SEGMENTS_MAX, 2 * len(self.segments))
