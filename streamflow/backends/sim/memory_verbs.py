"""The simulator's memory that comes from no pool: of the device, of the host, and of both."""

from __future__ import annotations

from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemoryKind,
    MemorySupport,
    PointerAttributes,
)
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.block import Block, round_up
from streamflow.backends.sim.checks import Checks
from streamflow.backends.sim.command import Command, Prefetch
from streamflow.backends.sim.host_memory import HostBlock, HostKind
from streamflow.backends.sim.stream import SimStream
from streamflow.errors import DeviceError, OutOfDeviceMemory

__all__ = ["MemoryVerbs", "check_location"]

_SUPPORT = MemorySupport(
    has_pools=True,
    has_managed_pools=True,
    has_host_pools=True,
    has_managed_memory=True,
    has_concurrent_managed_access=True,
    has_pageable_access=True,
    has_host_register=True,
    has_read_only_host_register=True,
    pool_handle_types=frozenset({"posix_fd"}),
)
_KINDS = {
    HostKind.PINNED: MemoryKind.HOST,
    HostKind.REGISTERED: MemoryKind.HOST,
    HostKind.MANAGED: MemoryKind.MANAGED,
    HostKind.SYSTEM: MemoryKind.UNREGISTERED,
}
_PREFERENCES = (MemoryAdvice.PREFERRED_LOCATION, MemoryAdvice.ACCESSED_BY)


