"""A resource for each range of sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_memory import FakeUpstream, Machine, machine

from streamflow.memory import BinningMemoryResource, FixedSizeMemoryResource

KIB = 1 << 10


@pytest.fixture
def on() -> Iterator[Machine]:
    with machine() as opened:
        yield opened


def test_the_smallest_bin_that_fits_is_taken(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    resource = BinningMemoryResource(source, 10, 12)
    sizes = {
        nbytes: resource.allocate(nbytes, stream=stream).capacity_nbytes
        for nbytes in (1, KIB, KIB + 1, 2 * KIB, 4 * KIB, 4 * KIB + 1)
    }
    assert sizes == {
        1: KIB,
        KIB: KIB,
        KIB + 1: 2 * KIB,
        2 * KIB: 2 * KIB,
        4 * KIB: 4 * KIB,
        4 * KIB + 1: 4 * KIB + 1,  # the upstream's
    }
    assert [each.block_size for each in resource.bin_mrs] == [KIB, 2 * KIB, 4 * KIB]  # type: ignore[attr-defined]


def test_without_bins_everything_is_the_upstreams(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    resource = BinningMemoryResource(source)
    block = resource.allocate(100, stream=stream)
    assert source.sizes == [100]
    resource.deallocate(block, stream=stream)
    assert source.live == {}
    assert resource.num_upstream_calls == 2


def test_a_block_goes_back_to_its_bin_whatever_bins_were_added_since(on: Machine) -> None:
    source, stream = FakeUpstream(device=0), on.stream()
    resource = BinningMemoryResource(source)
    resource.add_bin(4 * KIB)
    direct = resource.allocate(5 * KIB, stream=stream)
    binned = resource.allocate(KIB, stream=stream)
    resource.add_bin(KIB)
    resource.add_bin(8 * KIB)
    large, small = resource.bin_mrs[1], resource.bin_mrs[0]
    resource.deallocate(binned, stream=stream)
    assert (large.live_nbytes, small.live_nbytes) == (0, 0)  # type: ignore[attr-defined]
    assert direct.address in source.live
    resource.deallocate(direct, stream=stream)
    assert direct.address not in source.live
    assert resource.allocate(KIB, stream=stream).capacity_nbytes == KIB


def test_a_bin_may_be_any_resource(on: Machine) -> None:
    stream = on.stream()
    mine, other = FakeUpstream(device=0), FakeUpstream(device=0)
    resource = BinningMemoryResource(mine)
    resource.add_bin("1KiB", other)
    resource.add_bin("2KiB", FixedSizeMemoryResource(other, 2 * KIB, 2))
    block = resource.allocate(600, stream=stream)
    assert other.sizes == [600]
    larger = resource.allocate(KIB + 1, stream=stream)
    assert larger.capacity_nbytes == 2 * KIB
    found = resource.info()
    assert (found.live_nbytes, found.reserved_nbytes) == (600 + 2 * KIB, 600 + 4 * KIB)
    resource.deallocate(block, stream=stream)
    assert resource.live_nbytes == 2 * KIB
    assert mine.sizes == []


def test_a_second_bin_of_a_size_is_refused() -> None:
    resource = BinningMemoryResource(FakeUpstream())
    resource.add_bin(KIB)
    with pytest.raises(ValueError, match="there is a bin for 1024 bytes already"):
        resource.add_bin(1000)


@pytest.mark.parametrize("exponents", [(5, -1), (-1, 5), (6, 5), (0, 63), (-2, 3)])
def test_exponents_that_are_no_range_are_refused(exponents: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="exponents"):
        BinningMemoryResource(FakeUpstream(), *exponents)


def test_bins_are_resources_and_sizes_are_sizes() -> None:
    resource = BinningMemoryResource(FakeUpstream())
    with pytest.raises(TypeError, match="takes a memory resource"):
        resource.add_bin(KIB, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exponent"):
        BinningMemoryResource(FakeUpstream(), True, 5)
    for size in (0, -5, "many"):
        with pytest.raises(ValueError, match=r"allocation_size|a limit is"):
            resource.add_bin(size)


def test_small_exponents_make_one_bin_of_the_least_size(on: Machine) -> None:
    resource = BinningMemoryResource(FakeUpstream(device=0), 0, 9)
    assert [each.block_size for each in resource.bin_mrs] == [256, 512]  # type: ignore[attr-defined]
