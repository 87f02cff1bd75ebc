"""Blocks of a caching host allocator in ops of the runtime: as they are, in order, and in time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import until, virtual, wanted

import streamflow as sf
from streamflow.memory import CachingHostAllocator
from streamflow.runtime import host_memory

NBYTES = 2 << 20


@pytest.fixture
def allocator() -> Iterator[CachingHostAllocator]:
    made = CachingHostAllocator(device=0)
    yield made
    assert made.live_blocks == ()


def copies(dev: sf.Device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What copies are handed to the driver from now on, and their bytes."""
    backend: Any = dev._core.backend
    made: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        copy = getattr(backend, name)

        def noted(to: int, at: int, nbytes: int, on: Any) -> None:
            made.append((name, nbytes))
            copy(to, at, nbytes, on)

        monkeypatch.setattr(backend, name, noted, raising=False)

    watch("copy_h2d")
    watch("copy_d2h")
    return made


def test_cr10_a_block_is_copied_from_and_to_as_it_is(run, open_device, allocator, monkeypatch):
    async def main():
        async with open_device(staging_in_nbytes=1 << 16, staging_out_nbytes=1 << 16) as dev:
            made = copies(dev, monkeypatch)
            block = allocator.host_allocate(NBYTES)
            block.array[:] = 5
            x = await dev.put(block.array)
            dev.fill(x, 6)
            await dev.get(x, out=block.array)
            assert (block.array == 6).all()
            assert made == [("copy_h2d", NBYTES), ("copy_d2h", NBYTES)]
            allocator.host_free(block)
            allocator.free_all_cached()

    run(main)


@pytest.mark.parametrize("nbytes", [4096, NBYTES])
@pytest.mark.parametrize("direction", ["put", "get"])
def test_flaw_02_a_block_is_not_reused_before_the_ops_on_it_have_ended(
    run, open_device, allocator, direction, nbytes
):
    async def main():
        async with open_device() as dev:
            stream = dev.stream("S")
            x = await dev.put(np.full(nbytes, 7, np.uint8))
            block = allocator.host_allocate(nbytes)
            block.array[:] = 5
            stall = open_device.stall(dev, stream)
            if direction == "put":
                op = dev.put(block.array, out=x, stream=stream).ready
            else:
                op = dev.get(x, out=block.array, stream=stream)
            allocator.host_free(block)
            other = allocator.host_allocate(nbytes)
            assert other.address != block.address
            other.array[:] = 9
            stall.release()
            await op
            assert (await dev.get(x) == (5 if direction == "put" else 7)).all()
            assert (other.array == 9).all()
            allocator.host_free(other)
            taken = [allocator.host_allocate(nbytes) for _ in range(2)]
            assert {one.address for one in taken} == {block.address, other.address}
            for one in taken:
                allocator.host_free(one)
            allocator.free_all_cached()
            assert allocator.pending_bytes == 0 or dev.backend == "cuda"

    run(main)


def test_flaw_02_an_op_that_is_parked_is_waited_for_too(run, open_device, allocator):
    async def main():
        async with open_device() as dev:
            may_go_on = threading.Event()
            block = allocator.host_allocate(NBYTES)
            block.array[:] = 5
            first = dev.host(may_go_on.wait, 10)
            x = dev.put(block.array, after=[first])
            wanted(x.ready)
            allocator.host_free(block)
            allocator.free_all_cached()
            assert allocator.pending_bytes == block.capacity_nbytes
            may_go_on.set()
            assert (await dev.get(x) == 5).all()
            allocator.free_all_cached()
            await until(lambda: allocator.pending_bytes == 0)

    run(main)


def test_r3_ops_on_one_block_are_ordered_among_each_other(run, open_device, allocator):
    async def main():
        async with open_device() as dev:
            one, two = dev.stream("one"), dev.stream("two")
            x, y = dev.full(NBYTES, 1, np.uint8), dev.zeros(NBYTES, np.uint8)
            block = allocator.host_allocate(NBYTES)
            memory = block.array
            memory[:] = 0
            stall = open_device.stall(dev, one)
            out = dev.get(x, out=memory, stream=one)
            back = dev.put(memory, out=y, stream=two)  # another stream, but the same block
            wanted(back.ready)
            stall.release()
            await out
            assert (await dev.get(y) == 1).all()
            del memory
            allocator.host_free(block)
            allocator.free_all_cached()

    run(main)


