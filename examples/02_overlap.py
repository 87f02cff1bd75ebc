"""Double buffering: the next block is copied in while this one is computed and the last copied out.

By hand that takes pinned memory, three streams and an event for each hand-over. Here copies in,
kernels and copies out go to lanes of their own, and the data say what waits for what. Two
things are left to decide:

- how many blocks may be on their way: a window of results, oldest first. It bounds the memory,
  since an array that is dropped is freed on the device, behind its last use;
- when a source may be written again: ``put`` reads it later if it is large, until
  ``await array.staged``.
"""

import asyncio
from collections import deque

import numpy as np

import streamflow as sf

NUM_BLOCKS = 12
SIZE = 1 << 20
DEPTH = 2


@sf.kernel("""extern "C" __global__
void logistic(float* x, int steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i];
    for (int step = 0; step < steps; ++step) value = 3.5f * value * (1.0f - value);
    x[i] = value;
}""")
def logistic(x, steps, n):
    for _ in range(steps):
        x[:n] = np.float32(3.5) * x[:n] * (1 - x[:n])


def fill(block, number):
    block[:] = np.linspace(0.1, 0.4, SIZE, dtype=np.float32) + np.float32(number / 100)


def check(result, number):
    expected = np.empty(SIZE, np.float32)
    fill(expected, number)
    logistic(expected, 8, SIZE)  # calling a kernel runs its reference body
    assert np.allclose(result, expected, atol=1e-4)


async def main():
    source = np.empty(SIZE, np.float32)  # one buffer, filled again and again
    results = []
    async with sf.Device(0) as dev:
        with dev.trace() as trace:
            window = deque()
            for number in range(NUM_BLOCKS):
                if len(window) == DEPTH:
                    results.append(await window.popleft())
                fill(source, number)
                x = dev.put(source)
                dev.launch(logistic, x, 8, SIZE)
                window.append(dev.get(x))
                await x.staged  # the source has been read: it may change now
                del x  # freed once the copy out has ended
            while window:
                results.append(await window.popleft())
            await dev.synchronize()  # the frees too, for the trace
        pool = dev.memory.snapshot()
    for number, result in enumerate(results):
        check(result, number)
    print(trace.overlap())
    print(
        f"{NUM_BLOCKS} blocks of {source.nbytes >> 20} MiB through a pool that grew to "
        f"{pool.reserved_high_nbytes >> 20} MiB"
    )
    assert pool.used_high_nbytes <= (DEPTH + 1) * source.nbytes


asyncio.run(main())
