"""Counters of a resource, and of each task, whatever the tasks do between each other's turns."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from upstreams import Ground, Upstream, simulated

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import Statistics, StatisticsResourceAdaptor


@pytest.fixture
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


@pytest.fixture
def stats(ground: Ground) -> StatisticsResourceAdaptor:
    return StatisticsResourceAdaptor(Upstream(device=0))


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    return lambda main: anyio.run(main, backend=request.param)


def test_it_counts_now_at_most_and_in_all(stats: StatisticsResourceAdaptor, ground: Ground) -> None:
    stream = ground.stream()
    one = stats.allocate(100, stream=stream)
    two = stats.allocate(50, stream=stream)
    stats.deallocate(one, stream=stream)
    three = stats.allocate(10, stream=stream)
    assert stats.allocation_counts == Statistics(
        current_bytes=60,
        current_count=2,
        peak_bytes=150,
        peak_count=2,
        total_bytes=160,
        total_count=3,
    )
    stats.deallocate(two, stream=stream)
    stats.deallocate(three, stream=stream)
    assert stats.allocation_counts == Statistics(0, 0, 150, 2, 160, 3)


def test_push_and_pop_nest_and_outer_ones_count_too(
    stats: StatisticsResourceAdaptor, ground: Ground
) -> None:
    stream = ground.stream()
    before = stats.allocate(1, stream=stream)
    assert stats.push_counters() == Statistics(1, 1, 1, 1, 1, 1)
    a = stats.allocate(10, stream=stream)
    assert stats.push_counters() == Statistics(10, 1, 10, 1, 10, 1)
    b = stats.allocate(100, stream=stream)
    stats.deallocate(before, stream=stream)  # of no frame here: only the resource's
    assert stats.allocation_counts == Statistics(100, 1, 100, 1, 100, 1)
    assert stats.pop_counters() == Statistics(100, 1, 100, 1, 100, 1)
    assert stats.allocation_counts == Statistics(110, 2, 110, 2, 110, 2)
    stats.deallocate(b, stream=stream)
    assert stats.pop_counters() == Statistics(10, 1, 110, 2, 110, 2)
    assert stats.allocation_counts == stats.resource_counts == Statistics(10, 1, 111, 3, 111, 3)
    with pytest.raises(IndexError, match="pushed no counters"):
        stats.pop_counters()
    del a


def test_a_block_of_code_has_counters_that_may_be_read_later(
    stats: StatisticsResourceAdaptor, ground: Ground
) -> None:
    stream = ground.stream()
    with stats.counters() as counters:
        block = stats.allocate(10, stream=stream)
        assert counters.current_bytes == 10
    stats.allocate(99, stream=stream)
    stats.deallocate(block, stream=stream)
    assert (counters.current_bytes, counters.peak_bytes, counters.total_count) == (0, 10, 1)


def test_the_whole_resource_counts_whatever_is_pushed(
    stats: StatisticsResourceAdaptor, ground: Ground
) -> None:
    stats.push_counters()
    block = stats.allocate(10, stream=ground.stream())
    assert stats.resource_counts.current_bytes == 10
    stats.pop_counters()
    del block


def test_two_adaptors_of_one_stack_keep_their_counters_apart(ground: Ground) -> None:
    stream = ground.stream()
    inner = StatisticsResourceAdaptor(Upstream(device=0))
    outer = StatisticsResourceAdaptor(inner)
    with outer.counters() as above, inner.counters() as below:
        one = outer.allocate(10, stream=stream)
        two = inner.allocate(5, stream=stream)
    assert (above.current_bytes, below.current_bytes) == (10, 15)
    with inner.counters(), pytest.raises(IndexError):
        outer.pop_counters()
    del one, two


def test_blocks_of_generators_may_end_in_any_order(
    stats: StatisticsResourceAdaptor, ground: Ground
) -> None:
    stream = ground.stream()
    counted = {}

    def counting(name: str) -> Iterator[None]:
        with stats.counters() as counted[name]:
            yield

    one, two = counting("one"), counting("two")
    next(one)
    next(two)
    one.close()
    stats.allocate(10, stream=stream)
    two.close()
    assert (counted["one"].total_bytes, counted["two"].total_bytes) == (0, 10)
    with pytest.raises(IndexError):
        stats.pop_counters()


def test_an_allocation_that_fails_is_not_counted(ground: Ground) -> None:
    stats = StatisticsResourceAdaptor(Upstream(fails_at={0}, device=0))
    with stats.counters() as counters, pytest.raises(OutOfDeviceMemory):
        stats.allocate(10, stream=ground.stream())
    assert counters.total_count == stats.resource_counts.total_count == 0


def test_tasks_that_take_turns_count_their_own(
    stats: StatisticsResourceAdaptor, ground: Ground, run: Callable[..., Any]
) -> None:
    popped: dict[int, list[Statistics]] = {}

    async def task(number: int) -> None:
        stream = ground.stream()
        size = 10**number
        found = popped[number] = []
        stats.push_counters()
        for _ in range(3):
            outer = stats.allocate(size, stream=stream)
            await anyio.lowlevel.checkpoint()
            stats.push_counters()
            for _ in range(number + 1):
                inner = stats.allocate(size, stream=stream)
                await anyio.lowlevel.checkpoint()
                stats.deallocate(inner, stream=stream)
                await anyio.lowlevel.checkpoint()
            found.append(stats.pop_counters())
            stats.deallocate(outer, stream=stream)
            await anyio.lowlevel.checkpoint()
        found.append(stats.pop_counters())

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(task, number)

    run(main)
    for number, found in popped.items():
        size, turns = 10**number, number + 1
        inner = Statistics(0, 0, size, 1, size * turns, turns)
        assert found[:3] == [inner] * 3
        assert found[3] == Statistics(0, 0, 2 * size, 2, 3 * size * (turns + 1), 3 * (turns + 1))
    assert stats.resource_counts.current_bytes == 0
    assert stats.resource_counts.total_count == sum(3 * (n + 2) for n in range(5))


def test_a_child_task_counts_for_its_parent_and_pushes_for_itself(
    stats: StatisticsResourceAdaptor, ground: Ground, run: Callable[..., Any]
) -> None:
    async def child() -> None:
        stream = ground.stream()
        stats.allocate(10, stream=stream)
        stats.push_counters()
        await anyio.lowlevel.checkpoint()
        stats.allocate(5, stream=stream)
        assert stats.pop_counters().total_bytes == 5

    async def stranger(may_go: anyio.Event) -> None:
        await may_go.wait()
        stats.allocate(1000, stream=ground.stream())

    async def main() -> None:
        may_go = anyio.Event()
        async with anyio.create_task_group() as outside:
            outside.start_soon(stranger, may_go)
            with stats.counters() as counters:
                async with anyio.create_task_group() as group:
                    group.start_soon(child)
                    group.start_soon(child)
                    may_go.set()
            assert counters.total_bytes == 30
            assert counters.total_count == 4

    run(main)


def test_a_child_that_takes_inherited_counters_off_does_so_for_itself(
    stats: StatisticsResourceAdaptor, ground: Ground, run: Callable[..., Any]
) -> None:
    async def child() -> None:
        stats.pop_counters()
        stats.allocate(10, stream=ground.stream())

    async def main() -> None:
        stats.push_counters()
        async with anyio.create_task_group() as group:
            group.start_soon(child)
        stats.allocate(1, stream=ground.stream())
        assert stats.pop_counters().total_bytes == 1

    run(main)


def test_a_free_is_counted_where_its_allocation_was(
    stats: StatisticsResourceAdaptor, ground: Ground, run: Callable[..., Any]
) -> None:
    """By another task with counters of its own, by a thread, and by the collector."""

    async def free(block: Any) -> None:
        with stats.counters() as counters:
            stats.deallocate(block, stream=ground.stream())
        assert counters.current_bytes == counters.total_bytes == 0

    async def main() -> None:
        stream = ground.stream()
        with stats.counters() as counters:
            blocks: list[Any] = [stats.allocate(10, stream=stream) for _ in range(3)]
        async with anyio.create_task_group() as group:
            group.start_soon(free, blocks.pop())
        assert counters.current_bytes == 20
        thread = threading.Thread(
            target=stats.deallocate, args=(blocks.pop(),), kwargs={"stream": stream}
        )
        thread.start()
        thread.join()
        assert counters.current_bytes == 10
        blocks.append(blocks)
        del blocks
        with stats.counters() as other:
            gc.collect()
            stats.trim()
        assert (other.current_bytes, other.current_count) == (0, 0)
        assert (counters.current_bytes, counters.current_count) == (0, 0)
        assert (counters.peak_bytes, counters.total_bytes) == (30, 30)

    run(main)


def test_tasks_do_not_keep_the_adaptor(ground: Ground) -> None:
    def use() -> None:
        stats = StatisticsResourceAdaptor(Upstream(device=0))
        stats.push_counters()
        gone.append(stats)

    gone: list[Any] = []
    context = contextvars.copy_context()
    context.run(use)
    stats = gone.pop()
    assert not any(stats in gc.get_referents(value) for value in context.values())


def test_threads_lose_no_count(stats: StatisticsResourceAdaptor, ground: Ground) -> None:
    def work() -> None:
        stream = ground.stream()
        with stats.counters() as counters:
            for _ in range(300):
                block = stats.allocate(3, stream=stream)
                stats.deallocate(block, stream=stream)
        assert (counters.total_count, counters.current_bytes) == (300, 0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = stats.resource_counts
    assert (counts.current_bytes, counts.current_count) == (0, 0)
    assert (counts.total_bytes, counts.total_count) == (7200, 2400)


def test_a_closed_device_leaves_nothing_allocated() -> None:
    stats = StatisticsResourceAdaptor(Upstream(), device=0)
    with stats.counters() as counters, simulated() as ground:
        block = stats.allocate(10, stream=ground.stream())
    assert (counters.current_bytes, counters.peak_bytes) == (0, 10)
    assert stats.resource_counts == Statistics(0, 0, 10, 1, 10, 1)
    del block
