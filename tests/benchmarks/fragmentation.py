"""Fragmentation: what the demo's allocations leave of pool, arena, bins and the driver's pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from streamflow import Settings, SimOptions
from streamflow.backends import open_backend
from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    FixedSizeMemoryResource,
    PoolMemoryResource,
)
from streamflow.memory.space import enter_space, leave_space
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import device

__all__ = ["Call", "as_table", "record", "run"]

SIDES = ((1024, 256), (2048, 512), (4096, 1024))
"""Pixels along a picture's side, and a tile's."""
TINY = ((64, 24), (96, 40), (128, 56))
DEPTH = 3


@dataclass(frozen=True, slots=True)
class Call:
    """One allocation, or a free where ``nbytes`` is 0."""

    key: int
    nbytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a resource did on a trace.

    ``fragmentation`` is 1 - largest hole / free, the mean over the trace, where the resource knows
    its holes and has twice the room that is in use at most. ``room`` is how much it needs, as a
    multiple of the bytes in use at most: the least that it gets along with, where it is told how
    much to take, else what it has reserved at the end.
    """

    fragmentation: float | None
    room: float


def run(options: Options) -> Report:
    """Record the demo at three sizes, and replay each on every resource."""
    report = Report("fragmentation", "of resources on allocations recorded from the demo")
    for side, tile in TINY if options.is_tiny else SIDES:
        calls = asyncio.run(record(options, side, tile))
        report.note(f"{side} x {side} pixels in tiles of {tile}: {len(calls)} calls")
        for name, outcome in replay(options, calls).items():
            case = f"{name}, {side}"
            report.add(f"room, {case}", Sample((outcome.room,), "x"))
            if outcome.fragmentation is not None:
                report.add(f"fragmentation, {case}", Sample((100 * outcome.fragmentation,), "%"))
    print(as_table(report))
    return report


def as_table(report: Report) -> str:
    """The figures as a table for the docs."""
    found: dict[str, dict[str, float]] = {}
    for row in report.rows:
        what, name, side = row["name"].split(", ")
        found.setdefault(name, {})[f"{what} at {side}"] = row["median"]
    heads = list(dict.fromkeys(head for row in found.values() for head in row))
    heads.sort(key=lambda head: head.partition(" ")[0])
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name, row in found.items():
        figures = (f"{row[head]:.2f}" if head in row else "" for head in heads)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


async def record(options: Options, side: int, tile: int) -> list[Call]:
    """What the demo asks of its device, in order, for a picture of noise."""
    from streamflow.demo import process

    picture = np.random.default_rng(7).integers(0, 256, (side, side, 3), np.uint8)
    async with device(options) as dev:
        backend: Any = dev._core.backend
        with _listening(backend) as calls:
            await process(picture, dev, tile=tile, depth=DEPTH)
    return calls


@contextmanager
def _listening(backend: Any) -> Iterator[list[Call]]:
    calls: list[Call] = []
    keys: dict[int, int] = {}
    allocate, deallocate = backend.allocate, backend.deallocate

    def allocating(pool: Any, nbytes: int, stream: Any) -> int:
        address = int(allocate(pool, nbytes, stream))
        keys[address] = len(calls)
        calls.append(Call(len(calls), nbytes, backend.stream_id(stream)))
        return address

    def deallocating(address: int, stream: Any) -> None:
        deallocate(address, stream)
        if address in keys:
            calls.append(Call(keys.pop(address), 0, backend.stream_id(stream)))

    backend.allocate, backend.deallocate = allocating, deallocating
    try:
        yield calls
    finally:
        del backend.allocate, backend.deallocate


def replay(options: Options, calls: list[Call]) -> dict[str, Outcome]:
    """The same calls on every resource, with nothing running on the streams."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for call in calls:
        if call.nbytes:
            sizes[call.key] = call.nbytes
            live += call.nbytes
        else:
            live -= sizes[call.key]
        peak = max(peak, live)
    backend = open_backend(
        options.backend, 0, Settings(sim=SimOptions(check_races=False)), object()
    )
    index = backend.index
    told: dict[str, Callable[[int], Any]] = {
        "pool": lambda room: PoolMemoryResource(CudaMemoryResource(device=index), room, room),
        "arena": lambda room: ArenaMemoryResource(CudaMemoryResource(device=index), room),
    }
    free: dict[str, Callable[[], Any]] = {
        "binning": lambda: _binning(CudaMemoryResource(device=index), max(sizes.values())),
        "async": lambda: CudaAsyncMemoryResource(device=index),
    }
    found: dict[str, Outcome] = {}
    try:
        backend.set_current()
        space = enter_space(backend)
        try:
            for name, make in told.items():
                mean, _ = _replay(make(2 * peak), calls, backend)
                found[name] = Outcome(mean, _least_room(make, calls, backend, peak) / peak)
            for name, make_any in free.items():
                mean, reserved = _replay(make_any(), calls, backend)
                found[name] = Outcome(mean, reserved / peak)
        finally:
            backend.synchronize_blocking()
            leave_space(space, backend)
    finally:
        backend.close()
    return found


def _least_room(make: Callable[[int], Any], calls: list[Call], backend: Any, peak: int) -> int:
    """The least size with which the calls succeed, to within a sixty-fourth of the peak."""

    def suffices(room: int) -> bool:
        try:
            _replay(make(room), calls, backend)
        except OutOfDeviceMemory:
            return False
        return True

    low, high = peak, 2 * peak
    if suffices(low):
        return low
    while not suffices(high):
        low, high = high, 2 * high
    while high - low > peak // 64:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def _binning(source: CudaMemoryResource, largest: int) -> BinningMemoryResource:
    """A bin for every power of two, eight blocks at a time."""
    resource = BinningMemoryResource(source)
    for exponent in range(8, largest.bit_length() + 1):
        resource.add_bin(1 << exponent, FixedSizeMemoryResource(source, 1 << exponent, 8))
    return resource


def _replay(resource: Any, calls: list[Call], backend: Any) -> tuple[float | None, int]:
    """The mean fragmentation, where it is known, and the bytes reserved at the end."""
    streams: dict[int, Any] = {}
    blocks: dict[int, Any] = {}
    fragmentations: list[float] = []
    try:
        for number, call in enumerate(calls):
            stream = streams.get(call.stream)
            if stream is None:
                stream = streams[call.stream] = backend.create_stream()
            if call.nbytes:
                blocks[call.key] = resource.allocate(call.nbytes, stream=stream)
            else:
                resource.deallocate(blocks.pop(call.key), stream=stream)
            if hasattr(resource, "info") and not number % 8:
                fragmentations.append(resource.fragmentation)
        return fmean(fragmentations) if fragmentations else None, _reserved(resource, backend)
    finally:
        for block in blocks.values():
            resource.deallocate(block, stream=next(iter(streams.values())))
        backend.synchronize_blocking()
        resource.close()


def _reserved(resource: Any, backend: Any) -> int:
    if hasattr(resource, "reserved_nbytes"):
        return int(resource.reserved_nbytes)
    return int(backend.pool_info(resource._pool).reserved_high_nbytes)
