"""Copies, fills and pinned memory, byte for byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, pinned_view, settle

__all__ = ["MemoryContract"]

_GUARD = 64


def _noise(nbytes: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class MemoryContract(Harness):
    """Data movement on one device."""

    @fidelity
    @pytest.mark.parametrize("nbytes", [1, 3, 255, 4097, (3 << 20) + 1])
    @pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (5, 7)])
    def test_copies_move_the_bytes_asked_for(
        self, rig: Rig, nbytes: int, offsets: tuple[int, int]
    ) -> None:
        """Copies move the bytes asked for, at any alignment, and nothing around them.

        Host to device to device to host, at odd addresses; what lies around stays.
        """
        backend = rig.backend
        at, to = offsets
        data = _noise(nbytes + 2 * _GUARD)
        host, view = rig.pinned(data.nbytes)
        back, back_view = rig.pinned(data.nbytes)
        view[:] = data
        first = rig.put(np.full(data.nbytes, 0xA5, np.uint8))
        second = rig.put(np.full(data.nbytes, 0x5A, np.uint8))
        backend.copy_h2d(first + at, host + to, nbytes, rig.stream)
        backend.copy_d2d(second + to, first + at, nbytes, rig.stream)
        backend.copy_d2h(back + at, second + to, nbytes, rig.stream)
        rig.finish()

        on_first = np.full(data.nbytes, 0xA5, np.uint8)
        on_first[at : at + nbytes] = data[to : to + nbytes]
        on_second = np.full(data.nbytes, 0x5A, np.uint8)
        on_second[to : to + nbytes] = data[to : to + nbytes]
        on_host = np.zeros(data.nbytes, np.uint8)
        on_host[at : at + nbytes] = data[to : to + nbytes]
        np.testing.assert_array_equal(back_view, on_host)
        np.testing.assert_array_equal(rig.get(first, data.nbytes), on_first)
        np.testing.assert_array_equal(rig.get(second, data.nbytes), on_second)

    @fidelity
    @pytest.mark.parametrize("count", [1, 3, 1000, 100_003])
    @pytest.mark.parametrize(
        "pattern",
        [
            b"\x07",
            b"\x01\x02",
            b"\x01\x02\x03\x04",
            b"\x01\x02\x03\x04\x05\x06\x07\x08",
            b"0123456789abcdef",
            b"\x09\x09",
            b"\x01\x02\x01\x02",
            bytes(8),
            b"abcdabcd",
            b"abcdefghabcdefgh",
            b"\xff" * 16,
        ],
        ids=lambda pattern: f"{len(pattern)}-{pattern.hex()[:8]}",
    )
    def test_fill_repeats_its_pattern(self, rig: Rig, pattern: bytes, count: int) -> None:
        """A fill writes its pattern as often as asked for, and nothing around it."""
        nbytes = len(pattern) * count
        before = _noise(nbytes + 2 * _GUARD)
        address = rig.put(before)
        rig.backend.fill(address + _GUARD, pattern, count, rig.stream)
        expected = before.copy()
        expected[_GUARD : _GUARD + nbytes] = np.frombuffer(pattern * count, np.uint8)
        np.testing.assert_array_equal(rig.get(address, before.nbytes), expected)

    @pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
    def test_fill_at_any_multiple_of_its_width(self, rig: Rig, width: int) -> None:
        address = rig.put(np.zeros(256, np.uint8))
        pattern = bytes(range(1, width + 1))
        rig.backend.fill(address + width, pattern, 2, rig.stream)
        expected = np.zeros(256, np.uint8)
        expected[width : 3 * width] = np.frombuffer(pattern * 2, np.uint8)
        np.testing.assert_array_equal(rig.get(address, 256), expected)

    @fidelity
    def test_one_stream_keeps_program_order(self, rig: Rig) -> None:
        """A stream runs its work in the order of its submission."""
        address = rig.empty(4096)
        with self.stall(rig, rig.stream):
            for value in range(20):
                rig.backend.fill(address, bytes([value]), 4096, rig.stream)
        assert (rig.get(address, 4096) == 19).all()

    @fidelity
    def test_an_event_orders_two_streams(self, rig: Rig) -> None:
        """Work behind a wait sees what the stream waited for has written."""
        backend = rig.backend
        other = backend.create_stream()
        address = rig.put(np.zeros(1 << 20, np.uint8))
        host, view = rig.pinned(1 << 20)
        with self.stall(rig, rig.stream):
            backend.fill(address, b"\x2a", 1 << 20, rig.stream)
            other.wait(rig.mark(rig.stream))
            backend.copy_d2h(host, address, 1 << 20, other)
            done = rig.mark(other)
            settle(backend)
            assert not done.is_done
        drain(backend, done)
        assert (view == 0x2A).all()
        other.close()

    @fidelity
    def test_copies_read_their_source_when_they_run(self, rig: Rig) -> None:
        """A copy returns at once and reads its source when it runs."""
        nbytes = 1 << 20
        host, view = rig.pinned(nbytes)
        address = rig.empty(nbytes)
        rig.finish()
        with self.stall(rig, rig.stream):
            view[:] = 1
            rig.backend.copy_h2d(address, host, nbytes, rig.stream)
            view[:] = 2
        assert (rig.get(address, nbytes) == 2).all()

    @fidelity
    def test_copies_write_their_destination_when_they_run(self, rig: Rig) -> None:
        """A copy writes its destination when it runs, not before."""
        nbytes = 1 << 20
        host, view = rig.pinned(nbytes)
        address = rig.put(np.full(nbytes, 3, np.uint8))
        with self.stall(rig, rig.stream):
            rig.backend.copy_d2h(host, address, nbytes, rig.stream)
            assert not view.any()
        rig.finish()
        assert (view == 3).all()

    def test_pinned_memory_comes_from_any_thread(self, rig: Rig) -> None:
        backend = rig.backend
        addresses: list[int] = []

        def allocate_blocking() -> None:
            addresses.append(backend.allocate_pinned_blocking(5 << 20))

        thread = threading.Thread(target=allocate_blocking)
        thread.start()
        thread.join(60)
        (host,) = addresses
        data = _noise(5 << 20)
        view = pinned_view(host, data.nbytes)
        view[:] = data
        address = rig.empty(data.nbytes)
        backend.copy_h2d(address, host, data.nbytes, rig.stream)
        np.testing.assert_array_equal(rig.get(address, data.nbytes), data)
        thread = threading.Thread(target=backend.free_pinned_blocking, args=(host,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    @fidelity
    def test_pinned_memory_outlives_its_backend(self) -> None:
        """Pinned memory outlives the device it was asked of."""
        backend = self.open()
        address = backend.allocate_pinned_blocking(1 << 20)
        backend.close()
        view = pinned_view(address, 1 << 20)
        view[:] = 9
        assert int(view.sum()) == 9 << 20
        del view
        backend.free_pinned_blocking(address)
