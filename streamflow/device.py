"""``Device``: the front door, a facade over the runtime."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import index as as_index
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any

import anyio.to_thread
import numpy as np

from streamflow.backends import choose_backend
from streamflow.backends.base import DeviceProperties, PoolInfo
from streamflow.config import Settings
from streamflow.errors import Closed, SimulatorWarning
from streamflow.memory.pinned import PinnedPool
from streamflow.runtime.array import DeviceArray, checked_dtype, checked_shape
from streamflow.runtime.closing import close, drain, raise_failures
from streamflow.runtime.core import Core
from streamflow.runtime.kernel import Kernel
from streamflow.runtime.launch import Launcher
from streamflow.runtime.live import LiveArrays
from streamflow.runtime.op import Op
from streamflow.runtime.opening import Opening
from streamflow.runtime.registry import add_open
from streamflow.runtime.stream import ENTERED, Lane, Stream, explicit_line
from streamflow.runtime.transfers import Transfers, fill_pattern
from streamflow.scheduler.guards import is_forked, note_entering
from streamflow.scheduler.loops import current_shell
from streamflow.scheduler.placement import least_loaded
from streamflow.trace.model import Trace
from streamflow.trace.recorder import Recorder

__all__ = ["Device", "DeviceStats"]


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Counters of one device since it was entered."""

    num_submitted: int
    num_finished: int
    num_pending: int
    """Parked or staging."""
    num_in_flight: int
    memory: PoolInfo
    pinned_nbytes: int
    """Pinned bytes under the budget of results, live and cached."""


