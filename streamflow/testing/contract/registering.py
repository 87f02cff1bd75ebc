"""Page-locking memory that the program allocated itself."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from streamflow.backends.memory import MemoryKind
from streamflow.errors import DeviceError
from streamflow.testing.contract.harness import Harness, Rig, fidelity
from streamflow.testing.contract.kernels import AXPY
from streamflow.testing.contract.kinds import refused

__all__ = ["RegisterContract"]

_MIB = 1 << 20
_F32 = np.dtype(np.float32)

Bytes = npt.NDArray[np.uint8]


def _own(nbytes: int, value: int = 0) -> Bytes:
    """Memory of the program's, at the beginning of a page."""
    own = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    own[:] = value
    return own


def _at(array: Bytes) -> int:
    return int(array.ctypes.data)


@contextmanager
def _registered(rig: Rig, array: Bytes, is_read_only: bool = False) -> Iterator[int]:
    rig.backend.register_host_blocking(_at(array), array.nbytes, is_read_only)
    try:
        yield _at(array)
    finally:
        rig.finish()
        rig.backend.unregister_host_blocking(_at(array))


class RegisterContract(Harness):
    """Registering, unregistering, and where a device sees page-locked memory."""

    @fidelity
    @pytest.mark.parametrize("offset", [0, 1, 100])
    def test_copies_read_and_write_registered_memory(self, rig: Rig, offset: int) -> None:
        """Copies read and write memory of the program's own once it is registered, in any part."""
        own, nbytes = _own(_MIB, 7), _MIB - 200
        with _registered(rig, own) as address:
            there = rig.empty(nbytes)
            rig.backend.copy_h2d(there, address + offset, nbytes, rig.stream)
            assert (rig.get(there, nbytes) == 7).all()
            rig.backend.fill(there, b"\x09", nbytes, rig.stream)
            rig.backend.copy_d2h(address + offset, there, nbytes, rig.stream)
            rig.finish()
            expected = np.full(_MIB, 7, np.uint8)
            expected[offset : offset + nbytes] = 9
            np.testing.assert_array_equal(own, expected)

    @fidelity
    def test_copies_from_registered_memory_return_at_once(self, rig: Rig) -> None:
        """A copy from registered memory returns at once and reads it when it runs."""
        own = _own(_MIB)
        there = rig.empty(_MIB)
        rig.finish()
        with _registered(rig, own) as address:
            with self.stall(rig, rig.stream):
                own[:] = 1
                rig.backend.copy_h2d(there, address, _MIB, rig.stream)
                own[:] = 2
            assert (rig.get(there, _MIB) == 2).all()

    @fidelity
    @pytest.mark.parametrize("part", ["all of it", "its end", "its middle", "more than it"])
    def test_memory_is_registered_once(self, rig: Rig, part: str) -> None:
        """Memory that is registered already, in whole or in part, is refused, and stays so."""
        own = _own(4 * _MIB, 3)
        middle = own[_MIB : 3 * _MIB]
        again = {
            "all of it": middle,
            "its end": own[2 * _MIB :],
            "its middle": own[_MIB + 65536 : 2 * _MIB],
            "more than it": own,
        }[part]
        backend = rig.backend
        with _registered(rig, middle) as address:
            refused(
                backend,
                lambda: backend.register_host_blocking(_at(again), again.nbytes, False),
                DeviceError,
            )
            there = rig.empty(2 * _MIB)
            backend.copy_h2d(there, address, 2 * _MIB, rig.stream)
            assert (rig.get(there, 2 * _MIB) == 3).all()
        with _registered(rig, again):  # the refusal has left nothing behind
            pass

    @fidelity
    def test_two_ranges_may_share_a_page(self, rig: Rig) -> None:
        """Ranges that share a page, but no byte, are registered and unregistered apart."""
        own = _own(4096, 6)
        low, high = own[:1000], own[1000:3000]
        there = rig.empty(4096)
        with _registered(rig, low) as address:
            with _registered(rig, high) as other:
                rig.backend.copy_h2d(there + 1000, other, high.nbytes, rig.stream)
            rig.backend.copy_h2d(there, address, low.nbytes, rig.stream)
            assert (rig.get(there, 3000) == 6).all()

    @fidelity
    def test_memory_can_be_registered_again_and_again(self, rig: Rig) -> None:
        """Memory that was unregistered can be registered again."""
        own = _own(_MIB)
        there = rig.empty(_MIB)
        for value in (1, 2, 3):
            with _registered(rig, own) as address:
                own[:] = value
                rig.backend.copy_h2d(there, address, _MIB, rig.stream)
                assert (rig.get(there, _MIB) == value).all()

    @fidelity
    @pytest.mark.parametrize("mistake", ["never registered", "twice", "inside"])
    def test_only_what_was_registered_is_unregistered(self, rig: Rig, mistake: str) -> None:
        """Unregistering takes the address that was registered, once: else an error, not sticky."""
        own, backend = _own(_MIB, 5), rig.backend
        calls: dict[str, Callable[[], None]] = {
            "never registered": lambda: backend.unregister_host_blocking(_at(own)),
            "twice": lambda: backend.unregister_host_blocking(_at(own)),
            "inside": lambda: backend.unregister_host_blocking(_at(own) + 65536),
        }
        if mistake == "twice":
            with _registered(rig, own):
                pass
        if mistake == "inside":
            backend.register_host_blocking(_at(own), _MIB, False)
        refused(backend, calls[mistake], DeviceError)
        if mistake == "inside":
            backend.unregister_host_blocking(_at(own))
        assert (rig.get(rig.put(own), _MIB) == 5).all()

    @fidelity
    def test_the_driver_knows_registered_memory(self, rig: Rig) -> None:
        """An address says that it was registered, and that it isn't any more."""
        own, backend = _own(_MIB), rig.backend
        with _registered(rig, own) as address:
            found = backend.pointer_attributes(address + 5)
            assert found.kind is MemoryKind.HOST
            assert found.is_host_accessible
        assert backend.pointer_attributes(_at(own)).kind is MemoryKind.UNREGISTERED

    @fidelity
    @pytest.mark.parametrize("kind", ["registered", "pinned"])
    def test_kernels_reach_page_locked_memory_where_they_see_it(self, rig: Rig, kind: str) -> None:
        """Kernels read and write page-locked memory at the address where the device sees it."""
        backend, num = rig.backend, 1024
        own = _own(_MIB) if kind == "registered" else rig.pinned(_MIB)[1]
        if kind == "registered":
            backend.register_host_blocking(_at(own), own.nbytes, False)
        values = own[: 4 * num].view(np.float32)
        values[:] = np.arange(num)
        seen = backend.map_pinned(_at(own), 4 * num)
        axpy = backend.load_kernel_blocking(AXPY)
        array = backend.array_argument(seen, (num,), _F32)
        config = backend.launch_config((num // 256, 1, 1), (256, 1, 1), 0)
        backend.launch(rig.stream, config, axpy, array, np.float32(2), array, num)
        rig.finish()
        np.testing.assert_array_equal(values, 3 * np.arange(num, dtype=np.float32))
        backend.unmap_pinned(seen)
        if kind == "registered":
            backend.unregister_host_blocking(_at(own))

    @fidelity
    def test_a_copy_out_of_mapped_memory_waits_for_nothing(self, rig: Rig) -> None:
        """Copies between mapped and pinned memory return at once (R1)."""
        backend = rig.backend
        (host, view), (back, result) = rig.pinned(_MIB), rig.pinned(_MIB)
        view[:] = 6
        seen = backend.map_pinned(host, _MIB)
        with self.stall(rig, rig.stream):
            held = rig.mark(rig.stream)
            backend.copy_d2h(back, seen, _MIB, rig.stream)
            assert not held.is_done
        rig.finish()
        assert (result == 6).all()
        backend.unmap_pinned(seen)

    @fidelity
    def test_pageable_memory_has_no_place_on_a_device(self, rig: Rig) -> None:
        """Where the device sees memory that isn't page-locked is an error, and not sticky."""
        own, backend = _own(_MIB, 4), rig.backend
        refused(backend, lambda: backend.map_pinned(_at(own), _MIB), DeviceError)
        assert (rig.get(rig.put(own), _MIB) == 4).all()

    @fidelity
    def test_memory_mapped_for_reading_is_a_source(self, rig: Rig, tmp_path: Path) -> None:
        """Memory that the host only reads is a source of copies, where it can be registered.

        A file's pages: a system may refuse those, and that is a clear error.
        """
        path = tmp_path / "data"
        path.write_bytes(bytes(range(256)) * 4096)
        own: Bytes = np.memmap(path, np.uint8, "r")
        backend, address = rig.backend, _at(own)
        try:
            backend.register_host_blocking(address, own.nbytes, True)
        except Exception as error:
            translated = backend.translate(error, "registering")
            assert type(translated) is DeviceError, repr(translated)
            assert "page-lock" in str(translated)
            return
        there = rig.empty(own.nbytes)
        backend.copy_h2d(there, address, own.nbytes, rig.stream)
        np.testing.assert_array_equal(rig.get(there, own.nbytes), own)
        backend.unregister_host_blocking(address)

    @fidelity
    def test_registered_memory_outlives_its_backend(self) -> None:
        """Registered memory stays so when the device it was asked of is closed."""
        own, backend = _own(_MIB), self.open()
        backend.register_host_blocking(_at(own), _MIB, False)
        backend.close()
        rig = Rig(self.open())
        own[:] = 8
        there = rig.empty(_MIB)
        rig.backend.copy_h2d(there, _at(own), _MIB, rig.stream)
        assert (rig.get(there, _MIB) == 8).all()
        rig.backend.unregister_host_blocking(_at(own))
        rig.close()
