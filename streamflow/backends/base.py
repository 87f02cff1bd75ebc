"""The one narrow door to hardware: the verbs a backend offers, named as cuda.core names them.

Handles stay small and are the backend's own: on CUDA a stream *is* a
``cuda.core.Stream`` and an event *is* a ``cuda.core.Event``, so the hot path
pays no wrapper. Verbs are thread-safe. Those ending in ``_blocking`` may block
their thread and are never called on the event loop (rule R1). Addresses are
plain ints; every host address given to a copy must lie in page-locked memory, from
:meth:`Backend.allocate_pinned_blocking` or of somebody else's.

A backend raises its own errors; :meth:`Backend.translate` turns any of them into
streamflow's tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from types import CodeType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemorySupport,
    PointerAttributes,
    PoolAccess,
    PoolAttribute,
    PoolInfo,
)
from streamflow.errors import StreamflowError

__all__ = [
    "Access",
    "Backend",
    "Checker",
    "DeviceProperties",
    "Doing",
    "Event",
    "KernelSpec",
    "Parameter",
    "PoolInfo",
    "Stream",
]


class Access(Enum):
    """What a kernel does with the memory behind a pointer."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read-write"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter, from the CUDA signature.

    ``dtype`` is the NumPy type of a scalar or of a pointer's elements, None where
    any type is accepted (``void*``, pointers to structs). ``access`` is None for a scalar.
    """

    name: str
    ctype: str
    dtype: np.dtype[Any] | None
    access: Access | None

    @property
    def is_pointer(self) -> bool:
        return self.access is not None


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """Everything a backend needs to make a kernel launchable.

    Exactly one of ``source`` (CUDA C++) and ``image`` (cubin, PTX or fatbin) is
    given. ``body`` is the reference body in NumPy that the simulator runs;
    ``cost_s`` estimates its run time in seconds from the same arguments.
    """

    name: str
    parameters: tuple[Parameter, ...]
    source: str | None = None
    image: bytes | None = None
    options: tuple[str, ...] = ()
    body: Callable[..., object] | None = None
    cost_s: Callable[..., float] | None = None
    filename: str = "kernel.cu"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device can do. Sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    total_memory_nbytes: int
    multiprocessor_count: int
    warp_size: int
    max_threads_per_block: int
    max_block_dim: tuple[int, int, int]
    max_grid_dim: tuple[int, int, int]
    max_shared_memory_per_block_nbytes: int
    num_copy_engines: int
    priority_range: tuple[int, int]
    """(least, greatest): lower numbers are more urgent."""
    numa_node: int | None = None
    """The node of the host that is nearest, where the platform tells one."""


class Event(Protocol):
    """A point in a stream's order.

    Only ever asked after a record. An event binds to its latest record.
    """

    @property
    def is_done(self) -> bool:
        """True once the device passed the latest record; raises after a fault."""

    def sync(self) -> None:
        """Block this thread until done, without the GIL; raises after a fault."""

    def close(self) -> None:
        """Destroy it. Pending waits on it stay valid."""


class Stream(Protocol):
    """A queue the device works through in order."""

    @property
    def handle(self) -> Any:
        """The driver's handle; ``int()`` of it is the address. Handles are reused: never a key."""

    def record(self, event: Any, /) -> Any:
        """Bind ``event`` to everything submitted here so far."""

    def wait(self, event: Any, /) -> None:
        """Order what is submitted from now on after ``event``'s latest record *at this call*."""

    def sync(self) -> None:
        """Block this thread until all work submitted here is done."""

    def close(self) -> None:
        """Destroy it; work already submitted still runs."""


Doing: TypeAlias = tuple[str, CodeType, int]
"""An op, for who may not keep it: its name, and the code and instruction that called for it."""


class Checker(Protocol):
    """What a backend that watches submissions is told by the layers above. Thread-safe."""

    def attribute(self, doing: Doing | None, /) -> None:
        """The calling thread submits for this op from now on."""

    def hand_off(self) -> Any:
        """What the calling thread knows, to go along with a task or a result."""

    def take_up(self, known: Any, /) -> None:
        """The calling thread begins a task that came with ``known``; None: it has ended."""

    def deliver(self, known: Any, /) -> None:
        """The loop takes a result that came with ``known``."""

    def name_stream(self, stream: Any, name: str, /) -> None:
        """What reports are to call a stream."""

    def fingerprint(self, array: np.ndarray[Any, Any], /) -> int:
        """Of host memory that must not change; takes microseconds, whatever the size."""

    def source_changed(self, doing: Doing, device_index: int, nbytes: int, /) -> None:
        """The program changed a source before it was staged."""


