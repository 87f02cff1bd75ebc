"""``put``, ``get``, ``copy`` and ``fill``: bytes between host and device, and within it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from streamflow.memory.layout import has_gaps, is_compact
from streamflow.memory.pinned import SMALL_NBYTES
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.core import Core
from streamflow.runtime.host_memory import (
    HostEnd,
    check_same,
    host_source,
    host_target,
    keep_alive,
)
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.parked import NOTHING, After, Parked, no_calls
from streamflow.runtime.recording import recorder_of, refuse
from streamflow.runtime.source_watch import SourceWatch
from streamflow.runtime.staged import StagedCopies, place_in, waits_for
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.runtime.submission import Submission
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Timeline

__all__ = ["Transfers"]

_PATTERN_NBYTES = (1, 2, 4, 8, 16)


class Transfers:
    """The copies of one device."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._memory = core.memory
        self._h2d = core.h2d
        self._d2h = core.d2h
        self._staged = StagedCopies(core)

    # -- in --------------------------------------------------------------------------------

    def put(
        self,
        source: Any,
        out: DeviceArray | None,
        stream: Stream | None,
        after: Sequence[Any],
    ) -> tuple[DeviceArray, Op[Any]]:
        """Copy ``source`` into ``out`` or a new array; returns it with the op that writes it."""
        core = self._core
        if isinstance(source, Op):
            refuse(core, f"it doesn't know the result of {source.name}")
            line = explicit_line(core, stream)
            return self._put_result(source, out, line, core.after(after))
        host = HostEnd(core, host_source(source))
        array, nbytes = host.array, host.array.nbytes
        if nbytes and not host.is_direct:
            refuse(core, "put takes only pinned memory there: a lease of dev.pinned, or dev.pin")
        line = explicit_line(core, stream) or self._h2d
        first = core.after(after)
        if nbytes:
            core.check_budgets(nbytes, "put")
        if out is None:
            resource = self._memory.choose(None)
            out = self._memory.array(array.shape, array.size, array.dtype, line, resource=resource)
        else:
            self.check_array(out)
            check_same(out.shape, out.dtype, array.shape, array.dtype)
        block, is_direct = None, host.is_direct
        if 0 < nbytes <= SMALL_NBYTES and not host.regions and recorder_of(core) is None:
            # Read before this returns, pinned or not: only who leases memory knows what it is.
            is_direct = False
            block = core.pinned.try_acquire(nbytes)
            if block is None:
                array = array.copy()
        is_staged = nbytes > 0 and block is None and not is_direct
        if is_staged:
            first = place_in(core, line, first)
        op: Op[Any] = Op(core, "put", None)
        submit = Submission(
            op, line, host.regions, (out._region,), first, out.is_whole_region, nbytes
        )
        if is_staged:
            watch = None if host.will_change else SourceWatch(core, array, op._told)
            out._staged = self._staged.copy_in(array, out.address, watch, submit)
        elif is_direct:
            self._put_direct(host, out, submit)
        elif block is None:
            submit(core, no_calls)
        else:
            np.copyto(block.view(array.shape, array.dtype), array)
            op.rare().on_retired = block.release
            submit(core, partial(self._copy_in, out.address, block.address, nbytes))
        return out, op

    def _copy_in(self, to: int, origin: int, nbytes: int, target: Any) -> int:
        self._core.backend.copy_h2d(to, origin, nbytes, target)
        return 1

    def _put_direct(self, host: HostEnd, out: DeviceArray, submit: Submission) -> None:
        """Have the device read pinned memory as it is; the source is free once it has."""
        core, op, array = self._core, submit.op, host.array
        keep_alive(op, array)
        is_watched = core.settings.debug and not host.will_change
        watch = SourceWatch(core, array, op._told) if is_watched else None
        if watch is not None and watch.is_debugging:
            op.rare().on_device_done = partial(_raise_change, watch, host.regions, op.ticket.seq)
        submit(core, partial(self._copy_in, out.address, host.address, array.nbytes))
        out._staged = op

    def _put_result(
        self, source: Op[Any], out: DeviceArray | None, explicit: Timeline | None, first: After
    ) -> tuple[DeviceArray, Op[Any]]:
        """Copy what ``source`` results in, once it has: a host task's array, say."""
        core = self._core
        if out is None:
            raise ValueError(f"the shape of {source.name}'s result isn't known yet: pass out=")
        self.check_array(out)
        line = explicit or self._h2d
        core.check_budgets(out.nbytes, "put")
        first = After([*first.tickets, *core.tickets_of(source)], first.futures)
        first = place_in(core, line, first)
        op: Op[Any] = Op(core, "put", None)
        address, shape, dtype = out.address, out.shape, out.dtype
        ends: list[Any] = []

        def start(parked: Parked) -> None:
            core.when_all_ended([source.ticket], partial(take, parked))

        def take(parked: Parked) -> None:
            if parked.has_left:
                return
            if source._error is not None:
                core.parking.ready(parked)  # which says what failed
                return
            try:
                host = HostEnd(core, host_source(source._result))
                array = host.array
                check_same(shape, dtype, array.shape, array.dtype)
                for region in host.regions:
                    for each in (region, *region.overlapping):
                        write = each.last_write
                        if write.failure is None or write.seq >= region.last_write.seq:
                            core.parking.depend(parked, write)  # else overwritten since
                    region.record_read(op.ticket)
            except Exception as error:
                core.parking.drop(parked, error.with_traceback(None))
                return
            if host.is_direct:
                keep_alive(op, array)
                parked.run = partial(self._copy_in, address, host.address, array.nbytes)
                core.parking.ready(parked)
            else:
                self._staged.start_in(array, address, ends, parked)

        regions = (out._region,)
        submit = Submission(op, line, (), regions, first, out.is_whole_region, out.nbytes)
        submit(core, waits_for(ends), start=start)
        return out, op

    # -- out -------------------------------------------------------------------------------

    def get(
        self,
        array: DeviceArray,
        out: Any,
        stream: Stream | None,
        after: Sequence[Any],
    ) -> Op[Any]:
        """Copy ``array`` to the host: into ``out``, or into a pinned block that is the result."""
        core = self._core
        self.check_array(array)
        into = None
        if out is not None:
            target = host_target(out, "out=")
            check_same(target.shape, target.dtype, array.shape, array.dtype)
            into = HostEnd(core, target)
            if has_gaps(target.dtype):
                self._keep_gaps(into)
        if into is None or not (into.is_direct or array.nbytes == 0):
            refuse(
                core, "get reads on the host: call it after graph.launch(), or with a pinned out="
            )
        line = explicit_line(core, stream) or self._d2h
        return self._get(array, into, out, line, core.after(after))

    def _keep_gaps(self, into: HostEnd) -> None:
        """Have threads write it, field by field: what is between may be the program's."""
        into.is_direct = False
        itemsize, chunk_nbytes = into.array.itemsize, self._core.settings.staging_out_nbytes
        if itemsize > chunk_nbytes:
            raise ValueError(
                f"out= has items of {itemsize} bytes with gaps between their fields, which can't "
                f"be cut: staging_out_nbytes is {chunk_nbytes}"
            )

    def _get(
        self, array: DeviceArray, into: HostEnd | None, out: Any, line: Timeline, first: After
    ) -> Op[Any]:
        """``into`` is over the memory of ``out``, which is what the op results in."""
        core, nbytes = self._core, array.nbytes
        block = None
        is_staged = is_direct = False
        if into is not None and into.is_direct:
            is_direct = True
        elif into is None or (
            nbytes <= SMALL_NBYTES and not into.is_pinned and is_compact(into.array)
        ):
            block = core.pinned.try_acquire(nbytes) if nbytes else None
            is_staged = nbytes > 0 and block is None and not core.pinned.reserve(nbytes)
        else:
            is_staged = True
        if is_staged:
            first = place_in(core, line, first)
        op: Op[Any] = Op(core, "get", None)
        if into is not None:
            op.rare().writes_host = True
        regions = () if into is None else into.regions
        submit = Submission(op, line, (array._region,), regions, first, True)
        if nbytes == 0:
            op._result = np.empty(array.shape, array.dtype) if into is None else out
            submit(core, no_calls)
        elif is_direct:
            assert into is not None
            self._get_direct(array, into, out, submit)
        elif is_staged:
            target = np.empty(array.shape, array.dtype) if into is None else into.array
            result = target if into is None else out
            self._staged.copy_out(array.address, target, result, submit)
        else:
            self._get_pinned(array, block, submit, into, out)
        return op

    def _get_direct(self, array: DeviceArray, into: HostEnd, out: Any, submit: Submission) -> None:
        """Have the device write pinned memory as it is."""
        core, op = self._core, submit.op
        keep_alive(op, into.array)
        op._result = out
        submit(core, partial(self._copy_out, into.address, array.address, array.nbytes))

    def _copy_out(self, to: int, origin: int, nbytes: int, target: Any) -> int:
        self._core.backend.copy_d2h(to, origin, nbytes, target)
        return 1

    def _get_pinned(
        self,
        array: DeviceArray,
        block: PinnedBlock | None,
        submit: Submission,
        into: HostEnd | None,
        out: Any,
    ) -> None:
        """Copy into one pinned block; pin it on a worker thread if none is cached."""
        core, op = self._core, submit.op
        address, shape, dtype, nbytes = array.address, array.shape, array.dtype, array.nbytes
        held: list[PinnedBlock] = [] if block is None else [block]

        def run(target: Any) -> int:
            core.backend.copy_d2h(held[0].address, address, nbytes, target)
            return 1

        def retired() -> None:
            if not held:
                return
            taken = held.pop()
            if op._error is None and into is None:
                op._result = taken.as_result(shape, dtype, op._origin)
            else:
                taken.release()

        def copy_out() -> None:
            assert into is not None
            np.copyto(into.array, held[0].view(shape, dtype))
            op._result = out

        rare = op.rare()
        rare.on_retired = retired
        if into is not None:
            rare.on_device_done = copy_out
        if block is not None:
            submit(core, run)
            return
        parked = submit(core, run, num_needs=1)
        if parked is None:
            core.pinned.unreserve(nbytes)
            return
        parked.need = "pinned memory"

        def pinned(result: PinnedBlock, error: BaseException | None) -> None:
            if error is not None:
                core.parking.drop(parked, core.lose(error, f"pinning {nbytes} bytes"))
            elif op._state is OpState.PARKED:
                held.append(result)
                core.parking.ready(parked)
            else:
                result.release()

        core.background.submit(
            op.ticket.seq, lambda: core.pinned.acquire_reserved_blocking(nbytes), pinned
        )
        core.schedule_turn()

    # -- within the device ---------------------------------------------------------------------

    def copy(self, dst: Any, src: Any, stream: Stream | None, after: Sequence[Any]) -> Op[Any]:
        """Copy between any two of device array, array of another device, and ndarray."""
        core = self._core
        if isinstance(dst, DeviceArray) and not isinstance(src, DeviceArray):
            return self.put(src, dst, stream, after)[1]
        if isinstance(src, DeviceArray) and not isinstance(dst, DeviceArray):
            return self.get(src, dst, stream, after)
        if not isinstance(dst, DeviceArray):
            return self._copy_on_host(dst, src, after)
        self.check_array(dst, other_device=True)
        self.check_array(src, other_device=True)
        if dst._core is not core and src._core is not core:
            raise ValueError("copy takes at least one array of this device")
        check_same(dst.shape, dst.dtype, src.shape, src.dtype)
        first = core.after(after)
        explicit = explicit_line(core, stream)
        if dst._core is not src._core:
            refuse(core, "copies between devices have no place in it")
            from streamflow.runtime.peers import copies_straight  # few programs have two (R13)

            if not copies_straight(dst, src):
                return self._copy_by_host(dst, src, explicit, first)
        return self._copy_straight(dst, src, explicit, first)

    def _copy_straight(
        self, dst: DeviceArray, src: DeviceArray, explicit: Timeline | None, first: After
    ) -> Op[None]:
        core = self._core
        backend, nbytes = core.backend, dst.nbytes
        to, origin = dst.address, src.address
        there, here = dst._core.backend, src._core.backend
        to_index, from_index = there.index, here.index
        is_one_memory = there.space == here.space

        def run(target: Any) -> int:
            if nbytes == 0 or (to == origin and is_one_memory):
                return 0
            if is_one_memory:
                backend.copy_d2d(to, origin, nbytes, target)
            else:
                backend.copy_peer(to, to_index, origin, from_index, nbytes, target)
            return 1

        if abs(to - origin) < nbytes and to != origin and dst._memory is src._memory:
            raise ValueError("copy between overlapping parts of one array")
        op: Op[None] = Op(core, "copy", None)
        line = explicit or core.picker(op)
        reads, writes = (src._region,), (dst._region,)
        Submission(op, line, reads, writes, first, dst.is_whole_region)(core, run)
        return op

    def _copy_by_host(
        self, dst: DeviceArray, src: DeviceArray, explicit: Timeline | None, first: After
    ) -> Op[Any]:
        core = self._core
        is_to_here = dst._core is core
        if is_to_here and explicit is not None:
            first = place_in(core, explicit, first)
        from streamflow.runtime.peers import end_here, relay

        op = relay(core, dst, src, explicit, first)
        if op is not None:
            return op
        # No pinned memory to spare: through pageable memory, in two steps of the host.
        out, into = Transfers(src._core), Transfers(dst._core)
        got = out._get(src, None, None, (None if is_to_here else explicit) or out._d2h, first)
        moved = into._put_result(got, dst, explicit if is_to_here else None, NOTHING)[1]
        if is_to_here:
            return moved
        seen: Op[Any] = Op(core, "copy", None)
        end_here(core, moved, explicit, seen)
        return seen

    def _copy_on_host(self, dst: Any, src: Any, after: Sequence[Any]) -> Op[Any]:
        core = self._core
        source = HostEnd(core, host_source(src))
        target = HostEnd(core, host_target(dst, "the destination"))
        check_same(target.array.shape, target.array.dtype, source.array.shape, source.array.dtype)
        first = core.after(after)
        op: Op[Any] = Op(core, "copy", None)
        op.rare().writes_host = True

        def copy() -> Any:
            np.copyto(target.array, source.array)
            return dst

        core.host.submit(
            op,
            copy,
            (),
            first,
            reads=source.regions,
            writes=target.regions,
            is_overwrite=True,
        )
        return op

    def fill(
        self, array: DeviceArray, value: Any, stream: Stream | None, line: Timeline | None = None
    ) -> Op[None]:
        """Write ``value`` to every element."""
        core = self._core
        self.check_array(array)
        pattern = fill_pattern(value, array.dtype)
        if pattern is None:
            refuse(core, f"no memset writes {value!r} as {array.dtype}: copy from pinned memory")
            source = np.broadcast_to(np.array(value, array.dtype), array.shape)
            return self.put(source, array, stream, ())[1]
        backend, address = core.backend, array.address
        count = array.nbytes // len(pattern)

        def run(target: Any) -> int:
            return backend.fill(address, pattern, count, target) if count else 0

        line = explicit_line(core, stream) or line
        op: Op[None] = Op(core, "fill", None)
        Submission(
            op,
            line or core.picker(op),
            (),
            (array._region,),
            NOTHING,
            array.is_whole_region,
        )(core, run)
        return op

    def check_array(self, array: Any, *, other_device: bool = False) -> None:
        """Raise unless ``array`` is a live array that this device may use."""
        if not isinstance(array, DeviceArray):
            raise TypeError(f"takes a DeviceArray, found {type(array).__name__}")
        core = self._core
        if array._core is not core:
            if not other_device:
                raise ValueError(f"{array!r} belongs to another device or event loop")
            if array._core.shell.key != core.shell.key:
                raise ValueError(f"{array!r} belongs to a device of another event loop")
            array._core.check_open()
        array.check_usable()


def _raise_change(watch: SourceWatch, regions: Sequence[Region], seq: int) -> None:
    if any(region.last_write.seq > seq for region in regions):
        return  # a later op may have written there since, in its turn
    error = watch.end()
    if error is not None:
        raise error


def fill_pattern(value: Any, dtype: np.dtype[Any]) -> bytes | None:
    """The bytes to repeat for ``value``, or None if a memset cannot write them.

    Raises
    ------
    TypeError, ValueError, OverflowError
        ``value`` is not a scalar that ``dtype`` can hold.
    """
    item = np.array(value, dtype)
    if item.ndim != 0:
        raise TypeError(f"fill takes a scalar, found shape {item.shape}")
    if dtype.kind in "iu" and isinstance(value, (float, np.floating)) and value != item:
        raise TypeError(f"fill value {value} is not an integer, which {dtype} needs")
    pattern = item.tobytes()
    if not any(pattern):
        return b"\0"
    return pattern if len(pattern) in _PATTERN_NBYTES else None
