"""R14: an absent driver is an answer, a broken one an error."""

# ruff: noqa: N802 - the driver's own names
from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import streamflow.backends.cuda.probe as probe
from streamflow.backends import choose_backend
from streamflow.backends.cuda import open_device
from streamflow.config import Settings
from streamflow.errors import BackendUnavailable


class Code(int):
    """A result of the driver, as cuda.bindings gives it: an int with a name."""

    name: str

    def __new__(cls, value: int, name: str) -> Code:
        code = super().__new__(cls, value)
        code.name = name
        return code


SUCCESS = Code(0, "CUDA_SUCCESS")


class Driver:
    """As much of cuda.bindings.driver as the probe calls; making a context is not in it."""

    def __init__(self, init: Code = SUCCESS, *, num_devices: int = 1, version: int = 13000) -> None:
        self.init = init
        self.num_devices = num_devices
        self.version = version

    def cuInit(self, flags: int) -> tuple[Code]:
        assert flags == 0
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Code, int]:
        return SUCCESS, self.num_devices

    def cuDriverGetVersion(self) -> tuple[Code, int]:
        return SUCCESS, self.version

    def cuGetErrorString(self, code: Code) -> tuple[Code, bytes]:
        return SUCCESS, f"words for {code.name}".encode()


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(driver: Any, bindings: str = "13.4.4") -> None:
        monkeypatch.setattr(probe, "_is_installed", lambda module: True)
        monkeypatch.setattr(probe, "_import_driver", lambda: driver)
        package: Any = SimpleNamespace(bindings=SimpleNamespace(__version__=bindings))
        monkeypatch.setitem(sys.modules, "cuda", package)

    return install


def test_r14_a_driver_and_a_device_are_available(with_driver: Any) -> None:
    with_driver(Driver())
    assert probe.why_unavailable() is None
    assert choose_backend("auto") == ("cuda", None)


@pytest.mark.parametrize("missing", ["cuda.bindings", "cuda.core"])
def test_r14_missing_packages_are_a_reason(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(probe, "_is_installed", lambda module: module != missing)
    monkeypatch.setattr(probe, "_import_driver", Driver)
    reason = probe.why_unavailable()
    assert reason is not None
    assert missing in reason
    assert "pip install" in reason


def test_r14_a_package_without_its_parent_is_missing() -> None:
    assert not probe._is_installed("no_such_parent.child")
    assert probe._is_installed("importlib.util")


@pytest.mark.parametrize(
    "driver", [Driver(Code(100, "CUDA_ERROR_NO_DEVICE")), Driver(num_devices=0)]
)
def test_r14_no_device_is_a_reason(
    with_driver: Any, monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with_driver(driver)
    reason = probe.why_unavailable()
    assert reason is not None
    assert "no device" in reason
    assert "CUDA_VISIBLE_DEVICES='-1'" in reason


class _NotLoaded(Driver):
    def cuInit(self, flags: int) -> tuple[Code]:
        raise RuntimeError("libcuda can only be found via system search")


def _cdll(outcome: OSError | None) -> Any:
    def load(name: str) -> object:
        if outcome is not None:
            raise outcome
        return object()

    return load


_ABSENT = OSError("libcuda.so.1: cannot open shared object file: No such file or directory")


def test_r14_no_driver_library_is_a_reason(
    with_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", _cdll(_ABSENT))
    with_driver(_NotLoaded())
    assert probe.why_unavailable() == "no CUDA driver library (libcuda.so.1) was found"
    name, reason = choose_backend("auto")
    assert name == "sim"
    assert reason is not None


@pytest.mark.parametrize(
    "outcome",
    [
        OSError("/usr/lib/libcuda.so.1: file too short"),
        OSError("libnvidia-x.so.1: cannot open shared object file: No such file or directory"),
        None,  # loads, and yet the bindings could not use it
    ],
)
def test_r14_a_library_that_does_not_load_raises(
    with_driver: Any, monkeypatch: pytest.MonkeyPatch, outcome: OSError | None
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", _cdll(outcome))
    with_driver(_NotLoaded())
    with pytest.raises(BackendUnavailable) as caught:
        probe.why_unavailable()
    assert "libcuda" in str(caught.value) or "driver library" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (Code(34, "CUDA_ERROR_STUB_LIBRARY"), "stubs"),
        (Code(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), "reboot"),
        (Code(3, "CUDA_ERROR_NOT_INITIALIZED"), "spawn"),
        (Code(999, "CUDA_ERROR_UNKNOWN"), "nvidia-smi"),
    ],
)
def test_r14_a_driver_that_does_not_start_raises(with_driver: Any, code: Code, advice: str) -> None:
    with_driver(Driver(code))
    with pytest.raises(BackendUnavailable, match=advice) as caught:
        choose_backend("auto")
    assert code.name in str(caught.value)
    assert f"words for {code.name}" in str(caught.value)


def test_r14_a_driver_older_than_the_bindings_raises(with_driver: Any) -> None:
    with_driver(Driver(version=12040))
    with pytest.raises(BackendUnavailable, match=r"CUDA 12\.4.*13\.0 or newer"):
        probe.why_unavailable()


def test_r14_an_older_minor_version_is_fine(with_driver: Any) -> None:
    with_driver(Driver(version=13000), bindings="13.9.1")
    assert probe.why_unavailable() is None


def test_r14_insisting_on_cuda_without_a_device_raises(with_driver: Any) -> None:
    with_driver(Driver(num_devices=0))
    with pytest.raises(BackendUnavailable, match="no device"):
        open_device(0, Settings(), None)


def test_r13_importing_the_probe_imports_no_cuda() -> None:
    program = (
        "import sys, streamflow.backends.cuda.probe, streamflow.backends.cuda.errors\n"
        "import streamflow.backends.cuda.fills, streamflow.backends.cuda.compiler\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'cuda'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