class MemoryVerbs(Checks):
    """Verbs of :class:`streamflow.backends.base.Backend`."""

    def memory_support(self) -> MemorySupport:
        self.counts["memory_support"] += 1
        return _SUPPORT

    def allocate_linear_blocking(self, nbytes: int, /) -> int:
        """Usable at once, unlike stream-ordered memory; counts against the device's."""
        self.counts["allocate_linear_blocking"] += 1
        self._begin_allocation("allocate linear", nbytes)
        memory = self.gpu.memory
        with self.world.lock:
            capacity = round_up(nbytes)
            self.gpu.reclaim(capacity)
            if capacity > memory.free_nbytes:
                raise OutOfDeviceMemory(
                    f"wanted {nbytes} bytes on simulated device {self.index}, which has "
                    f"{memory.free_nbytes} of {memory.total_nbytes} bytes free"
                )
            block = memory.reserve(capacity, None)
            block.used_nbytes = capacity
            block.generation = 1
            if self.world.races is not None:
                block.shadow = self.world.races.unordered(nbytes, self.index)
            memory.on_allocate(block, nbytes)
        return block.address

    def allocate_managed_blocking(self, nbytes: int, /) -> int:
        """Memory of the host, at its own address."""
        self.counts["allocate_managed_blocking"] += 1
        self._begin_allocation("allocate managed", nbytes)
        address = host_memory.allocate(nbytes, HostKind.MANAGED)
        block = host_memory.find(address)
        assert block is not None
        self.gpu.memory.on_allocate(block, nbytes)  # poisons it
        return address

    def free_linear_blocking(self, address: int, /) -> None:
        """Waits for nothing: a use that the caller has not seen end is a race."""
        self.counts["free_linear_blocking"] += 1
        with self.world.lock:
            self._check()
            block = self._live_block(address)
            if isinstance(block, HostBlock) and block.kind is not HostKind.MANAGED:
                if block.pool is None:
                    raise DeviceError(f"{address:#x} is {block.kind.value} memory")
            elif block.pool is None and block.device_index not in (None, self.index):
                raise DeviceError(f"{address:#x} is memory of device {block.device_index}")
            injected = self._consult_rules("free", "free linear")
            if injected is not None:
                raise injected
            if block.pool is not None:
                block.pool.take_back(block)
            elif isinstance(block, HostBlock):
                host_memory.free(address, HostKind.MANAGED)
            else:
                self.gpu.memory.on_free(block)
                self.gpu.memory.release(block)
            self._tell_free(block)

    def allocate_system(self, nbytes: int, alignment: int, /) -> int:
        self.counts["allocate_system"] += 1
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment is a power of two, found {alignment}")
        self._begin_allocation("allocate system", nbytes)
        return host_memory.allocate(nbytes, HostKind.SYSTEM, alignment)

    def free_system(self, address: int, /) -> None:
        """As :meth:`free_linear_blocking`; also after the device was closed."""
        self.counts["free_system"] += 1
        self._free_host(address, HostKind.SYSTEM)

    def allocate_pinned_blocking(self, nbytes: int, /) -> int:
        self.counts["allocate_pinned_blocking"] += 1
        return host_memory.allocate(nbytes)

    def allocate_mapped_blocking(self, nbytes: int, /) -> int:
        self.counts["allocate_mapped_blocking"] += 1
        return host_memory.allocate(nbytes)

    def free_pinned_blocking(self, address: int, /) -> None:
        self.counts["free_pinned_blocking"] += 1
        self._free_host(address, HostKind.PINNED)

    def register_host_blocking(self, address: int, nbytes: int, is_read_only: bool, /) -> None:
        """Takes no time; devices can't write what ``is_read_only``."""
        self.counts["register_host_blocking"] += 1
        self._check()
        self._refuse_if_told("register", "register host memory")
        host_memory.register(address, nbytes, is_read_only)

    def unregister_host_blocking(self, address: int, /) -> None:
        """Waits for nothing: an unfinished copy from or to it is an error (rule R6)."""
        self.counts["unregister_host_blocking"] += 1
        self._refuse_if_told("unregister", "unregister host memory")
        self._free_host(address, HostKind.REGISTERED)

    def map_pinned(self, address: int, nbytes: int, /) -> int:
        """The same address."""
        self.counts["map_pinned"] += 1
        self._check()
        host_memory.check_locked(address, nbytes)
        return address

    def unmap_pinned(self, address: int, /) -> None:
        """Nothing to do."""
        self.counts["unmap_pinned"] += 1

    def prefetch(self, address: int, nbytes: int, location: Location, stream: SimStream, /) -> None:
        """Only ordered: where memory is at the moment is not modelled."""
        self.counts["prefetch"] += 1
        self._check_migratable(address, nbytes)
        check_location(self, location)
        self._submit("prefetch", Prefetch(stream, self.gpu.compute, address, nbytes))

    def advise(
        self, address: int, nbytes: int, advice: MemoryAdvice, location: Location, /
    ) -> None:
        """Only checked."""
        self.counts["advise"] += 1
        self._check()
        if self._check_migratable(address, nbytes).pool is not None:
            raise DeviceError(f"{address:#x} is memory of a managed pool, which takes no advice")
        if advice in _PREFERENCES:
            check_location(self, location)

    def pointer_attributes(self, address: int, /) -> PointerAttributes:
        """Refused for memory of a device that is not allocated, or whose free was submitted.

        Any other address is the host's own memory, which nobody registered.
        """
        self.counts["pointer_attributes"] += 1
        self._check()
        with self.world.lock:
            block = self._block_around(address)
            if block is None:
                if address >> 52:
                    raise DeviceError(f"{address:#x} is no memory of a device, or not any more")
                return PointerAttributes(MemoryKind.UNREGISTERED, None, False, None, False, True)
            if not block.used_nbytes:
                raise DeviceError(f"{address:#x} was freed")
            kind = MemoryKind.DEVICE
            if isinstance(block, HostBlock):
                kind = _KINDS[block.kind]
            is_known = kind is not MemoryKind.UNREGISTERED
            return PointerAttributes(
                kind=kind,
                device_index=block.device_index,
                has_context=block.pool is None and is_known,
                pool=block.pool,
                is_device_accessible=True,
                is_host_accessible=block.device_index is None,
            )

    # -- checks ------------------------------------------------------------------------

    def _submit(self, kind: str, command: Command) -> None:
        raise NotImplementedError

    def _begin_allocation(self, label: str, nbytes: int) -> None:
        self._check()
        if nbytes < 1:
            raise ValueError(f"an allocation needs at least 1 byte, found {nbytes}")
        self._refuse_if_told("allocate", label)

    def _refuse_if_told(self, kind: str, label: str) -> None:
        with self.world.lock:
            injected = self._consult_rules(kind, label)
        if injected is not None:  # nothing runs that could fail later
            raise injected

    def _block_around(self, address: int) -> Block | None:
        block = self.gpu.memory.nearest(address)
        if block is None or address >= block.address + block.capacity:
            return None
        return block

    def _live_block(self, address: int) -> Block:
        block = self.gpu.memory.block_at(address)
        if (
            block is None
            or not block.used_nbytes
            or (block.pool is not None and block.pool.gpu.world is not self.world)
        ):
            raise DeviceError(f"{address:#x} is not allocated on device {self.index}")
        return block

    def _free_host(self, address: int, kind: HostKind) -> None:
        with self.world.lock:
            block = host_memory.free(address, kind)
            if self.stop is None:
                self._tell_free(block)

    def _tell_free(self, block: Block) -> None:
        if self.world.races is not None and block.shadow is not None:
            self.world.races.freed_by_host(block.shadow, self.index)

    def _check_migratable(self, address: int, nbytes: int) -> HostBlock:
        if nbytes < 1:
            raise ValueError(f"needs a size of at least 1, found {nbytes}")
        block = self._block_around(address)
        if (
            not isinstance(block, HostBlock)
            or block.kind is HostKind.PINNED
            or not block.used_nbytes
            or address + nbytes > block.address + block.capacity
        ):
            raise DeviceError(
                f"{nbytes} bytes at {address:#x} are not managed or system memory, which alone "
                "can be prefetched and advised about"
            )
        return block


def check_location(device: Checks, location: Location) -> None:
    """Refuse a place that isn't there.

    Raises
    ------
    ValueError
        No such kind of place.
    DeviceError
        No such device or node: the host has one.
    """
    if location.kind == "device":
        device._check_index(location.index)
    elif location.kind not in ("host", "numa"):
        raise ValueError(f"a location is 'device', 'host' or 'numa', found {location.kind!r}")
    elif location.index:
        raise DeviceError(f"the simulator's host has one NUMA node, 0; found {location.index}")
