"""``put``, ``get``, ``copy`` and ``fill``: bytes between host and device, and within it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from streamflow.memory.pinned import SMALL_NBYTES
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.memory.staging import StagingJob
from streamflow.runtime.array import DeviceArray, checked_dtype
from streamflow.runtime.core import Core
from streamflow.runtime.op import Op, OpState, added
from streamflow.runtime.parked import NOTHING, After, Parked, PickLine, Run, Start
from streamflow.runtime.peers import copies_straight, end_here, relay
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Timeline

__all__ = ["Transfers", "host_array"]

Array = np.ndarray[Any, Any]
_PATTERN_NBYTES = (1, 2, 4, 8, 16)


class Transfers:
    """The copies of one device."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._memory = core.memory
        self._h2d = core.h2d
        self._d2h = core.d2h

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
            line = explicit_line(core, stream)
            return self._put_result(source, out, line, core.after(after))
        array = host_array(source)
        line = explicit_line(core, stream) or self._h2d
        first = core.after(after)
        if array.nbytes:
            core.check_budgets(array.nbytes, "put")
        if out is None:
            resource = self._memory.choose(None)
            out = self._memory.array(array.shape, array.size, array.dtype, line, resource=resource)
        else:
            self.check_array(out)
            check_same(out.shape, out.dtype, array.shape, array.dtype)
        nbytes = array.nbytes
        block = core.pinned.try_acquire(nbytes) if 0 < nbytes <= SMALL_NBYTES else None
        if nbytes and block is None:
            first = self._placed_in(line, first)
        op: Op[Any] = Op(core, "put", None)
        submit = _Submission(op, line, (), (out._region,), first, out.is_whole_region, nbytes)
        if nbytes == 0:
            submit(core, lambda _: 0)
            return out, op
        if block is not None:
            np.copyto(block.bytes_view(nbytes).view(array.dtype).reshape(array.shape), array)
            address, start = block.address, out.address
            op.rare().on_retired = block.release

            def run(target: Any) -> int:
                core.backend.copy_h2d(start, address, nbytes, target)
                return 1

            submit(core, run)
            return out, op
        out._staged = self._stage_in(array, out.address, submit)
        return out, op

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
        first = self._placed_in(line, first)
        op: Op[Any] = Op(core, "put", None)
        address, shape, dtype = out.address, out.shape, out.dtype
        ends: list[Any] = []

        def done(job: StagingJob) -> None:
            ends.extend(job.ends)
            self._staged(op, job)

        def start(parked: Parked) -> None:
            core.when_all_ended([source.ticket], partial(take, parked))

        def take(parked: Parked) -> None:
            if parked.has_left:
                return
            if source._error is not None:
                core.parking.ready(parked)  # which says what failed
                return
            try:
                array = host_array(source._result)
                check_same(shape, dtype, array.shape, array.dtype)
            except Exception as error:
                core.parking.drop(parked, error.with_traceback(None))
                return
            self._start_staging(StagingJob(op.ticket.seq, array, address, True, done), parked)

        regions = (out._region,)
        submit = _Submission(op, line, (), regions, first, out.is_whole_region, out.nbytes)
        submit(core, _waits_for(ends), start=start)
        return out, op

    def _stage_in(self, array: Array, address: int, submit: _Submission) -> Op[None]:
        core, op = self._core, submit.op
        staged: Op[None] = Op(core, "staged", None)
        ends: list[Any] = []

        checker = core.backend.checker
        before = None if checker is None else checker.fingerprint(array)

        def done(job: StagingJob) -> None:
            ends.extend(job.ends)
            if checker is not None and job.error is None and checker.fingerprint(array) != before:
                checker.source_changed(op._told, core.backend.index, array.nbytes)
            self._staged(op, job)
            if staged._state is not OpState.STAGING:  # the device was closed meanwhile
                return
            if op._error is None:
                core.complete(staged)
            else:  # the same error: whoever sees one has seen both
                core.fail(staged, op._error)

        def ended() -> None:
            if not job.is_started and staged._state is OpState.STAGING:
                core.complete(staged)  # no worker will look at the source

        job = StagingJob(op.ticket.seq, array, address, True, done)
        core.start(staged)
        rare = op.rare()
        rare.on_ended = added(rare.on_ended, ended)
        submit(core, _waits_for(ends), start=partial(self._start_staging, job))
        return staged

    # -- out -------------------------------------------------------------------------------

    def get(
        self,
        array: DeviceArray,
        out: Array | None,
        stream: Stream | None,
        after: Sequence[Any],
    ) -> Op[Array]:
        """Copy ``array`` to the host: into ``out``, or into a pinned block that is the result."""
        core = self._core
        self.check_array(array)
        if out is not None:
            check_out(out, array)
        return self._get(array, out, explicit_line(core, stream) or self._d2h, core.after(after))

    def _get(
        self, array: DeviceArray, out: Array | None, line: Timeline, first: After
    ) -> Op[Array]:
        core, nbytes = self._core, array.nbytes
        block = None
        if out is None or nbytes <= SMALL_NBYTES:
            block = core.pinned.try_acquire(nbytes) if nbytes else None
            is_staged = nbytes > 0 and block is None and not core.pinned.reserve(nbytes)
        else:
            is_staged = True
        if is_staged:
            first = self._placed_in(line, first)
        op: Op[Array] = Op(core, "get", None)
        if out is not None:
            op.rare().writes_host = True
        submit = _Submission(op, line, (array._region,), (), first, False)
        if nbytes == 0:
            op._result = np.empty(array.shape, array.dtype) if out is None else out
            submit(core, lambda _: 0)
        elif is_staged:
            self._stage_out(
                array, np.empty(array.shape, array.dtype) if out is None else out, submit
            )
        else:
            self._get_pinned(array, block, submit, out)
        return op

    def _get_pinned(
        self,
        array: DeviceArray,
        block: PinnedBlock | None,
        submit: _Submission,
        out: Array | None,
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
            if op._error is None and out is None:
                op._result = taken.as_result(shape, dtype, op._origin)
            else:
                taken.release()

        def copy_out() -> None:
            assert out is not None
            view = held[0].bytes_view(nbytes).view(dtype).reshape(shape)
            np.copyto(out, view)
            op._result = out

        rare = op.rare()
        rare.on_retired = retired
        if out is not None:
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

    def _stage_out(self, array: DeviceArray, out: Array, submit: _Submission) -> None:
        core, op = self._core, submit.op
        ends: list[Any] = []

        def done(job: StagingJob) -> None:
            if job.error is None:
                op._result = out
            ends.extend(job.ends)
            self._staged(op, job)

        job = StagingJob(op.ticket.seq, out, array.address, False, done)
        submit(core, _waits_for(ends), start=partial(self._start_staging, job))

    def _placed_in(self, line: Timeline, after: After) -> After:
        """What a staged copy, which runs on private streams, must come after on ``line``."""
        if not line.is_ordered:
            return after
        op: Op[None] = Op(self._core, "record", None)
        self._core.parking.submit(op, lambda _: 0, line=line)
        return After([*after.tickets, op.ticket], after.futures)

    # -- staging jobs ------------------------------------------------------------------------

    def _start_staging(self, job: StagingJob, parked: Parked) -> None:
        """Start ``job`` once the device has done all it comes after (rule R7)."""
        core = self._core
        pending = core.parking.flattened(parked.deps)
        core.when_all_ended(pending, partial(self._when_passed, job, parked))

    def _when_passed(self, job: StagingJob, parked: Parked) -> None:
        core = self._core
        if parked.has_left:
            return
        if any(source.failure is not None for source in parked.sources):
            core.parking.ready(parked)  # which says what failed
        elif core.parking.flattened(parked.deps):
            self._start_staging(job, parked)  # what ended had failed, and left others before it
        else:
            core.parking.admit(parked, partial(self._stage, job))

    def _stage(self, job: StagingJob, parked: Parked) -> None:
        core, op = self._core, parked.op
        job.is_timed = core.instrument is not None
        job.told = op._told
        job.key = op.rare().scope
        op.rare().stop = partial(core.staging.stop, job)
        core.start(op)
        core.staging.start(job)
        core.schedule_turn()

    def _staged(self, op: Op[Any], job: StagingJob) -> None:
        core = self._core
        if op._error is not None:  # the device was closed meanwhile
            return
        parked: Parked = op.rare().parked
        op.rare().stop = None
        if job.error is not None:
            if core.is_serial:
                core.serial_op = op
            # Submitted all the same: it comes after what the other workers have in flight.
            op.rare().doomed = core.lose(job.error, f"staging {op.name}")
        if job.is_timed:
            core.tracer.staged(op, job.starts, job.ends)
        core.parking.ready(parked)

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
        if dst._core is not src._core and not copies_straight(dst, src):
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
        _Submission(op, line, reads, writes, first, dst.is_whole_region)(core, run)
        return op

    def _copy_by_host(
        self, dst: DeviceArray, src: DeviceArray, explicit: Timeline | None, first: After
    ) -> Op[Any]:
        core = self._core
        is_to_here = dst._core is core
        if is_to_here and explicit is not None:
            first = self._placed_in(explicit, first)
        op = relay(core, dst, src, explicit, first)
        if op is not None:
            return op
        # No pinned memory to spare: through pageable memory, in two steps of the host.
        out, into = Transfers(src._core), Transfers(dst._core)
        got = out._get(src, None, (None if is_to_here else explicit) or out._d2h, first)
        moved = into._put_result(got, dst, explicit if is_to_here else None, NOTHING)[1]
        if is_to_here:
            return moved
        seen: Op[Any] = Op(core, "copy", None)
        end_here(core, moved, explicit, seen)
        return seen

    def _copy_on_host(self, dst: Any, src: Any, after: Sequence[Any]) -> Op[Array]:
        core = self._core
        source = host_array(src)
        if not isinstance(dst, np.ndarray):
            raise TypeError(f"copy takes a DeviceArray or ndarray to write, found {dst!r}")
        check_same(dst.shape, dst.dtype, source.shape, source.dtype)
        if not dst.flags.writeable:
            raise ValueError("the destination array is read-only")
        first = core.after(after)
        op: Op[Array] = Op(core, "copy", None)
        op.rare().writes_host = True

        def copy() -> Array:
            np.copyto(dst, source)
            return dst

        core.host.submit(op, copy, (), first)
        return op

    def fill(
        self, array: DeviceArray, value: Any, stream: Stream | None, line: Timeline | None = None
    ) -> Op[None]:
        """Write ``value`` to every element."""
        core = self._core
        self.check_array(array)
        pattern = fill_pattern(value, array.dtype)
        if pattern is None:
            source = np.broadcast_to(np.array(value, array.dtype), array.shape)
            return self.put(source, array, stream, ())[1]
        backend, address = core.backend, array.address
        count = array.nbytes // len(pattern)

        def run(target: Any) -> int:
            return backend.fill(address, pattern, count, target) if count else 0

        line = explicit_line(core, stream) or line
        op: Op[None] = Op(core, "fill", None)
        _Submission(
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


class _Submission:
    """The ordering of an op, fixed before it is known how it will run."""

    __slots__ = ("after", "is_overwrite", "line", "nbytes", "op", "reads", "writes")

    def __init__(
        self,
        op: Op[Any],
        line: Timeline | PickLine,
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: After,
        is_overwrite: bool,
        nbytes: int = 0,
    ) -> None:
        self.op = op
        self.line = line
        self.reads = reads
        self.writes = writes
        self.after = after
        self.is_overwrite = is_overwrite
        self.nbytes = nbytes

    def __call__(
        self, core: Core, run: Run, num_needs: int = 0, start: Start | None = None
    ) -> Parked | None:
        return core.parking.submit(
            self.op,
            run,
            line=self.line,
            reads=self.reads,
            writes=self.writes,
            after=self.after,
            is_overwrite=self.is_overwrite,
            num_needs=num_needs,
            start=start,
            nbytes=self.nbytes,
        )


def _waits_for(ends: list[Any]) -> Run:
    """What a staged op submits itself: waits for the events its workers leave in ``ends``."""

    def run(target: Any) -> int:
        for end in ends:
            target.wait(end)
        return len(ends)

    return run


def host_array(source: Any) -> Array:
    """``source`` as an ndarray whose items are plain bytes; its memory is not copied."""
    if isinstance(source, DeviceArray):
        raise TypeError("the source is on a device already: use dev.copy")
    array = np.asarray(source)
    checked_dtype(array.dtype)
    return array


def check_same(
    shape: tuple[int, ...], dtype: Any, from_shape: tuple[int, ...], from_dtype: Any
) -> None:
    """Raise unless source and destination have one shape and dtype."""
    if shape != from_shape:
        raise ValueError(f"the destination has shape {shape}, the source {from_shape}")
    if dtype != from_dtype:
        raise TypeError(f"the destination has dtype {dtype}, the source {from_dtype}")


def check_out(out: Any, array: DeviceArray) -> None:
    """Raise unless ``out`` is a writable ndarray like ``array``."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out= takes an ndarray, found {type(out).__name__}")
    check_same(out.shape, out.dtype, array.shape, array.dtype)
    if not out.flags.writeable:
        raise ValueError("out= is read-only")


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
