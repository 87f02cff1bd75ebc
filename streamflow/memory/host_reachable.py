"""Memory that host and device both reach: managed, page-locked, and the host's own."""

from __future__ import annotations

from typing import Any

from streamflow.backends.base import Backend
from streamflow.backends.memory import Location, MemoryAdvice
from streamflow.errors import DeviceError
from streamflow.memory.blocks import Block
from streamflow.memory.current import checked_device
from streamflow.memory.leaf import DeferringMemoryResource, padded
from streamflow.memory.sizes import ALIGNMENT, checked_size
from streamflow.memory.space import Place

__all__ = [
    "ManagedMemoryResource",
    "PinnedHostMemoryResource",
    "SamHeadroomMemoryResource",
    "SystemMemoryResource",
]


class _Movable(DeferringMemoryResource):
    """Memory whose pages the driver moves to where they are used."""

    is_host_accessible = True

    def prefetch(self, block: Block, location: Any, stream: Any) -> None:
        """Move ``block`` to where it will be used next.

        Parameters
        ----------
        block : Block
        location : Device, int, str or Location
            A device, or ``"host"``.
        stream : Stream or Lane

        Ordering
        --------
        In the order of ``stream``: after what was given to it before, and before what is given
        to it later. Returns at once.

        Raises
        ------
        TypeError, ValueError, Closed
            As :meth:`deallocate`, and for a location that is none.
        DeviceError
            The device can't: it has no concurrent managed access.
        """
        self._check_back(block)
        where = _checked_location(location)
        place = self._place(stream)
        self._check_moves(place.backend)
        if block.address:
            with self._translating(place.backend, "prefetching"):
                place.backend.prefetch(block.address, block.nbytes, where, place.stream)

    def advise(self, block: Block, advice: MemoryAdvice, location: Any = None) -> None:
        """Say how ``block`` will be used.

        Parameters
        ----------
        block : Block
        advice : MemoryAdvice
        location : Device, int, str or Location, optional
            Which device, or ``"host"``, the advice is about. Default: the resource's device.

        Raises
        ------
        TypeError, ValueError, Closed
            As :meth:`deallocate`, and for what is no advice or no location.
        DeviceError
            The device can't: it has no concurrent managed access.
        """
        self._check_back(block)
        if not isinstance(advice, MemoryAdvice):
            raise TypeError(f"advise takes a MemoryAdvice, found {advice!r}")
        backend = block._space.backend
        where = _checked_location(backend.index if location is None else location)
        self._check_moves(backend)
        if block.address:
            with self._translating(backend, "advising"):
                backend.advise(block.address, block.nbytes, advice, where)

    def _check_moves(self, backend: Backend) -> None:
        if not backend.memory_support().has_concurrent_managed_access:
            raise DeviceError(
                f"device {backend.index} has no concurrent managed access, which prefetch and "
                "advice need: its pages move by themselves, on first use"
            )


class ManagedMemoryResource(_Movable):
    """``cudaMallocManaged``: one address for host and device; pages move to where they are used.

    Parameters
    ----------
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    DeviceError
        The device has no managed memory; at the first allocation where it isn't open yet.

    Notes
    -----
    The host may touch the memory once the work on it has been awaited. Frees wait for the uses
    before them, off the loop. Two for one device are equal.
    """

    is_managed = True

    def _check_support(self, backend: Backend) -> None:
        if not backend.memory_support().has_managed_memory:
            raise DeviceError(f"device {backend.index} has no managed memory: use device memory")

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        capacity = padded(nbytes, alignment)
        return place.backend.allocate_managed_blocking(capacity), capacity

    def _free_blocking(self, backend: Backend, base: int) -> None:
        backend.free_linear_blocking(base)


class PinnedHostMemoryResource(DeferringMemoryResource):
    """Page-locked host memory, which copies use as it is and kernels may reach.

    Parameters
    ----------
    device : Device or int, optional
        Whose streams its frees are ordered by. Default: that of the stream of its first
        allocation.

    Notes
    -----
    Addresses are multiples of 256. Pinning blocks its caller, and takes a lock of the driver's
    (0.7 ms for 1 MiB on an H200): to keep blocks, put a pool over it. Frees wait for the uses
    before them, off the loop. Two for one device are equal.
    """

    is_host_accessible = True

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        capacity = padded(nbytes, alignment)
        return place.backend.allocate_mapped_blocking(capacity), capacity

    def _free_blocking(self, backend: Backend, base: int) -> None:
        backend.free_pinned_blocking(base)


class SystemMemoryResource(_Movable):
    """Plain host memory, where the device reads it as it is.

    Parameters
    ----------
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    DeviceError
        The device does not read the host's plain memory; at the first allocation where it isn't
        open yet.

    Notes
    -----
    Frees wait for the uses before them, off the loop. Two for one device are equal.
    """

    def _check_support(self, backend: Backend) -> None:
        if not backend.memory_support().has_pageable_access:
            raise DeviceError(
                f"device {backend.index} can't read the host's plain memory (it has no pageable "
                f"memory access), which {type(self).__name__} needs: use ManagedMemoryResource "
                "or PinnedHostMemoryResource"
            )

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        return place.backend.allocate_system(nbytes, max(alignment, ALIGNMENT)), nbytes

    def _free_blocking(self, backend: Backend, base: int) -> None:
        backend.free_system(base)


class SamHeadroomMemoryResource(SystemMemoryResource):
    """System memory that prefers the GPU as long as that leaves ``headroom`` bytes free there.

    Parameters
    ----------
    headroom : int or str
        Device memory to leave to others, in bytes or as ``"1GiB"``.
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    TypeError, ValueError
        Not a size.
    DeviceError
        As :class:`SystemMemoryResource`.

    Notes
    -----
    Of an allocation of n bytes, the first ``align_down(min(max(free - headroom, 0), n), 256)``
    prefer the device and the rest prefers the host, ``free`` being the device's free memory at
    the call. Two for one device are equal, whatever their headrooms.
    """

    def __init__(self, headroom: int | str, device: Any = None) -> None:
        self.headroom = checked_size(headroom, "headroom")
        super().__init__(device)

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        backend = place.backend
        base, capacity = super()._allocate(nbytes, alignment, place)
        try:
            free, _ = backend.memory_info()
            on_device = min(max(free - self.headroom, 0), nbytes) // ALIGNMENT * ALIGNMENT
            preferred = MemoryAdvice.PREFERRED_LOCATION
            if on_device:
                where = Location("device", backend.index)
                backend.advise(base, on_device, preferred, where)
            if nbytes > on_device:
                backend.advise(base + on_device, nbytes - on_device, preferred, Location("host"))
        except BaseException:
            backend.free_system(base)
            raise
        return base, capacity


def _checked_location(location: Any) -> Location:
    if isinstance(location, Location):
        return location
    if isinstance(location, str):
        if location != "host":
            raise ValueError(f'a location is a device or "host", found {location!r}')
        return Location("host")
    return Location("device", checked_device(location))
