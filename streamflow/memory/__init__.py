"""Host and device memory between the scheduler and the runtime."""

from __future__ import annotations

from streamflow.memory.arena import ArenaMemoryResource
from streamflow.memory.binning import BinningMemoryResource
from streamflow.memory.fixed_size import FixedSizeMemoryResource
from streamflow.memory.pool import PoolMemoryResource
from streamflow.memory.suballocator import SubAllocatorInfo

__all__ = [
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "FixedSizeMemoryResource",
    "PoolMemoryResource",
    "SubAllocatorInfo",
]
