"""Copies between two devices: straight where one reaches the other's memory, else by the host.

By the host, a copy is a chain of ops on both devices: out of the source into pinned memory, on
its lane ``d2h``, and from there to the destination, on that one's lane ``h2d``. Large arrays
go in chunks, through two blocks in turns, so that both directions run at a time. All of it is
ordered on the devices: the host waits for nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from streamflow.backends.memory import PoolAccess
from streamflow.errors import OpCancelled, UpstreamFailed
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.runtime.op import Op, OpState, added
from streamflow.runtime.parked import After, Parked, no_calls
from streamflow.scheduler.machine import FINAL
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.array import DeviceArray
    from streamflow.runtime.core import Core

__all__ = ["copies_straight", "end_here", "relay"]


def copies_straight(dst: DeviceArray, src: DeviceArray) -> bool:
    """Whether one of two devices may reach the other's array without the host."""
    to, origin = dst._core.backend, src._core.backend
    if to.space == origin.space or not dst.nbytes:
        return True
    if _access(src, to.index) is not PoolAccess.NONE:
        return True
    return _access(dst, origin.index) is PoolAccess.READ_WRITE


def _access(array: DeviceArray, device_index: int) -> PoolAccess:
    backend = array._core.backend
    pool = backend.pointer_attributes(array.address).pool
    return PoolAccess.NONE if pool is None else backend.pool_access(pool, device_index)


def relay(
    core: Core, dst: DeviceArray, src: DeviceArray, explicit: Timeline | None, after: After
) -> Op[Any] | None:
    """Copy by the host. The op is of ``core``, the device that was asked.

    ``explicit`` is a stream of that device. None, and nothing begun, if pinned memory is short.
    """
    chunk_nbytes = min(dst.nbytes, core.settings.staging_in_nbytes)
    ring = _Ring(core, chunk_nbytes, 1 if dst.nbytes == chunk_nbytes else 2)
    return _Relay(core, dst, src, ring).submit(explicit, after) if ring.reserve() else None


def end_here(core: Core, last: Op[Any], explicit: Timeline | None, seen: Op[Any]) -> Parked | None:
    """Have ``seen``, an op of ``core``, end with ``last``, which is another device's.

    On ``explicit`` that is a wait of the stream, whose order the copy is part of. A lane of
    ours is not to wait for another device: without a stream, it is the host that sees the end.
    """
    after = After([last.ticket])
    if explicit is not None:
        return core.parking.submit(seen, no_calls, line=explicit, after=after)

    def start(parked: Parked) -> None:
        if seen._state is OpState.PARKED:
            core.start(seen)
        core.when_all_ended([last.ticket], partial(ended, parked))

    def ended(parked: Parked) -> None:
        if parked.has_left:
            return
        if last.ticket.failure is None:
            core.parking.host_done(parked)
        else:
            core.parking.ready(parked)  # which says what failed

    return core.parking.submit(seen, no_calls, line=None, after=after, start=start)


