"""Stream-ordered pools, their own and others', and what a device has by default."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from streamflow import memory
from streamflow.errors import Closed, DeviceError, OutOfDeviceMemory
from streamflow.memory import default


def info(lab: Any, resource: Any) -> Any:
    return lab.device.pool_info(resource.pool_handle())


def test_the_pool_is_made_at_the_first_allocation(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(device=0)
    assert lab.device.counts["create_pool"] == 0
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    assert lab.device.counts["create_pool"] == 1
    resource.deallocate(block, stream=stream)
    resource.pool_handle()
    assert lab.device.counts["create_pool"] == 1


def test_it_keeps_all_it_reserved_unless_told_otherwise(lab: Any) -> None:
    for threshold, kept in ((None, 1 << 20), (0, 0), ("1MiB", 1 << 20)):
        resource = memory.CudaAsyncMemoryResource(release_threshold=threshold, device=0)
        stream = lab.stream()
        resource.deallocate(resource.allocate(1 << 20, stream=stream), stream=stream)
        lab.device.synchronize_blocking()
        assert info(lab, resource).reserved_nbytes == kept
    assert lab.device.pool_info(lab.device.default_pool()).release_threshold_nbytes == 0


def test_trimming_gives_what_is_unused_back(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(device=0)
    stream = lab.stream()
    block, other = (resource.allocate(1 << 20, stream=stream) for _ in range(2))
    resource.deallocate(other, stream=stream)
    lab.device.synchronize_blocking()
    resource.trim()
    assert info(lab, resource).reserved_nbytes == 1 << 20
    resource.deallocate(block, stream=stream)


def test_an_initial_size_is_reserved_when_the_pool_is_made(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource("8MiB", device=0)
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    assert info(lab, resource).reserved_nbytes >= 8 << 20
    assert info(lab, resource).used_nbytes == 4096
    resource.deallocate(block, stream=stream)


def test_an_initial_size_that_is_not_there_leaves_no_pool_behind(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(1 << 50, device=0)
    with pytest.raises(OutOfDeviceMemory):
        resource.allocate(4096, stream=lab.stream())
    assert lab.device.gpu.pools == [] or all(p.is_destroyed for p in lab.device.gpu.pools)


def test_max_size_bounds_the_pool(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(max_size="2MiB", device=0)
    stream = lab.stream()
    block = resource.allocate(2 << 20, stream=stream)
    with pytest.raises(OutOfDeviceMemory):
        resource.allocate(1 << 20, stream=stream)
    resource.deallocate(block, stream=stream)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"initial_pool_size": -1}, ValueError),
        ({"initial_pool_size": "many"}, ValueError),
        ({"initial_pool_size": True}, TypeError),
        ({"release_threshold": 2**64}, ValueError),
        ({"max_size": 1.5}, TypeError),
        ({"initial_pool_size": 4096, "max_size": 512}, ValueError),
        ({"device": -1}, ValueError),
        ({"device": "cuda:0"}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        memory.CudaAsyncMemoryResource(**options)


@pytest.mark.parametrize(
    ("make", "missing", "words"),
    [
        (memory.CudaAsyncMemoryResource, {"has_pools": False}, "no stream-ordered memory pools"),
        (
            lambda device: memory.CudaAsyncMemoryResource(enable_ipc=True, device=device),
            {"pool_handle_types": frozenset()},
            "shared with other processes",
        ),
        (memory.CudaAsyncManagedMemoryResource, {"has_managed_pools": False}, "CUDA 13"),
        (
            memory.CudaAsyncManagedMemoryResource,
            {"has_concurrent_managed_access": False},
            "concurrent managed access",
        ),
        (memory.ManagedMemoryResource, {"has_managed_memory": False}, "no managed memory"),
        (memory.SystemMemoryResource, {"has_pageable_access": False}, "plain memory"),
        (
            lambda device: memory.SamHeadroomMemoryResource(0, device=device),
            {"has_pageable_access": False},
            "SamHeadroomMemoryResource needs",
        ),
    ],
)
def test_what_a_device_has_not_is_said_at_the_first_allocation(
    lab: Any, make: Any, missing: dict[str, Any], words: str
) -> None:
    lab.without(**missing)
    resource = make(device=0)
    before = lab.calls()
    with pytest.raises(DeviceError, match=words):
        resource.allocate(16, stream=lab.stream())
    assert lab.calls() == before


def test_a_pool_that_can_be_shared_is_asked_for(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(enable_ipc=True, device=0)
    assert resource.pool_handle().is_exportable


def test_a_view_uses_a_pool_and_never_destroys_it(lab: Any) -> None:
    owner = memory.CudaAsyncMemoryResource(device=0)
    stream = lab.stream()
    view = memory.CudaAsyncViewMemoryResource(owner.pool_handle(), device=0)
    block = view.allocate(4096, stream=stream)
    assert info(lab, owner).used_nbytes == 4096
    assert view.pool_handle() is owner.pool_handle()
    view.close()
    view.deallocate(block, stream=stream)
    assert info(lab, owner).used_nbytes == 0
    again = owner.allocate(4096, stream=stream)
    owner.deallocate(again, stream=stream)
    with pytest.raises(Closed):
        view.pool_handle()


def test_views_are_equal_exactly_if_their_pools_are_one(lab: Any) -> None:
    class Pool:
        def __init__(self, handle: object) -> None:
            self.handle = handle

    one, two = (lab.device.create_pool(release_threshold_nbytes=0) for _ in range(2))
    view = memory.CudaAsyncViewMemoryResource(one, device=0)
    assert view == memory.CudaAsyncViewMemoryResource(Pool(one), device=0)
    assert hash(view) == hash(memory.CudaAsyncViewMemoryResource(Pool(one), device=0))
    assert view != memory.CudaAsyncViewMemoryResource(two, device=0)
    stream = lab.stream()
    block = view.allocate(512, stream=stream)
    memory.CudaAsyncViewMemoryResource(Pool(one), device=0).deallocate(block, stream=stream)


@pytest.mark.parametrize("handle", [None, True, "pool"])
def test_a_view_of_no_pool_is_refused(handle: Any) -> None:
    with pytest.raises(TypeError, match="pool"):
        memory.CudaAsyncViewMemoryResource(handle)


def test_same_stream_reuse_takes_no_wait(lab: Any) -> None:
    resource = memory.CudaAsyncMemoryResource(device=0)
    stream = lab.stream()
    for _ in range(8):
        resource.deallocate(resource.allocate(1 << 20, stream=stream), stream=stream)
    assert info(lab, resource).reserved_nbytes == 1 << 20
    assert lab.device.counts["wait"] == 0


def test_without_pools_the_default_cuts_linear_memory_and_warns_once(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "_warned", set())
    lab.without(has_pools=False)
    with pytest.warns(RuntimeWarning, match="no stream-ordered memory pools") as caught:
        resource = default.resource_without_pools(0)
    assert len(caught) == 1
    assert isinstance(resource, memory.PoolMemoryResource)
    assert isinstance(resource.upstream_mr, memory.CudaMemoryResource)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default.resource_without_pools(0)
    stream = lab.stream()
    resource.deallocate(resource.allocate(4096, stream=stream), stream=stream)
    assert lab.device.counts["create_pool"] == 0


def test_a_size_that_is_none_is_refused_by_the_name_of_its_argument(lab: Any) -> None:
    with pytest.raises(ValueError, match="max_size is a number of bytes"):
        memory.CudaAsyncMemoryResource(max_size="much")
