"""A program that uses all of the runtime at once, and the event log of a run of it (R15).

As a script it prints the log: ``python logged_program.py LOOP SEED SCHEDULE``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import anyio
import numpy as np

import streamflow as sf
from streamflow.testing.trio_order import seeded_trio

LOOPS = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}
BIG = 100_000  # float32s: staged, in several chunks


@sf.kernel(
    """extern "C" __global__ void mix(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = 2 * y[i] + x[i];
    }"""
)
def mix(x, y, n):
    y[:n] = 2 * y[:n] + x[:n]


async def work(dev: sf.Device) -> None:
    """Several tasks, lanes and streams, staging both ways, host tasks, scopes, frees."""

    async def one(number: int) -> None:
        async with dev.scope(limit="2MiB", name=f"task {number}"):
            source = np.full(BIG, number, np.float32)
            arrays = [dev.put(source), dev.full(BIG, 1.0, np.float32)]
            stream = dev.stream(f"s{number}", priority=-number)
            small = dev.put(source[:64])
            for step in range(4):
                dev.launch(mix, arrays[step % 2], arrays[1 - step % 2], BIG)
                dev.launch(mix, small, small, 64, stream=stream)
            total = dev.host(np.sum, arrays[0])
            await sf.gather(total, dev.get(small), dev.get(arrays[1]))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(one, number)
    await dev.synchronize()


def event_log(loop: str, seed: int, schedule: str = "") -> list[tuple[object, ...]]:
    """What the device has done, in order, with the times."""
    settings = sf.Settings(
        staging_threads=2,
        staging_in_nbytes=65536,
        staging_out_nbytes=65536,
        sim=sf.SimOptions(clock="virtual", seed=seed, schedule=schedule),
    )

    async def main() -> list[tuple[object, ...]]:
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            with dev.sim.log() as log:
                await work(dev)
            return list(log)

    with seeded_trio(0) if loop == "trio" else nullcontext():
        return anyio.run(main, **LOOPS[loop])


if __name__ == "__main__":
    for entry in event_log(sys.argv[1], int(sys.argv[2]), sys.argv[3]):
        print(*entry)
