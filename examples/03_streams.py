"""Explicit streams, for order that the data do not show.

Lanes promise data order only. A stream that you ask for also keeps program order: what is given
to it runs in the order given. Between streams the data still decide, so most programs need no
event at all. Where two pieces of work share no array and yet must not run in any order:

- ``stream.record()`` is an op at this point of the stream: it ends with what came before it;
- ``other.wait_for(op)`` makes ``other`` go on only then. The host goes on at once.
"""

import asyncio

import numpy as np

import streamflow as sf


@sf.kernel("""extern "C" __global__
void add(float* x, float amount, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += amount;
}""")
def add(x, amount, n):
    x[:n] += np.float32(amount)


@sf.kernel("""extern "C" __global__
void scale(float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}""")
def scale(x, factor, n):
    x[:n] *= np.float32(factor)


async def main():
    n = 1 << 16
    async with sf.Device(0) as dev:
        bulk = dev.stream("bulk")
        urgent = dev.stream("urgent", priority=-1)  # lower is more urgent
        with dev.trace() as trace:
            with bulk:  # the current stream of this task: what is submitted inside goes there
                x = dev.zeros(n, np.float32)
                dev.launch(add, x, 3.0, n)
                first_step = bulk.record()
                dev.launch(scale, x, 2.0, n)

            # Other data, so nothing would hold it back: it is to start after the first step,
            # and need not wait for the second.
            urgent.wait_for(first_step)
            y = dev.zeros(n, np.float32, stream=urgent)
            dev.launch(add, y, 1.0, n, stream=urgent)

            # This one needs no wait_for: it uses x, so it comes after what was done to x.
            dev.launch(scale, x, 10.0, n, stream=urgent)

            await first_step  # done, whatever was queued behind it
            results = await sf.gather(dev.get(x), dev.get(y))
            await urgent.synchronize()

    print(results[0][0], results[1][0])
    assert np.all(results[0] == 60)
    assert np.all(results[1] == 1)
    names = {op.id: f"{op.name} on {op.stream}" for op in trace.ops}
    crossings = [edge for edge in trace.edges if edge.issued]  # device-side waits that were made
    for edge in crossings:
        print(f"{names[edge.dst]} waits for {names[edge.src]}: {edge.reason.value}")
    assert any(edge.reason is sf.EdgeReason.AFTER for edge in crossings)


asyncio.run(main())
