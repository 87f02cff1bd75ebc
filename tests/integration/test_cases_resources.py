"""Field cases C16 and C17 with blocks of memory resources: dropped anywhere, in any order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from support import Opener

import streamflow as sf
from streamflow import memory

KINDS: dict[str, Callable[[], Any]] = {
    "async": memory.CudaAsyncMemoryResource,
    "cuda": memory.CudaMemoryResource,
    "pinned": memory.PinnedHostMemoryResource,
    "pool": lambda: memory.PoolMemoryResource(memory.CudaMemoryResource(), "1MiB"),
}
NBYTES = 1 << 16


@pytest.fixture(params=list(KINDS))
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return KINDS[request.param]


def used_nbytes(dev: sf.Device, resource: Any) -> int:
    """Bytes that the resource holds for the program, or still waits to give back."""
    if isinstance(resource, memory.CudaAsyncMemoryResource):
        return int(dev._core.backend.pool_info(resource.pool_handle()).used_nbytes)
    if isinstance(resource, memory.PoolMemoryResource):
        info = resource.info()
        return info.live_nbytes + info.pending_nbytes
    return sum(resource._live.values())


def fill(dev: sf.Device, block: memory.Block, stream: sf.Stream) -> None:
    """Work that uses the block, which the runtime knows nothing of."""
    dev._core.backend.fill(block.address, b"\x07", block.nbytes, stream.backend_stream)


class Cycle:
    def __init__(self, block: memory.Block) -> None:
        self.me = self
        self.block = block


@pytest.mark.parametrize("way", ["dropped", "in a cycle, by another thread", "stream closed"])
def test_c16_a_dropped_block_is_freed_after_its_uses(
    run: Any, open_device: Opener, make: Callable[[], Any], way: str
) -> None:
    async def main() -> None:
        async with open_device() as dev:
            resource = make()
            stream = dev.stream("S")
            warm = resource.allocate(NBYTES, stream=stream)
            resource.deallocate(warm, stream=stream)
            await stream.synchronize()
            resource.trim()
            block = resource.allocate(NBYTES, stream=stream)
            stall = open_device.stall(dev, stream, 0.05)
            fill(dev, block, stream)
            if way == "in a cycle, by another thread":
                node = Cycle(block)
                del block, node
                thread = threading.Thread(target=gc.collect)
                thread.start()
                thread.join()
            else:
                if way == "stream closed":
                    stream.close()
                del block
            assert used_nbytes(dev, resource) >= NBYTES  # a finaliser frees nothing (R12)
            stall.release()
            if way != "stream closed":
                # In the middle of the work: ordered on the stream, not waited for.
                resource.allocate(0, stream=stream)
                await stream.synchronize()
            for _ in range(3):
                resource.trim()
                dev._core.backend.synchronize_blocking()
                dev._core.space.wait_released_blocking()
            assert used_nbytes(dev, resource) == 0
            if dev.backend == "sim":
                assert dev.sim.races == ()

    run(main)


ORDERS = list(permutations(("resource", "stream", "device", "block")))


@pytest.mark.parametrize("closes", [False, True], ids=["drop", "close"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_c17_resource_stream_device_and_block_go_in_any_order(
    run: Any, open_device: Opener, order: tuple[str, ...], closes: bool
) -> None:
    async def main() -> None:
        for make in KINDS.values():
            await go(make)

    async def go(make: Callable[[], Any]) -> None:
        dev = open_device()
        await dev.__aenter__()
        backend, space = dev._core.backend, dev._core.space
        before = backend.memory_info()[0] if dev.backend == "sim" else None

        def allocate() -> dict[str, Any]:
            resource, stream = make(), dev.stream("S")
            block = resource.allocate(NBYTES, stream=stream)
            fill(dev, block, stream)
            return {"resource": resource, "stream": stream, "block": block}

        held = allocate()
        is_open = True
        for name in order:
            if name == "device":
                await dev.__aexit__(None, None, None)
                is_open = False
                continue
            thing = held.pop(name)
            if closes and name == "block":
                if is_open and "stream" in held and not held["stream"].is_closed:
                    thing.resource.deallocate(thing, stream=held["stream"])
                else:  # its stream or its device went before it, which says so
                    with pytest.raises((sf.Closed, ValueError)):
                        thing.resource.deallocate(thing, stream=thing.stream)
            elif closes and not (name == "stream" and not is_open):
                thing.close()
            del thing
            gc.collect()
            if is_open:
                space.reap()
                if name == order[-2]:  # all but the device: nothing may be left of it
                    for _ in range(3):
                        backend.synchronize_blocking()
                        gc.collect()
                        space.reap()
                        space.wait_released_blocking()
                    assert not space.dropped
                    assert before in (None, backend.memory_info()[0])
        assert not space.is_open
        assert not space.dropped
        assert not space.tenants

    run(main)
