"""Who waits for memory: first come, first served, by each resource."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from streamflow.backends.origin import ON_BEHALF
from streamflow.errors import Closed, DeadlineExceeded, OutOfDeviceMemory
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.holders import are_held_only_by
from streamflow.runtime.op import Op
from streamflow.runtime.shortage import describe_shortage, largest_of, memory_report

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.runtime.core import Core

__all__ = ["MemoryQueue", "Waiter"]

Origin: TypeAlias = "tuple[CodeType, int]"

_NUM_PATIENT_TURNS = 4
"""Turns of the loop before a circle of waiters is taken for one: each may be about to free."""


_LOOK_S = 0.02
"""How often to look where other devices of the same GPU may bring memory back."""
_HOPELESS = "waiting is of no use: whoever holds memory waits for more, and no free is pending"


class Waiter:
    """One request that could not be served at once."""

    __slots__ = (
        "array",
        "called_s",
        "context",
        "error",
        "has_ended",
        "make",
        "nbytes",
        "origin",
        "resource",
        "task",
        "wake",
    )

    def __init__(
        self,
        make: Callable[[], DeviceArray],
        nbytes: int,
        resource: DeviceMemoryResource | None,
        origin: Origin,
        core: Core,
    ) -> None:
        self.make = make
        self.resource = resource
        self.context = copy_context()  # of its scope and its current stream
        self.context.run(ON_BEHALF.set, origin)
        self.nbytes = nbytes
        self.origin = origin
        self.called_s = core.clock_s()
        self.task: object = core.shell.task()
        self.array: DeviceArray | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.wake: Callable[[], None] | None = None

    def end(self) -> None:
        """It has its array, or its error."""
        self.has_ended = True
        if self.wake is not None:
            self.wake()


class MemoryQueue:
    """The waiters of one device.

    Within a resource they are served in the order they came, whatever their sizes: a large
    request is not starved by small ones. ``empty`` does not wait, and so does not queue.

    Attributes
    ----------
    waiters : dict
        By the ``id`` of the resource (None: the device's own pool), those that wait, oldest
        first. Equal resources are several: each may have a limit of its own.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.waiters: dict[int, deque[Waiter]] = {}
        self._watched: set[Any] = set()  # tickets of frees whose end serves the queue
        self._is_due = False
        self._num_turns = 0
        self._has_trimmed = False
        self._stop_looking: Callable[[], None] | None = None

    async def take(
        self,
        make: Callable[[], DeviceArray],
        nbytes: int,
        resource: DeviceMemoryResource | None,
        timeout_s: float | None,
        origin: Origin,
    ) -> DeviceArray:
        """``make()`` as soon as it succeeds and nobody who came before waits.

        Raises
        ------
        OutOfDeviceMemory
            It never can, or everybody who holds memory waits as well.
        DeadlineExceeded
            Not within ``timeout_s``.
        """
        core = self._core
        if id(resource) not in self.waiters:
            try:
                return make()
            except OutOfDeviceMemory as refusal:
                if nbytes > largest_of(core, resource):
                    raise
                refusal.__traceback__ = None
        elif nbytes > largest_of(core, resource):
            raise describe_shortage(core, nbytes, resource, None)
        return await self._wait(Waiter(make, nbytes, resource, origin, core), timeout_s)

    async def _wait(self, waiter: Waiter, timeout_s: float | None) -> DeviceArray:
        core = self._core
        if not self.waiters:
            self._be_short(True)
        self.waiters.setdefault(id(waiter.resource), deque()).append(waiter)
        self._expect_more()
        self._soon()
        waiter.wake, wait = core.shell.park()

        def expire() -> None:
            if not waiter.has_ended:
                report = memory_report(core, waiter.nbytes, waiter.resource, has_waited=True)
                waiter.error = DeadlineExceeded(
                    f"no memory within {timeout_s} s: {report}", report=report
                )
                waiter.end()

        stop = None if timeout_s is None else core.timers.call_later(timeout_s, expire)
        try:
            while not waiter.has_ended:
                await wait(False)
        finally:
            if stop is not None:
                stop()
            self._leave(waiter)
        error, waiter.error = waiter.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error, waiter
        array, waiter.array = waiter.array, None
        assert array is not None
        return array

    def fail(self, error: BaseException) -> None:
        """Nobody will get anything any more."""
        for queue in self.waiters.values():
            for waiter in queue:
                if not waiter.has_ended:
                    # Its own: a traceback that several tasks share keeps their frames (C23).
                    waiter.error = copy(error)
                    waiter.error.__cause__ = error.__cause__
                    waiter.end()

    def silence(self) -> None:
        """Wake nobody any more: who waited is on a loop that ended (C12)."""
        for waiter in self.all_waiters():
            waiter.wake = None

    def all_waiters(self) -> list[Waiter]:
        """Those that have neither an array nor an error."""
        return [
            waiter for queue in self.waiters.values() for waiter in queue if not waiter.has_ended
        ]

    # -- serving -----------------------------------------------------------------------------

    def _leave(self, waiter: Waiter) -> None:
        queue = self.waiters[id(waiter.resource)]
        queue.remove(waiter)
        if queue:
            if self._core.is_here():  # else the loop has ended, and this is a finaliser (C12)
                self._soon()  # who is first now may fit
            return
        del self.waiters[id(waiter.resource)]
        if not self.waiters:
            self._be_short(False)
            self._watched.clear()
            if self._stop_looking is not None:
                self._stop_looking()
                self._stop_looking = None

    def _be_short(self, is_short: bool) -> None:
        """While somebody waits: hear of frees elsewhere, and look at all that runs (R2, R11)."""
        core = self._core
        listeners = core.space.listeners
        if is_short:
            listeners.append(self._heard)
        else:
            listeners.remove(self._heard)
        core.be_short(1 if is_short else -1)

    def _heard(self) -> None:
        """Memory came back, or soon will. Any thread."""
        self._expect_more()
        if self._core.is_here():
            self._soon()
        else:
            self._core.shell.call_soon_threadsafe(self._soon)

    def _expect_more(self) -> None:
        self._num_turns = 0
        self._has_trimmed = False

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._core.shell.call_soon(self._serve)

    def _serve(self) -> None:
        """Give what there is to whoever is first."""
        self._is_due = False
        core = self._core
        if core.lost is not None or core.is_closing:
            self.fail(core.lost or Closed(f"device {core.backend.index} is closed"))
            return
        self._serve_all(is_patient=True)
        if self.all_waiters():
            self._watch()

    def _serve_all(self, *, is_patient: bool) -> None:
        for queue in list(self.waiters.values()):
            self._serve_one(queue, is_patient)

    def _serve_one(self, queue: deque[Waiter], is_patient: bool) -> None:
        for waiter in queue:
            if waiter.has_ended:
                continue
            memory = self._core.memory
            memory.is_patient = is_patient
            try:
                waiter.array = waiter.context.run(waiter.make)
            except OutOfDeviceMemory:
                return
            except Exception as error:
                waiter.error = error.with_traceback(None)
            finally:
                memory.is_patient = False
            waiter.end()

    def _watch(self) -> None:
        """Have :meth:`_serve` run again when an op ends; tell a circle if there is one."""
        core = self._core
        pending = self._unfinished()
        if pending:
            for op in pending:
                if op.ticket not in self._watched:
                    self._watched.add(op.ticket)
                    core.when_ended(op.ticket, partial(self._op_ended, op.ticket))
            return
        if not self._has_trimmed:
            self._has_trimmed = True
            self._serve_all(is_patient=False)
            if not self.all_waiters():
                return
        if core.space.is_shared:  # what others have freed may be some way from its end
            self._look_again()
            return
        if core.space.is_releasing or not self._is_circle():
            return
        self._num_turns += 1
        if self._num_turns < _NUM_PATIENT_TURNS:
            self._soon()
            return
        newest = max(self.all_waiters(), key=lambda waiter: waiter.called_s)
        newest.error = describe_shortage(
            core, newest.nbytes, newest.resource, None, _HOPELESS, has_waited=True
        )
        newest.end()

    def _look_again(self) -> None:
        if self._stop_looking is None:
            self._stop_looking = self._core.shell.call_later(_LOOK_S, self._looked)

    def _looked(self) -> None:
        self._stop_looking = None
        if self.waiters:
            self._soon()

    def _op_ended(self, ticket: Any) -> None:
        self._watched.discard(ticket)
        if self.waiters:
            self._soon()

    def _unfinished(self) -> list[Op[Any]]:
        """What may bring memory back: of each stream its oldest free, else its newest op.

        Those of other devices here for the same GPU as well, so that it shows when such an op
        ends, and not at some later look (R15).

        Other work counts as well: who waits for it may free something then, and a fault of it
        is to end the wait (rule R2).
        """
        found: list[Op[Any]] = []
        for core in self._core.poller.peers():
            if core.space is not self._core.space:
                continue
            found += core.pending_ops()
            for line in core.lines:
                ops: list[Op[Any]] = [each.op for each in line.inflight if each.op is not None]
                if ops:
                    found.append(next((op for op in ops if op.kind == "free"), ops[-1]))
        return found

    def _is_circle(self) -> bool:
        """Whether only tasks that wait here could ever free anything."""
        held = [known() for known, *_ in self._core.memory.live.values()]
        # One that is gone left its free to the loop: that comes first.
        allocations = [memory for memory in held if memory is not None]
        if len(allocations) < len(held):
            return False
        del held
        return are_held_only_by(allocations, {waiter.task for waiter in self.all_waiters()})
