"""cuda.core's memory resources and ours, each in the other's clothes.

A table here is never keyed by a ``cuda.core.Buffer``: two buffers are equal, and hash alike,
where a pointer and a size were handed out again.
"""

from __future__ import annotations

from typing import Any, Protocol

from cuda.core import (
    Buffer,
    DeviceMemoryResource,
    ManagedMemoryResource,
    MemoryResource,
    PinnedMemoryResource,
)

from streamflow.errors import Closed

__all__ = ["ResourceForCudaCore", "Upstream"]


class _Resource(Protocol):
    """One of streamflow's, as far as is needed here."""

    is_device_accessible: bool
    is_host_accessible: bool

    def allocate(self, nbytes: int, *, stream: Any) -> Any: ...

    def deallocate_later(self, block: Any, *, stream: Any) -> None: ...


class ResourceForCudaCore(MemoryResource):  # type: ignore[misc] # cuda.core is untyped here
    """A resource of ours, for cuda.core's code to allocate its buffers from.

    Parameters
    ----------
    resource : DeviceMemoryResource
    device_index : int

    Notes
    -----
    cuda.core frees a buffer when it is closed and when it is collected, and does not tell which.
    So the free is left to the next call of a resource of that device, in the order of the
    buffer's stream (rule R12).
    """

    def __init__(self, resource: _Resource, device_index: int) -> None:
        self._resource = resource
        self._device_index = device_index
        self._blocks: dict[int, Any] = {}  # by address: of what is live, which is unique

    def allocate(self, size: int, *, stream: Any) -> Buffer:
        """A buffer of ``size`` bytes, usable on ``stream``; it is freed there, too.

        Raises
        ------
        TypeError
            Not a stream: a graph builder takes no memory of ours.
        """
        block = self._resource.allocate(size, stream=stream)
        address: int = block.address
        if address:
            self._blocks[address] = block
        try:
            return Buffer.from_handle(address, size, mr=self, stream=stream)
        except BaseException:
            if self._blocks.pop(address, None) is not None:
                self._resource.deallocate_later(block, stream=stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Take a buffer's memory back. Called by cuda.core, also from finalisers."""
        address = int(ptr)
        if not address:
            return
        block = self._blocks.pop(address, None)
        if block is None:
            raise ValueError(f"{size} bytes at {address:#x} are not of {self._resource!r}")
        try:
            self._resource.deallocate_later(block, stream=stream)
        except Closed:  # the device, which gave it back
            return

    @property
    def is_device_accessible(self) -> bool:
        return self._resource.is_device_accessible

    @property
    def is_host_accessible(self) -> bool:
        return self._resource.is_host_accessible

    @property
    def is_managed(self) -> bool:
        resource: Any = self._resource
        while resource is not None:
            if getattr(resource, "is_managed", False):
                return True
            resource = getattr(resource, "upstream_mr", None)
        return False

    @property
    def device_id(self) -> int:
        return self._device_index

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._resource!r}>"


class Upstream:
    """A cuda.core ``MemoryResource``, as a resource of ours calls it.

    Attributes
    ----------
    resource : cuda.core.MemoryResource
    is_stream_ordered : bool
        Whether a free returns at once. Where we can't tell, it counts as one that doesn't.
    """

    def __init__(self, resource: Any) -> None:
        if not isinstance(resource, MemoryResource):
            raise TypeError(f"from_cuda_core takes a cuda.core MemoryResource, found {resource!r}")
        self.resource = resource
        self.is_device_accessible = bool(resource.is_device_accessible)
        self.is_host_accessible = bool(resource.is_host_accessible)
        self.is_stream_ordered = isinstance(resource, _STREAM_ORDERED)

    @property
    def device_index(self) -> int | None:
        """The device it belongs to; None where it belongs to none."""
        try:
            index = int(self.resource.device_id)
        except (RuntimeError, TypeError):
            return None
        return index if index >= 0 else None

    def allocate(self, nbytes: int, stream: Any) -> tuple[int, Any]:
        """An address, and the buffer that owns it."""
        buffer = self.resource.allocate(nbytes, stream=stream)
        return int(buffer.handle), buffer

    def free(self, buffer: Any, stream: Any = None) -> None:
        """Give a buffer back on ``stream``; None: on the one that it knows."""
        if stream is None:
            buffer.close()
        else:
            buffer.close(stream)


_STREAM_ORDERED = (
    DeviceMemoryResource,
    ManagedMemoryResource,
    PinnedMemoryResource,
    ResourceForCudaCore,
)
