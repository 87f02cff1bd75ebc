"""CMSSW's caching host allocator: its rules, and its numbers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host_figures import figures, pins, unpins

import streamflow as sf
from streamflow.errors import Closed, DeviceLost
from streamflow.memory import CachingHostAllocator

MIB = 1 << 20
INVALID_BIN = CachingHostAllocator.INVALID_BIN


# -- constructors, constants, static methods ---------------------------------------------------


def test_the_default_form_has_the_originals_numbers() -> None:
    made = CachingHostAllocator()
    assert (made.bin_growth, made.min_bin, made.max_bin) == (8, 3, 7)
    assert (made.min_bin_bytes, made.max_bin_bytes) == (512, 2 * MIB)
    assert made.max_cached_bytes == 6_291_455
    assert (made.skip_cleanup, made.debug) == (False, False)


def test_the_other_form_has_no_largest_bin_and_no_limit() -> None:
    made = CachingHostAllocator(2)
    assert (made.bin_growth, made.min_bin, made.max_bin) == (2, 1, INVALID_BIN)
    assert (made.min_bin_bytes, made.max_bin_bytes) == (2, CachingHostAllocator.INVALID_SIZE)
    assert made.max_cached_bytes == CachingHostAllocator.INVALID_SIZE
    made = CachingHostAllocator(4, 2, 5, 10_000, True, True)
    assert (made.min_bin_bytes, made.max_bin_bytes, made.max_cached_bytes) == (16, 1024, 10_000)
    assert (made.skip_cleanup, made.debug) == (True, True)


def test_the_constants_are_the_originals() -> None:
    assert INVALID_BIN == 2**32 - 1
    assert CachingHostAllocator.INVALID_SIZE == 2**64 - 1
    assert CachingHostAllocator.INVALID_DEVICE_ORDINAL == -1


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        ((1,), {}, ValueError),
        ((True,), {}, TypeError),
        ((2.0,), {}, TypeError),
        ((8, -1), {}, ValueError),
        ((8, 5, 4), {}, ValueError),
        ((8, 3, 7, -1), {}, ValueError),
        ((8, 40), {}, ValueError),
        ((), {"min_bin": 3}, TypeError),
        ((), {"max_cached_bytes": 5}, TypeError),
        ((), {"device": "0"}, TypeError),
    ],
)
def test_a_constructor_that_makes_no_sense_is_refused(
    args: Any, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        CachingHostAllocator(*args, **options)


@pytest.mark.parametrize(
    "name",
    ["max_cached_bytes", "skip_cleanup", "cached_bytes", "cached_blocks", "min_bin_bytes", "debug"],
)
def test_what_there_is_can_only_be_read(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(CachingHostAllocator(), name, 1)


# -- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "size", "order"),
    [
        (1, 512, 3),
        (512, 512, 3),
        (513, 4096, 4),
        (4097, 32768, 5),
        (2 * MIB, 2 * MIB, 7),
        (2 * MIB + 1, 2 * MIB + 1, INVALID_BIN),
    ],
)
def test_a_request_goes_to_its_own_bin(
    lab: Any, made: Callable[..., CachingHostAllocator], nbytes: int, size: int, order: int
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(nbytes)
    assert (block.nbytes, block.bin_nbytes, block.bin) == (nbytes, size, order)
    assert figures(allocator) == (0, size, 0, 1)
    (info,) = allocator.live_blocks
    assert (info.pointer, info.nbytes, info.bin) == (block.address, size, order)
    assert (info.device, info.stream, info.ready_events) == (0, None, ())
    allocator.host_free(block)
    kept = order != INVALID_BIN
    assert figures(allocator) == (size * kept, 0, 1 * kept, 0)
    assert unpins(lab) == (not kept)


def test_a_bin_serves_no_other(lab: Any, made: Callable[..., CachingHostAllocator]) -> None:
    allocator = made(device=0)
    allocator.host_free(allocator.host_allocate(4096))
    small = allocator.host_allocate(512)
    assert small.bin_nbytes == 512
    assert (allocator.num_hits, allocator.num_misses) == (0, 2)
    assert figures(allocator) == (4096, 512, 1, 1)


def test_the_block_that_has_been_there_longest_is_taken(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    blocks = [allocator.host_allocate(600, stream if turn % 2 else None) for turn in range(4)]
    addresses = [block.address for block in blocks]
    for turn in (2, 1, 3, 0):
        allocator.host_free(blocks[turn])
    lab.run()
    again = [allocator.host_allocate(600) for _ in range(4)]
    assert [block.address for block in again] == [addresses[turn] for turn in (2, 1, 3, 0)]
    assert allocator.num_hits == 4


def test_a_block_in_use_is_not_handed_out(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    first = allocator.host_allocate(100, stream)
    gate = lab.hold(stream)
    allocator.host_free(first)
    (info,) = allocator.cached_blocks
    assert info.stream is stream
    assert len(info.ready_events) == 1
    second = allocator.host_allocate(100, stream)
    assert second.address != first.address
    gate.release()
    lab.run()
    assert allocator.host_allocate(100).address == first.address


def test_a_smaller_limit_frees_nothing_until_later_frees(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    blocks = [allocator.host_allocate(4096) for _ in range(4)]
    for block in blocks[:3]:
        allocator.host_free(block)
    allocator.set_max_cached_bytes(4096)
    assert allocator.max_cached_bytes == 4096
    assert figures(allocator) == (3 * 4096, 4096, 3, 1)
    assert unpins(lab) == 0
    allocator.host_free(blocks[3])
    assert allocator.cached_bytes.free == 4096
    allocator.set_max_cached_bytes("4KiB")
    for refused in (-1, 1.5, "much"):
        with pytest.raises((TypeError, ValueError)):
            allocator.set_max_cached_bytes(refused)  # type: ignore[arg-type]


def test_what_is_larger_than_the_cache_is_freed_and_drops_nothing(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(8, 3, 7, 5000, device=0)
    small, large = allocator.host_allocate(512), allocator.host_allocate(32768)
    allocator.host_free(small)
    allocator.host_free(large)
    assert figures(allocator) == (512, 0, 1, 0)
    assert unpins(lab) == 1


def test_free_all_cached_waits_for_no_stream_and_unpins_nothing_in_use(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    busy, idle = allocator.host_allocate(100, stream), allocator.host_allocate(100)
    gate = lab.hold(stream)
    allocator.host_free(busy)
    allocator.host_free(idle)
    allocator.free_all_cached()
    assert figures(allocator) == (0, 0, 0, 0)
    assert unpins(lab) == 1
    assert allocator.pending_bytes == 512
    gate.release()
    lab.run()
    allocator.free_all_cached()
    assert (unpins(lab), allocator.pending_bytes) == (2, 0)


def test_the_bytes_are_a_view_that_keeps_its_block(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(1000)
    view = block.array
    view[:] = 7
    assert (view.dtype, view.shape) == (np.dtype(np.uint8), (1000,))
    assert view.ctypes.data == block.address
    part = view[10:].view()
    del block, view
    gc.collect()
    allocator.host_free(allocator.host_allocate(1))
    assert len(allocator.live_blocks) == 1
    assert part.sum() == 7 * 990
    del part
    gc.collect()
    assert allocator.host_allocate(1000).bin_nbytes == 4096
    assert allocator.num_hits == 1


def test_a_freed_block_gives_no_more_views(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(10)
    allocator.host_free(block)
    with pytest.raises(Closed, match=r"was freed, at test_caching_host\.py:"):
        _ = block.array
    with pytest.raises(Closed, match=r"was freed, at test_caching_host\.py:"):
        block.record_stream(lab.stream())


def test_a_dropped_block_goes_back_by_the_next_call(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    address = allocator.host_allocate(100, stream).address
    gc.collect()
    num_events = lab.device.counts["record"]
    assert figures(allocator)[1] == 512  # a finaliser calls nothing
    other = allocator.host_allocate(5000)
    assert lab.device.counts["record"] == num_events + 1
    assert figures(allocator) == (512, 32768, 1, 1)
    lab.run()
    assert allocator.host_allocate(100).address == address
    del other


def test_a_dropped_allocator_unpins_by_the_next_call_there(lab: Any) -> None:
    allocator, stream = CachingHostAllocator(device=0), lab.stream()
    first, second = (allocator.host_allocate(100, stream) for _ in range(2))
    allocator.host_free(first)
    lab.run()
    del allocator, first, second
    gc.collect()
    assert unpins(lab) == 0
    lab.space.reap()
    lab.run()
    lab.space.reap()
    assert unpins(lab) == pins(lab) == 2
    assert not lab.space.dropped


def test_with_skip_cleanup_a_dropped_allocator_unpins_nothing(lab: Any) -> None:
    allocator = CachingHostAllocator(skip_cleanup=True, device=0)
    allocator.host_free(allocator.host_allocate(100))
    del allocator
    gc.collect()
    lab.space.reap()
    assert unpins(lab) == 0


def test_debug_prints_each_allocation_reuse_and_free(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = CachingHostAllocator(debug=True, device=0)
    allocator.host_free(allocator.host_allocate(100))
    allocator.host_free(allocator.host_allocate(100))
    allocator.free_all_cached()
    lines = capsys.readouterr().out.splitlines()
    did = [line.split()[1] for line in lines]
    assert did == ["allocated", "returned", "reused", "returned", "freed"]
    assert "512 bytes" in lines[0]
    assert "0 blocks cached (0 bytes), 0 live (0 bytes)" in lines[-1]


@pytest.mark.parametrize("error", [DeviceLost, ValueError])
def test_a_block_that_can_not_be_unpinned_keeps_no_other_from_it(
    lab: Any,
    made: Callable[..., CachingHostAllocator],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    allocator = made(device=0)
    blocks = [allocator.host_allocate(100) for _ in range(3)]
    for block in blocks:
        allocator.host_free(block)
    unpin = lab.device.free_pinned_blocking

    def fails_once(address: int) -> None:
        unpin(address)
        if address == blocks[0].address:
            raise error("as told")

    monkeypatch.setattr(lab.device, "free_pinned_blocking", fails_once)
    if error is DeviceLost:  # the ops report it
        allocator.free_all_cached()
    else:
        with pytest.raises(error, match="as told"):
            allocator.free_all_cached()
    assert unpins(lab) == 3


def test_without_debug_nothing_is_printed(
    lab: Any, made: Callable[..., CachingHostAllocator], capsys: pytest.CaptureFixture[str]
) -> None:
    allocator = made(device=0)
    allocator.host_free(allocator.host_allocate(100))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("nbytes", [True, 1.5, None, "1", -1])
def test_what_is_no_size_is_refused(
    lab: Any, made: Callable[..., CachingHostAllocator], nbytes: Any
) -> None:
    with pytest.raises((TypeError, ValueError)):
        made(device=0).host_allocate(nbytes)


def test_streams_that_are_none_or_closed_are_refused(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, closed = made(device=0), lab.stream()
    closed.close()
    with pytest.raises(TypeError, match="stream"):
        allocator.host_allocate(100, 0)
    with pytest.raises(Closed):
        allocator.host_allocate(100, closed)
    block = allocator.host_allocate(100)
    with pytest.raises(TypeError, match="found None"):
        block.record_stream(None)
    assert pins(lab) == 1


def test_without_a_device_nothing_is_pinned(made: Callable[..., CachingHostAllocator]) -> None:
    with pytest.raises(Closed, match="device"):
        made(device=1).host_allocate(100)


def test_blocks_outlive_their_device(
    open_lab: Callable[..., Any], made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, lab = made(), open_lab()
    stream = lab.stream()
    cached, live = allocator.host_allocate(100, stream), allocator.host_allocate(5000, stream)
    allocator.host_free(cached)
    lab.close()
    live.array[:] = 3
    allocator.host_free(live)
    assert figures(allocator) == (512 + 32768, 0, 2, 0)
    later = open_lab(key=object())
    again = allocator.host_allocate(5000, later.stream())
    assert (again.address, again.array[0]) == (live.address, 3)
    assert pins(later) == 0


def test_a_block_reused_on_another_device_gets_its_event_there(
    open_lab: Callable[..., Any], made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, first, second = made(device=1), open_lab(0), open_lab(1)
    block = allocator.host_allocate(100, first.stream())
    address = block.address
    allocator.host_free(block)
    first.run()
    stream = second.stream()
    block = allocator.host_allocate(100, stream)
    assert (block.address, block.device) == (address, 1)
    gate = second.hold(stream)
    allocator.host_free(block)
    assert allocator.cached_blocks[0].device == 1
    assert allocator.host_allocate(100).address != address
    gate.release()
    second.run()
    assert allocator.host_allocate(100).address == address


def test_streams_and_lanes_of_the_runtime_are_taken() -> None:
    async def main() -> None:
        async with sf.Device(0, backend="sim") as dev:
            allocator = CachingHostAllocator()
            stream = dev.stream("work")
            block = allocator.host_allocate(4096, stream)
            block.record_stream(dev.stream("other"))
            block.array[:] = 5
            array = dev.put(block.array)
            assert (await dev.get(array) == 5).all()
            allocator.host_free(block)
            await dev.synchronize()
            assert allocator.host_allocate(4096, stream).address == block.address
            allocator.free_all_cached()

    asyncio.run(main())
