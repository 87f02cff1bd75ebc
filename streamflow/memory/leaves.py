"""Device memory of the driver's oldest kind."""

from __future__ import annotations

from streamflow.backends.base import Backend
from streamflow.memory.leaf import DeferringMemoryResource, padded
from streamflow.memory.space import Place

__all__ = ["CudaMemoryResource"]


class CudaMemoryResource(DeferringMemoryResource):
    """``cudaMalloc`` and ``cudaFree``: device memory that belongs to no pool.

    Parameters
    ----------
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Notes
    -----
    The driver's free waits for nothing where the memory is a pool's, and for the whole device
    where it isn't. Ours waits for the uses of that block only, and off the loop: it is not
    stream-ordered, since a freed block is handed to nobody before that. An allocation blocks its
    caller for as long as the driver's takes.

    Two for one device are equal.
    """

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        capacity = padded(nbytes, alignment)
        return place.backend.allocate_linear_blocking(capacity), capacity

    def _free_blocking(self, backend: Backend, base: int) -> None:
        backend.free_linear_blocking(base)
