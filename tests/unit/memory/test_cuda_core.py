"""cuda.core's resources and ours in each other's clothes, without a driver.

What stands for a driver is the simulator: ``is_cuda`` is all that is changed about it, and
buffers are plain objects. ``tests/gpu/test_cuda_core_resources.py`` has the real ones.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from streamflow import memory
from streamflow.errors import BackendUnavailable, Closed

cuda_core = pytest.importorskip("cuda.core")
resources = pytest.importorskip("streamflow.backends.cuda.resources")


class Buffer:
    """A ``cuda.core.Buffer``, as far as it goes: equal to any other of its address and size."""

    def __init__(self, address: int, size: int, mr: Any, stream: Any) -> None:
        self.handle, self.size, self.mr, self.stream = address, size, mr, stream
        self.is_closed = False

    @classmethod
    def from_handle(cls, ptr: int, size: int, mr: Any = None, *, stream: Any = None) -> Buffer:
        return cls(ptr, size, mr, stream)

    def close(self, stream: Any = None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.mr.deallocate(self.handle, self.size, stream=stream or self.stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.handle, self.size))

    def __del__(self) -> None:
        self.close()


class Theirs(cuda_core.MemoryResource):  # type: ignore[misc]
    """A resource that a program wrote for cuda.core, over the simulator's memory."""

    is_device_accessible = True
    is_host_accessible = False
    device_id = 0

    def __init__(self, lab: Any, offset: int = 0) -> None:
        self.lab, self.offset = lab, offset
        self.pool = lab.device.create_pool(release_threshold_nbytes=1 << 62)
        self.sizes: list[int] = []
        self.streams: list[Any] = []

    def allocate(self, size: int, *, stream: Any) -> Buffer:
        self.sizes.append(size)
        address = self.lab.device.allocate(self.pool, size + self.offset, stream)
        return Buffer(address + self.offset, size, self, stream)

    def deallocate(self, ptr: int, size: int, *, stream: Any) -> None:
        self.streams.append(stream)
        self.lab.device.deallocate(ptr - self.offset, stream)


@pytest.fixture
def cuda_lab(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lab.device, "is_cuda", True, raising=False)
    monkeypatch.setattr(resources, "Buffer", Buffer)
    return lab


# -- ours for cuda.core ----------------------------------------------------------------------


def test_cuda_cores_code_allocates_from_ours(cuda_lab: Any) -> None:
    ours = memory.CudaAsyncMemoryResource(device=0)
    theirs = memory.to_cuda_core(ours)
    assert isinstance(theirs, cuda_core.MemoryResource)
    assert (theirs.is_device_accessible, theirs.is_host_accessible) == (True, False)
    assert (theirs.is_managed, theirs.device_id) == (False, 0)
    stream = cuda_lab.stream()
    buffer = theirs.allocate(4096, stream=stream)
    info = cuda_lab.device.pool_info(ours.pool_handle())
    assert info.used_nbytes == 4096
    cuda_lab.device.fill(buffer.handle, b"\x07", 4096, stream)
    buffer.close()
    ours.trim()
    assert cuda_lab.device.pool_info(ours.pool_handle()).used_nbytes == 0


@pytest.mark.parametrize("other", [False, True], ids=["its stream", "another stream"])
def test_a_buffer_is_freed_in_the_order_of_the_stream_that_it_is_closed_on(
    cuda_lab: Any, other: bool
) -> None:
    calls: list[Any] = []
    ours = memory.CallbackMemoryResource(
        lambda stream, *_: 4096, lambda stream, *_: calls.append(stream), device=0
    )
    stream, second = cuda_lab.stream(), cuda_lab.stream()
    buffer = memory.to_cuda_core(ours).allocate(256, stream=stream)
    buffer.close(second if other else None)
    assert calls == []  # perhaps in a finaliser, which calls nobody (R12)
    ours.trim()
    assert calls == [second if other else stream]


