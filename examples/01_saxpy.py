"""The first program: two arrays, one kernel, one result.

Nothing here waits but the last line. ``put``, ``zeros`` and ``launch`` submit work and return
at once; the kernel comes after the copy and after the zeros because it uses both arrays, not
because of where they stand. ``await`` gives the result when the device has it, and leaves the
event loop free until then.

Run it with STREAMFLOW_BACKEND=sim, or =cuda; without, a GPU is used if there is one.
"""

import asyncio

import numpy as np

import streamflow as sf


@sf.kernel("""extern "C" __global__
void saxpy(float a, const float* x, float* y, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}""")
def saxpy(a, x, y, n):  # the reference body: what the kernel means, in NumPy
    y[:n] += np.float32(a) * x[:n]


async def main():
    async with sf.Device(0) as dev:
        x = dev.put(np.arange(1 << 20, dtype=np.float32))  # to the device, through pinned staging
        y = dev.zeros(1 << 20, np.float32)  # a stream-ordered allocation
        dev.launch(saxpy, 2.0, x, y, y.size)  # ordered after both, wherever they were made
        result = await dev.get(y)  # back again, as an ndarray
    print(result[:4])
    assert np.array_equal(result, 2 * np.arange(1 << 20, dtype=np.float32))


asyncio.run(main())
