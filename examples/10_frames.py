"""Frames from image files through a GPU filter and into image files again.

Decoding and encoding are host work: ``map_host`` runs them on worker threads, several frames at
a time, while other frames are copied and filtered. An item may be any bundle: here a named tuple
of a file's name, which passes through untouched, and its pixels, which ``map`` finds on the device.

At most ``depth`` frames are between their file and the end of their copy out, so the memory does
not grow with the film. ``run`` drives it all and tells how many items came out.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import streamflow as sf

# needs: PIL
# needs: tqdm

NUM_FRAMES = 16
ROWS, COLUMNS = 180, 240


class Frame(NamedTuple):
    name: str
    pixels: np.ndarray | sf.DeviceArray


@sf.kernel(
    """extern "C" __global__
void outline(const unsigned char* x, unsigned char* y, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * columns) return;
    int row = i / columns, column = i % columns;
    int right = x[row * columns + min(column + 1, columns - 1)];
    int below = x[min(row + 1, rows - 1) * columns + column];
    y[i] = min(255, 2 * (abs(right - x[i]) + abs(below - x[i])));
}""",
    access={"y": "write"},
)
def outline(x, y, rows, columns):
    grey = x.astype(np.int32)
    right = np.abs(np.append(grey[:, 1:], grey[:, -1:], axis=1) - grey)
    below = np.abs(np.append(grey[1:], grey[-1:], axis=0) - grey)
    y[:] = np.minimum(255, 2 * (right + below))


def draw_film(folder):
    """A disc that rolls from left to right, one PNG for each frame."""
    y, x = np.mgrid[:ROWS, :COLUMNS]
    for number in range(NUM_FRAMES):
        distance = np.hypot(x - 20 - 12 * number, y - ROWS / 2)
        pixels = np.clip(255 - 4 * distance, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"frame_{number:03}.png")


def decode(path):
    with Image.open(path) as image:
        return Frame(path.name, np.asarray(image.convert("L")))


def filtered(dev, frame):
    outlined = dev.empty(frame.pixels.shape, np.uint8)
    dev.launch(outline, frame.pixels, outlined, *frame.pixels.shape)
    return frame._replace(pixels=outlined)


async def process(dev, source, target):
    def encode(frame):
        Image.fromarray(frame.pixels).save(target / frame.name)
        return frame.name

    done = []
    pipeline = (
        dev.pipeline(sorted(source.glob("*.png")), depth=4, progress={"disable": None})
        .map_host(decode, workers=2)
        .map(filtered)
        .to_host()
        .map_host(encode, workers=2)
    )
    assert await pipeline.run(done.append) == NUM_FRAMES
    print(pipeline.stats())
    return done


def check(source, target, names):
    """Against the same filter in NumPy."""
    assert names == [f"frame_{number:03}.png" for number in range(NUM_FRAMES)]
    for name in names:
        pixels = decode(source / name).pixels
        expected = np.empty_like(pixels)
        outline(pixels, expected, *pixels.shape)
        assert np.array_equal(decode(target / name).pixels, expected), name


async def main():
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "film", Path(folder) / "outlined"
        source.mkdir()
        target.mkdir()
        draw_film(source)
        async with sf.Device(0) as dev:
            names = await process(dev, source, target)
            assert dev.memory.snapshot().used_high_nbytes < 10 * ROWS * COLUMNS  # of 32 arrays
        check(source, target, names)
        print(f"{len(names)} frames written")


asyncio.run(main())
