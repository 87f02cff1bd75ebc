"""The address space of one simulated device.

Addresses lie far above what a process can map, so one is never a valid host pointer by
accident; every device has a range of its own. An address is never handed to a second
block, and blocks lie apart, so running off the end of one is seen. Other devices' memory and
the host's, which a device may reach as well, are looked up where they are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamflow.backends.sim import host_memory
from streamflow.backends.sim.block import (
    ALIGNMENT,
    Block,
    Bytes,
    IllegalAddress,
    map_host,
    round_up,
)

if TYPE_CHECKING:
    from streamflow.backends.sim.machine import Gpu
    from streamflow.backends.sim.pool import SimPool
    from streamflow.backends.sim.uses import Shadow

__all__ = ["AddressSpace", "Block", "IllegalAddress", "round_up"]

_RANGE_SHIFT = 52
"""Each device owns 4 PiB of addresses; bit 52 and up are outside any host's user space."""
_EDGE_NBYTES = 4096
_ALLOCATED = 0xA5
_FREED = 0xDD


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
    gpus : mapping of int to Gpu
        The devices whose memory it may reach, by ordinal.
    """

    def __init__(
        self,
        index: int,
        total_nbytes: int,
        poison_nbytes: int,
        gpus: Mapping[int, Gpu] | None = None,
    ) -> None:
        self.index = index
        self.total_nbytes = total_nbytes
        self.reserved_nbytes = 0
        self._poison_nbytes = poison_nbytes
        self._gpus: Mapping[int, Gpu] = {} if gpus is None else gpus
        self._next = (index + 1) << _RANGE_SHIFT
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []  # ascending: addresses only grow

    @property
    def free_nbytes(self) -> int:
        return self.total_nbytes - self.reserved_nbytes

    def reserve(self, capacity: int, pool: SimPool | None) -> Block:
        """Take ``capacity`` bytes (a multiple of 512) from the device for ``pool``."""
        backing = map_host(capacity)
        address = self._next
        self._next += capacity + ALIGNMENT
        block = Block(address, capacity, backing, pool, self.index)
        self._blocks[address] = block
        self._addresses.append(address)
        self.reserved_nbytes += capacity
        return block

    def block_at(self, address: int) -> Block | None:
        """The block that starts at ``address``, here, on another device or on the host."""
        block = self.nearest(address)
        return block if block is not None and block.address == address else None

    def blocks(self) -> list[Block]:
        """Every block of the device's own, by address."""
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

    def bytes_at(self, address: int, nbytes: int, is_write: bool = True) -> Bytes:
        """The memory behind ``nbytes`` bytes from ``address``, writable.

        Raises
        ------
        IllegalAddress
            Some of it is not allocated at this moment, or not to be touched from here.
        """
        block, offset = self._find(address, nbytes, is_write)
        return block.backing[offset : offset + nbytes]

    def array_at(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        nbytes: int,
        is_write: bool = True,
    ) -> npt.NDArray[Any]:
        """An ndarray over memory, writable; checked like :meth:`bytes_at`."""
        if not nbytes:  # no memory behind it: any address will do
            return np.empty(shape, dtype)
        block, offset = self._find(address, nbytes, is_write)
        if address % dtype.alignment:
            raise IllegalAddress(f"misaligned address {address:#x} for {dtype}")
        return np.ndarray(shape, dtype, block.backing, offset)

    def shadow_at(self, address: int) -> tuple[Shadow, int] | None:
        """What the race checker knows of the memory at ``address``, and the offset there."""
        block = self.nearest(address)
        if block is None or block.shadow is None:
            return None
        return block.shadow, address - block.address

    def nearest(self, address: int) -> Block | None:
        """The block that ``address`` lies in, or the last one before it."""
        block = self._blocks.get(address)
        if block is None:
            owner = (address >> _RANGE_SHIFT) - 1
            if owner == self.index:
                at = bisect_right(self._addresses, address) - 1
                return self._blocks[self._addresses[at]] if at >= 0 else None
            if owner < 0:
                return host_memory.find(address)
            gpu = self._gpus.get(owner)
            return None if gpu is None else gpu.memory.nearest(address)
        return block

    def _find(self, address: int, nbytes: int, is_write: bool) -> tuple[Block, int]:
        block = self.nearest(address)
        # Past the end but within the gap to the next block counts as out of bounds.
        if block is None or address - block.address >= block.capacity + ALIGNMENT:
            raise IllegalAddress(f"illegal address {address:#x}: never allocated on this device")
        return block, block.check(address, nbytes, self.index, is_write)

    def _poison(self, block: Block, pattern: int) -> None:
        backing, nbytes = block.backing, block.nbytes
        if nbytes <= self._poison_nbytes:
            backing[:nbytes] = pattern
        else:
            backing[:_EDGE_NBYTES] = pattern
            backing[nbytes - _EDGE_NBYTES : nbytes] = pattern