class Device:
    """One GPU, or a simulated one, for the event loop that enters it.

    Parameters
    ----------
    index : int
        Which device of the backend.
    backend : str
        ``"auto"`` picks CUDA where a driver and a device are there; where none exists,
        the simulator with a ``SimulatorWarning`` (rule R14). ``"cuda"``, ``"sim"`` or a
        registered name makes it a decision. ``STREAMFLOW_BACKEND`` replaces ``"auto"``.
    settings : Settings, optional
        Default: from ``STREAMFLOW_<NAME>``.

    Examples
    --------
    >>> async with Device(0) as dev:
    ...     x = dev.put(np.arange(4.0))
    ...     print(await dev.get(x))
    """

    def __init__(
        self,
        index: int = 0,
        *,
        backend: str = "auto",
        settings: Settings | None = None,
    ) -> None:
        self.index = as_index(index)
        if self.index < 0:
            raise ValueError(f"a device index is not negative, found {index}")
        self.settings = Settings.from_environment() if settings is None else settings
        self._wanted = self.settings.backend if backend == "auto" else backend
        self._entered = Lock()  # two threads may try at once
        self._name: str | None = None
        self._why: str | None = None
        self._core_or_none: Core | None = None

    # -- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> Device:
        note_entering()
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("a Device is entered once: make another one")
        shell = current_shell()
        in_thread = anyio.to_thread.run_sync
        name, self._why = await in_thread(choose_backend, self._wanted)
        if self._why is not None:
            warnings.warn(
                f"running on the simulator: {self._why}. Pass backend='sim' to make that a "
                "decision, or backend='cuda' to insist on a GPU",
                SimulatorWarning,
                stacklevel=2,
            )
        opening = Opening(name, self.index, self.settings, shell)
        try:
            core = await in_thread(opening.run_blocking)
        except BaseException:
            # A native cancellation leaves the thread at work: what it opens is nobody's.
            opening.abandon()
            raise
        self._name = name
        core.backend.set_current()
        core.poller.open()
        add_open(core)
        self._build(core)
        return self

    def _build(self, core: Core) -> None:
        self._transfers = Transfers(core)
        self._launcher = Launcher(core)
        self.launch = self._launcher.launch  # type: ignore[method-assign]  # one call less
        lines = (core.h2d, core.d2h, core.free_lane, *core.compute)
        self._lanes: Mapping[str, Lane] = MappingProxyType({ln.name: Lane(ln) for ln in lines})
        self._controls = core.backend.controls()
        if self._controls is not None:
            self._controls.resolve = self._resolve
        self._num_streams = 0
        self._core_or_none = core

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        core = self._core
        if error is None or not is_forked():  # a fork that ends by an error ends by that one
            core.check_here()
        if core.is_closing:
            return
        live = LiveArrays.of(core)
        is_drained = await close(core)
        if error is not None:
            return  # the body's own error comes first
        if not is_drained and core.lost is None:
            raise TimeoutError(
                f"device {self.index} was left with work that did not end within "
                f"close_timeout_s={self.settings.close_timeout_s}"
            )
        if core.lost is None:
            raise_failures(core)
            live.warn(stacklevel=3)  # last: as an error it leaves nothing half closed
        elif not core.is_loss_seen:
            raise_failures(core)

    @property
    def _core(self) -> Core:
        core = self._core_or_none
        if core is None:
            raise Closed("enter the device first: `async with Device(...) as dev`")
        return core

    @property
    def _here(self) -> Core:
        core = self._core
        core.check_here()
        return core

    # -- memory ----------------------------------------------------------------------------

    def empty(
        self, shape: Any, dtype: Any = np.float64, *, stream: Stream | None = None
    ) -> DeviceArray:
        """An uninitialised array.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype-like
            Of fixed size: boolean, integer, floating, complex or structured.
        stream : Stream, optional
            Default: the current stream, else the least loaded compute lane.

        Ordering
        --------
        Allocated in stream order; a use elsewhere comes after it (rule R5). Never waits.

        Raises
        ------
        OutOfDeviceMemory
            After giving back what can be given back without waiting.
        """
        core = self._core
        if core.needs_check or core.shell.current() is not core.shell.key:
            core.check_open()
        checked = checked_dtype(dtype)
        dims, size = checked_shape(shape, checked.itemsize)
        line = explicit_line(core, stream) if stream is not None or ENTERED.get() else None
        if line is None:
            line = least_loaded(core.compute)
        return core.memory.array(dims, size, checked, line)

    def zeros(
        self, shape: Any, dtype: Any = np.float64, *, stream: Stream | None = None
    ) -> DeviceArray:
        """:meth:`full` of zeros. Parameters and errors are those of :meth:`empty`."""
        return self.full(shape, 0, dtype, stream=stream)

    def full(
        self, shape: Any, value: Any, dtype: Any = np.float64, *, stream: Stream | None = None
    ) -> DeviceArray:
        """:meth:`empty`, then :meth:`fill` with ``value`` on the same stream.

        Parameters
        ----------
        shape, dtype, stream
            As for :meth:`empty`, and so are the order and the errors.
        value : scalar
            As for :meth:`fill`; refused before anything is allocated.
        """
        fill_pattern(value, checked_dtype(dtype))  # refuse before anything is allocated
        array = self.empty(shape, dtype, stream=stream)
        self._transfers.fill(array, value, stream, array.allocation.ticket.timeline)
        return array

    def fill(self, array: DeviceArray, value: Any, *, stream: Stream | None = None) -> Op[None]:
        """Write ``value`` to every element.

        Parameters
        ----------
        array : DeviceArray
        value : scalar
            One that the array's dtype can hold.
        stream : Stream, optional
            Default: the current stream, else a compute lane.

        Ordering
        --------
        After every earlier use of ``array``; later uses come after it.

        Raises
        ------
        TypeError, ValueError, OverflowError
            ``value`` is not a scalar that the dtype can hold.
        """
        self._core.check_open()
        return self._transfers.fill(array, value, stream)

    # -- copies ------------------------------------------------------------------------------

    def put(
        self,
        source: Any,
        *,
        out: DeviceArray | None = None,
        stream: Stream | None = None,
        after: Sequence[Any] = (),
    ) -> DeviceArray:
        """Copy host data to the device.

        Parameters
        ----------
        source : array-like
            Any layout; copied in C order. Up to 64 KiB it is read before this returns;
            larger, it must not change until ``await array.staged``.
        out : DeviceArray, optional
            Of the same shape and dtype; default: a new array.
        stream : Stream, optional
            Default: the current stream, else the lane ``h2d``.
        after : sequence of Op or DeviceArray
            Further ops this comes after.

        Ordering
        --------
        After every earlier use of ``out``. Later uses of the result come after it.

        Raises
        ------
        TypeError, ValueError
            A dtype that is not plain bytes, or an ``out`` that does not match.
        OutOfDeviceMemory
            No room for a new array.
        """
        self._core.check_open()
        return self._transfers.put(source, out, stream, after)[0]

    def get(
        self,
        array: DeviceArray,
        *,
        out: Any = None,
        stream: Stream | None = None,
        after: Sequence[Any] = (),
    ) -> Op[Any]:
        """Copy an array to the host.

        Parameters
        ----------
        array : DeviceArray
        out : ndarray, optional
            Of the same shape and dtype, any layout; only its own elements are written.
            Default: a new ndarray that *is* the pinned block the copy wrote; the block
            returns to its pool when the ndarray is collected.
        stream, after
            As in :meth:`put`; the default lane is ``d2h``.

        Returns
        -------
        Op of ndarray

        Ordering
        --------
        After the last write of ``array``; later writes come after it.
        """
        self._core.check_open()
        return self._transfers.get(array, out, stream, after)

    def copy(
        self, dst: Any, src: Any, *, stream: Stream | None = None, after: Sequence[Any] = ()
    ) -> Op[Any]:
        """Copy ``src`` to ``dst``, each an array of this device, of another one, or an ndarray.

        Parameters
        ----------
        dst, src : DeviceArray or ndarray
            Of one shape and dtype. Where ``src`` is on the host, as in :meth:`put`; where
            ``dst`` is, as in :meth:`get`.
        stream, after
            As in :meth:`put`; the default lane is that of the copy's direction, and a
            compute lane within a device and between two.

        Ordering
        --------
        After the last write of ``src`` and every use of ``dst``, on both devices.

        Raises
        ------
        TypeError, ValueError
            Shapes or dtypes differ, or neither is of this device.
        """
        self._core.check_open()
        return self._transfers.copy(dst, src, stream, after)

    # -- kernels -------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        *args: Any,
        grid: Any = None,
        block: Any = None,
        shared_bytes: int = 0,
        stream: Stream | None = None,
        after: Sequence[Any] = (),
        name: str | None = None,
    ) -> Op[None]:
        """Run a kernel.

        Parameters
        ----------
        kernel : Kernel
        *args
            One per parameter: a :class:`DeviceArray` for a pointer, a scalar otherwise.
        grid, block : int or tuple of int, optional
            Blocks and threads per block. Default: one thread for each element of the
            largest array, ``settings.block`` threads per block.
        shared_bytes : int
            Dynamic shared memory per block.
        stream : Stream, optional
            Default: the current stream, else a compute lane.
        after : sequence of Op or DeviceArray
            Further ops this comes after.
        name : str, optional
            For errors and traces; default: the kernel's name.

        Ordering
        --------
        After the last write of every array it reads, and every use of those it writes,
        as the signature and ``access=`` say.

        Raises
        ------
        TypeError, ValueError, OverflowError
            Arguments or geometry that do not fit, before anything is submitted.
        LaunchFailed
            On the simulator: the kernel has no reference body.
        """
        self._core  # noqa: B018  (raises before the device is entered, which replaces this method)
        return self._launcher.launch(
            kernel,
            *args,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            stream=stream,
            after=after,
            name=name,
        )

    # -- streams ---------------------------------------------------------------------------------

    def stream(self, name: str | None = None, *, priority: int = 0) -> Stream:
        """A new explicit stream: program order within it (rule R3).

        Parameters
        ----------
        name : str, optional
            For errors and traces.
        priority : int
            Lower is more urgent; within ``properties.priority_range``.
        """
        core = self._core
        core.check_open()
        least, greatest = core.backend.properties.priority_range
        if not greatest <= as_index(priority) <= least:
            raise ValueError(f"priority is from {greatest} to {least} here, found {priority}")
        self._num_streams += 1
        line = core.make_timeline(
            name or f"stream{self._num_streams}", priority=priority, is_ordered=True
        )
        return Stream(core, line, priority)

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The streams that the runtime picks: ``h2d``, ``d2h``, ``free``, ``compute0``, ..."""
        self._here  # noqa: B018
        return self._lanes

    async def synchronize(self) -> None:
        """Wait until everything submitted so far has ended.

        Raises
        ------
        DeviceLost
            The device has failed.
        ExceptionGroup
            Ops failed and nobody asked for their results (rule R9).
        """
        core = self._here
        if core.lost is None:
            await drain(core)
        raise_failures(core)

    # -- looking -------------------------------------------------------------------------

    def trace(self) -> AbstractContextManager[Trace]:
        """Record every op submitted inside the block, why it waited, and when it ran.

        Device times are known once the ops have ended: await them inside the block.
        """
        self._core.check_open()
        return self._trace()

    @contextmanager
    def _trace(self) -> Any:
        core = self._core
        core.check_open()
        recorder = Recorder(core.backend.clock_s())
        core.tracer.start(recorder)
        try:
            yield recorder.trace
        finally:
            core.tracer.stop()

    @property
    def backend(self) -> str:
        """The name of the backend that was chosen."""
        self._core  # noqa: B018
        assert self._name is not None
        return self._name

    @property
    def why_simulated(self) -> str | None:
        """Why ``backend="auto"`` did not find a GPU; None if it did or was not asked."""
        return self._why

    @property
    def properties(self) -> DeviceProperties:
        """Limits and sizes of the device."""
        return self._core.backend.properties

    @property
    def memory(self) -> PoolInfo:
        """The device's own pool, in bytes."""
        core = self._here
        if core.is_closed:
            raise Closed(f"device {self.index} is closed")
        return core.backend.pool_info(core.memory.pool)

    @property
    def pinned(self) -> PinnedPool:
        """The pool of page-locked host memory."""
        return self._here.pinned

    @property
    def is_healthy(self) -> bool:
        """False once a sticky fault was seen."""
        return self._core.lost is None

    @property
    def sim(self) -> Any:
        """The simulator's controls.

        Raises
        ------
        AttributeError
            The device is not simulated.
        """
        self._here  # noqa: B018
        if self._controls is None:
            raise AttributeError(f"dev.sim exists on the simulator only; this is {self._name!r}")
        return self._controls

    def stats(self) -> DeviceStats:
        """Counters; makes no query of the device's streams."""
        core = self._here
        return DeviceStats(
            num_submitted=core.num_submitted,
            num_finished=core.num_finished,
            num_pending=len(core.pending_ops()),
            num_in_flight=sum(len(line.inflight) for line in core.lines),
            memory=self.memory,
            pinned_nbytes=core.pinned.counted_nbytes,
        )

    def live(self) -> dict[str, int]:
        """How many handles the device holds, by kind."""
        core = self._here
        counts: Counter[str] = Counter()
        counts["array"] = len(core.memory.live)
        counts["pinned block"] = core.pinned.num_live
        counts["stream"] = sum(line.is_ordered and line.stream is not None for line in core.lines)
        counts["op"] = len(core.pending_ops()) + sum(len(line.inflight) for line in core.lines)
        return {kind: count for kind, count in counts.items() if count}

    def report(self) -> str:
        """The oldest unfinished op of every stream, and what is parked, as text."""
        core = self._here
        health = "healthy" if core.lost is None else f"lost: {core.lost}"
        rows = [f"device {self.index} ({self._name}), {health}"]
        rows += [
            f"  {line.name}: {len(line.inflight)} in flight, oldest {line.inflight[0].op.name}"
            for line in core.lines
            if line.inflight and line.inflight[0].op is not None
        ]
        rows += [f"  {op.state.value}: {op.name}" for op in core.pending_ops()]
        return "\n".join(rows)

    def _resolve(self, target: Any) -> Any:
        """The backend stream behind a stream, a lane or a lane's name, for the controls."""
        if isinstance(target, str):
            if target not in self._lanes:
                raise ValueError(f"no lane {target!r}; lanes: {', '.join(self._lanes)}")
            target = self._lanes[target]
        return getattr(target, "backend_stream", target)

    def __repr__(self) -> str:
        core = self._core_or_none
        state = "not entered" if core is None else "closed" if core.is_closed else "open"
        return f"<Device {self.index} {self._name or self._wanted} {state}>"
