"""The demonstration: a picture streamed through a GPU in tiles, the copies under the kernels.

``streamflow demo`` runs it, and it is meant to be read. :func:`submit_tile` is all that happens to
one tile; nothing says how the ops of a tile, or of several, are ordered: their data does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

import streamflow as sf

__all__ = [
    "Outcome",
    "ink_whole",
    "largest_difference",
    "open_picture",
    "photograph",
    "process",
    "save_picture",
]

Pixels: TypeAlias = np.ndarray[Any, Any]  # rows x columns x RGB
Box: TypeAlias = tuple[slice, slice]

STRENGTH = 1 / 120  # an edge that Sobel gives 120, with grey levels up to 255, is black
HALO = 3  # pixels around a tile that its own depend on: two for the blur, one for the edges
ENLARGED = 4
NUM_GRAPH_TILES = 2  # a graph of more is hard to read


# -- what is done to a tile ------------------------------------------------------------


@sf.kernel(
    """extern "C" __global__
void blur(const unsigned char* source, float* blurred, int rows, int columns) {
    const int weights[5] = {1, 4, 6, 4, 1};
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * columns * 3) return;
    int row = i / 3 / columns, column = i / 3 % columns, channel = i % 3;
    int sum = 0;
    for (int y = 0; y < 5; ++y)
        for (int x = 0; x < 5; ++x)
            sum += weights[y] * weights[x]
                * source[((row + y) * (columns + 4) + column + x) * 3 + channel];
    blurred[i] = sum / 256.0f;
}""",
    access={"blurred": "write"},
)
def blur(source: Pixels, blurred: Pixels, rows: int, columns: int) -> None:
    """A 5x5 Gaussian; ``blurred`` is two pixels smaller on each side."""
    pixels = source.astype(np.float32)
    across = pixels[:, :-4] + pixels[:, 4:] + 6 * pixels[:, 2:-2]
    across += 4 * (pixels[:, 1:-3] + pixels[:, 3:-1])
    down = across[:-4] + across[4:] + 6 * across[2:-2] + 4 * (across[1:-3] + across[3:-1])
    blurred[:] = down / 256


@sf.kernel(
    """extern "C" __global__
void ink(const float* blurred, unsigned char* inked, float strength, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * columns) return;
    const float* corner = blurred + (i / columns * (columns + 2) + i % columns) * 3;
    float grey[3][3];
    for (int y = 0; y < 3; ++y)
        for (int x = 0; x < 3; ++x) {
            const float* rgb = corner + (y * (columns + 2) + x) * 3;
            grey[y][x] = (rgb[0] + 2.0f * rgb[1] + rgb[2]) / 4.0f;
        }
    float across = grey[0][2] + 2.0f * grey[1][2] + grey[2][2]
                 - grey[0][0] - 2.0f * grey[1][0] - grey[2][0];
    float down = grey[2][0] + 2.0f * grey[2][1] + grey[2][2]
               - grey[0][0] - 2.0f * grey[0][1] - grey[0][2];
    float light = fmaxf(0.0f, 1.0f - strength * sqrtf(across * across + down * down));
    const float* centre = corner + (columns + 2 + 1) * 3;
    for (int channel = 0; channel < 3; ++channel)
        inked[i * 3 + channel] = (unsigned char)(centre[channel] * light + 0.5f);
}""",
    access={"inked": "write"},
    options=["--fmad=false"],  # rounds as NumPy does: no fused multiply and add
)
def ink(blurred: Pixels, inked: Pixels, strength: float, rows: int, columns: int) -> None:
    """Darken edges, as Sobel finds them in the grey picture; one pixel smaller on each side."""
    grey = (blurred[:, :, 0] + 2 * blurred[:, :, 1] + blurred[:, :, 2]) / 4
    across = grey[:-2] + 2 * grey[1:-1] + grey[2:]
    down = grey[:, :-2] + 2 * grey[:, 1:-1] + grey[:, 2:]
    edges = np.sqrt((across[:, 2:] - across[:, :-2]) ** 2 + (down[2:] - down[:-2]) ** 2)
    light = np.maximum(0, 1 - np.float32(strength) * edges)
    inked[:] = blurred[1:-1, 1:-1] * light[:, :, np.newaxis] + np.float32(0.5)


def submit_tile(dev: sf.Device, source: Pixels) -> sf.Op[Pixels]:
    """Send one tile with its halo through the device; returns at once.

    The arrays are dropped here. Each is freed on the device behind its last use.
    """
    rows, columns = source.shape[0] - 2 * HALO, source.shape[1] - 2 * HALO
    tile = dev.put(source)
    blurred = dev.empty((rows + 2, columns + 2, 3), np.float32)
    inked = dev.empty((rows, columns, 3), np.uint8)
    dev.launch(blur, tile, blurred, rows + 2, columns + 2)
    dev.launch(ink, blurred, inked, STRENGTH, rows, columns)
    return dev.get(inked)


# -- a picture of many tiles -----------------------------------------------------------


async def stream_tiles(
    dev: sf.Device, padded: Pixels, boxes: Iterable[Box], *, depth: int
) -> AsyncIterator[tuple[Box, Pixels]]:
    """Yield every box with its pixels, in order; at most ``depth`` tiles are on their way."""
    window: deque[tuple[Box, sf.Op[Pixels]]] = deque()
    for rows, columns in boxes:
        if len(window) == depth:
            box, op = window.popleft()
            yield box, await op
        source = padded[rows.start : rows.stop + 2 * HALO, columns.start : columns.stop + 2 * HALO]
        window.append(((rows, columns), submit_tile(dev, source)))
    for box, op in window:
        yield box, await op


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run made, and how it went. ``graph`` is the trace of the first tiles."""

    picture: Pixels
    device_name: str
    backend: str
    why_simulated: str | None
    num_tiles: int
    host_s: float
    pool_nbytes: int
    trace: sf.Trace
    graph: sf.Trace


