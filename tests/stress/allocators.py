"""``python -m tests.stress.allocators --seconds 60``: many threads on every sub-allocator.

Threads allocate, write, read back and free on streams of their own and of each other; blocks are
freed by other threads and by the collector. No two live blocks may overlap, nobody may write to
another's, and the figures must add up at every moment. The last line is JSON; exits with 1 where
something is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
import time
import traceback
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from streamflow import Settings, SimOptions
from streamflow.backends import open_backend
from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CudaMemoryResource,
    DeviceMemoryResource,
    FixedSizeMemoryResource,
    PoolMemoryResource,
)
from streamflow.memory.space import enter_space, leave_space

NUM_THREADS = 8
NUM_HELD = 24
KIB, MIB = 1 << 10, 1 << 20

ALLOCATORS: dict[str, tuple[Callable[[DeviceMemoryResource], Any], int]] = {
    "pool": (lambda source: PoolMemoryResource(source, 256 * KIB, 4 * MIB), 64 * KIB),
    "arena": (lambda source: ArenaMemoryResource(source, 24 * MIB), 3 * MIB // 2),
    "fixed_size": (lambda source: FixedSizeMemoryResource(source, 16 * KIB, 16), 16 * KIB),
    "binning": (lambda source: BinningMemoryResource(source, 9, 14), 24 * KIB),
}
"""Each with the largest size asked of it. Small enough that memory runs short."""


class Live:
    """The blocks in use, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[int, int]] = []

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            at = bisect_left(self._spans, (address, 0))
            for start, end in self._spans[max(0, at - 1) : at + 1]:
                assert end <= address or address + nbytes <= start, "two live blocks overlap"
            insort(self._spans, (address, address + nbytes))

    def remove(self, address: int) -> None:
        with self._lock:
            del self._spans[bisect_left(self._spans, (address, 0))]


class Block:
    """A block in somebody's hands, where it was used last, and what it holds."""

    def __init__(self, block: Any, stream: Any, tag: int) -> None:
        self.block = block
        self.stream = stream
        self.tag = tag


