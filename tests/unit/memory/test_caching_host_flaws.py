"""The seventeen known flaws of CMSSW's caching host allocator: ours has none of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_figures import figures, pins, unpins

import streamflow as sf
from streamflow.errors import DeviceLost, ForkedProcess, OutOfDeviceMemory
from streamflow.memory import CachingHostAllocator, HostBytes
from streamflow.scheduler import guards

MIB = 1 << 20
INVALID_BIN = CachingHostAllocator.INVALID_BIN


def lose(lab: Any, stream: Any) -> None:
    """Have the device fail."""
    lab.device.controls().fail("fill")
    pool = lab.device.create_pool(release_threshold_nbytes=0)
    lab.device.fill(lab.device.allocate(pool, 256, stream), b"\0", 256, stream)
    while lab.device.advance(0):
        pass


def test_flaw_01_an_error_of_the_query_is_not_a_yes(
    open_lab: Callable[..., Any], made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, lost, good = made(), open_lab(0), open_lab(1, key=object())
    stream = lost.stream()
    block = allocator.host_allocate(100, stream)
    allocator.host_free(block)
    lose(lost, stream)
    with pytest.raises(DeviceLost):
        stream.sync()
    other = allocator.host_allocate(100, good.stream())
    assert other.address != block.address
    assert (allocator.num_hits, allocator.num_misses) == (0, 2)


def test_flaw_01_another_error_of_the_query_reaches_the_caller(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, stream = made(device=0), lab.stream()
    allocator.host_free(allocator.host_allocate(100, stream))
    lab.run()
    event = type(allocator.cached_blocks[0].ready_events[0])

    def fails(self: Any) -> bool:
        raise RuntimeError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(event, "is_done", property(fails))
        with pytest.raises(sf.DeviceError, match="no answer"):
            allocator.host_allocate(100)
    assert figures(allocator) == (512, 0, 1, 0)
    allocator.host_allocate(100)
    assert allocator.num_hits == 1


def test_flaw_02_every_stream_that_uses_a_block_is_waited_for(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, first, second = made(device=0), lab.stream(), lab.stream()
    block = allocator.host_allocate(100, first)
    block.record_stream(second)
    gate = lab.hold(second)
    allocator.host_free(block)
    lab.run()
    assert len(allocator.cached_blocks[0].ready_events) == 2
    assert allocator.host_allocate(100, first).address != block.address
    gate.release()
    lab.run()
    assert allocator.host_allocate(100, first).address == block.address


def test_flaw_03_no_block_is_cached_before_its_event_is_recorded(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, stream = made(device=0), lab.stream()
    block = allocator.host_allocate(100, stream)
    seen: list[tuple[int, int, int, int]] = []
    record = type(stream).record

    def watched(self: Any, event: Any) -> Any:
        seen.append(figures(allocator))
        return record(self, event)

    monkeypatch.setattr(type(stream), "record", watched)
    allocator.host_free(block)
    assert seen == [(0, 512, 0, 1)]
    assert figures(allocator) == (512, 0, 1, 0)


def test_flaw_04_a_failed_record_leaves_the_block_live_and_no_lock_held(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, stream = made(device=0), lab.stream()
    block = allocator.host_allocate(100, stream)

    def fails(self: Any, event: Any) -> Any:
        raise RuntimeError("not recorded")

    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "record", fails)
        with pytest.raises(sf.DeviceError, match="not recorded"):
            allocator.host_free(block)
    assert figures(allocator) == (0, 512, 0, 1)
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(allocator.host_allocate(100).address), daemon=True
    )
    thread.start()
    thread.join(10)
    assert len(done) == 1
    allocator.host_free(block)
    assert figures(allocator) == (1024, 0, 2, 0)  # the thread's was dropped


def starve(lab: Any, monkeypatch: pytest.MonkeyPatch, num_fails: int) -> list[int]:
    """Have the next calls find no memory; returns what was asked for."""
    asked: list[int] = []
    pin = lab.device.allocate_pinned_blocking

    def pins_not(nbytes: int) -> int:
        asked.append(nbytes)
        if len(asked) <= num_fails:
            raise OutOfDeviceMemory("as told")
        return pin(nbytes)

    monkeypatch.setattr(lab.device, "allocate_pinned_blocking", pins_not)
    return asked


def test_flaw_05_out_of_memory_frees_the_whole_cache_and_tries_once_more(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, stream = made(device=0), lab.stream()
    blocks = [allocator.host_allocate(512 << turn % 5, stream) for turn in range(20)]
    for block in blocks:
        allocator.host_free(block)
    lab.run()
    asked = starve(lab, monkeypatch, 1)
    block = allocator.host_allocate(100_000)
    assert asked == [114_688, 114_688]
    assert unpins(lab) == 20
    assert figures(allocator) == (0, 262144, 0, 1)
    assert block.bin_nbytes == 262144


@pytest.mark.parametrize("num_fails", [1, 2])
def test_c23_running_out_of_memory_keeps_no_block_alive(
    lab: Any,
    made: Callable[..., CachingHostAllocator],
    monkeypatch: pytest.MonkeyPatch,
    num_fails: int,
) -> None:
    allocator = made(device=0)

    def attempt() -> None:
        held = allocator.host_allocate(100)
        starve(lab, monkeypatch, num_fails)
        with suppress(OutOfDeviceMemory):
            allocator.host_allocate(5000)
        assert not held.is_freed

    gc.disable()  # a cycle would have to wait for it
    try:
        attempt()
        allocator.free_all_cached()
    finally:
        gc.enable()
    assert figures(allocator) == (0, 0, 0, 0)


def test_flaw_05_out_of_memory_a_second_time_is_an_error_that_loses_nothing(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, stream = made(device=0), lab.stream()
    busy = allocator.host_allocate(100, stream)
    gate = lab.hold(stream)
    allocator.host_free(busy)
    asked = starve(lab, monkeypatch, 2)
    with pytest.raises(OutOfDeviceMemory, match=r"cache empty, 512 bytes still in use.*as told"):
        allocator.host_allocate(5000)
    assert asked == [5120, 5120]
    assert figures(allocator) == (0, 0, 0, 0)
    gate.release()
    lab.run()
    assert allocator.host_allocate(5000).bin_nbytes == 32768
    assert unpins(lab) == 1


def test_flaw_05_out_of_memory_waits_no_longer_than_a_moment_for_what_is_unpinned(
    open_lab: Callable[..., Any],
    made: Callable[..., CachingHostAllocator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, kernel_ends = open_lab(clock="wall"), threading.Event()
    allocator = made(device=0)
    allocator.host_free(allocator.host_allocate(100))
    unpin = lab.device.free_pinned_blocking

    def slow(address: int) -> None:
        kernel_ends.wait(10)
        unpin(address)

    monkeypatch.setattr(lab.device, "free_pinned_blocking", slow)
    starve(lab, monkeypatch, 2)
    try:
        with pytest.raises(OutOfDeviceMemory):
            allocator.host_allocate(5000)
        assert lab.space.is_releasing
    finally:
        kernel_ends.set()
    lab.space.wait_released_blocking()
    assert unpins(lab) == 1


def test_flaw_05_out_of_memory_what_is_unpinned_in_a_moment_is_waited_for(
    open_lab: Callable[..., Any],
    made: Callable[..., CachingHostAllocator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, allocator = open_lab(clock="wall"), made(device=0)
    allocator.host_free(allocator.host_allocate(100))
    pin = lab.device.allocate_pinned_blocking

    def pins_in_its_place(nbytes: int) -> int:
        if not unpins(lab):
            raise OutOfDeviceMemory("as told")
        return pin(nbytes)

    monkeypatch.setattr(lab.device, "allocate_pinned_blocking", pins_in_its_place)
    assert allocator.host_allocate(5000).nbytes == 5000


def test_flaw_06_a_second_free_names_both_lines(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(100)
    allocator.host_free(block)
    again = allocator.host_allocate(100)  # at the same address
    line = r"test_caching_host_flaws\.py:\d+"
    with pytest.raises(ValueError, match=f"made at {line} freed.* freed already, at {line}"):
        allocator.host_free(block)
    assert again.address == block.address
    assert figures(allocator) == (0, 512, 0, 1)


def test_flaw_06_a_free_to_another_allocator_names_both_lines(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, other = made(device=0), made(device=0)
    block = allocator.host_allocate(100)
    line = r"test_caching_host_flaws\.py:\d+"
    with pytest.raises(ValueError, match=f"allocated at {line}, freed here at {line}"):
        other.host_free(block)
    for foreign in (block.address, None, np.zeros(4)):
        with pytest.raises(TypeError, match="HostBlock"):
            allocator.host_free(foreign)  # type: ignore[arg-type]
    assert figures(allocator) == (0, 512, 0, 1)


def test_flaw_06_of_many_threads_that_free_one_block_one_does(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    for _ in range(50):
        block = allocator.host_allocate(100)
        start, errors = threading.Barrier(4), list[Exception]()

        def free(block: Any = block, start: Any = start, errors: Any = errors) -> None:
            start.wait()
            try:
                allocator.host_free(block)
            except ValueError as error:
                errors.append(error)

        threads = [threading.Thread(target=free) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        assert figures(allocator) == (512, 0, 1, 0)


def test_flaw_07_a_stream_that_was_closed_before_the_free_is_not_used(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    block = allocator.host_allocate(100, stream)
    gate = lab.hold(stream)
    stream.close()
    num_records = lab.device.counts["record"]
    allocator.host_free(block)
    assert lab.device.counts["record"] == num_records
    assert figures(allocator) == (512, 0, 1, 0)
    other = allocator.host_allocate(100)  # its work still runs
    assert other.address != block.address
    gate.release()
    assert allocator.host_allocate(100).address == block.address


def test_flaw_07_a_block_keeps_its_stream(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(100, lab.stream())
    assert allocator.live_blocks[0].stream is block.stream


def test_flaw_08_no_stream_is_no_default_stream(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    before = dict(lab.device.counts)
    for _ in range(5):
        allocator.host_free(allocator.host_allocate(100))
    changed = {key for key, num in lab.device.counts.items() if num != before.get(key, 0)}
    assert changed == {"allocate_pinned_blocking"}


SIZES = [1, 511, 513, 1025, 4097, 5000, 32_769, 40_961, 262_145, 300_000, 2 * MIB]


def test_flaw_09_a_block_counts_as_its_bin_and_pins_at_most_a_quarter_too_much(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, pinned = made(device=0), starve(lab, monkeypatch, 0)
    blocks = [allocator.host_allocate(nbytes) for nbytes in SIZES]
    for block, nbytes in zip(blocks, pinned, strict=True):
        assert block.nbytes <= block.capacity_nbytes == nbytes
        assert nbytes <= max(block.nbytes * 5 // 4, block.nbytes + 511)
        assert nbytes <= block.bin_nbytes
    sizes = [512, 512, 4096, 4096, 32768, 32768, *[262_144] * 2, *[2 * MIB] * 3]
    assert allocator.cached_bytes.live == sum(sizes)  # the original's
    assert allocator.pinned_bytes.live == sum(pinned)
    assert allocator.asked_bytes == sum(SIZES)


def test_flaw_09_a_block_that_serves_a_larger_request_is_pinned_anew(
    lab: Any, made: Callable[..., CachingHostAllocator], capsys: pytest.CaptureFixture[str]
) -> None:
    allocator, stream = made(device=0, debug=True), lab.stream()
    allocator.host_free(allocator.host_allocate(300_000, stream))
    lab.run()
    assert allocator.pinned_bytes == HostBytes(327_680, 0)
    block = allocator.host_allocate(2 * MIB, stream)
    assert block.capacity_nbytes == 2 * MIB
    block.array[:] = 1
    assert (allocator.num_hits, allocator.num_misses) == (1, 1)  # the original's
    assert figures(allocator) == (0, 2 * MIB, 0, 1)
    assert (pins(lab), unpins(lab), allocator.pending_bytes) == (2, 1, 0)
    assert "are too few of 2097152" in capsys.readouterr().out
    address = block.address
    allocator.host_free(block)
    lab.run()
    again = allocator.host_allocate(300_000, stream)
    assert (again.address, again.capacity_nbytes) == (address, 2 * MIB)
    assert pins(lab) == 2


def test_flaw_09_a_block_that_serves_all_sizes_of_its_bin_is_pinned_twelve_times_at_most(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    for _ in range(2):
        for nbytes in range(262_145, 2 * MIB, 997):
            allocator.host_free(allocator.host_allocate(nbytes))
        assert pins(lab) == 12
    assert allocator.num_misses == 1


def test_flaw_09_no_memory_for_a_larger_request_leaves_counts_that_are_true(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = made(device=0)
    allocator.host_free(allocator.host_allocate(300_000))
    asked = starve(lab, monkeypatch, 2)
    with pytest.raises(OutOfDeviceMemory):
        allocator.host_allocate(2 * MIB)
    assert asked == [2 * MIB] * 2
    assert figures(allocator) == (0, 0, 0, 0)
    assert (unpins(lab), allocator.num_hits, allocator.num_misses) == (1, 0, 1)


def test_flaw_09_another_growth_has_finer_bins(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(2, 9, 21, device=0)
    for nbytes in SIZES[2:]:
        assert allocator.host_allocate(nbytes).bin_nbytes < 2 * nbytes


def test_flaw_10_a_search_asks_once_for_each_stream_and_not_under_the_lock(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, streams = made(device=0), [lab.stream() for _ in range(3)]
    blocks = [allocator.host_allocate(100, stream) for stream in streams for _ in range(50)]
    gates = [lab.hold(stream) for stream in streams]
    for block in blocks:
        allocator.host_free(block)
    event = type(allocator.cached_blocks[0].ready_events[0])
    is_done, free = event.is_done.fget, list[bool]()

    def watched(self: Any) -> bool:
        def look() -> None:
            with allocator._cache._lock:
                free.append(True)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(10)
        return bool(is_done(self))

    monkeypatch.setattr(event, "is_done", property(watched))
    num_queries = lab.device.counts["is_done"]
    allocator.host_allocate(100)
    assert lab.device.counts["is_done"] - num_queries == 3
    assert free == [True] * 3
    assert len(allocator._cache._bins[3].heads()) == 3  # of 150: the lock is held for no more
    for gate in gates:
        gate.release()
    lab.run()


def test_flaw_11_a_full_cache_drops_what_was_not_used_for_longest(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(8, 3, 7, 4096 + 512, device=0)
    stale, fresh, hot = (allocator.host_allocate(n) for n in (512, 4096, 4096))
    allocator.host_free(stale)
    allocator.host_free(fresh)
    assert allocator.cached_bytes.free == 4608
    allocator.host_free(hot)
    assert [info.pointer for info in allocator.cached_blocks] == [hot.address]
    assert figures(allocator) == (4096, 0, 1, 0)
    assert unpins(lab) == 2


def test_flaw_11_one_block_makes_room_for_one_of_its_size(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(8, 3, 7, 1024, device=0)
    blocks = [allocator.host_allocate(512) for _ in range(3)]
    for block in blocks:
        allocator.host_free(block)
    cached = {info.pointer for info in allocator.cached_blocks}
    assert cached == {block.address for block in blocks[1:]}
    assert allocator.cached_bytes.free == 1024  # as of the original


def test_flaw_12_powers_do_not_wrap() -> None:
    assert CachingHostAllocator.int_pow(8, 11) == 2**33
    assert CachingHostAllocator.int_pow(3, 100) == 3**100
    assert CachingHostAllocator.int_pow(7, 0) == 1
    assert CachingHostAllocator(8, 3, 12).max_bin_bytes == 2**36
    assert CachingHostAllocator(8, 3, 10**9).max_bin_bytes == CachingHostAllocator.INVALID_SIZE
    for base, exp in ((2, -1), (-2, 2)):
        with pytest.raises(ValueError, match="or more"):
            CachingHostAllocator.int_pow(base, exp)


@pytest.mark.parametrize(
    ("base", "value", "expected"),
    [
        (8, 0, (0, 1)),
        (8, 1, (0, 1)),
        (8, 2, (1, 8)),
        (8, 512, (3, 512)),
        (8, 513, (4, 4096)),
        (3, 28, (4, 81)),
        (2, 2**63 + 1, (64, 2**64)),
        (10, 2**61, (19, 10**19)),
        (7, 2**64 - 1, (23, 7**23)),
    ],
)
def test_flaw_13_the_nearest_power_is_found_of_any_size(
    base: int, value: int, expected: tuple[int, int]
) -> None:
    assert CachingHostAllocator.nearest_power_of(base, value) == expected


def test_flaw_13_huge_requests_and_bases_that_never_end_are_refused(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    with pytest.raises(ValueError, match="base is 2 or more"):
        CachingHostAllocator.nearest_power_of(1, 5)
    allocator = made(8, device=0)
    for nbytes in (2**60 + 1, 2**62, 2**63, 2**80):
        with pytest.raises(OutOfDeviceMemory):
            allocator.host_allocate(nbytes)
    assert pins(lab) == 0


def test_flaw_14_no_bytes_take_nothing(lab: Any, made: Callable[..., CachingHostAllocator]) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(0, lab.stream())
    assert (block.address, block.nbytes, block.bin_nbytes) == (0, 0, 0)
    assert block.array.shape == (0,)
    assert figures(allocator) == (0, 0, 0, 0)
    block.record_stream(lab.stream())
    allocator.host_free(block)
    with pytest.raises(ValueError, match="freed already"):
        allocator.host_free(block)
    assert pins(lab) == 0
    assert (allocator.num_hits, allocator.num_misses) == (0, 0)


def test_flaw_15_events_are_pooled_and_a_live_block_has_none(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    before = lab.device.counts["create_event"]
    blocks = [allocator.host_allocate(100, stream) for _ in range(10)]
    assert lab.device.counts["create_event"] == before
    for _ in range(20):
        block = blocks.pop()
        allocator.host_free(block)
        lab.run()
        blocks.insert(0, allocator.host_allocate(100, stream))
    assert lab.device.counts["create_event"] - before == 1


def test_flaw_16_in_a_fork_every_call_is_refused_and_nothing_is_freed(
    lab: Any, made: Callable[..., CachingHostAllocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = CachingHostAllocator(device=0)
    live = allocator.host_allocate(100, lab.stream())
    dropped = allocator.host_allocate(100)
    allocator._cache._lock._lock.acquire()  # as by a thread that is not in the child
    allocator._cache.on_fork()
    with monkeypatch.context() as patch:
        patch.setattr(guards, "_is_forked", True)
        for call in (
            partial(allocator.host_allocate, 100),
            partial(allocator.host_free, live),
            allocator.free_all_cached,
            partial(live.record_stream, live.stream),
        ):
            with pytest.raises(ForkedProcess):
                call()
    num_dropped = len(lab.space.dropped)
    del dropped, live, allocator, call
    gc.collect()
    assert len(lab.space.dropped) == num_dropped
    assert unpins(lab) == 0


def test_flaw_16_a_process_that_holds_blocks_ends_in_peace() -> None:
    program = (
        "import asyncio, streamflow as sf\n"
        "kept = sf.memory.CachingHostAllocator()\n"
        "async def main():\n"
        "    global block, dev\n"
        "    dev = await sf.Device(0, backend='sim').__aenter__()\n"
        "    block = kept.host_allocate(100, dev.stream('s'))\n"
        "    kept.host_free(kept.host_allocate(5000, dev.stream('s')))\n"
        "    await dev.__aexit__(None, None, None)\n"
        "asyncio.run(main())\n"
        "print(kept.cached_bytes)\n"
    )
    root = Path(sf.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "HostBytes(free=32768, live=512)"


def test_flaw_17_what_only_the_host_used_is_free_at_once(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, stream = made(device=0), lab.stream()
    gate = lab.hold(stream)
    block = allocator.host_allocate(100)
    allocator.host_free(block)
    num_queries = lab.device.counts["is_done"]
    assert allocator.host_allocate(100, stream).address == block.address
    assert lab.device.counts["is_done"] == num_queries
    gate.release()


def test_one_slow_stream_holds_back_no_others_blocks(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator, slow, quick = made(device=0), lab.stream(), lab.stream()
    first, second = allocator.host_allocate(100, slow), allocator.host_allocate(100, quick)
    gate = lab.hold(slow)
    allocator.host_free(first)
    allocator.host_free(second)
    lab.run()
    assert allocator.host_allocate(100, slow).address == second.address
    gate.release()
