"""The simulator's stream-ordered pools."""

from __future__ import annotations

from streamflow.backends.memory import Location, PoolAccess, PoolAttribute, PoolInfo
from streamflow.backends.sim.checks import Checks
from streamflow.backends.sim.command import Allocate, Free
from streamflow.backends.sim.graphs import NotingStream
from streamflow.backends.sim.host_memory import HostKind
from streamflow.backends.sim.memory_verbs import check_location
from streamflow.backends.sim.pool import SimPool
from streamflow.backends.sim.stream import SimStream
from streamflow.errors import DeviceError

__all__ = ["PoolVerbs"]


class PoolVerbs(Checks):
    """Verbs of :class:`streamflow.backends.base.Backend`."""

    def create_pool(
        self,
        *,
        release_threshold_nbytes: int,
        max_nbytes: int = 0,
        location: Location | None = None,
        is_managed: bool = False,
        is_exportable: bool = False,
    ) -> SimPool:
        self.counts["create_pool"] += 1
        self._check()
        kind = HostKind.MANAGED if is_managed else None
        if location is not None:
            check_location(self, location)
            if location.kind != "device":
                kind = kind or HostKind.PINNED
            elif location.index != self.index:
                raise ValueError(
                    f"a pool on device {location.index} is made by that device, not by {self.index}"
                )
        if is_managed and max_nbytes:
            raise ValueError("a managed pool takes no bound")
        if is_exportable and kind is not None:
            raise DeviceError("only a pool on a device can be shared with other processes")
        with self.world.lock:
            pool = SimPool(
                self.gpu,
                release_threshold_nbytes,
                max_nbytes,
                location=location,
                kind=kind,
                is_exportable=is_exportable,
            )
            self.gpu.pools.append(pool)
        return pool

    def destroy_pool(self, pool: SimPool, /) -> None:
        self.counts["destroy_pool"] += 1
        with self.world.lock:
            if pool.number < 0:
                raise DeviceError("the default pool can't be destroyed")
            if pool.gpu.current_pool is pool:
                pool.gpu.current_pool = None
            if not pool.is_destroyed:
                pool.destroy()

    def pool_info(self, pool: SimPool, /) -> PoolInfo:
        self.counts["pool_info"] += 1
        with self.world.lock:
            return pool.info()

    def pool_attribute(self, pool: SimPool, attribute: PoolAttribute, /) -> int:
        self.counts["pool_attribute"] += 1
        with self.world.lock:
            return pool.attribute(attribute)

    def set_pool_attribute(self, pool: SimPool, attribute: PoolAttribute, value: int, /) -> None:
        self.counts["set_pool_attribute"] += 1
        self._check()
        with self.world.lock:
            pool.set_attribute(attribute, value)

    def trim_pool(self, pool: SimPool, min_nbytes_to_keep: int, /) -> None:
        self.counts["trim_pool"] += 1
        self._check()
        with self.world.lock:
            pool.release_to(min_nbytes_to_keep)

    def default_pool(self) -> SimPool:
        self.counts["default_pool"] += 1
        self._check()
        with self.world.lock:
            return self.gpu.default_pool

    def current_pool(self) -> SimPool:
        self.counts["current_pool"] += 1
        self._check()
        with self.world.lock:
            return self.gpu.current_pool or self.gpu.default_pool

    def set_current_pool(self, pool: SimPool, /) -> None:
        """Refused for a pool that doesn't lie on this device."""
        self.counts["set_current_pool"] += 1
        self._check()
        with self.world.lock:
            if pool.gpu is not self.gpu or pool.kind is not None or pool.is_destroyed:
                raise DeviceError(
                    f"the current pool of device {self.index} is one that lies there; this one "
                    f"lies on {pool.location.kind} {pool.location.index}"
                )
            self.gpu.current_pool = pool

    def can_access_peer(self, device_index: int, /) -> bool:
        """Every other device, and not itself."""
        self.counts["can_access_peer"] += 1
        self._check_index(device_index)
        return device_index != self.index

    def pool_access(self, pool: SimPool, device_index: int, /) -> PoolAccess:
        self.counts["pool_access"] += 1
        self._check_index(device_index)
        with self.world.lock:
            return pool.access_of(device_index)

    def set_pool_access_blocking(
        self, pool: SimPool, device_index: int, access: PoolAccess, /
    ) -> None:
        self.counts["set_pool_access_blocking"] += 1
        self._check()
        self._check_index(device_index)
        with self.world.lock:
            pool.set_access(device_index, access)

    def allocate(self, pool: SimPool, nbytes: int, stream: SimStream, /) -> int:
        self.counts["allocate"] += 1
        if nbytes < 1:
            raise ValueError(f"a device allocation needs at least 1 byte, found {nbytes}")
        if not isinstance(pool, SimPool):
            raise TypeError(f"not a pool of the simulator's: {pool!r}")
        with self.world.lock:
            self._check_stream(stream)
            _check_no_node(stream, "an allocation")
            if pool.gpu.world is not self.world:
                raise ValueError("a pool serves the devices of its own event loop")
            injected = self._consult_rules("allocate", "allocate")
            block = pool.take(nbytes, stream)
            command = Allocate(stream, block, nbytes)
            command.injected = injected
            if self.world.races is not None:
                block.shadow = self.world.races.allocated(command, nbytes, block.device_index)
            self.world.submit(command)
        return block.address

    def deallocate(self, address: int, stream: SimStream, /) -> None:
        self.counts["deallocate"] += 1
        with self.world.lock:
            self._check_stream(stream)
            _check_no_node(stream, "a free")
            block = self.gpu.memory.block_at(address)
            if (
                block is None
                or not block.used_nbytes
                or (
                    block.device_index != self.index
                    if block.pool is None
                    else block.pool.gpu.world is not self.world
                )
            ):
                raise DeviceError(f"{address:#x} is not allocated on device {self.index}")
            command = Free(stream, block)
            command.injected = self._consult_rules("free", "free")
            if self.world.races is not None and block.shadow is not None:
                self.world.races.freed(command, block.shadow)
            if block.pool is None:
                block.used_nbytes = 0
            else:
                block.pool.give(block, stream, stream.num_submitted + 1)
            self.world.submit(command)


def _check_no_node(stream: SimStream, what: str) -> None:
    if isinstance(stream, NotingStream):
        raise stream.refuse(what)
