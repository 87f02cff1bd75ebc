"""Blocks of one size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_memory import FakeUpstream, Machine, machine

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import FixedSizeMemoryResource

KIB = 1 << 10


@pytest.fixture
def on() -> Iterator[Machine]:
    with machine() as opened:
        yield opened


def test_by_default_128_blocks_of_1_mib_come_at_a_time(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    resource = FixedSizeMemoryResource(source)
    blocks = [resource.allocate(1, stream=stream) for _ in range(129)]
    assert source.sizes == [128 << 20, 128 << 20]
    assert {block.capacity_nbytes for block in blocks} == {1 << 20} == {resource.block_size}


def test_the_block_freed_first_is_used_first(on: Machine) -> None:
    resource, stream = FixedSizeMemoryResource(FakeUpstream(device=0), KIB, 4), on.stream()
    blocks = [resource.allocate(KIB, stream=stream) for _ in range(4)]
    order = [blocks[number] for number in (2, 0, 3, 1)]
    for block in order:
        resource.deallocate(block, stream=stream)
    again = [resource.allocate(KIB, stream=stream).address for _ in range(4)]
    assert again == [block.address for block in order]


@pytest.mark.parametrize(("nbytes", "alignment"), [(KIB + 1, 256), (KIB, 2048), (513, 2048)])
def test_what_does_not_fit_a_block_is_refused(on: Machine, nbytes: int, alignment: int) -> None:
    source = FakeUpstream(device=0)
    resource = FixedSizeMemoryResource(source, KIB, 4)
    with pytest.raises(OutOfDeviceMemory, match="do not surely fit"):
        resource.allocate(nbytes, stream=on.stream(), alignment=alignment)
    assert source.sizes == []


def test_a_whole_block_may_be_as_aligned_as_its_size(on: Machine) -> None:
    resource, stream = FixedSizeMemoryResource(FakeUpstream(device=0), 4 * KIB, 3), on.stream()
    for _ in range(4):
        assert resource.allocate(4 * KIB, stream=stream, alignment=4096).address % 4096 == 0


def test_fewer_come_where_the_upstream_has_less(on: Machine) -> None:
    source, stream = FakeUpstream(5 * KIB, device=0), on.stream()
    resource = FixedSizeMemoryResource(source, KIB, 8)
    blocks = [resource.allocate(KIB, stream=stream) for _ in range(5)]
    assert len(blocks) == 5
    assert source.sizes == [8 * KIB, 4 * KIB, 8 * KIB, 4 * KIB, 2 * KIB, KIB]
    with pytest.raises(OutOfDeviceMemory):
        resource.allocate(KIB, stream=stream)


def test_block_sizes_are_rounded_up_and_may_be_words() -> None:
    assert FixedSizeMemoryResource(FakeUpstream(), 257).get_block_size() == 512
    assert FixedSizeMemoryResource(FakeUpstream(), "2MiB").block_size == 2 << 20


@pytest.mark.parametrize(("size", "num"), [(0, 1), (-1, 1), (True, 1), (KIB, 0), (KIB, True)])
def test_bad_sizes_and_numbers_are_refused(size: int, num: int) -> None:
    with pytest.raises((TypeError, ValueError)):
        FixedSizeMemoryResource(FakeUpstream(), size, num)