@runtime_checkable
class Backend(Protocol):
    """One open device. Opened by :func:`streamflow.backends.open_backend`."""

    name: str
    index: int
    properties: DeviceProperties
    is_virtual: bool
    """True where time passes only in :meth:`advance` (the simulator's virtual clock)."""
    num_queued_max: int
    """Launches and copies one stream takes before the driver blocks its caller (rule R7)."""
    is_cuda: bool
    """True where streams and addresses are CUDA's own, so that other libraries can use them."""
    checker: Checker | None
    """What watches who submits what, where something does."""
    space: Any
    """Equal, and hashed alike, for backends whose addresses and pools are the same memory."""

    # -- device ------------------------------------------------------------------
    def set_current(self) -> None:
        """Make this device current in the calling thread. Cheap when it already is."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""

    def synchronize_blocking(self) -> None:
        """Block until everything submitted to the device is done."""

    def close(self) -> None:
        """Give back what this backend object still holds. Never blocks on a lost device."""

    def translate(self, error: BaseException, doing: str) -> StreamflowError:
        """``error`` as one of :mod:`streamflow.errors`, saying what was being done.

        A sticky fault becomes ``DeviceLost``.
        """

    def controls(self) -> Any:
        """The object behind ``dev.sim``, which has all of the simulator's; None on hardware."""

    # -- streams and events ------------------------------------------------------
    def create_stream(self, *, priority: int = 0) -> Any:
        """A non-blocking stream. ``priority`` within ``properties.priority_range``."""

    def stream_id(self, stream: Any, /) -> int:
        """An id that no other stream of this process has or will have."""

    def create_event(self, *, timing: bool = False) -> Any:
        """An event for :meth:`Stream.record`."""

    def elapsed_ms(self, start: Any, end: Any, /) -> float:
        """Device time between the latest records of two done timing events."""

    # -- memory --------------------------------------------------------------------
    def memory_support(self) -> MemorySupport:
        """Which kinds of memory there are. Cheap: asked of the driver once."""

    def allocate_linear_blocking(self, nbytes: int, /) -> int:
        """``cudaMalloc``: device memory that every stream may use at once."""

    def allocate_managed_blocking(self, nbytes: int, /) -> int:
        """``cudaMallocManaged``: memory that host and device both reach."""

    def free_linear_blocking(self, address: int, /) -> None:
        """``cudaFree``, of either; every use must have ended. May wait for the device."""

    def allocate_system(self, nbytes: int, alignment: int, /) -> int:
        """Plain host memory that the device reads as it is (``has_pageable_access``)."""

    def free_system(self, address: int, /) -> None:
        """Give it back; every use must have ended."""

    def prefetch(self, address: int, nbytes: int, location: Location, stream: Any, /) -> None:
        """Move managed or system memory, in the order of ``stream``."""

    def advise(
        self, address: int, nbytes: int, advice: MemoryAdvice, location: Location, /
    ) -> None:
        """Hint at how managed or system memory will be used."""

    def pointer_attributes(self, address: int, /) -> PointerAttributes:
        """What the driver knows of ``address``; undefined for memory that was freed."""

    def allocate_pinned_blocking(self, nbytes: int, /) -> int:
        """Page-locked host memory, portable across devices; outlives this backend."""

    def allocate_mapped_blocking(self, nbytes: int, /) -> int:
        """The same, for arrays to lie in: a copy from or to other pinned memory waits for nothing.

        Given back by :meth:`free_pinned_blocking`.
        """

    def free_pinned_blocking(self, address: int, /) -> None:
        """Give pinned memory back; may wait for running kernels."""

    def register_host_blocking(self, address: int, nbytes: int, is_read_only: bool, /) -> None:
        """Page-lock memory that the program allocated itself, for every device of the process.

        ``is_read_only``: the host may have it mapped for reading only; then devices only read it.
        Memory that is page-locked already, in whole or in part, is refused.
        """

    def unregister_host_blocking(self, address: int, /) -> None:
        """The memory registered at ``address`` is pageable again; every use must have ended.

        May wait for running kernels. Works after :meth:`close`, too.
        """

    def map_pinned(self, address: int, nbytes: int, /) -> int:
        """Where the device sees these page-locked bytes of the host's, for arrays to lie in.

        As after :meth:`allocate_mapped_blocking`, a copy from or to other pinned memory waits
        for nothing. Undone by :meth:`unmap_pinned`, before the memory goes.
        """

    def unmap_pinned(self, address: int, /) -> None:
        """No array lies at ``address``, as :meth:`map_pinned` gave it, any more. Cheap."""

    # -- stream-ordered pools ------------------------------------------------------
    def create_pool(
        self,
        *,
        release_threshold_nbytes: int,
        max_nbytes: int = 0,
        location: Location | None = None,
        is_managed: bool = False,
        is_exportable: bool = False,
    ) -> Any:
        """An owned stream-ordered pool.

        ``max_nbytes=0``: bounded by the device. ``location=None``: on this device.
        ``is_exportable``: can be shared with other processes.
        """

    def destroy_pool(self, pool: Any, /) -> None:
        """Destroy an owned pool; its memory goes back once all of it is freed."""

    def pool_info(self, pool: Any, /) -> PoolInfo: ...

    def pool_attribute(self, pool: Any, attribute: PoolAttribute, /) -> int: ...

    def set_pool_attribute(self, pool: Any, attribute: PoolAttribute, value: int, /) -> None: ...

    def trim_pool(self, pool: Any, min_nbytes_to_keep: int, /) -> None:
        """Give unused reserved memory back to the device, down to a floor."""

    def default_pool(self) -> Any:
        """The device's own pool, which every library in the process shares."""

    def current_pool(self) -> Any:
        """The pool that ``cudaMallocAsync`` takes from on this device."""

    def set_current_pool(self, pool: Any, /) -> None: ...

    def can_access_peer(self, device_index: int, /) -> bool:
        """Whether this device can reach the memory of that one."""

    def pool_access(self, pool: Any, device_index: int, /) -> PoolAccess: ...

    def set_pool_access_blocking(self, pool: Any, device_index: int, access: PoolAccess, /) -> None:
        """Covers memory the pool hands out later as well; may take seconds."""

    def allocate(self, pool: Any, nbytes: int, stream: Any, /) -> int:
        """Stream-ordered allocation; the address may be used on ``stream`` at once."""

    def deallocate(self, address: int, stream: Any, /) -> None:
        """Stream-ordered free, of memory from a pool or from ``allocate_linear_blocking``.

        Every use must be ordered before it on ``stream``.
        """

    # -- work ----------------------------------------------------------------------
    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None: ...

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None: ...

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Any, /) -> None: ...

    def copy_peer(
        self, dst: int, dst_index: int, src: int, src_index: int, nbytes: int, stream: Any, /
    ) -> None:
        """Copy between two devices, ordered on ``stream`` only."""

    def fill(self, dst: int, pattern: bytes, count: int, stream: Any, /) -> int:
        """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times in a row.

        Returns how many places in the stream's queue that took (rule R7).
        """

    # -- kernels -------------------------------------------------------------------
    def load_kernel(self, spec: KernelSpec, /) -> Any | None:
        """The launchable kernel if that takes no blocking work now, else None.

        Raises
        ------
        streamflow.errors.DeviceError
            The kernel can never run here (the simulator: it has no reference body).
        """

    def load_kernel_blocking(self, spec: KernelSpec, /) -> Any:
        """Compile (with an on-disk cache) or load, on a worker thread.

        Raises
        ------
        streamflow.errors.CompileFailed
            With the compiler's log.
        streamflow.errors.BackendUnavailable
            No compiler library; names the extra that brings it.
        """

    def launch_config(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_nbytes: int, /
    ) -> Any: ...

    def launch(self, stream: Any, config: Any, kernel: Any, /, *args: Any) -> None:
        """Submit one launch.

        Scalars: ints for integer types, ``numpy.float32`` for float, Python
        floats for double, else NumPy scalars. Arrays: what :meth:`array_argument` made.
        """

    def call(
        self,
        stream: Any,
        name: str,
        body: Callable[..., None],
        accesses: Sequence[Access | None],
        /,
        *args: Any,
    ) -> None:
        """Have ``body(*args)`` run in the order of ``stream``. It raises nothing.

        Where streams are CUDA's (:attr:`is_cuda`) it runs now, in this thread, with the
        device current: what it submits to ``stream`` is the work. Elsewhere it *is* the
        work: it runs once, when the device comes to it, on a thread of the backend's.

        ``accesses`` says for each of ``args`` what is done with the memory behind it; None
        for what arrives as it is. Arrays: as for :meth:`launch`, where not :attr:`is_cuda`.
        """

    def array_argument(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> Any:
        """What :meth:`launch` takes for an array: the address on CUDA, a view on the simulator."""

    # -- graphs ----------------------------------------------------------------------
    # A graph is used by one thread at a time; the order of what it submits is its edges alone.
    def create_graph(self) -> Any:
        """A graph without nodes."""

    def add_graph_node(
        self, graph: Any, run: Callable[[Any], object], deps: Sequence[Any], /
    ) -> Any:
        """A node that stands for all that ``run(stream)`` submits to its stream, in that order.

        ``run`` is called now, with a stream of the graph's own that notes down what comes instead
        of doing it: launches, copies, fills and calls. Blocking, allocating and freeing there
        raise; so do events where streams aren't CUDA's. Where it submits nothing, the node is only
        a place in the order. What it submits elsewhere is done at once, and is no part of the
        graph. Should another thread have disturbed the noting, all nodes so far are noted again.

        Each launch of the graph does the same with the same arguments; host memory is read and
        written by each. ``body`` of a :meth:`call` is run now where streams are CUDA's, else by
        every launch.

        Ordering
        --------
        After ``deps``, nodes of this graph, and after nothing else.

        Raises
        ------
        BaseException
            What ``run`` raised. The graph holds half a node then, and can only be closed.
        ValueError
            ``deps`` holds a node of another graph.
        streamflow.errors.DeviceError
            The graph can only be closed; or the stream was used for what can't be noted down.
        """

    def embed_graph(self, graph: Any, child: Any, deps: Sequence[Any], /) -> Any:
        """A node that stands for all of ``child``, as it is now; order as for any node.

        The simulator runs the nodes of ``child`` one after another.
        """

    def instantiate_graph_blocking(self, graph: Any, /) -> Any:
        """What can be launched. It stays as it is if the graph grows or is closed.

        Its ``num_places`` is what :meth:`launch_graph` returns for it, also after updates.
        """

    def update_graph_blocking(self, executable: Any, graph: Any, /) -> None:
        """Have later launches do what ``graph`` says; launches already submitted are as before.

        Raises
        ------
        streamflow.errors.DeviceError
            ``graph`` has other nodes or edges, or a node that does something of another kind
            (arguments, addresses and numbers of bytes may differ, and kernels mostly). The
            executable is unchanged.
        """

    def launch_graph(self, executable: Any, stream: Any, /) -> int:
        """Do all that the nodes stand for.

        Returns how many places in the stream's queue that takes at most (rule R7): one for each
        straight run of kernels, however long, and for each fill and copy; at least one. Where that
        is more than the queue has, the caller is held up until the device has come far enough.

        Ordering
        --------
        After what was submitted to ``stream`` before, and before what comes later there. Launches
        of one executable, on whatever streams, run one after the other.
        """

    def close_graph(self, graph_or_executable: Any, /) -> None:
        """Give it back, once its last launch has ended. Any thread; again does nothing.

        Works after :meth:`close`, too.
        """

    # -- time ------------------------------------------------------------------------
    def clock_s(self) -> float:
        """Seconds on the clock this device runs by (virtual, or the host's monotonic one)."""

    def advance(self, num_busy_workers: int, /, until_s: float = inf) -> bool:
        """Complete one piece of work that ends by ``until_s`` of virtual time.

        False when none does. Does nothing while a busy worker is not itself blocked in
        :meth:`Event.sync`. Always False unless ``is_virtual``.
        """

    def are_blocked(self, num_busy_workers: int, /) -> bool:
        """Whether that many workers are blocked in :meth:`Event.sync` on virtual time."""

    def skip_to(self, num_busy_workers: int, time_s: float, may_jump: bool, /) -> bool:
        """Let virtual time pass to ``time_s`` without completing anything.

        False when work ends by then, when none runs at all (unless ``may_jump``), and
        where :meth:`advance` would do nothing either.
        """
