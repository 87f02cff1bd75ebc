"""Daemon threads for what must not run on the loop; their results come back to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Workers"]

Done = Callable[[Any, BaseException | None], None]


class Workers:
    """A bounded pool. ``done(result, error)`` runs on the loop, when :meth:`deliver` is called.

    Parameters
    ----------
    num_threads : int
        Started when first needed.
    prepare : callable
        Run once at the start of each thread (make the device current).
    wake_loop : callable
        Called from a worker when a result is ready: have the loop call :meth:`deliver`.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        prepare: Callable[[], None],
        wake_loop: Callable[[], None],
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._prepare = prepare
        self._wake_loop = wake_loop
        self._tasks: SimpleQueue[tuple[int, Callable[[], Any], Done] | None] = SimpleQueue()
        self._results: deque[tuple[int, Done, Any, BaseException | None]] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.num_busy = 0
        self.num_undelivered = 0  # loop thread only

    def submit(self, seq: int, task: Callable[[], Any], done: Done) -> None:
        """Run ``task()`` on a thread. Loop thread only; ``seq`` orders results (rule R15)."""
        self.num_undelivered += 1
        with self._lock:
            self.num_busy += 1
        self._tasks.put((seq, task, done))
        if len(self._threads) < min(self._num_threads, self.num_undelivered):
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def deliver(self, *, in_order: bool) -> bool:
        """Hand finished results to their ``done``, on the loop; True if there were any.

        ``in_order`` holds results back until no worker is busy and sorts them by
        ``seq``, so that thread timing cannot change the schedule.
        """
        if not self._results or (in_order and self.num_busy):
            return False
        batch = [self._results.popleft() for _ in range(len(self._results))]
        if in_order:
            batch.sort(key=lambda item: item[0])
        self.num_undelivered -= len(batch)
        for _, done, result, error in batch:
            done(result, error)
        return True

    def close(self) -> None:
        """Let the threads end once their queue is empty."""
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        prepared: BaseException | None = None
        try:
            self._prepare()
        except Exception as error:  # reported by every task of this thread
            prepared = error
        while (item := self._tasks.get()) is not None:
            seq, task, done = item
            result: Any = None
            failure = prepared
            if failure is None:
                try:
                    result = task()
                except BaseException as error:
                    failure = error
            self._results.append((seq, done, result, failure))
            with self._lock:
                self.num_busy -= 1
            # Nothing of a finished task may live on in this frame (C23).
            del item, task, done, result, failure
            self._wake_loop()
