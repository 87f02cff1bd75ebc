"""What pool, arena, fixed-size and binning resources promise alike, on the simulator."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_memory import FakeUpstream, Machine, machine

from streamflow.errors import Closed, DeviceError, OutOfDeviceMemory
from streamflow.memory import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    FixedSizeMemoryResource,
    PoolMemoryResource,
)

KIB, MIB = 1 << 10, 1 << 20


def make_pool(upstream: Any, nbytes: int) -> Any:
    return PoolMemoryResource(upstream, nbytes, nbytes)


def make_arena(upstream: Any, nbytes: int) -> Any:
    return ArenaMemoryResource(upstream, nbytes)


def make_fixed(upstream: Any, nbytes: int) -> Any:
    return FixedSizeMemoryResource(upstream, 4 * KIB, nbytes // (4 * KIB))


def make_binning(upstream: Any, nbytes: int) -> Any:
    return BinningMemoryResource(upstream, 12, 12)


MAKERS = {
    "pool": make_pool,
    "arena": make_arena,
    "fixed": make_fixed,
    "binning": make_binning,
}
UPSTREAMS = {"cuda": CudaMemoryResource, "async": CudaAsyncMemoryResource}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MAKERS[request.param]


@pytest.fixture(params=UPSTREAMS)
def upstream(request: pytest.FixtureRequest) -> Any:
    return UPSTREAMS[request.param](device=0)


@pytest.fixture
def on() -> Iterator[Machine]:
    with machine() as opened:
        yield opened
        assert opened.races() == []


def assert_sums(resource: Any) -> Any:
    found = resource.info()
    assert found.live_nbytes + found.free_nbytes + found.pending_nbytes == found.reserved_nbytes
    return found


def all_of(resource: Any, stream: Any, nbytes: int = 4 * KIB) -> list[Any]:
    """Blocks until what is reserved is used up."""
    blocks = [resource.allocate(nbytes, stream=stream)]
    while resource.info().live_nbytes < resource.reserved_nbytes:
        blocks.append(resource.allocate(nbytes, stream=stream))
    return blocks


def test_c6_a_block_goes_to_another_stream_after_its_free_there(
    make: Callable[..., Any], upstream: Any, on: Machine
) -> None:
    resource = make(upstream, MIB)
    one, other = on.stream(), on.stream()
    blocks = all_of(resource, one)
    with on.sim.gate(one):
        for block in blocks:
            on.write(block, one)
            resource.deallocate(block, stream=one)
        taken = resource.allocate(4 * KIB, stream=other)
        if taken.address in {block.address for block in blocks}:
            assert resource.num_waits > 0
        on.write(taken, other)  # the checker knows whether that comes after the first write
        assert on.races() == []
    on.run()
    resource.deallocate(taken, stream=other)
    assert_sums(resource)


def test_c6_control_one_stream_reuses_without_waiting(
    make: Callable[..., Any], upstream: Any, on: Machine
) -> None:
    resource = make(upstream, MIB)
    stream = on.stream()
    blocks = all_of(resource, stream)
    num = resource.num_waits, resource.num_upstream_calls
    addresses = {block.address for block in blocks}
    with on.sim.gate(stream):
        for block in blocks:
            on.write(block, stream)
            resource.deallocate(block, stream=stream)
        again = resource.allocate(4 * KIB, stream=stream)
        assert again.address in addresses
        on.write(again, stream)
    assert (resource.num_waits, resource.num_upstream_calls) == num
    on.run()
    resource.deallocate(again, stream=stream)


def test_it_waits_for_the_free_of_that_block_not_for_what_came_later(
    make: Callable[..., Any], on: Machine
) -> None:
    # Superblocks go from arena to arena as a whole.
    nbytes = MIB if make is make_arena else 4 * KIB
    resource = make(FakeUpstream(64 * nbytes, device=0), 64 * nbytes)
    one, other, event = on.stream(), on.stream(), on.backend.create_event()
    blocks = all_of(resource, one, nbytes)
    on.run()
    with on.sim.gate(one) as gate:
        gate.release()
    resource.deallocate(blocks.pop(0), stream=one)
    with on.sim.gate(one):
        for block in blocks:  # neighbours of the first among them
            resource.deallocate(block, stream=one)
        resource.allocate(nbytes, stream=other)
        other.record(event)
        on.run()
        assert event.is_done, "it waits behind the gate, for a free that it has no use for"


def test_an_implied_wait_is_not_made(make: Callable[..., Any], on: Machine) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    one, other, event = on.stream(), on.stream(), on.backend.create_event()
    blocks = all_of(resource, one)
    with on.sim.gate(one):
        for block in blocks[:2]:
            resource.deallocate(block, stream=one)
        first = resource.allocate(4 * KIB, stream=other)
        waits = resource.num_waits
        # Whatever ``one`` freed before what ``other`` has waited for is free for it.
        second = resource.allocate(4 * KIB, stream=other)
        assert resource.num_waits <= waits + 1
        resource.deallocate(first, stream=other)
        resource.deallocate(second, stream=other)
        other.record(event)


def test_what_has_passed_is_free_for_all_without_a_wait(
    make: Callable[..., Any], on: Machine
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    one, other = on.stream(), on.stream()
    blocks = all_of(resource, one)
    with on.sim.gate(one):
        for block in blocks:
            resource.deallocate(block, stream=one)
        assert assert_sums(resource).pending_nbytes == resource.reserved_nbytes
    on.run()
    calls = resource.num_upstream_calls
    assert assert_sums(resource).pending_nbytes == 0
    resource.allocate(4 * KIB, stream=other)
    assert (resource.num_waits, resource.num_upstream_calls) == (0, calls)


def test_trim_gives_wholly_free_pieces_back_and_no_others(
    make: Callable[..., Any], on: Machine
) -> None:
    source = FakeUpstream(device=0)
    resource = make(source, MIB)
    stream = on.stream()
    blocks = all_of(resource, stream)
    resource.trim()
    assert len(source.live) > 0
    kept = blocks.pop()
    for block in blocks:
        resource.deallocate(block, stream=stream)
    resource.trim()
    assert len(source.live) == 1, "the piece that the last block lies in"
    resource.deallocate(kept, stream=stream)
    resource.trim()
    assert not source.live
    assert resource.info().reserved_nbytes == 0
    assert resource.allocate(KIB, stream=stream).address


def test_trim_gives_back_what_was_dropped(make: Callable[..., Any], on: Machine) -> None:
    source = FakeUpstream(device=0)
    resource = make(source, MIB)
    stream = on.stream()
    blocks = [resource.allocate(nbytes, stream=stream) for nbytes in (KIB, 2 * KIB)]
    blocks.clear()
    resource.trim()
    assert not source.live


def test_what_is_trimmed_goes_to_the_upstream_after_its_uses(
    make: Callable[..., Any], on: Machine
) -> None:
    source = CudaAsyncMemoryResource(device=0)
    resource = make(source, MIB)
    one, other = on.stream(), on.stream()
    block = resource.allocate(4 * KIB, stream=one)
    with on.sim.gate(one):
        on.write(block, one)
        resource.deallocate(block, stream=one)
        resource.trim()
        assert resource.reserved_nbytes == 0
        again = source.allocate(MIB, stream=other)
        on.write(again, other)
    on.run()
    source.deallocate(again, stream=other)


def test_every_figure_of_an_unused_resource_is_zero(make: Callable[..., Any]) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    found = resource.info()
    assert (found.live_nbytes, found.reserved_nbytes, found.fragmentation) == (0, 0, 0.0)
    assert (resource.free_nbytes, resource.pending_nbytes, resource.num_waits) == (0, 0, 0)
    assert (resource.largest_free_nbytes, resource.num_upstream_calls) == (0, 0)


@pytest.mark.parametrize("alignment", [256, 512, 1024, 2048])
def test_alignment_is_honoured(make: Callable[..., Any], on: Machine, alignment: int) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    resource.allocate(300, stream=stream)
    blocks = [resource.allocate(700, stream=stream, alignment=alignment) for _ in range(5)]
    assert all(block.address % alignment == 0 for block in blocks)
    spans = sorted((block.address, block.address + block.nbytes) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in blocks:
        resource.deallocate(block, stream=stream)
    assert_sums(resource)


def test_no_bytes_reach_nobody(make: Callable[..., Any], on: Machine) -> None:
    source = FakeUpstream(device=0)
    resource = make(source, MIB)
    stream = on.stream()
    block = resource.allocate(0, stream=stream)
    assert block.address == 0
    resource.deallocate(block, stream=stream)
    assert source.num_calls == 0


def test_double_and_foreign_frees_are_refused(make: Callable[..., Any], on: Machine) -> None:
    source = FakeUpstream(device=0)
    resource, another = make(source, MIB), make(source, MIB)
    stream = on.stream()
    block = resource.allocate(KIB, stream=stream)
    with pytest.raises(ValueError, match="is not a block of"):
        another.deallocate(block, stream=stream)
    resource.deallocate(block, stream=stream)
    with pytest.raises(ValueError, match="freed already"):
        resource.deallocate(block, stream=stream)
    assert assert_sums(resource).live_nbytes == 0


def test_a_closed_one_refuses_and_gives_back_what_comes_in(
    make: Callable[..., Any], on: Machine
) -> None:
    source = FakeUpstream(device=0)
    resource = make(source, MIB)
    stream = on.stream()
    block = resource.allocate(KIB, stream=stream)
    resource.close()
    with pytest.raises(Closed):
        resource.allocate(KIB, stream=stream)
    resource.deallocate(block, stream=stream)
    assert not source.live


def test_with_its_device_everything_goes_and_it_starts_anew(make: Callable[..., Any]) -> None:
    source = CudaMemoryResource(device=0)
    resource = make(source, MIB)
    with machine() as first:
        block = resource.allocate(KIB, stream=first.stream())
        resource.allocate_sync(KIB)
    assert resource.info().reserved_nbytes == 0
    with pytest.raises(Closed):
        resource.deallocate(block, stream=None)
    with machine() as second:
        stream = second.stream()
        again = resource.allocate(KIB, stream=stream)
        second.write(again, stream)
        assert assert_sums(resource).live_nbytes >= KIB


def test_upstream_failing_at_any_call_loses_nothing(make: Callable[..., Any]) -> None:
    with machine() as opened:
        streams = [opened.stream() for _ in range(2)]
        for failing in range(1, 12):
            source = FakeUpstream(16 * MIB, device=0)
            source.fails_at = {failing}
            resource = make(source, MIB)
            blocks: list[tuple[Any, Any]] = []
            num_failed = 0
            for number in range(60):
                stream = streams[number % 2]
                try:
                    if number % 20 == 19:
                        resource.trim()
                    elif number % 3 == 2 and blocks:
                        # Taken out first: a free that fails has freed the block all the same.
                        block, home = blocks.pop(0)
                        resource.deallocate(block, stream=home)
                    else:
                        blocks.append((resource.allocate(KIB, stream=stream), stream))
                except OutOfDeviceMemory:
                    num_failed += 1
                assert_sums(resource)
                assert resource.reserved_nbytes == source.live_nbytes
            for block, home in blocks:
                resource.deallocate(block, stream=home)
            try:
                resource.trim()
            except OutOfDeviceMemory:
                num_failed += 1
                assert resource.reserved_nbytes == source.live_nbytes
            assert num_failed <= 1
            resource.trim()
            assert not source.live
            assert assert_sums(resource).reserved_nbytes == 0


def test_a_free_that_the_device_refuses_is_made_later(
    make: Callable[..., Any], on: Machine
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    block = resource.allocate(KIB, stream=stream)
    take_event = on.space.take_event
    on.space.take_event = _raise  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="no event"):
            resource.deallocate(block, stream=stream)
        assert assert_sums(resource).live_nbytes > 0
    finally:
        on.space.take_event = take_event  # type: ignore[method-assign]
    resource.trim()
    assert assert_sums(resource).live_nbytes == 0
    assert not on.space.is_shared


def test_a_free_that_was_refused_is_made_after_its_stream_was_closed(
    make: Callable[..., Any], on: Machine
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    block = resource.allocate(KIB, stream=stream)
    take_event = on.space.take_event
    on.space.take_event = _raise  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no event"):
        resource.deallocate(block, stream=stream)
    on.space.take_event = take_event  # type: ignore[method-assign]
    stream.close()
    resource.trim()
    assert assert_sums(resource).live_nbytes == 0
    assert not on.space.is_shared


def _raise(_: Any) -> Any:
    raise RuntimeError("no event")


def test_cr5_many_streams_share_no_block(make: Callable[..., Any], on: Machine) -> None:
    resource = make(CudaMemoryResource(device=0), 4 * MIB)
    blocks: list[tuple[Any, Any]] = []
    for turn in range(3):
        for _ in range(120):
            stream = on.stream()
            block = resource.allocate(2 * KIB, stream=stream)
            on.write(block, stream)
            blocks.append((block, stream))
        spans = sorted((block.address, block.address + block.nbytes) for block, _ in blocks)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        if turn == 1:
            on.run()
        while len(blocks) > 20:
            block, stream = blocks.pop(0)
            resource.deallocate(block, stream=stream)
    for block, stream in blocks:
        resource.deallocate(block, stream=stream)
    on.run()
    assert assert_sums(resource).live_nbytes == 0


class Holder:
    """Garbage in a cycle; some give their block back themselves when collected."""

    def __init__(self, resource: Any, stream: Any, frees: bool) -> None:
        self.me = self
        self.resource, self.stream, self.frees = resource, stream, frees
        self.block = resource.allocate(KIB, stream=stream)

    def __del__(self) -> None:
        if self.frees:
            self.resource.deallocate(self.block, stream=self.stream)


def test_cr6_collected_at_every_allocation(make: Callable[..., Any], on: Machine) -> None:
    resource = make(FakeUpstream(device=0), 4 * MIB)
    streams = [on.stream() for _ in range(3)]
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(200):
            Holder(resource, streams[number % 3], number % 2 == 0)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    on.space.reap()
    on.run()
    found = assert_sums(resource)
    assert found.live_nbytes == 0
    assert found.pending_nbytes == 0


@pytest.mark.parametrize("name", ["deallocate", "deallocate_later"])
def test_a_finaliser_may_free_what_is_garbage_of_the_same_cycle(
    make: Callable[..., Any], on: Machine, name: str
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    free = getattr(resource, name)

    class Owner:
        def __init__(self, block: Any) -> None:
            self.block, self.cycle = block, self

        def __del__(self) -> None:
            free(self.block, stream=stream)

    for _ in range(3):
        Owner(resource.allocate(KIB, stream=stream))  # older than its owner: dropped first
    gc.collect()
    on.space.reap()
    assert assert_sums(resource).live_nbytes == 0
    assert not on.space.is_shared
    blocks = all_of(resource, stream, KIB)
    assert len({block.address for block in blocks}) == len(blocks)


def test_frees_from_other_threads(make: Callable[..., Any], on: Machine) -> None:
    resource = make(FakeUpstream(device=0), 4 * MIB)
    stream = on.stream()
    blocks = [resource.allocate(KIB, stream=stream) for _ in range(100)]
    shares = [blocks[first::4] for first in range(4)]
    blocks.clear()
    errors: list[BaseException] = []

    def free(share: list[Any]) -> None:
        try:
            while share:
                block = share.pop()
                if len(share) % 2:
                    resource.deallocate(block, stream=stream)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=free, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    on.space.reap()
    on.run()
    assert assert_sums(resource).live_nbytes == 0


def test_allocate_sync_may_be_used_on_every_stream(
    make: Callable[..., Any], upstream: Any, on: Machine
) -> None:
    resource = make(upstream, MIB)
    one, other = on.stream(), on.stream()
    blocks = all_of(resource, one)
    for block in blocks:
        on.write(block, one)
        resource.deallocate(block, stream=one)
    block = resource.allocate_sync(2 * KIB)
    on.write(block, other)
    resource.deallocate_sync(block)
    assert assert_sums(resource).live_nbytes == 0


def test_allocate_sync_does_not_return_before_its_memory_is_free(on: Machine) -> None:
    pool = PoolMemoryResource(CudaMemoryResource(device=0), MIB, MIB)
    stream = on.stream()
    block = pool.allocate(MIB, stream=stream)
    with on.sim.gate(stream):
        on.write(block, stream)
        pool.deallocate(block, stream=stream)
        with pytest.raises(DeviceError):  # nobody is there to open it
            pool.allocate_sync(MIB)
        assert assert_sums(pool).live_nbytes == 0
    pool.deallocate_sync(pool.allocate_sync(MIB))


def test_one_of_allocate_sync_that_is_dropped_goes_after_all_that_runs(
    make: Callable[..., Any], upstream: Any, on: Machine
) -> None:
    resource = make(upstream, MIB)
    one, other = on.stream(), on.stream()
    block = resource.allocate_sync(4 * KIB)
    with on.sim.gate(one):
        on.write(block, one)
        del block
        on.space.reap()
        assert assert_sums(resource).live_nbytes > 0
        for block in all_of(resource, other):
            on.write(block, other)
    on.space.reap()
    on.run()
    del block
    on.space.reap()
    assert assert_sums(resource).live_nbytes == 0
    assert not on.space.is_shared


def test_the_upstream_must_be_a_resource() -> None:
    for kind in (
        PoolMemoryResource,
        ArenaMemoryResource,
        FixedSizeMemoryResource,
        BinningMemoryResource,
    ):
        with pytest.raises(TypeError, match="takes a memory resource"):
            kind(None)  # type: ignore[arg-type]


def test_they_tell_their_upstream_and_its_properties(make: Callable[..., Any]) -> None:
    source = FakeUpstream(device=0)
    source.is_host_accessible = True
    resource = make(source, MIB)
    assert resource.get_upstream() is resource.upstream_mr is source
    assert resource.is_host_accessible
    assert resource.is_device_accessible


def test_a_free_in_the_middle_of_another_call_is_made_after_it(
    make: Callable[..., Any], on: Machine
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    blocks = [resource.allocate(KIB, stream=stream) for _ in range(3)]
    inner = resource.bin_mrs[0] if make is make_binning else resource
    mark = inner._order.mark

    def marking(*args: Any) -> Any:  # as a finaliser may, wherever the collector runs
        if blocks:
            resource.deallocate(blocks.pop(), stream=stream)
        return mark(*args)

    inner._order.mark = marking
    resource.deallocate(blocks.pop(), stream=stream)
    assert blocks == []
    assert assert_sums(resource).live_nbytes == 0


def test_two_threads_that_come_first_together_share_what_is_there(
    make: Callable[..., Any], on: Machine
) -> None:
    resource = make(FakeUpstream(device=0), MIB)
    stream = on.stream()
    others: list[Any] = []
    lock = resource._lock

    class Slow:
        """The other thread gets the lock first, and is done when we have it."""

        def __enter__(self) -> None:
            resource._lock = lock
            others.append(resource.allocate(KIB, stream=stream))
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    resource._lock = Slow()
    block = resource.allocate(KIB, stream=stream)
    assert assert_sums(resource).live_nbytes == 2 * block.capacity_nbytes
    for each in (block, *others):
        resource.deallocate(each, stream=stream)
    assert assert_sums(resource).live_nbytes == 0
