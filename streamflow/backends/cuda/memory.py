"""Memory that comes from no pool: of the device, of the host, and of both."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from cuda.bindings import driver

from streamflow.backends.cuda import host_pages, mapped
from streamflow.backends.cuda.errors import DriverCallError, check
from streamflow.backends.cuda.registering import register, unregister
from streamflow.backends.cuda.streams import StreamTable
from streamflow.backends.cuda.support import location_of, read_memory_support
from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemoryKind,
    MemorySupport,
    PointerAttributes,
)
from streamflow.errors import DeviceError, OutOfDeviceMemory

__all__ = ["MemoryVerbs"]

_ADVICE = {
    MemoryAdvice.READ_MOSTLY: driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY,
    MemoryAdvice.NOT_READ_MOSTLY: driver.CUmem_advise.CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    MemoryAdvice.PREFERRED_LOCATION: driver.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    MemoryAdvice.NO_PREFERRED_LOCATION: driver.CUmem_advise.CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    MemoryAdvice.ACCESSED_BY: driver.CUmem_advise.CU_MEM_ADVISE_SET_ACCESSED_BY,
    MemoryAdvice.NOT_ACCESSED_BY: driver.CUmem_advise.CU_MEM_ADVISE_UNSET_ACCESSED_BY,
}

_POINTER = driver.CUpointer_attribute
_ASKED = [
    _POINTER.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    _POINTER.CU_POINTER_ATTRIBUTE_IS_MANAGED,
    _POINTER.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    _POINTER.CU_POINTER_ATTRIBUTE_CONTEXT,
    _POINTER.CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
]
_POOL_HANDLE = _POINTER.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
_POOL_HANDLE_SINCE = 11030
_KINDS = {
    0: MemoryKind.UNREGISTERED,
    int(driver.CUmemorytype.CU_MEMORYTYPE_HOST): MemoryKind.HOST,
    int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE): MemoryKind.DEVICE,
    int(driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED): MemoryKind.MANAGED,
}

_system_lock = threading.Lock()
_system: dict[int, Any] = {}
"""What holds each piece of plain host memory that is lent out; outlives every device."""


class MemoryVerbs:
    """Verbs of :class:`streamflow.backends.base.Backend`."""

    index: int
    _streams: StreamTable
    _memory_support: MemorySupport | None = None

    def set_current(self) -> None:
        raise NotImplementedError

    def memory_support(self) -> MemorySupport:
        """Asked of the driver at the first call."""
        support = self._memory_support
        if support is None:
            support = self._memory_support = read_memory_support(self.index)
        return support

    def allocate_linear_blocking(self, nbytes: int, /) -> int:
        """``cuMemAlloc``."""
        self.set_current()
        return int(check(driver.cuMemAlloc(nbytes), "cuMemAlloc"))

    def allocate_managed_blocking(self, nbytes: int, /) -> int:
        """``cuMemAllocManaged``, for every stream of every device."""
        self.set_current()
        attached = int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        return int(check(driver.cuMemAllocManaged(nbytes, attached), "cuMemAllocManaged"))

    def free_linear_blocking(self, address: int, /) -> None:
        """``cuMemFree``: may wait for the device, but not where the memory is a pool's."""
        self.set_current()
        check(driver.cuMemFree(address), "cuMemFree")

    def allocate_system(self, nbytes: int, alignment: int, /) -> int:
        """From NumPy's allocator, the process's own.

        Raises
        ------
        DeviceError
            The device doesn't read pageable memory.
        """
        if nbytes < 1:
            raise ValueError(f"an allocation needs at least 1 byte, found {nbytes}")
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment is a power of two, found {alignment}")
        if not self.memory_support().has_pageable_access:
            raise DeviceError(
                f"device {self.index} cannot read the host's plain memory; "
                "take managed or pinned memory"
            )
        try:
            held = np.empty(nbytes + alignment - 1, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:
            raise OutOfDeviceMemory(f"the host has not {nbytes} bytes of system memory") from error
        start = int(held.ctypes.data)
        address = start + -start % alignment
        with _system_lock:
            _system[address] = held
        return address

    def free_system(self, address: int, /) -> None:
        """Any thread, also after :meth:`close`."""
        with _system_lock:
            held = _system.pop(address, None)
        if held is None:
            raise DeviceError(f"{address:#x} is not the address of system memory")

    def allocate_pinned_blocking(self, nbytes: int, /) -> int:
        """Page-locked memory that every device may copy from and to; any thread."""
        self.set_current()
        return host_pages.allocate(nbytes)

    def allocate_mapped_blocking(self, nbytes: int, /) -> int:
        """As :meth:`allocate_pinned_blocking`; copies from and to it go by the device."""
        address = self.allocate_pinned_blocking(nbytes)
        mapped.add(address, nbytes)
        return address

    def free_pinned_blocking(self, address: int, /) -> None:
        """Give it back; waits for running kernels. Any thread, also after :meth:`close`."""
        mapped.remove(address)
        self.set_current()
        host_pages.free(address)

    def register_host_blocking(self, address: int, nbytes: int, is_read_only: bool, /) -> None:
        """``cuMemHostRegister``; any thread."""
        self.set_current()
        register(address, nbytes, is_read_only, self.memory_support())

    def unregister_host_blocking(self, address: int, /) -> None:
        """``cuMemHostUnregister``: waits for kernels. Any thread, also after :meth:`close`."""
        self.set_current()
        unregister(address)

    def map_pinned(self, address: int, nbytes: int, /) -> int:
        """``cuMemHostGetDevicePointer``; the same address on most machines, but not on all."""
        self.set_current()
        call = "cuMemHostGetDevicePointer"
        found = int(check(driver.cuMemHostGetDevicePointer(address, 0), call))
        mapped.add(found, nbytes)
        return found

    def unmap_pinned(self, address: int, /) -> None:
        """Copies from and to it go straight again."""
        mapped.remove(address)

    def prefetch(self, address: int, nbytes: int, location: Location, stream: Any, /) -> None:
        """``cuMemPrefetchAsync``."""
        self.set_current()
        place = location_of(location)
        (error,) = driver.cuMemPrefetchAsync(address, nbytes, place, 0, self._streams[stream])
        if error:
            raise DriverCallError(error, "cuMemPrefetchAsync")

    def advise(
        self, address: int, nbytes: int, advice: MemoryAdvice, location: Location, /
    ) -> None:
        """``cuMemAdvise``."""
        self.set_current()
        place = location_of(location)
        check(driver.cuMemAdvise(address, nbytes, _ADVICE[advice], place), "cuMemAdvise")

    def pointer_attributes(self, address: int, /) -> PointerAttributes:
        """All in one call, which is no error for what the driver doesn't know."""
        self.set_current()
        asked = list(_ASKED)
        version = int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion"))
        if version >= _POOL_HANDLE_SINCE:
            asked.append(_POOL_HANDLE)
        call = "cuPointerGetAttributes"
        found = check(driver.cuPointerGetAttributes(len(asked), asked, address), call)
        memory_type, is_managed, ordinal, context, device_pointer, *pools = found
        kind = MemoryKind.MANAGED if is_managed else _KINDS[int(memory_type)]
        is_on_device = kind is MemoryKind.DEVICE
        is_reached = bool(int(device_pointer))
        if kind is MemoryKind.UNREGISTERED:
            is_reached = self.memory_support().has_pageable_access
        pool = pools[0] if pools and int(pools[0]) else None
        return PointerAttributes(
            kind=kind,
            device_index=int(ordinal) if is_on_device else None,
            has_context=bool(int(context)),
            pool=None if pool is None else self._same_pool(pool),
            is_device_accessible=is_reached,
            is_host_accessible=not is_on_device,
        )

    def _same_pool(self, pool: Any) -> Any:
        """The handle that was given out before for this pool, if one was."""
        raise NotImplementedError
