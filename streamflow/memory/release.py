"""A thread for what may wait for the device: ``cudaFree`` and its like (rule R1)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from logging import getLogger

from streamflow.scheduler.guards import guard

__all__ = ["Releaser"]


class Releaser:
    """Runs actions one after the other on a daemon thread that ends when it has none.

    Parameters
    ----------
    after : callable
        Called on that thread after each action, and once more when :attr:`is_busy` has ended:
        who waits for that is to hear of it.
    """

    def __init__(self, name: str, after: Callable[[], None]) -> None:
        self._name = name
        self._after = after
        self._actions: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        guard(self)

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action`` soon; what it raises is logged. Any thread."""
        with self._changed:
            if self._is_closed:
                return
            self._actions.append(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to do."""
        return self._thread is not None

    def wait_idle_blocking(self, timeout_s: float | None = None) -> None:
        """Until nothing is left to do, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def close(self) -> None:
        """Take no more actions."""
        with self._changed:
            self._is_closed = True

    def on_fork(self) -> None:
        """Do nothing in a child: its threads are the parent's."""
        self._is_closed, self._thread = True, None

    def on_exit(self) -> list[threading.Thread]:
        """Begin no more actions: the process gives everything back."""
        self._is_closed = True
        self._actions.clear()
        thread = self._thread
        return [] if thread is None else [thread]

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._actions:
                    self._thread = None
                    self._changed.notify_all()
                    break
                action = self._actions.popleft()
            for step in (action, self._after):
                try:
                    step()
                except Exception:
                    getLogger("streamflow").exception("giving memory back failed")
        self._after()
