"""``dev.pin``: page-locking the program's own memory, so that copies use it as it is."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Generator
from functools import partial
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.errors import Closed
from streamflow.memory.page_locked import Usable, find, owner_over
from streamflow.memory.registered import (
    Overlap,
    Registration,
    Share,
    hold_blocking,
    release_blocking,
)
from streamflow.runtime.array import DeviceArray, checked_dtype
from streamflow.runtime.host_memory import shared_memory
from streamflow.runtime.op import SCOPE, Op
from streamflow.runtime.parked import Parked, no_calls
from streamflow.scheduler.guards import guard
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Pin", "Pins"]

Array = np.ndarray[Any, Any]


class _Hold:
    """What one pin has of the memory; it outlives a :class:`Pin` that was dropped."""

    __slots__ = ("array", "is_left", "nbytes", "op", "registration", "share", "start", "usable")

    op: Op[None]

    def __init__(self, array: Array) -> None:
        self.array: Array | None = array  # until it is unpinned (rule R6)
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
        self.start = low
        self.nbytes = high - low
        self.usable: Usable | None = None  # whose it is already, where it is page-locked
        self.registration: Registration | None = None  # set by the worker
        self.share: Share | None = None
        self.is_left = False  # it is being unpinned, or has been

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def region(self) -> Region | None:
        """The hazards of its bytes."""
        if self.registration is not None and self.share is not None:
            offset = self.start - self.registration.start
            return self.share.region(offset, offset + self.nbytes)
        return None if self.usable is None else self.usable.region


class Pin:
    """The program's own memory, page-locked: made by :meth:`Device.pin`.

    ``await pin`` waits until it is page-locked, and returns the pin; so does ``async with``,
    which unpins at its end. A pin that is dropped is unpinned as well, with a ResourceWarning.
    Copies from and to the array, or any part of it in C order, go without staging from then on.
    All are ordered among each other as ops on a device array are (rule R3).
    """

    __slots__ = ("__weakref__", "_hold", "_pins")

    def __init__(self, pins: Pins, hold: _Hold) -> None:
        self._pins = pins
        self._hold = hold

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last of the array, gaps between them included."""
        return self._hold.nbytes

    @property
    def is_pinned(self) -> bool:
        """Whether the array is page-locked, and will be until this pin is undone."""
        hold = self._hold
        return hold.op.done() and hold.op._error is None and not hold.is_left

    def __await__(self) -> Generator[Any, Any, Pin]:
        hold = self._hold
        try:
            yield from hold.op.__await__()
        except GeneratorExit:  # perhaps of a finaliser: the pin has one of its own (rule R12)
            raise
        except BaseException:
            core, rare = self._pins._core, hold.op._rare
            is_awaited = rare is not None and len(rare.wakers) > 0  # by another task
            if hold.op._error is None and not (hold.is_left or is_awaited) and core.is_here():
                self._pins.unpin(hold)  # cancelled: nobody has the pin
            raise
        return self

    async def __aenter__(self) -> Pin:
        return await self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        core = self._pins._core
        if not self._hold.is_left and core.is_here() and not core.is_closing and core.lost is None:
            await self.unpin()

    def unpin(self) -> Op[None]:
        """Let the memory be pageable again, unless other pins have it.

        Ordering
        --------
        After every op that uses the memory, parked ones as well (rule R6); the array is kept
        until then. Ops submitted later stage their copies, unless another pin has the memory. On a
        worker thread: unpinning waits for running kernels.

        Returns
        -------
        Op
            Await it before the memory is pinned in other parts.

        Raises
        ------
        Closed
            It was called already, or the device was closed, which unpins as well.
        DeviceLost
            The device has failed: the memory stays page-locked, and kept.
        """
        core = self._pins._core
        if self._hold.is_left:
            core.check_here()
            raise Closed(f"{self!r} was unpinned already")
        core.check_open()
        return self._pins.unpin(self._hold)

    def __repr__(self) -> str:
        hold = self._hold
        state = "unpinned" if hold.is_left else hold.op.state.value
        return f"<Pin of {hold.nbytes} bytes at {hold.start:#x} {state}>"

    def __del__(self) -> None:
        hold, pins = self._hold, self._pins
        # Pinned or about to be; where others had page-locked it, there is nothing to undo.
        is_undone = hold.is_left or hold.op._error is not None or hold.usable is not None
        core = pins._core
        if is_undone or not hold.nbytes or pins.is_off or core.is_closed or core.lost is not None:
            return
        hold.is_left = True
        pins.post(hold)
        warnings.warn(
            f"{self!r} was dropped and never unpinned, made at {hold.op.where}",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )


