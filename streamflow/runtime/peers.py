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
from streamflow.memory.pinned import PinnedBlock
from streamflow.runtime.op import Op, OpState, added
from streamflow.runtime.parked import After, Parked
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


def end_here(
    core: Core, last: Op[Any], explicit: Timeline | None, op: Op[Any] | None = None
) -> Op[Any]:
    """An op of ``core``, or ``op``, that ends with ``last``, which is another device's.

    On ``explicit`` that is a wait of the stream, whose order the copy is part of. A lane of
    ours is not to wait for another device: without a stream, it is the host that sees the end.
    """
    seen: Op[Any] = Op(core, "copy", None) if op is None else op
    after = After([last.ticket])
    if explicit is not None:
        core.parking.submit(seen, _no_calls, line=explicit, after=after)
        return seen

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

    core.parking.submit(seen, _no_calls, line=None, after=after, start=start)
    return seen


class _Ring:
    """The pinned blocks of one copy: back in their pool once no op of it can touch them (R6)."""

    __slots__ = ("_core", "_nbytes", "blocks", "num_ops", "waiting")

    def __init__(self, core: Core, nbytes: int, num: int) -> None:
        self._core = core
        self._nbytes = nbytes
        self.blocks: list[PinnedBlock | None] = [None] * num
        self.num_ops = 0
        self.waiting: dict[int, Parked] = {}  # by block: the op that needs it first

    def reserve(self) -> bool:
        """Take cached blocks, and set budget aside for the others. False: there is too little."""
        pool = self._core.pinned
        for place in range(len(self.blocks)):
            self.blocks[place] = pool.try_acquire(self._nbytes)
            if self.blocks[place] is None and not pool.reserve(self._nbytes):
                for earlier in self.blocks[:place]:
                    if earlier is None:
                        pool.unreserve(self._nbytes)
                    else:
                        earlier.release()
                return False
        return True

    def hold(self, op: Op[Any]) -> None:
        """The blocks are kept until the work of ``op`` has ended, in whatever way."""
        self.num_ops += 1
        op.rare().on_retired = partial(self._retired, op)

    def pin_missing(self, seq: int) -> None:
        """Pin what was not cached, on a worker thread (R1)."""
        core = self._core
        for place, block in enumerate(self.blocks):
            if block is None:
                acquire = partial(core.pinned.acquire_reserved_blocking, self._nbytes)
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
            parking.drop(parked, self._core.lose(error, f"pinning {self._nbytes} bytes"))

    def _retired(self, op: Op[Any]) -> None:
        if op.ticket.failure is None:
            self._one_less()
        else:  # it may be running still
            op._core.when_ended(op.ticket, self._one_less)

    def _one_less(self) -> None:
        self.num_ops -= 1
        if not self.num_ops:
            for place, block in enumerate(self.blocks):
                if block is not None:
                    self.blocks[place] = None
                    block.release()


