"""Launching kernels: one plan per kernel, made once, so that a launch only checks and calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from sys import _getframe
from types import FrameType
from typing import Any

import numpy as np

from streamflow.backends.base import Access
from streamflow.errors import Closed
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.core import Core
from streamflow.runtime.kernel import Kernel
from streamflow.runtime.op import SCOPE, Op, OpState, next_seq
from streamflow.runtime.parked import NOTHING, After, Parked
from streamflow.runtime.stream import ENTERED, Stream, current_line, explicit_line
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.placement import choose_lane, least_loaded
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

__all__ = ["KernelRun", "Launcher"]

_MAX_CONFIGS = 1024
_READ, _WRITE = Access.READ, Access.WRITE
_SUBMITTED = OpState.SUBMITTED
_NOTHING = ()  # the empty tuple is one object: the default is found without a look inside


class _Plan:
    """What one kernel's launches on one device have in common."""

    __slots__ = (
        "arrays",
        "configs",
        "error",
        "given",
        "handle",
        "is_loading",
        "is_plain",
        "kernel",
        "name",
        "num",
        "parked",
        "scalars",
        "sizes",
    )

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.handle: Any = None
        self.error: BaseException | None = None
        self.is_loading = False
        self.is_plain = False  # loaded, and lanes are chosen by affinity
        self.parked: list[Parked] = []
        self.num = len(kernel.parameters)
        # Ints within the bounds go to the driver as they are; the converter sees the others.
        self.scalars = [
            (place, *_plain_bounds(parameter.dtype), convert)
            for place, (parameter, convert) in enumerate(
                zip(kernel.parameters, kernel.converters, strict=True)
            )
            if convert is not None
        ]
        self.arrays = [
            (place, parameter.dtype, parameter.access)
            for place, parameter in enumerate(kernel.parameters)
            if parameter.is_pointer
        ]
        self.configs: dict[Any, Any] = {}
        self.given: dict[tuple[int, int, int], Any] = {}
        self.sizes: dict[int, Any] = {}  # default geometry by the largest array's size


class KernelRun:
    """The driver call of a launch that parks or is captured: one object, since thousands may."""

    __slots__ = ("config", "core", "plan", "values")

    def __init__(self, core: Core, plan: _Plan, config: Any, values: list[Any]) -> None:
        self.core = core
        self.plan = plan
        self.config = config
        self.values = values

    def __call__(self, stream: Any) -> int:
        if self.config is _EMPTY:
            return 0  # every array is empty: nothing to do, but order still holds
        self.core.backend.launch(stream, self.config, self.plan.handle, *self.values)
        return 1

    @property
    def is_loaded(self) -> bool:
        """Whether it can be made now."""
        return self.config is _EMPTY or self.plan.handle is not None

    def await_kernel(self, parked: Parked) -> None:
        """Have ``parked``, which waits for one need more, go on once the kernel is compiled."""
        if self.plan.error is not None:
            self.core.parking.drop(parked, self.plan.error)
        else:
            parked.need = "the compiler"
            self.plan.parked.append(parked)


