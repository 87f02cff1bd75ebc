"""A stretch of memory that simulated devices reach, and the host memory behind it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamflow.backends.memory import PoolAccess
from streamflow.errors import OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.pool import SimPool
    from streamflow.backends.sim.uses import Shadow

__all__ = ["ALIGNMENT", "Block", "Bytes", "IllegalAddress", "map_host", "round_up"]

ALIGNMENT = 512
_LAZY_NBYTES = 64 << 20
"""Above this, memory is mapped without reserving it: only pages that are touched cost."""

Bytes = npt.NDArray[np.uint8]


class IllegalAddress(Exception):
    """An op touched memory that isn't there, or isn't its. Becomes a sticky fault."""


def round_up(nbytes: int) -> int:
    """The next multiple of the allocation granularity."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """A stretch of memory, of one pool or allocated by itself.

    ``is_live`` and ``nbytes`` change when an allocation or a free *runs* on its stream:
    they are what a kernel at that moment may touch. ``used_nbytes`` is what is counted
    from the calls, ``generation`` how often it was handed out, ``free_position`` the latest
    free's place in its stream. ``shadow`` is the race checker's. ``device_index`` is None for
    the host's memory, ``pool`` for what belongs to none.
    """

    __slots__ = (
        "address",
        "backing",
        "capacity",
        "device_index",
        "free_position",
        "generation",
        "is_live",
        "nbytes",
        "pool",
        "shadow",
        "used_nbytes",
    )

    def __init__(
        self,
        address: int,
        capacity: int,
        backing: Bytes,
        pool: SimPool | None,
        device_index: int | None,
    ) -> None:
        self.address = address
        self.capacity = capacity
        self.backing = backing
        self.pool = pool
        self.device_index = device_index
        self.nbytes = 0
        self.used_nbytes = 0
        self.generation = 0
        self.is_live = False
        self.free_position = 0
        self.shadow: Shadow | None = None

    def check(self, address: int, nbytes: int, device_index: int, is_write: bool) -> int:
        """Where ``address`` lies in here, if that device may touch ``nbytes`` from there now.

        Raises
        ------
        IllegalAddress
            It may not, or some of it is not allocated at this moment.
        """
        if self.device_index != device_index:
            self._check_access(address, device_index, is_write)
        offset = address - self.address
        if not self.is_live:
            raise IllegalAddress(
                f"illegal address {address:#x}: its allocation has not run yet, or it was freed"
            )
        if offset + nbytes > self.nbytes:
            raise IllegalAddress(
                f"illegal address: {nbytes} bytes from {address:#x} (offset {offset}) run past "
                f"the end of an allocation of {self.nbytes} bytes"
            )
        return offset

    def _check_access(self, address: int, device_index: int, is_write: bool) -> None:
        if self.pool is not None:
            access = self.pool.access_of(device_index)
        elif self.device_index is None:
            return  # pinned, managed and system memory are everybody's
        else:
            access = PoolAccess.NONE
        if access is PoolAccess.NONE or (is_write and access is PoolAccess.READ):
            whose = "the host" if self.device_index is None else f"device {self.device_index}"
            what = "may only read" if access is PoolAccess.READ else "has no access to"
            raise IllegalAddress(
                f"illegal address {address:#x}: memory of {whose}, which device {device_index} "
                f"{what}"
            )


def map_host(nbytes: int) -> Bytes:
    """Host memory to stand for a device's.

    Raises
    ------
    OutOfDeviceMemory
        The host has not that much.
    """
    try:
        return _map(nbytes)
    except (MemoryError, OSError, ValueError, OverflowError) as error:
        raise OutOfDeviceMemory(
            f"the simulator's host could not map {nbytes} bytes to stand for device memory"
        ) from error


def _map(nbytes: int) -> Bytes:
    if nbytes <= _LAZY_NBYTES:
        return np.empty(nbytes, np.uint8)
    if hasattr(mmap, "MAP_ANONYMOUS"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
