"""A virtual simulated device per test, closed at the end, and a few helpers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access, KernelSpec, Parameter
from streamflow.backends.sim import host_memory, open_device
from streamflow.backends.sim.device import SimDevice
from streamflow.config import Settings, SimOptions


class Lab:
    """A device with one pool, and shortcuts for what tests do over and over."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.config = device.launch_config((1, 1, 1), (32, 1, 1), 0)
        self.pool = device.create_pool(release_threshold_nbytes=1 << 62)
        self.log: list[object] = []
        self._pinned: list[int] = []

    def run(self) -> int:
        """Let the virtual clock run dry; the number of completions."""
        num = 0
        while self.device.advance(0):
            num += 1
        return num

    def stream(self, **options: Any) -> Any:
        return self.device.create_stream(**options)

    def kernel(self, body: Callable[..., object], access: str = "", **options: Any) -> Any:
        """A kernel; ``access`` has one letter per parameter: r, w, x (both) or s (scalar)."""
        table = {"r": Access.READ, "w": Access.WRITE, "x": Access.READ_WRITE, "s": None}
        parameters = tuple(
            Parameter(f"p{i}", "float*", np.dtype(np.float32), table[letter])
            for i, letter in enumerate(access)
        )
        options.setdefault("name", getattr(body, "__name__", "kernel"))
        return self.device.load_kernel(
            KernelSpec(parameters=parameters, source="", body=body, **options)
        )

    def launch(
        self, stream: Any, body: Callable[..., object], access: str = "", *args: Any, **options: Any
    ) -> None:
        self.device.launch(stream, self.config, self.kernel(body, access, **options), *args)

    def mark(self, stream: Any, what: object, **options: Any) -> None:
        """Launch a kernel that appends ``what`` to ``log``."""
        self.launch(stream, lambda: self.log.append(what), name=str(what), **options)

    def record(self, stream: Any, **options: Any) -> Any:
        return stream.record(self.device.create_event(**options))

    def allocate(self, stream: Any, nbytes: int) -> int:
        return self.device.allocate(self.pool, nbytes, stream)

    def host(self, nbytes: int) -> tuple[int, np.ndarray[Any, Any]]:
        """Pinned bytes: address and array."""
        address = self.device.allocate_pinned_blocking(nbytes)
        self._pinned.append(address)
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return address, np.frombuffer(buffer, np.uint8)

    def view(self, address: int, shape: Any, dtype: Any = np.float32) -> Any:
        shape = shape if isinstance(shape, tuple) else (shape,)
        return self.device.array_argument(address, shape, np.dtype(dtype))

    def read(self, address: int, nbytes: int, stream: Any) -> bytes:
        """Copy device memory out on ``stream`` and run the machine dry."""
        host, array = self.host(nbytes)
        self.device.copy_d2h(host, address, nbytes, stream)
        self.run()
        return array.tobytes()

    def close(self) -> None:
        self.device.close()
        for address in self._pinned:
            host_memory.free(address)


@pytest.fixture
def settings() -> Settings:
    return Settings(backend="sim", sim=SimOptions(clock="virtual", memory_nbytes=1 << 30))


@pytest.fixture
def open_lab(settings: Settings) -> Iterator[Callable[..., Lab]]:
    """Open labs: ``open_lab(index=0, key="loop", **settings)``; all are closed at the end."""
    labs: list[Lab] = []
    num_before = host_memory.num_blocks()

    def open_one(index: int = 0, key: object = "loop", **changes: Any) -> Lab:
        options = SimOptions(**{"clock": "virtual", "memory_nbytes": 1 << 30, **changes})
        labs.append(Lab(open_device(index, Settings(backend="sim", sim=options), key)))
        return labs[-1]

    yield open_one
    for lab in labs:
        lab.close()
    assert host_memory.num_blocks() == num_before


@pytest.fixture
def lab(open_lab: Callable[..., Lab]) -> Lab:
    return open_lab()
