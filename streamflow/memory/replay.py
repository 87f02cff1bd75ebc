"""A log of allocations, run against a stack of resources on a simulated device.

A log holds no kernels. Here the device is behind the program by a fixed time: it has done what
was submitted before a free only so much later, and uses the block until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter_ns
from typing import Any

import numpy as np

from streamflow.backends import open_backend
from streamflow.backends.base import Backend, KernelSpec, Parameter
from streamflow.config import Settings, SimOptions
from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.figures import Figures
from streamflow.memory.log import LogAction, LogRecord
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place, Space, enter_space, leave_space
from streamflow.memory.spec import ResourceSpec

__all__ = ["Plan", "Replayed", "plan_replay", "replay"]

_SECONDS = Parameter("seconds", "double", np.dtype(np.float64), None)
_DAY_US = 24 * 60 * 60 * 10**6
_NUM_SAMPLES = 1000
"""Of the fragmentation: each walks over all free blocks."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call: of the block ``block``, on the stream ``stream``, both counted from 0."""

    is_free: bool
    block: int
    nbytes: int
    stream: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a log says was done, as far as it makes sense."""

    steps: tuple[Step, ...]
    problems: tuple[str, ...]
    """What does not: each with the line."""
    num_streams: int
    num_threads: int
    num_failures: int
    """Allocations that had failed already when the log was written; they are left out."""
    num_left: int
    """Blocks that were never freed."""
    peak_live_nbytes: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """How one stack did. Sizes in bytes."""

    resource: str
    num_allocations: int
    num_frees: int
    num_failures: int
    """Allocations that the stack refused, after a wait for the device too."""
    num_stalls: int
    """Allocations that had to wait for the device, and be tried again."""
    peak_live_nbytes: int
    peak_reserved_nbytes: int
    """What the stack had taken of the device at most."""
    fragmentation: float | None
    """1 - largest hole / free, the mean over the log; None without a sub-allocator in the stack."""
    num_waits: int
    """Waits of one stream for another that the stack put in."""
    allocate_us: float
    """Host time of an allocation, on average."""
    free_us: float


def plan_replay(records: Sequence[LogRecord]) -> Plan:
    """Sort out a log: pair frees with allocations, and say which have none.

    Parameters
    ----------
    records : sequence of LogRecord
        As :func:`~streamflow.memory.read_log` gives them.
    """
    steps: list[Step] = []
    problems: list[str] = []
    streams: dict[int, int] = {}
    live: dict[int, tuple[int, LogRecord]] = {}
    freed: dict[int, int] = {}  # address -> line of its latest free
    num_blocks = num_failures = live_nbytes = peak_nbytes = 0
    time_us = last_us = records[0].time_us if records else 0
    for record in records:
        passed_us = record.time_us - last_us
        if passed_us < -_DAY_US // 2:  # past midnight
            passed_us += _DAY_US
        if passed_us > 0:  # else of another thread, that wrote a little later
            time_us, last_us = time_us + passed_us, record.time_us
        if record.action is LogAction.ALLOCATE_FAILURE:
            num_failures += 1
            continue
        if not record.nbytes:  # never reaches a device
            continue
        time_s = (time_us - records[0].time_us) / 1e6
        stream = streams.setdefault(record.stream, len(streams))
        address = record.address
        if record.action is LogAction.ALLOCATE:
            if address in live:
                problems.append(
                    f"line {record.line}: {address:#x} was allocated again, and never freed "
                    f"since line {live[address][1].line}"
                )
            live[address] = num_blocks, record
            steps.append(Step(False, num_blocks, record.nbytes, stream, time_s))
            num_blocks += 1
            live_nbytes += record.nbytes
            peak_nbytes = max(peak_nbytes, live_nbytes)
            continue
        known = live.pop(address, None)
        if known is None:
            before = freed.get(address)
            problems.append(
                f"line {record.line}: {address:#x} was freed before, on line {before}"
                if before is not None
                else f"line {record.line}: {address:#x} was never allocated"
            )
            continue
        block, allocated = known
        if allocated.nbytes != record.nbytes:
            problems.append(
                f"line {record.line}: {record.nbytes} bytes freed at {address:#x}, but "
                f"{allocated.nbytes} were allocated on line {allocated.line}"
            )
        freed[address] = record.line
        steps.append(Step(True, block, allocated.nbytes, stream, time_s))
        live_nbytes -= allocated.nbytes
    return Plan(
        tuple(steps),
        tuple(problems),
        len(streams),
        len({record.thread for record in records}),
        num_failures,
        num_blocks - sum(step.is_free for step in steps),
        peak_nbytes,
    )


def replay(plan: Plan, spec: ResourceSpec, *, memory_nbytes: int, lag_s: float) -> Replayed:
    """Run a plan against one stack, on a simulated device of its own. Blocks.

    Parameters
    ----------
    plan : Plan
    spec : ResourceSpec
    memory_nbytes : int
        What the device has.
    lag_s : float
        How far the device is behind the program.

    Raises
    ------
    TypeError, ValueError
        The stack can't be made.
    StreamflowError
        It fails, other than by lack of memory.
    """
    options = SimOptions(
        clock="virtual",
        memory_nbytes=memory_nbytes,
        compute_slots=max(8, plan.num_streams),  # no stream is held up by another
        check_races=False,
    )
    backend = open_backend("sim", 0, Settings(sim=options), object())
    try:
        space = enter_space(backend)
        try:
            run = _Run(backend, space, spec.make(), plan.num_streams, lag_s)
            every = max(1, len(plan.steps) // _NUM_SAMPLES)
            for number, step in enumerate(plan.steps):
                run.take(step) if not step.is_free else run.give(step)
                if not number % every:
                    run.sample()
            run.finish()
            return run.outcome(spec.text)
        finally:
            leave_space(space, backend)
    finally:
        backend.close()


class _Run:
    """One device while it replays, and what is counted."""

    def __init__(
        self,
        backend: Backend,
        space: Space,
        resource: DeviceMemoryResource,
        num_streams: int,
        lag_s: float,
    ) -> None:
        self.backend: Any = backend  # a simulated one: it counts its calls
        self.resource = resource
        self.figures = _figures_of(resource)
        self.fragmentations: list[float] = []
        self.lag_s = lag_s
        self.streams = [backend.create_stream() for _ in range(num_streams)]
        self.places = [space.place(stream) for stream in self.streams]
        self.busy_until_s = [0.0] * num_streams
        spec = KernelSpec("use", (_SECONDS,), body=lambda seconds: None, cost_s=float)
        self.kernel = backend.load_kernel(spec)
        self.config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        self.pieces: dict[int, tuple[Piece, int]] = {}
        self.live_nbytes = self.peak_live = self.peak_reserved = 0
        self.num_allocations = self.num_frees = self.num_failures = 0
        self.num_stalls = self.num_waits = 0
        self.allocate_ns = self.free_ns = 0

    def take(self, step: Step) -> None:
        self._pass_time(step.time_s)
        place = self.places[step.stream]
        num_waits = self.backend.counts["wait"]
        start_ns = perf_counter_ns()
        try:
            piece = self._take(step, place)
        except OutOfDeviceMemory:
            self.num_failures += 1
            return
        self.allocate_ns += perf_counter_ns() - start_ns
        self.num_waits += self.backend.counts["wait"] - num_waits
        self.num_allocations += 1
        self.pieces[step.block] = piece, step.stream
        self.live_nbytes += step.nbytes
        self.peak_live = max(self.peak_live, self.live_nbytes)
        free, total = self.backend.memory_info()
        # Host memory is none of the device's: then what is live is all that is known.
        self.peak_reserved = max(self.peak_reserved, total - free, self.live_nbytes)

    def give(self, step: Step) -> None:
        if step.block not in self.pieces:  # the stack had no memory for it
            return
        self._pass_time(step.time_s)
        self._give(step)

    def sample(self) -> None:
        """See how scattered the free memory is."""
        if self.figures is not None:
            self.fragmentations.append(self.figures.fragmentation)

    def finish(self) -> None:
        """Free what the log left, and let the device end its work."""
        for block, (piece, stream) in list(self.pieces.items()):
            self.resource.give(piece, self.places[stream])
            del self.pieces[block]
        self.backend.synchronize_blocking()

    def outcome(self, text: str) -> Replayed:
        return Replayed(
            resource=text,
            num_allocations=self.num_allocations,
            num_frees=self.num_frees,
            num_failures=self.num_failures,
            num_stalls=self.num_stalls,
            peak_live_nbytes=self.peak_live,
            peak_reserved_nbytes=self.peak_reserved,
            fragmentation=fmean(self.fragmentations) if self.fragmentations else None,
            num_waits=self.num_waits,
            allocate_us=self.allocate_ns / 1e3 / max(1, self.num_allocations),
            free_us=self.free_ns / 1e3 / max(1, self.num_frees),
        )

    def _take(self, step: Step, place: Place) -> Piece:
        try:
            return self.resource.take(step.nbytes, ALIGNMENT, place)
        except OutOfDeviceMemory:
            self.backend.synchronize_blocking()
            self.resource.trim()
            piece = self.resource.take(step.nbytes, ALIGNMENT, place)
            self.num_stalls += 1
            return piece

    def _give(self, step: Step) -> None:
        piece, made_on = self.pieces.pop(step.block)
        place = self.places[step.stream]
        self._use(step, made_on)
        num_waits = self.backend.counts["wait"]
        start_ns = perf_counter_ns()
        self.resource.give(piece, place)
        self.free_ns += perf_counter_ns() - start_ns
        self.num_waits += self.backend.counts["wait"] - num_waits
        self.num_frees += 1
        self.live_nbytes -= step.nbytes

    def _use(self, step: Step, made_on: int) -> None:
        """Keep the stream of a free busy for as long as the device still uses the block."""
        stream, busy = self.streams[step.stream], self.busy_until_s
        if made_on != step.stream:  # the program saw to it that this free comes after all uses
            event = self.backend.create_event()
            self.streams[made_on].record(event)
            stream.wait(event)
            event.close()
            busy[step.stream] = max(busy[step.stream], busy[made_on])
        if not self.lag_s:
            return
        if stream.num_work >= self.backend.num_queued_max:  # as the driver holds a program up
            self.backend.synchronize_blocking()
        until_s = step.time_s + self.lag_s
        seconds = until_s - max(step.time_s, busy[step.stream])
        if seconds > 0:
            self.backend.launch(stream, self.config, self.kernel, seconds)
            busy[step.stream] = until_s

    def _pass_time(self, time_s: float) -> None:
        """The device gets as far as it is at that time of the log."""
        while self.backend.advance(0, time_s):
            pass
        self.backend.skip_to(0, time_s, True)


def _figures_of(resource: Any) -> Figures | None:
    """The outermost sub-allocator of a stack."""
    while resource is not None and not isinstance(resource, Figures):
        resource = getattr(resource, "upstream_mr", None)
    return resource
