"""Which driver calls the verbs of memory make, with a driver that writes them down."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemoryKind,
    PoolAccess,
    PoolAttribute,
)
from streamflow.errors import DeviceError, OutOfDeviceMemory

pytest.importorskip("cuda.bindings", reason="no cuda.bindings on this platform")

from cuda.bindings import driver as real

from streamflow.backends.cuda import memory, pools, support
from streamflow.backends.cuda.errors import DriverCallError

ASK = real.CUdevice_attribute
POOL = real.CUmemPool_attribute
PLACE = real.CUmemLocationType
OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
H200 = {
    ASK.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: 1,
    ASK.CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: 1 | 8,
    ASK.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: 1,
    ASK.CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED: 1,
    ASK.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED: 1,
    ASK.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: 1,
    ASK.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: 1,
}


class FakeDriver:
    """The real structures and enums; functions that only answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version = 13000
        self.device_attributes: dict[Any, int] = dict(H200)
        self.answers: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuDriverGetVersion": lambda: (OK, self.version),
            "cuDeviceGetAttribute": self._ask,
            "cuMemAlloc": lambda nbytes: (OK, real.CUdeviceptr(0x1000)),
            "cuMemAllocManaged": lambda nbytes, flags: (OK, real.CUdeviceptr(0x2000)),
            "cuMemPoolCreate": lambda options: (OK, real.CUmemoryPool(0x77)),
            "cuDeviceGetDefaultMemPool": lambda index: (OK, real.CUmemoryPool(0x11)),
            "cuDeviceGetMemPool": lambda index: (OK, real.CUmemoryPool(0x11)),
            "cuMemPoolGetAccess": lambda pool, place: (OK, 3),
            "cuMemPoolGetAttribute": lambda pool, attribute: (OK, real.cuuint64_t(12)),
            "cuDeviceCanAccessPeer": lambda one, other: (OK, 0),
        }

    def _ask(self, attribute: Any, index: int) -> tuple[Any, ...]:
        value = self.device_attributes.get(attribute)
        return (INVALID, None) if value is None else (OK, value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(real, name)
        if not name.startswith("cu") or isinstance(found, type):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            answer = self.answers.get(name)
            return (OK,) if answer is None else answer(*args)

        return call

    def made(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, *args in self.calls if called == name]  # type: ignore[misc]


class Verbs(pools.PoolVerbs):
    """Device 0 of two, without one."""

    def __init__(self) -> None:
        self.index = 0
        self._num_devices = 2
        self._pools = {}
        self._streams = {"s": "CUstream"}  # type: ignore[assignment]
        self.num_current = 0

    def set_current(self) -> None:
        self.num_current += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    for module in (memory, pools, support):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(pools, "_shared_pools", set())
    return driver


@pytest.fixture
def verbs(fake: FakeDriver) -> Verbs:
    return Verbs()


def test_support_of_an_h200(fake: FakeDriver, verbs: Verbs) -> None:
    found = verbs.memory_support()
    assert found.has_pools
    assert found.has_managed_pools
    assert found.has_host_pools
    assert found.has_managed_memory
    assert found.has_concurrent_managed_access
    assert found.has_pageable_access
    assert found.pool_handle_types == {"posix_fd", "fabric"}
    num_calls = len(fake.calls)
    assert verbs.memory_support() is found
    assert len(fake.calls) == num_calls


@pytest.mark.parametrize(
    ("version", "asks_pools", "asks_handles"),
    [(11010, False, False), (11020, True, False), (11030, True, True)],
)
def test_support_is_asked_from_the_driver_on_that_knows_it(
    fake: FakeDriver, verbs: Verbs, version: int, asks_pools: bool, asks_handles: bool
) -> None:
    fake.version = version
    found = verbs.memory_support()
    asked = [args[0] for args in fake.made("cuDeviceGetAttribute")]
    assert (ASK.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED in asked) is asks_pools
    assert (ASK.CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES in asked) is asks_handles
    assert found.has_pools is asks_pools
    assert bool(found.pool_handle_types) is asks_handles
    assert not found.has_managed_pools


def test_an_attribute_that_the_driver_does_not_know_is_no(fake: FakeDriver, verbs: Verbs) -> None:
    fake.device_attributes = {ASK.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: 1}
    found = verbs.memory_support()
    assert found.has_pools
    assert not found.has_host_pools
    assert not found.has_pageable_access


def test_another_error_of_a_question_is_an_error(fake: FakeDriver, verbs: Verbs) -> None:
    fake.answers["cuDeviceGetAttribute"] = lambda *args: (
        real.CUresult.CUDA_ERROR_INVALID_DEVICE,
        None,
    )
    with pytest.raises(DriverCallError, match="INVALID_DEVICE"):
        verbs.memory_support()


def test_linear_and_managed_memory(fake: FakeDriver, verbs: Verbs) -> None:
    assert verbs.allocate_linear_blocking(5) == 0x1000
    assert verbs.allocate_managed_blocking(6) == 0x2000
    verbs.free_linear_blocking(0x1000)
    assert fake.calls == [
        ("cuMemAlloc", 5),
        ("cuMemAllocManaged", 6, 1),
        ("cuMemFree", 0x1000),
    ]
    assert verbs.num_current == 3


def test_a_driver_error_is_an_error(fake: FakeDriver, verbs: Verbs) -> None:
    fake.answers["cuMemAlloc"] = lambda nbytes: (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(DriverCallError, match="OUT_OF_MEMORY"):
        verbs.allocate_linear_blocking(5)


@pytest.mark.parametrize("alignment", [1, 64, 256, 1 << 16])
def test_system_memory_is_aligned_and_writable(verbs: Verbs, alignment: int) -> None:
    address = verbs.allocate_system(1000, alignment)
    assert address % alignment == 0
    held = memory._system[address]
    start = int(held.ctypes.data)
    assert start <= address
    assert address + 1000 <= start + held.nbytes
    held[:] = 1
    verbs.free_system(address)
    assert address not in memory._system
    with pytest.raises(DeviceError, match="not the address of system memory"):
        verbs.free_system(address)


def test_system_memory_needs_a_device_that_reads_it(fake: FakeDriver, verbs: Verbs) -> None:
    fake.device_attributes[ASK.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] = 0
    with pytest.raises(DeviceError, match="cannot read the host's plain memory"):
        verbs.allocate_system(64, 256)


def test_bad_system_requests(verbs: Verbs) -> None:
    for alignment in (0, 3, -1):
        with pytest.raises(ValueError, match="power of two"):
            verbs.allocate_system(64, alignment)
    with pytest.raises(ValueError, match="at least 1 byte"):
        verbs.allocate_system(0, 256)
    with pytest.raises(OutOfDeviceMemory):
        verbs.allocate_system(1 << 62, 256)


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        (Location("device", 1), PLACE.CU_MEM_LOCATION_TYPE_DEVICE),
        (Location("host"), PLACE.CU_MEM_LOCATION_TYPE_HOST),
        (Location("numa", 1), PLACE.CU_MEM_LOCATION_TYPE_HOST_NUMA),
    ],
)
def test_prefetch_and_advice(fake: FakeDriver, verbs: Verbs, location: Location, kind: Any) -> None:
    verbs.prefetch(0x2000, 9, location, "s")
    verbs.advise(0x2000, 9, MemoryAdvice.PREFERRED_LOCATION, location)
    ((address, nbytes, place, flags, stream),) = fake.made("cuMemPrefetchAsync")
    assert (address, nbytes, flags, stream) == (0x2000, 9, 0, "CUstream")
    assert (place.type, place.id) == (kind, location.index)
    ((*_, advice, place),) = fake.made("cuMemAdvise")
    assert advice is real.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
    assert (place.type, place.id) == (kind, location.index)


