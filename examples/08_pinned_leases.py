"""Double buffering by hand: a file through the GPU and out again, by way of leased pinned memory.

``put`` and ``get`` take any array, and bring it through pinned memory of their own. Who *makes*
the bytes can spare that copy: lease pinned memory, and have the reader write into it. ``put``
then copies from there straight to the device, and ``get(out=)`` straight back.

- Two leases each way: while one block is copied and computed, the next is read, the last written.
- Ops on a lease are ordered like ops on a device array. The host is not: before it writes into a
  lease again it awaits ``array.staged`` (it has been read), before it reads one, the ``get``.
- A lease goes back when its ``async with`` block is left: at once, or when the ops on it have
  ended. Nobody else gets the memory before.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack

import numpy as np

import streamflow as sf

NUM_BLOCKS = 12
SIZE = 1 << 18  # float32s: 1 MiB a block


@sf.kernel("""extern "C" __global__
void gain(float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * factor + 1.0f;
}""")
def gain(x, factor, n):
    x[:n] = x[:n] * np.float32(factor) + np.float32(1)


class Slot:
    """Memory of a lease, and the op that must have ended before the host touches it again."""

    def __init__(self, lease):
        self.memory = lease.array(SIZE, np.float32)
        self.busy = None

    async def free(self):
        if self.busy is not None:
            await self.busy
        return self.memory


async def process(dev, source, sink):
    async with AsyncExitStack() as leases:
        slots = [
            Slot(await leases.enter_async_context(dev.pinned.lease(4 * SIZE))) for _ in range(4)
        ]
        into, back = slots[:2], slots[2:]
        for number in range(NUM_BLOCKS + 2):
            slot, out = into[number % 2], back[number % 2]
            result = await out.free()  # of two rounds ago
            if number >= 2:
                await dev.host(sink.write, result)
            if number < NUM_BLOCKS:
                memory = await slot.free()
                await dev.host(source.readinto, memory)  # files and GPUs work at the same time
                x = dev.put(memory)
                slot.busy = x.staged
                dev.launch(gain, x, 2.0, SIZE)
                out.busy = dev.get(x, out=out.memory)


async def main():
    data = np.arange(NUM_BLOCKS * SIZE, dtype=np.float32)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
        source.write(data)
        source.seek(0)
        async with sf.Device(0) as dev:
            for _ in range(2):  # the second time, the leases come from the cache
                source.seek(0)
                sink.seek(0)
                await process(dev, source, sink)
                stats = dev.pinned.stats()
                print(
                    f"{NUM_BLOCKS} blocks of {data.nbytes // NUM_BLOCKS >> 20} MiB through "
                    f"{stats.pinned_nbytes >> 20} MiB of pinned memory"
                )
            assert stats.pinned_nbytes == stats.cached_nbytes == 4 * 4 * SIZE
            print(f"given back: {await dev.pinned.trim() >> 20} MiB")
        sink.seek(0)
        assert np.array_equal(np.frombuffer(sink.read(), np.float32), data * 2 + 1)


asyncio.run(main())
