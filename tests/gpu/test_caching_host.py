"""The caching host allocator on the simulator, with each of its clocks, and on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamflow.backends import open_backend
from streamflow.config import Settings, SimOptions
from streamflow.errors import Closed
from streamflow.memory import CachingHostAllocator
from streamflow.memory.space import Space, enter_space, leave_space

pytestmark = pytest.mark.timeout(90)

NBYTES = 2 << 20


class Bench:
    """One open device without a runtime, and memory of its to copy from and to."""

    def __init__(self, name: str, clock: str) -> None:
        self.backend: Any = open_backend(name, 0, Settings(sim=SimOptions(clock=clock)), None)
        self.backend.set_current()
        self.space: Space = enter_space(self.backend)
        self.streams: list[Any] = []
        self.is_open = True
        self.address = self.backend.allocate_linear_blocking(NBYTES)

    def stream(self) -> Any:
        self.streams.append(self.backend.create_stream())
        return self.streams[-1]

    def finish(self) -> None:
        self.backend.synchronize_blocking()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.finish()
            self.backend.free_linear_blocking(self.address)
            leave_space(self.space, self.backend)
            for stream in self.streams:
                if not getattr(stream, "is_closed", False):
                    stream.close()
            self.backend.close()


@pytest.fixture(params=["virtual", "wall", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "cuda":
        opened = Bench("cuda", "wall")
    else:
        opened = Bench("sim", request.param)
    yield opened
    gc.collect()
    opened.close()


@pytest.fixture
def allocator(bench: Bench) -> Iterator[CachingHostAllocator]:
    made = CachingHostAllocator(device=0)
    yield made
    made.free_all_cached()


def test_data_goes_there_and_back_while_blocks_are_handed_on(
    bench: Bench, allocator: CachingHostAllocator
) -> None:
    """Each block is freed while its copies are still to run; none is overwritten before."""
    streams = [bench.stream() for _ in range(2)]
    random = np.random.default_rng(7)
    for turn in range(60):
        stream = streams[turn % 2]
        nbytes = int(random.choice([300, 5000, 100_000, NBYTES]))
        there = allocator.host_allocate(nbytes, stream)
        back = allocator.host_allocate(nbytes, stream)
        there.array[:] = turn
        back.array[:] = 255
        bench.backend.copy_h2d(bench.address, there.address, nbytes, stream)
        bench.backend.copy_d2h(back.address, bench.address, nbytes, stream)
        allocator.host_free(there)
        scratch = allocator.host_allocate(nbytes, stream)  # not the one that is being read
        scratch.array[:] = 254
        stream.sync()
        np.testing.assert_array_equal(back.array, turn)
        allocator.host_free(scratch)
        allocator.host_free(back)
    assert allocator.cached_bytes.live == 0
    assert allocator.num_hits > 0
    bench.finish()
    assert not allocator.live_blocks


def test_a_block_is_reused_when_its_streams_have_passed_it(
    bench: Bench, allocator: CachingHostAllocator
) -> None:
    first, second = bench.stream(), bench.stream()
    block = allocator.host_allocate(5000, first)
    block.record_stream(second)
    allocator.host_free(block)
    assert len(allocator.cached_blocks[0].ready_events) == 2
    bench.finish()
    again = allocator.host_allocate(5000, second)
    assert again.address == block.address
    assert (allocator.num_hits, allocator.num_misses) == (1, 1)
    allocator.host_free(again)


def test_a_stream_closed_before_the_free_is_waited_for_as_well(
    bench: Bench, allocator: CachingHostAllocator
) -> None:
    stream = bench.stream()
    block = allocator.host_allocate(NBYTES, stream)
    block.array[:] = 9
    for _ in range(20):
        bench.backend.copy_h2d(bench.address, block.address, NBYTES, stream)
    bench.streams.remove(stream)
    stream.close()
    with pytest.raises(Closed):
        allocator.host_allocate(100, stream)
    allocator.host_free(block)
    assert allocator.cached_bytes.free == NBYTES
    other = allocator.host_allocate(NBYTES)  # asks for the device to drain, off the caller's thread
    bench.space.wait_released_blocking()
    again = allocator.host_allocate(NBYTES)
    assert block.address in (other.address, again.address)
    allocator.host_free(other)
    allocator.host_free(again)


def test_a_block_grows_with_what_it_serves(bench: Bench, allocator: CachingHostAllocator) -> None:
    stream = bench.stream()
    for nbytes in (300_000, NBYTES - 1, 300_000):
        block = allocator.host_allocate(nbytes, stream)
        assert nbytes <= block.capacity_nbytes <= block.bin_nbytes == NBYTES
        data = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
        block.array[:] = data
        bench.backend.copy_h2d(bench.address, block.address, nbytes, stream)
        bench.finish()
        block.array[:] = 0
        bench.backend.copy_d2h(block.address, bench.address, nbytes, stream)
        bench.finish()
        assert np.array_equal(block.array, data)
        allocator.host_free(block)
        bench.finish()
    assert (allocator.num_hits, allocator.num_misses) == (2, 1)
    assert allocator.cached_bytes.free == allocator.pinned_bytes.free == NBYTES


def test_everything_is_unpinned_once_nothing_uses_it(
    bench: Bench, allocator: CachingHostAllocator
) -> None:
    stream = bench.stream()
    blocks = [allocator.host_allocate(1 << power, stream) for power in range(9, 23)]
    for block in blocks:
        allocator.host_free(block)
    allocator.free_all_cached()
    assert allocator.cached_bytes.free == 0
    bench.finish()
    allocator.free_all_cached()
    bench.space.wait_released_blocking()
    assert allocator.pending_bytes == 0


def test_blocks_outlive_the_device(bench: Bench) -> None:
    allocator = CachingHostAllocator(device=0)
    live = allocator.host_allocate(5000, bench.stream())
    cached = allocator.host_allocate(5000, bench.stream())
    live.array[:] = 3
    bench.backend.copy_h2d(bench.address, live.address, 5000, live.stream)
    allocator.host_free(cached)
    del cached
    bench.close()
    assert live.array.sum() == 15_000
    allocator.host_free(live)
    assert allocator.cached_bytes.free == 2 * 32768
    allocator.free_all_cached()
    assert (allocator.cached_bytes.free, allocator.pending_bytes) == (0, 0)