async def process(picture: Pixels, dev: sf.Device, *, tile: int, depth: int) -> Outcome:
    """Ink ``picture`` on ``dev``.

    Parameters
    ----------
    picture : ndarray of uint8, rows x columns x 3
    dev : Device
        Entered.
    tile : int
        Pixels along each side of a tile, without its halo.
    depth : int
        How many tiles may be on their way at once; bounds the memory.
    """
    padded = pad(picture)
    num_rows, num_columns, _ = picture.shape
    boxes = [
        (slice(top, min(top + tile, num_rows)), slice(left, min(left + tile, num_columns)))
        for top in range(0, num_rows, tile)
        for left in range(0, num_columns, tile)
    ]
    # The first tiles by themselves, for a graph that can be read. The kernels are compiled here.
    with dev.trace() as graph:
        async for _ in stream_tiles(dev, padded, boxes[:NUM_GRAPH_TILES], depth=depth):
            pass
        await dev.synchronize()

    result = np.empty_like(picture)
    start_s = time.perf_counter()
    with dev.trace() as trace, tqdm(total=len(boxes), unit="tile", disable=None) as bar:
        async for box, pixels in stream_tiles(dev, padded, boxes, depth=depth):
            result[box] = pixels
            bar.update()
        await dev.synchronize()  # the last frees too
    return Outcome(
        picture=result,
        device_name=dev.properties.name,
        backend=dev.backend,
        why_simulated=dev.why_simulated,
        num_tiles=len(boxes),
        host_s=time.perf_counter() - start_s,
        pool_nbytes=dev.memory.reserved_high_nbytes,
        trace=trace,
        graph=graph,
    )


def ink_whole(picture: Pixels) -> Pixels:
    """The same in plain NumPy, the whole picture at once."""
    rows, columns, _ = picture.shape
    blurred = np.empty((rows + 2, columns + 2, 3), np.float32)
    inked = np.empty_like(picture)
    blur(pad(picture), blurred, rows + 2, columns + 2)  # calling a kernel runs its NumPy body
    ink(blurred, inked, STRENGTH, rows, columns)
    return inked


def largest_difference(one: Pixels, other: Pixels) -> int:
    """Over all pixels and channels."""
    return int(np.abs(one.astype(np.int16) - other).max())


def pad(picture: Pixels) -> Pixels:
    """Repeat the outermost pixels, so that tiles at the border have a halo too."""
    return np.pad(picture, ((HALO, HALO), (HALO, HALO), (0, 0)), mode="edge")


# -- pictures --------------------------------------------------------------------------


def photograph() -> Pixels:
    """Eileen Collins, a NASA photograph that scikit-image's wheel carries; enlarged."""
    from skimage.data import astronaut  # here: --input doesn't need it

    image = Image.fromarray(astronaut())
    size = (image.width * ENLARGED, image.height * ENLARGED)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS))


def open_picture(path: Path) -> Pixels:
    """The picture in a file, upright, as RGB.

    Raises
    ------
    OSError
        The file can't be read, or is no picture.
    """
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def save_picture(picture: Pixels, path: Path) -> None:
    """Write the file; its ending chooses the format."""
    Image.fromarray(picture).save(path)
