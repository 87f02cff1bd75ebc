"""Who waits for pinned memory, and what of it is still in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from streamflow.errors import DeadlineExceeded
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.runtime.op import next_seq
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["LeaseQueue"]


class _Waiter:
    """One request that could not be served at once."""

    __slots__ = ("block", "error", "has_ended", "nbytes", "wake")

    def __init__(self, nbytes: int, wake: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.block: PinnedBlock | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.wake: Callable[[], None] | None = wake

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.has_ended = True
        if self.wake is not None:
            self.wake()


class LeaseQueue:
    """The leases of one device: first come, first served; back when no op uses them (R6).

    Attributes
    ----------
    dropped : deque of PinnedBlock
        Of leases that finalisers left: the loop gives them back, or the close (rule R12).
    num_parked : int
        Leases that were released while ops on them had not ended.
    on_pinned : callable, optional
        Called when no thread pins memory for anybody here any more.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._blocks = core.pinned
        self._is_simulated = core.backend.controls() is not None
        self._queue: deque[_Waiter] = deque()
        self._pinning: list[_Waiter] = []  # whose turn came: a thread is at it
        self._is_due = False
        self._is_short = False
        self._watched: set[Ticket] = set()
        self.dropped: deque[PinnedBlock] = deque()
        self.num_parked = 0
        self.on_pinned: Callable[[], None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_pinning(self) -> bool:
        """Whether a thread pins memory for somebody, who may have left."""
        return bool(self._pinning)

    def release(self, block: PinnedBlock) -> None:
        """Give a lease's block back: now, or when the ops on it have ended. Loop thread only."""
        # The hot path (P8): most leases have no array any more, or no op.
        block._is_open = False
        if block._view is not None:
            block.revoke()
        region = block._region
        if region is not None and not self._core.is_closed:
            pending: list[Ticket] = []
            region.before_write(pending)
            if pending:
                self.num_parked += 1
                self._core.when_all_ended(pending, partial(self._unpark, block))
                return
            if region.is_left_behind():
                return
        if self._is_simulated and block._views:
            block.poison()
        block.pool._give_back(block)

    def _unpark(self, block: PinnedBlock) -> None:
        self.num_parked -= 1
        region = block.region
        if region is not None and region.is_left_behind():
            return
        if self._is_simulated:
            block.poison()
        block.release()

    def drop(self, block: PinnedBlock) -> None:
        """A lease was dropped. Any thread; called by finalisers (R12)."""
        self.dropped.append(block)
        if self._blocks.is_closed:  # nobody else is coming
            self.take_dropped()
            return
        self._core.needs_check = True
        if self._core.is_memory_short:
            self._core.poller.wake()

    def take_dropped(self) -> None:
        """Release what finalisers left. Loop thread only, until the blocks are closed."""
        while self.dropped:
            try:
                block = self.dropped.popleft()
            except IndexError:  # another thread took the last one
                return
            self.release(block)

    # -- waiting -----------------------------------------------------------------------------

    async def wait(self, nbytes: int, timeout_s: float | None) -> PinnedBlock:
        """A block, when it is this caller's turn and there is one.

        Raises
        ------
        DeadlineExceeded
            Not within ``timeout_s``.
        """
        core = self._core
        wake, wait = core.shell.park()
        waiter = _Waiter(nbytes, wake)
        self._queue.append(waiter)
        self._serve()

        def expire() -> None:
            if not waiter.has_ended:
                late = DeadlineExceeded(
                    f"no lease of {nbytes} bytes within {timeout_s} s: "
                    f"{self._blocks.num_live} blocks are in use, "
                    f"{self._blocks.counted_nbytes} of {self._blocks.budget_nbytes} bytes pinned"
                )
                waiter.end(late)

        stop = None if timeout_s is None else core.timers.call_later(timeout_s, expire)
        try:
            while not waiter.has_ended:
                await wait(False)
        except BaseException:
            if waiter.block is not None:  # granted in the same turn
                waiter.block.release()
            raise
        finally:
            if stop is not None:
                stop()
            waiter.has_ended = True
            waiter.wake = None
            if waiter in self._queue:
                self._queue.remove(waiter)
                if core.is_here():  # else the loop has ended, and this is a finaliser (C12)
                    self._serve()
        error, waiter.error = waiter.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, waiter
        block = waiter.block
        assert block is not None
        return block

    def _serve(self) -> None:
        """Give what there is to whoever is first."""
        self._is_due = False
        queue, blocks = self._queue, self._blocks
        self._be_short(bool(queue))  # before looking: what comes back from now on is heard of
        while queue:
            waiter = queue[0]
            if waiter.has_ended:
                queue.popleft()
                continue
            block = blocks.try_acquire(waiter.nbytes, is_waiter=True)
            if block is not None:
                queue.popleft()
                waiter.block = block
                waiter.end()
            elif blocks.reserve(waiter.nbytes, is_waiter=True):
                queue.popleft()
                self._pin(waiter)
            else:
                break
        self._be_short(bool(queue))
        if queue:
            self._watch()

    def _pin(self, waiter: _Waiter) -> None:
        core = self._core

        def pinned(block: PinnedBlock | None, error: BaseException | None) -> None:
            self._pinning.remove(waiter)
            if error is not None:
                error = core.lose(error, f"pinning {waiter.nbytes} bytes")
            if not waiter.has_ended:
                waiter.block = block
                waiter.end(error)
            elif block is not None:  # it has left, or timed out: to whoever is next
                block.release()
            if self.on_pinned is not None and not self._pinning:
                self.on_pinned()

        self._pinning.append(waiter)
        core.background.submit(
            next_seq(), partial(self._blocks.acquire_reserved_blocking, waiter.nbytes), pinned
        )
        core.schedule_turn()

    def _be_short(self, is_short: bool) -> None:
        """While somebody waits: hear of what comes back, and look at all that runs (R2, R11)."""
        if is_short != self._is_short:
            self._is_short = is_short
            self._blocks.on_release = self._heard if is_short else None
            self._core.be_short(1 if is_short else -1)

    def _heard(self) -> None:
        """A block came back. Any thread; also in a finaliser, in the midst of the loop's work."""
        if not self._is_due:
            self._is_due = True
            self._core.shell.call_soon_threadsafe(self._serve)

    def _watch(self) -> None:
        """Have what is in flight looked at until it ends: copies give their blocks back then."""
        for line in self._core.lines:
            for ticket in reversed(line.inflight):
                if ticket.op is not None:
                    if ticket not in self._watched:
                        self._watched.add(ticket)
                        self._core.when_ended(ticket, partial(self._watched.discard, ticket))
                    break

    def fail(self, error: BaseException) -> None:
        """Nobody will get anything any more."""
        for waiter in (*self._queue, *self._pinning):
            if not waiter.has_ended:
                # Its own: a traceback that several tasks share keeps their frames (C23).
                its_own = copy(error)
                its_own.__cause__ = error.__cause__
                waiter.end(its_own)

    def silence(self) -> None:
        """Wake nobody any more: who waited is on a loop that ended (C12)."""
        self.on_pinned = None
        for waiter in (*self._queue, *self._pinning):
            waiter.wake = None
