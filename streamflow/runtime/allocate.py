"""Device memory for arrays: stream-ordered allocation, fills and frees (rules R5, R6)."""

from __future__ import annotations

from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from streamflow.errors import OutOfDeviceMemory
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Memory"]

_POOL_THRESHOLD_NBYTES = 2**63 - 1
_SUBMITTED = OpState.SUBMITTED
_NOWHERE = Timeline(0)  # has seen nothing: waits needed here are the maximal tickets


class Memory:
    """The owned pool of one device and the arrays in it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # The default threshold of 0 gives memory back at every synchronisation.
        self.pool = core.backend.create_pool(release_threshold_nbytes=_POOL_THRESHOLD_NBYTES)
        # By address: the allocation, its size, and its op. Weak: its region knows the uses
        # that failed, their errors the frames they passed, and those may hold its arrays (C23).
        self.live: dict[int, tuple[ref[Allocation], int, Op[None]]] = {}
        self._is_open = True

    def array(
        self,
        shape: tuple[int, ...],
        size: int,
        dtype: np.dtype[Any],
        line: Timeline,
        frame: FrameType | None = None,
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
        if not core.is_fast:
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
            self.live[address] = (ref(memory), nbytes, op)
        return DeviceArray(memory, memory.root, address, shape, dtype, size)

    def _allocate_slowly(self, op: Op[None], nbytes: int, line: Timeline) -> int:
        core, address = self._core, 0

        def run(stream: Any) -> int:
            nonlocal address
            if nbytes:
                address = self._allocate(nbytes, stream)
            return 1

        if core.instrument is not None:
            core.tracer.op_called(op, (), (), ())
        core.parking.go(op, run, line, ())
        if op._error is not None:
            core.observed(op._error)
            raise op._error.with_traceback(None)
        return address

    def _allocate(self, nbytes: int, stream: Any) -> int:
        backend = self._core.backend
        try:
            return backend.allocate(self.pool, nbytes, stream)
        except Exception as error:
            refusal = self._core.lose(error, f"allocating {nbytes} bytes")
            try:
                if not isinstance(refusal, OutOfDeviceMemory):
                    raise refusal from error
            finally:
                del refusal  # it may be the error itself, which has this frame (C23)
        return self._allocate_again(nbytes, stream)

    def _allocate_again(self, nbytes: int, stream: Any) -> int:
        """Give back what can be given back without waiting, and try once more."""
        core = self._core
        backend = core.backend
        core.drain_dropped()
        for line in core.lines:
            core.reap(line)
        backend.trim_pool(self.pool, 0)
        try:
            return backend.allocate(self.pool, nbytes, stream)
        except Exception as error:
            refusal = core.lose(error, f"allocating {nbytes} bytes")
            try:
                if not isinstance(refusal, OutOfDeviceMemory):
                    raise refusal from error
            finally:
                del refusal
            info = backend.pool_info(self.pool)
            raise OutOfDeviceMemory(
                f"asked for {nbytes} bytes; the pool holds {info.reserved_nbytes} with "
                f"{info.used_nbytes} in use by {len(self.live)} arrays, and the device has "
                f"{backend.memory_info()[0]} free: drop arrays, or wait for frees to complete"
            ) from error

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
        self.live.pop(address, None)
        op: Op[None] = Op(core, "free", None, frame)
        deps: list[Ticket] = []
        root.before_write(deps)
        line = None
        if stream is None and core.is_fast and address:
            for dep in deps:
                if dep.position == 0:
                    break
            else:
                line = self._choose(home, root, deps)
        if line is None:
            self._free_slowly(op, address, home, root, stream)
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
        self, op: Op[None], address: int, home: Timeline, root: Region, stream: Stream | None
    ) -> None:
        """A free on a stream of the user's, behind parked uses, or while tracing."""
        core = self._core

        def run(target: Any) -> int:
            if not address:
                return 0
            core.backend.deallocate(address, target)
            return 1

        def pick(deps: list[Ticket]) -> Timeline:
            return self._choose(home, root, deps)

        core.parking.submit(
            op,
            run,
            line=pick if stream is None else explicit_line(core, stream) or pick,
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
            op._code, op._lasti = made._code, made._lasti  # nobody called for it
            if checker is not None:
                checker.attribute(None)

    def free_all(self) -> None:
        """Free what is still live: the device is being closed and has drained."""
        for address, (known, nbytes, op) in list(self.live.items()):
            memory = known()
            # Gone, and its finaliser's note not read yet: all uses have ended.
            root = Region(op.ticket, 0, nbytes) if memory is None else memory.root
            self.free(address, op.ticket.timeline, root)

    def close(self) -> None:
        """Destroy the pool."""
        if self._is_open:
            self._is_open = False
            self._core.backend.destroy_pool(self.pool)
