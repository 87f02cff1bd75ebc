"""Many tasks move arrays to and fro, and keep results, under a small pinned budget."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random
from typing import Any

import anyio
import numpy as np

import streamflow as sf
from streamflow.backends import open_backend
from streamflow.memory.page_locked import find
from tests.stress.soak import check_nothing_is_left

BUDGET_NBYTES = 4 << 20
CHUNK_NBYTES = 64 << 10
NUM_THREADS = 2
FIRST_NBYTES = 8 << 20  # what every device pins when it is opened
STAGING_NBYTES = 2 * 2 * NUM_THREADS * CHUNK_NBYTES  # two chunks a thread, each way
MOST_NBYTES = FIRST_NBYTES + BUDGET_NBYTES + STAGING_NBYTES
NUM_TOGETHER = 50
NUM_KEPT = 200
SIZES = (16, 300, 5000, 17_000, 40_000, 300_000)  # int32s: of slabs, of classes, above them
WEIGHTS = (30, 25, 20, 15, 9, 1)


class Watch:
    """Counts what the driver has pinned, whoever asked for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes_at: dict[int, int] = {}
        self.nbytes = self.peak_nbytes = self.num_pins = 0

    def open(self, index: int, settings: sf.Settings, loop_key: object) -> Any:
        """Open a simulated device, for ``register_backend``."""
        backend: Any = open_backend("sim", index, settings, loop_key)
        allocate, free = backend.allocate_pinned_blocking, backend.free_pinned_blocking

        def pin(nbytes: int) -> int:
            address = int(allocate(nbytes))
            with self._lock:
                self._nbytes_at[address] = nbytes
                self.nbytes += nbytes
                self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
                self.num_pins += 1
            return address

        def unpin(address: int) -> None:
            with self._lock:
                self.nbytes -= self._nbytes_at.pop(address)
            free(address)

        backend.allocate_pinned_blocking, backend.free_pinned_blocking = pin, unpin
        return backend


class PinnedSoak:
    """``num_transfers`` of ``num_tasks`` tasks, 50 tasks at a time."""

    def __init__(self, num_tasks: int, num_transfers: int, seed: int) -> None:
        self.num_tasks = num_tasks
        self.num_each = num_transfers // num_tasks
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.kept: list[np.ndarray[Any, Any]] = []
        self.watch = Watch()

    async def run(self) -> Counter[str]:
        """Check every byte, and at each transfer what is pinned; returns what was counted."""
        sf.register_backend("watched", self.watch.open)
        settings = sf.Settings(
            sim=sf.SimOptions(seed=self.seed, clock="virtual"),
            staging_threads=NUM_THREADS,
            staging_in_nbytes=CHUNK_NBYTES,
            staging_out_nbytes=CHUNK_NBYTES,
            pinned_budget_nbytes=BUDGET_NBYTES,
        )
        async with sf.Device(0, backend="watched", settings=settings) as dev:
            limiter = anyio.CapacityLimiter(NUM_TOGETHER)

            async def task(number: int) -> None:
                async with limiter:
                    await self._move(dev, Random(self.seed * 1_000_003 + number))

            async with anyio.create_task_group() as group:
                for number in range(self.num_tasks):
                    group.start_soon(task, number)
            self.kept.clear()
            await dev.synchronize()
            check_nothing_is_left(dev)
            stats = dev.pinned.stats()
            assert stats.num_live == stats.num_parked == stats.num_waiting == 0
            assert await dev.pinned.trim() == stats.pinned_nbytes
            assert self.watch.nbytes <= FIRST_NBYTES + STAGING_NBYTES
            self.counts["peak"] = self.watch.peak_nbytes
            self.counts["pins"] = self.watch.num_pins
        assert self.watch.nbytes == 0
        return self.counts

    def _check(self, dev: sf.Device) -> None:
        self.counts["transfers"] += 1
        assert self.watch.peak_nbytes <= MOST_NBYTES, self.watch.peak_nbytes
        assert dev.pinned.stats().pinned_nbytes <= BUDGET_NBYTES

    async def _move(self, dev: sf.Device, random: Random) -> None:
        """The transfers of one task: in, out, and back in from where they came to."""
        (size,) = random.choices(SIZES, WEIGHTS)
        source = np.arange(size, dtype=np.int32) + random.randrange(1000)
        out = np.zeros_like(source)
        array = dev.put(source)
        for _ in range(self.num_each):
            self._check(dev)
            how = random.random()
            if how < 0.2:
                array = dev.put(source)
                await array.staged
            elif how < 0.4:
                await dev.get(array, out=out)
                assert np.array_equal(out, source)
            elif how < 0.5:
                dev.get(array)  # nobody wants it
            elif how < 0.6:
                await self._through_a_lease(dev, random, array, source)
            else:
                result = await dev.get(array)
                assert np.array_equal(result, source)
                self.counts["pageable" if find(result) is None else "pinned"] += 1
                if how < 0.85:
                    self._keep(result, random)
                else:
                    await dev.put(result, out=array)  # from where it came to
        await array.staged

    def _keep(self, result: np.ndarray[Any, Any], random: Random) -> None:
        self.kept.append(result)
        while len(self.kept) > NUM_KEPT:
            del self.kept[random.randrange(len(self.kept))]

    async def _through_a_lease(
        self,
        dev: sf.Device,
        random: Random,
        array: sf.DeviceArray,
        source: np.ndarray[Any, Any],
    ) -> None:
        lease = dev.pinned.try_lease(source.nbytes)
        if lease is not None:
            memory = lease.array(source.shape, source.dtype)
            memory[:] = source
            dev.put(memory, out=array)  # released while it is under way
            del memory
            lease.release()
            self.counts["leased at once"] += 1
            return
        try:
            async with dev.pinned.lease(source.nbytes, timeout=1e-3) as lease:
                memory = lease.array(source.shape, source.dtype)
                await dev.get(array, out=memory)
                assert np.array_equal(memory, source)
                self.counts["leased"] += 1
        except sf.DeadlineExceeded:  # what others keep fills the budget
            self.counts["too late"] += 1
            del self.kept[: len(self.kept) // 2]