def test_every_advice_has_one_of_the_drivers() -> None:
    assert set(memory._ADVICE) == set(MemoryAdvice)
    assert len(set(memory._ADVICE.values())) == len(MemoryAdvice)


def test_a_place_of_no_kind_is_refused(verbs: Verbs) -> None:
    with pytest.raises(ValueError, match="'moon'"):
        verbs.prefetch(0x2000, 9, Location("moon"), "s")


@pytest.mark.parametrize(
    ("answer", "kind", "device_index", "has_context", "is_on_device", "is_on_host"),
    [
        ((2, 0, 1, 0xC, 0x10), MemoryKind.DEVICE, 1, True, True, False),
        ((2, 0, 1, 0, 0x10), MemoryKind.DEVICE, 1, False, True, False),
        ((1, 0, 0, 0xC, 0x10), MemoryKind.HOST, None, True, True, True),
        ((2, 1, 0, 0xC, 0x10), MemoryKind.MANAGED, None, True, True, True),
        ((0, 0, -2, 0, 0), MemoryKind.UNREGISTERED, None, False, True, True),
    ],
)
def test_what_is_known_of_a_pointer(
    fake: FakeDriver,
    verbs: Verbs,
    answer: tuple[int, ...],
    kind: MemoryKind,
    device_index: int | None,
    has_context: bool,
    is_on_device: bool,
    is_on_host: bool,
) -> None:
    memory_type, is_managed, ordinal, context, pointer = answer

    def answering(num: int, asked: list[Any], address: int) -> tuple[Any, ...]:
        assert (num, address) == (6, 0x10)
        context_, pointer_ = real.CUcontext(context), real.CUdeviceptr(pointer)
        pool = real.CUmemoryPool(0x11)
        return OK, [memory_type, bool(is_managed), ordinal, context_, pointer_, pool]

    fake.answers["cuPointerGetAttributes"] = answering
    found = verbs.pointer_attributes(0x10)
    assert found.kind is kind
    assert found.device_index == device_index
    assert found.has_context is has_context
    assert found.is_device_accessible is is_on_device
    assert found.is_host_accessible is is_on_host
    assert found.pool is verbs.default_pool()


