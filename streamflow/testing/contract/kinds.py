"""Memory of every kind: who reaches it, what is known of it, and how it is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Backend
from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemoryKind,
    MemorySupport,
    PointerAttributes,
)
from streamflow.errors import DeviceError, OutOfDeviceMemory
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, pinned_view, settle
from streamflow.testing.contract.kernels import AXPY

__all__ = ["KindsContract", "refused"]

_MIB = 1 << 20
_F32 = np.dtype(np.float32)
_NUM = 4096
_NBYTES = 4 * _NUM
_ONES = np.ones(_NUM, np.float32).view(np.uint8)

KINDS = ("linear", "managed", "system", "pinned", "managed pool", "host pool", "NUMA pool")
OF_BOTH_SIDES = KINDS[1:]


def refused(backend: Backend, call: Callable[[], object], kind: type[DeviceError]) -> str:
    """What the error says that the backend makes of a call's failure."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
        call()
    translated = backend.translate(caught.value, "trying")
    assert isinstance(translated, kind), repr(translated)
    return str(translated)


def _is_there(kind: str, support: MemorySupport) -> bool:
    return {
        "linear": True,
        "managed": support.has_managed_memory,
        "system": support.has_pageable_access,
        "pinned": True,
        "managed pool": support.has_managed_pools,
        "host pool": support.has_host_pools,
        "NUMA pool": support.has_host_pools,
    }[kind]


class _Lender:
    """Memory of one kind, given back at the end."""

    def __init__(self, rig: Rig, kind: str) -> None:
        self.rig = rig
        self.kind = kind
        self.pool: Any = None
        if kind.endswith("pool"):
            location = {"host pool": Location("host"), "NUMA pool": Location("numa", 0)}.get(kind)
            self.pool = rig.backend.create_pool(
                release_threshold_nbytes=0,
                location=location,
                is_managed=kind == "managed pool",
            )
        self.addresses: list[int] = []

    def take(self, nbytes: int) -> int:
        """Memory that stream and host may touch at once."""
        backend = self.rig.backend
        if self.pool is not None:
            address = backend.allocate(self.pool, nbytes, self.rig.stream)
            self.rig.finish()
        elif self.kind == "linear":
            address = backend.allocate_linear_blocking(nbytes)
        elif self.kind == "managed":
            address = backend.allocate_managed_blocking(nbytes)
        elif self.kind == "system":
            address = backend.allocate_system(nbytes, 256)
        else:
            address = backend.allocate_pinned_blocking(nbytes)
        self.addresses.append(address)
        return address

    def give_back(self) -> None:
        backend = self.rig.backend
        self.rig.finish()
        for address in self.addresses:
            if self.pool is not None:
                backend.deallocate(address, self.rig.stream)
            elif self.kind in ("linear", "managed"):
                backend.free_linear_blocking(address)
            elif self.kind == "system":
                backend.free_system(address)
            else:
                backend.free_pinned_blocking(address)
        self.rig.finish()
        if self.pool is not None:
            backend.destroy_pool(self.pool)


def _lend(rig: Rig, kind: str) -> _Lender | None:
    """None, and refused with the documented error, where there is no such memory."""
    if _is_there(kind, rig.backend.memory_support()):
        return _Lender(rig, kind)
    refused(rig.backend, lambda: _Lender(rig, kind).take(64), DeviceError)
    return None