class _Relay:
    """One copy by the host: its ops, and the one of them that the program sees."""

    __slots__ = ("_core", "_dst", "_ops", "_ring", "_seen", "_src")

    def __init__(self, core: Core, dst: DeviceArray, src: DeviceArray, ring: _Ring) -> None:
        self._core = core
        self._dst = dst
        self._src = src
        self._ring = ring
        self._ops: list[Op[Any]] = []
        self._seen: Op[Any] = Op(core, "copy", None)

    def submit(self, explicit: Timeline | None, after: After) -> Op[Any]:
        core, dst, src, ring = self._core, self._dst, self._src, self._ring
        is_to_here = dst._core is core
        out_line = src._core.d2h if is_to_here or explicit is None else explicit
        in_line = explicit if is_to_here and explicit is not None else dst._core.h2d
        num = -(-dst.nbytes // ring._nbytes)
        outs: list[Op[Any]] = []
        ins: list[Op[Any]] = []
        for k in range(num):
            is_last = k == num - 1
            outs.append(self._op(src._core))
            first = after if not k else After([outs[-2].ticket])
            if k >= len(ring.blocks):  # the block is free again
                first.tickets.append(ins[k - len(ring.blocks)].ticket)
            self._copy_out(outs[-1], out_line, k, first)
            ins.append(self._seen if is_last and is_to_here else self._op(dst._core))
            if ins[-1] is self._seen:
                self._watch()
                ring.hold(self._seen)
            self._copy_in(ins[-1], in_line, k, After([outs[-1].ticket]))
        if not is_to_here:
            self._watch()
            end_here(core, ins[-1], explicit, self._seen)
        if None in ring.blocks:
            ring.pin_missing(self._seen.ticket.seq)
        return self._seen

    def _op(self, core: Core) -> Op[Any]:
        op: Op[Any] = Op(core, "copy", self._seen.name)
        op._code, op._lasti = self._seen._origin
        self._ops.append(op)
        self._ring.hold(op)
        rare = op.rare()
        rare.on_ended = added(rare.on_ended, partial(self._part_ended, op))
        return op

    def _copy_out(self, op: Op[Any], line: Timeline, k: int, after: After) -> None:
        ring, backend = self._ring, op._core.backend
        address, nbytes = self._chunk(self._src, k)
        place = k % len(ring.blocks)
        is_missing = k < len(ring.blocks) and ring.blocks[place] is None

        def run(target: Any) -> int:
            block = ring.blocks[place]
            assert block is not None
            backend.copy_d2h(block.address, address, nbytes, target)
            return 1

        parked = op._core.parking.submit(
            op, run, line=line, reads=(self._src._region,), after=after, num_needs=int(is_missing)
        )
        if is_missing and parked is not None:
            parked.need = "pinned memory"
            ring.waiting[place] = parked

    def _copy_in(self, op: Op[Any], line: Timeline, k: int, after: After) -> None:
        ring, backend = self._ring, op._core.backend
        address, nbytes = self._chunk(self._dst, k)
        place = k % len(ring.blocks)

        def run(target: Any) -> int:
            if op is not self._seen:
                self._begun()
            block = ring.blocks[place]
            assert block is not None
            backend.copy_h2d(address, block.address, nbytes, target)
            return 1

        op._core.parking.submit(
            op,
            run,
            line=line,
            writes=(self._dst._region,),
            after=after,
            # The chunks together overwrite it; each needs that those before it went well.
            is_overwrite=not k and self._dst.is_whole_region,
        )

    def _chunk(self, array: DeviceArray, k: int) -> tuple[int, int]:
        size = self._ring._nbytes
        return array.address + k * size, min(size, array.nbytes - k * size)

    # -- failures and cancelling -----------------------------------------------------------------

    def _watch(self) -> None:
        rare = self._seen.rare()
        rare.on_ended = added(rare.on_ended, self._seen_ended)

    def _begun(self) -> None:
        """The destination is being written: what parked for a full window can't be taken back."""
        seen = self._seen
        if seen._state is OpState.PARKED and seen._rare is not None and seen._rare.parked:
            self._core.start(seen)

    def _part_ended(self, op: Op[Any]) -> None:
        """A failure of a part is one of the whole: it is told where the program looks."""
        error, other = op._error, op._core
        seen = self._seen
        parked = seen._rare.parked if seen._rare is not None else None
        if isinstance(error, OpCancelled) and seen._state is OpState.PARKED and parked is not None:
            # By a future that the copy waits for: so it is the copy that is cancelled.
            self._core.parking.drop(parked, OpCancelled(str(error)))
            return
        if error is None or other is self._core or isinstance(error, (UpstreamFailed, OpCancelled)):
            return
        if error is not other.lost:
            other.observed(error)
            rare = self._seen._rare
            self._core.failures.note(error, rare.scope if rare is not None else None)

    def _seen_ended(self) -> None:
        if self._seen._error is not None:  # cancelled, say: nobody needs what has not begun
            self._core.shell.call_soon(self._drop_parked)

    def _drop_parked(self) -> None:
        for op in reversed(self._ops):
            parked = op._rare.parked if op._rare is not None else None
            if op._state is OpState.PARKED and parked is not None:
                why = f"{op.name} was dropped: it is part of a copy that has ended"
                op._core.parking.drop(parked, OpCancelled(why))


def _no_calls(_: Any) -> int:
    return 0
