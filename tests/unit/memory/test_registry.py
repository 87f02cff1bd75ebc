"""The registry: one resource per device, a stack of ``using`` per task."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextvars import copy_context
from weakref import ref

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from streamflow.memory import registry
from streamflow.memory.blocks import Piece
from streamflow.memory.leaves import CudaMemoryResource
from streamflow.memory.registry import (
    get_current_device_resource,
    get_per_device_resource,
    reset_current_device_resource,
    reset_per_device_resource,
    resource_in_use,
    resource_set_for,
    set_current_device_resource,
    set_per_device_resource,
    using,
)
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place


class Plain(DeviceMemoryResource):
    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        raise NotImplementedError

    def _give(self, piece: Piece, place: Place) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_set", {})
    monkeypatch.setattr(registry, "_initial", {})


def test_a_device_starts_with_cuda_memory_and_always_the_same() -> None:
    first = get_per_device_resource(3)
    assert type(first) is CudaMemoryResource
    assert first.device == 3
    assert get_per_device_resource(3) is first
    assert get_per_device_resource(4) is not first
    assert resource_set_for(3) is None


def test_set_and_reset_return_what_was_there_before() -> None:
    initial, one, two = get_per_device_resource(0), Plain(), Plain(device=0)
    assert set_per_device_resource(0, one) is initial
    assert set_per_device_resource(0, two) is one
    assert get_per_device_resource(0) is two
    assert resource_set_for(0) is two
    assert reset_per_device_resource(0) is two
    assert get_per_device_resource(0) is initial
    assert resource_set_for(0) is None
    assert reset_per_device_resource(0) is initial


def test_each_device_has_its_own() -> None:
    one = Plain()
    set_per_device_resource(1, one)
    assert get_per_device_resource(1) is one
    assert get_per_device_resource(0) is not one
    assert resource_set_for(0) is None


def test_without_an_open_device_the_current_one_is_device_0() -> None:
    initial, one = get_per_device_resource(0), Plain()
    assert set_current_device_resource(one) is initial
    assert get_per_device_resource(0) is one
    assert get_current_device_resource() is one
    assert reset_current_device_resource() is one
    assert resource_set_for(0) is None


@pytest.mark.parametrize("bad", [None, True, "0", 0.0, object(), [0]])
def test_what_is_no_device_is_refused(bad: object) -> None:
    for call in (get_per_device_resource, reset_per_device_resource):
        with pytest.raises(TypeError, match="device= takes a Device or an ordinal"):
            call(bad)
    with pytest.raises(TypeError, match="device= takes a Device or an ordinal"):
        set_per_device_resource(bad, Plain())


@pytest.mark.parametrize("bad", [-1, 2**31, 2**64])
def test_a_bad_ordinal_is_refused(bad: int) -> None:
    for call in (get_per_device_resource, reset_per_device_resource):
        with pytest.raises(ValueError, match="ordinal"):
            call(bad)
    with pytest.raises(ValueError, match="ordinal"):
        set_per_device_resource(bad, Plain())
    assert not registry._set


@pytest.mark.parametrize("bad", [None, 7, object(), Plain])
def test_what_is_no_resource_is_refused(bad: object) -> None:
    for call in (set_current_device_resource, using):
        with pytest.raises(TypeError, match="takes a memory resource"):
            call(bad)
    with pytest.raises(TypeError, match="takes a memory resource"):
        set_per_device_resource(0, bad)
    assert not registry._set


def test_what_resembles_a_resource_is_refused_with_what_makes_one_of_it() -> None:
    class Pool:
        handle = 5

    class TheirResource:
        def allocate(self) -> None: ...

    for found, words in (
        (Pool(), "CudaAsyncViewMemoryResource"),
        (TheirResource(), "from_cuda_core"),
        (CudaMemoryResource, "call the class"),
    ):
        with pytest.raises(TypeError, match=words):
            using(found)  # type: ignore[arg-type]


def test_a_resource_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="was made for device 1 and can't be that of device 0"):
        set_per_device_resource(0, Plain(device=1))
    assert resource_set_for(0) is None


def test_the_registry_keeps_a_resource_until_another_takes_its_place() -> None:
    resource = Plain()
    seen = ref(resource)
    set_per_device_resource(0, resource)
    del resource
    gc.collect()
    assert get_per_device_resource(0) is seen()
    set_per_device_resource(0, Plain())
    gc.collect()
    assert seen() is None


def test_using_nests_and_takes_back_its_own() -> None:
    one, two = Plain(), Plain()
    assert resource_in_use() is None
    with using(one) as given:
        assert given is one
        with using(two):
            assert resource_in_use() is two
        assert resource_in_use() is one
    assert resource_in_use() is None


def test_using_may_be_left_in_any_order() -> None:
    one, two, three = Plain(), Plain(), Plain()
    first, second, third = using(one), using(two), using(three)
    for block in (first, second, third):
        block.__enter__()
    first.__exit__(None, None, None)
    assert resource_in_use() is three
    third.__exit__(None, None, None)
    assert resource_in_use() is two
    first.__exit__(None, None, None)  # once more: takes nothing that is not its own
    assert resource_in_use() is two
    second.__exit__(None, None, None)
    assert resource_in_use() is None


def test_one_using_may_be_entered_inside_itself_and_the_same_resource_used_twice() -> None:
    one, two = Plain(), Plain()
    block, again = using(one), using(one)
    with block, using(two), block, again:
        assert resource_in_use() is one
        again.__exit__(None, None, None)
        block.__exit__(None, None, None)
        assert resource_in_use() is two
        block.__enter__()
    assert resource_in_use() is None


def test_using_ends_with_an_exception_too() -> None:
    with pytest.raises(KeyError), using(Plain()):
        raise KeyError
    assert resource_in_use() is None


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_using_belongs_to_its_task(backend: str) -> None:
    async def main() -> None:
        one, two = Plain(), Plain()
        entered = anyio.Event()

        async def other() -> None:
            assert resource_in_use() is one  # inherited from who started it
            with using(two):
                entered.set()
                await anyio.lowlevel.checkpoint()
                assert resource_in_use() is two

        with using(one):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other)
                await entered.wait()
                assert resource_in_use() is one
        assert resource_in_use() is None

    anyio.run(main, backend=backend)


def test_using_does_not_reach_other_threads() -> None:
    found: list[object] = []
    with using(Plain()):
        thread = threading.Thread(target=lambda: found.append(resource_in_use()))
        thread.start()
        thread.join()
    assert found == [None]


def test_generators_interleaved_and_closed_elsewhere_corrupt_nothing() -> None:
    one, two = Plain(), Plain()

    def steps(resource: DeviceMemoryResource) -> Iterator[None]:
        with using(resource):
            yield
            assert resource_in_use() is not None
            yield

    a, b = steps(one), steps(two)
    next(a)
    next(b)
    assert resource_in_use() is two  # seen by its own task while it is suspended
    a.close()
    assert resource_in_use() is two
    copy_context().run(b.close)  # in a context of its own
    assert resource_in_use() is two
    outer = using(one)
    with outer:
        assert resource_in_use() is one
    assert resource_in_use() is two
    registry._used.set(())


def test_an_ordinal_of_numpy_names_a_device_that_need_not_be_open() -> None:
    assert CudaMemoryResource(device=np.int64(3)).device == 3
