"""What a stream's queue holds.

*Work* (launches, copies, fills) needs an engine: it starts when an engine slot is free and
touches memory when it runs (:meth:`Command.bind` then :meth:`Command.run`). The virtual
clock runs it at its modelled end; the wall clock runs it at its start and then sleeps.
*Instant* commands (waits, gates, marks, allocations, frees) need none and take no time:
:meth:`Command.settle` does them as soon as they are at the head of the queue.
"""

from __future__ import annotations

from heapq import heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.checksum import checksum
from streamflow.backends.sim.kernel import SimArray

if TYPE_CHECKING:
    from streamflow.backends.sim.block import Block
    from streamflow.backends.sim.host_memory import HostBlock
    from streamflow.backends.sim.kernel import SimKernel
    from streamflow.backends.sim.machine import Engine, Gpu
    from streamflow.backends.sim.stream import SimStream
    from streamflow.backends.sim.uses import Shadow, Use

__all__ = [
    "Allocate",
    "Command",
    "CopyD2D",
    "CopyD2H",
    "CopyH2D",
    "CopyPeer",
    "Fill",
    "Free",
    "GateCommand",
    "Launch",
    "Mark",
    "Prefetch",
    "Wait",
]

_NO_ARGS: tuple[Any, ...] = ()


Touch = tuple["Shadow", int, int, bool, bool]
"""Memory that a command touches: where, offset, bytes, whether it reads and writes there."""


class Command:
    """One entry of a stream's queue.

    Attributes
    ----------
    stream : SimStream
    engine : Engine or None
        What it occupies while it runs; None for instant commands.
    injected : BaseException or None
        A fault asked for through the controls: raised in place of running.
    pinned : HostBlock or None
        Host memory in use until it has ended.
    is_movable : bool
        Whether a schedule may hold it back, and logs show it: it does something by itself.
    """

    __slots__ = ("engine", "injected", "pinned", "stream")
    is_movable = True

    def __init__(self, stream: SimStream, engine: Engine | None = None) -> None:
        self.stream = stream
        self.engine = engine
        self.injected: BaseException | None = None
        self.pinned: HostBlock | None = None

    @property
    def label(self) -> str:
        """What a fault of this command is reported as."""
        raise NotImplementedError

    def duration_s(self) -> float:
        """How long it takes, asked when it starts."""
        return 0.0

    def bind(self) -> tuple[Any, ...]:
        """Look up the memory it touches; the machine's lock is held."""
        return _NO_ARGS

    def run(self, bound: tuple[Any, ...]) -> None:
        """Do it. On the wall clock, without the machine's lock."""

    def touches(self) -> list[Touch]:
        """The memory it touches, as far as it is known at the submission."""
        return []

    def settle(self, now_s: float) -> bool:
        """Instant commands: do it, or return False and have the stream resumed later."""
        raise NotImplementedError


class Launch(Command):
    """Run a kernel's reference body over device memory."""

    __slots__ = ("args", "kernel")

    def __init__(
        self, stream: SimStream, engine: Engine, kernel: SimKernel, args: tuple[Any, ...]
    ) -> None:
        # Spelled out, not super().__init__: the simulator's hottest allocation (P12).
        self.stream = stream
        self.engine = engine
        self.injected = None
        self.pinned = None
        self.kernel = kernel
        self.args = args

    @property
    def label(self) -> str:
        return self.kernel.name

    def duration_s(self) -> float:
        kernel = self.kernel
        cost = self.stream.gpu.cost
        if kernel.cost_s is not None:
            try:
                return max(0.0, float(kernel.cost_s(*self.bind())))
            except Exception as error:
                # An estimate that fails is the kernel's fault, seen where the kernel runs.
                if self.injected is None:
                    self.injected = error
                return cost.kernel_s
        if not self.args:
            return cost.kernel_s
        nbytes = 0
        for arg in self.args:
            if isinstance(arg, SimArray):
                nbytes += arg.nbytes
        return cost.launch_s(nbytes)

    def bind(self) -> tuple[Any, ...]:
        args = self.args
        for arg in args:
            if isinstance(arg, SimArray):
                break
        else:
            return args
        memory = self.stream.gpu.memory
        bound: list[Any] = []
        for arg, is_read_only in zip(args, self.kernel.is_read_only, strict=True):
            if isinstance(arg, SimArray):
                array = memory.array_at(
                    arg.address, arg.shape, arg.dtype, arg.nbytes, not is_read_only
                )
                if is_read_only:
                    array.flags.writeable = False
                bound.append(array)
            else:
                bound.append(arg)
        return tuple(bound)

    def run(self, bound: tuple[Any, ...]) -> None:
        if not bound:  # it computes nothing, and the next lines take as long as its call
            self.kernel.body()
            return
        with np.errstate(all="ignore"):  # as on a GPU: overflowing is nobody's business there
            self.kernel.body(*bound)

    def touches(self) -> list[Touch]:
        found: list[Touch] = []
        shadow_at = self.stream.gpu.memory.shadow_at
        for arg, is_read_only in zip(self.args, self.kernel.is_read_only, strict=True):
            if arg.__class__ is SimArray and (at := shadow_at(arg.address)) is not None:
                # What a kernel may write it may or may not read.
                found.append((*at, arg.nbytes, is_read_only, not is_read_only))
        return found


