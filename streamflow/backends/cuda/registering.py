"""Page-locking memory that the program allocated itself, and what can be wrong with it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError
from streamflow.backends.memory import MemorySupport
from streamflow.errors import DeviceError

__all__ = ["register", "unregister"]

_FLAGS = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
_READ_ONLY = driver.CU_MEMHOSTREGISTER_READ_ONLY

_ALREADY = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
_SHORT = "CUDA_ERROR_OUT_OF_MEMORY"
_HINTS = {
    _ALREADY: "some of it is page-locked already, by this program or by a library in it",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "it was not registered, or not from this address on",
    _SHORT: (
        "the system does not page-lock that much: look at the free memory, at `ulimit -l` and at "
        "the limits of a container"
    ),
}
_NOT_THIS_MEMORY = (
    "the system does not page-lock this memory: it may be mapped for reading only, a file's or "
    "another device's; copy it, or let it be staged"
)
_NOT_THIS_MEMORY_CODES = frozenset(
    f"CUDA_ERROR_{code}"
    for code in ("INVALID_VALUE", "NOT_PERMITTED", "NOT_SUPPORTED", "OPERATING_SYSTEM")
)


def register(address: int, nbytes: int, is_read_only: bool, support: MemorySupport) -> None:
    """Page-lock ``nbytes`` from ``address``, for every context, mapped for devices to reach.

    Raises
    ------
    DeviceError
        The device can't.
    DriverCallError
        The driver doesn't; with a hint at what may be the matter.
    """
    if not support.has_host_register:
        raise DeviceError(
            "this device does not page-lock memory of the program's own (HOST_REGISTER_SUPPORTED "
            "is 0): copies from and to it are staged"
        )
    error = _register(address, nbytes, _FLAGS)
    # Memory that only looks read-only to NumPy is registered in full. What the host really has
    # mapped so needs the flag, and the driver says so by refusing: in which words isn't documented.
    if error and is_read_only and _code_of(error) not in (_ALREADY, _SHORT):
        if not support.has_read_only_host_register:
            raise DeviceError(
                f"{nbytes} bytes at {address:#x} are read-only, and this device does not "
                "page-lock such memory (READ_ONLY_HOST_REGISTER_SUPPORTED is 0): copy it, or let "
                "it be staged"
            ) from DriverCallError(error, "cuMemHostRegister")
        error = _register(address, nbytes, _FLAGS | _READ_ONLY)
    if error:
        raise _told(error, "cuMemHostRegister")


def unregister(address: int) -> None:
    """Have the range that begins at ``address`` be pageable again.

    Raises
    ------
    DriverCallError
        It was not registered, or the device has failed.
    """
    (error,) = driver.cuMemHostUnregister(address)
    if error:
        raise _told(error, "cuMemHostUnregister")


def _register(address: int, nbytes: int, flags: int) -> Any:
    (error,) = driver.cuMemHostRegister(address, nbytes, flags)
    return error


def _code_of(error: Any) -> str:
    return str(getattr(error, "name", ""))


def _told(result: Any, call: str) -> DriverCallError:
    error = DriverCallError(result, call)
    hint = _HINTS.get(error.code)
    if hint is None and error.code in _NOT_THIS_MEMORY_CODES:
        hint = _NOT_THIS_MEMORY
    if hint is not None:
        error.description = f"{hint}; the driver says: {error.description}"
    return error
