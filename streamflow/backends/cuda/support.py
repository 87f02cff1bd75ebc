"""Which kinds of memory a GPU and its driver offer, asked as far as the driver knows the question.

Older drivers answer ``CUDA_ERROR_INVALID_VALUE`` to attributes that they don't know.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError, check
from streamflow.backends.memory import Location, MemorySupport

__all__ = ["location_of", "read_memory_support"]

_ASK = driver.CUdevice_attribute
_UNKNOWN = driver.CUresult.CUDA_ERROR_INVALID_VALUE
_POOLS_SINCE = 11020
_HANDLE_TYPES_SINCE = 11030
_MANAGED_POOLS_SINCE = 13000

_HANDLE = driver.CUmemAllocationHandleType
_HANDLE_NAMES = {
    "posix_fd": _HANDLE.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    "win32": _HANDLE.CU_MEM_HANDLE_TYPE_WIN32,
    "fabric": _HANDLE.CU_MEM_HANDLE_TYPE_FABRIC,
}

_PLACES = {
    "device": driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
    "host": driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST,
    "numa": driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA,
}


def read_memory_support(index: int) -> MemorySupport:
    """Ask the driver about device ``index``."""
    version = int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion"))

    def ask(attribute: Any, since: int = 0) -> int:
        if version < since:
            return 0
        error, value = driver.cuDeviceGetAttribute(attribute, index)
        if error == _UNKNOWN:
            return 0
        if error:
            raise DriverCallError(error, "cuDeviceGetAttribute")
        return int(value)

    has_pools = bool(ask(_ASK.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, _POOLS_SINCE))
    handles = ask(_ASK.CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, _HANDLE_TYPES_SINCE)
    is_concurrent = bool(ask(_ASK.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS))
    return MemorySupport(
        has_pools=has_pools,
        has_managed_pools=has_pools and is_concurrent and version >= _MANAGED_POOLS_SINCE,
        has_host_pools=bool(
            has_pools
            and (
                ask(_ASK.CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED)
                or ask(_ASK.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED)
            )
        ),
        has_managed_memory=bool(ask(_ASK.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)),
        has_concurrent_managed_access=is_concurrent,
        has_pageable_access=bool(ask(_ASK.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)),
        has_host_register=bool(ask(_ASK.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)),
        has_read_only_host_register=bool(
            ask(_ASK.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)
        ),
        pool_handle_types=frozenset(
            name for name, flag in _HANDLE_NAMES.items() if handles & int(flag)
        ),
    )


def location_of(location: Location) -> Any:
    """A ``CUmemLocation``.

    Raises
    ------
    ValueError
        No such kind of place.
    """
    kind = _PLACES.get(location.kind)
    if kind is None:
        raise ValueError(f"a location is 'device', 'host' or 'numa', found {location.kind!r}")
    made = driver.CUmemLocation()
    made.type = kind
    made.id = location.index
    return made
