"""The helper thread that watches stream heads once spinning on the loop no longer pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from streamflow.scheduler.completion import sleep_s

__all__ = ["Backoff"]


_SHORT_S = 1e-3  # below this, sleep() is more exact than a wait with a timeout


class Backoff:
    """Sleeps and polls events until one is done, then wakes the loop: once per request.

    The thread only decides *when* to wake the loop. The loop looks for itself, so an
    event that was recycled meanwhile can cost a spurious turn, never a wrong answer.
    """

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        self._wake_loop = wake_loop
        self._request: tuple[Sequence[Any], list[float], float] | None = None
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, events: Sequence[Any], ages_s: list[float]) -> None:
        """Watch ``events``, which have been awaited for ``ages_s``; replaces what was watched.

        With no events: wake the loop after the shortest sleep.
        """
        self._request = (events, ages_s or [0.0], time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="streamflow-poll", daemon=True)
            self._thread.start()
        self._asked.set()

    def cancel(self) -> None:
        """Watch nothing."""
        self._request = None

    def close(self) -> None:
        """End the thread; it asks no event after this returns."""
        self._request = None
        self._is_closed = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            self._asked.wait()
            self._asked.clear()
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
                try:
                    is_over = not events or any(event.is_done for event in events)
                except Exception:  # a fault: the loop's own query will raise it again
                    is_over = True
                if is_over:
                    self._request = None
                    del request, events
                    self._wake_loop()
                    break
