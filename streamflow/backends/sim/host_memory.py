"""Simulated memory that host and devices both reach: one table for the process.

It outlives every world. Addresses are the host's own, so that it can be touched there.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right, insort
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from streamflow.backends.sim.block import Block, Bytes
from streamflow.backends.sim.uses import Shadow
from streamflow.errors import DeviceError, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.pool import SimPool

__all__ = [
    "HostBlock",
    "HostKind",
    "HostSpace",
    "allocate",
    "find",
    "free",
    "hold",
    "num_blocks",
]

_PAGE_NBYTES = mmap.PAGESIZE

_lock = threading.Lock()
_blocks: dict[int, HostBlock] = {}
_addresses: list[int] = []


class HostKind(Enum):
    """Who gave memory out."""

    PINNED = "pinned"
    MANAGED = "managed"
    SYSTEM = "system"


class HostBlock(Block):
    """Host memory that devices may touch.

    Attributes
    ----------
    kind : HostKind
    num_uses : int
        Unfinished copies that :func:`hold` it.
    """

    __slots__ = ("kind", "num_uses")

    shadow: Shadow

    def __init__(self, kind: HostKind, nbytes: int, alignment: int, pool: SimPool | None) -> None:
        spare = max(0, alignment - _PAGE_NBYTES)
        try:
            mapped: Bytes = np.frombuffer(mmap.mmap(-1, nbytes + spare), np.uint8)
        except (MemoryError, OSError, ValueError, OverflowError) as error:
            raise OutOfDeviceMemory(
                f"the host could not map {nbytes} bytes of {kind.value} memory"
            ) from error
        start = -int(mapped.ctypes.data) % max(1, alignment)
        backing = mapped[start : start + nbytes]
        super().__init__(int(backing.ctypes.data), nbytes, backing, pool, None)
        self.kind = kind
        self.num_uses = 0
        self.shadow = Shadow(nbytes)  # for the race checker
        if pool is None:
            self.shadow.by_world = {}
            self.nbytes = self.used_nbytes = nbytes
            self.is_live = True

    def bytes_at(self, address: int, nbytes: int) -> Bytes:
        """A part, for a copy that runs; whose device needs no access, as on an H200."""
        if self.pool is not None:
            self.check(address, nbytes, self.pool.gpu.index, True)
        offset = address - self.address
        return self.backing[offset : offset + nbytes]

    def drop(self) -> None:
        """End one use that :func:`hold` began."""
        with _lock:
            self.num_uses -= 1


class HostSpace:
    """Where a pool that lies on the host, or a managed one, gets its memory."""

    free_nbytes = total_nbytes = 1 << 62

    def __init__(self, kind: HostKind) -> None:
        self._kind = kind

    def reserve(self, capacity: int, pool: SimPool) -> HostBlock:
        """Take ``capacity`` bytes for ``pool``."""
        return _register(HostBlock(self._kind, capacity, 1, pool))

    def release(self, block: Block) -> None:
        """Give a block back; touching its addresses faults from now on."""
        block.is_live = False
        with _lock:
            _forget(block.address)


def allocate(nbytes: int, kind: HostKind = HostKind.PINNED, alignment: int = 1) -> int:
    """The address of ``nbytes`` new bytes, at a multiple of ``alignment``, a power of two.

    Raises
    ------
    OutOfDeviceMemory
        The host has not that much.
    """
    if nbytes < 1:
        raise ValueError(f"{kind.value} memory needs at least 1 byte, found {nbytes}")
    return _register(HostBlock(kind, nbytes, alignment, None)).address


def free(address: int, kind: HostKind = HostKind.PINNED) -> HostBlock:
    """Unregister a block, and return it; its memory goes once no ndarray over it is left.

    Raises
    ------
    DeviceError
        Not the address of a block of that kind, or an unfinished copy uses it (rule R6).
    """
    with _lock:
        block = _blocks.get(address)
        if block is None or block.kind is not kind or block.pool is not None:
            raise DeviceError(f"{address:#x} is not the address of a {kind.value} block")
        if block.num_uses:
            raise DeviceError(
                f"{kind.value} block {address:#x} of {block.nbytes} bytes is used by an "
                "unfinished copy"
            )
        block.is_live = False
        _forget(address)
        return block


def find(address: int) -> HostBlock | None:
    """The block that ``address`` lies in."""
    with _lock:
        return _find(address)


def hold(address: int, nbytes: int) -> HostBlock:
    """The block that holds these bytes, marked as used until its ``drop``.

    Raises
    ------
    DeviceError
        They do not lie in one block.
    """
    with _lock:
        block = _find(address)
        if block is None or address + nbytes > block.address + block.capacity:
            raise DeviceError(
                "the simulator only copies from and to pinned memory, or other memory that "
                f"devices reach: {nbytes} bytes at {address:#x} are not inside one pinned block"
            )
        block.num_uses += 1
        return block


def num_blocks() -> int:
    """How many blocks the process holds."""
    return len(_addresses)


def _register(block: HostBlock) -> HostBlock:
    with _lock:
        _blocks[block.address] = block
        insort(_addresses, block.address)
    return block


def _find(address: int) -> HostBlock | None:
    """Needs the lock."""
    block = _blocks.get(address)
    if block is None:
        at = bisect_right(_addresses, address) - 1
        if at >= 0:
            block = _blocks[_addresses[at]]
            if address >= block.address + block.capacity:
                return None
    return block


def _forget(address: int) -> None:
    """Needs the lock."""
    del _blocks[address]
    del _addresses[bisect_right(_addresses, address) - 1]
