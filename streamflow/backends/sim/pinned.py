"""Simulated page-locked memory: one table for the process, which outlives every world."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt

from streamflow.backends.sim.uses import Shadow
from streamflow.errors import DeviceError

__all__ = ["PinnedBlock", "allocate", "free", "hold", "num_blocks"]

_lock = threading.Lock()
_blocks: dict[int, PinnedBlock] = {}
_addresses: list[int] = []


class PinnedBlock:
    """Page-aligned host memory that copies may touch."""

    __slots__ = ("address", "array", "nbytes", "num_uses", "shadow")

    def __init__(self, nbytes: int) -> None:
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.address = int(self.array.ctypes.data)
        self.nbytes = nbytes
        self.num_uses = 0
        self.shadow = Shadow(nbytes)  # for the race checker

    def bytes_at(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        offset = address - self.address
        return self.array[offset : offset + nbytes]

    def drop(self) -> None:
        """End one use that :func:`hold` began."""
        with _lock:
            self.num_uses -= 1


def allocate(nbytes: int) -> int:
    """The address of ``nbytes`` new bytes of page-locked memory."""
    if nbytes < 1:
        raise ValueError(f"pinned memory needs at least 1 byte, found {nbytes}")
    block = PinnedBlock(nbytes)
    with _lock:
        _blocks[block.address] = block
        insort(_addresses, block.address)
    return block.address


def free(address: int) -> None:
    """Unregister a block; its memory goes once no ndarray over it is left.

    Raises
    ------
    DeviceError
        Not the address of a pinned block, or an unfinished copy uses it (rule R6).
    """
    with _lock:
        block = _blocks.get(address)
        if block is None:
            raise DeviceError(f"{address:#x} is not the address of a pinned block")
        if block.num_uses:
            raise DeviceError(
                f"pinned block {address:#x} of {block.nbytes} bytes is used by an unfinished copy"
            )
        del _blocks[address]
        del _addresses[bisect_right(_addresses, address) - 1]


def hold(address: int, nbytes: int) -> PinnedBlock:
    """The block that holds these bytes, marked as used until its ``drop``.

    Raises
    ------
    DeviceError
        They do not lie in one pinned block.
    """
    with _lock:
        block = _blocks.get(address)
        if block is None:
            at = bisect_right(_addresses, address) - 1
            if at >= 0:
                block = _blocks[_addresses[at]]
        if block is None or address + nbytes > block.address + block.nbytes:
            raise DeviceError(
                "the simulator only copies from and to pinned memory: "
                f"{nbytes} bytes at {address:#x} are not inside one pinned block"
            )
        block.num_uses += 1
        return block


def num_blocks() -> int:
    """How many blocks the process holds."""
    return len(_addresses)
