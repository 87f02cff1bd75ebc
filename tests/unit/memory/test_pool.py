"""The pool: best fit, joining, growth and its limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_memory import FakeUpstream, Machine, machine

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import Block, PoolMemoryResource

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def on() -> Iterator[Machine]:
    with machine(memory_nbytes=64 * MIB) as opened:
        yield opened


def test_half_of_what_is_free_is_taken_first(on: Machine) -> None:
    source = FakeUpstream(device=0)
    PoolMemoryResource(source).allocate(KIB, stream=on.stream())
    assert source.sizes == [32 * MIB]


def test_nothing_is_taken_before_the_first_allocation(on: Machine) -> None:
    source = FakeUpstream(device=0)
    pool = PoolMemoryResource(source, "1MiB")
    assert source.sizes == []
    assert pool.pool_size() == 0
    pool.allocate(1, stream=on.stream())
    assert pool.pool_size() == MIB


def test_it_grows_by_its_size_or_the_request(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    pool = PoolMemoryResource(source, 4 * KIB)
    blocks = [pool.allocate(nbytes, stream=stream) for nbytes in (4 * KIB, KIB, 4 * KIB, 100 * KIB)]
    assert len(blocks) == 4
    # 4 doubled once, once more, and then the request.
    assert source.sizes == [4 * KIB, 4 * KIB, 8 * KIB, 100 * KIB]


def test_the_initial_size_is_taken_once_there_is_some(on: Machine) -> None:
    source, stream = FakeUpstream(0, device=0), on.stream()
    pool = PoolMemoryResource(source, 4 * KIB)
    with pytest.raises(OutOfDeviceMemory):
        pool.allocate(1, stream=stream)
    source.limit_nbytes = MIB
    pool.allocate(1, stream=stream)
    assert pool.pool_size() == 4 * KIB


def test_under_a_maximum_it_grows_by_half_of_the_rest(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    pool = PoolMemoryResource(source, 4 * KIB, 20 * KIB)
    blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(5)]
    assert source.sizes == [4 * KIB, 8 * KIB, 4 * KIB, 4 * KIB]
    with pytest.raises(OutOfDeviceMemory, match="cannot give 1 bytes"):
        pool.allocate(1, stream=stream)
    pool.deallocate(blocks.pop(), stream=stream)
    pool.allocate(1, stream=stream)


def test_refused_it_asks_for_half_down_to_the_request(on: Machine) -> None:
    source, stream = FakeUpstream(21 * KIB, device=0), on.stream()
    pool = PoolMemoryResource(source, 16 * KIB)
    blocks = [pool.allocate(nbytes * KIB, stream=stream) for nbytes in (16, 3)]
    assert source.sizes == [16 * KIB, 16 * KIB, 8 * KIB, 4 * KIB]
    with pytest.raises(OutOfDeviceMemory):
        pool.allocate(3 * KIB, stream=stream)
    assert source.sizes[-1] == 3 * KIB
    assert len(blocks) == 2


def test_the_smallest_hole_that_fits_is_taken(on: Machine) -> None:
    pool, stream = PoolMemoryResource(FakeUpstream(device=0), 64 * KIB), on.stream()
    sizes = (8, 1, 4, 1, 2, 1, 16, 1)
    blocks = [pool.allocate(size * KIB, stream=stream) for size in sizes]
    holes = {size: block.address for size, block in zip(sizes, blocks, strict=True)}
    for block in blocks[::2]:
        pool.deallocate(block, stream=stream)
    assert pool.allocate(3 * KIB, stream=stream).address == holes[4]
    assert pool.allocate(5 * KIB, stream=stream).address == holes[8]
    assert pool.allocate(2 * KIB, stream=stream).address == holes[2]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize("is_held", [False, True])
def test_neighbours_are_joined(on: Machine, order: tuple[int, ...], is_held: bool) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    pool = PoolMemoryResource(source, 16 * KIB, 16 * KIB)
    blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(4)]
    gate = on.sim.gate(stream)
    if not is_held:
        gate.release()
    for number in order:
        pool.deallocate(blocks[number], stream=stream)
    assert pool.info().largest_free_nbytes == 16 * KIB
    assert pool.allocate(16 * KIB, stream=stream).address == min(b.address for b in blocks)
    assert pool.num_waits == 0
    gate.release()


def test_a_pending_neighbour_is_joined_with_what_was_never_used(on: Machine) -> None:
    pool, stream = PoolMemoryResource(FakeUpstream(device=0), 16 * KIB, 16 * KIB), on.stream()
    block = pool.allocate(4 * KIB, stream=stream)
    with on.sim.gate(stream):
        pool.deallocate(block, stream=stream)
        pool.allocate(16 * KIB, stream=stream)
    assert pool.num_waits == 0


def test_neighbours_of_several_streams_are_joined_with_a_wait_for_each(on: Machine) -> None:
    pool = PoolMemoryResource(FakeUpstream(device=0), 12 * KIB, 12 * KIB)
    streams = [on.stream() for _ in range(3)]
    blocks = [pool.allocate(4 * KIB, stream=stream) for stream in streams]
    gates = [on.sim.gate(stream) for stream in streams[:2]]
    for block, stream in zip(blocks, streams, strict=True):
        pool.deallocate(block, stream=stream)
    taken = pool.allocate(12 * KIB, stream=streams[2])
    assert pool.num_waits == 2
    event = on.backend.create_event()
    streams[2].record(event)
    gates[0].release()
    on.run()
    assert not event.is_done
    gates[1].release()
    on.run()
    assert event.is_done
    pool.deallocate(taken, stream=streams[2])


def test_an_older_wait_implies_what_came_before_it(on: Machine) -> None:
    pool = PoolMemoryResource(FakeUpstream(device=0), 8 * KIB, 8 * KIB)
    one, other = on.stream(), on.stream()
    first, second = (pool.allocate(4 * KIB, stream=one) for _ in range(2))
    with on.sim.gate(one):
        pool.deallocate(first, stream=one)
        pool.deallocate(second, stream=one)
        # Both at once: the later free implies the earlier one.
        both = pool.allocate(8 * KIB, stream=other)
        assert pool.num_waits == 1
        pool.deallocate(both, stream=other)


def test_a_wait_behind_a_third_stream_is_implied(on: Machine) -> None:
    pool = PoolMemoryResource(FakeUpstream(device=0), 8 * KIB, 8 * KIB)
    one, two, three = (on.stream() for _ in range(3))
    first, second = (pool.allocate(4 * KIB, stream=one) for _ in range(2))
    with on.sim.gate(one):
        pool.deallocate(first, stream=one)
        pool.deallocate(second, stream=one)
        second = pool.allocate(4 * KIB, stream=two)  # comes after a free on ``one``
        pool.deallocate(second, stream=two)
        both = pool.allocate(8 * KIB, stream=three)
        assert pool.num_waits <= 3
        pool.deallocate(both, stream=three)


def test_new_memory_comes_before_waiting(on: Machine) -> None:
    source = FakeUpstream(8 * KIB, device=0)
    pool = PoolMemoryResource(source, 4 * KIB)
    one, other = on.stream(), on.stream()
    block = pool.allocate(4 * KIB, stream=one)
    with on.sim.gate(one):
        pool.deallocate(block, stream=one)
        taken = pool.allocate(4 * KIB, stream=other)
        assert (len(source.live), pool.num_waits) == (2, 0)
        again = pool.allocate(4 * KIB, stream=other)  # there is no more
        assert (len(source.live), pool.num_waits) == (2, 1)
        pool.deallocate(taken, stream=other)
        pool.deallocate(again, stream=other)


def test_two_free_pieces_are_given_back_for_a_larger_one(on: Machine) -> None:
    source, stream = FakeUpstream(16 * KIB, device=0), on.stream()
    pool = PoolMemoryResource(source, 4 * KIB)
    blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(2)]
    for block in blocks:
        pool.deallocate(block, stream=stream)
    assert pool.allocate(16 * KIB, stream=stream).nbytes == 16 * KIB
    assert source.live_nbytes == 16 * KIB


def test_fragmentation_is_what_the_largest_hole_leaves(on: Machine) -> None:
    pool, stream = PoolMemoryResource(FakeUpstream(device=0), 16 * KIB), on.stream()
    blocks = [pool.allocate(4 * KIB, stream=stream) for _ in range(4)]
    pool.deallocate(blocks[0], stream=stream)
    assert pool.fragmentation == 0
    pool.deallocate(blocks[2], stream=stream)
    assert pool.fragmentation == 0.5
    pool.deallocate(blocks[1], stream=stream)
    assert pool.fragmentation == 0


def test_sizes_are_rounded_to_256_and_told(on: Machine) -> None:
    pool, stream = PoolMemoryResource(FakeUpstream(device=0), MIB), on.stream()
    for nbytes, capacity in ((1, 256), (255, 256), (256, 256), (257, 512)):
        block = pool.allocate(nbytes, stream=stream)
        assert (block.nbytes, block.capacity_nbytes) == (nbytes, capacity)


@pytest.mark.parametrize("initial", ["2 parsecs", -1, True, 1.5])
def test_bad_sizes_are_refused(initial: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"initial_pool_size|a limit is"):
        PoolMemoryResource(FakeUpstream(), initial)  # type: ignore[arg-type]


def test_an_initial_size_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match="above maximum_pool_size"):
        PoolMemoryResource(FakeUpstream(), "2MiB", "1MiB")


def test_an_upstream_may_call_back_in(on: Machine) -> None:
    stream = on.stream()
    source = FakeUpstream(device=0)
    pool = PoolMemoryResource(source, 4 * KIB)
    inside: list[Block] = []
    call = source._call

    def calling(what: str) -> None:
        source._call = call  # type: ignore[method-assign]
        call(what)
        inside.append(pool.allocate(2 * KIB, stream=stream))
        pool.info()

    source._call = calling  # type: ignore[method-assign]
    outer = pool.allocate(2 * KIB, stream=stream)
    (inner,) = inside
    assert abs(outer.address - inner.address) >= 2 * KIB
    for block in (outer, inner):
        pool.deallocate(block, stream=stream)
    assert pool.info().live_nbytes == 0


def test_what_was_joined_is_free_when_the_last_part_of_it_is(on: Machine) -> None:
    pool = PoolMemoryResource(FakeUpstream(device=0), 12 * KIB, 12 * KIB)
    one, other, event = on.stream(), on.stream(), on.backend.create_event()
    first, second, _kept = (pool.allocate(4 * KIB, stream=one) for _ in range(3))
    pool.deallocate(first, stream=one)
    with on.sim.gate(one):
        pool.deallocate(second, stream=one)
        with pytest.raises(OutOfDeviceMemory):
            pool.allocate(12 * KIB, stream=one)  # in vain, but it has joined the two
        taken = pool.allocate(8 * KIB, stream=other)
        other.record(event)
        on.run()
        assert not event.is_done
    on.run()
    assert event.is_done
    pool.deallocate(taken, stream=other)
