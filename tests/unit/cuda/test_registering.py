"""Which driver calls register memory of the program's own, and what is said where they fail."""

from __future__ import annotations

from typing import Any

import pytest

from streamflow.backends.cuda import mapped
from streamflow.backends.memory import MemorySupport
from streamflow.errors import DeviceError, DeviceLost, OutOfDeviceMemory

pytest.importorskip("cuda.bindings", reason="no cuda.bindings on this platform")

from cuda.bindings import driver as real

from streamflow.backends.cuda import memory, registering
from streamflow.backends.cuda.errors import DriverCallError, translate

CODES = real.CUresult
OK = CODES.CUDA_SUCCESS
PLAIN = real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP
READ_ONLY = PLAIN | real.CU_MEMHOSTREGISTER_READ_ONLY


class FakeDriver:
    """Answers one call after the other with what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            return getattr(real, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            return (self.answers.pop(0) if self.answers else OK,)

        return call


class Verbs(memory.MemoryVerbs):
    def __init__(self, **support: bool) -> None:
        self.index = self.num_current = 0
        known = {"has_host_register": True, "has_read_only_host_register": True, **support}
        others = dict.fromkeys(MemorySupport.__dataclass_fields__, True)
        self._memory_support = MemorySupport(**{**others, **known})  # type: ignore[arg-type]

    def set_current(self) -> None:
        self.num_current += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    for module in (memory, registering):
        monkeypatch.setattr(module, "driver", driver)
    return driver


def test_memory_is_registered_for_every_context_and_for_kernels(fake: FakeDriver) -> None:
    verbs = Verbs()
    verbs.register_host_blocking(0x1000, 300, False)
    verbs.unregister_host_blocking(0x1000)
    assert fake.calls == [
        ("cuMemHostRegister", 0x1000, 300, PLAIN),
        ("cuMemHostUnregister", 0x1000),
    ]
    assert verbs.num_current == 2


def test_what_only_looks_read_only_is_registered_in_full(fake: FakeDriver) -> None:
    Verbs().register_host_blocking(0x1000, 300, True)
    assert [call[-1] for call in fake.calls] == [PLAIN]


def test_what_is_mapped_for_reading_only_is_registered_so(fake: FakeDriver) -> None:
    fake.answers = [CODES.CUDA_ERROR_INVALID_VALUE]
    Verbs().register_host_blocking(0x1000, 300, True)
    assert [call[-1] for call in fake.calls] == [PLAIN, READ_ONLY]


def test_a_device_that_can_not_says_so(fake: FakeDriver) -> None:
    fake.answers = [CODES.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DeviceError, match="READ_ONLY_HOST_REGISTER_SUPPORTED is 0"):
        Verbs(has_read_only_host_register=False).register_host_blocking(0x1000, 300, True)
    assert len(fake.calls) == 1
    with pytest.raises(DeviceError, match="HOST_REGISTER_SUPPORTED is 0"):
        Verbs(has_host_register=False).register_host_blocking(0x1000, 300, False)
    assert len(fake.calls) == 1


@pytest.mark.parametrize("is_read_only", [True, False])
@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        ("HOST_MEMORY_ALREADY_REGISTERED", DeviceError, "page-locked already"),
        ("OUT_OF_MEMORY", OutOfDeviceMemory, "ulimit -l"),
        ("INVALID_VALUE", DeviceError, "does not page-lock this memory"),
        ("NOT_PERMITTED", DeviceError, "does not page-lock this memory"),
        ("ILLEGAL_ADDRESS", DeviceLost, "start a new process"),
    ],
)
def test_a_refusal_says_what_may_be_the_matter(
    fake: FakeDriver, code: str, kind: type[Exception], hint: str, is_read_only: bool
) -> None:
    fake.answers = [getattr(CODES, f"CUDA_ERROR_{code}")] * 2
    with pytest.raises(DriverCallError) as caught:
        Verbs().register_host_blocking(0x1000, 300, is_read_only)
    told = translate(caught.value, "pinning")
    assert type(told) is kind
    assert hint in str(told)
    assert f"CUDA_ERROR_{code}" in str(told)
    is_final = code in ("HOST_MEMORY_ALREADY_REGISTERED", "OUT_OF_MEMORY")
    assert len(fake.calls) == (2 if is_read_only and not is_final else 1)


def test_what_was_not_registered_is_not_unregistered(fake: FakeDriver) -> None:
    fake.answers = [CODES.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED]
    with pytest.raises(DriverCallError) as caught:
        Verbs().unregister_host_blocking(0x1000)
    assert "not registered" in str(translate(caught.value, "unpinning"))


def test_the_driver_says_where_a_device_sees_memory(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs, asked = Verbs(), []

    def seen(*args: Any) -> tuple[Any, ...]:
        asked.append(args)
        return OK, real.CUdeviceptr(0x9000)

    monkeypatch.setattr(fake, "cuMemHostGetDevicePointer", seen, raising=False)
    assert verbs.map_pinned(0x1000, 64) == 0x9000
    assert asked == [(0x1000, 0)]
    assert mapped.holds(0x9000 + 63)
    assert not mapped.holds(0x1000)
    verbs.unmap_pinned(0x9000)
    assert not mapped.holds(0x9000)
