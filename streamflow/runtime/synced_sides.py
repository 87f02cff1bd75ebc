"""The two memories of a SyncedArray: who owns them, who uses them, and what they lend."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.errors import RaceDetected
from streamflow.memory import page_locked
from streamflow.memory.pinned import SMALL_NBYTES
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.host_memory import check_same, host_target
from streamflow.runtime.op import Op, next_seq
from streamflow.runtime.parked import no_calls
from streamflow.scheduler.machine import FINAL
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.runtime.core import Core
    from streamflow.runtime.submit import Submit

__all__ = ["DeviceSide", "HostSide", "LentMemory", "Then", "is_over", "revoke"]

Array = np.ndarray[Any, Any]
Then = Callable[[BaseException | None], None]


class HostSide:
    """Host memory, pinned where the budget allows.

    Attributes
    ----------
    array : ndarray or None
        All of it, in the pair's shape; None until it is first needed.
    is_owned, is_pinned : bool
    """

    def __init__(
        self,
        core: Core,
        shape: tuple[int, ...],
        size: int,
        dtype: np.dtype[Any],
        origin: tuple[CodeType, int],
    ) -> None:
        self._core = core
        self._shape = shape
        self._dtype = dtype
        self._nbytes = size * dtype.itemsize
        self._origin = origin
        # Transfers in flight, each with the memory it uses and whether it writes there.
        self._uses: dict[Op[Any], tuple[Array, bool]] = {}
        self._noted: int | None = None
        self._generation = 0  # what was asked for in an older one comes too late
        self.array: Array | None = None
        self.is_owned = True
        self.is_pinned = False

    # -- getting memory --------------------------------------------------------------------

    def acquire(self, then: Then) -> None:
        """Have memory; ``then(error)`` is called at once where nothing must be pinned for it."""
        if self.array is not None:
            then(None)
            return
        core, nbytes = self._core, self._nbytes
        block = core.pinned.try_acquire(nbytes) if nbytes else None
        if block is not None:
            self._take(block)
        elif nbytes and core.pinned.reserve(nbytes):
            generation = self._generation

            def pinned(result: PinnedBlock, error: BaseException | None) -> None:
                is_wanted = generation == self._generation and not core.is_closed
                if error is not None:
                    error = core.lose(error, f"pinning {nbytes} bytes")
                    if core.lost is None:  # what the driver lacks is page-locked memory
                        error = None
                        if is_wanted:
                            self._take_pageable()
                elif is_wanted:
                    self._take(result)
                else:
                    result.release()
                then(error)

            self._on_thread(lambda: core.pinned.acquire_reserved_blocking(nbytes), pinned)
            return
        else:
            self._take_pageable()
        then(None)

    def _take_pageable(self) -> None:
        self.array = np.empty(self._shape, self._dtype)

    def _take(self, block: PinnedBlock) -> None:
        # As a result is: a view kept too long keeps the block from going to somebody else.
        self.array = block.as_result(self._shape, self._dtype, self._origin)
        self.is_pinned = True

    def zero(self, then: Then) -> None:
        """Write zeros; on a worker thread where that takes long (rule R1)."""
        array = self.array
        assert array is not None

        def zero() -> None:
            array[...] = np.zeros((), array.dtype)

        if array.nbytes <= SMALL_NBYTES:
            zero()
            then(None)
        else:
            self._on_thread(zero, lambda _, error: then(error))

    def _on_thread(
        self, task: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._core.background.submit(next_seq(), task, done)
        self._core.schedule_turn()

    def adopt(self, array: Array) -> None:
        """Use ``array`` from now on; what was ours goes once nothing uses it any more."""
        self.forget()
        self.array, self.is_owned = array, False
        self.is_pinned = bool(array.nbytes) and page_locked.find(array) is not None

    def check_usable(self) -> None:
        """Raise if an array that was adopted lies in a lease that was released since."""
        if self.array is not None and not self.is_owned and self.is_pinned:
            page_locked.find(self.array)

    def forget(self) -> None:
        """Let go of the memory; transfers in flight hold on to it themselves (rule R6)."""
        self.array, self.is_owned, self.is_pinned = None, True, False
        self._noted = None
        self._generation += 1

    def check_adoptable(self, data: Any) -> Array:
        """``data`` as an ndarray in the pair's shape, if it can be that without a copy."""
        array = host_target(data, "the array to adopt")
        if array.size != self._nbytes // self._dtype.itemsize:
            raise ValueError(f"adopting needs an array of shape {self._shape}, found {array.shape}")
        check_same(self._shape, self._dtype, self._shape, array.dtype)
        if array.shape != self._shape:
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"adopting shape {array.shape} as {self._shape} needs C-contiguous memory"
                )
            array = array.reshape(self._shape)
        if array.nbytes:
            page_locked.find(array)  # a lease that was released is refused before anything changes
        for op, (memory, writes) in self._uses.items():
            if writes and not is_over(op.ticket) and np.may_share_memory(array, memory):
                raise RuntimeError(f"{op.name} still writes that array: await it first")
        return array

    # -- transfers -------------------------------------------------------------------------

    def used_by(self, op: Op[Any], *, writes: bool) -> None:
        """A transfer in flight reads or writes the memory that there is now."""
        assert self.array is not None
        self._uses[op] = self.array, writes

        def over() -> None:
            del self._uses[op]

        self._core.when_all_ended([op.ticket], over)  # a refused one may be running still (R6)

    def in_the_way(self, *, is_write: bool) -> Ticket | None:
        """A transfer that must end before the memory is read, or written, on the host."""
        for op, (memory, writes) in self._uses.items():
            if (writes or is_write) and _overlap(memory, self.array) and not is_over(op.ticket):
                return op.ticket
        return None

    # -- views -----------------------------------------------------------------------------

    def lend(self, *, is_write: bool) -> Array:
        """A view for one block."""
        assert self.array is not None
        view = self.array.view()
        view.flags.writeable = is_write
        if is_write:
            self._noted = None
        return view

    def note(self) -> None:
        """Nobody may change the memory from here on: where races are looked for, remember it."""
        checker = self._core.backend.checker
        if checker is not None and self.array is not None:
            self._noted = checker.fingerprint(self.array)

    def check_unchanged(self, who: object) -> None:
        """Raise if the memory has changed since :meth:`note`; tells once."""
        checker = self._core.backend.checker
        if checker is None or self._noted is None or self.array is None:
            return
        before, now = self._noted, checker.fingerprint(self.array)
        if now != before:
            self._noted = now
            raise RaceDetected(
                f"the host memory of {who!r} was changed outside of `async with m.host(write=True)`"
                ": a view of it was kept, or an adopted array was used directly"
            )


