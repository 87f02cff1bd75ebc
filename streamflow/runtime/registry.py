"""The devices that are open in this process, each with the one who may give it back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["add_open", "open_on", "take_ended", "take_open"]

_lock = threading.Lock()
_open: set[Core] = set()
"""Held strongly: what is left of a device whose loop has ended is found here (C12)."""


def add_open(core: Core) -> None:
    """Note a device that was entered, or that can't be given back yet."""
    with _lock:
        _open.add(core)


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
