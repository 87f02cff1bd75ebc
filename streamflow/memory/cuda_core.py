"""Resources of cuda.core's used as ours, and ours used as cuda.core's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamflow.backends.base import Backend
from streamflow.errors import BackendUnavailable
from streamflow.memory.blocks import Piece
from streamflow.memory.current import find_space
from streamflow.memory.leaf import DeferringMemoryResource
from streamflow.memory.resource import DeviceMemoryResource, checked_resource
from streamflow.memory.space import Place, Space

if TYPE_CHECKING:
    from streamflow.backends.cuda.resources import Upstream

__all__ = ["CudaCoreMemoryResource", "from_cuda_core", "to_cuda_core"]


def to_cuda_core(resource: DeviceMemoryResource) -> Any:
    """``resource`` as a ``cuda.core.MemoryResource``, for cuda.core's code to allocate from.

    Parameters
    ----------
    resource : DeviceMemoryResource
        Of an open CUDA device.

    Returns
    -------
    cuda.core.MemoryResource
        Its buffers keep ``resource`` alive.

    Ordering
    --------
    A buffer is usable on the stream it was allocated on. Closed or collected, it is freed by the
    next call of a resource of that device, in the order of the buffer's stream: cuda.core frees
    from finalisers, and those never call the driver (rule R12).

    Raises
    ------
    TypeError
        Not a resource.
    BackendUnavailable
        A simulated device, whose memory cuda.core can't reach.
    Closed
        The device isn't open.
    """
    space = checked_resource(resource, "to_cuda_core")._known_space()
    _check_cuda(space)
    from streamflow.backends.cuda.resources import ResourceForCudaCore

    return ResourceForCudaCore(resource, space.index)


def from_cuda_core(resource: Any, *, device: Any = None) -> CudaCoreMemoryResource:
    """A ``cuda.core.MemoryResource`` as one of ours, for arrays and as an upstream.

    Parameters
    ----------
    resource : cuda.core.MemoryResource
    device : Device or int, optional
        Default: the one that ``resource`` belongs to; the task's, where it belongs to none.

    Raises
    ------
    TypeError
        Not a resource of cuda.core's.
    ValueError
        A resource of another device.
    BackendUnavailable
        A simulated device, which can't reach cuda.core's memory.
    Closed
        The device isn't open.
    """
    # Before cuda.core is loaded.
    _check_cuda(find_space(_named_device(resource) if device is None else device))
    from streamflow.backends.cuda.resources import Upstream

    upstream = Upstream(resource)
    space = find_space(upstream.device_index if device is None else device)
    if upstream.device_index not in (None, space.index):
        raise ValueError(
            f"{resource!r} belongs to device {upstream.device_index}, not to {space.index}"
        )
    return CudaCoreMemoryResource(upstream, space.index)


class CudaCoreMemoryResource(DeferringMemoryResource):
    """What :func:`from_cuda_core` makes.

    Frees of cuda.core's pools go to the block's stream. Others, which may wait for a stream or
    for the device, happen off the loop once the uses before them have ended. Two over one
    ``MemoryResource`` are equal.
    """

    def __init__(self, upstream: Upstream, device: int) -> None:
        self._cuda_core = upstream
        self._buffers: dict[int, Any] = {}  # by address: of what is live, which is unique
        self.is_device_accessible = upstream.is_device_accessible
        self.is_host_accessible = upstream.is_host_accessible
        super().__init__(device)
        self.is_stream_ordered = upstream.is_stream_ordered

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        place.backend.set_current()
        capacity = nbytes
        address, buffer = self._cuda_core.allocate(nbytes, place.stream)
        if address % alignment:
            self._cuda_core.free(buffer, place.stream)
            capacity = nbytes + alignment
            address, buffer = self._cuda_core.allocate(capacity, place.stream)
        place.num_calls += 1
        self._buffers[address] = buffer
        return address, capacity

    def _give(self, piece: Piece, place: Place) -> None:
        if not self.is_stream_ordered:
            super()._give(piece, place)
            return
        base = self._base_of(piece)
        if base is None:
            return
        del self._live[base]
        with self._translating(place.backend, "freeing"):
            self._cuda_core.free(self._buffers.pop(base), place.stream)
        place.num_calls += 1

    def _free_blocking(self, backend: Backend, base: int) -> None:
        backend.set_current()
        self._cuda_core.free(self._buffers.pop(base))

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether both are over one ``MemoryResource``."""
        return (
            isinstance(other, CudaCoreMemoryResource)
            and other._cuda_core.resource is self._cuda_core.resource
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self._cuda_core.resource!r}>"


def _named_device(resource: Any) -> int | None:
    """The device that a resource of cuda.core's names, if it does."""
    try:
        found = resource.device_id
    except Exception:  # cuda.core's own, where it belongs to no device
        return None
    return found if isinstance(found, int) and found >= 0 else None


def _check_cuda(space: Space) -> None:
    if not space.backend.is_cuda:
        raise BackendUnavailable(
            f"device {space.index} is simulated (backend {space.backend.name!r}): cuda.core and "
            "it can't reach each other's memory; open the device with backend='cuda'"
        )
