"""Which page-locked memory arrays may lie in, and how copies between two such blocks go."""

from __future__ import annotations

from typing import Any

import pytest

from streamflow.backends.cuda import mapped

pytest.importorskip("cuda.core", reason="no cuda.core on this platform")

from streamflow.backends.cuda import device as module
from streamflow.backends.cuda.device import CudaBackend

BASE = 1 << 40


@pytest.fixture
def block() -> Any:
    mapped.add(BASE, 256)
    yield BASE
    mapped.remove(BASE)


def test_it_holds_what_lies_in_a_block_and_nothing_beside_it(block: int) -> None:
    assert mapped.holds(block)
    assert mapped.holds(block + 255)
    assert not mapped.holds(block - 1)
    assert not mapped.holds(block + 256)
    mapped.remove(block)
    assert not mapped.holds(block)
    mapped.remove(block)  # harmless


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend whose driver calls are written down."""
    made = CudaBackend.__new__(CudaBackend)
    made.calls = []  # type: ignore[attr-defined]
    made._num_devices, made._between, made._noting = 1, "pool", {}
    made._streams = {"s": "handle"}  # type: ignore[assignment]

    def note(name: str) -> Any:
        return lambda *args: made.calls.append((name, *args)) or (0,)  # type: ignore[attr-defined]

    for name in ("_copy_h2d", "_copy_d2h", "_copy_d2d", "_free"):
        monkeypatch.setattr(module, name, note(name))
    monkeypatch.setattr(module, "_allocate", lambda *args: (note("_allocate")(*args), (0, 7))[1])
    monkeypatch.setattr(module, "CHUNK_NBYTES", 100)
    return made


def test_a_copy_between_two_blocks_on_the_host_goes_by_the_device(backend: Any, block: int) -> None:
    backend.copy_h2d(block, 0x10, 250, "s")
    assert backend.calls == [
        ("_allocate", 100, "pool", "handle"),
        ("_copy_h2d", 7, 0x10, 100, "handle"),
        ("_copy_d2h", block, 7, 100, "handle"),
        ("_copy_h2d", 7, 0x10 + 100, 100, "handle"),
        ("_copy_d2h", block + 100, 7, 100, "handle"),
        ("_copy_h2d", 7, 0x10 + 200, 50, "handle"),
        ("_copy_d2h", block + 200, 7, 50, "handle"),
        ("_free", 7, "handle"),
    ]


def test_other_copies_go_straight(backend: Any, block: int) -> None:
    backend.copy_h2d(0x20, 0x10, 8, "s")
    backend.copy_d2h(0x10, 0x20, 8, "s")
    backend.copy_d2d(block, 0x20, 8, "s")
    backend.copy_d2d(0x20, block, 8, "s")
    assert [call[0] for call in backend.calls] == [
        "_copy_h2d",
        "_copy_d2h",
        "_copy_d2d",
        "_copy_d2d",
    ]


def test_what_lies_between_is_freed_when_a_copy_fails(
    backend: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_copy_d2h", lambda *args: (module.driver.CUresult(1),))
    with pytest.raises(module.DriverCallError, match="cuMemcpyDtoHAsync"):
        backend.copy_d2h(0x10, block, 8, "s")
    assert backend.calls[-1] == ("_free", 7, "handle")