def test_an_old_driver_is_not_asked_for_the_pool(fake: FakeDriver, verbs: Verbs) -> None:
    fake.version = 11020
    fake.answers["cuPointerGetAttributes"] = lambda num, asked, address: (
        OK,
        [2, False, 0, real.CUcontext(1), real.CUdeviceptr(1)],
    )
    assert verbs.pointer_attributes(1).pool is None
    ((num, asked, _),) = fake.made("cuPointerGetAttributes")
    assert num == len(asked) == 5


def test_a_pool_on_the_device(fake: FakeDriver, verbs: Verbs) -> None:
    pool = verbs.create_pool(release_threshold_nbytes=7, max_nbytes=99, is_exportable=True)
    ((options,),) = fake.made("cuMemPoolCreate")
    assert options.allocType is real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert options.location.type is PLACE.CU_MEM_LOCATION_TYPE_DEVICE
    assert (options.location.id, options.maxSize) == (0, 99)
    handle = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert options.handleTypes == handle
    ((given, attribute, value),) = fake.made("cuMemPoolSetAttribute")
    assert given is pool
    assert attribute is POOL.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    assert isinstance(value, real.cuuint64_t)
    assert int(value) == 7
    assert not fake.made("cuMemPoolSetAccess")
    assert verbs._same_pool(real.CUmemoryPool(0x77)) is pool


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        (Location("host"), PLACE.CU_MEM_LOCATION_TYPE_HOST),
        (Location("numa", 1), PLACE.CU_MEM_LOCATION_TYPE_HOST_NUMA),
    ],
)
def test_a_pool_on_the_host_is_opened_to_its_device(
    fake: FakeDriver, verbs: Verbs, location: Location, kind: Any
) -> None:
    pool = verbs.create_pool(release_threshold_nbytes=0, location=location)
    ((options,),) = fake.made("cuMemPoolCreate")
    assert (options.location.type, options.location.id) == (kind, location.index)
    ((given, (wanted,), num),) = fake.made("cuMemPoolSetAccess")
    assert given is pool
    assert num == 1
    assert wanted.location.type is PLACE.CU_MEM_LOCATION_TYPE_DEVICE
    assert wanted.location.id == 0
    assert wanted.flags is real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    # Any other device may be let in as well: no peers are needed.
    verbs.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
    assert not fake.made("cuDeviceCanAccessPeer")
    with pytest.raises(DeviceError, match="one that lies there"):
        verbs.set_current_pool(pool)
    assert not fake.made("cuDeviceSetMemPool")


def test_a_handle_that_comes_again_is_another_pool(fake: FakeDriver, verbs: Verbs) -> None:
    verbs.create_pool(release_threshold_nbytes=0, location=Location("host"))
    pool = Verbs().create_pool(release_threshold_nbytes=0)
    with pytest.raises(DeviceError, match="cannot reach"):
        verbs.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
    verbs.set_current_pool(pool)


