"""The helper thread that watches stream heads once spinning on the loop no longer pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from streamflow.scheduler.completion import sleep_s

__all__ = ["Backoff"]


_SHORT_S = 1e-3  # below this, sleep() is more exact than a wait with a timeout
IDLE_S = 10.0
"""How long the thread waits for a request before it ends."""
ASK_S = 1.0
"""How often it asks whether the loop is over, while nothing it watches is done."""


class Backoff:
    """Sleeps and polls events until one is done, then wakes the loop: once per request.

    The thread only decides *when* to wake the loop. The loop looks for itself, so an
    event that was recycled meanwhile can cost a spurious turn, never a wrong answer. It
    ends by itself when it is idle, or the loop over, and starts again when asked (C12).

    Parameters
    ----------
    wake_loop : callable
        Called on the thread.
    is_over : callable
        Whether the loop has ended for good; asked on the thread, once in a while.
    """

    def __init__(
        self, wake_loop: Callable[[], object], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._wake_loop = wake_loop
        self._is_over = is_over
        self._lock = threading.Lock()
        self._request: tuple[Sequence[Any], list[float], float] | None = None
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, events: Sequence[Any], ages_s: list[float]) -> None:
        """Watch ``events``, which have been awaited for ``ages_s``; replaces what was watched.

        With no events: wake the loop after the shortest sleep.
        """
        self._request = (events, ages_s or [0.0], time.monotonic())
        self._asked.set()
        with self._lock:
            if self._thread is not None or self._is_closed:
                return
            self._thread = threading.Thread(target=self._run, name="streamflow-poll", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """Watch nothing."""
        self._request = None

    def end(self) -> list[threading.Thread]:
        """Have the thread end for good, and return it if there is one. Any thread."""
        self._request = None
        self._is_closed = True
        self._asked.set()
        with self._lock:
            return [] if self._thread is None else [self._thread]

    def close(self) -> None:
        """End the thread; it asks no event after this returns."""
        for thread in self.end():
            thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            if not self._asked.wait(IDLE_S):
                with self._lock:
                    if not self._asked.is_set():
                        self._thread = None
                        return
            self._asked.clear()
            asked_s = time.monotonic()
            while (request := self._request) is not None and not self._is_closed:
                events, ages_s, since = request
                waited = time.monotonic() - since
                nap_s = sleep_s(age + waited for age in ages_s)
                if nap_s < _SHORT_S:
                    time.sleep(nap_s)
                elif self._asked.wait(nap_s):  # a younger head must not wait out an old one's nap
                    self._asked.clear()
                if self._request is not request:
                    continue
                if time.monotonic() - asked_s > ASK_S:
                    asked_s = time.monotonic()
                    if self._is_over():
                        with self._lock:
                            self._request = self._thread = None
                        return
                try:
                    is_over = not events or any(event.is_done for event in events)
                except Exception:  # a fault: the loop's own query will raise it again
                    is_over = True
                if is_over:
                    self._request = None
                    del request, events
                    self._wake_loop()
                    break
