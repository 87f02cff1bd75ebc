"""Allocators that count items instead of bytes, or know their stream."""

from __future__ import annotations

from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.blocks import Block
from streamflow.memory.resource import DeviceMemoryResource, checked_resource
from streamflow.memory.sizes import ALIGNMENT

__all__ = ["Allocator", "PolymorphicAllocator", "StreamAllocatorAdaptor", "TypedAllocator"]

_MAX_NBYTES = 2**63 - 1 - ALIGNMENT


class Allocator(Protocol):
    """What a :class:`StreamAllocatorAdaptor` wraps: a resource is one, too."""

    def allocate(self, num: int, /, *, stream: Any) -> Block: ...

    def deallocate(self, block: Block, *, stream: Any) -> None: ...


class TypedAllocator:
    """Allocates items of one type from a resource.

    Parameters
    ----------
    dtype : numpy dtype
        Of an item.
    resource : DeviceMemoryResource, optional
        Default: the current device's, as of now.

    Raises
    ------
    TypeError
        Not a type whose items lie in memory, or not a resource.

    Notes
    -----
    Two are equal exactly if their resources are, whatever their types.
    """

    __slots__ = ("dtype", "resource")

    def __init__(self, dtype: npt.DTypeLike, resource: DeviceMemoryResource | None = None) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype.hasobject:
            raise TypeError(f"a device holds no Python objects: {self.dtype}")
        if resource is None:
            from streamflow.memory.registry import get_current_device_resource

            resource = get_current_device_resource()
        self.resource = checked_resource(resource, "resource=")

    def allocate(self, num_items: int, *, stream: Any) -> Block:
        """Memory for ``num_items`` items.

        Parameters
        ----------
        num_items : int
            0 gives address 0.
        stream : Stream or Lane

        Ordering
        --------
        Usable on ``stream`` at once, elsewhere after an event recorded there.

        Raises
        ------
        TypeError, ValueError
            Not a number of items.
        OutOfDeviceMemory
            There is not so much, or it is more than an address space holds.
        """
        if isinstance(num_items, bool) or not hasattr(num_items, "__index__"):
            raise TypeError(f"a number of items is an int, found {num_items!r}")
        num = index(num_items)
        if num < 0:
            raise ValueError(f"a number of items is not negative, found {num}")
        nbytes = num * self.dtype.itemsize
        if nbytes > _MAX_NBYTES:
            raise OutOfDeviceMemory(
                f"{num} items of {self.dtype} are {nbytes} bytes, more than any device has"
            )
        return self.resource.allocate(nbytes, stream=stream)

    def deallocate(self, block: Block, *, stream: Any) -> None:
        """Take ``block`` back, in the order of ``stream``.

        Parameters and errors are those of :meth:`DeviceMemoryResource.deallocate`.
        """
        self.resource.deallocate(block, stream=stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypedAllocator) and self.resource == other.resource

    def __hash__(self) -> int:
        return hash(self.resource)

    def __repr__(self) -> str:
        return f"<TypedAllocator of {self.dtype} from {self.resource!r}>"


PolymorphicAllocator = TypedAllocator
"""RMM's name of it."""


class StreamAllocatorAdaptor:
    """An allocator bound to a stream, which it keeps alive.

    Parameters
    ----------
    allocator : TypedAllocator or DeviceMemoryResource
        Or anything that allocates on a stream as they do.
    stream : Stream or Lane

    Raises
    ------
    TypeError
        Not an allocator, or no stream.

    Notes
    -----
    Two are equal exactly if their allocators are, whatever their streams.
    """

    __slots__ = ("allocator", "stream")

    def __init__(self, allocator: Allocator, stream: Any) -> None:
        for name in ("allocate", "deallocate"):
            if not callable(getattr(allocator, name, None)):
                raise TypeError(f"{allocator!r} is not an allocator: it has no {name}()")
        if stream is None:
            raise TypeError("stream= takes a Stream or Lane, found None")
        self.allocator = allocator
        self.stream = stream

    def allocate(self, num: int) -> Block:
        """Memory for ``num`` of what the allocator counts.

        Parameters and errors are those of :meth:`TypedAllocator.allocate`.

        Ordering
        --------
        Usable on the stream at once, elsewhere after an event recorded there.
        """
        return self.allocator.allocate(num, stream=self.stream)

    def deallocate(self, block: Block) -> None:
        """Take ``block`` back, in the order of the stream.

        Parameters and errors are those of :meth:`DeviceMemoryResource.deallocate`.
        """
        self.allocator.deallocate(block, stream=self.stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamAllocatorAdaptor) and self.allocator == other.allocator

    def __hash__(self) -> int:
        return hash(self.allocator)

    def __repr__(self) -> str:
        return f"<StreamAllocatorAdaptor of {self.allocator!r} on {self.stream!r}>"
