"""Feed a training loop from a file that is larger than the pinned memory it goes through.

A pipeline that ends with ``.on_device()`` is a data loader: while one batch is computed, the next
ones are read from the file and copied in. At most ``depth`` batches are on the device. A batch
gives its place up once the loop has come back for the next one *and* the kernels submitted on it
have ended, so the loop submits a step and goes on; it waits for no kernel.

The file is memory-mapped: what a batch is cut out of is read when that batch is copied.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import streamflow as sf

NUM_ROWS, NUM_FEATURES = 1 << 18, 15  # and a target in each row: 16 MiB
BATCH = 1 << 14  # rows: 1 MiB
NUM_EPOCHS = 4
RATE = 0.5
PINNED_BUDGET = 4 << 20


@sf.kernel("""extern "C" __global__
void residuals(const float* rows, const float* weights, float* errors, int num, int features) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= num) return;
    const float* x = rows + (size_t)row * (features + 1);
    float error = -x[features];
    for (int i = 0; i < features; ++i) error += x[i] * weights[i];
    errors[row] = error;
}""")
def residuals(rows, weights, errors, num, features):
    errors[:num] = rows[:num, :features] @ weights - rows[:num, features]


@sf.kernel("""extern "C" __global__
void descend(const float* rows, const float* errors, float* weights, float rate, int num,
             int features) {
    __shared__ float sums[256];
    float sum = 0.0f;  // one block for each feature
    for (int row = threadIdx.x; row < num; row += blockDim.x)
        sum += rows[(size_t)row * (features + 1) + blockIdx.x] * errors[row];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) weights[blockIdx.x] -= rate / num * sums[0];
}""")
def descend(rows, errors, weights, rate, num, features):
    weights -= np.float32(rate / num) * (errors[:num] @ rows[:num, :features])


def write_file(path):
    """Rows of features and their target, a weighted sum with some noise. Returns the weights."""
    random = np.random.default_rng(9)
    weights = random.uniform(-1, 1, NUM_FEATURES).astype(np.float32)
    table = np.lib.format.open_memmap(path, "w+", np.float32, (NUM_ROWS, NUM_FEATURES + 1))
    for start in range(0, NUM_ROWS, BATCH):
        rows = random.standard_normal((BATCH, NUM_FEATURES + 1), np.float32)
        rows[:, -1] = rows[:, :-1] @ weights + np.float32(0.1) * rows[:, -1]
        table[start : start + BATCH] = rows
    table.flush()
    return weights


async def train(dev, table):
    weights = dev.zeros(NUM_FEATURES, np.float32)
    errors = dev.empty(BATCH, np.float32)
    loader = dev.pipeline(table, batch_size=BATCH, depth=3).on_device()
    for epoch in range(NUM_EPOCHS):
        async for rows in loader:
            num = rows.shape[0]
            dev.launch(residuals, rows, weights, errors, num, NUM_FEATURES)
            dev.launch(
                descend, rows, errors, weights, RATE, num, NUM_FEATURES,
                grid=NUM_FEATURES, block=256,
            )  # fmt: skip
        mean = float(np.square(await dev.get(errors)).mean())
        print(f"epoch {epoch}: mean square error of its last batch {mean:.4f}")
    print(loader.stats())
    return await dev.get(weights)


async def main():
    settings = sf.Settings.from_environment(pinned_budget_nbytes=PINNED_BUDGET)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        expected = write_file(path)
        table = np.load(path, mmap_mode="r")
        async with sf.Device(0, settings=settings) as dev:
            found = await train(dev, table)
            assert table.nbytes >= 4 * PINNED_BUDGET
            assert dev.pinned.stats().pinned_nbytes <= PINNED_BUDGET
            peak = dev.memory.snapshot().used_high_nbytes
        del table  # some systems keep a mapped file from being deleted
    print(f"{NUM_EPOCHS} times 16 MiB through {peak / (1 << 20):.1f} MiB of device memory")
    assert np.allclose(found, expected, atol=0.01)
    assert peak < 6 << 20  # three batches, the weights and the errors


asyncio.run(main())
