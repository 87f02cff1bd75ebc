"""CR5: the per-thread default stream is one number and as many streams as there are threads."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest

import streamflow as sf
from streamflow import memory
from streamflow.testing.contract.harness import pinned_view

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

NBYTES = 1 << 20
NUM_THREADS, NUM_ROUNDS = 8, 150


def _work(backend: Any, resource: Any, stream: Any, seed: int) -> None:
    """Blocks in use at the same time in many threads; each fills its own, and finds it so."""
    backend.set_current()
    numbers = random.Random(seed)
    host = backend.allocate_pinned_blocking(NBYTES)
    view = pinned_view(host, NBYTES)
    for turn in range(NUM_ROUNDS):
        nbytes = numbers.choice((NBYTES, NBYTES // 2, 4096))
        block = resource.allocate(nbytes, stream=stream)
        value = (seed * 37 + turn) % 256
        for _ in range(8):  # some time on the device, so that others come in between
            backend.fill(block.address, bytes([value ^ 0xFF]), nbytes, stream)
        backend.fill(block.address, bytes([value]), nbytes, stream)
        backend.copy_d2h(host, block.address, nbytes, stream)
        resource.deallocate(block, stream=stream)  # while all of it is still to run
        if turn % 3 == 0:
            stream.sync()
            np.testing.assert_array_equal(view[:nbytes], value)
    stream.sync()
    del view
    backend.free_pinned_blocking(host)


@pytest.mark.parametrize("name", ["pool", "arena", "fixed size", "async"])
def test_cr5_no_block_is_shared_across_threads(name: str) -> None:
    from cuda.core import PER_THREAD_DEFAULT_STREAM

    upstream = memory.CudaMemoryResource(device=0)
    resource = {
        "pool": lambda: memory.PoolMemoryResource(upstream, "4MiB", "12MiB"),
        "arena": lambda: memory.ArenaMemoryResource(upstream, "64MiB"),
        "fixed size": lambda: memory.FixedSizeMemoryResource(upstream, NBYTES, 4),
        "async": lambda: memory.CudaAsyncMemoryResource(device=0),
    }[name]()
    errors: list[BaseException] = []

    async def main() -> None:
        async with sf.Device(backend="cuda") as dev:
            backend = dev._core.backend

            def run(seed: int) -> None:
                try:
                    _work(backend, resource, PER_THREAD_DEFAULT_STREAM, seed)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=run, args=(n,)) for n in range(NUM_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            if name != "async":
                assert resource.info().live_nbytes == 0

    asyncio.run(main())
    assert not errors, errors[0]
