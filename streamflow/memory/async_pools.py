"""Stream-ordered memory of the driver's pools."""

from __future__ import annotations

from typing import Any

from streamflow.backends.base import Backend
from streamflow.errors import Closed, DeviceError, DeviceLost
from streamflow.memory.blocks import Piece
from streamflow.memory.leaf import LeafMemoryResource, padded
from streamflow.memory.mempool import MemoryPool
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import checked_size
from streamflow.memory.space import Place, Space

__all__ = [
    "CudaAsyncManagedMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncViewMemoryResource",
]

KEEP_ALL = 2**64 - 1
"""A release threshold that no pool reaches: nothing goes back before a trim."""


class _PoolMemoryResource(LeafMemoryResource):
    """What is the same whoever owns the pool."""

    def __init__(self, device: Any = None) -> None:
        self._pool: Any = None
        super().__init__(device)

    def pool_handle(self) -> Any:
        """The backend's own handle of the pool; makes the pool if there is none yet.

        Raises
        ------
        Closed
            The resource is closed, or no device is open to make the pool on.
        DeviceError
            The device has no such pools.
        """
        if self._is_closed:
            raise Closed(f"{self!r} is closed")
        space = self._known_space()
        place = space.sync_place()
        self._enter(place)
        with self._lock, self._translating(place.backend, "making a pool"):
            if self._prepared is not space:
                self._check_support(place.backend)
                self._prepare(place)
                self._prepared = space
            return self._pool

    def _check_support(self, backend: Backend) -> None:
        if not backend.memory_support().has_pools:
            raise DeviceError(
                f"device {backend.index} has no stream-ordered memory pools: use a "
                "PoolMemoryResource over a CudaMemoryResource"
            )

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        capacity = padded(nbytes, alignment)
        address = place.backend.allocate(self._pool, capacity, place.stream)
        place.num_calls += 1
        return address, capacity

    def _give(self, piece: Piece, place: Place) -> None:
        base = self._base_of(piece)
        if base is None:
            return
        with self._translating(place.backend, "freeing"):
            place.backend.deallocate(base, place.stream)
        self._live.pop(base, None)
        place.num_calls += 1

    def _on_space_closing(self) -> None:
        space = self._space
        with self._lock:
            bases, pool, owner = list(self._live), self._pool, self._prepared
            self._dropped.clear()
            self._forget()
            self._space = None
        if space is None or owner is not space:
            return
        backend = space.backend
        place = space.sync_place()
        try:
            for base in bases:
                backend.deallocate(base, place.stream)
            if bases:
                backend.synchronize_blocking()  # so that the pool is seen to be empty
            self._let_go(space, pool)
        except Exception as error:
            translated = self._translated(backend, error, "closing")
            if not isinstance(translated, DeviceLost):
                raise translated from error

    def _let_go(self, space: Space, pool: Any) -> None:
        """No memory of ours is left in ``pool``."""

    def _on_forgotten(self) -> None:
        self._pool = None