class LentMemory(Allocation):
    """A device allocation as one block may use it: until the block is left, and never to free."""

    __slots__ = ()

    gone = "was lent by SyncedArray.device(), whose block has been left: enter it again"
    is_lent = True

    def __init__(self, owner: Allocation) -> None:
        super().__init__(owner.core, owner.address, owner.nbytes, owner.op, owner.home)
        self.root = owner.root

    def __del__(self) -> None:
        pass  # the owner's affair


class DeviceSide:
    """Device memory, ordered by its hazards like any other.

    Attributes
    ----------
    array : DeviceArray or None
        None until it is first needed.
    is_owned : bool
    """

    def __init__(
        self,
        dev: Submit,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        origin: tuple[CodeType, int],
    ) -> None:
        self._dev = dev
        self._core = dev._core
        self._shape = shape
        self._dtype = dtype
        self._origin = origin
        self._last: Ticket | None = None
        self.array: DeviceArray | None = None
        self.is_owned = True

    def acquire(self, context: Context) -> DeviceArray:
        """Have memory.

        Raises
        ------
        OutOfDeviceMemory
            There is none.
        Closed
            The program has freed an array that was adopted.
        """
        if self.array is None:
            array = context.run(self._dev.empty, self._shape, self._dtype)
            array.allocation._origin = self._origin
            self.array = array
            self.note()
        self.array.check_usable()
        return self.array

    def zero(self, context: Context) -> None:
        """Fill with zeros."""
        context.run(self._dev._transfers.fill, self.acquire(context), 0, None)
        self.note()

    def adopt(self, array: DeviceArray) -> None:
        """Use ``array`` from now on; what was ours is freed behind its uses (rule R5)."""
        self.forget()
        self.array, self.is_owned = array, False
        self.note()

    def forget(self) -> None:
        """Let go of the memory."""
        self.array, self.is_owned, self._last = None, True, None

    def check_adoptable(self, array: DeviceArray) -> DeviceArray:
        """``array`` in the pair's shape."""
        self._dev._transfers.check_array(array)  # of another device: ValueError
        if array._memory.is_lent:
            raise ValueError(f"{array!r} is lent by a SyncedArray: it cannot be adopted")
        check_same(self._shape, self._dtype, self._shape, array.dtype)
        return array.reshape(self._shape)  # ours to note things on

    def note(self) -> None:
        """Whatever wrote last was meant to."""
        self._last = self._last_write()

    @property
    def has_all_of_its_hazards(self) -> bool:
        """Whether a write that they tell of is one of this memory: not so of rows of an array."""
        return self.array is not None and self.array.is_whole_region

    def is_touched(self) -> bool:
        """Whether something has written since :meth:`note`."""
        return self._last_write() is not self._last

    def failure(self, *, looks: bool = False) -> BaseException | None:
        """What the last write failed with, as far as that is known, or can be seen now."""
        if self.array is None:
            return None
        last = self._last_write()
        if looks and last is not None and last.position and not last.is_passed:
            self._core.reap(last.timeline)
        return next((ticket.failure for ticket in self.array._region.failed_writes()), None)

    def overwrite(self, context: Context) -> None:
        """What was written before matters to nobody: not if it has failed, either (rule R9)."""
        array = self.acquire(context)
        if all(ticket.failure is None and ticket.is_passed for ticket in self._last_writes()):
            return
        op: Op[None] = context.run(Op, self._core, "overwrite", None)
        self._core.parking.submit(
            op,
            no_calls,
            line=self._core.picker(op),
            writes=(array._region,),
            is_overwrite=array.is_whole_region,
        )
        self.note()

    def lend(self) -> DeviceArray:
        """A view for one block; :meth:`revoke` ends it."""
        array = self.array
        assert array is not None
        memory = LentMemory(array._memory)
        return DeviceArray(
            memory, array._region, array.address, array.shape, array.dtype, array.size
        )

    def _last_write(self) -> Ticket | None:
        if self.array is None:
            return None
        return max(self._last_writes(), key=lambda ticket: ticket.seq)

    def _last_writes(self) -> list[Ticket]:
        assert self.array is not None
        region = self.array._region
        return [region.last_write, *(other.last_write for other in region.overlapping)]


def revoke(array: DeviceArray) -> None:
    """Refuse every use of what :meth:`DeviceSide.lend` gave out, and of its views."""
    memory = array._memory
    assert isinstance(memory, LentMemory)
    memory.is_freed = True


def _overlap(one: Array, other: Array | None) -> bool:
    return other is one or (other is not None and np.may_share_memory(one, other))


def is_over(ticket: Ticket) -> bool:
    op: Op[Any] | None = ticket.op
    is_running = ticket.position > 0 and not ticket.is_passed
    return not is_running and (op is None or op._state in FINAL)
