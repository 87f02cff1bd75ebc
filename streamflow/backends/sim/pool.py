"""Stream-ordered pools: which memory an allocation gets, and what a pool keeps.

An allocation is served, in this order, by (1) a block freed on the same stream; (2) one
freed on a stream that the allocating one has waited for since; (3) one whose free has
run; (4) new memory; (5) one whose free is pending, with a wait for it. Steps 2, 3 and 5
can each be switched off, as in the driver, at any time.

Source: CUDA guide, stream-ordered memory allocator, "Reuse policies".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from streamflow.backends.memory import Location, PoolAccess, PoolAttribute, PoolInfo
from streamflow.backends.sim.block import Block, round_up
from streamflow.backends.sim.command import Wait
from streamflow.backends.sim.host_memory import HostKind, HostSpace
from streamflow.backends.sim.memory import AddressSpace
from streamflow.errors import Closed, DeviceError, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.machine import Gpu
    from streamflow.backends.sim.stream import SimStream

__all__ = ["SimPool"]

_UINT64_MAX = 2**64 - 1
_NUM_LOOKED_AT = 8
"""Capacities from the smallest that fits: how far a request looks for a block to reuse."""


class _Host:
    """In place of a stream, for what the host freed: everything may use it at once."""

    ordinal = -1
    num_done = num_proven = 0


_HOST = _Host()
_Freer: TypeAlias = "SimStream | _Host"

_SWITCHES = {
    PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES: "reuse_follow_event_dependencies",
    PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC: "reuse_allow_opportunistic",
    PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES: "reuse_allow_internal_dependencies",
}


class SimPool:
    """A pool of one device, or of the host's memory. Every method runs under the world's lock.

    Blocks are not split or joined: a free block serves a request of at least half its
    size. A pool that runs short gives completed free blocks of other sizes back to the
    device first, so nothing is ever lost to fragmentation, as with the driver's own
    remapping; then the device's other pools give back theirs.

    Attributes
    ----------
    number : int
        Counts the pools of the device, from 0; -1 for its default pool.
    location : Location
        Where its memory lies.
    kind : HostKind or None
        What kind of memory that both sides reach it hands out; None for the device's own.
    is_exportable : bool
        Made to be shared with other processes.
    reuse_follow_event_dependencies, reuse_allow_opportunistic,
    reuse_allow_internal_dependencies : bool
        Steps 2, 3 and 5 above.
    """

    def __init__(
        self,
        gpu: Gpu,
        release_threshold_nbytes: int,
        max_nbytes: int,
        *,
        number: int | None = None,
        location: Location | None = None,
        kind: HostKind | None = None,
        is_exportable: bool = False,
    ) -> None:
        if not 0 <= release_threshold_nbytes <= _UINT64_MAX or max_nbytes < 0:
            raise ValueError("a pool's threshold and size cannot be negative, nor above 2**64 - 1")
        self.gpu = gpu
        self.number = gpu.next_pool() if number is None else number
        self.location = Location("device", gpu.index) if location is None else location
        self.kind = kind
        self.is_exportable = is_exportable
        self.release_threshold_nbytes = release_threshold_nbytes
        self.max_nbytes = max_nbytes
        options = gpu.options
        self.reuse_follow_event_dependencies = options.reuse_follow_event_dependencies
        self.reuse_allow_opportunistic = options.reuse_allow_opportunistic
        self.reuse_allow_internal_dependencies = options.reuse_allow_internal_dependencies
        self.is_destroyed = False
        self.reserved_nbytes = 0
        self._reserved_high = 0
        self._used = 0
        self._used_high = 0
        self._memory: AddressSpace | HostSpace = gpu.memory if kind is None else HostSpace(kind)
        # Its own device reaches a pool always, every device a managed one.
        self._access: dict[int, PoolAccess] = {}
        self._blocks: dict[Block, None] = {}  # ordered: closing is the same in every run
        # capacity -> stream of the free -> blocks, oldest free first. Only the oldest of
        # a stream needs a look: positions ascend.
        self._free: dict[int, dict[_Freer, deque[Block]]] = {}
        self._capacities: list[int] = []

    # -- attributes and access -----------------------------------------------------------

    def attribute(self, attribute: PoolAttribute) -> int:
        """One of its attributes."""
        switch = _SWITCHES.get(attribute)
        if switch is not None:
            return int(getattr(self, switch))
        return {
            PoolAttribute.RELEASE_THRESHOLD: self.release_threshold_nbytes,
            PoolAttribute.RESERVED_CURRENT: self.reserved_nbytes,
            PoolAttribute.RESERVED_HIGH: self._reserved_high,
            PoolAttribute.USED_CURRENT: self._used,
            PoolAttribute.USED_HIGH: self._used_high,
        }[attribute]

    def set_attribute(self, attribute: PoolAttribute, value: int) -> None:
        """Set a switch or the threshold, or start a high mark again from now.

        Raises
        ------
        ValueError
            Not a number that the driver could be given.
        DeviceError
            The attribute can't be set, or not to that.
        """
        if not 0 <= value <= _UINT64_MAX:
            raise ValueError(f"a pool's attribute lies between 0 and 2**64 - 1, found {value}")
        switch = _SWITCHES.get(attribute)
        if switch is not None:
            setattr(self, switch, bool(value))
        elif attribute is PoolAttribute.RELEASE_THRESHOLD:
            self.release_threshold_nbytes = value
        elif attribute in (PoolAttribute.RESERVED_CURRENT, PoolAttribute.USED_CURRENT):
            raise DeviceError(f"a pool's {attribute.value} can only be read")
        elif value:
            raise DeviceError(
                f"a pool's {attribute.value} can only be set to 0, to start again; found {value}"
            )
        elif attribute is PoolAttribute.RESERVED_HIGH:
            self._reserved_high = self.reserved_nbytes
        else:
            self._used_high = self._used

    def access_of(self, device_index: int) -> PoolAccess:
        """What a device may do with its memory."""
        if device_index == self.gpu.index or self.kind is HostKind.MANAGED:
            return PoolAccess.READ_WRITE
        return self._access.get(device_index, PoolAccess.NONE)

    def set_access(self, device_index: int, access: PoolAccess) -> None:
        """Say what a device may do with its memory, also what it hands out later."""
        if device_index == self.gpu.index and access is not PoolAccess.READ_WRITE:
            raise DeviceError(f"device {device_index} owns this pool: its access can't be revoked")
        self._access[device_index] = access

    # -- memory --------------------------------------------------------------------------

    def info(self) -> PoolInfo:
        return PoolInfo(
            self.reserved_nbytes,
            self._reserved_high,
            self._used,
            self._used_high,
            self.release_threshold_nbytes,
        )

    def take(self, nbytes: int, stream: SimStream) -> Block:
        """Hand a block to ``stream``; may submit a wait there (step 5).

        Raises
        ------
        OutOfDeviceMemory
            With the figures that explain it.
        """
        if self.is_destroyed:
            raise Closed("this memory pool was destroyed")
        size = round_up(nbytes)
        block = self._reuse(size, stream) or self._grow(size)
        if block is None and self.reuse_allow_internal_dependencies:
            block = self._borrow(size, stream)
        if block is None:
            raise OutOfDeviceMemory(self._describe_shortage(nbytes))
        block.used_nbytes = size
        block.generation += 1
        self._used += size
        self._used_high = max(self._used_high, self._used)
        return block

    def give(self, block: Block, stream: SimStream, position: int) -> None:
        """``block`` is freed on ``stream``, the free being its ``position``-th command."""
        self._shelve(block, stream, position)

    def _shelve(self, block: Block, freer: _Freer, position: int) -> None:
        self._used -= block.used_nbytes
        block.used_nbytes = 0
        block.free_position = position
        if self.is_destroyed:
            return
        shelf = self._free.get(block.capacity)
        if shelf is None:
            shelf = self._free[block.capacity] = {}
            insort(self._capacities, block.capacity)
        shelf.setdefault(freer, deque()).append(block)

    def take_back(self, block: Block) -> None:
        """The host says that nothing uses ``block`` any more."""
        self.gpu.memory.on_free(block)
        self._shelve(block, _HOST, 0)
        if self.is_destroyed:
            self._release(block)

    def on_free_run(self, block: Block) -> None:
        """The latest free of ``block`` has run on its stream."""
        if self.is_destroyed:
            self._release(block)

    def release_to(self, keep_nbytes: int) -> None:
        """Give blocks whose free has run back to the device, never going below the floor."""
        if self.reserved_nbytes <= keep_nbytes:
            return
        for capacity in reversed(self._capacities):
            for stream, blocks in list(self._free[capacity].items()):
                while blocks and blocks[0].free_position <= stream.num_done:
                    if self.reserved_nbytes - capacity < keep_nbytes:
                        break
                    self._release(blocks.popleft())
                if not blocks:
                    del self._free[capacity][stream]
        self._drop_empty_shelves()

    def destroy(self) -> None:
        """Refuse new allocations; memory goes back as it is freed."""
        self.release_to(0)
        self.is_destroyed = True
        # What is left on the shelves has a free underway, which releases it when it runs.
        self._free.clear()
        self._capacities.clear()
        self._leave_if_empty()

    def abandon(self) -> None:
        """Give everything back now, also what is in use: the device is being closed."""
        self.is_destroyed = True
        for block in self._blocks:
            self._memory.release(block)
        self._blocks.clear()
        self._free.clear()
        self._capacities.clear()
        self.reserved_nbytes = self._used = 0

    def _reuse(self, size: int, stream: SimStream) -> Block | None:
        shelf = self._free.get(size)
        if shelf is not None and stream in shelf:  # what a loop does over and over
            return self._unshelve(size, stream)
        first = bisect_left(self._capacities, size)
        fitting = self._capacities[first : first + _NUM_LOOKED_AT]
        capacities = [capacity for capacity in fitting if capacity <= 2 * size]
        for capacity in capacities:
            if stream in self._free[capacity]:
                return self._unshelve(capacity, stream)
        if self.reuse_follow_event_dependencies:
            seen = stream.seen
            for capacity, other, position in self._oldest(capacities):
                if seen.get(other.ordinal, 0) >= position:
                    return self._unshelve(capacity, other)
        for capacity, other, position in self._oldest(capacities):
            # What a synchronisation has proven may be used whatever is switched off.
            passed = other.num_done if self.reuse_allow_opportunistic else other.num_proven
            if passed >= position:
                return self._unshelve(capacity, other)
        return None

    def _oldest(self, capacities: list[int]) -> Iterator[tuple[int, _Freer, int]]:
        """The oldest free of each stream: its capacity, the stream, its place there."""
        for capacity in capacities:
            for freer, blocks in self._free[capacity].items():
                yield capacity, freer, blocks[0].free_position

    def _grow(self, size: int) -> Block | None:
        room = self._room()
        if room < size:
            self.release_to(max(0, self.reserved_nbytes - (size - room)))
            if self._room() < size:  # blocks come whole: go below what would do
                self.release_to(0)
            if self.kind is None:
                self.gpu.reclaim(size)
            if self._room() < size:
                return None
        block = self._memory.reserve(size, self)
        self._blocks[block] = None
        self.reserved_nbytes += size
        self._reserved_high = max(self._reserved_high, self.reserved_nbytes)
        return block

    def _room(self) -> int:
        room = self._memory.free_nbytes
        if self.max_nbytes:
            room = min(room, self.max_nbytes - self.reserved_nbytes)
        return room

    def _borrow(self, size: int, stream: SimStream) -> Block | None:
        for capacity in self._capacities[bisect_left(self._capacities, size) :]:
            for other in self._free[capacity]:
                block = self._unshelve(capacity, other)
                if not isinstance(other, _Host):
                    self.gpu.world.submit(Wait(stream, other, block.free_position))
                return block
        return None

    def _unshelve(self, capacity: int, stream: _Freer) -> Block:
        shelf = self._free[capacity]
        blocks = shelf[stream]
        block = blocks.popleft()
        if not blocks:
            del shelf[stream]
            if not shelf:
                self._drop_empty_shelves()
        return block

    def _drop_empty_shelves(self) -> None:
        for capacity in [c for c, shelf in self._free.items() if not shelf]:
            del self._free[capacity]
            self._capacities.remove(capacity)

    def _release(self, block: Block) -> None:
        self._memory.release(block)
        del self._blocks[block]
        self.reserved_nbytes -= block.capacity
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self.is_destroyed and not self._blocks:
            self.gpu.pools.remove(self)

    def _describe_shortage(self, nbytes: int) -> str:
        bound = f" of at most {self.max_nbytes}" if self.max_nbytes else ""
        held = (
            f"wanted {nbytes} bytes on simulated device {self.gpu.index}: the pool holds "
            f"{self.reserved_nbytes} bytes{bound}, {self._used} of them in use"
        )
        if self.kind is not None:
            return held
        return (
            f"{held}, and the device has {self._memory.free_nbytes} of "
            f"{self._memory.total_nbytes} bytes free; free arrays, or raise "
            "STREAMFLOW_SIM_MEMORY_NBYTES"
        )