class _Ring:
    """The pinned blocks of one copy: back in their pool once no op of it can touch them (R6)."""

    __slots__ = ("_core", "blocks", "nbytes", "num_ops", "waiting")

    def __init__(self, core: Core, nbytes: int, num: int) -> None:
        self._core = core
        self.nbytes = nbytes
        self.blocks: list[PinnedBlock | None] = [None] * num
        self.num_ops = 1  # and the submission itself, which ends by release()
        self.waiting: dict[int, Parked] = {}  # by block: the op that needs it first

    def reserve(self) -> bool:
        """Take cached blocks, and set budget aside for the others. False: there is too little."""
        pool = self._core.pinned
        for place in range(len(self.blocks)):
            self.blocks[place] = pool.try_acquire(self.nbytes)
            if self.blocks[place] is None and not pool.reserve(self.nbytes):
                for earlier in self.blocks[:place]:
                    if earlier is None:
                        pool.unreserve(self.nbytes)
                    else:
                        earlier.release()
                return False
        return True

    def hold(self, op: Op[Any], before: Op[Any] | None = None) -> None:
        """Keep the blocks until the work of ``op`` has ended, in whatever way.

        ``before`` is the step before it, on a device that nobody may be looking at.
        """
        self.num_ops += 1
        op.rare().on_retired = partial(self._retired, op, before)

    def pin_missing(self, seq: int) -> None:
        """Pin what was not cached, on a worker thread (R1)."""
        core = self._core
        for place, block in enumerate(self.blocks):
            if block is None:
                acquire = partial(core.pinned.acquire_reserved_blocking, self.nbytes)
                core.background.submit(seq, acquire, partial(self._pinned, place))
        core.schedule_turn()

    def _pinned(self, place: int, block: PinnedBlock, error: BaseException | None) -> None:
        parked = self.waiting.pop(place, None)
        if error is None and not self.num_ops:  # all of them have failed meanwhile
            block.release()
            return
        if error is None:
            self.blocks[place] = block
        if parked is None or parked.has_left:
            return
        parking = parked.op._core.parking
        if error is None:
            parking.ready(parked)
        else:
            parking.drop(parked, self._core.lose(error, f"pinning {self.nbytes} bytes"))

    def _retired(self, op: Op[Any], before: Op[Any] | None) -> None:
        if before is not None and before._core.is_here():  # else its loop has ended (C12)
            if before._state is OpState.SUBMITTED:
                before._core.reap(before.ticket.timeline)
            if before._state not in FINAL:
                before._core.want(before)
        if op.ticket.failure is None:
            self.release()
        else:  # it may be running still
            op._core.when_ended(op.ticket, self.release)

    def release(self) -> None:
        """One of those who hold the blocks has ended."""
        self.num_ops -= 1
        if not self.num_ops:
            for place, block in enumerate(self.blocks):
                if block is not None:
                    self.blocks[place] = None
                    block.release()


