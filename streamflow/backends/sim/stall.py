"""Work that takes time and does nothing: what a stalled engine or stream is busy with.

A stalled engine serves such work in each of its slots, before anything else; a stalled
stream has it in its queue, and it takes no engine that others need. So a stall obeys both
clocks as any work does, and the machine knows nothing of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from streamflow.backends.sim.command import Command
from streamflow.backends.sim.stream import SimStream

if TYPE_CHECKING:
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.machine import Engine

__all__ = ["ENGINES", "Stall", "StallCommand", "stall_engine", "stall_stream"]

ENGINES = ("h2d", "d2h", "compute")

_FIRST = -(1 << 30)
"""More urgent than any stream of a program."""


class StallCommand(Command):
    """Takes ``seconds`` from its start, or until ``until_s``, or until it is told to end."""

    __slots__ = ("ended", "seconds", "until_s")
    label = "stall"
    is_movable = False

    def __init__(
        self, stream: SimStream, engine: Engine, seconds: float, until_s: float | None
    ) -> None:
        super().__init__(stream, engine)
        self.seconds = seconds
        self.until_s = until_s
        self.ended = threading.Event()

    def duration_s(self) -> float:
        world = self.stream.world
        # On the wall clock it takes as long as run() does: a sleep could not be cut short.
        return self._rest_s(world.reached_s()) if world.is_virtual else 0.0

    def run(self, bound: tuple[Any, ...]) -> None:
        if not self.stream.world.is_virtual:
            self.ended.wait(self._rest_s(time.monotonic()))
        self.ended.set()

    def _rest_s(self, now_s: float) -> float:
        if self.ended.is_set():
            return 0.0
        return self.seconds if self.until_s is None else max(0.0, self.until_s - now_s)


class Stall:
    """A stall underway; :meth:`end` or leaving its ``with`` block cuts it short."""

    def __init__(self, commands: list[StallCommand], on_change: Callable[[], None]) -> None:
        self._commands = commands
        self._on_change = on_change

    @property
    def is_over(self) -> bool:
        """Whether its time has passed, or was cut short."""
        return all(command.ended.is_set() for command in self._commands)

    def holds(self, engine: Engine) -> bool:
        """Whether it keeps a slot of ``engine`` busy; the world's lock is held."""
        return any(each.engine is engine and not each.ended.is_set() for each in self._commands)

    def end(self) -> None:
        """Let the engine or stream go on now. From any thread; again does nothing."""
        if not self.is_over:
            self.cut_short()
            self._on_change()

    def cut_short(self) -> None:
        """:meth:`end`, telling nobody."""
        world = self._commands[0].stream.world
        with world.lock:
            for command in self._commands:
                if not command.ended.is_set():
                    command.ended.set()
                    world.end_now(command)

    def __enter__(self) -> Stall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def stall_engine(device: SimDevice, name: str, seconds: float) -> list[StallCommand]:
    """Occupy every slot of an engine, each as it becomes free; the world's lock is held."""
    gpu, world = device.gpu, device.world
    engine = {"h2d": gpu.h2d, "d2h": gpu.d2h, "compute": gpu.compute}[name]
    until_s = world.now_s() + seconds
    commands = []
    for _ in range(engine.num_slots):
        # Streams of nobody's: neither a synchronisation nor a lost device looks at them.
        stream = SimStream(device, world.next_ordinal(), _FIRST, 0)
        commands.append(StallCommand(stream, engine, seconds, until_s))
    for command in commands:
        world.submit(command)
    return commands


def stall_stream(stream: SimStream, seconds: float) -> list[StallCommand]:
    """Put the time into the stream's queue; the world's lock is held."""
    command = StallCommand(stream, stream.gpu.aside, seconds, None)
    stream.num_work += 1
    stream.world.submit(command)
    return [command]
