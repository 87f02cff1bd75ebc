"""Allocators of items, and allocators that know their stream."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from streamflow import memory
from streamflow.errors import OutOfDeviceMemory


@pytest.mark.parametrize(
    ("dtype", "num", "nbytes"),
    [
        (np.float32, 10, 40),
        ("i1", 257, 257),
        (np.dtype([("a", "i4"), ("b", "f8")]), np.int32(3), 36),
        (np.float64, 0, 0),
        ("V0", 5, 0),
    ],
)
def test_items_are_counted(lab: Any, dtype: Any, num: Any, nbytes: int) -> None:
    allocator = memory.TypedAllocator(dtype, memory.CudaMemoryResource(device=0))
    stream = lab.stream()
    block = allocator.allocate(num, stream=stream)
    assert block.nbytes == nbytes
    assert bool(block.address) == bool(nbytes)
    allocator.deallocate(block, stream=stream)
    assert block.is_freed


@pytest.mark.parametrize("num", [2**60, 2**61, 2**64, 2**63 // 8])
def test_more_bytes_than_an_address_space_never_reach_the_resource(lab: Any, num: int) -> None:
    allocator = memory.TypedAllocator(np.float64, memory.CudaMemoryResource(device=0))
    before = lab.calls()
    with pytest.raises(OutOfDeviceMemory, match="items of float64"):
        allocator.allocate(num, stream=lab.stream())
    assert lab.calls() == before


@pytest.mark.parametrize(
    ("num", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError), ("4", TypeError)]
)
def test_what_is_no_number_is_refused(lab: Any, num: Any, error: type[Exception]) -> None:
    allocator = memory.TypedAllocator(np.float64, memory.CudaMemoryResource(device=0))
    with pytest.raises(error, match="number of items"):
        allocator.allocate(num, stream=lab.stream())


def test_python_objects_and_things_that_are_no_resource_are_refused() -> None:
    with pytest.raises(TypeError, match="Python objects"):
        memory.TypedAllocator(object, memory.CudaMemoryResource())
    with pytest.raises(TypeError, match="resource="):
        memory.TypedAllocator(np.int8, "cuda")  # type: ignore[arg-type]


def test_allocators_are_equal_exactly_if_their_resources_are() -> None:
    one, two = memory.CudaMemoryResource(device=0), memory.CudaMemoryResource(device=0)
    ints, floats = memory.TypedAllocator(np.int8, one), memory.TypedAllocator(np.float64, two)
    assert one == two
    assert ints == floats
    assert hash(ints) == hash(floats)
    assert ints != memory.TypedAllocator(np.int8, memory.CudaAsyncMemoryResource(device=0))
    assert ints != memory.TypedAllocator(np.int8, memory.CudaMemoryResource(device=1))
    assert ints != one


def test_memory_of_one_type_is_freed_by_an_equal_allocator_of_another(lab: Any) -> None:
    resource = memory.CudaMemoryResource(device=0)
    stream = lab.stream()
    block = memory.TypedAllocator(np.int8, resource).allocate(100, stream=stream)
    memory.TypedAllocator(np.float64, resource).deallocate(block, stream=stream)
    assert block.is_freed


def test_rmms_name_is_the_same_class() -> None:
    assert memory.PolymorphicAllocator is memory.TypedAllocator


def test_a_bound_allocator_uses_its_stream(lab: Any) -> None:
    stream = lab.stream()
    calls: list[Any] = []
    resource = memory.CallbackMemoryResource(
        lambda stream, *_: calls.append(stream) or 4096,
        lambda stream, *_: calls.append(stream),
        device=0,
    )
    bound = memory.StreamAllocatorAdaptor(memory.TypedAllocator(np.int32, resource), stream)
    block = bound.allocate(4)
    assert block.nbytes == 16
    bound.deallocate(block)
    assert calls == [stream, stream]
    direct = memory.StreamAllocatorAdaptor(resource, stream)  # counts bytes
    block = direct.allocate(4)
    assert block.nbytes == 4
    direct.deallocate(block)


def test_bound_allocators_are_equal_exactly_if_their_allocators_are(lab: Any) -> None:
    resource = memory.CudaMemoryResource(device=0)
    ints, floats = (memory.TypedAllocator(dtype, resource) for dtype in (np.int8, np.float64))
    one = memory.StreamAllocatorAdaptor(ints, lab.stream())
    two = memory.StreamAllocatorAdaptor(floats, lab.stream())
    assert one == two
    assert hash(one) == hash(two)
    other = memory.TypedAllocator(np.int8, memory.CudaAsyncMemoryResource(device=0))
    assert one != memory.StreamAllocatorAdaptor(other, one.stream)
    assert one != ints


def test_a_bound_allocator_keeps_its_stream(lab: Any) -> None:
    class Stream:
        pass

    stream = Stream()
    kept = weakref.ref(stream)
    bound = memory.StreamAllocatorAdaptor(memory.CudaMemoryResource(device=0), stream)
    del stream
    gc.collect()
    assert kept() is bound.stream


def test_what_is_no_allocator_or_stream_is_refused(lab: Any) -> None:
    with pytest.raises(TypeError, match="not an allocator"):
        memory.StreamAllocatorAdaptor(object(), lab.stream())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stream"):
        memory.StreamAllocatorAdaptor(memory.CudaMemoryResource(), None)
