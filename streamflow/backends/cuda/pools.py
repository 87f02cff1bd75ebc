"""Stream-ordered pools: ours, the device's default one, and what other devices may do there."""

from __future__ import annotations

import sys
from typing import Any

from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError, check
from streamflow.backends.cuda.memory import MemoryVerbs
from streamflow.backends.cuda.support import location_of
from streamflow.backends.memory import Location, PoolAccess, PoolAttribute, PoolInfo
from streamflow.errors import DeviceError

__all__ = ["PoolVerbs"]

_POOL = driver.CUmemPool_attribute
_HANDLE = driver.CUmemAllocationHandleType
_FLAGS = driver.CUmemAccess_flags
_UINT64_MAX = 2**64 - 1

_ATTRIBUTES = {
    PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES: (
        _POOL.CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
    ),
    PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC: _POOL.CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES: (
        _POOL.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
    ),
    PoolAttribute.RELEASE_THRESHOLD: _POOL.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    PoolAttribute.RESERVED_CURRENT: _POOL.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    PoolAttribute.RESERVED_HIGH: _POOL.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    PoolAttribute.USED_CURRENT: _POOL.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    PoolAttribute.USED_HIGH: _POOL.CU_MEMPOOL_ATTR_USED_MEM_HIGH,
}
_SWITCHES = frozenset(
    {
        PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES,
        PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC,
        PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    }
)
_ACCESS = {
    PoolAccess.NONE: _FLAGS.CU_MEM_ACCESS_FLAGS_PROT_NONE,
    PoolAccess.READ: _FLAGS.CU_MEM_ACCESS_FLAGS_PROT_READ,
    PoolAccess.READ_WRITE: _FLAGS.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
}
_ACCESS_BY_FLAG = {int(flag): access for access, flag in _ACCESS.items()}


