"""A short check of one device: which backend, which device, and whether data survive the trip."""

from __future__ import annotations

from typing import Any

import numpy as np

import streamflow as sf

__all__ = ["Finding", "examine"]

Finding = dict[str, Any]

_NUM = 1 << 16

_DOUBLED = sf.Kernel.from_source(
    """extern "C" __global__ void doubled(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}""",
    body=lambda x, y, n: np.multiply(x[:n], np.float32(2), out=y[:n]),
    access={"y": "write"},
)


async def examine(backend: str, settings: sf.Settings) -> Finding:
    """Open device 0, send an array through a kernel, and compare what comes back.

    Parameters
    ----------
    backend : str
        As ``Device`` takes it.
    settings : Settings
        Of the device.

    Returns
    -------
    dict
        ``backend``, ``why_simulated``, ``device``, ``memory_nbytes`` and ``is_right``.

    Raises
    ------
    StreamflowError
        The device cannot be opened, or the trip failed.
    """
    source = np.arange(_NUM, dtype=np.float32)
    async with sf.Device(0, backend=backend, settings=settings) as dev:
        x, y = dev.put(source), dev.empty(_NUM, np.float32)
        dev.launch(_DOUBLED, x, y, _NUM)
        result = await dev.get(y)
        return {
            "backend": dev.backend,
            "why_simulated": dev.why_simulated,
            "device": dev.properties.name,
            "memory_nbytes": dev.properties.total_memory_nbytes,
            "is_right": bool(np.array_equal(result, 2 * source)),
        }
