"""The poller: finds out, on the loop, what the device has finished (rule R11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING
from weakref import WeakSet

from streamflow.errors import DeviceLost
from streamflow.scheduler.backoff import Backoff
from streamflow.scheduler.completion import NAP_MIN_S, Completion
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.timers import Timer

__all__ = ["Poller"]

_lock = threading.Lock()
_OPEN: WeakSet[Core] = WeakSet()
"""The devices that are polled. Simulated ones of one loop share a clock (rule R15)."""
_num_changes = 0
"""How often that set has changed."""

_IDLE_MAX_S = 1e-3
_OWN_WORK_S = 0.05
_HOST_WORK_S = 0.1
"""How long a turn waits for workers in virtual time, if they do our own work, or a program's."""
_GRACE_S = 0.05
"""How long nothing may have changed before virtual time jumps to a timer."""


class Poller:
    """Runs one turn after another while anything wants a completion, and not otherwise."""

    __slots__ = (
        "_core",
        "_end_grace",
        "_idle_s",
        "_is_grace_over",
        "_is_scheduled",
        "_known_peers",
        "_num_waited_for",
        "_seen_changes",
        "_seen_state",
        "_seen_submitted",
        "backoff",
        "completion",
        "num_moves",
        "num_turns",
    )

    def __init__(self, core: Core) -> None:
        self._core = core
        self.completion = Completion(core.settings.spin_us * 1e-6)
        self.backoff = Backoff(self.wake, lambda: core.shell.is_over())
        self._is_scheduled = False
        self._idle_s = NAP_MIN_S
        self._seen_submitted = 0
        self._known_peers: tuple[Core, ...] = ()
        self._seen_changes = -1
        self.num_turns = 0
        self.num_moves = 0  # completions and deliveries in virtual time
        self._seen_state: tuple[int, int, float] | None = None  # when the grace began
        self._num_waited_for = 0  # host tasks: the newest of them took too long
        self._end_grace: Callable[[], None] | None = None
        self._is_grace_over = False

    def open(self) -> None:
        """Share the loop's virtual clock from now on. On the loop."""
        global _num_changes
        with _lock:
            _OPEN.add(self._core)
            _num_changes += 1

    def schedule(self) -> None:
        """Have a turn run in the next turn of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self.backoff.cancel()
            self._core.shell.call_soon(self._turn)

    def wake(self) -> None:
        """Have a turn run soon. Any thread; nothing happens if the loop has ended."""
        self._core.shell.call_soon_threadsafe(self._turn_if_due)

    def wake_all(self) -> None:
        """:meth:`wake`, for every device of the loop: one's gate may hold another's work."""
        self._core.shell.call_soon_threadsafe(self._turn_all)

    def _turn_all(self) -> None:
        for each in self.peers():
            each.poller._turn_if_due()

    def end(self) -> list[threading.Thread]:
        """Have the helper thread end, and return it if there is one. Any thread."""
        return self.backoff.end()

    def close(self) -> None:
        """Stop for good."""
        self.backoff.close()
        self.completion.clear()
        self._core.timers.close()
        if self._end_grace is not None:
            self._end_grace()
        global _num_changes
        with _lock:
            _OPEN.discard(self._core)
            _num_changes += 1

    def _turn_if_due(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.backoff.cancel()
            self._turn()

    def _turn(self) -> None:
        self._is_scheduled = False
        self.num_turns += 1
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
        if is_virtual:
            self._await_workers()
        delivered = False
        if core.num_undelivered:
            delivered = self._deliver(is_virtual)
        if is_virtual:
            self._reap_all()
            if not completion.is_idle or self._has_results() or core.timers.first() is not None:
                self._advance(delivered)
            return
        self._reap()
        if completion.is_idle:
            return
        if completion.should_spin(time.monotonic()):
            self.schedule()
        elif heads := completion.heads():
            self.backoff.watch(heads)

    def _await_workers(self) -> None:
        """Let workers end, or block on the clock, in virtual time (R15).

        Their results then arrive in this turn, however fast the threads are; the program may
        take several turns to go on meanwhile. Copies through a chunk take moments, and so do
        most functions of the program's own; those that don't are waited for once.
        """
        until_s, peers = 0.0, self.peers()
        while True:
            for each in peers:  # a loop, since this runs once a turn
                if each.background.num_busy or each.stagers.num_busy or each.host.workers.num_busy:
                    break
            else:
                return
            num_tasks = sum(each.host.workers.num_tasks for each in peers)
            pools = [pool for each in peers for pool in (each.background, each.stagers)]
            is_own_busy = any(pool.num_busy for pool in pools)
            if num_tasks != self._num_waited_for:
                pools += [each.host.workers for each in peers]
            if not (is_own_busy or any(pool.num_busy for pool in pools)):
                return
            num_busy = sum(pool.num_running for pool in pools)
            if self._core.backend.are_blocked(num_busy):
                return
            now_s = time.monotonic()
            until_s = until_s or now_s + (_OWN_WORK_S if is_own_busy else _HOST_WORK_S)
            if now_s > until_s:
                self._num_waited_for = num_tasks
                return
            time.sleep(NAP_MIN_S)

    def _reap_all(self) -> None:
        """Let all react that has ended by now, on every device of the loop (R15).

        What one end sets off may want another that is there already. Seen in a later turn,
        it would come before or after the results of a worker as the threads happen to run.
        """
        asked: set[Timeline] = set()
        peers = self.peers()
        is_any_done = True
        while is_any_done:
            is_any_done = False
            for each in peers:
                is_any_done |= each.poller._reap(asked)

    def _reap(self, asked: set[Timeline] | None = None) -> bool:
        """Look at the wanted heads, but those ``asked``; whether any was done."""
        completion = self.completion
        is_head_done = True
        try:
            done = completion.done(asked)
        except Exception:  # a fault: the closer look raises it again, and loses the device
            done, is_head_done = completion.wanted(), False
        for timeline in done:
            if asked is not None:
                asked.discard(timeline)  # it has another head now
            self._core.reap(timeline, is_head_done)
            is_head_done = False  # what that set off may have retired the other heads
        return bool(done) and not self._core.is_closed

    def _has_results(self) -> bool:
        """Workers are busy, or have results that were not handed over yet."""
        return self._core.num_undelivered > 0

    def _deliver(self, is_virtual: bool) -> bool:
        """Hand the workers' results over; in virtual time, all at once and in op order (R15)."""
        pools = self._core.pools
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
        num_busy = num_submitted = num_moves = 0
        timers = []
        for each in self.peers():
            num_busy += sum(pool.num_running for pool in each.pools)
            num_submitted += each.num_submitted
            num_moves += each.poller.num_moves
            if (timer := each.timers.first()) is not None:
                timers.append(timer)
        if not num_busy and any(each.num_undelivered for each in self.peers()):
            # A worker has ended since results were handed over: they come first (R15).
            self.schedule()
            return
        timer = min(timers, default=None)
        if delivered or num_submitted != self._seen_submitted:
            self._seen_submitted = num_submitted
            self.num_moves += delivered
        elif core.backend.advance(num_busy, inf if timer is None else timer.due_s):
            self.num_moves += 1
            self._reap_all()
            # What was parked and goes now is not the program's doing: no turn is left for it.
            self._seen_submitted = sum(each.num_submitted for each in self.peers())
        elif timer is not None and self._reach(timer, num_busy, (num_submitted, num_moves)):
            timer.fire()
            for each in self.peers():  # a turn for whoever that woke or cancelled: trio needs it
                each.poller._seen_submitted = -1
        elif num_busy:
            # Look again soon: a worker may block on the clock. The longer none does, the later.
            self._idle_s = min(2 * self._idle_s, _IDLE_MAX_S)
            self.backoff.watch((), self._idle_s)
            return
        elif not self._has_results():
            return  # nothing can move until a gate opens or something is submitted
        self._idle_s = NAP_MIN_S
        self.schedule()

    def peers(self) -> tuple[Core, ...]:
        """The open devices of this loop. Kept, since this runs once a turn."""
        if self._seen_changes != _num_changes:
            key = self._core.shell.key
            with _lock:
                self._seen_changes = _num_changes
                self._known_peers = tuple(each for each in _OPEN if each.shell.key is key)
        return self._known_peers

    def _reach(self, timer: Timer, num_busy: int, counts: tuple[int, int]) -> bool:
        """Let virtual time pass to ``timer``, if it can; nothing completes before."""
        core = self._core
        state = (*counts, core.backend.clock_s())
        may_jump = self._is_grace_over and state == self._seen_state
        if core.backend.skip_to(num_busy, timer.due_s, may_jump):
            return True
        if (self._is_grace_over or state != self._seen_state) and core.timers.first() is not None:
            if self._end_grace is not None:
                self._end_grace()
            self._seen_state, self._is_grace_over = state, False
            self._end_grace = core.shell.call_later(_GRACE_S, self._grace_over)
        return False

    def _grace_over(self) -> None:
        self._is_grace_over = True
        self.schedule()
