"""What the simulator promises to have in common with a GPU, where no other class shows it.

Each test marked with :func:`~streamflow.testing.contract.harness.fidelity`, here and in the
other classes, is a row of the table in docs/reference/fidelity.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access, Backend, KernelSpec, Parameter
from streamflow.errors import (
    Closed,
    DeviceError,
    DeviceLost,
    LaunchFailed,
    OutOfDeviceMemory,
    StreamflowError,
)
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kernels import AXPY

__all__ = ["FidelityContract", "lose_by_a_bad_address", "lose_by_a_misaligned_one"]

_MIB = 1 << 20
_F32 = np.dtype(np.float32)
_I32 = np.dtype(np.int32)


def _write_one(array: Any) -> None:
    array[0] = 1


FAULT = KernelSpec(
    name="fault",
    parameters=(Parameter("p", "int*", _I32, Access.READ_WRITE),),
    source='extern "C" __global__ void fault(int* p) { *p = 1; }',
    body=_write_one,
)


def lose_by_a_bad_address(backend: Backend) -> None:
    """A kernel writes where nothing was ever allocated."""
    _lose(backend, 16)


def lose_by_a_misaligned_one(backend: Backend) -> None:
    """A kernel writes an int where none can begin."""
    stream = backend.create_stream()
    pool = backend.create_pool(release_threshold_nbytes=0)
    address = backend.allocate(pool, 64, stream)
    stream.sync()
    _lose(backend, address + 1)


def _lose(backend: Backend, address: int) -> None:
    stream = backend.create_stream()
    pool = backend.create_pool(release_threshold_nbytes=0)
    kernel = backend.load_kernel_blocking(FAULT)
    before, after = backend.create_event(), backend.create_event()
    stream.record(before)
    before.sync()
    config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
    backend.launch(stream, config, kernel, backend.array_argument(address, (1,), _I32))
    stream.record(after)
    for verb in (
        after.sync,
        lambda: after.is_done,
        lambda: before.is_done,  # passed before the fault: raises all the same
        lambda: backend.allocate(pool, 16, stream),
        backend.synchronize_blocking,
    ):
        try:
            verb()
        except Exception as error:
            translated = backend.translate(error, "trying on")
            assert isinstance(translated, DeviceLost), repr(translated)
        else:
            raise AssertionError("a call on a lost device succeeded")
    backend.close()


def _closed_stream(rig: Rig) -> Any:
    stream = rig.backend.create_stream()
    stream.close()
    return stream


def _allocate_too_much(rig: Rig) -> None:
    rig.backend.allocate(rig.pool, 1 << 60, rig.stream)


def _overfill_a_bounded_pool(rig: Rig) -> None:
    pool = rig.backend.create_pool(release_threshold_nbytes=0, max_nbytes=64 * _MIB)
    rig.backend.allocate(pool, 1024 * _MIB, rig.stream)


def _allocate_on_a_closed_stream(rig: Rig) -> None:
    rig.backend.allocate(rig.pool, 4096, _closed_stream(rig))


def _free_on_a_closed_stream(rig: Rig) -> None:
    rig.backend.deallocate(rig.empty(4096), _closed_stream(rig))


def _fill_on_a_closed_stream(rig: Rig) -> None:
    rig.backend.fill(rig.empty(4096), b"\x01", 4096, _closed_stream(rig))


def _copy_on_a_closed_stream(rig: Rig) -> None:
    host, _ = rig.pinned(64)
    rig.backend.copy_h2d(rig.empty(64), host, 64, _closed_stream(rig))


def _free_what_was_never_allocated(rig: Rig) -> None:
    rig.backend.deallocate(16, rig.stream)


def _fill_with_three_bytes(rig: Rig) -> None:
    rig.backend.fill(rig.empty(4096), b"abc", 4, rig.stream)


def _launch_a_block_too_large(rig: Rig) -> None:
    backend = rig.backend
    most = backend.properties.max_threads_per_block
    config = backend.launch_config((1, 1, 1), (2 * most, 1, 1), 0)
    kernel = backend.load_kernel_blocking(FAULT)
    backend.launch(rig.stream, config, kernel, backend.array_argument(rig.empty(64), (16,), _I32))


def _time_events_without_timing(rig: Rig) -> None:
    start, end = rig.mark(rig.stream), rig.mark(rig.stream)
    drain(rig.backend, end)
    rig.backend.elapsed_ms(start, end)


MISTAKES: dict[Callable[[Rig], None], type[StreamflowError]] = {
    _allocate_too_much: OutOfDeviceMemory,
    _overfill_a_bounded_pool: OutOfDeviceMemory,
    _allocate_on_a_closed_stream: Closed,
    _free_on_a_closed_stream: Closed,
    _fill_on_a_closed_stream: Closed,
    _copy_on_a_closed_stream: Closed,
    _free_what_was_never_allocated: DeviceError,
    _fill_with_three_bytes: DeviceError,
    _launch_a_block_too_large: LaunchFailed,
    _time_events_without_timing: DeviceError,
}


class FidelityContract(Harness):
    """Overlap, the reuse of memory, limits, and errors, on one device."""

    @fidelity
    def test_copies_both_ways_go_on_while_a_kernel_runs(self, rig: Rig) -> None:
        """Copies in and out go on while a kernel runs."""
        backend, nbytes = rig.backend, _MIB
        source, there = rig.pinned(nbytes)
        target, back = rig.pinned(nbytes)
        there[:] = 3
        first, second = rig.empty(nbytes), rig.put(np.full(nbytes, 4, np.uint8))
        into, out = backend.create_stream(), backend.create_stream()
        rig.finish()
        with self.running(rig, rig.stream):
            kernel = rig.mark(rig.stream)
            backend.copy_h2d(first, source, nbytes, into)
            backend.copy_d2h(target, second, nbytes, out)
            for stream in (into, out):
                rig.finish(stream)
            assert not kernel.is_done
        drain(backend, kernel)
        assert (back == 4).all()
        assert (rig.get(first, nbytes) == 3).all()

    @fidelity
    def test_kernels_of_two_streams_run_at_the_same_time(self, rig: Rig) -> None:
        """A kernel that leaves room does not hold up the kernels of other streams."""
        backend = rig.backend
        other = backend.create_stream()
        address = rig.put(np.ones(64, np.float32).view(np.uint8))
        axpy = backend.load_kernel_blocking(AXPY)
        array = backend.array_argument(address, (64,), _F32)
        config = backend.launch_config((1, 1, 1), (64, 1, 1), 0)
        with self.running(rig, rig.stream):
            first = rig.mark(rig.stream)
            backend.launch(other, config, axpy, array, np.float32(1), array, 64)
            rig.finish(other)
            assert not first.is_done
        drain(backend, first)
        assert (rig.get(address, 256).view(np.float32) == 2).all()
        other.close()

    @fidelity
    def test_memory_is_usable_on_its_stream_at_once(self, rig: Rig) -> None:
        """An allocation's address may be used on its stream before the allocation has run."""
        host, view = rig.pinned(_MIB)
        with self.stall(rig, rig.stream):
            address = rig.empty(_MIB)
            rig.backend.fill(address, b"\x09", _MIB, rig.stream)
            rig.backend.copy_d2h(host, address, _MIB, rig.stream)
        rig.finish()
        assert (view == 9).all()

    @fidelity
    def test_memory_is_reused_by_a_stream_that_waited_for_its_free(self, rig: Rig) -> None:
        """A stream that waits for a free reuses the memory before the free has run."""
        backend, nbytes = rig.backend, 64 * _MIB
        other = backend.create_stream()
        first = backend.allocate(rig.pool, nbytes, rig.stream)
        with self.stall(rig, rig.stream):
            backend.deallocate(first, rig.stream)
            other.wait(rig.mark(rig.stream))
            second = backend.allocate(rig.pool, nbytes, other)
            backend.fill(second, b"\x01", nbytes, other)
            done = rig.mark(other)
            assert backend.pool_info(rig.pool).reserved_high_nbytes < 2 * nbytes
            settle(backend)
            assert not done.is_done
        drain(backend, done)
        backend.deallocate(second, other)
        rig.finish(other)
        other.close()

    @fidelity
    def test_r7_a_held_stream_takes_a_full_queue_without_blocking(self, rig: Rig) -> None:
        """A stream that is held takes nearly its ``num_queued_max`` launches; no call blocks."""
        backend = rig.backend
        num = backend.num_queued_max - 8  # on hardware what holds the stream has a place too
        address = rig.put(np.zeros(4, np.float32).view(np.uint8))
        array = backend.array_argument(address, (1,), _F32)
        one = rig.put(np.ones(1, np.float32).view(np.uint8))
        ones = backend.array_argument(one, (1,), _F32)
        axpy = backend.load_kernel_blocking(AXPY)
        config = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        with self.stall(rig, rig.stream):
            held = rig.mark(rig.stream)
            for _ in range(num):
                backend.launch(rig.stream, config, axpy, array, np.float32(1), ones, 1)
            # Had a call waited for room, what holds the stream would have ended meanwhile.
            assert not held.is_done
        assert rig.get(address, 4).view(np.float32)[0] == num

    @fidelity
    @pytest.mark.parametrize("lose", [lose_by_a_bad_address, lose_by_a_misaligned_one])
    def test_c22_a_fault_in_a_kernel_loses_the_device(
        self, lose: Callable[[Backend], None]
    ) -> None:
        """After a fault in a kernel every call and query fails, done events' too; closing works."""
        self.apart(lose)

    @fidelity
    @pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__[1:])
    def test_the_same_mistakes_are_the_same_errors(
        self, rig: Rig, mistake: Callable[[Rig], None]
    ) -> None:
        """The same mistakes are errors of the same types, and the device stays usable."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            mistake(rig)
        expected = MISTAKES[mistake]
        doing = "launching" if expected is LaunchFailed else "submitting"
        assert type(rig.backend.translate(caught.value, doing)) is expected
        address = rig.put(np.full(64, 5, np.uint8))
        assert (rig.get(address, 64) == 5).all()
