"""What every stretch of a simulated device's memory is used for at this moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import Allocate, Free

if TYPE_CHECKING:
    from streamflow.backends.sim.machine import Gpu

__all__ = ["MemoryRow", "MemoryState", "read_memory_map"]


class MemoryState(Enum):
    """How far a block has come: allocations and frees run in the order of their streams."""

    ALLOCATING = "allocation not run yet"
    LIVE = "live"
    FREEING = "free pending"
    FREED = "freed, reusable"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One block of device memory.

    Attributes
    ----------
    address : int
        Where it begins.
    nbytes : int
        In use, as the pool counts it: the bytes asked for, rounded up to 512; 0 from the call
        that frees it.
    capacity_nbytes : int
        What it takes of the device.
    state : MemoryState
    pool : int or None
        Its pool's number on the device, in the order they were made. A ``Device``'s own is
        the first that it makes; -1 is the device's default pool. None for memory of no pool.
    generation : int
        How often it was handed out.
    """

    address: int
    nbytes: int
    capacity_nbytes: int
    state: MemoryState
    pool: int | None
    generation: int

    def __str__(self) -> str:
        whose = "no pool" if self.pool is None else f"pool {self.pool}"
        return (
            f"{self.address:#x} {self.nbytes:>12} of {self.capacity_nbytes:>12} bytes, "
            f"{self.state.value} ({whose}, use {self.generation})"
        )


def read_memory_map(gpu: Gpu) -> tuple[MemoryRow, ...]:
    """Every block by address; the world's lock is held."""
    # What has not run is in the queues; if an earlier use is, the latest is too. A block's own
    # flag tells of the latest that has run.
    queued = gpu.world.queued(gpu)
    allocating = {command.block for command in queued if isinstance(command, Allocate)}
    freeing = {command.block for command in queued if isinstance(command, Free)}
    rows = []
    for block in gpu.memory.blocks():
        if block.used_nbytes:
            state = MemoryState.ALLOCATING if block in allocating else MemoryState.LIVE
        else:
            state = MemoryState.FREEING if block in freeing else MemoryState.FREED
        rows.append(
            MemoryRow(
                block.address,
                block.used_nbytes,
                block.capacity,
                state,
                None if block.pool is None else block.pool.number,
                block.generation,
            )
        )
    return tuple(rows)