class PoolVerbs(MemoryVerbs):
    """Verbs of :class:`streamflow.backends.base.Backend`."""

    _num_devices: int
    _pools: dict[int, Any]
    _shared_pools: set[int]
    """Managed, or on the host: any device may be let in."""
    _default: Any = None

    def create_pool(
        self,
        *,
        release_threshold_nbytes: int,
        max_nbytes: int = 0,
        location: Location | None = None,
        is_managed: bool = False,
        is_exportable: bool = False,
    ) -> Any:
        """A pool of our own; the device's default pool is never touched."""
        self.set_current()
        options = self._pool_options(location, is_managed, is_exportable)
        options.maxSize = max_nbytes
        if is_managed and max_nbytes:
            raise ValueError("a managed pool takes no bound")
        pool = check(driver.cuMemPoolCreate(options), "cuMemPoolCreate")
        try:
            # cuda.core's pools have read-only attributes; the threshold starts at 0.
            self.set_pool_attribute(pool, PoolAttribute.RELEASE_THRESHOLD, release_threshold_nbytes)
            is_on_host = location is not None and location.kind != "device"
            if is_on_host and not is_managed:
                # At first the host alone reaches such a pool.
                self._set_access(pool, self.index, PoolAccess.READ_WRITE)
        except BaseException:
            driver.cuMemPoolDestroy(pool)
            raise
        self._pools[int(pool)] = pool
        if is_managed or is_on_host:
            self._shared_pools.add(int(pool))
        return pool

    def destroy_pool(self, pool: Any, /) -> None:
        """Give back what the pool does not use now, and the rest as it is freed.

        The pool itself is destroyed by ``close``, once nothing is in use or running:
        on an H200 with driver 580.159, destroying one that was in use made a later
        allocation from another pool crash the process.
        """
        if int(pool) == int(self.default_pool()):
            raise DeviceError("the default pool can't be destroyed")
        if int(pool) in self._pools:
            if int(self.current_pool()) == int(pool):
                self.set_current_pool(self.default_pool())
            self.set_pool_attribute(pool, PoolAttribute.RELEASE_THRESHOLD, 0)
            self.trim_pool(pool, 0)

    def pool_info(self, pool: Any, /) -> PoolInfo:
        """The pool's counters now."""
        ask = self.pool_attribute
        return PoolInfo(
            reserved_nbytes=ask(pool, PoolAttribute.RESERVED_CURRENT),
            reserved_high_nbytes=ask(pool, PoolAttribute.RESERVED_HIGH),
            used_nbytes=ask(pool, PoolAttribute.USED_CURRENT),
            used_high_nbytes=ask(pool, PoolAttribute.USED_HIGH),
            release_threshold_nbytes=ask(pool, PoolAttribute.RELEASE_THRESHOLD),
        )

    def pool_attribute(self, pool: Any, attribute: PoolAttribute, /) -> int:
        """``cuMemPoolGetAttribute``."""
        asked = driver.cuMemPoolGetAttribute(pool, _ATTRIBUTES[attribute])
        return int(check(asked, "cuMemPoolGetAttribute"))

    def set_pool_attribute(self, pool: Any, attribute: PoolAttribute, value: int, /) -> None:
        """``cuMemPoolSetAttribute``: the driver refuses what can't be set."""
        if not 0 <= value <= _UINT64_MAX:
            raise ValueError(f"a pool's attribute lies between 0 and 2**64 - 1, found {value}")
        if attribute in (PoolAttribute.RESERVED_CURRENT, PoolAttribute.USED_CURRENT):
            raise DeviceError(f"a pool's {attribute.value} can only be read")
        given = int(bool(value)) if attribute in _SWITCHES else driver.cuuint64_t(value)
        check(
            driver.cuMemPoolSetAttribute(pool, _ATTRIBUTES[attribute], given),
            "cuMemPoolSetAttribute",
        )

    def trim_pool(self, pool: Any, min_nbytes_to_keep: int, /) -> None:
        """Give unused reserved memory back, down to a floor."""
        check(driver.cuMemPoolTrimTo(pool, min_nbytes_to_keep), "cuMemPoolTrimTo")

    def default_pool(self) -> Any:
        """``cuDeviceGetDefaultMemPool``."""
        if self._default is None:
            self._default = check(
                driver.cuDeviceGetDefaultMemPool(self.index), "cuDeviceGetDefaultMemPool"
            )
        return self._default

    def current_pool(self) -> Any:
        """``cuDeviceGetMemPool``."""
        return self._same_pool(check(driver.cuDeviceGetMemPool(self.index), "cuDeviceGetMemPool"))

    def set_current_pool(self, pool: Any, /) -> None:
        """``cuDeviceSetMemPool``: refused for a pool that doesn't lie on this device."""
        if int(pool) in self._shared_pools:
            raise DeviceError(
                f"the current pool of device {self.index} is one that lies there, not on the host "
                "or wherever it is used"
            )
        check(driver.cuDeviceSetMemPool(self.index, pool), "cuDeviceSetMemPool")

    def can_access_peer(self, device_index: int, /) -> bool:
        """``cuDeviceCanAccessPeer``; never itself."""
        self._check_index(device_index)
        return device_index != self.index and self._can_access(self.index, device_index)

    def pool_access(self, pool: Any, device_index: int, /) -> PoolAccess:
        """``cuMemPoolGetAccess``."""
        self._check_index(device_index)
        place = location_of(Location("device", device_index))
        flags = check(driver.cuMemPoolGetAccess(pool, place), "cuMemPoolGetAccess")
        return _ACCESS_BY_FLAG[int(flags)]

    def set_pool_access_blocking(self, pool: Any, device_index: int, access: PoolAccess, /) -> None:
        """``cuMemPoolSetAccess``; for a pool on this device, where the other is its peer.

        The driver may grant access to an empty pool without, and then refuse the next
        allocation from it.
        """
        self._check_index(device_index)
        if device_index == self.index:
            if access is not PoolAccess.READ_WRITE:
                raise DeviceError(
                    f"device {device_index} owns this pool: its access can't be revoked"
                )
        elif (
            access is not PoolAccess.NONE
            and int(pool) not in self._shared_pools
            and not self._can_access(device_index, self.index)
        ):
            raise DeviceError(f"device {device_index} cannot reach the memory of {self.index}")
        self.set_current()
        self._set_access(pool, device_index, access)

    def _pool_options(
        self, location: Location | None, is_managed: bool, is_exportable: bool
    ) -> Any:
        """What to create a pool by; refuses what the driver does not offer."""
        support = self.memory_support()
        is_on_host = location is not None and location.kind != "device"
        if not support.has_pools:
            raise DeviceError(f"device {self.index} or its driver has no stream-ordered pools")
        if is_managed and not support.has_managed_pools:
            raise DeviceError(f"device {self.index} or its driver has no managed pools")
        if is_on_host and not is_managed and not support.has_host_pools:
            raise DeviceError(f"device {self.index} or its driver has no pools on the host")
        kinds = driver.CUmemAllocationType
        options = driver.CUmemPoolProps()
        options.allocType = kinds.CU_MEM_ALLOCATION_TYPE_PINNED
        if location is None and not is_managed:
            location = Location("device", self.index)
        if location is not None:
            if location.kind == "device" and location.index != self.index:
                raise ValueError(
                    f"a pool on device {location.index} is made by that device, not by {self.index}"
                )
            place = location_of(location)
            options.location.type = place.type
            options.location.id = place.id
        if is_managed:
            options.allocType = kinds.CU_MEM_ALLOCATION_TYPE_MANAGED
            if location is None:
                options.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_NONE
        if is_exportable:
            if is_managed or is_on_host:
                raise DeviceError("only a pool on a device can be shared with other processes")
            name = "win32" if sys.platform == "win32" else "posix_fd"
            if name not in support.pool_handle_types:
                raise DeviceError(
                    f"device {self.index} or its driver does not share pools by {name} handles"
                )
            options.handleTypes = (
                _HANDLE.CU_MEM_HANDLE_TYPE_WIN32
                if name == "win32"
                else _HANDLE.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            )
        return options

    def _set_access(self, pool: Any, device_index: int, access: PoolAccess) -> None:
        wanted = driver.CUmemAccessDesc()
        place = location_of(Location("device", device_index))
        wanted.location.type = place.type
        wanted.location.id = place.id
        wanted.flags = _ACCESS[access]
        (error,) = driver.cuMemPoolSetAccess(pool, [wanted], 1)
        if error:
            raise DriverCallError(error, "cuMemPoolSetAccess")

    def _can_access(self, device_index: int, owner_index: int) -> bool:
        asked = driver.cuDeviceCanAccessPeer(device_index, owner_index)
        return bool(check(asked, "cuDeviceCanAccessPeer"))

    def _check_index(self, device_index: int) -> None:
        if not 0 <= device_index < self._num_devices:
            raise DeviceError(
                f"device {device_index} does not exist: the CUDA driver sees {self._num_devices}"
            )

    def _same_pool(self, pool: Any) -> Any:
        known = self._pools.get(int(pool))
        if known is not None:
            return known
        default = self.default_pool()
        return default if int(default) == int(pool) else pool
