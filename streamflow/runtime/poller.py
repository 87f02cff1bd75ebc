"""The poller: finds out, on the loop, what the device has finished (rule R11)."""

from __future__ import annotations

import threading
import time
from operator import itemgetter
from typing import TYPE_CHECKING
from weakref import WeakSet

from streamflow.errors import DeviceLost
from streamflow.scheduler.backoff import Backoff
from streamflow.scheduler.completion import Completion

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Poller"]

_lock = threading.Lock()
_OPEN: WeakSet[Core] = WeakSet()
"""The devices that are polled. Simulated ones of one loop share a clock (rule R15)."""


class Poller:
    """Runs one turn after another while anything wants a completion, and not otherwise."""

    __slots__ = ("_backoff", "_core", "_is_scheduled", "_seen_submitted", "completion")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.completion = Completion(core.settings.spin_us * 1e-6)
        self._backoff = Backoff(self.wake, lambda: core.shell.is_over())
        self._is_scheduled = False
        self._seen_submitted = 0

    def open(self) -> None:
        """Share the loop's virtual clock from now on. On the loop."""
        with _lock:
            _OPEN.add(self._core)

    def schedule(self) -> None:
        """Have a turn run in the next turn of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._backoff.cancel()
            self._core.shell.call_soon(self._turn)

    def wake(self) -> None:
        """Have a turn run soon. Any thread; nothing happens if the loop has ended."""
        self._core.shell.call_soon_threadsafe(self._turn_if_due)

    def end(self) -> list[threading.Thread]:
        """Have the helper thread end, and return it if there is one. Any thread."""
        return self._backoff.end()

    def close(self) -> None:
        """Stop for good."""
        self._backoff.close()
        self.completion.clear()
        with _lock:
            _OPEN.discard(self._core)

    def _turn_if_due(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._backoff.cancel()
            self._turn()

    def _turn(self) -> None:
        self._is_scheduled = False
        try:
            self._look()
        except Exception as error:
            # A mistake of ours. Nobody would ever be woken again: better lost than hung.
            self._core.lose_to(DeviceLost(f"streamflow failed: {error!r}"), error)

    def _look(self) -> None:
        core, completion = self._core, self.completion
        if core.needs_check and not core.is_closed:
            core.drain_dropped()
        is_virtual = core.backend.is_virtual
        delivered = False
        if core.background.num_undelivered or core.stagers.num_undelivered:
            delivered = self._deliver(is_virtual)
        for timeline in completion.wanted():
            core.reap(timeline)
        if completion.is_idle and not (
            core.background.num_undelivered or core.stagers.num_undelivered
        ):
            return
        if is_virtual:
            self._advance(delivered)
            return
        now = time.monotonic()
        if completion.should_spin(now):
            self.schedule()
        elif heads := completion.heads():
            self._backoff.watch([head.event for head in heads], completion.ages_s(now))

    def _deliver(self, is_virtual: bool) -> bool:
        """Hand the workers' results over; in virtual time, all at once and in op order (R15)."""
        pools = (self._core.background, self._core.stagers)
        if is_virtual and any(pool.num_busy for pool in pools):
            return False
        results = [result for pool in pools for result in pool.take_results()]
        results.sort(key=itemgetter(0, 1))
        for _, _, done, result, error in results:
            done(result, error)
        return bool(results)

    def _advance(self, delivered: bool) -> None:
        """Let virtual time pass by one completion, unless something was submitted (R15)."""
        core = self._core
        num_busy = num_submitted = 0
        with _lock:
            cores = list(_OPEN)
        for each in cores:
            if each.shell.key is not core.shell.key:
                continue
            num_busy += each.background.num_running + each.stagers.num_running
            num_submitted += each.num_submitted
        if delivered or num_submitted != self._seen_submitted:
            self._seen_submitted = num_submitted
        elif core.backend.advance(num_busy):
            for timeline in self.completion.wanted():
                core.reap(timeline)
        elif num_busy:
            self._backoff.watch((), [])  # look again soon: a worker may block on the clock
            return
        elif not (core.background.num_undelivered or core.stagers.num_undelivered):
            return  # nothing can move until a gate opens or something is submitted
        self.schedule()
