"""A backend whose verbs do nothing, so that what is left is our own Python.

The verbs that are C functions in ``cuda.core`` are C functions here too; those that
are Python methods of ``CudaBackend`` keep the same lines, around a C call that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Any

from streamflow.backends import register_backend
from streamflow.backends.base import DeviceProperties, PoolInfo
from streamflow.backends.memory import MemorySupport
from streamflow.backends.sim import host_memory
from streamflow.config import Settings
from streamflow.errors import DeviceError, StreamflowError

__all__ = ["NullBackend", "open_null", "register"]


class NullEvent:
    """Done, unless a test says otherwise."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = True

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullStream:
    """Takes everything and does nothing."""

    __slots__ = ("handle", "record", "wait")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.record: Callable[[Any], Any] = id  # a C function of one argument
        self.wait: Callable[[Any], Any] = id

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullBackend:
    """One device that is never there."""

    name = "null"
    is_virtual = False
    is_cuda = False
    checker = None
    num_queued_max = 1022

    def __init__(self, index: int) -> None:
        self.index = index
        self.space = ("null", index)
        self._ids = count(1)
        self._next_address = count(1 << 40, 1 << 20).__next__
        self._handles: dict[Any, int] = {}
        self._num_devices = 1
        self.launch: Callable[..., Any] = "".format  # a C function of any arguments
        self.properties = DeviceProperties(
            name="nothing",
            compute_capability=(9, 0),
            total_memory_nbytes=1 << 40,
            multiprocessor_count=1,
            warp_size=32,
            max_threads_per_block=1024,
            max_block_dim=(1024, 1024, 64),
            max_grid_dim=(2**31 - 1, 65535, 65535),
            max_shared_memory_per_block_nbytes=227 << 10,
            num_copy_engines=2,
            priority_range=(0, -5),
        )

    def set_current(self) -> None:
        pass

    def memory_support(self) -> MemorySupport:
        return MemorySupport(True, True, True, True, True, True, True, True, frozenset())

    def memory_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def synchronize_blocking(self) -> None:
        pass

    def close(self) -> None:
        pass

    def translate(self, error: BaseException, doing: str) -> StreamflowError:
        if isinstance(error, StreamflowError):
            return error
        translated = DeviceError(f"{doing}: {error!r}")
        translated.__cause__ = error
        return translated

    def controls(self) -> Any:
        return None

    def create_stream(self, *, priority: int = 0) -> NullStream:
        stream = NullStream(next(self._ids))
        self._handles[stream] = stream.handle
        return stream

    def stream_id(self, stream: NullStream, /) -> int:
        return stream.handle

    def create_event(self, *, timing: bool = False) -> NullEvent:
        return NullEvent()

    def elapsed_ms(self, start: Any, end: Any, /) -> float:
        return 0.0

    def create_pool(self, *, release_threshold_nbytes: int, max_nbytes: int = 0) -> Any:
        return object()

    def destroy_pool(self, pool: Any, /) -> None:
        pass

    def pool_info(self, pool: Any, /) -> PoolInfo:
        return PoolInfo(0, 0, 0, 0, 0)

    def trim_pool(self, pool: Any, min_nbytes_to_keep: int, /) -> None:
        pass

    # As CudaBackend's: a dictionary look-up for the handle, a call, a test of its error.
    def allocate(self, pool: Any, nbytes: int, stream: Any, /) -> int:
        if self._num_devices > 1:
            self.set_current()
        error, address = 0, self._next_address()
        self._handles[stream]
        if error:
            raise AssertionError
        return int(address)

    def deallocate(self, address: int, stream: Any, /) -> None:
        if self._num_devices > 1:
            self.set_current()
        (error,) = (id(self._handles[stream]) and 0,)
        if error:
            raise AssertionError

    def allocate_pinned_blocking(self, nbytes: int, /) -> int:
        return host_memory.allocate(nbytes)

    def allocate_mapped_blocking(self, nbytes: int, /) -> int:
        return host_memory.allocate(nbytes)

    def free_pinned_blocking(self, address: int, /) -> None:
        host_memory.free(address)

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        pass

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        pass

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None:
        pass

    def copy_peer(
        self, dst: int, dst_index: int, src: int, src_index: int, nbytes: int, stream: Any, /
    ) -> None:
        pass

    def fill(self, dst: int, pattern: bytes, count: int, stream: Any, /) -> None:
        pass

    def load_kernel(self, spec: Any, /) -> Any:
        return spec

    def load_kernel_blocking(self, spec: Any, /) -> Any:
        return spec

    def launch_config(self, grid: Any, block: Any, shared_nbytes: int, /) -> Any:
        return (grid, block, shared_nbytes)

    def call(
        self, stream: Any, name: str, body: Any, accesses: Sequence[Any], /, *args: Any
    ) -> None:
        pass

    def array_argument(self, address: int, shape: Any, dtype: Any, /) -> int:
        return address

    def clock_s(self) -> float:
        return time.monotonic()

    def advance(self, num_busy_workers: int, /, until_s: float = inf) -> bool:
        return False

    def are_blocked(self, num_busy_workers: int, /) -> bool:
        return False

    def skip_to(self, num_busy_workers: int, time_s: float, may_jump: bool, /) -> bool:
        return False


def open_null(index: int, settings: Settings, loop_key: object) -> NullBackend:
    """Open the device that does nothing."""
    return NullBackend(index)


def register() -> None:
    """Make ``Device(backend="null")`` work."""
    register_backend("null", open_null)
