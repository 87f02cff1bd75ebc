"""Frames of a camera, brightened on the GPU: the program under test."""

import numpy as np

import streamflow as sf

SHAPE = (128, 256)  # 128 KiB of float32: large enough to be staged, so not read at once


@sf.kernel("""extern "C" __global__
void brighten(float gain, float* pixels, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) pixels[i] = fminf(gain * pixels[i], 1.0f);
}""")
def brighten(gain, pixels, n):
    flat = pixels.reshape(-1)
    flat[:n] = np.minimum(np.float32(gain) * flat[:n], np.float32(1))


async def brighten_all(dev, camera, num_frames, gain=2.0):
    """Every frame, brightened. The camera fills one buffer again and again."""
    buffer = np.empty(SHAPE, np.float32)
    results = []
    for _ in range(num_frames):
        camera.read_into(buffer)
        x = dev.put(buffer)
        dev.launch(brighten, gain, x, x.size)
        results.append(dev.get(x))
        await x.staged  # from here on the buffer may change
    return await sf.gather(*results)


async def brighten_all_too_early(dev, camera, num_frames, gain=2.0):
    """The same with a race: the next frame may get into the copy of this one."""
    buffer = np.empty(SHAPE, np.float32)
    results = []
    for _ in range(num_frames):
        camera.read_into(buffer)
        x = dev.put(buffer)
        dev.launch(brighten, gain, x, x.size)
        results.append(dev.get(x))
    return await sf.gather(*results)


class TestPattern:
    """A camera for tests: frame ``k`` is ``k / 8`` everywhere."""

    __test__ = False

    def __init__(self):
        self.num_read = 0

    def read_into(self, buffer):
        buffer[...] = self.num_read / 8
        self.num_read += 1
