"""The event log: what a simulated machine has finished, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.machine import World

__all__ = ["EventLog", "Logged"]

_NUMBERED = re.compile(r"^call#\d+$")


class Logged(NamedTuple):
    """One launch, copy, fill, prefetch, allocation or free that has ended.

    Attributes
    ----------
    time_s : float
        On the clock of the devices.
    device : int
    stream : int
        Number of the stream on its machine: the same in every run of a program (R15).
    name : str
        Of the stream: of a lane, say.
    label : str
        A kernel's name, or ``"copy h2d"``, ``"fill"``, ``"free"`` and the like.
    """

    time_s: float
    device: int
    stream: int
    name: str
    label: str

    @classmethod
    def of(cls, command: Command, now_s: float) -> Logged:
        """The entry of a command that has just ended."""
        stream = command.stream
        # Ops without a name are numbered, and the numbers count on from run to run (R15).
        label = _NUMBERED.sub("call", command.label)
        return cls(now_s, stream.gpu.index, stream.ordinal, stream.name, label)

    def __str__(self) -> str:
        return f"{self.time_s:.9f} s  device {self.device}  {self.name}: {self.label}"


class EventLog:
    """What ends from entering its ``with`` block to leaving it.

    Attributes
    ----------
    entries : list of Logged
        Grows as work ends. ``str(log)`` has one line for each.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.entries: list[Logged] = []

    def _note(self, command: Command, now_s: float) -> None:
        self.entries.append(Logged.of(command, now_s))

    def __enter__(self) -> EventLog:
        with self._world.lock:
            self._world.listeners.append(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._world.lock:
            self._world.listeners.remove(self._note)

    def __iter__(self) -> Iterator[Logged]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))
