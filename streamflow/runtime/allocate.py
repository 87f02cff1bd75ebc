"""Device memory for arrays: stream-ordered allocation, fills and frees (rules R5, R6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.errors import OutOfDeviceMemory
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.op import Op
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Memory"]

_POOL_THRESHOLD_NBYTES = 2**63 - 1
_NOWHERE = Timeline(0)  # has seen nothing: waits needed here are the maximal tickets


class Memory:
    """The owned pool of one device and the arrays in it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # The default threshold of 0 gives memory back at every synchronisation.
        self.pool = core.backend.create_pool(release_threshold_nbytes=_POOL_THRESHOLD_NBYTES)
        self.live: dict[int, tuple[Timeline, Region]] = {}
        self._is_open = True

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, line: Timeline
    ) -> DeviceArray:
        """An uninitialised array, allocated on ``line`` now; never parks, never waits.

        Raises
        ------
        OutOfDeviceMemory
            After reaping, freeing what was dropped and trimming.
        """
        core = self._core
        op: Op[None] = Op(core, "empty", None)
        address = 0
        if nbytes:

            def run(stream: Any) -> int:
                nonlocal address
                address = self._allocate(nbytes, stream)
                return 1
        else:

            def run(stream: Any) -> int:
                return 0

        if core.instrument is not None:
            core.tracer.op_called(op, line, (), (), ())
            core.tracer.go(op, run, line, ())
            if op._error is not None:
                core.observed(op)
                raise op._error
        else:
            stream = line.stream
            try:
                num_calls = run(stream) + 1
            except Exception as error:
                raise core.lose(error, f"allocating {nbytes} bytes") from error
            event = core.take_event()
            stream.record(event)
            line.advance(op.ticket, num_calls, event)
            core.submitted(op)
        memory = Allocation(core, address, nbytes, op)
        if address:
            self.live[address] = (line, memory.root)
        return DeviceArray(memory, memory.root, address, shape, dtype)

    def _allocate(self, nbytes: int, stream: Any) -> int:
        backend = self._core.backend
        try:
            return backend.allocate(self.pool, nbytes, stream)
        except Exception as error:
            core = self._core
            refusal = core.backend.translate(error, f"allocating {nbytes} bytes")
            if not isinstance(refusal, OutOfDeviceMemory):
                raise
        core.drain_dropped()
        for line in core.lines:
            core.reap(line)
        backend.trim_pool(self.pool, 0)
        try:
            return backend.allocate(self.pool, nbytes, stream)
        except Exception as error:
            refusal = core.backend.translate(error, f"allocating {nbytes} bytes")
            if not isinstance(refusal, OutOfDeviceMemory):
                raise
            info = backend.pool_info(self.pool)
            raise OutOfDeviceMemory(
                f"asked for {nbytes} bytes; the pool holds {info.reserved_nbytes} with "
                f"{info.used_nbytes} in use by {len(self.live)} arrays, and the device has "
                f"{backend.memory_info()[0]} free: drop arrays, or wait for frees to complete"
            ) from error

    def free(
        self, address: int, home: Timeline, root: Region, stream: Stream | None = None
    ) -> Op[None]:
        """Queue the free of an allocation behind every use (rule R5)."""
        core = self._core
        line = explicit_line(core, stream) if stream is not None else None
        self.live.pop(address, None)
        op: Op[None] = Op(core, "free", None)

        def run(target: Any) -> int:
            if not address:
                return 0
            core.backend.deallocate(address, target)
            return 1

        deps: list[Ticket] = []
        root.before_write(deps)
        is_parked = any(dep.position == 0 for dep in deps)
        if line is not None or is_parked:
            core.parking.submit(
                op,
                run,
                line=line or (lambda: self._line_for_free(home, root)),
                writes=(root,),
                is_overwrite=True,  # a failed write does not keep memory alive
            )
            return op
        if core.instrument is not None:
            core.tracer.op_called(op, home, (), (root,), ())
        core.parking.go(op, run, self._choose(home, root, deps), deps)
        root.record_write(op.ticket)
        return op

    def _line_for_free(self, home: Timeline, root: Region) -> Timeline:
        deps: list[Ticket] = []
        root.before_write(deps)
        return self._choose(home, root, [dep for dep in deps if dep.position])

    def _choose(self, home: Timeline, root: Region, deps: list[Ticket]) -> Timeline:
        if len(deps) > 1:
            deps = needed_waits(_NOWHERE, deps)
        if len(deps) == 1 and deps[0].timeline.stream is not None:
            line = deps[0].timeline
            # Another device may have used the memory last: free on one of our own.
            return line if line in self._core.lines else self._core.free_lane
        if not deps:
            last = root.last_write
            for line in (last.timeline if last.position else home, home):
                if line.stream is not None and line in self._core.lines:
                    return line
        return self._core.free_lane

    def free_dropped(self, address: int, home: Timeline, root: Region) -> None:
        """Free what a finaliser left, unless closing the device has."""
        if address in self.live:
            self.free(address, home, root)

    def free_all(self) -> None:
        """Free what is still live: the device is being closed and has drained."""
        for address, (home, root) in list(self.live.items()):
            self.free(address, home, root)

    def close(self) -> None:
        """Destroy the pool."""
        if self._is_open:
            self._is_open = False
            self._core.backend.destroy_pool(self.pool)
