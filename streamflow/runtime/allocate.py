"""Device memory for arrays: stream-ordered allocation, fills and frees (rules R5, R6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import numpy as np

from streamflow.errors import OutOfDeviceMemory, StreamflowError
from streamflow.memory.blocks import Piece
from streamflow.memory.registry import resource_in_use, resource_set_for
from streamflow.memory.resource import DeviceMemoryResource, checked_resource
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.memory_queue import MemoryQueue
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.recording import recorder_of
from streamflow.runtime.shortage import describe_shortage
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Memory"]

_T = TypeVar("_T")
_POOL_THRESHOLD_NBYTES = 2**63 - 1
_SUBMITTED = OpState.SUBMITTED
_NOWHERE = Timeline(0)  # has seen nothing: waits needed here are the maximal tickets


class Memory:
    """The owned pool of one device, and the arrays of the device wherever they lie.

    Attributes
    ----------
    pool : object
        The backend's handle; None where the device has no stream-ordered pools.
    default : DeviceMemoryResource or None
        Where arrays come from unless they are told; None: from the owned pool.
    live : dict
        By address: the allocation, its size, its op, and its piece where a resource gave it.
        Weak: its region knows the uses that failed, their errors the frames they passed, and
        those may hold its arrays (C23).
    queue : MemoryQueue
        Who waits for memory.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        # The default threshold of 0 gives memory back at every synchronisation.
        self.pool: Any = None
        self.default: DeviceMemoryResource | None = None
        self._instead: DeviceMemoryResource | None = None
        if core.backend.memory_support().has_pools:
            self.pool = core.backend.create_pool(release_threshold_nbytes=_POOL_THRESHOLD_NBYTES)
        else:
            from streamflow.memory.default import resource_without_pools  # a rare device (R13)

            self._instead = resource_without_pools(core.backend.index)
        self.must_choose = self._instead is not None
        self.live: dict[int, tuple[ref[Allocation], int, Op[None], Piece | None]] = {}
        self.queue = MemoryQueue(core)
        self.is_patient = False  # asked by the queue, which asks again: no trimming, no report
        self._is_open = True

    @property
    def live_nbytes(self) -> int:
        """Bytes that arrays hold."""
        return sum(nbytes for _, nbytes, _, _ in self.live.values())

    def set_default(self, resource: DeviceMemoryResource | None) -> None:
        """Have arrays come from ``resource`` unless they are told otherwise."""
        self.default = resource
        self.must_choose = resource is not None or self._instead is not None

    def choose(self, memory: DeviceMemoryResource | None) -> DeviceMemoryResource | None:
        """Where an array comes from: ``memory``, else what is in use or set; None: the own pool.

        Raises
        ------
        TypeError
            Not a resource.
        ValueError
            One of another device.
        """
        index = self._core.backend.index
        if memory is not None:
            checked_resource(memory, "memory=")
            if memory.device not in (None, index):
                raise ValueError(f"{memory!r} was made for device {memory.device}, not {index}")
            return memory
        used = resource_in_use(index)
        return used or self.default or resource_set_for(index) or self._instead

    def array(
        self,
        shape: tuple[int, ...],
        size: int,
        dtype: np.dtype[Any],
        line: Timeline,
        frame: FrameType | None = None,
        resource: DeviceMemoryResource | None = None,
    ) -> DeviceArray:
        """An uninitialised array, allocated on ``line`` now; never parks, never waits.

        Frees and allocations have no place in the window: the driver queues any number.

        Raises
        ------
        OutOfDeviceMemory
            After reaping, freeing what was dropped and trimming.
        """
        core, nbytes = self._core, size * dtype.itemsize
        op: Op[None] = Op(core, "empty", None, frame)
        piece = None
        if resource is not None and nbytes:
            piece = self._take(resource, op, nbytes, line)
            address = piece.address
        elif not core.is_fast:
            address = self._allocate_slowly(op, nbytes, line)
        else:
            stream = line.stream
            events = core.events
            try:
                event = events.pop() if events else core.take_event()
                address = self._allocate(nbytes, stream) if nbytes else 0
            except BaseException:
                op._disown()
                raise
            try:
                stream.record(event)
            except Exception as error:
                core.parking.unrecorded(op, error)
                raise core.lost from error  # type: ignore[misc]
            line.advance(op.ticket, 2, event)
            core.num_submitted += 1
            op._state = _SUBMITTED
            if not len(line.inflight) & 63:
                core.reap(line)
        memory = Allocation(core, address, nbytes, op, line)
        if address:
            self.live[address] = (ref(memory), nbytes, op, piece)
        array = DeviceArray(memory, memory.root, address, shape, dtype, size)
        if core.recording is not None and (recorder := recorder_of(core)) is not None:
            recorder.record_allocation(array)
        return array

    def _allocate_slowly(self, op: Op[None], nbytes: int, line: Timeline) -> int:
        with self._told(op):
            address = self._allocate(nbytes, line.stream) if nbytes else 0
        self._go(op, lambda _: 1, line, (), nbytes)
        return address

    @contextmanager
    def _told(self, op: Op[None]) -> Iterator[None]:
        """While ``op`` asks for memory: who watches knows, and a refusal leaves no trace of it."""
        checker = self._core.backend.checker
        if checker is not None:
            checker.attribute(op._told)
        try:
            yield
        except BaseException:
            op._disown()
            raise
        finally:
            if checker is not None:
                checker.attribute(None)

    def _go(
        self,
        op: Op[None],
        run: Callable[[Any], int],
        line: Timeline,
        behind: tuple[Ticket, ...],
        nbytes: int,
    ) -> None:
        core = self._core
        if core.instrument is not None:
            core.tracer.allocated(op, behind, nbytes)
        core.parking.go(op, run, line, ())
        if op._error is not None:
            core.observed(op._error)
            raise op._error.with_traceback(None)

    def _take(
        self, resource: DeviceMemoryResource, op: Op[None], nbytes: int, line: Timeline
    ) -> Piece:
        """A piece of a resource, at a position of its own on ``line``."""
        core = self._core
        place = Place(core.backend, line, op.ticket)
        with self._told(op):
            piece = self._or_make_room(
                lambda: resource.take(nbytes, ALIGNMENT, place), nbytes, resource
            )
        if place.waited:  # for a block that another stream has freed
            line.join(place.waited)
        self._go(op, lambda _: 1 + place.num_calls, line, tuple(place.waited), nbytes)
        return piece

    def _allocate(self, nbytes: int, stream: Any) -> int:
        backend, pool = self._core.backend, self.pool
        try:
            return backend.allocate(pool, nbytes, stream)
        except Exception as error:
            refusal = self._core.lose(error, f"allocating {nbytes} bytes")
            try:
                if not isinstance(refusal, OutOfDeviceMemory):
                    raise refusal from error
            finally:
                del refusal  # it may be the error itself, which has this frame (C23)
        return self._or_make_room(lambda: backend.allocate(pool, nbytes, stream), nbytes, None)

    def _or_make_room(
        self, take: Callable[[], _T], nbytes: int, resource: DeviceMemoryResource | None
    ) -> _T:
        """``take()``; where that fails, give back what can be without waiting, and once more."""
        core = self._core
        for is_last in (False, True) if resource is not None else (True,):
            if is_last:
                self._make_room()
            try:
                return take()
            except Exception as error:
                refusal: StreamflowError
                if isinstance(error, StreamflowError) or resource is None:
                    refusal = core.lose(error, f"allocating {nbytes} bytes")
                elif isinstance(error, MemoryError):  # as a resource of the user's says it
                    refusal = OutOfDeviceMemory(str(error))
                else:
                    raise
                try:
                    if not isinstance(refusal, OutOfDeviceMemory):
                        raise refusal from error
                    if is_last and self.is_patient:
                        raise refusal from error
                    if is_last:
                        raise describe_shortage(core, nbytes, resource, error) from error
                finally:
                    del refusal
        raise AssertionError("the last attempt returns or raises")

    def _make_room(self) -> None:
        """Give back what can be given back without waiting."""
        core = self._core
        core.drain_dropped()
        for line in core.lines:
            core.reap(line)
        core.space.reap()
        if core.space.is_shared or not self.is_patient:
            core.space.trim_caches()
        if not self.is_patient:
            core.space.trim_resources()

    def free(
        self,
        address: int,
        home: Timeline,
        root: Region,
        stream: Stream | None = None,
        frame: FrameType | None = None,
    ) -> Op[None]:
        """Queue the free of an allocation behind every use (rule R5)."""
        core = self._core
        known = self.live.pop(address, None)
        piece = None if known is None else known[3]
        op: Op[None] = Op(core, "free", None, frame)
        op._freed_nbytes = root.stop
        if core.space.listeners:
            core.space.freed()
        deps: list[Ticket] = []
        root.before_write(deps)
        line = None
        if stream is None and piece is None and core.is_fast and address:
            for dep in deps:
                if dep.position == 0:
                    break
            else:
                line = self._choose(home, root, deps)
        if line is None:
            self._free_slowly(op, address, piece, home, root, stream)
            return op
        target = line.stream
        num_calls = 2
        events = core.events
        event = events.pop() if events else core.take_event()
        try:
            if line is core.free_lane:
                waits = needed_waits(line, deps)
                for wait in waits:
                    target.wait(wait.event)
                if waits:
                    line.join(waits)
                    num_calls += len(waits)
            core.backend.deallocate(address, target)
        except Exception as error:
            core.parking.refused(op, error, line, event, num_calls)
            return op
        try:
            target.record(event)
        except Exception as error:
            core.parking.unrecorded(op, error)
            return op
        line.advance(op.ticket, num_calls, event)
        core.num_submitted += 1
        op._state = _SUBMITTED
        root.last_write = op.ticket
        if not len(line.inflight) & 63:
            core.reap(line)
        return op

    def _free_slowly(
        self,
        op: Op[None],
        address: int,
        piece: Piece | None,
        home: Timeline,
        root: Region,
        stream: Stream | None,
    ) -> None:
        """A free to a resource, on a stream of the user's, behind parked uses, or while tracing."""
        core = self._core
        explicit = None if stream is None else explicit_line(core, stream)
        picked = explicit

        def run(target: Any) -> int:
            if not address:
                return 0
            if piece is None:
                core.backend.deallocate(address, target)
                return 1
            assert picked is not None
            place = Place(core.backend, picked, op.ticket)
            try:
                piece.resource.give(piece, place)
            except Exception:
                piece.resource.give_later(piece, place, core.space)
                raise
            return 1 + place.num_calls

        def pick(deps: list[Ticket]) -> Timeline:
            nonlocal picked
            picked = self._choose(home, root, deps)
            return picked

        core.parking.submit(
            op,
            run,
            line=explicit or pick,
            writes=(root,),
            is_overwrite=True,  # a failed write does not keep memory alive
        )

    def _choose(self, home: Timeline, root: Region, deps: list[Ticket]) -> Timeline:
        if len(deps) > 1:
            deps = needed_waits(_NOWHERE, deps)
        if len(deps) == 1 and deps[0].timeline.stream is not None:
            line = deps[0].timeline
            # Another device may have used the memory last: free on one of our own.
            return line if line.owner is self._core else self._core.free_lane
        if not deps:
            last = root.last_write
            for line in (last.timeline if last.position else home, home):
                if line.stream is not None and line.owner is self._core:
                    return line
        return self._core.free_lane

    def free_array(self, memory: Allocation, stream: Stream | None, frame: FrameType) -> Op[None]:
        """``array.free()``; refuses a bad ``stream`` before anything has changed."""
        if stream is not None:
            explicit_line(self._core, stream)
        memory.is_freed = True
        return self.free(memory.address, memory.home, memory.root, stream, frame)

    def free_dropped(self, address: int, home: Timeline, root: Region) -> None:
        """Free what a finaliser left, unless closing the device has."""
        live = self.live.get(address)
        if live is not None:
            made, checker = live[2], self._core.backend.checker
            if checker is not None:
                checker.attribute(("free of a dropped array", made._code, made._lasti))
            op = self.free(address, home, root, frame=_getframe())
            op._of_nobody(made._origin)
            if checker is not None:
                checker.attribute(None)

    def free_all(self) -> None:
        """Free what is still live: the device is being closed and has drained."""
        for address, (known, nbytes, op, _) in list(self.live.items()):
            memory = known()
            # Gone, and its finaliser's note not read yet: all uses have ended.
            root = Region(op.ticket, 0, nbytes) if memory is None else memory.root
            self.free(address, op.ticket.timeline, root)

    def trim(self) -> None:
        """Give back what the owned pool keeps for later. Any thread."""
        if self.pool is not None:
            self._core.backend.trim_pool(self.pool, 0)

    def close(self) -> None:
        """Destroy the pool."""
        if self._is_open and self.pool is not None:
            self._is_open = False
            self._core.backend.destroy_pool(self.pool)
