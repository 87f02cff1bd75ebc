"""Where arrays come from on a device that has no stream-ordered pools."""

from __future__ import annotations

import threading
import warnings

from streamflow.memory.leaves import CudaMemoryResource
from streamflow.memory.pool import PoolMemoryResource

__all__ = ["resource_without_pools"]

_warned: set[int] = set()
_lock = threading.Lock()


def resource_without_pools(index: int) -> PoolMemoryResource:
    """A pool of our own over ``cudaMalloc``, with one ``RuntimeWarning`` for each device."""
    with _lock:
        is_new = index not in _warned
        _warned.add(index)
    if is_new:
        warnings.warn(
            f"device {index} has no stream-ordered memory pools: its arrays come from a "
            "PoolMemoryResource over a CudaMemoryResource",
            RuntimeWarning,
            stacklevel=2,
        )
    return PoolMemoryResource(CudaMemoryResource(device=index), device=index)
