"""Simulated memory that host and devices both reach: one table for the process.

It outlives every world. Addresses are the host's own, so that it can be touched there.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right, insort
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from streamflow.backends.sim.block import Block, Bytes, IllegalAddress
from streamflow.backends.sim.uses import Shadow
from streamflow.errors import DeviceError, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.pool import SimPool

__all__ = [
    "HostBlock",
    "HostKind",
    "HostSpace",
    "allocate",
    "check_locked",
    "find",
    "free",
    "hold",
    "num_blocks",
    "register",
]

_PAGE_NBYTES = mmap.PAGESIZE

_lock = threading.Lock()
_blocks: dict[int, HostBlock] = {}
_addresses: list[int] = []


class HostKind(Enum):
    """Who gave memory out."""

    PINNED = "pinned"
    REGISTERED = "registered"
    """Nobody but the program, which had it page-locked."""
    MANAGED = "managed"
    SYSTEM = "system"


class HostBlock(Block):
    """Host memory that devices may touch.

    Attributes
    ----------
    kind : HostKind
    is_read_only : bool
        Devices only read it.
    num_uses : int
        Unfinished copies that :func:`hold` it.
    """

    __slots__ = ("is_read_only", "kind", "num_uses")

    shadow: Shadow

    def __init__(
        self, kind: HostKind, backing: Bytes, pool: SimPool | None, is_read_only: bool = False
    ) -> None:
        nbytes = backing.nbytes
        super().__init__(int(backing.ctypes.data), nbytes, backing, pool, None)
        self.kind = kind
        self.is_read_only = is_read_only
        self.num_uses = 0
        self.shadow = Shadow(nbytes)  # for the race checker
        if pool is None:
            self.shadow.by_world = {}
            self.nbytes = self.used_nbytes = nbytes
            self.is_live = True

    def check(self, address: int, nbytes: int, device_index: int, is_write: bool) -> int:
        if is_write and self.is_read_only:
            raise IllegalAddress(
                f"illegal address {address:#x}: the host has this memory mapped for reading only"
            )
        return super().check(address, nbytes, device_index, is_write)

    def bytes_at(self, address: int, nbytes: int, is_write: bool = False) -> Bytes:
        """A part, for a copy that runs; whose device needs no access, as on an H200."""
        if self.pool is not None:
            self.check(address, nbytes, self.pool.gpu.index, True)
        elif is_write and self.is_read_only:
            self.check(address, nbytes, 0, True)
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
        return _add(HostBlock(self._kind, _map(self._kind, capacity, 1), pool))

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
    return _add(HostBlock(kind, _map(kind, nbytes, alignment), None)).address


def register(address: int, nbytes: int, is_read_only: bool) -> None:
    """Take memory of the program's own in; it stays the program's, which keeps it.

    Raises
    ------
    ValueError
        No bytes, or no address.
    DeviceError
        Some of it is known already.
    """
    if nbytes < 1 or address < 1:
        raise ValueError(f"page-locking needs memory, found {nbytes} bytes at {address:#x}")
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    block = HostBlock(HostKind.REGISTERED, np.frombuffer(memory, np.uint8), None, is_read_only)
    with _lock:
        last = _find_last(address + nbytes - 1)
        if last is not None and last.address + last.capacity > address:
            raise DeviceError(
                f"some of the {nbytes} bytes at {address:#x} are in a {last.kind.value} block of "
                f"{last.capacity} bytes at {last.address:#x} already"
            )
        _add_locked(block)


def check_locked(address: int, nbytes: int) -> None:
    """Raise unless these bytes are page-locked.

    Raises
    ------
    DeviceError
        Some of them are not.
    """
    block = find(address)
    if (
        block is None
        or block.kind not in (HostKind.PINNED, HostKind.REGISTERED)
        or address + nbytes > block.address + block.capacity
    ):
        raise DeviceError(f"{nbytes} bytes at {address:#x} are not page-locked memory")


def free(address: int, kind: HostKind = HostKind.PINNED) -> HostBlock:
    """Forget a block, and return it; memory of ours goes once no ndarray over it is left.

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


def _map(kind: HostKind, nbytes: int, alignment: int) -> Bytes:
    spare = max(0, alignment - _PAGE_NBYTES)
    try:
        mapped: Bytes = np.frombuffer(mmap.mmap(-1, nbytes + spare), np.uint8)
    except (MemoryError, OSError, ValueError, OverflowError) as error:
        raise OutOfDeviceMemory(
            f"the host could not map {nbytes} bytes of {kind.value} memory"
        ) from error
    start = -int(mapped.ctypes.data) % max(1, alignment)
    return mapped[start : start + nbytes]


def _add(block: HostBlock) -> HostBlock:
    with _lock:
        _add_locked(block)
    return block


def _add_locked(block: HostBlock) -> None:
    """Needs the lock."""
    _blocks[block.address] = block
    insort(_addresses, block.address)


def _find(address: int) -> HostBlock | None:
    """Needs the lock."""
    block = _blocks.get(address) or _find_last(address)
    if block is None or address >= block.address + block.capacity:
        return None
    return block


def _find_last(address: int) -> HostBlock | None:
    """The last block that begins by ``address``. Needs the lock."""
    at = bisect_right(_addresses, address) - 1
    return _blocks[_addresses[at]] if at >= 0 else None


def _forget(address: int) -> None:
    """Needs the lock."""
    del _blocks[address]
    del _addresses[bisect_right(_addresses, address) - 1]
