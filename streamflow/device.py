"""``Device``: the front door, a facade over the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import iscoroutinefunction
from operator import index as as_index
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import anyio.to_thread
import numpy as np

from streamflow.backends import choose_backend
from streamflow.backends.base import DeviceProperties
from streamflow.backends.origin import here
from streamflow.config import Settings
from streamflow.errors import Closed, DeviceError, SimulatorWarning
from streamflow.memory.resource import DeviceMemoryResource, checked_resource
from streamflow.runtime.closing import close, drain, leave, raise_failures
from streamflow.runtime.core import Core
from streamflow.runtime.launch import Launcher
from streamflow.runtime.opening import Opening
from streamflow.runtime.pinned import PinnedPool
from streamflow.runtime.pinning import Pin
from streamflow.runtime.recording import refuse
from streamflow.runtime.registry import add_open, enter_here, leave_here
from streamflow.runtime.report import Report, fresh_report
from streamflow.runtime.scope import Scope
from streamflow.runtime.stream import Lane, Stream
from streamflow.runtime.submit import Submit
from streamflow.runtime.transfers import Transfers
from streamflow.scheduler.guards import is_forked, note_entering
from streamflow.scheduler.loops import current_shell
from streamflow.scheduler.placement import Placement, PlacementRequest

if TYPE_CHECKING:
    from streamflow.capture.captured import CapturedFunction, P, R
    from streamflow.capture.graph import CapturedGraph
    from streamflow.memory.mempool import MemoryPool
    from streamflow.pipeline.pipeline import Pipeline
    from streamflow.pipeline.progress import Progress
    from streamflow.pipeline.sources import SourceLike
    from streamflow.runtime.ledger import DeviceStats
    from streamflow.runtime.mapped import MappedArray
    from streamflow.trace.trace import Trace

__all__ = ["Device"]


class Device(Submit):
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
    memory : DeviceMemoryResource, optional
        Where this device's arrays come from unless they are told otherwise. Default: what was
        set for the device in the registry, else a pool of its own.
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
        memory: DeviceMemoryResource | None = None,
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
        if memory is not None:
            checked_resource(memory, "memory=")
            if memory.device not in (None, self.index):
                raise ValueError(
                    f"{memory!r} was made for device {memory.device}, not {self.index}"
                )
        self._resource = memory
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
        enter_here(core)
        self._build(core)
        return self

    def _build(self, core: Core) -> None:
        core.memory.set_default(self._resource)
        self._pool: MemoryPool | None = None
        self._pinned = PinnedPool(core)
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
        self._captured: WeakSet[CapturedFunction[..., Any]] = WeakSet()
        self._core_or_none = core

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        core = self._core
        if kind is GeneratorExit and not core.is_here():
            return  # the loop is gone, and with it who could wait (C12)
        if error is None or not is_forked():  # a fork that ends by an error ends by that one
            core.check_here()
        if core.is_closing:
            return
        leave_here(core)
        from streamflow.runtime.live import LiveArrays  # not while importing streamflow (R13)

        for captured in self._captured:
            captured.clear()  # their memory isn't the program's to drop
        live, pins = LiveArrays.of(core), core.pins.where()
        await close(core, error)
        leave(core, error)
        if error is None and core.lost is None:
            live.warn(stacklevel=2)  # last: as an error it leaves nothing half closed
            core.pins.warn(pins, stacklevel=2)

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

    # -- scopes and streams ----------------------------------------------------------------------

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

    def pipeline(
        self,
        source: SourceLike,
        *,
        depth: int | None = None,
        limit: int | str | None = None,
        progress: Progress = False,
        ordered: bool = True,
        source_owns: bool = False,
        batch_size: int | None = None,
    ) -> Pipeline:
        """Take the items of a source through the device, the copies of some under others' work.

        ``async for out in dev.pipeline(batches).map(model)``.

        Parameters
        ----------
        source : iterable, async iterable or callable
            Of items: ndarrays, or tuples, lists, dicts and dataclasses with some. A callable is
            called once per run, on a worker thread, and returns an iterable. Iterators are
            pulled on a worker thread, asynchronous ones on the loop.
        depth : int, optional
            Items between the pull and the end of what the consumer needs of them, and so how far
            ahead of the consumer the source is pulled. Default: ``settings.pipeline_depth``.
        limit : int or str, optional
            Bytes of those items on the device, as they came there and as the last stage returned
            them. ``4096``, ``"512MiB"``, ``"2GB"``.
        progress : bool, mapping or bar
            True for a bar of tqdm's, a mapping of its arguments, or a bar of your own.
        ordered : bool
            False: items come out as they get ready.
        source_owns : bool
            Each item has memory of its own. Otherwise the next one is pulled once the last was
            read (or, where a host stage follows, copied), so a source may fill one buffer again
            and again. Lists, tuples and ndarrays own their items as it is.
        batch_size : int, optional
            Cuts an ndarray or memmap along its first axis into views of so many rows.

        Returns
        -------
        Pipeline

        Ordering
        --------
        Nothing happens before it is iterated over. Items are put on the lane ``h2d`` and come
        back on ``d2h``; the end of each is seen by the poller.

        Raises
        ------
        TypeError, ValueError
            No source, or a depth, limit or batch size that is none.
        """
        from streamflow.pipeline.pipeline import make_pipeline  # few programs have one (R13)

        return make_pipeline(
            self,
            source,
            depth=depth,
            limit=limit,
            progress=progress,
            ordered=ordered,
            source_owns=source_owns,
            batch_size=batch_size,
        )

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
        refuse(core, "nothing can be awaited before its block is left")
        if core.lost is None:
            await drain(core)
        raise_failures(core)

    # -- graphs --------------------------------------------------------------------------

    def capture(self, *, name: str | None = None) -> AbstractContextManager[CapturedGraph]:
        """``with dev.capture() as graph:`` record what this task submits, to be launched later.

        Nothing in the block runs. Kernels, fills, copies on the device and from and to pinned
        memory, ``dev.call``, allocations, frees of what was allocated there, and steps of
        ``dev.host``, which split the graph. Allocations are made at once and belong to the
        graph, as do the arrays made by them: they hold what the latest launch wrote.

        Parameters
        ----------
        name : str, optional
            For errors and traces.

        Ordering
        --------
        Within the graph by data, ``after=`` and explicit streams, as if it ran eagerly (rule
        R3); an array in ``after=`` stands for its writes in the graph and before the launch.
        Other tasks, and tasks started in the block, submit as always meanwhile.

        Raises
        ------
        CaptureRefused
            By the call in the block that a graph can't hold: a read on the host, an await, a
            copy from or to pageable memory, ``after=`` work outside, another capture. Leaving
            the block by it leaves the device as it was.
        """
        self._core.check_open()
        from streamflow.capture.graph import Capture  # few programs do (R13)

        return Capture(self, name)

    def captured(
        self, function: Callable[P, R], *, maxsize: int = 8, name: str | None = None
    ) -> CapturedFunction[P, R]:
        """``function``, recorded by its first call for each signature, and replayed after that.

        Parameters
        ----------
        function : callable
            A plain one, which submits what :meth:`capture` takes.
        maxsize : int
            Signatures to keep, each with memory of its own; what was called longest ago goes.
        name : str, optional
            For errors and traces; default: the function's own.
        """
        from streamflow.capture.captured import CapturedFunction  # few programs do (R13)

        return CapturedFunction(self, function, maxsize, name, self._captured)

    # -- looking -------------------------------------------------------------------------

    def trace(self, *, max_ops: int = 200_000) -> AbstractContextManager[Trace]:
        """Record every op submitted inside the block, why it waited, and when it ran.

        Device times are known once the ops have ended: await them inside the block.

        Parameters
        ----------
        max_ops : int
            Of more ops than these the newest are kept.
        """
        from streamflow.trace.recorder import recording  # few programs do, or only now and then

        return recording(self._core, max_ops)

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
    def memory(self) -> MemoryPool:
        """The device's own pool: how much it has and uses, its attributes, ``trim``.

        Raises
        ------
        DeviceError
            The device has no stream-ordered pools.
        """
        core = self._here
        if core.is_closed:
            raise Closed(f"device {self.index} is closed")
        if core.memory.pool is None:
            raise DeviceError(f"device {self.index} has no stream-ordered memory pools")
        if self._pool is None:
            from streamflow.memory.mempool import MemoryPool  # few programs look at it (R13)

            self._pool = MemoryPool._view(core.space, core.memory.pool)
        return self._pool

    @property
    def pinned(self) -> PinnedPool:
        """The pool of page-locked host memory: leases, ``trim``, ``stats``."""
        self._here  # noqa: B018
        return self._pinned

    def pin(self, array: Any) -> Pin:
        """Page-lock the program's own memory, so that copies from and to it need no staging.

        ``async with dev.pin(x):``, or ``pin = await dev.pin(x)`` and ``await pin.unpin()``. It
        costs what staging the array once or twice does: for memory that is copied more often.

        Parameters
        ----------
        array : ndarray or buffer
            In any layout: all bytes from its first to its last are pinned, and the pin keeps it.
            Inside what is pinned already, also by another device or another task, it counts once
            more, and the last unpin counts. What is page-locked by other means stays as it is.

        Returns
        -------
        Pin
            Await it.

        Ordering
        --------
        At once, on a worker thread. Copies submitted before it has ended are staged.

        Raises
        ------
        TypeError
            No memory of the host that NumPy sees without a copy, or no plain bytes.
        ValueError
            Memory of a lease that was released. On awaiting: it overlaps what is pinned
            already, and does not lie in it.
        OutOfDeviceMemory, DeviceError
            On awaiting: the system page-locks no more, or not this memory.

        Notes
        -----
        An await that is cancelled undoes the pin, unless another task awaits it too.
        """
        return self._core.pins.pin(array)

    async def mapped(
        self, shape: Any, dtype: Any = np.float64, *, timeout: float | None = None
    ) -> MappedArray:
        """An array in pinned memory of the host, which kernels read and write where it is.

        For small inputs that a kernel reads once, and results of a few numbers: it saves the
        copy. Every read of a kernel goes over the link, so what is read several times is copied.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype-like
            As for :meth:`empty`.
        timeout : float, optional
            Seconds to wait for pinned memory, by the device's clock; default: no limit.

        Returns
        -------
        MappedArray
            Uninitialised: write ``m.host``.

        Ordering
        --------
        Takes a cached block of the pinned pool, else waits as a lease does. Uses are
        ordered as those of any array. The host's own are not: ``await m.idle()`` before
        ``m.host`` is written again.

        Raises
        ------
        TypeError, ValueError
            Not a shape or dtype, or more than the whole budget of pinned memory.
        DeadlineExceeded
            No pinned memory within ``timeout``.
        Closed
            The device was closed meanwhile.
        DeviceError
            The device does not see memory of the host.
        """
        from streamflow.runtime.mapped import make_mapped

        return await make_mapped(self._core, shape, dtype, timeout)

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
            raise AttributeError(
                f"dev.sim exists on the simulator only, and this device is {self._name!r}: "
                "pass backend='sim', or set STREAMFLOW_BACKEND=sim"
            )
        return self._controls

    def stats(self) -> DeviceStats:
        """Counters; makes no query of the device's streams."""
        from streamflow.runtime.ledger import device_stats

        return device_stats(self._here)

    def live(self) -> dict[str, dict[str, int]]:
        """What the device holds, by kind and by the line that made it: ``{"array": {line: n}}``."""
        from streamflow.runtime.ledger import live_handles

        return live_handles(self._here)

    def report(self) -> Report:
        """The oldest unfinished op of every stream, and what is parked: prints as text.

        Looks at the device, so that what has ended is not in it; never blocks.
        """
        return fresh_report(self._here)

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
