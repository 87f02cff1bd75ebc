"""What a pool lets one read, set and forbid, and the pools of a device that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Backend
from streamflow.backends.memory import Location, PoolAccess, PoolAttribute
from streamflow.errors import DeviceError
from streamflow.testing.contract.guide import SWITCHES, reserved_nbytes, synchronise
from streamflow.testing.contract.harness import Harness, Rig, fidelity, settle
from streamflow.testing.contract.kinds import refused

__all__ = ["PoolRulesContract"]

_MIB = 1 << 20
_SIZE = 64 * _MIB


def _settings(backend: Backend, pool: Any) -> dict[PoolAttribute, int]:
    settable = (*SWITCHES, PoolAttribute.RELEASE_THRESHOLD)
    return {attribute: backend.pool_attribute(pool, attribute) for attribute in settable}


class PoolRulesContract(Harness):
    """Attributes, thresholds, the default pool, pools of other kinds, access."""

    # -- thresholds, attributes -----------------------------------------------------------

    @fidelity
    @pytest.mark.parametrize("how", ["stream", "event", "device"])
    def test_c42_the_threshold_holds_at_every_kind_of_synchronisation(
        self, rig: Rig, how: str
    ) -> None:
        """The threshold is looked at when a stream, an event or the device is synchronised."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=0)
        for _ in range(3):
            address = backend.allocate(pool, _SIZE, rig.stream)
            backend.deallocate(address, rig.stream)
            assert reserved_nbytes(backend, pool) >= _SIZE
            synchronise(rig, how)
            assert reserved_nbytes(backend, pool) == 0
        backend.set_pool_attribute(pool, PoolAttribute.RELEASE_THRESHOLD, 2**64 - 1)
        address = backend.allocate(pool, _SIZE, rig.stream)
        backend.deallocate(address, rig.stream)
        synchronise(rig, how)
        assert reserved_nbytes(backend, pool) >= _SIZE
        backend.destroy_pool(pool)

    @fidelity
    def test_a_new_pool_has_every_way_of_reuse_on(self, rig: Rig) -> None:
        """A pool begins with its ways of reuse on and the threshold that it was given."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=12345)
        found = _settings(backend, pool)
        assert found == {**dict.fromkeys(SWITCHES, 1), PoolAttribute.RELEASE_THRESHOLD: 12345}
        backend.destroy_pool(pool)

    @fidelity
    def test_settings_are_read_as_they_were_set(self, rig: Rig) -> None:
        """Switches and threshold read as they were set last."""
        backend, pool = rig.backend, rig.pool
        for switch in SWITCHES:
            backend.set_pool_attribute(pool, switch, 0)
            assert backend.pool_attribute(pool, switch) == 0
            backend.set_pool_attribute(pool, switch, 1)
            assert backend.pool_attribute(pool, switch) == 1
        for threshold in (0, 1, 2**64 - 1):
            backend.set_pool_attribute(pool, PoolAttribute.RELEASE_THRESHOLD, threshold)
            assert backend.pool_attribute(pool, PoolAttribute.RELEASE_THRESHOLD) == threshold
            assert backend.pool_info(pool).release_threshold_nbytes == threshold

    @fidelity
    def test_high_marks_start_again_from_what_is_in_use(self, rig: Rig) -> None:
        """A high mark that is set to 0 starts again from the current value, live blocks and all."""
        backend, pool = rig.backend, rig.pool
        rig.empty(32 * _MIB)
        address = backend.allocate(pool, _SIZE, rig.stream)
        backend.deallocate(address, rig.stream)
        rig.stream.sync()
        backend.trim_pool(pool, 0)
        for high, current in (
            (PoolAttribute.USED_HIGH, PoolAttribute.USED_CURRENT),
            (PoolAttribute.RESERVED_HIGH, PoolAttribute.RESERVED_CURRENT),
        ):
            now = backend.pool_attribute(pool, current)
            assert now >= 32 * _MIB
            assert backend.pool_attribute(pool, high) >= 96 * _MIB
            backend.set_pool_attribute(pool, high, 0)
            assert backend.pool_attribute(pool, high) == now
        rig.empty(_SIZE)
        used = backend.pool_attribute(pool, PoolAttribute.USED_CURRENT)
        assert backend.pool_attribute(pool, PoolAttribute.USED_HIGH) == used

    @fidelity
    @pytest.mark.parametrize(
        ("attribute", "value"),
        [
            (PoolAttribute.USED_CURRENT, 0),
            (PoolAttribute.RESERVED_CURRENT, 0),
            (PoolAttribute.USED_CURRENT, 1),
            (PoolAttribute.USED_HIGH, 1),
            (PoolAttribute.RESERVED_HIGH, 4096),
        ],
    )
    def test_what_a_pool_counts_can_not_be_set(
        self, rig: Rig, attribute: PoolAttribute, value: int
    ) -> None:
        """Counters can't be set, and high marks to nothing but 0: an error, and nothing changes."""
        backend, pool = rig.backend, rig.pool
        rig.empty(_MIB)
        before = backend.pool_info(pool)
        refused(backend, lambda: backend.set_pool_attribute(pool, attribute, value), DeviceError)
        assert backend.pool_info(pool) == before

    @pytest.mark.parametrize("value", [-1, 2**64])
    def test_no_attribute_is_beyond_64_bits(self, rig: Rig, value: int) -> None:
        with pytest.raises(ValueError, match="between 0 and"):
            rig.backend.set_pool_attribute(rig.pool, PoolAttribute.RELEASE_THRESHOLD, value)

    # -- the default and the current pool ---------------------------------------------------

    @fidelity
    def test_c42_the_default_pool_keeps_its_own_attributes(self, rig: Rig) -> None:
        """The device's default pool has threshold 0, and nothing of ours changes what it has."""
        backend = rig.backend
        pool = backend.default_pool()
        before = _settings(backend, pool)
        other = Rig(self.open())
        other.put(np.zeros(_MIB, np.uint8))
        other.backend.trim_pool(other.pool, 0)
        address = backend.allocate(pool, _MIB, rig.stream)
        backend.deallocate(address, rig.stream)
        rig.stream.sync()
        other.close()
        assert _settings(backend, pool) == before
        refused(backend, lambda: backend.destroy_pool(pool), DeviceError)
        assert _settings(backend, pool) == before

    @fidelity
    def test_the_current_pool_is_the_default_one_until_it_is_set(self, rig: Rig) -> None:
        """The current pool is the default one until another is set, and again once that is gone."""
        backend = rig.backend
        default = backend.default_pool()
        assert backend.default_pool() is default
        assert backend.current_pool() is default
        pool = backend.create_pool(release_threshold_nbytes=0)
        try:
            backend.set_current_pool(pool)
            assert backend.current_pool() is pool
            assert backend.default_pool() is default
        finally:
            backend.destroy_pool(pool)
        assert backend.current_pool() is default

    @fidelity
    def test_a_pool_of_the_host_is_never_current(self, rig: Rig) -> None:
        """A pool that doesn't lie on the device can't be its current one."""
        backend = rig.backend
        if not backend.memory_support().has_host_pools:
            refused(backend, lambda: _host_pool(backend), DeviceError)
            return
        pool = _host_pool(backend)
        refused(backend, lambda: backend.set_current_pool(pool), DeviceError)
        assert backend.current_pool() is backend.default_pool()
        backend.destroy_pool(pool)

    # -- several pools ----------------------------------------------------------------------

    @fidelity
    def test_c22_a_pool_gets_what_others_keep(self, rig: Rig) -> None:
        """A pool that runs short gets what other pools of the device keep and do not use."""
        backend, pool = rig.backend, rig.pool
        nbytes = backend.memory_info()[0] // 8 * 5
        other = backend.create_pool(release_threshold_nbytes=2**64 - 1)
        backend.deallocate(backend.allocate(other, nbytes, rig.stream), rig.stream)
        rig.stream.sync()
        assert reserved_nbytes(backend, other) >= nbytes
        address = backend.allocate(pool, nbytes, rig.stream)
        assert reserved_nbytes(backend, other) < nbytes
        backend.deallocate(address, rig.stream)
        rig.finish()
        backend.destroy_pool(other)

    @fidelity
    def test_c17_a_pool_goes_on_with_another_device_of_the_gpu(self, rig: Rig) -> None:
        """A pool, destroyed or not, outlives the device that made it while its GPU is open."""
        maker = self.open()
        pools = [maker.create_pool(release_threshold_nbytes=0) for _ in range(2)]
        backend = rig.backend
        addresses = [backend.allocate(pool, _MIB, rig.stream) for pool in pools]
        maker.destroy_pool(pools[1])
        maker.close()
        addresses.append(backend.allocate(pools[0], _MIB, rig.stream))
        for address in addresses:
            backend.fill(address, b"\x0b", _MIB, rig.stream)
            assert (rig.get(address, _MIB) == 11).all()
            backend.deallocate(address, rig.stream)
        rig.finish()
        backend.destroy_pool(pools[0])

    # -- pools of other kinds ---------------------------------------------------------------

    @fidelity
    @pytest.mark.parametrize("kind", ["host", "managed"])
    def test_c6_pools_of_every_kind_are_stream_ordered(self, rig: Rig, kind: str) -> None:
        """Pools of the host and managed ones hand memory on in the order of streams, too."""
        backend, nbytes = rig.backend, 4 * _MIB
        support = backend.memory_support()
        is_there = support.has_host_pools if kind == "host" else support.has_managed_pools
        make = _host_pool if kind == "host" else _managed_pool
        if not is_there:
            refused(backend, lambda: make(backend), DeviceError)
            return
        pool, other = make(backend), backend.create_stream()
        host, view = rig.pinned(nbytes)
        old, new = rig.put(np.full(nbytes, 0x51, np.uint8)), rig.put(np.full(nbytes, 255, np.uint8))
        address = backend.allocate(pool, nbytes, rig.stream)
        backend.copy_d2d(address, old, nbytes, rig.stream)
        rig.finish()
        with self.stall(rig, rig.stream):
            backend.copy_d2h(host, address, nbytes, rig.stream)
            backend.deallocate(address, rig.stream)
            fresh = backend.allocate(pool, nbytes, other)
            backend.copy_d2d(fresh, new, nbytes, other)
            settle(backend)
        rig.finish()
        assert (view == 0x51).all()
        backend.deallocate(fresh, other)
        rig.finish(other)
        assert backend.pool_info(pool).used_nbytes == 0
        backend.destroy_pool(pool)
        other.close()

    @fidelity
    def test_pools_of_both_sides_can_not_be_shared(self, rig: Rig) -> None:
        """Only a pool on a device can be made to be shared with other processes."""
        backend = rig.backend
        place = Location("host")
        refused(backend, lambda: _exportable(backend, location=place), DeviceError)
        refused(backend, lambda: _exportable(backend, is_managed=True), DeviceError)
        if backend.memory_support().pool_handle_types & {"posix_fd", "win32"}:
            backend.destroy_pool(_exportable(backend))
        else:
            refused(backend, lambda: _exportable(backend), DeviceError)

    # -- access, as far as one device shows it ------------------------------------------------

    @fidelity
    def test_access_is_refused_clearly_where_there_is_no_peer(self, rig: Rig) -> None:
        """A device is no peer of itself, its access can't be revoked, others must exist."""
        backend, pool = rig.backend, rig.pool
        assert not backend.can_access_peer(backend.index)
        assert backend.pool_access(pool, backend.index) is PoolAccess.READ_WRITE
        set_access = backend.set_pool_access_blocking
        text = refused(
            backend, lambda: set_access(pool, backend.index, PoolAccess.NONE), DeviceError
        )
        assert "revoked" in text
        asked: list[Callable[[], object]] = [
            lambda: backend.can_access_peer(999),
            lambda: backend.pool_access(pool, 999),
            lambda: set_access(pool, 999, PoolAccess.READ_WRITE),
        ]
        for call in asked:
            assert "999" in refused(backend, call, DeviceError)
        set_access(pool, backend.index, PoolAccess.READ_WRITE)
        assert backend.pool_access(pool, backend.index) is PoolAccess.READ_WRITE


def _host_pool(backend: Backend) -> Any:
    return backend.create_pool(release_threshold_nbytes=0, location=Location("host"))


def _managed_pool(backend: Backend) -> Any:
    return backend.create_pool(release_threshold_nbytes=0, is_managed=True)


def _exportable(backend: Backend, **options: Any) -> Any:
    return backend.create_pool(release_threshold_nbytes=0, is_exportable=True, **options)
