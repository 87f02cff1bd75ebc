"""The simulator's ``Backend``: checks each call, then hands a command to the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from streamflow.backends.base import (
    Access,
    DeviceProperties,
    KernelSpec,
    Parameter,
)
from streamflow.backends.checksum import checksum
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.checks import NUM_QUEUED_MAX
from streamflow.backends.sim.command import (
    Command,
    CopyD2D,
    CopyD2H,
    CopyH2D,
    CopyPeer,
    Fill,
    Free,
    Launch,
)
from streamflow.backends.sim.controls import Controls
from streamflow.backends.sim.event import SimEvent
from streamflow.backends.sim.graphs import GraphVerbs, NotingStream
from streamflow.backends.sim.kernel import LaunchConfig, SimArray, SimKernel
from streamflow.backends.sim.machine import Gpu
from streamflow.backends.sim.memory_verbs import MemoryVerbs
from streamflow.backends.sim.pool_verbs import PoolVerbs
from streamflow.backends.sim.stream import SimStream
from streamflow.backends.sim.worlds import enter_world, leave_world
from streamflow.config import Settings
from streamflow.errors import (
    Closed,
    CompileFailed,
    DeviceError,
    DeviceLost,
    LaunchFailed,
    StreamflowError,
)

__all__ = ["SimDevice", "open_device"]

_PATTERN_SIZES = (1, 2, 4, 8, 16)


def open_device(index: int, settings: Settings, loop_key: object) -> SimDevice:
    """Open simulated device ``index``.

    Devices with equal loop keys share one machine: a clock, and memory they can copy
    between. It is dropped when the last of them closes.

    Raises
    ------
    ValueError
        There is no such device, or the loop's other devices run by another clock.
    """
    if not 0 <= index < settings.sim.devices:
        raise ValueError(
            f"no simulated device {index}: there are {settings.sim.devices}, counted from 0 "
            "(STREAMFLOW_SIM_DEVICES)"
        )
    return SimDevice(index, settings, loop_key)


class SimDevice(MemoryVerbs, PoolVerbs, GraphVerbs):
    """One open simulated device. See :class:`streamflow.backends.base.Backend`.

    Attributes
    ----------
    stop : callable or None
        Makes the error that every call raises: set once the device is lost or closed.
    counts : Counter
        Calls of each verb.
    """

    name = "sim"
    num_queued_max = NUM_QUEUED_MAX
    is_cuda = False

    def __init__(self, index: int, settings: Settings, loop_key: object) -> None:
        self.index = index
        self._loop_key = loop_key
        self._is_closed = False
        self.world = world = enter_world(settings, loop_key)
        self.checker = world.watcher
        self.is_virtual = world.is_virtual
        with world.lock:
            gpu = world.gpus.get(index)
            if gpu is None:
                try:
                    gpu = world.gpus[index] = Gpu(world, index, settings.sim)
                except BaseException:  # rates of nothing, say: the world is not to wait for us
                    leave_world(world, loop_key)
                    raise
            self.gpu = self.space = gpu
            self.counts: Counter[str] = world.make_counter(gpu)
            gpu.devices.append(self)
            self.stop: Callable[[], StreamflowError] | None = (
                None if gpu.fault is None else gpu.fault.error
            )
        self.properties = _make_properties(gpu)
        self._controls = Controls(self)

    # -- device ------------------------------------------------------------------

    def set_current(self) -> None:
        self.counts["set_current"] += 1

    def memory_info(self) -> tuple[int, int]:
        self.counts["memory_info"] += 1
        memory = self.gpu.memory
        return memory.free_nbytes, memory.total_nbytes

    def synchronize_blocking(self) -> None:
        """Block until everything submitted is done.

        On the virtual clock this runs the machine itself, and raises ``DeviceError`` if
        what is left can never run (a closed gate).
        """
        self.counts["synchronize_blocking"] += 1
        self._check()
        self.world.synchronize_blocking(self.gpu)
        self._check()

    def close(self) -> None:
        """Drop queued work, and give all memory back with the last device of the GPU.

        Pinned memory stays. Never blocks.
        """
        world, gpu = self.world, self.gpu
        with world.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.counts["close"] += 1
            self._controls.end_stalls()
            self.stop = _make_closed_error
            mine = [stream for stream in gpu.sorted_streams() if stream.device is self]
            frees = [c for stream in mine for c in stream.queue if isinstance(c, Free)]
            world.abandon(mine)
            for stream in mine:
                gpu.streams.discard(stream)
            gpu.devices.remove(self)
            if gpu.devices:  # resources serve every device of one GPU: their pools go on
                for command in frees:
                    command.settle(0.0)
            else:
                for pool in gpu.pools:
                    pool.abandon()
                del world.gpus[self.index]
        leave_world(world, self._loop_key)

    def translate(self, error: BaseException, doing: str) -> StreamflowError:
        text = f"{doing}: {error}"
        translated: StreamflowError
        if isinstance(error, DeviceLost):
            translated = DeviceLost(text, suspects=error.suspects)
        elif isinstance(error, CompileFailed):
            translated = CompileFailed(text, log=error.log)
        elif isinstance(error, StreamflowError):
            translated = type(error)(text)
        else:
            translated = DeviceError(f"{doing}: {type(error).__name__}: {error}")
        translated.__cause__ = error
        return translated

    def controls(self) -> Controls:
        return self._controls

    # -- streams and events ------------------------------------------------------

    def create_stream(self, *, priority: int = 0) -> SimStream:
        self.counts["create_stream"] += 1
        self._check()
        least, greatest = self.properties.priority_range
        if not greatest <= priority <= least:
            raise ValueError(f"priority lies between {greatest} and {least}, found {priority}")
        world = self.world
        with world.lock:
            stream = SimStream(self, world.next_ordinal(), priority, world.seed)
            self.gpu.streams.add(stream)
        return stream

    def stream_id(self, stream: SimStream, /) -> int:
        return stream.id

    def create_event(self, *, timing: bool = False) -> SimEvent:
        self.counts["create_event"] += 1
        self._check()
        return SimEvent(self, timing)

    def elapsed_ms(self, start: SimEvent, end: SimEvent, /) -> float:
        self.counts["elapsed_ms"] += 1
        self._check()
        return (end.time_s() - start.time_s()) * 1e3

    # -- work ----------------------------------------------------------------------

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: SimStream, /) -> None:
        self.counts["copy_h2d"] += 1
        _check_nbytes(nbytes)
        command = CopyH2D(stream, self.gpu.h2d, dst, src, nbytes)
        command.pinned = host_memory.hold(src, nbytes)
        self._watch(command)
        self._submit_pinned("copy_h2d", command)

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: SimStream, /) -> None:
        self.counts["copy_d2h"] += 1
        _check_nbytes(nbytes)
        command = CopyD2H(stream, self.gpu.d2h, dst, src, nbytes)
        command.pinned = host_memory.hold(dst, nbytes)
        self._submit_pinned("copy_d2h", command)

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: SimStream, /) -> None:
        self.counts["copy_d2d"] += 1
        _check_nbytes(nbytes)
        self._submit("copy_d2d", CopyD2D(stream, self.gpu.compute, dst, src, nbytes))

    def copy_peer(
        self, dst: int, dst_index: int, src: int, src_index: int, nbytes: int, stream: SimStream, /
    ) -> None:
        self.counts["copy_peer"] += 1
        _check_nbytes(nbytes)
        gpus = self.world.gpus
        for index in (dst_index, src_index):
            if index not in gpus:
                raise DeviceError(f"simulated device {index} is not open on this event loop")
        engine = self.gpu.compute
        command = CopyPeer(stream, engine, dst, gpus[dst_index], src, gpus[src_index], nbytes)
        self._submit("copy_peer", command)

    def fill(self, dst: int, pattern: bytes, count: int, stream: SimStream, /) -> int:
        self.counts["fill"] += 1
        if len(pattern) not in _PATTERN_SIZES:
            raise ValueError(f"a pattern has 1, 2, 4, 8 or 16 bytes, found {len(pattern)}")
        _check_nbytes(count)
        self._submit("fill", Fill(stream, self.gpu.compute, dst, pattern, count))
        return 1

    # -- kernels -------------------------------------------------------------------

    def load_kernel(self, spec: KernelSpec, /) -> SimKernel:
        self.counts["load_kernel"] += 1
        return SimKernel(spec)

    def load_kernel_blocking(self, spec: KernelSpec, /) -> SimKernel:
        self.counts["load_kernel_blocking"] += 1
        return SimKernel(spec)

    def launch_config(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_nbytes: int, /
    ) -> LaunchConfig:
        self.counts["launch_config"] += 1
        return LaunchConfig(grid, block, shared_nbytes, self.properties)

    def launch(
        self, stream: SimStream, config: LaunchConfig, kernel: SimKernel, /, *args: Any
    ) -> None:
        self.counts["launch"] += 1
        if config.problem is not None:
            raise LaunchFailed(f"kernel {kernel.name!r}: {config.problem}")
        if len(args) != kernel.num_parameters:
            raise LaunchFailed(
                f"kernel {kernel.name!r} takes {kernel.num_parameters} arguments, found {len(args)}"
            )
        self._submit("launch", Launch(stream, self.gpu.compute, kernel, args))

    def call(
        self,
        stream: SimStream,
        name: str,
        body: Callable[..., None],
        accesses: Sequence[Access | None],
        /,
        *args: Any,
    ) -> None:
        self.counts["call"] += 1
        parameters = tuple(Parameter("", "", None, access) for access in accesses)
        kernel = SimKernel(KernelSpec(name=name, parameters=parameters, body=body))
        self._submit("call", Launch(stream, self.gpu.compute, kernel, args))

    def array_argument(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], /
    ) -> SimArray:
        return SimArray(address, shape, dtype)

    # -- time ------------------------------------------------------------------------

    def clock_s(self) -> float:
        return self.world.now_s()

    def advance(self, num_busy_workers: int, /, until_s: float = inf) -> bool:
        """Complete one piece of work of any device of the loop in virtual time."""
        return self.is_virtual and self.world.advance(num_busy_workers, until_s)

    def are_blocked(self, num_busy_workers: int, /) -> bool:
        """Whether that many threads wait for virtual time to pass."""
        return self.is_virtual and num_busy_workers <= self.world.num_blocked

    def skip_to(self, num_busy_workers: int, time_s: float, may_jump: bool, /) -> bool:
        """Let virtual time pass to ``time_s`` if no device of the loop completes anything."""
        return self.is_virtual and self.world.skip_to(num_busy_workers, time_s, may_jump)

    # -- checks ------------------------------------------------------------------------

    def _submit(self, kind: str, command: Command) -> None:
        """Queue work; the world's state is unchanged if it raises."""
        stream = command.stream
        world = self.world
        with world.lock:
            self._check_stream(stream)
            if stream.num_work >= NUM_QUEUED_MAX:
                if isinstance(stream, NotingStream):
                    stream.note(kind, command)
                    return
                raise self._full(stream)
            if self._controls.rules:
                command.injected = self._controls.on_submit(kind, command.label)
            if world.races is not None:
                world.races.used(command)
            stream.num_work += 1
            world.submit(command)

    def _watch(self, command: CopyH2D) -> None:
        """Have the source of a copy compared with what it is now, once the copy runs."""
        races, block = self.world.races, command.pinned
        assert block is not None
        command.watch = None
        if races is not None and block.pool is None:  # else what is there may yet be allocated
            start = command.src - block.address
            reader = races.watched(command, block.shadow, start, start + command.nbytes)
            if reader is not None:
                command.watch = reader, checksum(block.bytes_at(command.src, command.nbytes))

    def _itself(self) -> SimDevice:
        return self

    def _submit_pinned(self, kind: str, command: Command) -> None:
        """Queue a copy that holds a pinned block, which it lets go if that is refused."""
        assert command.pinned is not None
        try:
            self._submit(kind, command)
        except BaseException:
            command.pinned.drop()
            raise


def _check_nbytes(nbytes: int) -> None:
    if nbytes < 1:
        raise ValueError(f"needs a size of at least 1, found {nbytes}")


def _make_closed_error() -> StreamflowError:
    return Closed("this simulated device is closed")


def _make_properties(gpu: Gpu) -> DeviceProperties:
    """An H200's limits, with the simulator's memory and engines."""
    return DeviceProperties(
        name=f"Simulated H200 ({gpu.index})",
        compute_capability=(9, 0),
        total_memory_nbytes=gpu.memory.total_nbytes,
        multiprocessor_count=132,
        warp_size=32,
        max_threads_per_block=1024,
        max_block_dim=(1024, 1024, 64),
        max_grid_dim=(2**31 - 1, 65535, 65535),
        max_shared_memory_per_block_nbytes=227 << 10,
        num_copy_engines=1 if gpu.h2d is gpu.d2h else 2,
        priority_range=(0, -5),
    )
