"""Arenas: superblocks, first fit, defragmenting, and what is told of a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fake_memory import FakeUpstream, Machine, machine

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import ArenaMemoryResource, CudaMemoryResource

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def on() -> Iterator[Machine]:
    with machine(memory_nbytes=64 * MIB) as opened:
        yield opened


def test_half_of_what_is_free_is_taken_and_no_more(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    arena = ArenaMemoryResource(source)
    blocks = [arena.allocate(MIB, stream=stream) for _ in range(32)]
    assert len(blocks) == 32
    with pytest.raises(OutOfDeviceMemory, match="cannot give 1 bytes"):
        arena.allocate(1, stream=stream)
    assert source.sizes == [32 * MIB]


def test_a_size_is_rounded_up_to_a_superblock(on: Machine) -> None:
    source = FakeUpstream(device=0)
    ArenaMemoryResource(source, "3 KiB").allocate(1, stream=on.stream())
    assert source.sizes == [MIB]


def test_each_stream_has_superblocks_of_its_own(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), 8 * MIB)
    one, other = on.stream(), on.stream()
    mine = [arena.allocate(KIB, stream=one).address for _ in range(4)]
    theirs = [arena.allocate(KIB, stream=other).address for _ in range(4)]
    assert max(mine) - min(mine) < MIB
    assert max(theirs) - min(theirs) < MIB
    assert abs(mine[0] - theirs[0]) >= MIB


def test_the_lowest_address_that_fits_is_taken(on: Machine) -> None:
    arena, stream = ArenaMemoryResource(FakeUpstream(device=0), 4 * MIB), on.stream()
    blocks = [arena.allocate(size * KIB, stream=stream) for size in (8, 1, 4, 1, 2, 1)]
    for block in blocks[::2]:
        arena.deallocate(block, stream=stream)
    # Best fit would take the hole of 2 KiB.
    assert arena.allocate(2 * KIB, stream=stream).address == blocks[0].address


def test_above_a_superblock_it_comes_from_the_shared_arena(on: Machine) -> None:
    arena, stream = ArenaMemoryResource(FakeUpstream(device=0), 8 * MIB), on.stream()
    large = arena.allocate(MIB + 1, stream=stream)
    assert large.capacity_nbytes == MIB + 256
    assert "stream" not in arena.dump()
    arena.deallocate(large, stream=stream)
    assert arena.info().largest_free_nbytes == 8 * MIB


def test_a_miss_defragments_then_raises(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), 4 * MIB)
    streams = [on.stream() for _ in range(4)]
    blocks = [arena.allocate(KIB, stream=stream) for stream in streams]
    for block, stream in zip(blocks[1:], streams[1:], strict=True):
        arena.deallocate(block, stream=stream)
    # Three superblocks without a block in use become one stretch.
    large = arena.allocate(3 * MIB, stream=streams[0])
    assert large.nbytes == 3 * MIB
    with pytest.raises(OutOfDeviceMemory, match="the largest hole of 1047552"):
        arena.allocate(MIB, stream=streams[0])
    assert blocks[0].address


def test_a_superblock_that_is_pending_is_waited_for(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), MIB)
    one, other, event = on.stream(), on.stream(), on.backend.create_event()
    block = arena.allocate(KIB, stream=one)
    with on.sim.gate(one):
        arena.deallocate(block, stream=one)
        taken = arena.allocate(KIB, stream=other)
        assert arena.num_waits == 1
        other.record(event)
        on.run()
        assert not event.is_done
    on.run()
    assert event.is_done
    arena.deallocate(taken, stream=other)


def test_another_streams_superblock_will_do_where_none_is_left(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), MIB)
    one, other = on.stream(), on.stream()
    first = arena.allocate(KIB, stream=one)
    second = arena.allocate(KIB, stream=other)
    assert abs(first.address - second.address) < MIB
    arena.deallocate(second, stream=other)
    arena.deallocate(first, stream=one)
    on.run()
    assert arena.info().largest_free_nbytes == MIB


def test_a_block_freed_on_another_stream_goes_back_to_its_arena(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), 4 * MIB)
    one, other = on.stream(), on.stream()
    blocks = [arena.allocate(MIB // 4, stream=one) for _ in range(4)]
    arena.allocate(KIB, stream=other)
    with on.sim.gate(other) as gate:
        gate.release()
    for block in blocks:
        arena.deallocate(block, stream=other)
    on.run()
    assert arena.allocate(MIB // 4, stream=one).address in {block.address for block in blocks}
    assert arena.num_waits == 0


@pytest.mark.parametrize("dumps", [False, True])
def test_a_failure_is_dumped_when_asked(
    on: Machine, caplog: pytest.LogCaptureFixture, dumps: bool
) -> None:
    arena, stream = ArenaMemoryResource(FakeUpstream(device=0), MIB, dumps), on.stream()
    arena.allocate(KIB, stream=stream)
    with caplog.at_level(logging.ERROR, "streamflow"), pytest.raises(OutOfDeviceMemory):
        arena.allocate(2 * MIB, stream=stream)
    assert ("no room for 2097152 bytes" in caplog.text) is dumps
    assert ("fragmentation" in caplog.text) is dumps
    assert ("superblocks" in caplog.text) is dumps


def test_fragmentation_counts_holes_in_superblocks(on: Machine) -> None:
    arena, stream = ArenaMemoryResource(FakeUpstream(device=0), MIB), on.stream()
    blocks = [arena.allocate(256 * KIB, stream=stream) for _ in range(4)]
    arena.deallocate(blocks[0], stream=stream)
    arena.deallocate(blocks[2], stream=stream)
    assert arena.fragmentation == 0.5
    arena.deallocate(blocks[1], stream=stream)
    assert arena.fragmentation == 0


def test_arenas_of_streams_that_are_gone_are_not_kept(on: Machine) -> None:
    arena = ArenaMemoryResource(FakeUpstream(device=0), 4 * MIB)
    for _ in range(20):
        stream = on.stream()
        arena.deallocate(arena.allocate(KIB, stream=stream), stream=stream)
        on.run()
    assert arena.dump().count("stream") <= 4


def test_bad_sizes_are_refused() -> None:
    for size in (0, -1, "much"):
        with pytest.raises(ValueError, match=r"arena_size|a limit is"):
            ArenaMemoryResource(FakeUpstream(), size)


def test_what_a_superblock_came_after_holds_for_the_unused_rest_of_it(on: Machine) -> None:
    arena = ArenaMemoryResource(CudaMemoryResource(device=0), MIB)
    one, two, three = (on.stream() for _ in range(3))
    whole = arena.allocate(MIB, stream=one)
    with on.sim.gate(one):
        on.write(whole, one)
        arena.deallocate(whole, stream=one)
        small = arena.allocate(KIB, stream=two)
        rest = arena.allocate(KIB, stream=three)  # of the superblock of ``two``
        on.write(small, two)
        on.write(rest, three)
    assert on.races() == []
    assert arena.num_waits == 2
    arena.deallocate(small, stream=two)
    arena.deallocate(rest, stream=three)