def test_a_collected_buffer_is_freed_by_the_next_call_of_any_resource(cuda_lab: Any) -> None:
    ours = memory.CudaAsyncMemoryResource(device=0)
    stream = cuda_lab.stream()
    buffer = memory.to_cuda_core(ours).allocate(4096, stream=stream)
    handle = ours.pool_handle()
    del ours, buffer  # the buffer kept all of it
    gc.collect()
    other = memory.CudaMemoryResource(device=0)
    assert cuda_lab.device.pool_info(handle).used_nbytes == 4096
    other.deallocate(other.allocate(16, stream=stream), stream=stream)
    assert cuda_lab.device.pool_info(handle).used_nbytes == 0


def test_equal_buffers_are_not_mixed_up(cuda_lab: Any) -> None:
    theirs = memory.to_cuda_core(memory.CudaAsyncMemoryResource(device=0))
    stream = cuda_lab.stream()
    one = theirs.allocate(4096, stream=stream)
    address = one.handle
    one.close()
    two = theirs.allocate(4096, stream=stream)  # the same address and size again
    assert two.handle == address
    assert one == two
    one.close()  # closed already: the second one's memory stays
    cuda_lab.device.fill(two.handle, b"\x07", 4096, stream)
    two.close()
    cuda_lab.run()
    assert cuda_lab.device.controls().fault is None


def test_no_bytes_never_reach_ours(cuda_lab: Any) -> None:
    theirs = memory.to_cuda_core(memory.CudaMemoryResource(device=0))
    before = cuda_lab.calls()
    buffer = theirs.allocate(0, stream=cuda_lab.stream())
    assert buffer.handle == 0
    buffer.close()
    assert cuda_lab.calls() == before


def test_a_buffer_that_outlives_its_device_says_nothing(cuda_lab: Any) -> None:
    theirs = memory.to_cuda_core(memory.CudaMemoryResource(device=0))
    buffer = theirs.allocate(4096, stream=cuda_lab.stream())
    cuda_lab.close()
    buffer.close()


def test_a_foreign_pointer_is_refused(cuda_lab: Any) -> None:
    theirs = memory.to_cuda_core(memory.CudaMemoryResource(device=0))
    with pytest.raises(ValueError, match="not of"):
        theirs.deallocate(4096, 16, stream=cuda_lab.stream())


def test_managed_memory_is_called_so_through_any_layer(cuda_lab: Any) -> None:
    managed = memory.ManagedMemoryResource(device=0)
    assert memory.to_cuda_core(managed).is_managed
    assert memory.to_cuda_core(memory.PoolMemoryResource(managed, "1MiB")).is_managed
    pinned = memory.to_cuda_core(memory.PinnedHostMemoryResource(device=0))
    assert (pinned.is_host_accessible, pinned.is_managed) == (True, False)


# -- cuda.core's for us ----------------------------------------------------------------------


def test_ours_allocates_from_cuda_cores(cuda_lab: Any) -> None:
    theirs = Theirs(cuda_lab)
    ours = memory.from_cuda_core(theirs)
    assert not ours.is_stream_ordered  # a program's own: nobody says what its frees wait for
    assert (ours.is_device_accessible, ours.is_host_accessible) == (True, False)
    stream = cuda_lab.stream()
    block = ours.allocate(1000, stream=stream)
    gate = cuda_lab.hold(stream)
    cuda_lab.device.fill(block.address, b"\x07", 1000, stream)
    ours.deallocate(block, stream=stream)
    cuda_lab.run()
    ours.trim()
    assert theirs.streams == []  # its free might wait: it comes after the uses
    gate.release()
    cuda_lab.run()
    ours.trim()
    assert theirs.streams == [stream]
    assert theirs.sizes == [1000]