class CudaAsyncMemoryResource(_PoolMemoryResource):
    """A stream-ordered pool of its own: ``cudaMallocAsync`` and ``cudaFreeAsync``.

    Parameters
    ----------
    initial_pool_size : int or str, optional
        Bytes to have the pool reserve when it is made. Default: none.
    release_threshold : int or str, optional
        Bytes that the pool keeps at a synchronisation. Default: all.
    enable_ipc : bool
        Whether the pool can be shared with other processes. Such a pool never gives memory back
        to the device.
    max_size : int or str
        The pool's bound in bytes; 0: the device's memory.
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    TypeError, ValueError
        Sizes that are none, or an initial size above the bound.
    DeviceError
        The device has no such pools, or none that can be shared; at the first allocation where
        it isn't open yet.

    Notes
    -----
    The pool is made at the first allocation, on that stream's device. The device's default pool,
    which every library of the process shares, is never touched. A resource equals itself only.
    """

    def __init__(
        self,
        initial_pool_size: int | str | None = None,
        release_threshold: int | str | None = None,
        enable_ipc: bool = False,
        max_size: int | str = 0,
        device: Any = None,
    ) -> None:
        self.initial_pool_size = (
            0 if initial_pool_size is None else checked_size(initial_pool_size, "initial_pool_size")
        )
        self.release_threshold = (
            KEEP_ALL
            if release_threshold is None
            else checked_size(release_threshold, "release_threshold", largest=KEEP_ALL)
        )
        self.enable_ipc = bool(enable_ipc)
        self.max_size = checked_size(max_size, "max_size")
        if self.max_size and self.initial_pool_size > self.max_size:
            raise ValueError(
                f"initial_pool_size={self.initial_pool_size} is more than max_size={self.max_size}"
            )
        super().__init__(device)

    def _check_support(self, backend: Backend) -> None:
        super()._check_support(backend)
        if self.enable_ipc and not backend.memory_support().pool_handle_types:
            raise DeviceError(
                f"device {backend.index} has no pools that can be shared with other processes"
            )

    def _prepare(self, place: Place) -> None:
        backend = place.backend
        pool = self._make_pool(backend)
        if self.initial_pool_size:
            try:
                address = backend.allocate(pool, self.initial_pool_size, place.stream)
            except BaseException:
                backend.destroy_pool(pool)
                raise
            backend.deallocate(address, place.stream)
            place.num_calls += 2
        self._pool = pool

    def _make_pool(self, backend: Backend) -> Any:
        return backend.create_pool(
            release_threshold_nbytes=self.release_threshold,
            max_nbytes=self.max_size,
            is_exportable=self.enable_ipc,
        )

    def trim(self) -> None:
        """Give what the pool doesn't use back to the device."""
        super().trim()
        with self._lock:
            space = self._space
            if space is None or not space.is_open or self._prepared is not space:
                return
            with self._translating(space.backend, "trimming"):
                space.backend.trim_pool(self._pool, 0)

    def _let_go(self, space: Space, pool: Any) -> None:
        space.destroy_pool(pool)

    @property
    def largest_nbytes(self) -> int | None:
        """``max_size``, where one was named."""
        return self.max_size or None

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether it is the same: the pool is its own."""
        return self is other


class CudaAsyncManagedMemoryResource(CudaAsyncMemoryResource):
    """A stream-ordered pool of managed memory, which host and device both reach.

    Parameters
    ----------
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    DeviceError
        There are no such pools: they need CUDA 13 and concurrent managed access.

    Notes
    -----
    The pool is made at the first allocation, and keeps all it reserved. The driver's own managed
    pool, which every library of the process shares, is not touched. The host may touch the
    memory once the work on it has been awaited. A resource equals itself only.
    """

    is_host_accessible = True
    is_managed = True

    def __init__(self, device: Any = None) -> None:
        super().__init__(device=device)

    def _check_support(self, backend: Backend) -> None:
        super()._check_support(backend)
        support = backend.memory_support()
        if not support.has_managed_pools or not support.has_concurrent_managed_access:
            missing = (
                "pools of managed memory (CUDA 13)"
                if support.has_concurrent_managed_access
                else "concurrent managed access"
            )
            raise DeviceError(f"device {backend.index} has no {missing}: use ManagedMemoryResource")

    def _make_pool(self, backend: Backend) -> Any:
        return backend.create_pool(release_threshold_nbytes=KEEP_ALL, is_managed=True)


class CudaAsyncViewMemoryResource(_PoolMemoryResource):
    """Stream-ordered memory of a pool that somebody else owns.

    Parameters
    ----------
    pool_handle : object
        The backend's own handle of a pool, or what has one as ``handle``, such as a
        ``MemoryPool``, which is kept alive.
    device : Device or int, optional
        Whose streams it serves. Default: the device that a ``MemoryPool`` lies on; else that of
        the stream of its first allocation.

    Raises
    ------
    TypeError
        No pool.
    Closed
        The pool is closed.
    DeviceError
        The device has no pools; at the first allocation where it isn't open yet.

    Notes
    -----
    The pool is neither altered nor destroyed. The host may touch the memory of a ``MemoryPool``
    that lies there, once the work on it has been awaited. Two views of one pool are equal.
    """

    def __init__(self, pool_handle: Any, device: Any = None) -> None:
        if isinstance(pool_handle, DeviceMemoryResource):
            raise TypeError(
                f"pool_handle takes a pool or its handle, found {pool_handle!r}: resources over "
                "a pool have its handle as pool_handle()"
            )
        if pool_handle is None or isinstance(pool_handle, (bool, str, bytes)):
            raise TypeError(f"pool_handle takes a pool or its handle, found {pool_handle!r}")
        self._source = pool_handle
        self._key = _key_of(_handle_of(pool_handle))
        if isinstance(pool_handle, MemoryPool):
            self.is_host_accessible = pool_handle.location.kind != "device"
            if device is None and not self.is_host_accessible:
                device = pool_handle.device
        super().__init__(device)

    def _prepare(self, place: Place) -> None:
        self._pool = _handle_of(self._source)

    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        self._pool = _handle_of(self._source)  # a closed pool's handle may be another's by now
        return super()._allocate(nbytes, alignment, place)

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether both are views of one pool."""
        return (
            type(other) is type(self)
            and isinstance(other, CudaAsyncViewMemoryResource)
            and self._key == other._key
        )


def _handle_of(source: Any) -> Any:
    return getattr(source, "handle", source)


def _key_of(handle: Any) -> Any:
    # The driver's handles don't compare, but have an address.
    return int(handle) if hasattr(handle, "__int__") else id(handle)
