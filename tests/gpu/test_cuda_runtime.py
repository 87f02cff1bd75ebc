"""What only a GPU can show. Faults poison a process's context, so they run in children."""

import asyncio
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import streamflow as sf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]


def child(*body: str) -> subprocess.CompletedProcess[str]:
    """Run ``body`` inside ``async with sf.Device(backend="cuda") as dev`` in a new process."""
    program = (
        "import asyncio, sys, numpy as np, streamflow as sf\n"
        "async def main():\n"
        '    async with sf.Device(backend="cuda") as dev:\n'
        + textwrap.indent("\n".join(map(textwrap.dedent, body)), " " * 8)
        + "\nasyncio.run(main())\n"
    )
    return subprocess.run(
        # The programs keep their arrays as locals.
        [sys.executable, "-W", "error", "-W", "ignore:device:ResourceWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=80,
    )


WILD = """
wild = sf.Kernel.from_source(
    'extern "C" __global__ void wild(float* x, unsigned long long far) { x[far] = 1.f; }')
fine = sf.Kernel.from_source('extern "C" __global__ void fine(float* x) { x[0] += 1.f; }')
"""


def test_c2_a_fault_reaches_every_waiter_and_never_hangs():
    done = child(
        WILD,
        """
        x = dev.zeros(16, np.float32)
        await x
        a, b = dev.stream("a"), dev.stream("b")
        await dev.launch(fine, x, grid=1, block=1)
        bad = dev.launch(wild, x, 1 << 44, grid=1, block=1, stream=a, name="the-bad-one")
        behind = dev.launch(fine, x, grid=1, block=1, stream=b)
        kinds = []
        async def awaited(op):
            return await op
        for op in (bad, behind, a.record(), dev.get(x)):
            try:
                await asyncio.wait_for(awaited(op), 30)
            except sf.DeviceLost as error:
                kinds.append(error.suspects)
        assert len(kinds) == 4, kinds
        assert all("the-bad-one" in suspects for suspects in kinds), kinds
        assert not dev.is_healthy
        try:
            dev.zeros(3)
        except sf.DeviceLost:
            print("lost at once")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "lost at once"
    assert not done.stderr


def test_c22_a_bad_launch_shape_and_out_of_memory_are_not_sticky():
    async def main():
        async with sf.Device(backend="cuda") as dev:
            heavy = sf.Kernel.from_source(
                'extern "C" __global__ void heavy(float* x) '
                "{ extern __shared__ float s[]; s[threadIdx.x] = x[0]; x[0] = s[0]; }"
            )
            x = dev.zeros(4, np.float32)
            total = dev.properties.total_memory_nbytes
            with pytest.raises(sf.OutOfDeviceMemory, match=str(2 * total)):
                dev.empty(2 * total, np.uint8)
            with pytest.raises(ValueError, match="shared_bytes"):
                dev.launch(heavy, x, grid=1, block=32, shared_bytes=1 << 20)
            assert dev.is_healthy
            return await dev.get(dev.launch(heavy, x, grid=1, block=32, shared_bytes=128) and x)

    assert asyncio.run(main()).tolist() == [0, 0, 0, 0]


def test_source_that_does_not_compile_shows_the_compilers_log_with_the_line():
    broken = sf.Kernel.from_source(
        'extern "C" __global__ void broken(float* x) {\n  x[0] = nonsense;\n}'
    )

    async def main():
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(4, np.float32)
            op = dev.launch(broken, x)
            with pytest.raises(sf.CompileFailed, match="nonsense") as caught:
                await op
            assert "(2)" in caught.value.log
            with pytest.raises(sf.UpstreamFailed):
                await dev.get(x)
            with pytest.raises(sf.CompileFailed):
                await dev.launch(broken, dev.zeros(4, np.float32))
            return await dev.get(dev.full(4, 1.0))

    assert asyncio.run(main()).tolist() == [1, 1, 1, 1]


def test_a_compiled_image_runs_and_so_does_a_file(tmp_path):
    source = (
        'extern "C" __global__ void twice(float* x, int n) '
        "{ int i = threadIdx.x; if (i < n) x[i] *= 2; }"
    )
    path = tmp_path / "twice.cu"
    path.write_text(source)

    async def main():
        async with sf.Device(backend="cuda") as dev:
            from streamflow.backends.cuda.compiler import compile_cubin

            major, minor = dev.properties.compute_capability
            image = compile_cubin(
                source, "twice.cu", arch=f"sm_{major}{minor}", options=(), cache=None
            )
            x = dev.full(8, 3.0, np.float32)
            dev.launch(sf.Kernel.from_file(path), x, 8)
            dev.launch(sf.Kernel.from_module(image, "twice", "float* x, int n"), x, 8)
            return await dev.get(x)

    assert asyncio.run(main()).tolist() == [12] * 8


def test_overlap_on_the_gpu_is_reported_and_one_stream_has_none():
    n = 1 << 22
    busy = sf.Kernel.from_source(
        'extern "C" __global__ void busy(float* x, unsigned long long n) {'
        " for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;"
        " i < n; i += (unsigned long long)gridDim.x * blockDim.x)"
        " for (int k = 0; k < 60; ++k) x[i] = x[i] * 1.0001f + 0.5f; }"
    )

    async def main():
        async with sf.Device(backend="cuda") as dev:
            ratios = []
            for stream in (None, dev.stream("one")):
                # Pinned, resident sources: device copies only, nothing staged.
                blocks = [await dev.get(dev.zeros(n, np.float32)) for _ in range(3)]
                for _round in range(2):
                    with dev.trace() as trace:
                        ops = []
                        for _ in range(12):
                            x = dev.empty(n, np.float32, stream=stream)
                            dev.fill(x, 1.0, stream=stream)
                            dev.launch(busy, x, n, stream=stream)
                            ops.append(dev.get(x, stream=stream))
                            x.free()
                        for op in ops:
                            await op
                        del ops
                        await dev.synchronize()
                del blocks
                ratios.append(trace.overlap())
            return ratios

    lanes, one = asyncio.run(main())
    print("lanes:", lanes, "\none stream:", one, sep="\n")
    assert lanes.ratio > one.ratio
    assert one.ratio <= 0.05


def test_importing_and_opening_make_one_context():
    done = child("print(dev.backend, dev.properties.name)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cuda")
    assert not done.stderr
