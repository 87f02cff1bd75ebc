"""Choosing and opening a backend (rule R14)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from streamflow.backends.base import Backend
from streamflow.config import Settings
from streamflow.errors import BackendUnavailable

__all__ = ["Opener", "choose_backend", "open_backend", "register_backend"]

Opener = Callable[[int, Settings, object], Backend]
"""``(device index, settings, loop key) -> Backend``; may block.

Devices opened with equal loop keys may depend on each other (rule R11).
"""

_OPENERS: dict[str, str | Opener] = {
    "cuda": "streamflow.backends.cuda:open_device",
    "sim": "streamflow.backends.sim:open_device",
}


def register_backend(name: str, opener: str | Opener) -> None:
    """Make ``Device(backend=name)`` open devices with ``opener``.

    Parameters
    ----------
    name : str
        Any name but ``"auto"``; a taken name is replaced.
    opener : str or callable
        ``"package.module:function"``, imported on first use, or the function itself.
    """
    if name == "auto" or not name:
        raise ValueError(f"a backend cannot be named {name!r}")
    _OPENERS[name] = opener


def choose_backend(name: str) -> tuple[str, str | None]:
    """What ``name`` stands for on this machine, and why if it is a second choice.

    ``"auto"`` is CUDA where a driver and a device are there, and the simulator where
    none exists; the second item then gives the reason. May block while a driver loads.

    Raises
    ------
    BackendUnavailable
        Unknown name, or a driver that is there and broken.
    """
    if name == "auto":
        from streamflow.backends.cuda.probe import why_unavailable

        reason = why_unavailable()
        return ("cuda", None) if reason is None else ("sim", reason)
    if name not in _OPENERS:
        known = ", ".join(["auto", *_OPENERS])
        raise BackendUnavailable(f"no backend named {name!r}; known: {known}")
    return name, None


def open_backend(name: str, index: int, settings: Settings, loop_key: object) -> Backend:
    """Open device ``index`` of the chosen backend ``name``; blocks while a context is made.

    Raises
    ------
    BackendUnavailable
        The backend cannot start here.
    ValueError
        ``index`` is not a device of that backend.
    """
    opener = _OPENERS[name]
    if isinstance(opener, str):
        module, _, function = opener.partition(":")
        opener = getattr(import_module(module), function)
    return opener(index, settings, loop_key)
