"""Streams: FIFO queues of commands, and how far each has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import Command, Mark, Wait
from streamflow.errors import Closed

if TYPE_CHECKING:
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.event import SimEvent
    from streamflow.backends.sim.machine import Blocker
    from streamflow.backends.sim.races import Clock, Place

__all__ = ["SimStream"]

_ids = count(1)
_SEEN_MAX = 64


class SimStream:
    """One queue of a simulated device.

    Commands end in the order they were submitted, so *position n has passed* is
    ``num_done >= n``: recording an event is remembering two values, and asking it is one
    comparison.

    Attributes
    ----------
    id : int
        Unique in the process.
    ordinal : int
        Number within the world, the same in every run of a program; breaks ties.
    draw : callable or None
        Draws this stream's tie-breaks from the seed; None for seed 0, where the stream
        made first wins.
    name : str
        For people; the layer above may give it another.
    num_work : int
        Launches, copies and fills outstanding (rule R7).
    seen : dict
        By ordinal, the position of other streams that work submitted here now is ordered
        after, by direct waits: what those streams had waited for is not followed, and only
        the last 64 streams are remembered.
    clock, epoch, told
        What is ordered before the work submitted here next: see :mod:`.races`.
    num_proven : int
        Position that a synchronisation has shown to the host.
    """

    __slots__ = (
        "__weakref__",
        "clock",
        "device",
        "draw",
        "epoch",
        "gpu",
        "id",
        "is_closed",
        "name",
        "num_done",
        "num_proven",
        "num_submitted",
        "num_work",
        "ordinal",
        "priority",
        "queue",
        "seen",
        "told",
        "waiters",
        "world",
    )

    def __init__(self, device: SimDevice, ordinal: int, priority: int, seed: int) -> None:
        self.device = device
        self.gpu = device.gpu
        self.world = device.world
        self.id = next(_ids)
        self.ordinal = ordinal
        self.name = f"stream #{ordinal}"
        self.priority = priority
        self.draw: Callable[[], float] | None = Random(f"{seed}/{ordinal}").random if seed else None
        self.queue: deque[Command] = deque()
        self.num_submitted = 0
        self.num_done = 0
        self.num_work = 0
        self.num_proven = 0
        self.waiters: list[tuple[int, int, SimStream | Blocker]] = []
        self.seen: dict[int, int] = {}
        self.is_closed = False
        self.clock: Clock = {}
        self.epoch = 0
        self.told: tuple[int, int] | None = None
        if self.world.races is not None:
            self.world.races.created(self)

    def __repr__(self) -> str:
        return f"<SimStream {self.id}: {self.num_done} of {self.num_submitted} done>"

    @property
    def handle(self) -> int:
        return self.id

    def record(self, event: SimEvent, /) -> SimEvent:
        """Bind ``event`` to everything submitted here so far; an earlier record is forgotten."""
        device = self.device
        device.counts["record"] += 1
        self.check()
        if event.gpu is not self.gpu:
            raise ValueError("an event is recorded on streams of the device that made it")
        if event.is_closed:
            raise Closed("the event is closed")
        races = self.world.races
        if races is not None:
            races.entered(self)
        if event.is_timing:
            mark = Mark(self)
            with self.world.lock:
                self.world.submit(mark)
                event.bind(self.place(), mark)
        else:
            event.place = (self, self.num_submitted, self.clock, self.epoch)
        return event

    def place(self) -> Place:
        """All that was submitted here so far."""
        return self, self.num_submitted, self.clock, self.epoch

    def wait(self, event: SimEvent, /) -> None:
        """Order later work here after ``event``'s record at this call.

        A no-op for an event that was never recorded, as in CUDA.
        """
        self.device.counts["wait"] += 1
        self.check()
        if event.is_closed:
            raise Closed("the event is closed")
        place = event.place
        if place is None:
            return
        if place[0].world is not self.world:
            raise ValueError("a wait needs an event of a device opened on the same event loop")
        with self.world.lock:
            self.follow(place)

    def follow(self, place: Place) -> None:
        """Order later work here after ``place``; the world's lock is held."""
        world = self.world
        if world.races is not None:
            world.races.entered(self)
        source, position, *_ = place
        if source is self:
            return
        if world.races is not None:
            world.races.waited(self, place)
        seen = self.seen
        if seen.get(source.ordinal, 0) < position:
            seen[source.ordinal] = position
            if len(seen) > _SEEN_MAX:
                del seen[next(iter(seen))]
        if source.num_done < position:
            world.submit(Wait(self, source, position))

    def sync(self) -> None:
        """Block this thread until what was submitted here so far is done."""
        self.device.counts["stream_sync"] += 1
        self.check()
        self.world.wait_blocking(self.place())

    def close(self) -> None:
        """Refuse new work; what was submitted still runs."""
        self.device.counts["stream_close"] += 1
        self.is_closed = True

    def check(self) -> None:
        """Raise if nothing can be submitted here any more."""
        if self.device.stop is not None:
            raise self.device.stop()
        if self.is_closed:
            raise Closed(f"stream {self.id} is closed")

    def resume(self) -> None:
        """What the head of the queue waited for has passed; the world's lock is held."""
        self.world.runnable.append(self)
