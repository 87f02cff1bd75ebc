"""``dev.mapped``: arrays in pinned memory, which kernels read and write over the link."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from anyio.lowlevel import checkpoint

from streamflow.backends.origin import user_instruction
from streamflow.errors import Closed
from streamflow.memory.blocks import Piece
from streamflow.memory.pinned import class_nbytes
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place, Space
from streamflow.runtime.array import Allocation, DeviceArray, checked_dtype, checked_shape
from streamflow.runtime.op import Op
from streamflow.runtime.parked import Parked, no_calls
from streamflow.runtime.recording import refuse
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["MappedArray", "make_mapped"]

Array = np.ndarray[Any, Any]


class MappedArray(DeviceArray):
    """A device array whose memory is the host's: pinned, and seen by kernels as it is.

    Made by :meth:`Device.mapped`; stands wherever a :class:`DeviceArray` does. Its views,
    such as ``m[2:4]``, are plain device arrays over the same memory. The memory returns to
    the pinned pool once the array, its views and ``host`` are dropped and no op uses it.

    Attributes
    ----------
    host : ndarray
        The same memory on the host, in C order. Kernels see what is there when they run, so it
        is written only while no op uses the array, and read only once no op writes it: after
        ``await m.idle()``. Read-only once the memory was freed, when it must not be used.
    """

    __slots__ = ("host",)

    host: Array

    def idle(self) -> Op[None]:
        """Ends when no op that was submitted so far uses the memory any more.

        Ordering
        --------
        After every read and write of it, also of its views and by parked ops, however these
        end. A later op does not wait for it: ``after=`` makes one.

        Returns
        -------
        Op
            Await it before ``host`` is written.

        Raises
        ------
        Closed
            The array was freed, or the device is closed.
        """
        core = self._core
        core.check_open()
        self.check_usable()
        op: Op[None] = Op(core, "idle", None)

        def start(parked: Parked) -> None:
            pending: list[Ticket] = []
            self._region.before_write(pending)
            parked.need = "the ops that use the array"
            core.when_all_ended(pending, partial(_end, core, op, parked))

        core.parking.submit(op, no_calls, line=None, start=start)
        return op

    def __repr__(self) -> str:
        return f"<MappedArray {self.shape} {self.dtype} on device {self._core.backend.index}>"


def _end(core: Core, op: Op[None], parked: Parked) -> None:
    if not parked.has_left:
        core.start(op)
        core.parking.host_done(parked)


async def make_mapped(core: Core, shape: Any, dtype: Any, timeout_s: float | None) -> MappedArray:
    """``Device.mapped``."""
    core.check_open()
    refuse(core, "mapped waits for memory; what is mapped already can be used")
    checked = checked_dtype(dtype)
    dims, size = checked_shape(shape, checked.itemsize)
    nbytes = size * checked.itemsize
    if timeout_s is not None and (isinstance(timeout_s, bool) or not timeout_s >= 0):
        raise ValueError(f"timeout= takes seconds from 0 on, found {timeout_s!r}")
    if class_nbytes(nbytes) > core.pinned.budget_nbytes:
        raise ValueError(
            f"a mapped array of {nbytes} bytes is more than the whole budget of "
            f"{core.pinned.budget_nbytes} pinned bytes: raise pinned_budget_nbytes"
        )
    where = user_instruction()
    await checkpoint()
    core.check_open()
    if not nbytes:
        return _over(core, dims, checked, None, 0)
    block = core.pinned.try_acquire(nbytes)
    if block is None:
        block = await core.leases.wait(nbytes, timeout_s)
    if core.is_closing:  # since we waited
        block.release()
        raise Closed(f"device {core.backend.index} was closed")
    try:
        address = core.backend.map_pinned(block.address, nbytes)
    except Exception as error:
        block.release()
        raise core.lose(error, f"mapping {nbytes} bytes") from error
    block.lease(where)
    return _over(core, dims, checked, block, address)


def _over(
    core: Core,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    block: PinnedBlock | None,
    address: int,
) -> MappedArray:
    op: Op[None] = Op(core, "mapped", None)
    core.parking.submit(op, no_calls, line=None, start=partial(_end, core, op))
    op.ticket.timeline = core.free_lane  # it has no position: this is where closing frees it
    size = int(np.prod(shape, dtype=np.int64))
    nbytes = size * dtype.itemsize
    memory = Allocation(core, address, nbytes, op, core.free_lane)
    host: Array = np.empty(shape, dtype)
    if block is not None:
        region = block.region
        assert region is not None
        # One for both sides: copies from and to ``host`` are ordered with kernels as well.
        region.stop = nbytes
        memory.root = region
        view = _HostView(memory, block.array((nbytes,), np.dtype(np.uint8)))
        host = np.asarray(view).view(dtype).reshape(shape)
        resource = cast(DeviceMemoryResource, _Loan(core, block, weakref.ref(host)))
        piece = Piece(resource, address, nbytes, ALIGNMENT)
        core.memory.live[address] = (weakref.ref(memory), nbytes, op, piece)
    array = MappedArray(memory, memory.root, address, shape, dtype, size)
    array.host = host
    return array


class _HostView:
    """The base object of ``host``: while it lives, nobody but the program frees the memory."""

    __slots__ = ("__array_interface__", "_array", "_memory")

    def __init__(self, memory: Allocation, array: Array) -> None:
        self._memory = memory
        self._array = array
        self.__array_interface__ = array.__array_interface__

    @property
    def is_revoked(self) -> bool:
        """Whether the memory was freed, and may be another's."""
        return self._memory.is_freed


class _Loan:
    """What a mapped array's memory goes back to: as a resource, to who frees it."""

    __slots__ = ("_block", "_core", "_host", "_is_given")

    def __init__(self, core: Core, block: PinnedBlock, host: weakref.ref[Array]) -> None:
        self._core = core
        self._block = block
        self._host = host
        self._is_given = False

    def give(self, piece: Piece, place: Place) -> None:
        """Release the block once the free, which comes after every use, has ended (rule R6)."""
        core, block, host = self._core, self._block, self._host()
        self._is_given = True
        if host is not None:
            host.flags.writeable = False
        if block._region is not None and block._region.is_left_behind():
            return
        core.backend.unmap_pinned(piece.address)
        assert place.ticket is not None
        place.ticket.op.rare().on_retired = partial(core.leases.release, block)

    def give_later(self, piece: Piece, place: Place, space: Space) -> None:
        """:meth:`give` has failed: the memory stays where it is."""

    def __del__(self) -> None:
        core = self._core
        # Of an event loop that has ended, frees go nowhere; but its work has ended as well.
        is_at_rest = core.is_closed and core.lost is None and core.left_behind is None
        if is_at_rest and not self._is_given:
            self._block.release()
