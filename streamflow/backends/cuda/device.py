"""One open GPU: the verbs of :class:`streamflow.backends.base.Backend`.

Every driver call here, cuda.core's and cuda.bindings' alike, releases the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, Event, EventOptions, LaunchConfig, Stream, launch

from streamflow.backends.base import Access, Checker, DeviceProperties, KernelSpec
from streamflow.backends.cuda.errors import DriverCallError, check, translate
from streamflow.backends.cuda.fills import Copy, Row, plan_fill
from streamflow.backends.cuda.graphs import CudaGraph, GraphVerbs, capturing
from streamflow.backends.cuda.kernels import KernelLoader
from streamflow.backends.cuda.mapped import CHUNK_NBYTES
from streamflow.backends.cuda.mapped import holds as holds_mapped
from streamflow.backends.cuda.pools import PoolVerbs
from streamflow.backends.cuda.streams import StreamTable
from streamflow.backends.memory import MemoryKind
from streamflow.errors import DeviceError, DeviceLost, StreamflowError

__all__ = ["CudaBackend"]

_PLAIN_EVENT = EventOptions(timing_enabled=False)
_TIMING_EVENT = EventOptions(timing_enabled=True)

# Looked up once: attribute access on the module is a measurable part of these calls.
_allocate = driver.cuMemAllocFromPoolAsync
_free = driver.cuMemFreeAsync
_set_current = driver.cuCtxSetCurrent
_copy_h2d = driver.cuMemcpyHtoDAsync
_copy_d2h = driver.cuMemcpyDtoHAsync
_copy_d2d = driver.cuMemcpyDtoDAsync

_SETS = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}

# Contexts of the devices opened in this process. A copy between devices names both, and
# must not be what makes a context on a device nobody asked for (CR13).
_CONTEXTS: dict[int, Any] = {}


_QUARANTINE: list[Any] = []
"""What was closed while work was running: never destroyed."""

_open: dict[int, list[CudaBackend]] = {}
_open_lock = threading.Lock()


class CudaBackend(PoolVerbs, GraphVerbs):
    """GPU ``index`` through its primary context, shared with every library in the process.

    Parameters
    ----------
    index : int
        The driver's ordinal.

    Raises
    ------
    ValueError
        No such device.
    """

    name = "cuda"
    is_virtual = False
    is_cuda = True
    checker: Checker | None = None
    # Measured on an H200: the 1022nd queued launch or copy is the first to block.
    num_queued_max = 1022

    def __init__(self, index: int) -> None:
        self._num_devices: int = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
        if not 0 <= index < self._num_devices:
            raise ValueError(
                f"device {index} does not exist: the CUDA driver sees {self._num_devices}"
            )
        self.index = index
        self.space = ("cuda", index)
        self._device = Device(index)
        self._device.set_current()
        # Holding the Context keeps the primary context retained: pinned memory and late
        # frees outlive close().
        self._context = self._device.context
        self._handle = self._context.handle
        _CONTEXTS[index] = self._handle
        self._streams = StreamTable()
        self._pools: dict[int, Any] = {}
        self._noting: dict[Any, CudaGraph] = {}
        self._idle_streams: list[Any] = []
        self._between: Any = None  # the pool of copies between two blocks on the host
        self._kernels = KernelLoader(self._device)
        self._is_lost = False
        self._is_closed = False
        self.properties = self._read_properties()
        # The hot path calls cuda.core itself; the method below it states the contract.
        self.launch = launch  # type: ignore[method-assign]
        with _open_lock:
            _open.setdefault(index, []).append(self)

    # -- device ------------------------------------------------------------------
    def set_current(self) -> None:
        """Make this device's primary context current in the calling thread."""
        # No cache of ours: other libraries switch contexts behind our back.
        (error,) = _set_current(self._handle)
        if error:
            raise DriverCallError(error, "cuCtxSetCurrent")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver sees them for all processes together."""
        self.set_current()
        error, free, total = driver.cuMemGetInfo()
        if error:
            raise DriverCallError(error, "cuMemGetInfo")
        return int(free), int(total)

    def synchronize_blocking(self) -> None:
        """Wait for everything in the primary context, other libraries' work included."""
        self.set_current()
        with capturing(self.index):  # which this would end
            check(driver.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Destroy the streams and pools still held; waits for nothing.

        Where memory is in use or work is running, all of it is kept for good instead
        (see :meth:`destroy_pool`).
        """
        if self._is_closed:
            return
        self._is_closed = True
        with _open_lock:
            others = _open[self.index]
            others.remove(self)
            if others and not self._is_lost:
                # A resource serves every open device of a GPU: pools it made here go on there.
                others[0]._pools.update(self._pools)
                self._pools = {}
        pools, self._pools = self._pools, {}
        if self._is_lost:
            # Every call would fail: the driver reclaims a dead context with the process.
            self._kernels.clear()
            self._streams.forget()
            return
        held = (self._kernels, self._streams, pools)
        try:
            self.set_current()
            is_used = any(self.pool_info(pool).used_nbytes for pool in pools.values())
            if is_used or not self._streams.are_idle():
                _QUARANTINE.append(held)
                return
            self._kernels.clear()
            self._streams.close()
            for pool in pools.values():
                check(driver.cuMemPoolDestroy(pool), "cuMemPoolDestroy")
        except DriverCallError as error:
            # A fault that shows only now is not close()'s to report: the ops report it.
            _QUARANTINE.append(held)
            if not isinstance(self.translate(error, "closing"), DeviceLost):
                raise

    def translate(self, error: BaseException, doing: str) -> StreamflowError:
        """``error`` as one of streamflow's; remembers that the device is lost."""
        translated = translate(error, doing)
        if isinstance(translated, DeviceLost):
            self._is_lost = True
        return translated

    def controls(self) -> Any:
        """None: hardware takes no orders."""
        return None

    # -- streams and events ------------------------------------------------------
    def create_stream(self, *, priority: int = 0) -> Stream:
        """A non-blocking stream."""
        self.set_current()
        return self._streams.create(self._device, priority)

    def stream_id(self, stream: Any, /) -> int:
        """The driver's id, unique in the life of the process."""
        return int(check(driver.cuStreamGetId(self._streams[stream]), "cuStreamGetId"))

    def create_event(self, *, timing: bool = False) -> Event:
        """An event that has not been recorded."""
        self.set_current()
        return self._device.create_event(_TIMING_EVENT if timing else _PLAIN_EVENT)

    def elapsed_ms(self, start: Any, end: Any, /) -> float:
        """Device time between two done timing events, to about half a microsecond."""
        return float(end - start)

    # -- memory (the rest: PoolVerbs, MemoryVerbs) -----------------------------------
    def allocate(self, pool: Any, nbytes: int, stream: Any, /) -> int:
        """Stream-ordered allocation from ``pool``."""
        if self._num_devices > 1:
            self.set_current()
        if self._noting:
            self._refuse_node(stream, "an allocation")
        error, address = _allocate(nbytes, pool, self._streams[stream])
        if error:
            raise DriverCallError(error, "cuMemAllocFromPoolAsync")
        return int(address)

    def deallocate(self, address: int, stream: Any, /) -> None:
        """Stream-ordered free, of ``cuMemAlloc``'s memory as well."""
        if self._num_devices > 1:
            self.set_current()
        if self._noting:
            self._refuse_node(stream, "a free")
        (error,) = _free(address, self._streams[stream])
        if error:
            raise DriverCallError(error, "cuMemFreeAsync")

    # -- work ----------------------------------------------------------------------
    # With several devices the right context is made current for each: asynchronous
    # copies of stream-ordered memory need their stream's context in the calling thread.
    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        """Copy pinned host memory to the device."""
        if self._num_devices > 1:
            self.set_current()
        if holds_mapped(dst):
            self._copy_by_device(dst, src, nbytes, stream)
            return
        if self._noting:
            self._refuse_pageable(stream, src)
        (error,) = _copy_h2d(dst, src, nbytes, self._streams[stream])
        if error:
            self._copy_plain(dst, src, nbytes, stream, DriverCallError(error, "cuMemcpyHtoDAsync"))

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        """Copy from the device to pinned host memory."""
        if self._num_devices > 1:
            self.set_current()
        if holds_mapped(src):
            self._copy_by_device(dst, src, nbytes, stream)
            return
        if self._noting:
            self._refuse_pageable(stream, dst)
        (error,) = _copy_d2h(dst, src, nbytes, self._streams[stream])
        if error:
            self._copy_plain(dst, src, nbytes, stream, DriverCallError(error, "cuMemcpyDtoHAsync"))

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        """Copy within the device."""
        if self._num_devices > 1:
            self.set_current()
        if holds_mapped(dst) and holds_mapped(src):
            self._copy_by_device(dst, src, nbytes, stream)
            return
        if self._noting:
            self._refuse_pageable(stream, dst, src)
        (error,) = _copy_d2d(dst, src, nbytes, self._streams[stream])
        if error:
            self._copy_plain(dst, src, nbytes, stream, DriverCallError(error, "cuMemcpyDtoDAsync"))

    def _copy_plain(
        self, dst: int, src: int, nbytes: int, stream: Any, error: DriverCallError
    ) -> None:
        """Copy by addresses alone what was refused, or raise ``error``.

        Calls that name the sides of a copy take only what the driver knows to lie on a device:
        not a pool on the host, nor the host's plain memory, which a device may read all the same.
        """
        if error.code != "CUDA_ERROR_INVALID_VALUE" or not (
            self.memory_support().has_pageable_access
            or all(
                self.pointer_attributes(address).kind is not MemoryKind.UNREGISTERED
                for address in (dst, src)
            )
        ):
            raise error
        (again,) = driver.cuMemcpyAsync(dst, src, nbytes, self._streams[stream])
        if again:
            raise error

    def _copy_by_device(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy between two page-locked blocks, of which one holds arrays: see ``mapped``."""
        chunk_nbytes = min(nbytes, CHUNK_NBYTES)
        if self._noting:
            lent = self._graph_memory(stream, chunk_nbytes)
            if lent is not None:
                self._copy_through(lent, chunk_nbytes, dst, src, nbytes, stream)
                return
        if self._between is None:
            self._between = self.create_pool(release_threshold_nbytes=0)
        between = self.allocate(self._between, chunk_nbytes, stream)
        try:
            self._copy_through(between, chunk_nbytes, dst, src, nbytes, stream)
        finally:
            self.deallocate(between, stream)

    def _copy_through(
        self, between: int, chunk_nbytes: int, dst: int, src: int, nbytes: int, stream: Any
    ) -> None:
        handle = self._streams[stream]
        for start in range(0, nbytes, chunk_nbytes):
            size = min(chunk_nbytes, nbytes - start)
            check(_copy_h2d(between, src + start, size, handle), "cuMemcpyHtoDAsync")
            check(_copy_d2h(dst + start, between, size, handle), "cuMemcpyDtoHAsync")

    def copy_peer(
        self, dst: int, dst_index: int, src: int, src_index: int, nbytes: int, stream: Any, /
    ) -> None:
        """Copy between two open devices; through host memory where they are not peers."""
        self.set_current()
        (error,) = driver.cuMemcpyPeerAsync(
            dst, _context_of(dst_index), src, _context_of(src_index), nbytes, self._streams[stream]
        )
        if error:
            raise DriverCallError(error, "cuMemcpyPeerAsync")

    def fill(self, dst: int, pattern: bytes, count: int, stream: Any, /) -> int:
        """Write ``pattern`` ``count`` times; one driver call for up to 4 bytes."""
        if self._num_devices > 1:
            self.set_current()
        handle = self._streams[stream]
        steps = plan_fill(dst, pattern, count)
        for step in steps:
            if isinstance(step, Row):
                (error,) = _SETS[step.width](step.address, step.value, step.num_values, handle)
            elif isinstance(step, Copy):
                # As copy_d2d: a pool on the host can be set, but is no side of a named copy.
                self.copy_d2d(step.address, step.source, step.nbytes, stream)
                continue
            else:
                (error,) = driver.cuMemsetD2D32Async(
                    step.address, step.pitch, step.value, 1, step.num_values, handle
                )
            if error:
                raise DriverCallError(error, "cuMemset")
        return len(steps)

    # -- kernels -------------------------------------------------------------------
    def load_kernel(self, spec: KernelSpec, /) -> Any | None:
        """The kernel if it was loaded before, else None."""
        return self._kernels.find(spec)

    def load_kernel_blocking(self, spec: KernelSpec, /) -> Any:
        """Compile and load, on a worker thread; the first launch finds nothing left to do."""
        self.set_current()
        return self._kernels.load_blocking(spec)

    def launch_config(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_nbytes: int, /
    ) -> LaunchConfig:
        """The geometry of a launch; cuda.core refuses dimensions below 1."""
        return LaunchConfig(grid=grid, block=block, shmem_size=shared_nbytes)

    def launch(self, stream: Any, config: Any, kernel: Any, /, *args: Any) -> None:
        """Submit one launch: cuda.core's ``launch``, bound in ``__init__``."""
        raise AssertionError("__init__ binds cuda.core.launch over this method")

    def call(
        self,
        stream: Any,
        name: str,
        body: Callable[..., None],
        accesses: Sequence[Access | None],
        /,
        *args: Any,
    ) -> None:
        """Run it now; whatever device it leaves current, ours is again afterwards."""
        # Not set_current() alone: cuda.core keeps its devices by thread, and would refuse the
        # one of this thread to the function.
        Device(self.index).set_current()
        try:
            body(*args)
        finally:
            self.set_current()

    def array_argument(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> int:
        """The address."""
        return address

    # -- time ------------------------------------------------------------------------
    def clock_s(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()

    def advance(self, num_busy_workers: int, /, until_s: float = inf) -> bool:
        """Always False: real time passes by itself."""
        return False

    def are_blocked(self, num_busy_workers: int, /) -> bool:
        """Always False: nobody waits for virtual time."""
        return False

    def skip_to(self, num_busy_workers: int, time_s: float, may_jump: bool, /) -> bool:
        """Always False: nobody can make it pass."""
        return False

    def _read_properties(self) -> DeviceProperties:
        found = self._device.properties
        capability = self._device.compute_capability
        total = check(driver.cuDeviceTotalMem(self.index), "cuDeviceTotalMem")
        error, least, greatest = driver.cuCtxGetStreamPriorityRange()
        if error:
            raise DriverCallError(error, "cuCtxGetStreamPriorityRange")
        return DeviceProperties(
            name=self._device.name,
            compute_capability=(capability.major, capability.minor),
            total_memory_nbytes=int(total),
            multiprocessor_count=found.multiprocessor_count,
            warp_size=found.warp_size,
            max_threads_per_block=found.max_threads_per_block,
            max_block_dim=(found.max_block_dim_x, found.max_block_dim_y, found.max_block_dim_z),
            max_grid_dim=(found.max_grid_dim_x, found.max_grid_dim_y, found.max_grid_dim_z),
            # What a launch may ask for: kernels are loaded with the opt-in above 48 KiB.
            max_shared_memory_per_block_nbytes=found.max_shared_memory_per_block_optin,
            num_copy_engines=found.async_engine_count,
            priority_range=(int(least), int(greatest)),
            numa_node=node if (node := int(found.host_numa_id)) >= 0 else None,
        )


def _context_of(index: int) -> Any:
    try:
        return _CONTEXTS[index]
    except KeyError:
        raise DeviceError(
            f"device {index} is not open in this process; enter a Device on it before copying"
        ) from None
