"""What a device says about itself, its clock, its errors, and closing it; and its peers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from streamflow.backends.base import Backend
from streamflow.backends.memory import PoolAccess
from streamflow.errors import DeviceError, LaunchFailed, StreamflowError
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kernels import AXPY
from streamflow.testing.contract.kinds import refused

__all__ = ["DeviceContract", "PeerContract"]


class DeviceContract(Harness):
    """Properties, time, translation and closing."""

    def test_it_is_a_backend(self, rig: Rig) -> None:
        assert isinstance(rig.backend, Backend)
        assert rig.backend.index == 0
        assert rig.backend.name

    def test_properties_make_sense(self, rig: Rig) -> None:
        found = rig.backend.properties
        assert found.name
        assert found.total_memory_nbytes > 0
        assert found.multiprocessor_count > 0
        assert found.warp_size > 0
        assert found.num_copy_engines > 0
        assert min(found.max_block_dim) > 0
        assert min(found.max_grid_dim) > 0
        assert max(found.max_block_dim) <= found.max_threads_per_block
        assert found.max_shared_memory_per_block_nbytes >= 48 << 10
        assert len(found.compute_capability) == 2

    def test_r7_the_window_of_512_fits_the_queue(self, rig: Rig) -> None:
        assert rig.backend.num_queued_max > 512

    def test_memory_info_is_free_and_total(self, rig: Rig) -> None:
        free, total = rig.backend.memory_info()
        assert 0 <= free <= total
        rig.empty(1)
        assert rig.backend.memory_info()[1] == total

    def test_a_device_that_does_not_exist_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="999"):
            self.open(999)

    def test_the_clock_never_goes_back(self, rig: Rig) -> None:
        before = rig.backend.clock_s()
        address = rig.empty(1 << 20)
        rig.backend.fill(address, b"\x01", 1 << 20, rig.stream)
        rig.finish()
        assert rig.backend.clock_s() >= before

    def test_advance_moves_virtual_time_only(self, rig: Rig) -> None:
        rig.finish()
        assert not rig.backend.advance(0)

    def test_an_idle_virtual_clock_jumps_when_told_to(self, rig: Rig) -> None:
        rig.finish()
        backend = rig.backend
        before = backend.clock_s()
        assert not backend.skip_to(0, before + 60.0, False)
        assert backend.skip_to(0, before + 60.0, True) == backend.is_virtual
        assert (backend.clock_s() == before + 60.0) == backend.is_virtual

    def test_virtual_time_stops_short_of_work_that_ends_later(self, rig: Rig) -> None:
        rig.finish()
        backend = rig.backend
        start = backend.clock_s()
        backend.fill(rig.empty(1 << 20), b"\x01", 1 << 20, rig.stream)
        event = rig.mark(rig.stream)
        assert not backend.advance(0, start)
        assert not backend.skip_to(1, start, True)
        assert backend.skip_to(0, start, False) == backend.is_virtual
        assert not backend.skip_to(0, start + 60.0, True)
        assert backend.advance(0, start + 60.0) == backend.is_virtual
        drain(backend, event)

    def test_set_current_may_be_called_again(self, rig: Rig) -> None:
        rig.backend.set_current()
        rig.backend.set_current()
        rig.finish()

    def test_translate_keeps_the_type_of_our_errors(self, rig: Rig) -> None:
        translated = rig.backend.translate(LaunchFailed("as it was"), "doing something")
        assert type(translated) is LaunchFailed
        assert "as it was" in str(translated)

    def test_translate_says_what_was_being_done(self, rig: Rig) -> None:
        translated = rig.backend.translate(RuntimeError("odd"), "copying x")
        assert isinstance(translated, StreamflowError)
        assert "copying x" in str(translated)
        assert "odd" in str(translated)

    def test_c17_closing_twice_and_with_things_held(self) -> None:
        backend = self.open()
        backend.create_stream()
        pool = backend.create_pool(release_threshold_nbytes=0)
        stream = backend.create_stream()
        backend.allocate(pool, 4096, stream)
        backend.create_event()
        backend.close()
        backend.close()

    @fidelity
    def test_c17_closing_does_not_wait_for_stalled_work(self, rig: Rig) -> None:
        """Closing a device does not wait for its work."""
        backend = self.open()
        stream = backend.create_stream()
        with self.stall(rig, rig.stream):
            stream.wait(rig.mark(rig.stream))
            backend.close()
        rig.finish()

    def test_a_closed_device_opens_again(self) -> None:
        for _ in range(3):
            rig = Rig(self.open())
            address = rig.put(np.full(64, 3, np.uint8))
            assert (rig.get(address, 64) == 3).all()
            rig.close()


class PeerContract(Harness):
    """Two devices of one machine."""

    @pytest.fixture
    def rigs(self) -> Iterator[tuple[Rig, Rig]]:
        first, second = Rig(self.open(0)), Rig(self.open(1))
        yield first, second
        second.close()
        first.close()

    @fidelity
    @pytest.mark.parametrize("nbytes", [1, 4097, (3 << 20) + 1])
    @pytest.mark.parametrize("way", ["there", "back"])
    def test_peer_copies_move_the_bytes_asked_for(
        self, rigs: tuple[Rig, Rig], nbytes: int, way: str
    ) -> None:
        """Copies between two devices move the bytes asked for."""
        source, target = rigs if way == "there" else (rigs[1], rigs[0])
        data = np.random.default_rng(1).integers(0, 256, nbytes + 16, np.uint8)
        src = source.put(data)
        dst = target.put(np.zeros(nbytes + 16, np.uint8))
        source.backend.copy_peer(
            dst + 8,
            target.backend.index,
            src + 8,
            source.backend.index,
            nbytes,
            source.stream,
        )
        source.finish()
        expected = np.zeros(nbytes + 16, np.uint8)
        expected[8 : 8 + nbytes] = data[8 : 8 + nbytes]
        np.testing.assert_array_equal(target.get(dst, nbytes + 16), expected)

    @fidelity
    def test_access_to_a_pool_is_granted_and_taken_back(self, rigs: tuple[Rig, Rig]) -> None:
        """A device reaches another's pool once it was granted access, memory of before as well."""
        owner, guest = rigs
        backend, pool = owner.backend, owner.pool

        def grant(access: PoolAccess) -> None:
            backend.set_pool_access_blocking(pool, guest.backend.index, access)

        if not guest.backend.can_access_peer(backend.index):
            refused(backend, lambda: grant(PoolAccess.READ_WRITE), DeviceError)
            return
        ones = np.ones(256, np.float32).view(np.uint8)
        before = owner.put(ones)
        assert backend.pool_access(pool, guest.backend.index) is PoolAccess.NONE
        grant(PoolAccess.READ_WRITE)
        assert backend.pool_access(pool, guest.backend.index) is PoolAccess.READ_WRITE
        total, after = guest.put(ones), owner.put(ones)
        kernel = guest.backend.load_kernel_blocking(AXPY)
        config = guest.backend.launch_config((1, 1, 1), (256, 1, 1), 0)
        arrays = [
            guest.backend.array_argument(address, (256,), np.dtype(np.float32))
            for address in (total, before, after)
        ]
        for x in arrays[1:]:
            guest.backend.launch(guest.stream, config, kernel, arrays[0], np.float32(2), x, 256)
        guest.backend.copy_d2d(after, total, 1024, guest.stream)
        assert (guest.get(total, 1024).view(np.float32) == 5).all()
        assert (owner.get(after, 1024).view(np.float32) == 5).all()
        grant(PoolAccess.NONE)
        assert backend.pool_access(pool, guest.backend.index) is PoolAccess.NONE

    def test_cr1_stream_ids_differ_between_devices(self, rigs: tuple[Rig, Rig]) -> None:
        ids = [rig.backend.stream_id(rig.stream) for rig in rigs]
        assert len(set(ids)) == 2

    @fidelity
    def test_events_order_streams_of_two_devices(self, rigs: tuple[Rig, Rig]) -> None:
        """A stream waits for events of another device's streams."""
        first, second = rigs
        with self.stall(first, first.stream):
            second.stream.wait(first.mark(first.stream))
            done = second.mark(second.stream)
            settle(second.backend)
            assert not done.is_done
        drain(second.backend, done)

    def test_each_device_works_whatever_is_current(self, rigs: tuple[Rig, Rig]) -> None:
        """The thread's current device is the other one in every call."""
        first, second = rigs
        for rig, other in ((first, second), (second, first)):
            address = rig.put(np.zeros(4096, np.uint8))
            other.backend.set_current()
            rig.backend.fill(address, b"\x0c", 4096, rig.stream)
            other.backend.set_current()
            block = rig.backend.allocate(rig.pool, 4096, rig.stream)
            other.backend.set_current()
            rig.backend.copy_d2d(block, address, 4096, rig.stream)
            assert (rig.get(block, 4096) == 12).all()
            other.backend.set_current()
            rig.backend.deallocate(block, rig.stream)
            rig.finish()
