"""The device's default pool belongs to the whole process: nothing of ours changes it."""

from __future__ import annotations

import numpy as np
import pytest

from streamflow.backends.base import Backend
from streamflow.backends.memory import PoolAttribute


def found(backend: Backend) -> dict[PoolAttribute, int]:
    """Every attribute of the default pool, what it has in use included."""
    pool = backend.default_pool()
    return {attribute: backend.pool_attribute(pool, attribute) for attribute in PoolAttribute}


def test_c42_a_device_leaves_the_default_pool_as_found(run, open_device, saxpy):
    async def main():
        async with open_device() as watching:
            backend = watching._core.backend
            before, current = found(backend), backend.current_pool()
            async with open_device() as dev:
                assert found(backend) == before
                x, y = dev.put(np.ones(1 << 16, np.float32)), dev.zeros(1 << 16, np.float32)
                dev.launch(saxpy, 2.0, x, y, y.size)
                assert (await dev.get(y) == 2).all()
                x.free()
                await dev.synchronize()
                assert found(backend) == before
            assert found(backend) == before
            assert backend.current_pool() is current is backend.default_pool()

    run(main)


@pytest.mark.parametrize("attribute", list(PoolAttribute))
def test_c42_a_used_device_takes_nothing_from_the_default_pool(run, open_device, attribute):
    async def main():
        async with open_device() as dev:
            backend = dev._core.backend
            pool = backend.default_pool()
            before = backend.pool_attribute(pool, attribute)
            arrays = [dev.empty(1 << 20, np.uint8) for _ in range(4)]
            await dev.fill(arrays[0], 1)
            arrays.clear()
            await dev.synchronize()
            assert backend.pool_attribute(pool, attribute) == before

    run(main)