def _axpy(rig: Rig, y: int, x: int) -> None:
    """``y += 2 * x``, both of ``_NUM`` floats."""
    backend = rig.backend
    kernel = backend.load_kernel_blocking(AXPY)
    config = backend.launch_config((_NUM // 256, 1, 1), (256, 1, 1), 0)
    arrays = [backend.array_argument(address, (_NUM,), _F32) for address in (y, x)]
    backend.launch(rig.stream, config, kernel, arrays[0], np.float32(2.0), arrays[1], _NUM)


class KindsContract(Harness):
    """Memory that is not the device's pools'."""

    @fidelity
    @pytest.mark.parametrize("kind", KINDS)
    def test_kernels_reach_memory_of_every_kind(self, rig: Rig, kind: str) -> None:
        """Kernels read and write linear, managed, system and pinned memory, and pools of the host.

        What the device doesn't offer is refused with a clear error.
        """
        lender = _lend(rig, kind)
        if lender is None:
            return
        data, total = rig.put(_ONES), lender.take(_NBYTES)
        rig.backend.copy_d2d(total, data, _NBYTES, rig.stream)
        _axpy(rig, total, data)
        _axpy(rig, data, total)
        assert (rig.get(total, _NBYTES).view(np.float32) == 3).all()
        assert (rig.get(data, _NBYTES).view(np.float32) == 7).all()
        lender.give_back()

    @fidelity
    @pytest.mark.parametrize("kind", KINDS)
    def test_copies_and_fills_reach_memory_of_every_kind(self, rig: Rig, kind: str) -> None:
        """Copies and fills reach it, too."""
        lender = _lend(rig, kind)
        if lender is None:
            return
        backend, nbytes = rig.backend, 4096
        noise = np.random.default_rng(4).integers(0, 256, nbytes, np.uint8)
        host, view = rig.pinned(nbytes)
        view[:] = noise
        first, second = lender.take(nbytes), lender.take(nbytes)
        backend.copy_h2d(first, host, nbytes, rig.stream)
        backend.fill(second, b"\x05", nbytes, rig.stream)
        backend.copy_d2d(second + 1, first + 1, nbytes - 2, rig.stream)
        expected = noise.copy()
        expected[[0, -1]] = 5
        np.testing.assert_array_equal(rig.get(second, nbytes), expected)
        lender.give_back()

    @fidelity
    @pytest.mark.parametrize("kind", OF_BOTH_SIDES)
    def test_the_host_reaches_what_both_sides_reach(self, rig: Rig, kind: str) -> None:
        """The host and kernels see each other's writes to memory that both sides reach."""
        lender = _lend(rig, kind)
        if lender is None:
            return
        address = lender.take(_NBYTES)
        view = pinned_view(address, _NBYTES).view(np.float32)
        view[:] = np.arange(_NUM)
        _axpy(rig, address, address)
        rig.finish()
        np.testing.assert_array_equal(view, 3 * np.arange(_NUM, dtype=np.float32))
        view[:] = 1
        _axpy(rig, address, address)
        rig.finish()
        assert (view == 3).all()
        del view
        lender.give_back()

    @fidelity
    def test_copies_between_pinned_blocks_wait_for_nothing(self, rig: Rig) -> None:
        """Copies between two pinned blocks return at once, where arrays may lie in one (R1)."""
        backend = rig.backend
        (host, view), (back, result) = rig.pinned(_MIB), rig.pinned(_MIB)
        view[:] = 7
        first, second = (backend.allocate_mapped_blocking(_MIB) for _ in range(2))
        with self.stall(rig, rig.stream):
            held = rig.mark(rig.stream)
            backend.copy_h2d(first, host, _MIB, rig.stream)
            backend.copy_d2d(second, first, _MIB, rig.stream)
            backend.copy_d2h(back, second, _MIB, rig.stream)
            assert not held.is_done
        rig.finish()
        assert (result == 7).all()
        for address in (first, second):
            backend.free_pinned_blocking(address)

    @fidelity
    def test_linear_memory_is_usable_on_every_stream_at_once(self, rig: Rig) -> None:
        """Linear memory may be used on any stream as soon as it is allocated."""
        backend = rig.backend
        other = backend.create_stream()
        address = backend.allocate_linear_blocking(_MIB)
        with self.stall(rig, rig.stream):
            backend.fill(address, b"\x07", _MIB, other)
            done = rig.mark(other)
            drain(backend, done)
        assert (rig.get(address, _MIB) == 7).all()
        backend.free_linear_blocking(address)
        other.close()

    @fidelity
    def test_linear_memory_is_freed_in_the_order_of_a_stream(self, rig: Rig) -> None:
        """A stream-ordered free takes linear memory as well: work before it still uses it."""
        backend = rig.backend
        address = backend.allocate_linear_blocking(_MIB)
        host, view = rig.pinned(_MIB)
        backend.fill(address, b"\x09", _MIB, rig.stream)
        with self.stall(rig, rig.stream):
            backend.copy_d2h(host, address, _MIB, rig.stream)
            backend.deallocate(address, rig.stream)
        rig.finish()
        assert (view == 9).all()

    @fidelity
    def test_linear_memory_has_an_end(self, rig: Rig) -> None:
        """Running out of linear memory is an error of the call, and not sticky."""
        backend = rig.backend
        refused(backend, lambda: backend.allocate_linear_blocking(1 << 60), OutOfDeviceMemory)
        address = backend.allocate_linear_blocking(64)
        assert address % 256 == 0
        backend.free_linear_blocking(address)

    @fidelity
    def test_freeing_pool_memory_by_hand_waits_for_nothing(self, rig: Rig) -> None:
        """Memory of a pool may be freed as linear memory is, which then waits for nothing."""
        backend = rig.backend
        other = backend.create_stream()
        address = rig.backend.allocate(rig.pool, 16 * _MIB, rig.stream)
        backend.fill(address, b"\x01", 16 * _MIB, rig.stream)
        rig.finish()
        with self.stall(rig, other):
            held = rig.mark(other)
            backend.free_linear_blocking(address)
            assert not held.is_done
        again = backend.allocate(rig.pool, 16 * _MIB, rig.stream)
        backend.deallocate(again, rig.stream)
        rig.finish()
        rig.finish(other)
        other.close()

    @pytest.mark.parametrize("alignment", [1, 256, 4096, 1 << 16])
    def test_system_memory_is_aligned(self, rig: Rig, alignment: int) -> None:
        backend = rig.backend
        if not backend.memory_support().has_pageable_access:
            refused(backend, lambda: backend.allocate_system(1000, alignment), DeviceError)
            return
        addresses = [backend.allocate_system(1000, alignment) for _ in range(3)]
        assert all(address % alignment == 0 for address in addresses)
        for address in addresses:
            backend.free_system(address)

    def test_system_memory_is_freed_once(self, rig: Rig) -> None:
        backend = rig.backend
        if not backend.memory_support().has_pageable_access:
            refused(backend, lambda: backend.allocate_system(64, 256), DeviceError)
            return
        address = backend.allocate_system(64, 256)
        backend.free_system(address)
        refused(backend, lambda: backend.free_system(address), DeviceError)

    @fidelity
    def test_a_prefetch_is_work_of_its_stream(self, rig: Rig) -> None:
        """A prefetch runs in the order of its stream, and changes nothing."""
        backend, device = rig.backend, Location("device", rig.backend.index)
        if not backend.memory_support().has_managed_memory:
            refused(backend, lambda: backend.allocate_managed_blocking(64), DeviceError)
            return
        address = backend.allocate_managed_blocking(_MIB)
        pinned_view(address, _MIB)[:] = 3
        if backend.memory_support().has_concurrent_managed_access:
            with self.stall(rig, rig.stream):
                backend.prefetch(address, _MIB, device, rig.stream)
                done = rig.mark(rig.stream)
                settle(backend)
                assert not done.is_done
            drain(backend, done)
            assert (rig.get(address, _MIB) == 3).all()
            backend.prefetch(address, _MIB, Location("host"), rig.stream)
            rig.finish()
            assert (pinned_view(address, _MIB) == 3).all()
        else:
            refused(
                backend, lambda: backend.prefetch(address, _MIB, device, rig.stream), DeviceError
            )
        backend.free_linear_blocking(address)

    @fidelity
    def test_advice_changes_nothing_but_speed(self, rig: Rig) -> None:
        """Every advice about managed memory is taken, and changes none of it."""
        backend, device = rig.backend, Location("device", rig.backend.index)
        if not backend.memory_support().has_concurrent_managed_access:
            return
        address = backend.allocate_managed_blocking(_MIB)
        pinned_view(address, _MIB)[:] = 4
        for advice in MemoryAdvice:
            backend.advise(address, _MIB, advice, device)
        backend.advise(address, _MIB, MemoryAdvice.PREFERRED_LOCATION, Location("host"))
        assert (rig.get(address, _MIB) == 4).all()
        backend.free_linear_blocking(address)

    @fidelity
    def test_only_memory_that_moves_can_be_prefetched(self, rig: Rig) -> None:
        """Memory that can't move is not prefetched, nor advised about."""
        backend, device = rig.backend, Location("device", rig.backend.index)
        address = backend.allocate_linear_blocking(_MIB)
        refused(backend, lambda: backend.prefetch(address, _MIB, device, rig.stream), DeviceError)
        refused(
            backend,
            lambda: backend.advise(address, _MIB, MemoryAdvice.READ_MOSTLY, device),
            DeviceError,
        )
        rig.finish()
        backend.free_linear_blocking(address)

    @fidelity
    @pytest.mark.parametrize("kind", [*KINDS, "pool"])
    def test_pointer_attributes_tell_kinds_apart(self, rig: Rig, kind: str) -> None:
        """An address says what kind of memory it is, whose, and of which pool."""
        lender = _lend(rig, kind) if kind != "pool" else None
        if lender is None and kind != "pool":
            return
        backend = rig.backend
        address = rig.empty(4096) if lender is None else lender.take(4096)
        wanted = {
            "linear": MemoryKind.DEVICE,
            "pool": MemoryKind.DEVICE,
            "managed": MemoryKind.MANAGED,
            "managed pool": MemoryKind.MANAGED,
            "system": MemoryKind.UNREGISTERED,
        }.get(kind, MemoryKind.HOST)
        pool = rig.pool if lender is None else lender.pool
        for at in (address, address + 100):
            found = backend.pointer_attributes(at)
            assert isinstance(found, PointerAttributes)
            assert found.kind is wanted
            is_on_device = wanted is MemoryKind.DEVICE
            assert found.device_index == (backend.index if is_on_device else None)
            assert found.is_host_accessible is not is_on_device
            assert found.is_device_accessible
            assert found.pool is pool
            assert found.has_context == (kind in ("linear", "managed", "pinned"))
        if lender is not None:
            lender.give_back()

    def test_plain_host_memory_is_unregistered(self, rig: Rig) -> None:
        array = np.zeros(64, np.uint8)
        found = rig.backend.pointer_attributes(int(array.ctypes.data))
        assert found.kind is MemoryKind.UNREGISTERED
        assert found.pool is None
        assert not found.has_context
        assert found.is_host_accessible
