"""Stream-ordered pools: who may reuse what, and what the counters say.

Nothing here expects a particular address: which block comes back is the pool's choice.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from streamflow.errors import OutOfDeviceMemory
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle

__all__ = ["PoolContract"]

_MIB = 1 << 20


class PoolContract(Harness):
    """Pools of one device."""

    @fidelity
    def test_live_blocks_do_not_overlap(self, rig: Rig) -> None:
        """Live allocations lie apart, at multiples of 256 bytes."""
        sizes = [1, 256, 257, 4096, _MIB, 3 * _MIB + 5]
        spans = sorted((rig.empty(size), size) for size in sizes * 3)
        for (start, size), (following, _) in pairwise(spans):
            assert start + size <= following
        assert all(start % 256 == 0 for start, _ in spans)

    @fidelity
    def test_counters_follow_allocations(self, rig: Rig) -> None:
        """A pool counts what is in use and reserved, and the most of each."""
        backend = rig.backend
        assert backend.pool_info(rig.pool).used_nbytes == 0
        first = backend.allocate(rig.pool, _MIB, rig.stream)
        second = backend.allocate(rig.pool, 3 * _MIB, rig.stream)
        info = backend.pool_info(rig.pool)
        assert info.used_nbytes >= 4 * _MIB
        assert info.reserved_nbytes >= info.used_nbytes
        backend.deallocate(first, rig.stream)
        backend.deallocate(second, rig.stream)
        rig.stream.sync()
        info = backend.pool_info(rig.pool)
        assert info.used_nbytes == 0
        assert info.used_high_nbytes >= 4 * _MIB
        assert info.reserved_high_nbytes >= info.used_high_nbytes

    def test_pools_count_for_themselves(self, rig: Rig) -> None:
        backend = rig.backend
        other = backend.create_pool(release_threshold_nbytes=12345)
        address = backend.allocate(other, _MIB, rig.stream)
        assert backend.pool_info(rig.pool).used_nbytes == 0
        assert backend.pool_info(other).used_nbytes >= _MIB
        assert backend.pool_info(other).release_threshold_nbytes == 12345
        assert backend.pool_info(rig.pool).release_threshold_nbytes == 2**64 - 1
        backend.deallocate(address, rig.stream)
        rig.finish()
        backend.destroy_pool(other)

    @fidelity
    def test_c42_a_high_threshold_keeps_memory_over_synchronisations(self, rig: Rig) -> None:
        """A pool below its release threshold keeps its memory over synchronisations."""
        backend = rig.backend
        for _ in range(100):
            address = backend.allocate(rig.pool, 64 * _MIB, rig.stream)
            backend.deallocate(address, rig.stream)
            rig.stream.sync()
        info = backend.pool_info(rig.pool)
        assert info.reserved_nbytes >= 64 * _MIB
        assert info.reserved_high_nbytes < 128 * _MIB

    @fidelity
    def test_c42_threshold_zero_returns_memory_at_a_synchronisation(self, rig: Rig) -> None:
        """A pool gives what exceeds its release threshold back when the host synchronises."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=0)
        address = backend.allocate(pool, 64 * _MIB, rig.stream)
        assert backend.pool_info(pool).reserved_nbytes >= 64 * _MIB
        backend.deallocate(address, rig.stream)
        rig.stream.sync()
        assert backend.pool_info(pool).reserved_nbytes == 0
        backend.destroy_pool(pool)

    @fidelity
    def test_c42_trim_keeps_what_it_is_told_to(self, rig: Rig) -> None:
        """Trimming gives back what is unused, down to a floor."""
        backend = rig.backend
        address = backend.allocate(rig.pool, 128 * _MIB, rig.stream)
        backend.deallocate(address, rig.stream)
        rig.stream.sync()
        backend.trim_pool(rig.pool, 64 * _MIB)
        assert backend.pool_info(rig.pool).reserved_nbytes >= 64 * _MIB
        backend.trim_pool(rig.pool, 0)
        assert backend.pool_info(rig.pool).reserved_nbytes == 0

    def test_c5_trim_leaves_live_memory_alone(self, rig: Rig) -> None:
        address = rig.put(np.full(_MIB, 5, np.uint8))
        rig.backend.trim_pool(rig.pool, 0)
        assert (rig.get(address, _MIB) == 5).all()

    @fidelity
    def test_c42_one_stream_reuses_memory_without_waiting(self, rig: Rig) -> None:
        """Memory freed on a stream is reused there at once, without a wait."""
        backend = rig.backend
        first = backend.allocate(rig.pool, 32 * _MIB, rig.stream)
        backend.deallocate(first, rig.stream)
        with self.stall(rig, rig.stream):
            for _ in range(50):
                address = backend.allocate(rig.pool, 32 * _MIB, rig.stream)
                backend.deallocate(address, rig.stream)
            assert backend.pool_info(rig.pool).reserved_high_nbytes < 128 * _MIB
        rig.finish()

    @fidelity
    def test_c6_memory_freed_behind_a_stall_reaches_no_other_stream(self, rig: Rig) -> None:
        """Memory whose free has not run reaches no stream that is not ordered behind it (R5)."""
        backend = rig.backend
        other = backend.create_stream()
        nbytes = 16 * _MIB
        host, view = rig.pinned(nbytes)
        address = backend.allocate(rig.pool, nbytes, rig.stream)
        backend.fill(address, b"\x11", nbytes, rig.stream)
        rig.finish()
        with self.stall(rig, rig.stream):
            backend.copy_d2h(host, address, nbytes, rig.stream)
            backend.deallocate(address, rig.stream)
            fresh = backend.allocate(rig.pool, nbytes, other)
            backend.fill(fresh, b"\xff", nbytes, other)
            copied = rig.mark(rig.stream)
            settle(backend)
        drain(backend, copied)
        assert (view == 0x11).all()
        backend.deallocate(fresh, other)
        rig.finish(other)
        other.close()

    @fidelity
    def test_c22_out_of_memory_is_an_error_and_not_sticky(self, rig: Rig) -> None:
        """Running out of memory is an error of the call, and the device stays usable."""
        backend = rig.backend
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            backend.allocate(rig.pool, 1 << 60, rig.stream)
        translated = backend.translate(caught.value, "allocating 1 EiB")
        assert isinstance(translated, OutOfDeviceMemory)
        assert isinstance(translated, MemoryError)
        address = rig.put(np.full(4096, 4, np.uint8))
        assert (rig.get(address, 4096) == 4).all()

    @fidelity
    def test_c22_a_bounded_pool_refuses_what_is_over_its_bound(self, rig: Rig) -> None:
        """A bounded pool refuses what is over its bound."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=0, max_nbytes=64 * _MIB)
        address = backend.allocate(pool, 32 * _MIB, rig.stream)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            backend.allocate(pool, 1024 * _MIB, rig.stream)
        assert isinstance(backend.translate(caught.value, "allocating"), OutOfDeviceMemory)
        backend.deallocate(address, rig.stream)
        rig.finish()
        backend.destroy_pool(pool)

    @fidelity
    def test_c17_a_destroyed_pool_keeps_what_is_in_use(self, rig: Rig) -> None:
        """Memory in use outlives its pool."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=0)
        address = backend.allocate(pool, _MIB, rig.stream)
        backend.destroy_pool(pool)
        backend.fill(address, b"\x06", _MIB, rig.stream)
        assert (rig.get(address, _MIB) == 6).all()
        backend.deallocate(address, rig.stream)
        rig.finish()

    @fidelity
    def test_c16_memory_outlives_the_stream_it_was_made_on(self, rig: Rig) -> None:
        """Memory outlives the stream that it was allocated on."""
        backend = rig.backend
        maker = backend.create_stream()
        address = backend.allocate(rig.pool, _MIB, maker)
        backend.fill(address, b"\x08", _MIB, maker)
        rig.stream.wait(rig.mark(maker))
        maker.close()
        assert (rig.get(address, _MIB) == 8).all()
        backend.deallocate(address, rig.stream)
        rig.stream.sync()
        assert backend.pool_info(rig.pool).used_nbytes == 0