@pytest.mark.parametrize("location", [None, Location("device", 0), Location("host")])
def test_a_managed_pool(fake: FakeDriver, verbs: Verbs, location: Location | None) -> None:
    verbs.create_pool(release_threshold_nbytes=0, location=location, is_managed=True)
    ((options,),) = fake.made("cuMemPoolCreate")
    assert options.allocType is real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    wanted = {
        None: PLACE.CU_MEM_LOCATION_TYPE_NONE,
        Location("device", 0): PLACE.CU_MEM_LOCATION_TYPE_DEVICE,
        Location("host"): PLACE.CU_MEM_LOCATION_TYPE_HOST,
    }[location]
    assert options.location.type is wanted
    assert not fake.made("cuMemPoolSetAccess")


@pytest.mark.parametrize(
    ("attribute", "options", "words"),
    [
        (ASK.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, {}, "no stream-ordered pools"),
        (
            ASK.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
            {"is_managed": True},
            "no managed pools",
        ),
        (
            ASK.CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
            {"is_exportable": True},
            "does not share pools",
        ),
    ],
)
def test_what_is_not_offered_is_refused_with_its_name(
    fake: FakeDriver, verbs: Verbs, attribute: Any, options: dict[str, bool], words: str
) -> None:
    fake.device_attributes[attribute] = 0
    with pytest.raises(DeviceError, match=words):
        verbs.create_pool(release_threshold_nbytes=0, **options)
    assert not fake.made("cuMemPoolCreate")


def test_host_pools_are_refused_where_there_are_none(fake: FakeDriver, verbs: Verbs) -> None:
    fake.device_attributes[ASK.CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED] = 0
    fake.device_attributes[ASK.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED] = 0
    with pytest.raises(DeviceError, match="no pools on the host"):
        verbs.create_pool(release_threshold_nbytes=0, location=Location("host"))


def test_requests_that_no_driver_takes(verbs: Verbs) -> None:
    with pytest.raises(ValueError, match="takes no bound"):
        verbs.create_pool(release_threshold_nbytes=0, is_managed=True, max_nbytes=1)
    with pytest.raises(DeviceError, match="only a pool on a device"):
        verbs.create_pool(release_threshold_nbytes=0, is_managed=True, is_exportable=True)
    with pytest.raises(ValueError, match="made by that device"):
        verbs.create_pool(release_threshold_nbytes=0, location=Location("device", 1))


def test_a_pool_that_cannot_be_set_up_is_destroyed(fake: FakeDriver, verbs: Verbs) -> None:
    fake.answers["cuMemPoolSetAttribute"] = lambda *args: (INVALID,)
    with pytest.raises(DriverCallError):
        verbs.create_pool(release_threshold_nbytes=0)
    assert len(fake.made("cuMemPoolDestroy")) == 1
    assert not verbs._pools


def test_attributes_are_given_as_the_bindings_want_them(fake: FakeDriver, verbs: Verbs) -> None:
    pool = verbs.default_pool()
    verbs.set_pool_attribute(pool, PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC, 0)
    verbs.set_pool_attribute(pool, PoolAttribute.USED_HIGH, 0)
    (_, _, switch), (_, mark, zero) = fake.made("cuMemPoolSetAttribute")
    assert switch == 0
    assert type(switch) is int
    assert mark is POOL.CU_MEMPOOL_ATTR_USED_MEM_HIGH
    assert isinstance(zero, real.cuuint64_t)
    assert verbs.pool_attribute(pool, PoolAttribute.USED_HIGH) == 12
    assert set(pools._ATTRIBUTES) == set(PoolAttribute)


@pytest.mark.parametrize("attribute", [PoolAttribute.USED_CURRENT, PoolAttribute.RESERVED_CURRENT])
def test_current_values_are_never_set(
    fake: FakeDriver, verbs: Verbs, attribute: PoolAttribute
) -> None:
    with pytest.raises(DeviceError, match="can only be read"):
        verbs.set_pool_attribute(verbs.default_pool(), attribute, 0)
    assert not fake.made("cuMemPoolSetAttribute")


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_values_beyond_64_bits(verbs: Verbs, value: int) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        verbs.set_pool_attribute(verbs.default_pool(), PoolAttribute.RELEASE_THRESHOLD, value)


def test_the_default_pool_is_asked_for_once_and_stays(fake: FakeDriver, verbs: Verbs) -> None:
    assert verbs.default_pool() is verbs.default_pool()
    assert verbs.current_pool() is verbs.default_pool()
    assert len(fake.made("cuDeviceGetDefaultMemPool")) == 1
    with pytest.raises(DeviceError, match="default pool"):
        verbs.destroy_pool(verbs.default_pool())
    assert not fake.made("cuMemPoolSetAttribute")
    assert not fake.made("cuMemPoolTrimTo")


