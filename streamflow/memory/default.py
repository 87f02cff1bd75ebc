"""The resource that a device has where the program names none."""

from __future__ import annotations

import threading
import warnings

from streamflow.memory.async_pools import CudaAsyncMemoryResource
from streamflow.memory.leaves import CudaMemoryResource
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Space

__all__ = ["default_resource"]

_warned: set[int] = set()
_lock = threading.Lock()


def default_resource(space: Space) -> DeviceMemoryResource:
    """A new resource for a device: a stream-ordered pool of its own that keeps what it has.

    Where the device has no such pools: a ``PoolMemoryResource`` over a ``CudaMemoryResource``,
    with one ``RuntimeWarning`` for each device.
    """
    if space.backend.memory_support().has_pools:
        return CudaAsyncMemoryResource(device=space.index)
    from streamflow.memory.pool import PoolMemoryResource

    with _lock:
        is_new = space.index not in _warned
        _warned.add(space.index)
    if is_new:
        warnings.warn(
            f"device {space.index} has no stream-ordered memory pools: its memory comes from a "
            "PoolMemoryResource over a CudaMemoryResource",
            RuntimeWarning,
            stacklevel=2,
        )
    return PoolMemoryResource(CudaMemoryResource(device=space.index), device=space.index)
