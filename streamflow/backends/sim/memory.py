"""The address space of one simulated device, and the host memory behind it.

Addresses lie far above what a process can map, so one is never a valid host pointer by
accident; every device has a range of its own. An address is never handed to a second
block, and blocks lie apart, so running off the end of one is seen.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamflow.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.pool import SimPool
    from streamflow.backends.sim.uses import Shadow

__all__ = ["ALIGNMENT", "AddressSpace", "Block", "IllegalAddress", "round_up"]

ALIGNMENT = 512
_RANGE_SHIFT = 52
"""Each device owns 4 PiB of addresses; bit 52 and up are outside any host's user space."""
_LAZY_NBYTES = 64 << 20
"""Above this, memory is mapped without reserving it: only pages that are touched cost."""
_EDGE_NBYTES = 4096
_ALLOCATED = 0xA5
_FREED = 0xDD

_Bytes = npt.NDArray[np.uint8]


class IllegalAddress(Exception):
    """An op touched device memory that isn't there. Becomes a sticky fault."""


def round_up(nbytes: int) -> int:
    """The next multiple of the allocation granularity."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """A stretch of device memory owned by one pool.

    ``is_live`` and ``nbytes`` change when an allocation or a free *runs* on its stream:
    they are what a kernel at that moment may touch. ``used_nbytes`` is what the pool counts
    from the calls, ``generation`` how often it was handed out, ``free_position`` the latest
    free's place in its stream. ``shadow`` is the race checker's.
    """

    __slots__ = (
        "address",
        "backing",
        "capacity",
        "free_position",
        "generation",
        "is_live",
        "nbytes",
        "pool",
        "shadow",
        "used_nbytes",
    )

    def __init__(self, address: int, capacity: int, backing: _Bytes, pool: SimPool) -> None:
        self.address = address
        self.capacity = capacity
        self.backing = backing
        self.pool = pool
        self.nbytes = 0
        self.used_nbytes = 0
        self.generation = 0
        self.is_live = False
        self.free_position = 0
        self.shadow: Shadow | None = None


class AddressSpace:
    """Blocks by address, and how much of the device they take.

    Parameters
    ----------
    index : int
        Device ordinal; picks the range of addresses.
    total_nbytes : int
        Memory of the device.
    poison_nbytes : int
        Blocks up to this size are overwritten whole when allocated (0xA5) and freed
        (0xDD); larger ones on their first and last 4 KiB only.
    """

    def __init__(self, index: int, total_nbytes: int, poison_nbytes: int) -> None:
        self.total_nbytes = total_nbytes
        self.reserved_nbytes = 0
        self._poison_nbytes = poison_nbytes
        self._next = (index + 1) << _RANGE_SHIFT
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # ascending: addresses only grow

    @property
    def free_nbytes(self) -> int:
        return self.total_nbytes - self.reserved_nbytes

    def reserve(self, capacity: int, pool: SimPool) -> Block:
        """Take ``capacity`` bytes (a multiple of 512) from the device for ``pool``."""
        try:
            backing = _map_host(capacity)
        except (MemoryError, OSError, ValueError, OverflowError) as error:
            raise OutOfDeviceMemory(
                f"the simulator's host could not map {capacity} bytes to stand for device memory"
            ) from error
        address = self._next
        self._next += capacity + ALIGNMENT
        block = Block(address, capacity, backing, pool)
        self._blocks[address] = block
        self._addresses.append(address)
        self.reserved_nbytes += capacity
        return block

    def block_at(self, address: int) -> Block | None:
        """The block that starts at ``address``."""
        return self._blocks.get(address)

    def blocks(self) -> list[Block]:
        """Every block, by address."""
        return [self._blocks[address] for address in self._addresses]

    def release(self, block: Block) -> None:
        """Give a block back to the device; touching its addresses faults from now on."""
        del self._blocks[block.address]
        del self._addresses[bisect_right(self._addresses, block.address) - 1]
        self.reserved_nbytes -= block.capacity
        block.is_live = False

    def on_allocate(self, block: Block, nbytes: int) -> None:
        """An allocation runs on its stream."""
        block.is_live = True
        block.nbytes = nbytes
        self._poison(block, _ALLOCATED)

    def on_free(self, block: Block) -> None:
        """A free runs on its stream."""
        block.is_live = False
        self._poison(block, _FREED)

    def bytes_at(self, address: int, nbytes: int) -> _Bytes:
        """The memory behind ``nbytes`` bytes from ``address``, writable.

        Raises
        ------
        IllegalAddress
            Some of it is not allocated at this moment.
        """
        block, offset = self._find(address, nbytes)
        return block.backing[offset : offset + nbytes]

    def array_at(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int
    ) -> npt.NDArray[Any]:
        """An ndarray over device memory, writable; checked like :meth:`bytes_at`."""
        if not nbytes:  # no memory behind it: any address will do
            return np.empty(shape, dtype)
        block, offset = self._find(address, nbytes)
        if address % dtype.alignment:
            raise IllegalAddress(f"misaligned address {address:#x} for {dtype}")
        return np.ndarray(shape, dtype, block.backing, offset)

    def shadow_at(self, address: int) -> tuple[Shadow, int] | None:
        """What the race checker knows of the memory at ``address``, and the offset there."""
        block = self._nearest(address)
        if block is None or block.shadow is None:
            return None
        return block.shadow, address - block.address

    def _nearest(self, address: int) -> Block | None:
        block = self._blocks.get(address)
        if block is None:
            at = bisect_right(self._addresses, address) - 1
            if at >= 0:
                block = self._blocks[self._addresses[at]]
        return block

    def _find(self, address: int, nbytes: int) -> tuple[Block, int]:
        block = self._nearest(address)
        # Past the end but within the gap to the next block counts as out of bounds.
        if block is None or address - block.address >= block.capacity + ALIGNMENT:
            raise IllegalAddress(f"illegal address {address:#x}: never allocated on this device")
        offset = address - block.address
        if not block.is_live:
            raise IllegalAddress(
                f"illegal address {address:#x}: its allocation has not run yet, or it was freed"
            )
        if offset + nbytes > block.nbytes:
            raise IllegalAddress(
                f"illegal address: {nbytes} bytes from {address:#x} (offset {offset}) run past "
                f"the end of an allocation of {block.nbytes} bytes"
            )
        return block, offset

    def _poison(self, block: Block, pattern: int) -> None:
        backing, nbytes = block.backing, block.nbytes
        if nbytes <= self._poison_nbytes:
            backing[:nbytes] = pattern
        else:
            backing[:_EDGE_NBYTES] = pattern
            backing[nbytes - _EDGE_NBYTES : nbytes] = pattern


def _map_host(nbytes: int) -> _Bytes:
    if nbytes <= _LAZY_NBYTES:
        return np.empty(nbytes, np.uint8)
    if hasattr(mmap, "MAP_ANONYMOUS"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
