"""CR3: polling leaves no error behind that another library would take for its own."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from support import turns

import streamflow as sf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

STALL_S = 0.2


def last_errors() -> list[object]:
    """What a library's check of the last error finds: look first, then take it."""
    from cuda.bindings import runtime

    found: list[object] = [*runtime.cudaPeekAtLastError(), *runtime.cudaGetLastError()]
    return found


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_cr3_a_query_that_is_not_ready_leaves_no_last_error(loop):
    async def main():
        async with sf.Device(0, backend="cuda") as dev:
            spin = sf.Kernel.from_source(
                'extern "C" __global__ void spin(double seconds) {'
                " long long start, now;"
                ' asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));'
                ' do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }'
                " while (now - start < (long long)(seconds * 1e9)); }"
            )
            stream, x = dev.stream(), dev.zeros(4, np.float32)
            await x
            assert set(map(int, last_errors())) == {0}
            op = dev.launch(spin, STALL_S, grid=1, block=1, stream=stream)
            before = dev.stats().num_queries
            looked = []

            async def look():
                while op._state.value != "done":
                    if dev.stats().num_queries > before and not op.done():
                        looked.extend(map(int, last_errors()))
                    await turns(1)

            async with anyio.create_task_group() as group:
                group.start_soon(look)
                await op
            assert looked  # it was asked, and was not ready
            assert set(looked) == {0}
            # Nor do an op that is refused, or a pool that is full.
            with pytest.raises(sf.OutOfDeviceMemory):
                dev.empty(2 * dev.properties.total_memory_nbytes, np.uint8)
            assert set(map(int, last_errors())) == {0}
            assert dev.is_healthy

    anyio.run(main, backend=loop)
