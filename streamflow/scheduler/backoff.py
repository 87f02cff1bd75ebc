"""The helper thread that watches stream heads once spinning on the loop no longer pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from streamflow.scheduler.completion import NAP_MIN_S, Head, Looks

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

    Attributes
    ----------
    num_queries, num_wakes : int
        Events asked by the thread, and how often it woke the loop.
    """

    def __init__(
        self, wake_loop: Callable[[], object], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._wake_loop = wake_loop
        self._is_over = is_over
        self._lock = threading.Lock()
        self.num_queries = 0
        self.num_wakes = 0
        self._request: Looks | None = None
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, heads: Sequence[Head], idle_s: float = NAP_MIN_S) -> None:
        """Watch ``heads``, by the monotonic clock; replaces what was watched.

        With no heads: wake the loop after ``idle_s``.
        """
        self._request = Looks(heads, time.monotonic(), idle_s)
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
                sleep_s = request.sleep_s(time.monotonic())
                if sleep_s < _SHORT_S:
                    time.sleep(sleep_s)
                elif self._asked.wait(sleep_s):  # a younger head must not wait out an old one's
                    self._asked.clear()
                if self._request is not request:
                    continue
                if time.monotonic() - asked_s > ASK_S:
                    asked_s = time.monotonic()
                    if self._is_over():
                        with self._lock:
                            self._request = self._thread = None
                        return
                if self._has_news(request):
                    self._request = None
                    del request
                    self.num_wakes += 1
                    self._wake_loop()
                    break

    def _has_news(self, looks: Looks) -> bool:
        if not looks.heads:
            return True
        for head in looks.due(time.monotonic()):
            self.num_queries += 1
            try:
                if head.event.is_done:
                    return True
            except Exception:  # a fault: the loop's own query will raise it again
                return True
        return False
