"""A kernel of your own: source, what it writes, its geometry, and what is said when one is wrong.

``sf.kernel`` decorates a body. ``Kernel.from_source`` takes the parts one by one, for a source
with several kernels or one that is read from elsewhere. The signature is read from the source:

- ``const T*`` is read, ``T*`` is read and written. ``access={"out": "write"}`` says that a
  kernel overwrites all of ``out`` and never reads it, so nothing earlier in it matters;
- scalars are checked and converted, arrays must have the right type;
- without ``grid=`` there is one thread for each element of the largest array. A kernel with a
  shape of its own is given ``grid=`` and ``block=``, as in CUDA.

Mistakes are found at the call, before anything is submitted.
"""

import asyncio

import numpy as np

import streamflow as sf

SOURCE = """
#define SIDE 16

extern "C" __global__
void transpose(const float* in, float* out, int rows, int columns) {
    __shared__ float tile[SIDE][SIDE + 1];
    int column = blockIdx.x * SIDE + threadIdx.x, row = blockIdx.y * SIDE + threadIdx.y;
    if (row < rows && column < columns)
        tile[threadIdx.y][threadIdx.x] = in[row * columns + column];
    __syncthreads();
    int out_column = blockIdx.y * SIDE + threadIdx.x, out_row = blockIdx.x * SIDE + threadIdx.y;
    if (out_row < columns && out_column < rows)
        out[out_row * rows + out_column] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__
void negate(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = -x[i];
}
"""


def transpose_in_numpy(source, out, rows, columns):  # parameters correspond by position
    out[:] = source.T


def negate_in_numpy(x, n):
    x[:] = -x


transpose = sf.Kernel.from_source(
    SOURCE, name="transpose", body=transpose_in_numpy, access={"out": "write"}
)
negate = sf.Kernel.from_source(SOURCE, name="negate", body=negate_in_numpy)


def show(what, error):
    print(f"{what}\n    {type(error).__name__}: {error}")


async def main():
    rows, columns = 300, 500
    matrix = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    block = (16, 16)
    grid = (-(-columns // 16), -(-rows // 16))

    async with sf.Device(0) as dev:
        x = dev.put(matrix)
        out = dev.empty((columns, rows), np.float32)
        dev.launch(transpose, x, out, rows, columns, grid=grid, block=block)
        dev.launch(negate, out, out.size)  # the default geometry

        try:
            dev.launch(negate, dev.put(np.arange(8)), 8)
        except TypeError as error:
            show("an array of another type:", error)
        try:
            dev.launch(negate, matrix, matrix.size)
        except TypeError as error:
            show("an array that is not on the device:", error)
        try:
            dev.launch(negate, out, 2**40)
        except OverflowError as error:
            show("a number that the parameter cannot hold:", error)
        try:
            dev.launch(transpose, x, out, rows, columns, grid=grid, block=(64, 64))
        except ValueError as error:
            show("more threads than a block may have:", error)
        try:
            sf.Kernel.from_source(SOURCE, name="negate", access={"y": "write"})
        except ValueError as error:
            show("a parameter that is not there:", error)

        result = await dev.get(out)  # none of it was submitted, and the device is well
        assert dev.is_healthy
    assert np.array_equal(result, -matrix.T)
    print(result.shape)


asyncio.run(main())
