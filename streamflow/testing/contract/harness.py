"""What the contract's tests stand on: a way to open, to hold a stream, to wait, to tidy up."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from streamflow.backends.base import Access, Backend, KernelSpec, Parameter

__all__ = ["Harness", "Rig", "drain", "fidelity", "pinned_view", "settle"]

_Test = TypeVar("_Test", bound=Callable[..., None])

Bytes = npt.NDArray[np.uint8]

# Ends by itself after 20 s of device time: a test that fails inside a stall must not
# leave a GPU spinning.
_SPIN = KernelSpec(
    name="streamflow_contract_spin",
    parameters=(Parameter("flag", "int*", np.dtype(np.int32), Access.READ),),
    source="""
extern "C" __global__ void streamflow_contract_spin(volatile int* flag) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - start < 20000000000ull);
}
""",
)


def fidelity(test: _Test) -> _Test:
    """Make a test a row of the fidelity table; the first line of its docstring is what it shows."""
    test.is_fidelity_row = True  # type: ignore[attr-defined]
    return test


def drain(backend: Backend, event: Any) -> None:
    """Wait for ``event``: by moving a virtual clock, or by blocking."""
    if not backend.is_virtual:
        event.sync()
        return
    while not event.is_done:
        assert backend.advance(0), "the event is pending and nothing is left that can move"


def settle(backend: Backend) -> None:
    """Let a virtual clock run until nothing moves; real time needs no help."""
    while backend.advance(0):
        pass


def pinned_view(address: int, nbytes: int) -> Bytes:
    """Pinned memory as an array of bytes."""
    memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
    return np.frombuffer(memory, np.uint8)


class Rig:
    """One open device with a pool and a stream; gives back all it lent.

    Attributes
    ----------
    backend : Backend
    stream : Stream
    pool : object
        Keeps what it reserved, whatever is synchronised.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.stream = backend.create_stream()
        self.pool = backend.create_pool(release_threshold_nbytes=2**64 - 1)
        self._addresses: list[int] = []
        self._pinned: list[int] = []

    def empty(self, nbytes: int) -> int:
        """Device memory on the rig's stream, freed at the end."""
        address = self.backend.allocate(self.pool, nbytes, self.stream)
        self._addresses.append(address)
        return address

    def pinned(self, nbytes: int) -> tuple[int, Bytes]:
        """Pinned memory, freed at the end: its address and its bytes, all zero."""
        address = self.backend.allocate_pinned_blocking(nbytes)
        self._pinned.append(address)
        view = pinned_view(address, nbytes)
        view[:] = 0
        return address, view

    def put(self, data: Bytes) -> int:
        """Device memory that holds ``data`` already."""
        host, view = self.pinned(data.nbytes)
        view[:] = data
        address = self.empty(data.nbytes)
        self.backend.copy_h2d(address, host, data.nbytes, self.stream)
        self.finish()
        return address

    def get(self, address: int, nbytes: int) -> Bytes:
        """What device memory holds once the rig's stream has got this far."""
        host, view = self.pinned(nbytes)
        self.backend.copy_d2h(host, address, nbytes, self.stream)
        self.finish()
        return view.copy()

    def mark(self, stream: Any) -> Any:
        """An event recorded on ``stream`` now."""
        event = self.backend.create_event()
        stream.record(event)
        return event

    def finish(self, stream: Any = None) -> None:
        """Wait for everything submitted to a stream so far."""
        drain(self.backend, self.mark(self.stream if stream is None else stream))

    def close(self) -> None:
        backend = self.backend
        for address in self._addresses:
            backend.deallocate(address, self.stream)
        self.finish()
        for address in self._pinned:
            backend.free_pinned_blocking(address)
        backend.destroy_pool(self.pool)
        self.stream.close()
        backend.close()


class Harness:
    """Fixtures of every contract class."""

    def open(self, index: int = 0) -> Backend:
        """Open device ``index``. Devices opened by one test may depend on each other."""
        raise NotImplementedError("a contract's subclass says how its backend is opened")

    def apart(self, check: Callable[[Backend], None]) -> None:
        """Give ``check``, a module's function, a device that it may lose.

        Overridden where a lost device takes its process along.
        """
        check(self.open())

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        rig = Rig(self.open())
        yield rig
        rig.close()

    @contextmanager
    def stall(self, rig: Rig, stream: Any) -> Iterator[None]:
        """Hold what is submitted to ``stream`` inside the block until it ends.

        Uses the simulator's gate where there are controls, else a spinning kernel.
        Inside, call nothing that waits for the whole device: freeing pinned memory,
        loading kernels.
        """
        controls = rig.backend.controls()
        if controls is not None:
            gate = controls.gate(stream)
            try:
                yield
            finally:
                gate.release()
            return
        with self._spin(rig, stream):
            yield

    @contextmanager
    def running(self, rig: Rig, stream: Any) -> Iterator[None]:
        """Have a kernel run on ``stream`` until the block ends: it occupies the device.

        As for :meth:`stall`, call nothing inside that waits for the whole device.
        """
        backend, ended = rig.backend, threading.Event()
        if backend.controls() is None:
            with self._spin(rig, stream):
                yield
            return
        is_virtual = backend.is_virtual  # there it takes a second; nobody waits for it
        spec = KernelSpec(
            name="running",
            parameters=(),
            body=lambda: None if is_virtual else ended.wait(20),
            cost_s=lambda: 1.0 if is_virtual else 0.0,
        )
        config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        backend.launch(stream, config, backend.load_kernel_blocking(spec))
        try:
            yield
        finally:
            ended.set()

    @contextmanager
    def _spin(self, rig: Rig, stream: Any) -> Iterator[None]:
        backend = rig.backend
        kernel = backend.load_kernel_blocking(_SPIN)
        address, view = rig.pinned(4)
        flag = view.view(np.int32)
        config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        backend.launch(
            stream, config, kernel, backend.array_argument(address, (1,), np.dtype(np.int32))
        )
        try:
            yield
        finally:
            flag[0] = 1