class Worker:
    """One thread's random walk."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.random = Random(f"{run.seed}/{number}")
        self.held: list[Block] = []
        self.counts: Counter[str] = Counter()
        backend = run.backend
        self.streams = [backend.create_stream() for _ in range(2)]
        self.pinned = backend.allocate_pinned_blocking(16)
        self.number = number
        self.thread = threading.Thread(target=self._main, name=f"worker {number}")

    def _main(self) -> None:
        try:
            self.run.backend.set_current()
            while not self.run.is_over.is_set():
                self._step()
            while self.held:
                self._free(self.held.pop())
        except BaseException as error:
            self.run.errors.append(error)
            self.run.is_over.set()

    def _step(self) -> None:
        roll = self.random.random()
        if roll < 0.5 and len(self.held) < NUM_HELD:
            self._allocate()
        elif roll < 0.53:
            self.run.resource.trim()
            self.counts["trim"] += 1
        elif roll < 0.56:
            for stream in self.streams:
                stream.sync()
            self.counts["sync"] += 1
        elif roll < 0.66 and self.held:
            self.run.handed_on.append(self.held.pop())
        elif roll < 0.76 and self.run.handed_on:
            try:
                self._free(self.run.handed_on.popleft())
            except IndexError:  # another thread took the last one
                return
            self.counts["free of another thread's"] += 1
        elif self.held:
            self._free(self.held.pop(self.random.randrange(len(self.held))))

    def _allocate(self) -> None:
        run, random = self.run, self.random
        stream = random.choice(self.streams)
        nbytes = random.randint(1, max(1, run.max_nbytes >> random.randrange(8)))
        nbytes = -(-nbytes // 8) * 8
        alignment = random.choice((256, 256, 512))
        try:
            block = run.resource.allocate(nbytes, stream=stream, alignment=alignment)
        except OutOfDeviceMemory:
            self.counts["refused"] += 1
            return
        assert block.address % alignment == 0
        run.live.add(block.address, nbytes)
        tag = random.getrandbits(63)
        run.backend.fill(block.address, tag.to_bytes(8, "little"), nbytes // 8, stream)
        self.held.append(Block(block, stream, tag))
        self.counts["allocate"] += 1

    def _free(self, held: Block) -> None:
        run, random = self.run, self.random
        block, stream = held.block, held.stream
        if random.random() < 0.2:
            self._check(held)
        if random.random() < 0.3:  # on a stream of this thread's, after its use
            event = run.backend.create_event()
            stream.record(event)
            stream = random.choice(self.streams)
            stream.wait(event)
            run.live.remove(block.address)
            run.resource.deallocate(block, stream=stream)
            self.counts["free elsewhere"] += 1
        elif random.random() < 0.2:
            run.live.remove(block.address)
            held.me = held  # type: ignore[attr-defined]  # garbage in a cycle
            self.counts["left to the collector"] += 1
        else:
            run.live.remove(block.address)
            run.resource.deallocate(block, stream=stream)
            self.counts["free"] += 1

    def _check(self, held: Block) -> None:
        """The first and the last word are still what was written."""
        backend, block, stream = self.run.backend, held.block, held.stream
        event = backend.create_event()
        stream.record(event)
        mine = self.streams[0]
        mine.wait(event)
        backend.copy_d2h(self.pinned, block.address, 8, mine)
        backend.copy_d2h(self.pinned + 8, block.address + block.nbytes - 8, 8, mine)
        mine.sync()
        found = ctypes.string_at(self.pinned, 16)
        assert found == held.tag.to_bytes(8, "little") * 2, "somebody else wrote to a live block"
        self.counts["checked"] += 1


class Run:
    """One sub-allocator, and the threads on it."""

    def __init__(self, name: str, backend: Any, space: Any, seed: int) -> None:
        make, self.max_nbytes = ALLOCATORS[name]
        self.source = CudaMemoryResource(device=backend.index)
        self.resource = make(self.source)
        self.backend, self.space, self.seed = backend, space, seed
        self.live = Live()
        self.handed_on: deque[Block] = deque()
        self.is_over = threading.Event()
        self.errors: list[BaseException] = []

    def soak(self, seconds: float, num_threads: int) -> Counter[str]:
        """Let threads loose for a while, and see that nothing is left."""
        workers = [Worker(self, number) for number in range(num_threads)]
        end = time.monotonic() + seconds
        for worker in workers:
            worker.thread.start()
        try:
            while time.monotonic() < end and not self.is_over.wait(0.01):
                self._check_sums()
        finally:
            self.is_over.set()
            for worker in workers:
                worker.thread.join()
        if self.errors:
            raise self.errors[0]
        while self.handed_on:
            workers[0]._free(self.handed_on.pop())
        gc.collect()
        self.space.reap()
        self.backend.synchronize_blocking()
        found = self._check_sums()
        assert found.live_nbytes == found.pending_nbytes == 0, found
        self.resource.trim()
        assert self.resource.info().reserved_nbytes == 0, "it keeps what is wholly free"
        for worker in workers:
            for stream in worker.streams:
                stream.close()
            self.backend.free_pinned_blocking(worker.pinned)
        counts = sum((worker.counts for worker in workers), Counter[str]())
        counts["waits"] = found.num_waits
        counts["calls of the upstream"] = found.num_upstream_calls
        return counts

    def _check_sums(self) -> Any:
        found = self.resource.info()
        total = found.live_nbytes + found.free_nbytes + found.pending_nbytes
        assert total == found.reserved_nbytes, found
        return found


def soak(
    name: str, *, seconds: float, backend: str, seed: int = 0, num_threads: int = NUM_THREADS
) -> Counter[str]:
    """Let threads allocate and free on one of :data:`ALLOCATORS`."""
    settings = Settings(sim=SimOptions(clock="wall", check_races=False))
    opened = open_backend(backend, 0, settings, object())
    try:
        opened.set_current()
        space = enter_space(opened)
        try:
            return Run(name, opened, space, seed).soak(seconds, num_threads)
        finally:
            opened.synchronize_blocking()
            leave_space(space, opened)
    finally:
        opened.close()


def main(argv: list[str] | None = None) -> int:
    """Soak what is named, every sub-allocator by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.allocators", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALLOCATORS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each")
    parser.add_argument("--backend", default="sim", choices=("cuda", "sim"))
    parser.add_argument("--threads", type=int, default=NUM_THREADS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    told: dict[str, Any] = {"ok": True, "seconds": asked.seconds, "threads": asked.threads}
    for name in asked.names or ALLOCATORS:
        try:
            counts = soak(
                name,
                seconds=asked.seconds,
                backend=asked.backend,
                seed=asked.seed,
                num_threads=asked.threads,
            )
            told[name] = dict(counts)
            print(name, dict(counts), flush=True)
        except Exception:
            told["ok"] = False
            traceback.print_exc()
    print(json.dumps(told))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
