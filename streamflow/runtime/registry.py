"""The devices that are open in this process, each with the one who may give it back."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from streamflow.memory.current import set_current_space
from streamflow.memory.space import Space
from streamflow.runtime.stream import ENTERED

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["add_open", "enter_here", "leave_here", "open_on", "take_ended", "take_open"]

_here: ContextVar[tuple[Core, ...]] = ContextVar("streamflow_entered_devices", default=())
"""The devices that this task has entered and not left, outermost first."""
_lock = threading.Lock()
_open: set[Core] = set()
"""Held strongly: what is left of a device whose loop has ended is found here (C12)."""


def add_open(core: Core) -> None:
    """Note a device that was entered, or that can't be given back yet."""
    with _lock:
        _open.add(core)


def enter_here(core: Core) -> None:
    """Make a device the task's current one."""
    _here.set((*_here.get(), core))


def leave_here(core: Core) -> None:
    """Take that back, wherever it stands: exits may come out of order."""
    _here.set(tuple(other for other in _here.get() if other is not core))


def _current_space() -> Space | None:
    """That of the task's current stream, else of the device it entered last, else any there is."""
    for stream in reversed(ENTERED.get()):
        if not stream.is_closed:
            return stream._core.space
    for core in reversed(_here.get()):
        if not core.is_closed:
            return core.space
    with _lock:
        cores = [core for core in _open if not core.is_closed and core.is_here()]
    cores.sort(key=lambda core: core.backend.index)
    return cores[0].space if cores else None


set_current_space(_current_space)


def open_on(key: object) -> list[Core]:
    """The open devices of one event loop, by its shell's key."""
    with _lock:
        found = [core for core in _open if core.shell.key is key]
    return sorted(found, key=lambda core: core.backend.index)


def take_open(core: Core) -> bool:
    """Claim ``core`` to give it back. False if somebody else has."""
    with _lock:
        is_there = core in _open
        _open.discard(core)
    return is_there


def take_ended() -> list[Core]:
    """Claim the devices whose loop has ended without closing them."""
    with _lock:
        cores = list(_open)
    # Asked without the lock: it may wake a loop.
    return [core for core in cores if core.shell.is_over() and take_open(core)]
