"""Stream-ordered pools as the driver has them: made, looked at, trimmed and shared."""

from __future__ import annotations

from operator import index
from typing import Any

from streamflow.backends.memory import Location, MemorySupport, PoolAccess, PoolAttribute, PoolInfo
from streamflow.errors import DeviceError
from streamflow.memory.current import checked_device, find_space
from streamflow.memory.pool_attributes import PoolAttributes
from streamflow.memory.pool_handle import PoolHandle
from streamflow.memory.sizes import checked_size
from streamflow.memory.space import Space

__all__ = ["MemoryPool", "named"]


class MemoryPool:
    """A stream-ordered pool of the driver's.

    Memory comes out of it through
    :class:`~streamflow.memory.CudaAsyncViewMemoryResource`, which takes the pool itself. It
    lies where the pool does, whichever device is the current one.

    Parameters
    ----------
    device : Device or int
        An open one.
    location : str or int
        ``"device"``; ``"host"``: page-locked memory; an int: that NUMA node of the host. Pools
        on the host are reached by ``device`` and those that :meth:`set_access` names.
    max_size : int or str
        Bytes it may reserve; 0: as many as there are. ``"1GiB"``.
    exportable : bool
        Its memory can be shared with other processes. Such a pool never gives memory back:
        trimming and the threshold do nothing.
    deterministic : bool
        No reuse that depends on how far the device is, nor waits that the driver adds:
        opportunistic and internal reuse are off.

    Raises
    ------
    TypeError, ValueError
        Arguments that are none, or don't go together.
    Closed
        The device is not open.
    DeviceError
        The device has no such pools.

    Notes
    -----
    The release threshold starts at 0: every synchronisation gives unused memory back. One that
    is dropped without :meth:`close` is destroyed when memory is looked for, or with the device.
    """

    def __init__(
        self,
        device: Any,
        *,
        location: str | int = "device",
        max_size: int | str = 0,
        exportable: bool = False,
        deterministic: bool = False,
    ) -> None:
        space = find_space(named(device))
        backend = space.backend
        place = _location(location, space.index)
        max_nbytes = checked_size(max_size, "max_size")
        _check_support(backend.memory_support(), place, exportable, space.index)
        space.reap()
        handle = backend.create_pool(
            release_threshold_nbytes=0,
            max_nbytes=max_nbytes,
            location=None if place.kind == "device" else place,
            is_exportable=exportable,
        )
        self._known = PoolHandle(space, handle, is_owned=True)
        self.location = place
        self.is_exportable = bool(exportable)
        if deterministic:
            self.attributes.reuse_allow_opportunistic = False
            self.attributes.reuse_allow_internal_dependencies = False

    @classmethod
    def _view(cls, space: Space, handle: Any) -> MemoryPool:
        """A pool that somebody else owns: it is never destroyed, nor altered but by its user."""
        pool = cls.__new__(cls)
        pool._known = PoolHandle(space, handle, is_owned=False)
        pool.location = Location("device", space.index)
        pool.is_exportable = False
        return pool

    # -- looking ---------------------------------------------------------------------------

    @property
    def device(self) -> int:
        """The ordinal of the device that it was made for."""
        return self._known.space.index

    @property
    def handle(self) -> Any:
        """The backend's own; on CUDA the driver's ``CUmemoryPool``."""
        return self._known.get()

    @property
    def is_owned(self) -> bool:
        """Whether :meth:`close` destroys it: not the device's own pools."""
        return self._known.is_owned

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called, or its device was closed."""
        return self._known.is_closed

    @property
    def attributes(self) -> PoolAttributes:
        """What can be read, and set where the driver allows it."""
        return PoolAttributes(self)

    def snapshot(self) -> PoolInfo:
        """All counters of one moment."""
        return self._known.backend.pool_info(self.handle)

    @property
    def reserved_nbytes(self) -> int:
        """What it has of the device now."""
        return self.snapshot().reserved_nbytes

    @property
    def reserved_high_nbytes(self) -> int:
        """The most it had."""
        return self.snapshot().reserved_high_nbytes

    @property
    def used_nbytes(self) -> int:
        """What is allocated now."""
        return self.snapshot().used_nbytes

    @property
    def used_high_nbytes(self) -> int:
        """The most that was allocated at a time."""
        return self.snapshot().used_high_nbytes

    @property
    def release_threshold_nbytes(self) -> int:
        """What a synchronisation leaves in the pool."""
        return self.snapshot().release_threshold_nbytes

    def reset_high(self) -> None:
        """Start both high marks again from what they count now."""
        self.attributes.reserved_high = 0
        self.attributes.used_high = 0

    # -- giving back and sharing -----------------------------------------------------------------

    async def trim(self, min_bytes_to_keep: int | str = 0) -> None:
        """Give unused memory back to the device, and keep at least so much.

        Parameters
        ----------
        min_bytes_to_keep : int or str
            What is in use counts.

        Ordering
        --------
        Memory whose free has not run can't go back: if there is any, this waits for all that
        was given to the device, on a thread of its own. On virtual time that happens at once.
        Cancelled, it leaves that thread to its work.

        Raises
        ------
        TypeError, ValueError
            Not a size.
        DeviceError
            On virtual time: what was given to the device can never end, for a closed gate.
        """
        floor = checked_size(min_bytes_to_keep, "min_bytes_to_keep")
        backend, handle = self._known.backend, self.handle
        backend.trim_pool(handle, floor)
        info = backend.pool_info(handle)
        if info.reserved_nbytes <= max(floor, info.used_nbytes):
            return

        def finish() -> None:
            backend.synchronize_blocking()
            backend.trim_pool(handle, floor)

        await self._known.run(finish)

    def get_access(self, device: Any) -> PoolAccess:
        """What ``device`` may do with the pool's memory.

        Parameters
        ----------
        device : Device or int
        """
        ordinal = checked_device(device)
        return self._known.backend.pool_access(self.handle, ordinal)

    async def set_access(
        self, device: Any, access: PoolAccess | str = PoolAccess.READ_WRITE
    ) -> None:
        """Say what ``device`` may do with the memory of this pool, past and future blocks alike.

        Parameters
        ----------
        device : Device or int
            An open one.
        access : PoolAccess or str
            ``"read-write"``, ``"read"`` or ``"none"``. An H200's driver (580) refused ``"read"``.

        Ordering
        --------
        At once for all streams; revoke only what no work in flight uses. It may take seconds
        where the pool has many blocks, and is done on a thread of its own. :meth:`Device.copy`
        goes directly between two devices where one may access the other's pool.

        Raises
        ------
        ValueError
            The pool's own device always has access; or no such access.
        DeviceError
            ``device`` can't reach the memory of this one. Asked first: a grant to an empty pool
            may succeed all the same, and then the next allocation fails.
        Closed
            ``device`` is not open.
        """
        try:
            wanted = PoolAccess(access)
        except ValueError:
            names = ", ".join(repr(each.value) for each in PoolAccess)
            raise ValueError(f"access is one of {names}, found {access!r}") from None
        space = find_space(named(device))
        known, ordinal = self._known, space.index
        handle, backend = self.handle, known.backend
        if self.location.kind == "device":
            if ordinal == known.space.index:
                if wanted is not PoolAccess.READ_WRITE:
                    raise ValueError(
                        f"device {ordinal} owns this pool: its access can't be taken away"
                    )
                return
            if wanted is not PoolAccess.NONE and not space.backend.can_access_peer(self.device):
                raise DeviceError(
                    f"device {ordinal} can't access the memory of device {self.device}: they are "
                    "no peers. dev.copy between them goes through the host"
                )
        await self._known.run(lambda: backend.set_pool_access_blocking(handle, ordinal, wanted))

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy it if it is ours. Its blocks stay valid, and go back as they are freed.

        Where it was a device's current pool, the default pool is that again.
        """
        self._known.close()

    def __del__(self) -> None:
        known = getattr(self, "_known", None)
        if known is not None:
            known.drop()  # a finaliser never calls the driver (R12)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same pool of the driver."""
        return isinstance(other, MemoryPool) and self._known.key == other._known.key

    def __hash__(self) -> int:
        return hash(self._known.key)

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<MemoryPool on {self.location.kind} {self.location.index}{state}>"

    # -- inside ------------------------------------------------------------------------------

    def _read(self, attribute: PoolAttribute) -> int:
        return self._known.backend.pool_attribute(self.handle, attribute)

    def _write(self, attribute: PoolAttribute, value: int) -> None:
        self._known.backend.set_pool_attribute(self.handle, attribute, value)


def _location(location: str | int, ordinal: int) -> Location:
    if location == "device":
        return Location("device", ordinal)
    if location == "host":
        return Location("host")
    if isinstance(location, (bool, str)) or not hasattr(location, "__index__"):
        raise TypeError(f"location= is 'device', 'host' or a NUMA node's number: {location!r}")
    node = index(location)
    if node < 0:
        raise ValueError(f"a NUMA node's number is not negative, found {node}")
    return Location("numa", node)


def _check_support(support: MemorySupport, place: Location, exportable: bool, ordinal: int) -> None:
    if not support.has_pools:
        raise DeviceError(
            f"device {ordinal} has no stream-ordered pools: use PoolMemoryResource over "
            "CudaMemoryResource"
        )
    if place.kind == "device":
        if exportable and not support.pool_handle_types:
            raise DeviceError(f"pools of device {ordinal} can't be shared with other processes")
        return
    if exportable:
        raise ValueError("only a pool on the device can be shared with other processes")
    if not support.has_host_pools:
        raise DeviceError(f"device {ordinal} has no pools on the host: use location='device'")


def named(device: Any) -> Any:
    """``device``, which has to be said."""
    if device is None:
        raise TypeError("device= takes a Device or an ordinal, found None")
    return device
