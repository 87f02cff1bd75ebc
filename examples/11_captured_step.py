"""Record a step once, and launch it as often as you like: fewer calls, the same bytes.

A step of this simulation of heat in a plate is eight kernels of a few microseconds each. Submitted
one by one, their calls take longer than they do. Captured, a step is one launch, whatever is in
it. ``dev.captured`` does the same for a function that is called with arrays that come and go.
"""

import asyncio

import numpy as np

import streamflow as sf

ROWS, COLUMNS = 48, 64
NUM_STEPS = 100
SWEEPS = 4  # a step: so many there and back


@sf.kernel(
    """extern "C" __global__
void spread(const float* now, float* later, float rate, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * columns) return;
    int row = i / columns, column = i % columns;
    float up = now[row > 0 ? i - columns : i];
    float down = now[row < rows - 1 ? i + columns : i];
    float left = now[column > 0 ? i - 1 : i];
    float right = now[column < columns - 1 ? i + 1 : i];
    later[i] = now[i] + rate * ((up + down) + (left + right) - 4.0f * now[i]);
}""",
    access={"later": "write"},
)
def spread(now, later, rate, rows, columns):
    padded = np.pad(now, 1, mode="edge")
    around = (padded[:-2, 1:-1] + padded[2:, 1:-1]) + (padded[1:-1, :-2] + padded[1:-1, 2:])
    later[:] = now + np.float32(rate) * (around - np.float32(4) * now)


def step(dev, plate, other):
    """The same code, submitted or captured."""
    for _ in range(SWEEPS):
        dev.launch(spread, plate, other, 0.2, ROWS, COLUMNS)
        dev.launch(spread, other, plate, 0.2, ROWS, COLUMNS)


def hot_spot(row, column):
    plate = np.zeros((ROWS, COLUMNS), np.float32)
    plate[row, column] = 1000
    return plate


async def eager(dev, start):
    plate, other = dev.put(start), dev.empty(start.shape, np.float32)
    for _ in range(NUM_STEPS):
        step(dev, plate, other)
    return await dev.get(plate)


async def captured(dev, start):
    plate, other = dev.put(start), dev.empty(start.shape, np.float32)
    with dev.capture(name="step") as graph:  # nothing in here runs
        step(dev, plate, other)
    for _ in range(NUM_STEPS):
        graph.launch()  # an op: ordered after the put, and before the get below
    print(f"{graph}, launched {NUM_STEPS} times")
    return await dev.get(plate)


def smoothed(dev, plate):
    """For a pipeline: a plate in, a new one out."""
    out, other = dev.empty(plate.shape, np.float32), dev.empty(plate.shape, np.float32)
    dev.copy(out, plate)
    step(dev, out, other)
    return out


async def main():
    async with sf.Device(0) as dev:
        start = hot_spot(20, 30)
        one_by_one, replayed = await eager(dev, start), await captured(dev, start)
        assert one_by_one.tobytes() == replayed.tobytes()
        print(f"heat left in the middle: {replayed[20, 30]:.3f}, in all {replayed.sum():.0f}")

        spots = [hot_spot(row, 2 * row) for row in range(4, 28)]
        model = dev.captured(smoothed)  # recorded by the first plate, replayed for the others
        plates = [plate async for plate in dev.pipeline(spots).map(model)]
        print(
            f"{len(plates)} plates: {model.num_recordings} recording, {model.num_replays} replays"
        )
        for spot, plate in zip(spots, plates, strict=True):
            assert np.allclose(plate.sum(), 1000, rtol=1e-3)
            assert plate.argmax() == spot.argmax()


asyncio.run(main())
