"""A limit is exact: no moment above it, and no byte lost to errors, threads or closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from upstreams import Ground, Upstream, simulated

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import LimitingResourceAdaptor


@pytest.fixture
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


def test_it_refuses_what_would_exceed_the_limit_and_says_the_figures(ground: Ground) -> None:
    stream = ground.stream()
    limited = LimitingResourceAdaptor(Upstream(), "1KiB", device=0)
    blocks = [limited.allocate(200, stream=stream) for _ in range(4)]
    with pytest.raises(OutOfDeviceMemory, match=r"1024 of the limit of 1024 bytes.*allocation_l"):
        limited.allocate(1, stream=stream)
    limited.deallocate(blocks.pop(), stream=stream)
    assert limited.get_allocated_bytes() == 768
    limited.allocate(256, stream=stream)
    assert limited.get_allocated_bytes() == limited.get_allocation_limit() == 1024


def test_an_upstream_that_raises_costs_nothing(ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(fails_at={0, 1, 2})
    limited = LimitingResourceAdaptor(upstream, 512, device=0)
    for error in (OutOfDeviceMemory, RuntimeError, KeyboardInterrupt):
        upstream.error = error
        with pytest.raises(error):
            limited.allocate(512, stream=stream)
        assert limited.get_allocated_bytes() == 0
    limited.allocate(512, stream=stream)


def test_what_the_upstream_fails_to_free_counts_until_it_is_free(ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream()
    limited = LimitingResourceAdaptor(upstream, 512, device=0)
    block = limited.allocate(512, stream=stream)
    upstream.num_refusals = 1
    with pytest.raises(MemoryError):
        limited.deallocate(block, stream=stream)
    assert limited.get_allocated_bytes() == upstream.used_nbytes == 512
    limited.trim()
    assert limited.get_allocated_bytes() == upstream.used_nbytes == 0


def test_no_moment_is_above_the_limit_and_no_byte_is_lost_with_8_threads(ground: Ground) -> None:
    limit = 8 * 1024
    upstream = Upstream(fails_at=range(5, 4000, 7))
    limited = LimitingResourceAdaptor(upstream, limit, device=0)
    streams = [ground.stream() for _ in range(8)]
    start = threading.Barrier(8)
    num_refused = [0] * 8
    problems: list[BaseException] = []

    def work(number: int) -> None:
        held = []
        start.wait()
        try:
            for turn in range(300):
                try:
                    held.append(limited.allocate(256 * (turn % 5 + 1), stream=streams[number]))
                except OutOfDeviceMemory:
                    num_refused[number] += 1
                if held and turn % 3:
                    limited.deallocate(held.pop(0), stream=streams[number])
            for block in held:
                limited.deallocate(block, stream=streams[number])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert sum(num_refused) > 0
    assert upstream.high_nbytes <= limit  # sizes are multiples of 256: the same count
    assert limited.get_allocated_bytes() == upstream.used_nbytes == 0


def test_bytes_on_their_way_count_too(ground: Ground) -> None:
    """Two threads inside of the upstream at once: the second one sees the first's bytes."""
    inside, go_on = threading.Event(), threading.Event()
    seen: list[BaseException] = []

    class Slow(Upstream):
        def _take(self, nbytes, alignment, place):  # type: ignore[no-untyped-def]
            inside.set()
            go_on.wait(20)
            return super()._take(nbytes, alignment, place)

    limited = LimitingResourceAdaptor(Slow(), 512, device=0)
    stream, other = ground.stream(), ground.stream()
    first = threading.Thread(target=limited.allocate, args=(512,), kwargs={"stream": stream})
    first.start()
    assert inside.wait(20)
    try:
        limited.allocate(1, stream=other)
    except OutOfDeviceMemory as error:
        seen.append(error)
    go_on.set()
    first.join()
    assert seen


def test_those_who_wait_for_memory_are_told_of_a_free(ground: Ground) -> None:
    told: list[int] = []
    stream = ground.stream()
    limited = LimitingResourceAdaptor(Upstream(), 512, device=0)
    block = limited.allocate(512, stream=stream)
    ground.space.listeners.append(lambda: told.append(limited.get_allocated_bytes()))
    limited.deallocate(block, stream=stream)
    assert told == [0]  # when the bytes no longer count


def test_a_closed_device_gives_the_bytes_back() -> None:
    limited = LimitingResourceAdaptor(Upstream(), 512, device=0)
    with simulated() as ground:
        block = limited.allocate(512, stream=ground.stream())
    with simulated() as ground:
        limited.allocate(512, stream=ground.stream())
        assert limited.get_allocated_bytes() == 512
        del block
    assert limited.get_allocated_bytes() == 0


def test_a_device_that_closes_in_the_middle_of_a_free_is_counted_once() -> None:
    class Closing(Upstream):
        def _give(self, piece, place):  # type: ignore[no-untyped-def]
            limited._on_space_closing()

    with simulated() as ground:
        stream = ground.stream()
        limited = LimitingResourceAdaptor(Closing(), 512, device=0)
        block = limited.allocate(512, stream=stream)
        limited.deallocate(block, stream=stream)
        assert limited.get_allocated_bytes() == 0


@pytest.mark.parametrize("bad", [-1, True, 1.5, None])
def test_a_limit_is_a_number_of_bytes(bad: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        LimitingResourceAdaptor(Upstream(), bad)  # type: ignore[arg-type]


def test_a_limit_of_nothing_lets_only_nothing_through(ground: Ground) -> None:
    stream = ground.stream()
    limited = LimitingResourceAdaptor(Upstream(), 0, device=0)
    assert limited.allocate(0, stream=stream).address == 0
    with pytest.raises(OutOfDeviceMemory):
        limited.allocate(1, stream=stream)