class _Relay:
    """One copy by the host: its ops, and the one of them that the program sees."""

    __slots__ = (
        "_core",
        "_dst_core",
        "_from",
        "_has_failed",
        "_is_overwrite",
        "_nbytes",
        "_parked",
        "_reads",
        "_ring",
        "_seen",
        "_src_core",
        "_to",
        "_writes",
    )

    def __init__(self, core: Core, dst: DeviceArray, src: DeviceArray, ring: _Ring) -> None:
        self._core = core
        # No array: those may be dropped while this is in flight (R6).
        self._from, self._reads, self._src_core = src.address, (src._region,), src._core
        self._to, self._writes, self._dst_core = dst.address, (dst._region,), dst._core
        self._nbytes = dst.nbytes
        self._is_overwrite = dst.is_whole_region
        self._ring = ring
        self._parked: dict[Op[Any], Parked | None] = {}
        self._has_failed = False
        self._seen: Op[Any] = Op(core, "copy", None)

    def submit(self, explicit: Timeline | None, after: After) -> Op[Any]:
        core, ring = self._core, self._ring
        source, target = self._src_core, self._dst_core
        is_to_here = target is core
        out_line = source.d2h if is_to_here or explicit is None else explicit
        in_line = explicit if is_to_here and explicit is not None else target.h2d
        num = -(-self._nbytes // ring.nbytes)
        outs: list[Op[Any]] = []
        ins: list[Op[Any]] = []
        for k in range(num):
            is_last = k == num - 1
            outs.append(self._op(source, "to the host"))
            ring.hold(outs[-1])
            first = after if not k else After([outs[-2].ticket])
            if k >= len(ring.blocks):  # the block is free again
                first.tickets.append(ins[k - len(ring.blocks)].ticket)
            self._copy_out(outs[-1], out_line, k, first)
            is_seen = is_last and is_to_here
            ins.append(self._seen if is_seen else self._op(target, "from the host"))
            ring.hold(ins[-1], outs[-1])
            if is_seen:
                self._watch(self._seen)
            self._copy_in(ins[-1], in_line, k, After([outs[-1].ticket]))
        if not is_to_here:
            self._watch(self._seen)
            self._parked[self._seen] = end_here(core, ins[-1], explicit, self._seen)
        if ins[0].ticket.position:
            self._begun()
        if None in ring.blocks:
            ring.pin_missing(self._seen.ticket.seq)
        ring.release()
        return self._seen

    def _op(self, core: Core, way: str) -> Op[Any]:
        op: Op[Any] = Op(core, "copy", f"{self._seen.name} {way}")
        op._origin = self._seen._origin
        self._watch(op)
        return op

    def _copy_out(self, op: Op[Any], line: Timeline, k: int, after: After) -> None:
        ring, backend = self._ring, op._core.backend
        address, nbytes = self._chunk(self._from, k)
        place = k % len(ring.blocks)
        is_missing = k < len(ring.blocks) and ring.blocks[place] is None

        def run(target: Any) -> int:
            block = ring.blocks[place]
            assert block is not None
            backend.copy_d2h(block.address, address, nbytes, target)
            return 1

        parked = op._core.parking.submit(
            op, run, line=line, reads=self._reads, after=after, num_needs=int(is_missing)
        )
        self._parked[op] = parked
        if is_missing and parked is not None:
            parked.need = "pinned memory"
            ring.waiting[place] = parked

    def _copy_in(self, op: Op[Any], line: Timeline, k: int, after: After) -> None:
        ring, backend = self._ring, op._core.backend
        address, nbytes = self._chunk(self._to, k)
        place = k % len(ring.blocks)

        def run(target: Any) -> int:
            if op is not self._seen:
                self._begun()
            block = ring.blocks[place]
            assert block is not None
            backend.copy_h2d(address, block.address, nbytes, target)
            return 1

        self._parked[op] = op._core.parking.submit(
            op,
            run,
            line=line,
            writes=self._writes,
            after=after,
            # The chunks together overwrite it; each needs that those before it went well.
            is_overwrite=not k and self._is_overwrite,
        )

    def _chunk(self, start: int, k: int) -> tuple[int, int]:
        size = self._ring.nbytes
        return start + k * size, min(size, self._nbytes - k * size)

    # -- failures and cancelling -----------------------------------------------------------------

    def _watch(self, op: Op[Any]) -> None:
        rare = op.rare()
        rare.on_ended = added(rare.on_ended, partial(self._ended, op))

    def _begun(self) -> None:
        """The destination is being written: what parked for a full window can't be taken back."""
        parked, seen = self._parked.get(self._seen), self._seen
        if parked is not None and not parked.has_left and seen._state is OpState.PARKED:
            self._core.start(seen)

    def _ended(self, op: Op[Any]) -> None:
        error = op._error
        if error is None or self._has_failed or not self._core.is_here():
            return  # where the loop has ended, each device ends its own ops (C12)
        self._has_failed = True
        if op is not self._seen:
            self._move_failure(op, error)
        mine = self._parked.get(op)
        if mine is not None:
            mine.has_left = True  # already: what is dropped here is not to have it go on
        root = error.__cause__ if isinstance(error, UpstreamFailed) else error
        for part in reversed(self._parked):  # nobody needs what has not begun
            parked = self._parked[part]
            if parked is None or parked.has_left:
                continue
            text = f"{part.name} needs the result of {op.name}, which failed: {root}"
            failure: Exception = UpstreamFailed(text)
            failure.__cause__ = root
            if part is self._seen and isinstance(error, OpCancelled):
                # By a future that the copy waits for, say: so it is the copy that is cancelled.
                failure = OpCancelled(str(error))
            part._core.parking.drop(parked, failure)

    def _move_failure(self, op: Op[Any], error: BaseException) -> None:
        """A failure of a part is one of the whole: it is told where the program looks."""
        core, other = self._core, op._core
        if other is core or error is other.lost or isinstance(error, (UpstreamFailed, OpCancelled)):
            return
        other.observed(error)
        rare = self._seen._rare
        core.failures.note(error, rare.scope if rare is not None else None)