class _Copy(Command):
    __slots__ = ("dst", "nbytes", "src")

    def __init__(self, stream: SimStream, engine: Engine, dst: int, src: int, nbytes: int) -> None:
        super().__init__(stream, engine)
        self.dst = dst
        self.src = src
        self.nbytes = nbytes

    def run(self, bound: tuple[Any, ...]) -> None:
        dst, src = bound
        np.copyto(dst, src)

    def _at(self, gpu: Gpu, address: int, reads: bool) -> list[Touch]:
        at = gpu.memory.shadow_at(address)
        return [] if at is None else [(*at, self.nbytes, reads, not reads)]

    def _at_host(self, address: int, reads: bool) -> list[Touch]:
        assert self.pinned is not None
        shadow = self.pinned.shadow
        return [(shadow, address - self.pinned.address, self.nbytes, reads, not reads)]


class CopyH2D(_Copy):
    """``watch``: who submitted it, and the checksum of its source if that is to stay so."""

    __slots__ = ("watch",)
    label = "copy h2d"

    def __init__(self, stream: SimStream, engine: Engine, dst: int, src: int, nbytes: int) -> None:
        super().__init__(stream, engine, dst, src, nbytes)
        self.watch: tuple[Use, int] | None = None

    def run(self, bound: tuple[Any, ...]) -> None:
        if self.watch is not None:
            reader, before = self.watch
            races = self.stream.world.races
            if races is not None and checksum(bound[1]) != before:
                races.host_changed(reader, self.stream.gpu.index, self.nbytes)
        super().run(bound)

    def touches(self) -> list[Touch]:
        return [*self._at_host(self.src, True), *self._at(self.stream.gpu, self.dst, False)]

    def duration_s(self) -> float:
        return self.stream.gpu.cost.h2d_s(self.nbytes)

    def bind(self) -> tuple[Any, ...]:
        assert self.pinned is not None
        return (
            self.stream.gpu.memory.bytes_at(self.dst, self.nbytes),
            self.pinned.bytes_at(self.src, self.nbytes),
        )


class CopyD2H(_Copy):
    __slots__ = ()
    label = "copy d2h"

    def duration_s(self) -> float:
        return self.stream.gpu.cost.d2h_s(self.nbytes)

    def bind(self) -> tuple[Any, ...]:
        assert self.pinned is not None
        return (
            self.pinned.bytes_at(self.dst, self.nbytes, True),
            self.stream.gpu.memory.bytes_at(self.src, self.nbytes, False),
        )

    def touches(self) -> list[Touch]:
        return [*self._at(self.stream.gpu, self.src, True), *self._at_host(self.dst, False)]


class CopyD2D(_Copy):
    __slots__ = ()
    label = "copy d2d"

    def duration_s(self) -> float:
        return self.stream.gpu.cost.d2d_s(self.nbytes)

    def bind(self) -> tuple[Any, ...]:
        memory = self.stream.gpu.memory
        dst = memory.bytes_at(self.dst, self.nbytes)
        return dst, memory.bytes_at(self.src, self.nbytes, False)

    def touches(self) -> list[Touch]:
        gpu = self.stream.gpu
        return [*self._at(gpu, self.src, True), *self._at(gpu, self.dst, False)]


