"""The caching host allocator in the hands of several threads, and of finalisers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from host_figures import figures, pins, unpins

from streamflow.memory import CachingHostAllocator
from streamflow.memory.host_blocks import Cell

MIB = 1 << 20
INVALID_BIN = CachingHostAllocator.INVALID_BIN


@pytest.mark.parametrize("is_freed_again", [False, True])
def test_a_block_that_another_thread_takes_during_the_search_is_left_to_it(
    lab: Any,
    made: Callable[..., CachingHostAllocator],
    monkeypatch: pytest.MonkeyPatch,
    is_freed_again: bool,
) -> None:
    allocator, stream = made(device=0), lab.stream()
    block = allocator.host_allocate(100)
    allocator.host_free(block)
    is_ready, others = Cell.is_ready, list[Any]()

    def slow(self: Cell) -> bool:
        """Ready, but by the time this is known somebody else was faster."""
        answer = is_ready(self)
        if not others:
            others.append(None)
            others[0] = allocator.host_allocate(100, stream)
            if is_freed_again:
                others.append(lab.hold(stream))
                allocator.host_free(others[0])
        return answer

    monkeypatch.setattr(Cell, "is_ready", slow)
    mine = allocator.host_allocate(100)
    assert others[0].address == block.address
    assert mine.address != block.address
    assert len(allocator.live_blocks) == 2 - is_freed_again
    for gate in others[1:]:
        gate.release()


def test_r12_a_finaliser_that_frees_in_the_middle_of_a_change_leaves_it_for_later(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    block = allocator.host_allocate(100)
    with allocator._cache._lock:
        allocator.host_free(block)
        assert figures(allocator) == (0, 512, 0, 1)
    assert allocator.host_allocate(100).address == block.address
    assert allocator.num_hits == 1


def test_many_threads_never_share_a_block(
    lab: Any, made: Callable[..., CachingHostAllocator]
) -> None:
    allocator = made(device=0)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = None if seed % 2 else streams[seed]
            for turn in range(60):
                # Within a bin too, so that blocks are pinned anew while others search.
                block = allocator.host_allocate(100 + 700 * (turn % 5), stream)
                block.array[:] = seed
                assert (block.array == seed).all()
                if turn % 3:
                    allocator.host_free(block)
        except BaseException as error:
            errors.append(error)

    streams = [lab.stream() for _ in range(6)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    lab.space.reap()
    assert figures(allocator)[1::2] == (0, 0)
    assert allocator.num_hits + allocator.num_misses == 360
    assert pins(lab) >= allocator.num_misses
    lab.run()
    allocator.free_all_cached()
    assert unpins(lab) == pins(lab)
