"""Which device is meant where none is named: task-local, as a current device is in CUDA."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

from streamflow.errors import Closed
from streamflow.memory.space import Space, open_spaces, space_of

__all__ = ["checked_device", "current_device", "current_space", "find_space", "set_current_space"]

_ask_runtime: list[Callable[[], Space | None]] = []


def set_current_space(ask: Callable[[], Space | None]) -> None:
    """Have ``ask`` say which space the calling task works in: the runtime knows."""
    _ask_runtime[:] = [ask]


def current_space() -> Space | None:
    """The space that the calling task works in; None where no device is entered."""
    for ask in _ask_runtime:
        return ask()
    return None


def current_device() -> int:
    """The ordinal of the task's current device; 0 where none is entered."""
    space = current_space()
    return 0 if space is None else space.index


def find_space(device: Any) -> Space:
    """The space of ``device``.

    Parameters
    ----------
    device : Device, int or None
        None: the task's current device.

    Raises
    ------
    TypeError
        None of these.
    ValueError
        A negative ordinal.
    Closed
        That device is not open.
    """
    if device is None:
        space = current_space()
        if space is None:
            raise Closed("no device is open: enter a Device first, or pass device=")
        return space
    if isinstance(device, bool) or hasattr(device, "__index__"):
        ordinal = checked_device(device)
        here = current_space()
        if here is not None and here.index == ordinal:
            return here
        spaces = open_spaces(ordinal)
        if not spaces:
            raise Closed(f"device {ordinal} is not open: enter a Device on it first")
        return spaces[0]
    checked_device(device)
    return space_of(device._core.backend)


def checked_device(device: Any) -> int:
    """The ordinal that ``device`` names.

    Raises
    ------
    TypeError
        Neither a Device nor an int.
    ValueError
        Negative.
    """
    ordinal: Any = device if hasattr(device, "__index__") else getattr(device, "index", None)
    if isinstance(ordinal, bool) or not hasattr(ordinal, "__index__"):
        raise TypeError(f"device= takes a Device or an ordinal, found {device!r}")
    checked = index(ordinal)
    if checked < 0:
        raise ValueError(f"a device's ordinal is not negative, found {checked}")
    return checked
