"""Frees that wait for the uses before them, of the resources whose driver's own would not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamflow import memory
from streamflow.errors import DeviceLost, OutOfDeviceMemory
from streamflow.memory.leaf import DeferringMemoryResource

MAKERS: dict[str, tuple[type[Any], str]] = {
    "cuda": (memory.CudaMemoryResource, "free_linear_blocking"),
    "managed": (memory.ManagedMemoryResource, "free_linear_blocking"),
    "pinned": (memory.PinnedHostMemoryResource, "free_pinned_blocking"),
    "system": (memory.SystemMemoryResource, "free_system"),
}


@pytest.fixture(params=list(MAKERS))
def made(request: pytest.FixtureRequest, lab: Any) -> tuple[DeferringMemoryResource, str]:
    cls, verb = MAKERS[request.param]
    return cls(device=0), verb


def test_a_free_waits_for_the_uses_before_it_and_no_others(
    made: tuple[DeferringMemoryResource, str], lab: Any
) -> None:
    resource, verb = made
    stream, other = lab.stream(), lab.stream()
    block = resource.allocate(4096, stream=stream)
    gate = lab.hold(stream)
    lab.device.fill(block.address, b"\x07", 4096, stream)
    resource.deallocate(block, stream=stream)
    behind = lab.hold(stream)  # what comes after the free holds nothing up (R4)
    held = lab.hold(other)
    lab.run()
    resource.trim()
    assert lab.device.counts[verb] == 0
    assert resource.pending_nbytes == 4096
    gate.release()
    lab.run()
    resource.trim()
    assert lab.device.counts[verb] == 1
    assert resource.pending_nbytes == 0
    behind.release()
    held.release()


def test_a_slow_stream_holds_up_no_other_streams_memory(
    made: tuple[DeferringMemoryResource, str], lab: Any
) -> None:
    resource, verb = made
    slow, quick = lab.stream(), lab.stream()
    blocks = [resource.allocate(4096, stream=stream) for stream in (slow, quick)]
    gate = lab.hold(slow)
    for block, stream in zip(blocks, (slow, quick), strict=True):
        resource.deallocate(block, stream=stream)
    lab.run()
    resource.trim()
    assert lab.device.counts[verb] == 1
    assert resource.pending_nbytes == 4096
    gate.release()


def test_freed_memory_goes_back_at_a_later_call(
    made: tuple[DeferringMemoryResource, str], lab: Any
) -> None:
    resource, verb = made
    stream = lab.stream()
    first, second = (resource.allocate(4096, stream=stream) for _ in range(2))
    lab.device.fill(first.address, b"\x07", 4096, stream)
    resource.deallocate(first, stream=stream)
    assert lab.device.counts[verb] == 0
    lab.run()
    third = resource.allocate(4096, stream=stream)
    assert lab.device.counts[verb] == 1
    lab.device.fill(second.address, b"\x07", 4096, stream)
    resource.deallocate(second, stream=stream)
    lab.run()
    resource.deallocate(third, stream=stream)
    assert lab.device.counts[verb] >= 2
    lab.run()
    resource.trim()
    assert lab.device.counts[verb] == 3


def test_waiting_frees_are_not_lost_with_the_resource(
    made: tuple[DeferringMemoryResource, str], lab: Any
) -> None:
    resource, verb = made
    stream = lab.stream()
    gate = lab.hold(stream)
    resource.deallocate(resource.allocate(4096, stream=stream), stream=stream)
    del resource
    made = ()  # type: ignore[assignment]
    gc.collect()
    lab.space.reap()
    assert lab.device.counts[verb] == 0
    gate.release()
    lab.run()


def test_a_dropped_resource_gives_back_what_it_had(lab: Any) -> None:
    stream = lab.stream()
    before = lab.used()
    resource = memory.CudaMemoryResource(device=0)
    gate = lab.hold(stream)
    resource.deallocate(resource.allocate(1 << 20, stream=stream), stream=stream)
    resource.allocate(1 << 20, stream=stream)  # dropped
    del resource
    gc.collect()
    lab.space.reap()
    assert lab.used() == before + (2 << 20)
    gate.release()
    lab.run()
    lab.space.reap()
    lab.run()
    lab.space.reap()
    assert lab.used() == before
    assert not lab.space.dropped


def test_a_dropped_pool_is_destroyed(lab: Any) -> None:
    stream = lab.stream()
    before, num_pools = lab.used(), len(lab.device.gpu.pools)
    resource = memory.CudaAsyncMemoryResource(device=0)
    resource.allocate(1 << 20, stream=stream)  # dropped
    assert len(lab.device.gpu.pools) == num_pools + 1
    del resource
    gc.collect()
    lab.space.reap()
    lab.run()
    lab.space.reap()
    assert lab.used() == before
    assert not lab.space.dropped
    assert len([pool for pool in lab.device.gpu.pools if not pool.is_destroyed]) == num_pools


def test_out_of_memory_frees_what_may_go_before_it_gives_up(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab(memory_nbytes=64 << 20)
    resource = memory.CudaMemoryResource(device=0)
    stream = lab.stream()
    for _ in range(3):
        resource.deallocate(resource.allocate(40 << 20, stream=stream), stream=stream)
        lab.run()
    gate = lab.hold(stream)
    block = resource.allocate(40 << 20, stream=stream)
    lab.device.fill(block.address, b"\x07", 16, stream)
    resource.deallocate(block, stream=stream)
    with pytest.raises(OutOfDeviceMemory):
        resource.allocate(40 << 20, stream=stream)
    gate.release()
    lab.run()
    resource.deallocate(resource.allocate(40 << 20, stream=stream), stream=stream)


def test_on_a_real_clock_frees_run_on_another_thread(open_lab: Callable[..., Any]) -> None:
    lab = open_lab(clock="wall", memory_nbytes=64 << 20)
    resource = memory.CudaMemoryResource(device=0)
    threads: list[threading.Thread] = []
    free = lab.device.free_linear_blocking

    def watched(address: int) -> None:
        threads.append(threading.current_thread())
        free(address)

    lab.device.free_linear_blocking = watched
    stream = lab.stream()
    for _ in range(4):  # never more than one fits: each waits for the thread to give back
        block = resource.allocate(40 << 20, stream=stream)
        lab.device.fill(block.address, b"\x07", 16, stream)
        resource.deallocate(block, stream=stream)
        stream.sync()
    resource.trim()
    lab.space.wait_released_blocking()
    assert len(threads) == 4
    assert threading.current_thread() not in threads


def test_listeners_are_told_when_memory_came_back(lab: Any) -> None:
    told: list[int] = []
    lab.space.listeners.append(lambda: told.append(1))
    resource = memory.CudaMemoryResource(device=0)
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    lab.device.fill(block.address, b"\x07", 16, stream)
    resource.deallocate(block, stream=stream)
    told.clear()  # of the free as such, which is all that other resources need
    lab.run()
    resource.trim()
    assert told == [1]


def test_on_a_lost_device_frees_are_refused_and_closing_works(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab()
    resource = memory.CudaMemoryResource(device=0)
    stream = lab.stream()
    blocks = [resource.allocate(4096, stream=stream) for _ in range(3)]
    lab.device.fill(blocks[0].address, b"\x07", 16, stream)
    resource.deallocate(blocks[0], stream=stream)
    lab.device.fill(blocks[1].address + (1 << 40), b"\x07", 16, stream)
    lab.run()
    assert lab.device.controls().fault is not None
    resource.trim()  # says nothing: the ops do
    with pytest.raises(DeviceLost):
        resource.deallocate(blocks[1], stream=stream)
    with pytest.raises(DeviceLost):
        resource.allocate(4096, stream=stream)
    lab.close()


def test_a_block_dropped_after_its_stream_was_closed_waits_for_the_device(lab: Any) -> None:
    resource = memory.CudaMemoryResource(device=0)
    stream, other = lab.stream(), lab.stream()
    block = resource.allocate(4096, stream=stream)
    lab.device.fill(block.address, b"\x07", 4096, stream)
    gate = lab.hold(other)
    stream.close()
    del block
    gc.collect()
    resource.trim()  # a closed gate: the device can't be waited for
    assert lab.device.counts["free_linear_blocking"] == 0
    gate.release()
    resource.trim()
    lab.run()
    resource.trim()
    assert lab.device.counts["free_linear_blocking"] == 1
