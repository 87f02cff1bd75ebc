"""The race checker: which uses of memory nothing orders (happens-before).

A command is ordered after what came before it on its stream, after what its stream has
waited for, and after what its submitter had seen end. All of that is known when a command
is submitted, so a race is found there and then, whatever order the machine happens to run
things in. Submitters are the loop and each task of a worker thread; one knows of another
what was handed over with a task or a result. Any other thread counts as the loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from streamflow.backends.base import Doing
from streamflow.backends.checksum import sampled_checksum
from streamflow.backends.origin import describe
from streamflow.backends.sim.report import Race, RaceKind, RacingOp
from streamflow.backends.sim.uses import HostUse, Segment, Shadow, Use

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.machine import World
    from streamflow.backends.sim.stream import SimStream

__all__ = [
    "Clock",
    "Place",
    "RaceChecker",
    "Watcher",
]

Clock = dict[int, int]
"""By stream id: the position up to which everything is ordered before. Never changed, replaced."""

_NUM_KEPT = 32
_NUM_STREAMS_MAX = 256
_NUM_RACES_MAX = 100
_serials = count(1)


Place: TypeAlias = "tuple[SimStream, int, Clock, int]"
"""What an event is bound to: a position of a stream, and what was ordered before it (the
stream's clock, and how much of what the loop had seen). A plain tuple: every op records one."""


class _Actor:
    """A submitter: the loop, or one task of a worker.

    Attributes
    ----------
    seen : dict
        By stream id, the position that it has seen end.
    epoch : int
        How much of what the loop has seen it knows of.
    """

    __slots__ = ("epoch", "joined", "num_seen", "seen", "serial")

    def __init__(self, seen: Clock, epoch: int) -> None:
        self.serial = next(_serials)
        self.seen = seen
        self.epoch = epoch
        self.joined: dict[int, Clock] = {}
        self.num_seen = 0


class Watcher:
    """Knows who submits what, for a world that doesn't check for races."""

    def __init__(self) -> None:
        self._doing: dict[int, Doing] = {}

    def attribute(self, doing: Doing | None) -> None:
        """What the calling thread submits from now on is this op's."""
        if doing is None:
            self._doing.pop(threading.get_ident(), None)
        else:
            self._doing[threading.get_ident()] = doing

    def doing(self) -> Doing | None:
        """The op that the calling thread submits, if it said."""
        return self._doing.get(threading.get_ident()) if self._doing else None

    def name_stream(self, stream: SimStream, name: str) -> None:
        """What reports call ``stream``."""
        stream.name = name

    def hand_off(self) -> tuple[Clock, int] | None:
        """What the caller knows, for whoever it hands something to."""
        return None

    def take_up(self, known: tuple[Clock, int] | None) -> None:
        """The calling worker begins a task that came with ``known``; None: it has ended one."""
        self.attribute(None)

    def deliver(self, known: tuple[Clock, int] | None) -> None:
        """The loop gets a result from somebody who knew ``known``."""

    def fingerprint(self, array: npt.NDArray[Any]) -> int:
        """Of host memory that must not change."""
        return 0

    def source_changed(self, doing: Doing, device_index: int, nbytes: int) -> None:
        """The program changed the source of a staged copy too early."""


class RaceChecker(Watcher):
    """The checker of one world; its lock is held around every call but :meth:`hand_off`'s kin."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._lock = world.lock
        self._world = world
        self.serial = next(_serials)
        self._found: dict[tuple[object, ...], Race] = {}
        self._loop = _Actor({}, 0)
        self._workers: dict[int, _Actor] = {}
        self._history: dict[int, deque[tuple[int, int]]] = {}  # what the loop saw when
        self._known: set[int] = set()  # streams whose uses are still looked at
        self._num_known_max = _NUM_STREAMS_MAX

    # -- who knows what ------------------------------------------------------------------

    def actor(self) -> _Actor:
        """Who is calling."""
        if not self._workers:
            return self._loop
        return self._workers.get(threading.get_ident(), self._loop)

    def hand_off(self) -> tuple[Clock, int]:
        with self._lock:
            actor = self.actor()
            return dict(actor.seen), actor.epoch

    def take_up(self, known: tuple[Clock, int] | None) -> None:
        super().take_up(known)
        with self._lock:
            if known is None:
                self._workers.pop(threading.get_ident(), None)
            else:
                self._workers[threading.get_ident()] = _Actor(*known)

    def deliver(self, known: tuple[Clock, int] | None) -> None:
        assert known is not None
        with self._lock:
            self._learn(self._loop, known[0])

    def observe(self, place: Place) -> None:
        """The caller has seen that ``place`` was passed. Takes the lock itself."""
        actor = self.actor()
        stream, position, clock, epoch = place
        stream_id = stream.id
        # A stream may have waited since it was last seen there: waits that are over at once take
        # no position.
        is_same = actor.joined.get(stream_id) is clock
        if is_same and actor.seen.get(stream_id, 0) >= position:
            return
        with self._lock:
            actor.joined[stream_id] = clock
            self._learn(actor, {**({} if is_same else clock), stream_id: position})
            if actor is not self._loop:
                actor.epoch = max(actor.epoch, epoch)

    def _learn(self, actor: _Actor, clock: Clock) -> None:
        seen = actor.seen
        actor.num_seen += 1
        is_loop = actor is self._loop
        if is_loop:
            actor.epoch += 1
        for stream_id, position in clock.items():
            if seen.get(stream_id, 0) < position and stream_id in self._known:
                seen[stream_id] = position
                if is_loop:
                    history = self._history.get(stream_id)
                    if history is None:
                        history = self._history[stream_id] = deque(maxlen=_NUM_KEPT)
                    history.append((actor.epoch, position))

    # -- streams ---------------------------------------------------------------------------

    def created(self, stream: SimStream) -> None:
        """A stream was made."""
        if len(self._known) >= self._num_known_max:
            self._forget_streams()
        self._known.add(stream.id)

    def entered(self, stream: SimStream) -> None:
        """The caller submits to ``stream``: what comes there is after all that it knows."""
        actor = self.actor()
        if actor is self._loop:
            stream.epoch = actor.epoch
        elif stream.told != (mark := (actor.serial, actor.num_seen)):
            with self._lock:  # a record doesn't hold it
                stream.told = mark
                stream.clock = self._joined(stream.clock, actor.seen)
                stream.epoch = max(stream.epoch, actor.epoch)

    def waited(self, stream: SimStream, place: Place) -> None:
        """``stream`` waits for ``place``."""
        source, position, clock, epoch = place
        merged = self._joined(stream.clock, clock)
        if merged.get(source.id, 0) < position and source.id in self._known:
            merged[source.id] = position
        stream.clock = merged
        stream.epoch = max(stream.epoch, epoch)

    def ended(self, streams: Iterable[SimStream]) -> None:
        """Nothing runs on these any more, nor will: their device is lost or closed."""
        self._known.difference_update(stream.id for stream in streams)

    def _forget_streams(self) -> None:
        """Drop what is known of streams that are gone; their uses count as ordered."""
        gpus = [gpu for gpu in self._world.gpus.values() if gpu.fault is None]
        streams = [stream for gpu in gpus for stream in gpu.streams]
        self._known = alive = {stream.id for stream in streams}
        # Seldom enough to cost nothing, however many there are.
        self._num_known_max = max(_NUM_STREAMS_MAX, 2 * len(alive))
        for known in (self._loop.seen, self._loop.joined, self._history):
            for stream_id in known.keys() - alive:
                del known[stream_id]
        for stream in streams:
            if not stream.clock.keys() <= alive:
                stream.clock = self._joined({}, stream.clock)

    def _joined(self, clock: Clock, other: Clock) -> Clock:
        """What either is after, but for streams that are gone."""
        merged = dict(clock)
        for stream_id, position in other.items():
            if merged.get(stream_id, 0) < position and stream_id in self._known:
                merged[stream_id] = position
        return merged

    # -- memory ------------------------------------------------------------------------------

    def allocated(self, command: Command, nbytes: int, device_index: int | None) -> Shadow:
        """A new allocation, of a device's memory, or the host's.

        That its memory was freed earlier orders nothing else: which block a pool hands out is
        luck.
        """
        self.entered(command.stream)
        return Shadow(nbytes, Use(self, command, "allocates"), device_index)

    def freed(self, command: Command, shadow: Shadow) -> None:
        """A free, which must come after every use."""
        stream = command.stream
        self.entered(stream)
        use = Use(self, command, "frees")
        if shadow.freed is None:
            index = stream.gpu.index
            if shadow.allocated is not None and not self._is_before(shadow.allocated, stream):
                self._tell_dead(shadow, use, 0, shadow.nbytes, index)
            for start, segment in zip(shadow.starts, shadow.segments, strict=True):
                for other in (segment.write, *segment.reads.values()):
                    if other is not None and not self._is_before(other, stream):
                        self._tell(RaceKind.USE_AFTER_FREE, other, use, index, start, segment.stop)
            shadow.freed = use

    def unordered(self, nbytes: int, device_index: int) -> Shadow:
        """Memory that every stream may use at once."""
        return Shadow(nbytes, None, device_index)

    def freed_by_host(self, shadow: Shadow, device_index: int) -> None:
        """A free that waits for nothing: the caller must have seen every use end."""
        actor, use = self.actor(), HostUse(self, "free", "frees")
        shadow = shadow.of(self.serial)
        if shadow.allocated is not None and not self._is_over(shadow.allocated, actor):
            self._tell_dead(shadow, use, 0, shadow.nbytes, device_index)
        for start, segment in zip(shadow.starts, shadow.segments, strict=True):
            for other in (segment.write, *segment.reads.values()):
                if other is not None and not self._is_over(other, actor):
                    kind = RaceKind.USE_AFTER_FREE
                    self._tell(kind, other, use, device_index, start, segment.stop)
        shadow.freed = use

    def used(self, command: Command) -> None:
        """``command`` is about to be submitted: look at all it touches."""
        stream = command.stream
        self.entered(stream)
        uses: list[Use | None] = [None, None]
        for shadow, offset, nbytes, reads, writes in command.touches():
            use = uses[writes]
            if use is None:
                verb = "writes" if writes else "reads"
                use = uses[writes] = Use(self, command, verb, uses[not writes])
            if shadow.by_world is not None:
                shadow = shadow.of(self.serial)
            stop = min(offset + nbytes, shadow.nbytes)
            if offset < stop:  # else the machine will fault
                self._use(shadow, offset, stop, use, stream, reads, writes)

    def watched(self, command: Command, shadow: Shadow, start: int, stop: int) -> Use | None:
        """Who submits ``command``, a copy of host memory, for :meth:`host_changed`.

        None where an earlier copy may change that memory first: the caller has not seen it
        end. Takes the lock itself.
        """
        with self._lock:
            actor = self.actor()
            for write in shadow.of(self.serial).writes(start, stop):
                if write is not None and not self._is_over(write, actor):
                    return None
        return Use(self, command, "reads")

    def host_changed(self, reader: Use, gpu_index: int, nbytes: int) -> None:
        """The host wrote to memory that ``reader`` was still to read. Takes the lock itself."""
        with self._lock:
            self._tell(RaceKind.HOST_CHANGE, None, reader, gpu_index, 0, nbytes)

    def fingerprint(self, array: npt.NDArray[Any]) -> int:
        """The whole, or samples if it is large."""
        return sampled_checksum(array)

    def source_changed(self, doing: Doing, device_index: int, nbytes: int) -> None:
        name, code, lasti = doing
        reader = RacingOp(name, "reads", describe(code, lasti), "the staging threads")
        with self._lock:
            self._add(Race(RaceKind.HOST_CHANGE, None, reader, 0, nbytes, device_index))

    def _use(
        self,
        shadow: Shadow,
        start: int,
        stop: int,
        use: Use,
        stream: SimStream,
        reads: bool,
        writes: bool,
    ) -> None:
        gpu = stream.gpu.index if shadow.device is None else shadow.device
        if shadow.freed is not None or not (
            shadow.allocated is None or self._is_before(shadow.allocated, stream)
        ):
            self._tell_dead(shadow, use, start, stop, gpu)
        segments = shadow.segments
        if len(segments) == 1 and start == 0 and stop == segments[0].stop:
            first, last = 0, 1
        else:
            first = shadow.cut(start)
            last = shadow.cut(stop) if stop < shadow.nbytes else len(segments)
        unwritten: tuple[int, int] | None = None
        for index in range(first, last):
            segment = segments[index]
            write = segment.write
            if write is None:
                if unwritten is None:
                    unwritten = shadow.starts[index], segment.stop
            elif not self._is_before(write, stream):
                kind = RaceKind.WRITE_WRITE if writes else RaceKind.READ_WRITE
                self._tell(kind, write, use, gpu, shadow.starts[index], segment.stop)
            if writes:
                for read in segment.reads.values():
                    if not self._is_before(read, stream):
                        span = shadow.starts[index], segment.stop
                        self._tell(RaceKind.READ_WRITE, read, use, gpu, *span)
            else:
                segment.reads[stream.id] = use
                if len(segment.reads) > self._num_known_max:
                    segment.reads = {i: r for i, r in segment.reads.items() if i in self._known}
        if reads and unwritten is not None and not shadow.is_opaque:
            self._tell(RaceKind.NEVER_WRITTEN, shadow.allocated, use, gpu, *unwritten)
        if writes:
            segments[first:last] = [Segment(segments[last - 1].stop, use, {})]
            shadow.starts[first:last] = [start]
        if len(segments) > shadow.num_max:
            shadow.merge(lambda use: self._is_over(use, self._loop))

    def _tell_dead(self, shadow: Shadow, use: Use, start: int, stop: int, gpu_index: int) -> None:
        is_freed = shadow.freed is not None
        kind = RaceKind.USE_AFTER_FREE if is_freed else RaceKind.USE_BEFORE_ALLOCATION
        self._tell(kind, shadow.freed or shadow.allocated, use, gpu_index, start, stop)

    def _is_before(self, use: Use, stream: SimStream) -> bool:
        """Whether ``use`` ends before what the caller now submits to ``stream`` begins."""
        stream_id, position = use.stream_id, use.position
        if stream_id == stream.id or stream.clock.get(stream_id, 0) >= position:
            return True
        actor = self.actor()
        if self._is_over(use, actor):
            return True
        # What the loop had seen, as far as whoever comes before this knew of it.
        history = self._history.get(stream_id)
        if not history:
            return False
        knows = max(stream.epoch, actor.epoch)
        if len(history) == _NUM_KEPT and history[0][1] >= position:
            return True  # too long ago to say
        return any(epoch <= knows for epoch, seen in history if seen >= position)

    def _is_over(self, use: Use, actor: _Actor) -> bool:
        """Whether ``actor`` has seen ``use`` end, or nobody keeps track of it any more."""
        return (
            actor.seen.get(use.stream_id, 0) >= use.position
            or use.world != self.serial
            or use.stream_id not in self._known
        )

    # -- telling -------------------------------------------------------------------------------

    def _tell(
        self,
        kind: RaceKind,
        first: Use | None,
        second: Use,
        gpu_index: int,
        start: int,
        stop: int,
    ) -> None:
        other = None if first is None else _described(first)
        self._add(Race(kind, other, _described(second), start, stop, gpu_index))

    def _add(self, race: Race) -> None:
        # Once for each pair of lines, and again after the report was taken.
        if len(self._found) < _NUM_RACES_MAX:
            self._found.setdefault(_key(race), race)

    def found(self, device_index: int) -> list[Race]:
        """The races on a device that :meth:`take` has not taken."""
        with self._lock:
            return [race for race in self._found.values() if race.device == device_index]

    def take(self, device_index: int) -> list[Race]:
        """The same, which are forgotten."""
        with self._lock:
            races = self.found(device_index)
            for race in races:
                del self._found[_key(race)]
            return races


def _described(use: Use) -> RacingOp:
    return RacingOp(use.label, use.verb, describe(use.code, use.lasti), use.stream_name)


def _key(race: Race) -> tuple[object, ...]:
    ops = (race.first, race.second)
    names = ((op.name.partition("#")[0], op.where) for op in ops if op is not None)
    return (race.kind, race.device, *names)
