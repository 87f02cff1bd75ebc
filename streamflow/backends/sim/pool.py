"""Stream-ordered pools: which memory an allocation gets, and what a pool keeps.

An allocation is served, in this order, by (1) a block freed on the same stream; (2) one
freed on a stream that the allocating one has waited for since; (3) one whose free has
run; (4) new memory; (5) one whose free is pending, with a wait for it. Steps 2, 3 and 5
can each be switched off, as in the driver.

Source: CUDA guide, stream-ordered memory allocator, "Reuse policies".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING

from streamflow.backends.base import PoolInfo
from streamflow.backends.sim.command import Wait
from streamflow.backends.sim.memory import AddressSpace, Block, round_up
from streamflow.errors import Closed, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.machine import Gpu
    from streamflow.backends.sim.stream import SimStream

__all__ = ["SimPool"]


class SimPool:
    """A pool of one device. Every method runs under the world's lock.

    Blocks are not split or joined: a free block serves a request of at least half its
    size. A pool that runs short gives completed free blocks of other sizes back to the
    device first, so nothing is ever lost to fragmentation, as with the driver's own
    remapping.

    Attributes
    ----------
    number : int
        Counts the pools of the device, from 0.
    reuse_follow_event_dependencies, reuse_allow_opportunistic,
    reuse_allow_internal_dependencies : bool
        Steps 2, 3 and 5 above.
    """

    def __init__(self, gpu: Gpu, release_threshold_nbytes: int, max_nbytes: int) -> None:
        if release_threshold_nbytes < 0 or max_nbytes < 0:
            raise ValueError("a pool's threshold and size cannot be negative")
        self.gpu = gpu
        self.number = gpu.next_pool()
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
        self._memory: AddressSpace = gpu.memory
        self._blocks: dict[Block, None] = {}  # ordered: closing is the same in every run
        # capacity -> stream of the free -> blocks, oldest free first. Only the oldest of
        # a stream needs a look: positions ascend.
        self._free: dict[int, dict[SimStream, deque[Block]]] = {}
        self._capacities: list[int] = []

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
        self._used -= block.used_nbytes
        block.used_nbytes = 0
        block.free_position = position
        if self.is_destroyed:
            return
        shelf = self._free.get(block.capacity)
        if shelf is None:
            shelf = self._free[block.capacity] = {}
            insort(self._capacities, block.capacity)
        shelf.setdefault(stream, deque()).append(block)

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
        first = bisect_left(self._capacities, size)
        for capacity in self._capacities[first : first + 8]:
            if capacity > 2 * size:
                break
            shelf = self._free[capacity]
            if stream in shelf:
                return self._unshelve(capacity, stream)
            for other, blocks in shelf.items():
                position = blocks[0].free_position
                if (
                    self.reuse_follow_event_dependencies
                    and stream.seen.get(other.ordinal, 0) >= position
                ):
                    return self._unshelve(capacity, other)
            for other, blocks in shelf.items():
                # What a synchronisation has proven may be used whatever is switched off.
                passed = other.num_done if self.reuse_allow_opportunistic else other.num_proven
                if passed >= blocks[0].free_position:
                    return self._unshelve(capacity, other)
        return None

    def _grow(self, size: int) -> Block | None:
        room = self._room()
        if room < size:
            self.release_to(max(0, self.reserved_nbytes - (size - room)))
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
                self.gpu.world.submit(Wait(stream, other, block.free_position))
                return block
        return None

    def _unshelve(self, capacity: int, stream: SimStream) -> Block:
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
        if self.is_destroyed and not self._blocks:
            self.gpu.pools.remove(self)

    def _describe_shortage(self, nbytes: int) -> str:
        bound = f" of at most {self.max_nbytes}" if self.max_nbytes else ""
        return (
            f"wanted {nbytes} bytes on simulated device {self.gpu.index}: the pool holds "
            f"{self.reserved_nbytes} bytes{bound}, {self._used} of them in use, and the device "
            f"has {self._memory.free_nbytes} of {self._memory.total_nbytes} bytes free; free "
            "arrays, or raise STREAMFLOW_SIM_MEMORY_NBYTES"
        )