def test_a_stream_ordered_one_is_freed_at_once_in_the_order_of_the_stream(cuda_lab: Any) -> None:
    inner = memory.CudaAsyncMemoryResource(device=0)
    ours = memory.from_cuda_core(memory.to_cuda_core(inner))
    assert ours.is_stream_ordered
    stream = cuda_lab.stream()
    block = ours.allocate(4096, stream=stream)
    gate = cuda_lab.hold(stream)
    ours.deallocate(block, stream=stream)
    inner.trim()
    assert cuda_lab.device.pool_info(inner.pool_handle()).used_nbytes == 0
    gate.release()


def test_it_is_an_upstream_like_any_other(cuda_lab: Any) -> None:
    theirs = Theirs(cuda_lab)
    pool = memory.PoolMemoryResource(memory.from_cuda_core(theirs), "1MiB")
    stream = cuda_lab.stream()
    blocks = [pool.allocate(4096, stream=stream) for _ in range(4)]
    assert len({block.address for block in blocks}) == 4
    for block in blocks:
        pool.deallocate(block, stream=stream)
    assert theirs.sizes == [1 << 20]


def test_addresses_that_are_not_aligned_are_asked_for_again(cuda_lab: Any) -> None:
    theirs = Theirs(cuda_lab, offset=16)
    ours = memory.from_cuda_core(theirs)
    stream = cuda_lab.stream()
    block = ours.allocate(1000, stream=stream, alignment=1024)
    assert block.address % 1024 == 0
    cuda_lab.device.fill(block.address, b"\x07", 1000, stream)
    assert theirs.sizes == [1000, 2024]
    ours.deallocate(block, stream=stream)
    cuda_lab.run()
    ours.trim()
    assert len(theirs.streams) == 2


def test_resources_over_one_are_equal(cuda_lab: Any) -> None:
    theirs = Theirs(cuda_lab)
    one, two = memory.from_cuda_core(theirs), memory.from_cuda_core(theirs)
    assert one == two
    assert hash(one) == hash(two)
    assert one != memory.from_cuda_core(Theirs(cuda_lab))
    stream = cuda_lab.stream()
    two.deallocate(one.allocate(16, stream=stream), stream=stream)


def test_closing_the_device_closes_the_buffers(cuda_lab: Any) -> None:
    theirs = Theirs(cuda_lab)
    ours = memory.from_cuda_core(theirs)
    stream = cuda_lab.stream()
    block = ours.allocate(16, stream=stream)
    cuda_lab.leave()
    assert theirs.streams == [stream]
    assert not block.is_freed


# -- what is refused -------------------------------------------------------------------------


def test_a_simulated_device_says_what_is_wrong_before_cuda_core_is_loaded(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.delitem(sys.modules, "streamflow.backends.cuda.resources")
    with pytest.raises(BackendUnavailable, match="device 0 is simulated"):
        memory.to_cuda_core(memory.CudaMemoryResource(device=0))
    with pytest.raises(BackendUnavailable, match="device 0 is simulated"):
        memory.from_cuda_core(object(), device=0)


def test_a_device_that_is_not_open_is_named() -> None:
    with pytest.raises(Closed, match="device 5"):
        memory.to_cuda_core(memory.CudaMemoryResource(device=5))
    with pytest.raises(Closed, match="device 5"):
        memory.from_cuda_core(object(), device=5)


def test_things_of_the_other_kind_are_refused(cuda_lab: Any) -> None:
    with pytest.raises(TypeError, match="to_cuda_core takes a memory resource"):
        memory.to_cuda_core(Theirs(cuda_lab))
    with pytest.raises(TypeError, match=r"cuda.core MemoryResource"):
        memory.from_cuda_core(memory.CudaMemoryResource(device=0), device=0)


def test_a_resource_of_another_device_is_refused(cuda_lab: Any, open_lab: Any) -> None:
    second = open_lab(1)
    second.device.is_cuda = True
    with pytest.raises(ValueError, match="device 0, not to 1"):
        memory.from_cuda_core(Theirs(cuda_lab), device=1)
