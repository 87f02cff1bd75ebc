"""P7: each sub-allocator against RMM's of the same name, by how many blocks are in use."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from streamflow import Settings, SimOptions
from streamflow.backends import open_backend
from streamflow.memory import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CudaMemoryResource,
    FixedSizeMemoryResource,
    PoolMemoryResource,
)
from streamflow.memory.space import enter_space, leave_space, space_of
from tests.benchmarks.report import Options, Report, Sample, optional

__all__ = ["as_table", "run"]

MAX_NBYTES = 64 << 10
TOTAL_NBYTES = 1 << 30  # 10 000 blocks of 32 KiB on average, and room to spare
NAMES = ("Pool", "Arena", "FixedSize", "Binning")


@dataclass(slots=True)
class Peer:
    """One resource, and the blocks that it has given."""

    take: Callable[[int], Any]
    give: Callable[[Any], object]
    live: list[Any]
    close: Callable[[], object]

    def swap_us(self, plan: list[tuple[int, int]]) -> float:
        """Microseconds per call, half of them frees and half allocations."""
        take, give, live = self.take, self.give, self.live
        start = time.perf_counter_ns()
        for index, nbytes in plan:
            give(live[index])
            live[index] = take(nbytes)
        return (time.perf_counter_ns() - start) / (2 * len(plan)) / 1e3


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("suballocators", "random sizes up to 64 KiB on one stream, us per call")
    settings = Settings(sim=SimOptions(check_races=False, memory_nbytes=8 * TOTAL_NBYTES))
    backend = open_backend(options.backend, 0, settings, object())
    try:
        backend.set_current()
        space = enter_space(backend)
        try:
            _run(options, report, backend)
        finally:
            backend.synchronize_blocking()
            leave_space(space, backend)
    finally:
        backend.close()
    print(as_table(report))
    return report


def as_table(report: Report) -> str:
    """The figures as a table for the docs: a row for each resource, a column for each number."""
    found: dict[str, dict[str, float]] = {}
    for row in report.rows:
        who, _, num = row["name"].rpartition(", ")
        found.setdefault(who, {})[num] = row["median"]
    nums = list(dict.fromkeys(num for row in found.values() for num in row))
    lines = [
        f"| us per call | {' | '.join(nums)} | growth |",
        f"|---|{'---|' * (len(nums) + 1)}",
    ]
    for who, row in found.items():
        growth = row[nums[-1]] / row[nums[0]]
        figures = " | ".join(f"{row[num]:.2f}" for num in nums)
        lines.append(f"| {who} | {figures} | {growth:.2f} |")
    return "\n".join(lines)


def _run(options: Options, report: Report, backend: Any) -> None:
    rmm = optional("rmm") if options.is_cuda else None
    if rmm is None:
        report.note("RMM is not here: only ours is measured")
    nums = (10, 20, 40) if options.is_tiny else (100, 1_000, 10_000)
    num_swaps = options.sized(2_000, 20)
    for name in NAMES:
        makers: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
            "ours": partial(_make_ours, name, backend)
        }
        if rmm is not None:
            makers["RMM"] = partial(_make_rmm, name, rmm, backend)
        medians: dict[tuple[str, int], float] = {}
        for (who, num), values in _measure(makers, nums, num_swaps, options.num_reps).items():
            row = f"{name}MemoryResource, {who}, {num} live"
            medians[who, num] = report.add(row, Sample(tuple(values), "us"))
        first, last = nums[0], nums[-1]
        growth = medians["ours", last] / medians["ours", first]
        report.target(f"{name}: growth from {first} to {last}", growth, "x", at_most=2)
        if rmm is not None:
            ratio = medians["ours", first] / medians["RMM", first]
            report.target(f"{name}: over RMM at {first}", ratio, "x", at_most=5)
            if name == "Pool":
                ratio = medians["ours", last] / medians["RMM", last]
                report.target(f"{name}: over RMM at {last}", ratio, "x", at_most=1)


def _measure(
    makers: dict[str, Callable[[], tuple[Any, Any, Any]]],
    nums: tuple[int, ...],
    num_swaps: int,
    num_reps: int,
) -> dict[tuple[str, int], list[float]]:
    """All in turn, with the same requests: a host changes its speed between two minutes."""
    numbers = random.Random("requests")
    peers: dict[tuple[str, int], Peer] = {}
    for who, make in makers.items():
        for num in nums:
            sizes = [random.Random(index).randint(1, MAX_NBYTES) for index in range(num)]
            take, give, close = make()
            peers[who, num] = Peer(take, give, [take(nbytes) for nbytes in sizes], close)
    found: dict[tuple[str, int], list[float]] = {key: [] for key in peers}
    for rep in range(num_reps + 1):
        for num in nums:
            # At least once through all blocks before anything counts.
            length = num_swaps if rep else max(num_swaps, 2 * num)
            plan = [(numbers.randrange(num), numbers.randint(1, MAX_NBYTES)) for _ in range(length)]
            for who in makers:
                value = peers[who, num].swap_us(plan)
                if rep:
                    found[who, num].append(value)
    for peer in peers.values():
        for block in peer.live:
            peer.give(block)
        peer.live.clear()
        peer.close()
    return found


def _make_ours(name: str, backend: Any) -> tuple[Any, Any, Any]:
    source = CudaMemoryResource(device=backend.index)
    resource: Any
    if name == "Pool":
        resource = PoolMemoryResource(source, TOTAL_NBYTES)
    elif name == "Arena":
        resource = ArenaMemoryResource(source, TOTAL_NBYTES)
    elif name == "FixedSize":
        resource = FixedSizeMemoryResource(source, MAX_NBYTES, 128)
    else:
        resource = BinningMemoryResource(source, 8, 16)
    stream = backend.create_stream()
    allocate, deallocate = resource.allocate, resource.deallocate

    def take(nbytes: int) -> Any:
        return allocate(nbytes, stream=stream)

    def give(block: Any) -> None:
        deallocate(block, stream=stream)

    def close() -> None:
        backend.synchronize_blocking()
        resource.close()
        source.close()
        space_of(backend).wait_released_blocking()

    return take, give, close


def _make_rmm(name: str, rmm: Any, backend: Any) -> tuple[Any, Any, Any]:
    mr = rmm.mr
    source = mr.CudaMemoryResource()
    if name == "Pool":
        resource = mr.PoolMemoryResource(source, initial_pool_size=TOTAL_NBYTES)
    elif name == "Arena":
        resource = mr.ArenaMemoryResource(source, arena_size=TOTAL_NBYTES)
    elif name == "FixedSize":
        resource = mr.FixedSizeMemoryResource(source, MAX_NBYTES, 128)
    else:
        resource = mr.BinningMemoryResource(source, 8, 16)
    owner = backend.create_stream()
    stream = rmm.pylibrmm.stream.Stream(owner)
    allocate, deallocate = resource.allocate, resource.deallocate

    def take(nbytes: int) -> tuple[int, int]:
        return allocate(nbytes, stream), nbytes

    def give(block: tuple[int, int]) -> None:
        deallocate(*block, stream)

    return take, give, owner.sync  # it goes with its last reference