def test_a_view_of_a_block_that_was_freed_is_refused(run, allocator):
    async def main():
        async with virtual() as dev:
            block = allocator.host_allocate(NBYTES)
            view = block.array
            allocator.host_free(block)
            with pytest.raises(ValueError, match="released"):
                dev.put(view)
            with pytest.raises(ValueError, match="released"):
                dev.get(dev.zeros(NBYTES, np.uint8), out=view)
            again = allocator.host_allocate(NBYTES)
            assert again.address == block.address
            again.array[:] = 3
            assert (await dev.get(await dev.put(again.array)) == 3).all()
            allocator.host_free(again)
            allocator.free_all_cached()

    run(main)


def test_a_block_that_is_dropped_under_a_copy_lives_until_that_has_ended(run, open_device):
    async def main():
        async with open_device() as dev:
            allocator = CachingHostAllocator()
            stream = dev.stream("S")
            block = allocator.host_allocate(NBYTES)
            block.array[:] = 5
            stall = open_device.stall(dev, stream)
            x = dev.put(block.array, stream=stream)
            wanted(x.ready)
            del block
            other = allocator.host_allocate(NBYTES)
            other.array[:] = 9
            stall.release()
            assert (await dev.get(x) == 5).all()
            allocator.host_free(other)
            await dev.synchronize()
            allocator.free_all_cached()
            assert allocator.cached_bytes.live == 0

    run(main)


def test_r6_what_was_freed_outlives_its_device(allocator):
    async def main():
        async with virtual() as dev:
            block = allocator.host_allocate(NBYTES)
            block.array[:] = 5
            dev.put(block.array)
            allocator.host_free(block)  # nobody waits for the copy
        again = allocator._cache.cached()
        assert all(cell.is_ready() for cell in again)

    asyncio.run(main())
    allocator.free_all_cached()
    assert allocator.pending_bytes == 0


def test_r11_loops_of_two_threads_use_one_allocator(allocator):
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    async def main(value: int) -> None:
        async with sf.Device(0, backend="sim") as dev:
            start.wait(10)
            for _ in range(20):
                block = allocator.host_allocate(NBYTES)
                block.array[:] = value
                x = dev.put(block.array)
                allocator.host_free(block)
                assert (await dev.get(x) == value).all()

    def work(value: int) -> None:
        try:
            asyncio.run(main(value))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    allocator.free_all_cached()


def test_r6_what_a_device_left_behind_may_still_read_is_not_reused(run):
    allocator = CachingHostAllocator(device=0)
    blocks = []

    async def leaves_it_running():
        dev = virtual(close_timeout_s=0.02)
        await dev.__aenter__()
        stream = dev.stream()
        gate = dev.sim.gate(stream)
        block = allocator.host_allocate(NBYTES)
        blocks.append(block)
        dev.put(block.array, stream=stream)
        with pytest.raises(TimeoutError, match="did not end"):
            await dev.__aexit__(None, None, None)
        return dev._core.backend, gate

    async def goes_on():
        async with virtual() as dev:
            (block,) = blocks
            assert (await dev.get(await dev.put(block.array)) == 0).all()  # waits for no other loop
            allocator.host_free(block)
            other = allocator.host_allocate(NBYTES)
            assert other.address != block.address
            allocator.host_free(other)

    backend, gate = run(leaves_it_running)
    try:
        run(goes_on)
    finally:
        host_memory._in_flight.clear()
        gate.release()
        while backend.advance(0):
            pass
    allocator.free_all_cached()
    assert allocator.pending_bytes == NBYTES  # nobody knows that it has ended


@pytest.mark.parametrize("use", ["stream", "op", "parked op"])
def test_r6_what_was_freed_is_not_reused_once_its_device_was_left_while_another_is_open(run, use):
    async def main():
        async with virtual() as dev:
            allocator = CachingHostAllocator(device=dev)
            left = virtual(close_timeout_s=0.02)
            await left.__aenter__()
            stream = left.stream()
            gate, may_go = left.sim.gate(stream), threading.Event()
            block = allocator.host_allocate(NBYTES, stream if use == "stream" else None)
            if use == "stream":
                left.put(np.zeros(8), stream=stream)
            else:
                after = [left.host(may_go.wait, 20)] if use == "parked op" else []
                left.put(block.array, stream=stream, after=after)
            allocator.host_free(block)
            with pytest.raises(TimeoutError, match="did not end"):
                await left.__aexit__(None, None, None)
            other = allocator.host_allocate(NBYTES)
            assert other.address != block.address
            allocator.host_free(other)
            host_memory._in_flight.clear()
            may_go.set()
            gate.release()

    run(main)
