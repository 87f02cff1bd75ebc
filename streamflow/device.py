"""``Device``: the front door, a facade over the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import iscoroutinefunction
from operator import index as as_index
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np

from streamflow.backends import choose_backend
from streamflow.backends.base import DeviceProperties, PoolInfo
from streamflow.config import Settings
from streamflow.errors import Closed, SimulatorWarning
from streamflow.memory.pinned import PinnedPool
from streamflow.runtime.array import DeviceArray, checked_dtype, checked_shape
from streamflow.runtime.closing import close, drain, leave, raise_failures
from streamflow.runtime.core import Core
from streamflow.runtime.foreign import Arrays, call
from streamflow.runtime.kernel import Kernel
from streamflow.runtime.launch import Launcher
from streamflow.runtime.ledger import DeviceStats, device_stats, live_handles
from streamflow.runtime.op import Op
from streamflow.runtime.opening import Opening
from streamflow.runtime.origin import here
from streamflow.runtime.report import Report, make_report
from streamflow.runtime.scope import Scope
from streamflow.runtime.stream import ENTERED, Lane, Stream, explicit_line
from streamflow.runtime.transfers import Transfers, fill_pattern
from streamflow.scheduler.loops import current_shell
from streamflow.scheduler.placement import Placement, PlacementRequest, least_loaded
from streamflow.trace.model import Trace
from streamflow.trace.recorder import recording

__all__ = ["Device", "DeviceStats"]


T = TypeVar("T")


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
    compute_lanes : int, optional
        Replaces ``settings.compute_lanes``.
    placement : callable, optional
        Called with a :class:`PlacementRequest` for every kernel, fill, call, copy on the
        device and allocation that has no explicit stream, as it is submitted; returns the
        number of a compute lane. It must be quick and submit nothing. What it raises (or
        ``TypeError``, ``ValueError`` for what is no lane) is raised by the submitting call,
        before anything is submitted, and fails an op that was parked. Default: the lane
        that last wrote an input, if that write is its tail, else the least loaded one.

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
        compute_lanes: int | None = None,
        placement: Callable[[PlacementRequest], int] | None = None,
    ) -> None:
        self.index = as_index(index)
        if self.index < 0:
            raise ValueError(f"a device index is not negative, found {index}")
        self.settings = Settings.from_environment() if settings is None else settings
        if compute_lanes is not None:
            if isinstance(compute_lanes, bool):
                raise TypeError("compute_lanes= takes an int, found a bool")
            self.settings = replace(self.settings, compute_lanes=as_index(compute_lanes))
        if placement is not None and (not callable(placement) or iscoroutinefunction(placement)):
            raise TypeError(f"placement= takes a plain function, found {placement!r}")
        self._placement = placement
        self._wanted = self.settings.backend if backend == "auto" else backend
        self._is_entered = False
        self._name: str | None = None
        self._why: str | None = None
        self._core_or_none: Core | None = None

    # -- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> Device:
        if self._is_entered:
            raise RuntimeError("a Device is entered once: make another one")
        self._is_entered = True
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
        self._build(core)
        return self

    def _build(self, core: Core) -> None:
        if self._placement is not None:
            core.placement = Placement(core.compute, self._placement)
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
        core.check_here()
        if core.is_closing:
            return
        await close(core, error)
        leave(core, error)

    @property
    def _core(self) -> Core:
        core = self._core_or_none
        if core is None:
            raise Closed("enter the device first: `async with Device(...) as dev`")
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
        core.check_budgets(size * checked.itemsize, "empty")
        line = explicit_line(core, stream) if stream is not None or ENTERED.get() else None
        if line is None:
            placement = core.placement
            if placement is None:
                line = least_loaded(core.compute)
            else:
                line = placement.pick("empty", "empty", ())
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
        after: Any = (),
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
        after : Op, DeviceArray, future or a sequence of these
            What else this comes after. A future is one of anyio (or its ``Event`` or
            ``TaskHandle``), asyncio or a thread pool; if its result is an op or an array,
            this comes after that, too.

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
        after: Any = (),
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

    def copy(self, dst: Any, src: Any, *, stream: Stream | None = None, after: Any = ()) -> Op[Any]:
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
        after: Any = (),
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
        after : Op, DeviceArray, future or a sequence of these
            What else this comes after. A future is one of anyio (or its ``Event`` or
            ``TaskHandle``), asyncio or a thread pool; if its result is an op or an array,
            this comes after that, too.
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

    def call(
        self,
        fn: Callable[..., T],
        *args: Any,
        reads: Arrays | None = None,
        writes: Arrays | None = None,
        stream: Stream | None = None,
        after: Any = (),
        name: str | None = None,
    ) -> Op[T]:
        """Run GPU code of another library as an op.

        Parameters
        ----------
        fn : callable
            Called as ``fn(stream, *args)``, with a :class:`CallStream` to submit to. On
            CUDA that is on the loop's thread, when the op is submitted: it must not block,
            and the device's own methods raise meanwhile. On the simulator it *is* the
            work, as a kernel is: it runs once, when the device comes to it.
        *args
            Any values. A :class:`DeviceArray` arrives as it is on CUDA, where it offers
            ``__cuda_array_interface__``, and on the simulator as an ndarray over its
            memory, read-only if only read. Inside a list or the like it isn't noticed.
        reads, writes : DeviceArray or sequence of them, optional
            What ``fn`` uses, also through a closure. By default every array among ``args``
            is read and written. Given ``writes`` alone, the others are read; given
            ``reads`` alone, the others are written. What is in both is written.
        stream : Stream, optional
            Default: the current stream, else a compute lane.
        after
            As in :meth:`put`.
        name : str, optional
            For errors and traces; default: the function's name.

        Returns
        -------
        Op
            With what ``fn`` returned; on the simulator, ndarrays in it (also in lists,
            tuples and dicts) that lie in device memory are copied.

        Ordering
        --------
        After the last write of every array it reads, and every use of those it writes; it
        ends when all that ``fn`` submitted has ended. A write never counts as a full
        overwrite. In the stream's window it counts as 16 driver calls (rule R7).

        An exception of ``fn`` fails this op only, with a note of where it was raised. What
        ``fn`` had submitted stays ordered. On the simulator the failure shows when the op
        runs: ops submitted later that need its result fail with ``UpstreamFailed``, those
        submitted before run.

        Raises
        ------
        TypeError
            ``fn`` is no function or a coroutine function, or ``reads`` or ``writes`` holds
            something else than arrays.
        ValueError
            An array of another device; with ``reads`` and ``writes``, one in neither.
        Closed
            An array was freed.
        """
        core = self._core
        core.check_open()
        return call(core, fn, args, reads, writes, stream, after, name)

    # -- work on the host ------------------------------------------------------------------------

    def host(
        self, function: Callable[..., Any], *args: Any, after: Any = (), name: str | None = None
    ) -> Op[Any]:
        """Run ``function(*args)`` in the graph: on a worker thread, or on the loop if async.

        Parameters
        ----------
        function : callable
            A coroutine function runs as a task of the event loop, in the caller's context.
        *args
            A :class:`DeviceArray` arrives as an ndarray of its contents, an :class:`Op` as
            its result; everything else as it is.
        after : Op, DeviceArray, future or a sequence of these
            As in :meth:`put`.
        name : str, optional
            For errors and traces; default: the function's own.

        Returns
        -------
        Op
            Of what the function returns. It may be an argument of later host tasks, a
            scalar of a later launch, or stand in ``after=``.

        Ordering
        --------
        Starts once everything it comes after has ended; at most ``settings.host_workers``
        at a time, taking turns between scopes. Until then it can be cancelled.

        Raises
        ------
        TypeError
            ``function`` is not callable.
        """
        core = self._core
        core.check_open()
        if not callable(function):
            raise TypeError(f"host takes a function to call, found {function!r}")
        first = core.after(after)
        for arg in args:
            if isinstance(arg, DeviceArray):
                self._transfers.check_array(arg)
            elif isinstance(arg, Op):
                core.tickets_of(arg)
        label = getattr(function, "__name__", None) if name is None else name
        op: Op[Any] = Op(core, "host", label)
        values = [
            self._transfers.get(arg, None, None, ()) if isinstance(arg, DeviceArray) else arg
            for arg in args
        ]
        core.host.submit(op, function, values, first)
        return op

    def scope(
        self,
        *,
        limit: int | str | None = None,
        deadline: float | None = None,
        name: str | None = None,
    ) -> Scope:
        """An async context manager that is left only once its work has ended (rule R8).

        Everything submitted inside belongs to it, also by tasks that were started inside.

        Parameters
        ----------
        limit : int or str, optional
            Bytes in flight: each ``put`` takes the bytes it moves, each ``launch`` those of
            its arrays, from when it goes on until it has ended. What does not fit waits its
            turn. ``4096``, ``"512MiB"``, ``"2GB"``.
        deadline : float, optional
            Seconds from entering, by the device's clock: what runs inside is cancelled then.
        name : str, optional
            For errors and reports.

        Raises
        ------
        ValueError, TypeError
            A limit or deadline that is none.
        DeadlineExceeded
            On leaving, with a report of what had not ended.
        ExceptionGroup
            On leaving: ops failed and nobody saw it, or saw only some of it.
        """
        core = self._core
        core.check_open()
        return Scope(core, limit=limit, deadline=deadline, name=name)

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
            name or f"stream{self._num_streams}",
            priority=priority,
            is_ordered=True,
            where=here(),
        )
        return Stream(core, line, priority)

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The streams that the runtime picks: ``h2d``, ``d2h``, ``free``, ``compute0``, ..."""
        self._core  # noqa: B018  (raises before the device is entered)
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
        core = self._core
        core.check_here()
        if core.lost is None:
            await drain(core)
        raise_failures(core)

    # -- looking -------------------------------------------------------------------------

    def trace(self) -> AbstractContextManager[Trace]:
        """Record every op submitted inside the block, why it waited, and when it ran.

        Device times are known once the ops have ended: await them inside the block.
        """
        return recording(self._core)

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
        core = self._core
        if core.is_closed:
            raise Closed(f"device {self.index} is closed")
        return core.backend.pool_info(core.memory.pool)

    @property
    def pinned(self) -> PinnedPool:
        """The pool of page-locked host memory."""
        return self._core.pinned

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
        self._core  # noqa: B018
        if self._controls is None:
            raise AttributeError(f"dev.sim exists on the simulator only; this is {self._name!r}")
        return self._controls

    def stats(self) -> DeviceStats:
        """Counters; makes no query of the device's streams."""
        return device_stats(self._core, self.memory)

    def live(self) -> dict[str, dict[str, int]]:
        """What the device holds, by kind and by the line that made it: ``{"array": {line: n}}``."""
        return live_handles(self._core)

    def report(self) -> Report:
        """The oldest unfinished op of every stream, and what is parked: prints as text."""
        return make_report(self._core)

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