class Pins:
    """The pins of one device.

    Attributes
    ----------
    dropped : deque
        Of pins that were dropped: the loop undoes them (rule R12).
    is_off : bool
        The process ends: finalisers do nothing.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.dropped: deque[_Hold] = deque()
        self.is_off = False
        self._holds: dict[_Hold, None] = {}  # what has to be undone
        guard(self)

    def pin(self, source: Any) -> Pin:
        """Have a worker page-lock the memory of ``source``, unless it is already."""
        core = self._core
        core.check_open()
        hold = _Hold(_memory_of(source))
        if hold.nbytes:
            owner = owner_over(hold.start, hold.stop)
            if owner is not None and not isinstance(owner, Registration):
                assert hold.array is not None
                hold.usable = find(hold.array)
        op: Op[None] = Op(core, "pin", None)
        hold.op = op
        pin = Pin(self, hold)
        core.parking.submit(op, no_calls, line=None, start=partial(self._start, hold))
        return pin

    def _start(self, hold: _Hold, parked: Parked) -> None:
        core, op = self._core, hold.op
        core.start(op)
        if not hold.nbytes or hold.usable is not None:
            core.parking.host_done(parked)
            return
        self._holds[hold] = None
        where = op.where

        def pin_blocking() -> None:
            assert hold.array is not None
            hold.registration = hold_blocking(
                hold.array,
                hold.start,
                hold.stop,
                _is_read_only(hold.array),
                where,
                core.backend,
            )

        def pinned(_: None, error: BaseException | None) -> None:
            if error is not None:
                self._forget(hold)
                failure = (
                    error if isinstance(error, Overlap) else self._lose(error, hold, "pinning")
                )
                core.parking.drop(parked, failure.with_traceback(None))
                return
            if hold.registration is None:  # another library's: it is its to unpin
                self._holds.pop(hold, None)
            else:
                hold.share = hold.registration.share(core.shell.key, core.shell.current)
                hold.share.num_open += 1
            if not parked.has_left:
                core.parking.host_done(parked)

        core.background.submit(op.ticket.seq, pin_blocking, pinned)
        core.schedule_turn()

    def unpin(self, hold: _Hold) -> Op[None]:
        """Undo a pin, once it is done and nothing uses the memory any more."""
        hold.is_left = True
        core = self._core
        outer = SCOPE.set(None)  # a scope that is cancelled drops what is parked
        op: Op[None] = Op(core, "unpin", None)
        SCOPE.reset(outer)
        core.parking.submit(op, no_calls, line=None, start=partial(self._start_unpin, hold, op))
        return op

    def _start_unpin(self, hold: _Hold, op: Op[None], parked: Parked) -> None:
        parked.need = f"the end of {hold.op.name}"
        self._core.when_all_ended([hold.op.ticket], partial(self._leave, hold, op, parked))

    def _leave(self, hold: _Hold, op: Op[None], parked: Parked) -> None:
        if parked.has_left:
            return
        pending: list[Ticket] = []
        region, share = hold.region(), hold.share
        if share is not None:
            share.num_open -= 1
            if not share.num_open:  # from now on copies of this loop are staged
                region = share.root
        if region is not None:
            region.before_write(pending)
        parked.need = "the ops that use the memory"
        self._core.when_all_ended(pending, partial(self._unpin, hold, op, parked))

    def _unpin(self, hold: _Hold, op: Op[None], parked: Parked) -> None:
        core, registration = self._core, hold.registration
        if parked.has_left:
            return
        if core.lost is not None:  # the ops that it waited for were given up: leak (rule R6)
            core.parking.drop(parked, core.lost)
            return
        if hold.share is not None and hold.share.root.is_left_behind():
            self._holds.pop(hold, None)
            why = f"{hold.nbytes} bytes at {hold.start:#x} stay page-locked: a device that was "
            core.parking.drop(parked, Closed(f"{why}closed with work that did not end uses them"))
            return
        core.start(op)
        if registration is None:
            self._forget(hold)
            core.parking.host_done(parked)
            return

        def unpinned(_: None, error: BaseException | None) -> None:
            if error is None:
                self._forget(hold)
                if not parked.has_left:
                    core.parking.host_done(parked)
            else:
                self._holds.pop(hold, None)  # it was tried; the array stays kept with the memory
                failure = self._lose(error, hold, "unpinning")
                core.parking.drop(parked, failure.with_traceback(None))

        task = partial(release_blocking, registration, core.backend)
        core.background.submit(op.ticket.seq, task, unpinned)
        core.schedule_turn()

    def _lose(self, error: BaseException, hold: _Hold, doing: str) -> BaseException:
        return self._core.lose(error, f"{doing} {hold.nbytes} bytes at {hold.start:#x}")

    def _forget(self, hold: _Hold) -> None:
        self._holds.pop(hold, None)
        hold.array = hold.registration = hold.share = None

    # -- what is left ------------------------------------------------------------------------

    def post(self, hold: _Hold) -> None:
        """Leave an unpin to the loop. Any thread; called by finalisers (R12)."""
        self.dropped.append(hold)
        self._core.needs_check = True

    def take_dropped(self) -> None:
        """Undo what finalisers left. Loop thread only."""
        while self.dropped and self._core.lost is None:
            hold = self.dropped.popleft()
            op = self.unpin(hold)
            op._of_nobody(hold.op._origin)

    def where(self) -> Counter[str]:
        """The lines that made the pins which nobody has undone."""
        return Counter(hold.op.where for hold in self._holds if not hold.is_left)

    def warn(self, where: Counter[str], *, stacklevel: int) -> None:
        """One ``ResourceWarning`` if there were any when the device was left."""
        if where:
            lines = ", ".join(f"{line} ({n})" if n > 1 else line for line, n in where.items())
            warnings.warn(
                f"device {self._core.backend.index} was closed with memory still pinned, at "
                f"{lines}: unpin before leaving it",
                ResourceWarning,
                stacklevel=stacklevel + 1,
            )

    def unpin_all(self) -> None:
        """Undo every pin: other devices of the loop may be using the memory (rule R6)."""
        for hold in [hold for hold in self._holds if not hold.is_left]:
            self.unpin(hold)

    def lines(self) -> list[Timeline]:
        """Streams, of any device of the loop, with work that uses the memory."""
        pending: list[Ticket] = []
        for hold in self._holds:
            if hold.share is not None:
                hold.share.root.before_write(pending)
        return [ticket.timeline for ticket in pending if ticket.position]

    def close_blocking(self) -> None:
        """Undo what is left of a loop that ended: nothing uses the memory any more. May block."""
        errors = []
        for hold in list(self._holds):
            hold.is_left = True
            registration = hold.registration
            if registration is not None:
                try:
                    release_blocking(registration, self._core.backend)
                except Exception as error:
                    errors.append(error)
            self._forget(hold)
        if errors:
            raise errors[0]

    def on_fork(self) -> None:
        """Nothing to do: to a fork the device is closed."""

    def on_exit(self) -> list[Thread]:
        """Undo nothing any more: the memory goes with the process."""
        self.is_off = True
        return []


def _memory_of(source: Any) -> Array:
    """An ndarray over the memory of ``source``, which it doesn't copy.

    Raises
    ------
    TypeError
        There is none that NumPy sees, or its items are not plain bytes.
    """
    if isinstance(source, DeviceArray):
        raise TypeError("pin takes memory of the host, found an array on a device")
    array = source if isinstance(source, np.ndarray) else shared_memory(source)
    if array is None:
        raise TypeError(
            "pin takes an ndarray or another object whose memory NumPy sees without a copy, "
            f"found {type(source).__name__}"
        )
    checked_dtype(array.dtype)
    return array


def _is_read_only(array: Array) -> bool:
    """Whether the host may have the memory mapped for reading only, as a file's.

    What NumPy allocated is not, whatever its flags say.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.flags.owndata:
            return False
        base = base.base
    try:
        return memoryview(base).readonly
    except TypeError:
        return True
