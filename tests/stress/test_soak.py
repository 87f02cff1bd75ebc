"""A long random program over streams and lanes equals the same program done in NumPy (R2 to R7)."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from random import Random
from typing import Any

import numpy as np
import pytest

import streamflow as sf

NUM_OPS = 20_000
NUM_ARRAYS = 12
NUM_RESULTS_WAITING = 64
SIZES = (48, 1000, 20_000)  # int32s: the last is more than 64 KiB, so it is staged


def cost_s(*args: Any) -> float:
    return 1e-6 * (1 + int(args[-1]) % 7)


@sf.kernel(
    """extern "C" __global__ void mix(const int* x, int* y, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 3 * y[i] + x[i] + c;
}""",
    cost=cost_s,
)
def mix(x, y, c):
    y[:] = 3 * y + x + c


@sf.kernel(
    """extern "C" __global__ void step(int* x, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = 5 * x[i] + c;
}""",
    cost=cost_s,
)
def step(x, c):
    x[:] = 5 * x + c


class Soak:
    """Does each thing twice: on the device, whenever that comes to it, and on the model now."""

    def __init__(self, dev: sf.Device, random: Random) -> None:
        self.dev = dev
        self.random = random
        self.streams = [dev.stream(f"s{i}", priority=-i) for i in range(4)]
        self.pairs: list[tuple[sf.DeviceArray, np.ndarray]] = []
        self.results: deque[tuple[sf.Op[Any], np.ndarray]] = deque()
        self.recent: deque[sf.Op[Any]] = deque(maxlen=8)
        self.num_compared = 0

    def where(self) -> dict[str, Any]:
        """A stream or a lane, and now and then an edge that the data don't show."""
        options: dict[str, Any] = {}
        if self.random.random() < 0.5:
            options["stream"] = self.random.choice(self.streams)
        if self.recent and self.random.random() < 0.2:
            options["after"] = (self.random.choice(self.recent),)
        return options

    def pick(self) -> tuple[sf.DeviceArray, np.ndarray]:
        """An array or one of three parts of it, with the model of just that."""
        array, model = self.random.choice(self.pairs)
        if self.random.random() < 0.4:
            part = self.random.randrange(3)
            return array.split(3)[part], np.array_split(model, 3)[part]
        return array, model

    def numbers(self, num: int) -> np.ndarray:
        return np.arange(num, dtype=np.int32) * 7 + self.random.randrange(1000)

    def new(self) -> None:
        data = self.numbers(self.random.choice(SIZES))
        self.pairs.append((self.dev.put(data.copy(), **self.where()), data))

    def drop(self) -> None:
        array, _ = self.pairs.pop(self.random.randrange(len(self.pairs)))
        if self.random.random() < 0.5:
            array.free()  # else: dropped here, and freed by the finaliser

    def step(self) -> None:
        array, model = self.pick()
        c = self.random.randrange(100)
        self.recent.append(self.dev.launch(step, array, c, **self.where()))
        model[...] = 5 * model + c

    def mix_or_copy(self) -> None:
        x, x_model = self.pick()
        y, y_model = self.pick()
        if x.size != y.size or np.shares_memory(x_model, y_model):
            self.step()
        elif self.random.random() < 0.7:
            c = self.random.randrange(100)
            self.recent.append(self.dev.launch(mix, x, y, c, **self.where()))
            y_model[...] = 3 * y_model + x_model + c
        else:
            self.recent.append(self.dev.copy(y, x, **self.where()))
            y_model[...] = x_model

    def fill(self) -> None:
        array, model = self.pick()
        value = self.random.randrange(1000)
        self.recent.append(self.dev.fill(array, value, stream=self.where().get("stream")))
        model[...] = value

    def put(self) -> None:
        array, model = self.pick()
        model[...] = self.numbers(len(model))
        self.recent.append(self.dev.copy(array, model.copy(), **self.where()))

    def get(self) -> None:
        array, model = self.pick()
        out = np.empty(array.shape, np.int32) if self.random.random() < 0.3 else None
        self.results.append((self.dev.get(array, out=out, **self.where()), model.copy()))

    async def compare(self, num_left: int) -> None:
        """Await results, oldest first, until that many are left."""
        while len(self.results) > num_left:
            op, expected = self.results.popleft()
            np.testing.assert_array_equal(await op, expected)
            self.num_compared += 1

    async def run(self, num_ops: int) -> None:
        kinds = [self.step] * 6 + [self.mix_or_copy] * 6 + [self.fill, self.put, self.get, self.get]
        for _ in range(num_ops):
            if len(self.pairs) < NUM_ARRAYS:
                self.new()
            elif self.random.random() < 0.03:
                self.drop()
            else:
                self.random.choice(kinds)()
            await self.compare(NUM_RESULTS_WAITING)
        for array, model in self.pairs:
            self.results.append((self.dev.get(array), model))
        await self.compare(0)

    async def finish(self) -> None:
        self.pairs.clear()
        self.recent.clear()
        for stream in self.streams:
            stream.close()
        gc.collect()
        await self.dev.synchronize()


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_thousand_random_ops_equal_a_serial_model(seed: int, clock: str) -> None:
    settings = sf.Settings(
        sim_clock=clock,
        seed=seed,
        window=32,
        staging_in_nbytes=65536,
        staging_out_nbytes=65536,
        sim_memory_nbytes=64 << 20,
    )

    async def main() -> None:
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            soak = Soak(dev, Random(seed))
            await soak.run(NUM_OPS)
            assert soak.num_compared > NUM_OPS // 10
            await soak.finish()
            assert dev.live() == {}
            assert dev.memory.used_nbytes == 0
            assert dev.sim.counters["would_block"] == 0
            stats = dev.stats()
            assert stats.num_submitted == stats.num_finished > NUM_OPS

    asyncio.run(main())