def test_a_current_pool_that_is_destroyed_gives_way_to_the_default(
    fake: FakeDriver, verbs: Verbs
) -> None:
    pool = verbs.create_pool(release_threshold_nbytes=0)
    fake.answers["cuDeviceGetMemPool"] = lambda index: (OK, real.CUmemoryPool(0x77))
    assert verbs.current_pool() is pool
    verbs.destroy_pool(pool)
    ((index, given),) = fake.made("cuDeviceSetMemPool")
    assert (index, int(given)) == (0, 0x11)


def test_access_is_granted_to_peers_only(fake: FakeDriver, verbs: Verbs) -> None:
    pool = verbs.create_pool(release_threshold_nbytes=0)
    assert not verbs.can_access_peer(1)
    assert not verbs.can_access_peer(0)
    with pytest.raises(DeviceError, match="device 1 cannot reach the memory of 0"):
        verbs.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
    assert not fake.made("cuMemPoolSetAccess")
    fake.answers["cuDeviceCanAccessPeer"] = lambda one, other: (OK, int((one, other) == (1, 0)))
    verbs.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
    ((_, (wanted,), _),) = fake.made("cuMemPoolSetAccess")
    assert wanted.location.id == 1
    assert verbs.pool_access(pool, 1) is PoolAccess.READ_WRITE


def test_the_owners_access_is_never_revoked(fake: FakeDriver, verbs: Verbs) -> None:
    pool = verbs.create_pool(release_threshold_nbytes=0)
    with pytest.raises(DeviceError, match="can't be revoked"):
        verbs.set_pool_access_blocking(pool, 0, PoolAccess.NONE)
    assert not fake.made("cuMemPoolSetAccess")


@pytest.mark.parametrize("index", [-1, 2])
def test_a_device_that_is_not_there(verbs: Verbs, index: int) -> None:
    pool = verbs.default_pool()
    for call in (
        lambda: verbs.can_access_peer(index),
        lambda: verbs.pool_access(pool, index),
        lambda: verbs.set_pool_access_blocking(pool, index, PoolAccess.READ_WRITE),
    ):
        with pytest.raises(DeviceError, match="does not exist"):
            call()


def test_system_memory_is_numpys(verbs: Verbs) -> None:
    address = verbs.allocate_system(64, 256)
    assert isinstance(memory._system[address], np.ndarray)
    verbs.free_system(address)


def _device(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A whole backend, but for its making."""
    from streamflow.backends.cuda import device

    monkeypatch.setattr(device, "driver", fake)
    for name in ("_copy_h2d", "_copy_d2h", "_copy_d2d"):
        monkeypatch.setattr(device, name, lambda dst, src, nbytes, stream: (INVALID,))
    made = object.__new__(device.CudaBackend)
    made.index, made._num_devices, made._streams, made._noting = 0, 1, {"s": "CUstream"}, {}
    return made


@pytest.mark.parametrize("way", ["copy_h2d", "copy_d2h", "copy_d2d"])
def test_a_copy_of_plain_host_memory_goes_by_its_addresses(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    device = _device(fake, monkeypatch)
    getattr(device, way)(0x10, 0x20, 9, "s")
    assert fake.made("cuMemcpyAsync") == [[0x10, 0x20, 9, "CUstream"]]


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_copy_that_is_refused_either_way_is_an_error(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    fake.device_attributes[ASK.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] = int(is_readable)
    fake.answers["cuMemcpyAsync"] = lambda *args: (INVALID,)
    device = _device(fake, monkeypatch)
    unknown = SimpleNamespace(kind=MemoryKind.UNREGISTERED)
    monkeypatch.setattr(device, "pointer_attributes", lambda address: unknown)
    with pytest.raises(DriverCallError, match="cuMemcpyHtoDAsync"):
        device.copy_h2d(0x10, 0x20, 9, "s")
    assert bool(fake.made("cuMemcpyAsync")) is is_readable


def test_a_wide_fill_of_what_no_named_copy_takes_goes_by_its_addresses(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _device(fake, monkeypatch)
    device.fill(0x1000, bytes(range(8)), 10_000, "s")
    written = 8 * 4096
    assert fake.made("cuMemcpyAsync") == [
        [0x1000 + written, 0x1000, written, "CUstream"],
        [0x1000 + 2 * written, 0x1000, 80_000 - 2 * written, "CUstream"],
    ]
