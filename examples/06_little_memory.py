"""More tasks than memory: wait for it, bound it, and count what each task took.

``dev.empty`` raises where there is no memory; ``await dev.alloc`` waits for it, first come, first
served. Where the memory comes from is a *resource*: here a pool over the driver's own, under a
limit, with statistics on top. Each layer is one object, and an array's free passes through all.

``statistics.counters()`` counts for one task what that task's arrays take, whoever frees them.
"""

import asyncio

import numpy as np

import streamflow as sf
from streamflow import memory as mr

MIB = 1 << 20


@sf.kernel("""extern "C" __global__
void smooth(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 0.5f * (x[i] + x[i + 1 < n ? i + 1 : i]);
}""")
def smooth(x, y, n):
    y[:n] = 0.5 * (x[:n] + np.append(x[1:n], x[n - 1]))


async def request(dev, statistics, n, nbytes):
    """One request: its arrays are dropped when it returns, and the next one goes on."""
    with statistics.counters() as mine:
        size = nbytes // 4
        # Both at once: tasks that each hold one array and wait for another make a circle, and
        # one of them would be told so.
        x, y = (await dev.alloc(2 * size, np.float32)).split(2)
        dev.fill(x, n)
        dev.launch(smooth, x, y, size)
        first = float((await dev.get(y[:1]))[0])
    return first, mine.peak_bytes


async def main():
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), "16MiB", "64MiB")
    statistics = mr.StatisticsResourceAdaptor(mr.LimitingResourceAdaptor(pool, "48MiB"))
    async with sf.Device(0, memory=statistics) as dev:
        sizes = [(4 + 4 * (n % 3)) * MIB for n in range(12)]  # 192 MiB in all, two arrays each
        results = await asyncio.gather(
            *(request(dev, statistics, n, nbytes) for n, nbytes in enumerate(sizes))
        )
        for n, (first, peak) in enumerate(results):
            assert first == n
            assert peak <= 2 * sizes[n]
        counts = statistics.allocation_counts
        print(f"{counts.total_count} arrays, {counts.total_bytes / MIB:.0f} MiB in all")
        print(f"at most {counts.peak_bytes / MIB:.0f} MiB at a time, under the limit of 48")
        assert counts.peak_bytes <= 48 * MIB
        try:
            dev.empty(60 * MIB, np.uint8)  # doesn't wait
        except sf.OutOfDeviceMemory as error:
            print("no:", error.report.next_step)


asyncio.run(main())
