"""Tell whether there is a GPU to run on (rule R14).

Absence and breakage are told apart. No driver library or no device is an answer:
``backend="auto"`` falls back to the simulator. A driver that is there and does not
start is a fault someone has to fix, so it raises and never falls back.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from typing import Any

from streamflow.errors import BackendUnavailable

__all__ = ["why_unavailable"]

_INSTALL = "pip install cuda-python"

_ADVICE = {
    "CUDA_ERROR_STUB_LIBRARY": (
        "the libcuda found is the toolkit's link-time stub: take its 'stubs' folder out of "
        "LD_LIBRARY_PATH, or run the container with the GPU passed in"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda and the kernel module differ in version: reboot, or reload the nvidia module"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "a forward-compatibility libcuda is on the path and this GPU does not support it: "
        "take its 'compat' folder out of LD_LIBRARY_PATH"
    ),
    "CUDA_ERROR_NOT_INITIALIZED": (
        "this process may be a fork of one that used CUDA: start it with the method 'spawn'"
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "start nvidia-fabricmanager, and nvidia-persistenced if it is in use"
    ),
}


def why_unavailable() -> str | None:
    """Why no GPU can be used here, or None where a driver and a device are there.

    Initialises the driver library; makes no context on any device.

    Raises
    ------
    BackendUnavailable
        A driver is there and broken: what was found, and what to try.
    """
    for module in ("cuda.bindings", "cuda.core"):
        if not _is_installed(module):
            return f"{module} is not installed ({_INSTALL})"
    driver = _import_driver()
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError is one
        return _why_not_loaded(error)
    if code.name == "CUDA_ERROR_NO_DEVICE":
        return f"the CUDA driver sees no device{_visible_devices()}"
    if code:
        raise _broken(driver, "cuInit", code)
    _refuse_old_driver(driver)
    code, count = driver.cuDeviceGetCount()
    if code:
        raise _broken(driver, "cuDeviceGetCount", code)
    if count == 0:
        return f"the CUDA driver sees no device{_visible_devices()}"
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _import_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailable(
            f"cuda.bindings is installed and does not import: {error}. Try: {_INSTALL} --upgrade"
        ) from error
    return driver


def _why_not_loaded(error: RuntimeError) -> str:
    """A reason where libcuda is absent; raises where it is there and does not load."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(name)
    except OSError as detail:
        # dlopen says "cannot open shared object file" for a missing file only in company
        # with "No such file"; any other text names a file that exists (wrong ELF class,
        # truncated, a missing dependency), which falling back would hide.
        missing = "No such file" in str(detail) and name in str(detail)
        if missing or sys.platform == "win32":
            return f"no CUDA driver library ({name}) was found"
        raise BackendUnavailable(
            f"the CUDA driver library is there and does not load: {detail}. "
            "Reinstall the NVIDIA driver, or pass the GPU into the container."
        ) from error
    raise BackendUnavailable(
        f"{name} loads, and cuda.bindings could not use it: {error}. Try: {_INSTALL} --upgrade"
    ) from error


def _refuse_old_driver(driver: Any) -> None:
    from cuda import bindings

    code, version = driver.cuDriverGetVersion()
    if code:
        raise _broken(driver, "cuDriverGetVersion", code)
    # Within a major version any driver runs any bindings (CUDA's minor-version compatibility).
    needed = int(bindings.__version__.split(".")[0])
    if version // 1000 < needed:
        found = f"{version // 1000}.{version % 1000 // 10}"
        raise BackendUnavailable(
            f"the NVIDIA driver supports CUDA {found}, and cuda.bindings {bindings.__version__} "
            f"needs {needed}.0 or newer: update the driver, or pip install "
            f"'cuda-python=={version // 1000}.*'"
        )


def _broken(driver: Any, call: str, code: object) -> BackendUnavailable:
    name = getattr(code, "name", str(code))
    _, text = driver.cuGetErrorString(code)
    described = text.decode() if text else "no description"
    advice = _ADVICE.get(name, "see what nvidia-smi says, and the kernel log (dmesg)")
    return BackendUnavailable(
        f"a CUDA driver is there and {call} failed with {name} ({described}). Try: {advice}. "
        "Pass backend='sim' to run on the simulator."
    )


def _visible_devices() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value!r})"