class Launcher:
    """``dev.launch`` of one device."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lanes = core.compute
        self._launch = core.backend.launch
        self._loop = core.shell.key
        self._current_loop = core.shell.current
        self._plans: dict[Kernel, _Plan] = {}

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
        """``Device.launch``: check everything, then submit or park one launch.

        The hot path of the library: one function, nothing called that can be inlined
        (docs/explanation/performance has the figures).
        """
        core, lanes = self._core, self._lanes
        if core.needs_check or self._current_loop() is not self._loop:
            core.check_open()
        plan = self._plans.get(kernel)
        if plan is None:
            plan = self._plan(kernel)
        if len(args) != plan.num:
            raise TypeError(
                f"kernel {kernel.name} takes {plan.num} arguments "
                f"({', '.join(p.name for p in kernel.parameters)}), found {len(args)}"
            )
        values = list(args)
        reads: list[Region] = []
        writes: list[Region] = []
        deps: list[Ticket] = []
        largest = 0
        is_plain = plan.is_plain and after is _NOTHING
        is_overwrite = True
        for place, low, high, convert in plan.scalars:
            value = args[place]
            if value.__class__ is not int or not low <= value <= high:
                if value.__class__ is Op:
                    is_plain = False  # its result, once there is one
                else:
                    values[place] = convert(value)
        for place, dtype, access in plan.arrays:
            value = args[place]
            if (
                value.__class__ is not DeviceArray
                or value._core is not core
                or value._memory.is_freed
                or (dtype is not None and value.dtype is not dtype and value.dtype != dtype)
            ):
                self._check_array(kernel, args, place)
            argument = value._argument
            values[place] = value.argument() if argument is None else argument
            if value.size > largest:
                largest = value.size
            region = value._region
            last = region.last_write
            if last.failure is not None or region.overlapping:
                is_plain = False
            elif last.position == 0 or last.position > last.timeline.watermark:
                deps.append(last)
            if access is _READ:
                reads.append(region)
            else:
                writes.append(region)
                if region.reads:
                    region.before_write(deps)
                if access is not _WRITE or not value.is_whole_region:
                    is_overwrite = False
        if grid is None and block is None and not shared_bytes:
            config = plan.sizes.get(largest)
            if config is None:
                config = plan.sizes[largest] = self._default_config(plan, largest)
        elif grid.__class__ is block.__class__ is shared_bytes.__class__ is int:
            # Exact ints only: 4.0 and True would find the entries of 4 and 1.
            config = plan.given.get((grid, block, shared_bytes))
            if config is None:
                config = self._config(plan, grid, block, shared_bytes, largest)
                plan.given[grid, block, shared_bytes] = config
        else:
            config = self._config(plan, grid, block, shared_bytes, largest)
        if stream is not None:
            line = explicit_line(core, stream)
        else:
            line = current_line(core) if ENTERED.get() else None
        if SCOPE.get() is not None and core.has_budgets():
            is_plain = False
        if not is_plain or not core.is_fast:
            if is_plain and core.is_only_traced and config is not _EMPTY:
                traced = self._launch_traced(
                    _getframe(1),
                    name,
                    plan,
                    config,
                    values,
                    reads,
                    writes,
                    deps,
                    line,
                    is_overwrite,
                )
                if traced is not None:
                    return traced
            if core.recording is not None and (recorder := core.recording.here()) is not None:
                recorder.hold(args)
            return self._submit(
                _getframe(1), name, plan, config, values, reads, writes, line, after, is_overwrite
            )
        op: Op[None] = Op(core, "launch", plan.name if name is None else name, _getframe(1))
        if config is not _EMPTY:
            for dep in deps:
                if dep.position == 0:
                    break  # parked: so is this op
            else:
                if line is None:
                    for dep in deps:  # as choose_lane does
                        line = dep.timeline
                        if dep.position == line.position and line in lanes:
                            break
                    else:
                        line = least_loaded(lanes)
                if line.parked_tail is None and (
                    # The parking looks closer at a full window, and retires now and then.
                    (
                        line.position - line.watermark < core.window
                        and line.waiting is None
                        and len(line.inflight) & 63
                    )
                    or core.parking.has_room(line)
                ):
                    num_calls, ticket = 2, op.ticket
                    target: Any = line.stream
                    events = core.events
                    event = events.pop() if events else core.take_event()
                    try:
                        for dep in deps:
                            if dep.timeline is not line:
                                waits = needed_waits(line, deps)
                                for wait in waits:
                                    target.wait(wait.event)
                                if waits:
                                    line.join(waits)
                                    num_calls += len(waits)
                                break
                        self._launch(target, config, plan.handle, *values)
                    except Exception as error:
                        core.parking.refused(op, error, line, event, num_calls)
                    else:
                        try:
                            target.record(event)
                        except Exception as error:
                            core.parking.unrecorded(op, error)
                        else:  # Timeline.advance and Core.submitted
                            line.position = position = line.position + num_calls
                            ticket.timeline = line
                            ticket.position = position
                            ticket.seen = line.clock
                            ticket.event = event
                            line.inflight.append(ticket)
                            core.num_submitted += 1
                            op._state = _SUBMITTED
                    for region in reads:
                        region.record_read(ticket)
                    for region in writes:
                        region.last_write = ticket
                        region.reads = ()
                    return op
        self._park(op, plan, config, values, reads, writes, line, NOTHING, is_overwrite)
        return op

    def _launch_traced(
        self,
        frame: FrameType,
        name: str | None,
        plan: _Plan,
        config: Any,
        values: list[Any],
        reads: list[Region],
        writes: list[Region],
        deps: list[Ticket],
        line: Timeline | None,
        is_overwrite: bool,
    ) -> Op[None] | None:
        """The short way while a trace is taken (P11); None where the op may have to park."""
        core = self._core
        for dep in deps:
            if dep.position == 0:
                return None
        if line is None:
            line = choose_lane(self._lanes, deps)
        if line.parked_tail is not None or not core.parking.has_room(line):
            return None
        op: Op[None] = Op(core, "launch", plan.name if name is None else name, frame)
        core.tracer.op_called(op, reads, writes, (), is_overwrite)
        core.parking.go(op, KernelRun(core, plan, config, values), line, deps)
        for region in reads:
            region.record_read(op.ticket)
        for region in writes:
            region.record_write(op.ticket)
        return op

    # -- the general way ------------------------------------------------------------------

    def _submit(
        self,
        frame: FrameType,
        name: str | None,
        plan: _Plan,
        config: Any,
        values: list[Any],
        reads: list[Region],
        writes: list[Region],
        line: Timeline | None,
        after: Any,
        is_overwrite: bool,
    ) -> Op[None]:
        """Check what the short way has no need to, then submit or park."""
        core = self._core
        first = core.after(after)
        results = [
            (place, convert, values[place])
            for place, _, _, convert in plan.scalars
            if isinstance(values[place], Op)
        ]
        for _, _, scalar in results:
            first = After([*first.tickets, *core.tickets_of(scalar)], first.futures)
        regions = {id(region): region for region in (*reads, *writes)}
        nbytes = sum(region.stop - region.start for region in regions.values())
        label = plan.name if name is None else name
        core.check_budgets(nbytes, f"launch of {label}")
        op: Op[None] = Op(core, "launch", label, frame)
        self._park(
            op, plan, config, values, reads, writes, line, first, is_overwrite, nbytes, results
        )
        return op

    def _park(
        self,
        op: Op[None],
        plan: _Plan,
        config: Any,
        values: list[Any],
        reads: list[Region],
        writes: list[Region],
        line: Timeline | None,
        after: After,
        is_overwrite: bool,
        nbytes: int = 0,
        results: Sequence[tuple[int, Any, Op[Any]]] = (),
    ) -> None:
        core = self._core
        num_needs = 0
        if config is not _EMPTY and plan.handle is None:
            self._load(plan)
            if plan.error is None and plan.handle is None:
                num_needs = 1

        def start(parked: Parked) -> None:  # scalars of ours are the results of ops
            tickets = [scalar.ticket for _, _, scalar in results]
            core.when_all_ended(tickets, partial(fill_in, parked))

        def fill_in(parked: Parked) -> None:
            if parked.has_left:
                return
            try:
                for place, convert, scalar in results:
                    if scalar._error is None:
                        values[place] = convert(scalar._result)
            except Exception as error:
                core.parking.drop(parked, error.with_traceback(None))
                return
            core.parking.ready(parked)

        parked = core.parking.submit(
            op,
            KernelRun(core, plan, config, values),
            line=line or core.picker(op),
            reads=reads,
            writes=writes,
            after=after,
            is_overwrite=is_overwrite,
            num_needs=num_needs or (plan.error is not None),
            start=start if results else None,
            nbytes=nbytes,
        )
        if parked is not None:
            if plan.error is not None:
                core.parking.drop(parked, plan.error)
            elif num_needs:
                parked.need = "the compiler"
                plan.parked.append(parked)

    def _plan(self, kernel: Kernel) -> _Plan:
        if not isinstance(kernel, Kernel):
            raise TypeError(f"launch takes a streamflow Kernel, found {kernel!r}")
        plan = _Plan(kernel)
        self._loaded(plan, self._core.backend.load_kernel(kernel.spec))
        self._plans[kernel] = plan
        return plan

    def _loaded(self, plan: _Plan, handle: Any | None) -> None:
        plan.handle = handle
        plan.is_plain = handle is not None and self._core.placement is None

    def _load(self, plan: _Plan) -> None:
        """Compile on a worker thread; launches park meanwhile (rule R7)."""
        if plan.is_loading or plan.error is not None:
            return
        core = self._core
        plan.is_loading = True

        def done(handle: Any, error: BaseException | None) -> None:
            plan.is_loading = False
            parked, plan.parked = plan.parked, []
            if error is not None:
                plan.error = core.lose(error, f"compiling {plan.kernel.name}")
                for waiting in parked:
                    core.parking.drop(waiting, plan.error)
                return
            self._loaded(plan, handle)
            for waiting in parked:
                core.parking.ready(waiting)

        backend, spec = core.backend, plan.kernel.spec
        core.background.submit(next_seq(), lambda: backend.load_kernel_blocking(spec), done)
        core.schedule_turn()

    # -- geometry -----------------------------------------------------------------------------

    def _default_config(self, plan: _Plan, largest: int) -> Any:
        if len(plan.sizes) >= _MAX_CONFIGS:
            plan.sizes.clear()
        if largest == 0:
            if plan.arrays:
                return _EMPTY
            raise ValueError(
                f"kernel {plan.kernel.name} has no array to take a size from: pass grid= and block="
            )
        return self._config(plan, None, None, 0, largest)

    def _config(self, plan: _Plan, grid: Any, block: Any, shared: int, largest: int) -> Any:
        name = plan.kernel.name
        properties = self._core.backend.properties
        block3 = _as_dim3(self._core.settings.block if block is None else block, name, "block")
        threads = block3[0] * block3[1] * block3[2]
        if grid is None:
            if block3[1] != 1 or block3[2] != 1:
                raise ValueError(f"{name}: pass grid= with a block of more than one dimension")
            if largest == 0:
                return self._default_config(plan, 0)
            grid = -(-largest // block3[0])
        grid3 = _as_dim3(grid, name, "grid")
        shared = index(shared)
        for wanted, limit, what in (
            (grid3, properties.max_grid_dim, "grid"),
            (block3, properties.max_block_dim, "block"),
        ):
            for axis, found, most in zip("xyz", wanted, limit, strict=True):
                if found > most:
                    raise ValueError(f"{name}: {what}.{axis} is {found}, the device takes {most}")
        if threads > properties.max_threads_per_block:
            raise ValueError(
                f"{name}: a block of {threads} threads, the device takes "
                f"{properties.max_threads_per_block}"
            )
        if not 0 <= shared <= properties.max_shared_memory_per_block_nbytes:
            raise ValueError(
                f"{name}: shared_bytes is {shared}, the device takes 0 to "
                f"{properties.max_shared_memory_per_block_nbytes}"
            )
        key = (grid3, block3, shared)
        config = plan.configs.get(key)
        if config is None:
            if len(plan.configs) >= _MAX_CONFIGS:
                plan.configs.clear()
                plan.given.clear()
            config = plan.configs[key] = self._core.backend.launch_config(grid3, block3, shared)
        return config

    def _check_array(self, kernel: Kernel, args: tuple[Any, ...], place: int) -> None:
        """Raise what is wrong with array argument ``place``: nothing, for a mapped array."""
        parameter, value = kernel.parameters[place], args[place]
        what = f"kernel {kernel.name}, argument {parameter.name!r} ({parameter.ctype})"
        if not isinstance(value, DeviceArray):
            hint = ": move it with dev.put first" if isinstance(value, np.ndarray) else ""
            raise TypeError(f"{what} takes a DeviceArray, found {type(value).__name__}{hint}")
        if value._core is not self._core:
            raise ValueError(f"{what}: {value!r} belongs to another device or event loop")
        if value._memory.is_freed:
            raise Closed(f"{what}: {value!r} {value._memory.gone}")
        if parameter.dtype is not None and value.dtype != parameter.dtype:
            raise TypeError(f"{what} takes {parameter.dtype}, found {value.dtype}")


def _plain_bounds(dtype: Any) -> tuple[int, int]:
    """The ints that a parameter of ``dtype`` takes unconverted; none if low > high."""
    if dtype is None or dtype.kind not in "iu":
        return 1, 0
    limits = np.iinfo(dtype)
    return int(limits.min), min(int(limits.max), 2**63 - 1)


_EMPTY: Any = object()
"""The configuration of a launch over empty arrays."""


def _as_dim3(value: Any, name: str, what: str) -> tuple[int, int, int]:
    try:
        dims = tuple(index(n) for n in (value if isinstance(value, (tuple, list)) else (value,)))
    except TypeError:
        raise TypeError(f"{name}: {what}= takes an int or up to three, found {value!r}") from None
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name}: {what}= takes one to three ints, found {value!r}")
    if min(dims) < 1:
        raise ValueError(f"{name}: every dimension of {what}= is at least 1, found {value!r}")
    return (*dims, *(1,) * (3 - len(dims)))  # type: ignore[return-value]