class CopyPeer(_Copy):
    """Between two devices. A lost device's memory can still be read and written by others."""

    __slots__ = ("dst_gpu", "src_gpu")
    label = "copy peer"

    def __init__(
        self,
        stream: SimStream,
        engine: Engine,
        dst: int,
        dst_gpu: Gpu,
        src: int,
        src_gpu: Gpu,
        nbytes: int,
    ) -> None:
        super().__init__(stream, engine, dst, src, nbytes)
        self.dst_gpu = dst_gpu
        self.src_gpu = src_gpu

    def duration_s(self) -> float:
        return self.stream.gpu.cost.peer_s(self.nbytes)

    def bind(self) -> tuple[Any, ...]:
        return (
            self.dst_gpu.memory.bytes_at(self.dst, self.nbytes),
            self.src_gpu.memory.bytes_at(self.src, self.nbytes, False),
        )

    def touches(self) -> list[Touch]:
        return [*self._at(self.src_gpu, self.src, True), *self._at(self.dst_gpu, self.dst, False)]


class Fill(Command):
    __slots__ = ("count", "dst", "pattern")
    label = "fill"

    def __init__(
        self, stream: SimStream, engine: Engine, dst: int, pattern: bytes, count: int
    ) -> None:
        super().__init__(stream, engine)
        self.dst = dst
        self.pattern = pattern
        self.count = count

    def duration_s(self) -> float:
        return self.stream.gpu.cost.fill_s(len(self.pattern) * self.count)

    def bind(self) -> tuple[Any, ...]:
        nbytes = len(self.pattern) * self.count
        return (self.stream.gpu.memory.bytes_at(self.dst, nbytes),)

    def run(self, bound: tuple[Any, ...]) -> None:
        rows = bound[0].reshape(self.count, len(self.pattern))
        rows[:] = np.frombuffer(self.pattern, np.uint8)

    def touches(self) -> list[Touch]:
        at = self.stream.gpu.memory.shadow_at(self.dst)
        return [] if at is None else [(*at, len(self.pattern) * self.count, False, True)]


class Wait(Command):
    """Hold the stream until ``source`` has passed ``position``.

    A lost or closed device counts as passed: its work has ended, though not well. On CUDA
    the wait of another device's stream on a lost context's event is not documented;
    holding the healthy device for ever would help nobody.
    """

    __slots__ = ("position", "source")
    label = "wait"
    is_movable = False

    def __init__(self, stream: SimStream, source: SimStream, position: int) -> None:
        self.stream = stream
        self.engine = None
        self.injected = None
        self.pinned = None
        self.source = source
        self.position = position

    def settle(self, now_s: float) -> bool:
        source = self.source
        if source.num_done >= self.position:
            return True
        heappush(source.waiters, (self.position, source.gpu.world.next_waiter(), self.stream))
        return False


class GateCommand(Command):
    """Hold the stream until the controls open it."""

    __slots__ = ("is_open",)
    label = "gate"
    is_movable = False

    def __init__(self, stream: SimStream) -> None:
        super().__init__(stream)
        self.is_open = False

    def settle(self, now_s: float) -> bool:
        return self.is_open


class Mark(Command):
    """The time at which a timing event's record was passed."""

    __slots__ = ("time_s",)
    label = "record"
    is_movable = False

    def __init__(self, stream: SimStream) -> None:
        super().__init__(stream)
        self.time_s: float | None = None

    def settle(self, now_s: float) -> bool:
        self.time_s = now_s
        return True


class Allocate(Command):
    """Memory becomes touchable and is poisoned."""

    __slots__ = ("block", "nbytes")
    label = "allocate"

    def __init__(self, stream: SimStream, block: Block, nbytes: int) -> None:
        super().__init__(stream)
        self.block = block
        self.nbytes = nbytes

    def settle(self, now_s: float) -> bool:
        self.stream.gpu.memory.on_allocate(self.block, self.nbytes)
        return True


class Free(Command):
    """Memory is poisoned and touching it faults."""

    __slots__ = ("block", "generation")
    label = "free"

    def __init__(self, stream: SimStream, block: Block) -> None:
        super().__init__(stream)
        self.block = block
        self.generation = block.generation

    def settle(self, now_s: float) -> bool:
        block = self.block
        memory = self.stream.gpu.memory
        memory.on_free(block)
        if block.pool is None:
            memory.release(block)
        elif block.generation == self.generation:  # not handed out again since
            block.pool.on_free_run(block)
        return True


class Prefetch(Command):
    """Memory that both sides reach is moved. Where it is is not modelled: it takes no time."""

    __slots__ = ("address", "nbytes")
    label = "prefetch"

    def __init__(self, stream: SimStream, engine: Engine, address: int, nbytes: int) -> None:
        super().__init__(stream, engine)
        self.address = address
        self.nbytes = nbytes

    def bind(self) -> tuple[Any, ...]:
        return (self.stream.gpu.memory.bytes_at(self.address, self.nbytes, False),)
