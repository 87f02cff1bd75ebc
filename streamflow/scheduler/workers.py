"""Daemon threads for what must not run on the loop; their results come back to it.

A thread that has had nothing to do for a while ends, and another is started when there is
something: so none is left of a loop that ended without closing its device (C12).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamflow.backends.base import Checker

__all__ = ["Result", "Workers"]

IDLE_S = 10.0
"""How long a thread waits for its next task."""

Done = Callable[[Any, BaseException | None], None]

_Item = tuple[int, int, Callable[[], Any], Done, Any]

Result = tuple[int, int, Done, Any, BaseException | None]
"""``(op's seq, number of the task, done, result, error)``: sorts into submission order."""


class Workers:
    """A bounded pool. ``done(result, error)`` is called by the loop, from :meth:`take_results`.

    Parameters
    ----------
    num_threads : int
        Started when first needed.
    prepare : callable
        Run once at the start of each thread (make the device current).
    wake_loop : callable
        Called from a worker when a result is ready: have the loop call :meth:`take_results`.
    checker : Checker, optional
        Told who hands what to whom.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        prepare: Callable[[], None],
        wake_loop: Callable[[], None],
        checker: Checker | None = None,
    ) -> None:
        self._name = name
        self.num_threads = num_threads
        self._prepare = prepare
        self._wake_loop = wake_loop
        self._checker = checker
        self._tasks: SimpleQueue[_Item | None] = SimpleQueue()
        self._results: deque[tuple[Result, Any]] = deque()  # with what their tasks knew
        self.num_tasks = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.num_busy = 0
        self.num_undelivered = 0  # loop thread only

    def submit(self, seq: int, task: Callable[[], Any], done: Done) -> None:
        """Run ``task()`` on a thread. Loop thread only; ``seq`` orders results (rule R15)."""
        self.num_undelivered += 1
        self.num_tasks += 1
        known = None if self._checker is None else self._checker.hand_off()
        with self._lock:
            self.num_busy += 1
            self._tasks.put((seq, self.num_tasks, task, done, known))
            if len(self._threads) >= min(self.num_threads, self.num_undelivered):
                return
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @property
    def num_running(self) -> int:
        """Tasks that have a thread, or are about to get one; queued ones wait for these."""
        return min(self.num_busy, self.num_threads)

    def take_results(self) -> list[Result]:
        """The results that are ready. Loop thread only: each must be handed to its ``done``."""
        results = self._results
        batch = [results.popleft() for _ in range(len(results))]
        if self._checker is not None:
            for _, known in batch:
                self._checker.deliver(known)
        self.num_undelivered -= len(batch)
        return [result for result, _ in batch]

    def close(self) -> None:
        """Let the threads end once their queue is empty. Any thread."""
        with self._lock:
            for _ in self._threads:
                self._tasks.put(None)

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that have not ended, or are about to."""
        with self._lock:
            return list(self._threads)

    def _run(self) -> None:
        prepared: BaseException | None = None
        try:
            self._prepare()
        except Exception as error:  # reported by every task of this thread
            prepared = error
        while (item := self._next()) is not None:
            seq, number, task, done, known = item
            if self._checker is not None:
                self._checker.take_up(known)
            result: Any = None
            failure = prepared
            if failure is None:
                try:
                    result = task()
                except BaseException as error:
                    failure = error
            outcome = [(seq, number, done, result, failure)]
            # Nothing of a finished task may live on in this frame, from before the loop can
            # see that it is finished (C23).
            del item, task, done, result, failure
            if self._checker is not None:
                known = self._checker.hand_off()
                self._checker.take_up(None)
            self._results.append((outcome.pop(), known))
            with self._lock:
                self.num_busy -= 1
            self._wake_loop()

    def _next(self) -> _Item | None:
        """The next task; None if this thread is to end."""
        while True:
            try:
                return self._tasks.get(timeout=IDLE_S)
            except Empty:
                with self._lock:  # submit() counts the threads under it
                    if self._tasks.empty():
                        self._threads.remove(threading.current_thread())
                        return None
