"""Work that finalisers leave behind: they may run on any thread and never call CUDA (R12)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from logging import getLogger

__all__ = ["orphans", "post_orphan", "run_orphans_blocking"]

orphans: deque[Callable[[], None]] = deque()
"""Clean-up whose device is gone: run by the next device that is entered, off its loop."""


def post_orphan(action: Callable[[], None]) -> None:
    """Leave ``action`` for any later device. Safe in a finaliser: one append."""
    orphans.append(action)


def run_orphans_blocking() -> None:
    """Run what was left; blocks, so only ever called on a worker thread."""
    while orphans:
        try:
            action = orphans.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            action()
        except Exception:  # its device is gone, and this one has nothing to do with it
            getLogger("streamflow").exception("clean-up of a closed device failed")
