"""One array on both sides: copied when a side is used, and only if the other one is newer.

``m.host()`` and ``m.device()`` say which side a block uses, and whether it writes. ``m.push()``
and ``m.pull()`` copy ahead of time. Leaving a block that writes on the device waits for nothing:
the next read on the host comes after its kernels.
"""

import asyncio

import numpy as np

import streamflow as sf


@sf.kernel("""extern "C" __global__
void relax(float* x, float target, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 0.5f * (target - x[i]);
}""")
def relax(x, target, n):
    x[:n] += np.float32(0.5) * (np.float32(target) - x[:n])


async def watch(m, seen):
    """A reader on the host: takes turns with whoever writes."""
    while len(seen) < 3:
        async with m.host() as a:
            seen.append(float(a.mean()))
        await asyncio.sleep(0)


async def main():
    async with sf.Device(0) as dev:
        n = 1 << 18
        m = sf.SyncedArray(dev, n, np.float32)
        async with m.host(write="all") as a:  # nothing to copy, nothing to zero
            a[:] = 16
        await m.push()  # not needed, but now the first kernel finds it there
        print(m.state.value, "pinned" if m.host_is_pinned else "pageable")

        seen = []
        watching = asyncio.create_task(watch(m, seen))
        for _ in range(4):
            async with m.device(write=True) as d:
                dev.launch(relax, d, 0.0, d.size)
            await asyncio.sleep(0)
        await watching
        assert seen == sorted(seen, reverse=True)  # each as some kernel has left it
        async with m.host() as a:
            print("mean", a.mean())
            assert (a == 1).all()

        async with m.device(write=True) as d:
            kept = d
            dev.fill(d, 7)
        try:
            dev.fill(kept, 8)
        except sf.Closed as error:
            print("no:", error)

        total = np.zeros(n, np.float32)  # memory of the program's own, as the host side
        m.adopt(total, discard=True)
        async with m.device(write=True) as d:
            dev.launch(relax, d, 2.0, d.size)
        await m.pull()
        assert (total == 1).all()
        m.close()


asyncio.run(main())
