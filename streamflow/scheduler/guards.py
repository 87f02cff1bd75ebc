"""What a fork and the interpreter's exit do to devices: they leak rather than crash (R12).

A child of fork has the parent's objects, but neither its threads nor its driver, and locks
in it may be held by threads that are gone. So everything is switched off there, before any
lock is asked for: calls raise one error, finalisers do nothing. At exit, finalisers run in
an order of the interpreter's choosing while daemon threads are cut off wherever they are;
threads are told to end, and nothing that a driver might be asked to destroy is finalised.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

from streamflow.errors import ForkedProcess
from streamflow.scheduler.reaper import orphans

__all__ = ["Guarded", "Halt", "Joinable", "check_process", "guard", "is_forked", "note_entering"]

EXIT_S = 1.0
"""How long the exit waits for threads: one that a stalled device holds is left alone."""


class Joinable(Protocol):
    """A thread, as far as its end goes."""

    def join(self, timeout: float, /) -> None:
        """Wait until it has ended, so many seconds at most."""


class Halt:
    """Has a thread stay where it calls this, for good: in no driver's call, and without the GIL.

    The interpreter's end cuts daemon threads off when they next want the GIL. Inside a call of
    C++ code that ended the process with "terminate called without an active exception".
    """

    def __init__(self) -> None:
        self._has_halted = threading.Event()

    def __call__(self) -> None:
        self._has_halted.set()
        threading.Event().wait()

    def join(self, timeout: float, /) -> None:
        """Wait for the thread to come here."""
        self._has_halted.wait(timeout)


class Guarded(Protocol):
    """What has finalisers, threads or locks of a device."""

    def on_fork(self) -> None:
        """Do nothing from now on: this is a child. Takes no lock."""

    def on_exit(self) -> Sequence[Joinable]:
        """Do nothing from now on, and have these threads end. Waits for nothing."""


_lock = threading.Lock()
_guarded: WeakSet[Guarded] = WeakSet()
_has_entered = False
_is_forked = False


def guard(item: Guarded) -> None:
    """Tell ``item``, while it lives, when the process forks or ends."""
    with _lock:
        _guarded.add(item)


def note_entering() -> None:
    """Note that this process uses devices: its forks can't.

    Raises
    ------
    ForkedProcess
        As :func:`check_process`.
    """
    global _has_entered
    check_process()
    _has_entered = True


def is_forked() -> bool:
    """Whether this is a fork of a process that had entered a device."""
    return _is_forked


def check_process() -> None:
    """Raise in a fork of a process that had entered a device.

    Raises
    ------
    ForkedProcess
        Naming the start method that works.
    """
    if _is_forked:
        raise ForkedProcess(
            f"process {os.getpid()} was forked from one that had entered a device, and neither "
            "the device nor its driver works in a fork: start processes with the method "
            '"spawn" (multiprocessing.get_context("spawn")), and enter a Device there'
        )


def _after_fork_in_child() -> None:
    global _is_forked
    if _has_entered:
        _is_forked = True
        _keep_for_ever(orphans)
        items = list(_guarded)  # no lock: who held it is not here to give it back
        _keep_for_ever(items)
        for item in items:
            item.on_fork()


def _at_exit() -> None:
    if _is_forked:
        return
    with _lock:
        items = list(_guarded)
    _keep_for_ever(items)
    _keep_for_ever(orphans)
    until_s = time.monotonic() + EXIT_S
    for thread in [thread for item in items for thread in item.on_exit()]:
        thread.join(max(0.0, until_s - time.monotonic()))


def _keep_for_ever(item: object) -> None:
    """Keep ``item`` and all it refers to from being finalised, also by the interpreter's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):  # not where nothing forks
    os.register_at_fork(after_in_child=_after_fork_in_child)
