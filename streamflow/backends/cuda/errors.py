"""One table from the driver's result codes to streamflow's errors.

Keyed by the codes' names, which cuda.core puts first in the text of its
``CUDAError`` and which do not depend on the version of the bindings. Imports no
CUDA module, so the table is tested on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from streamflow.errors import (
    BackendUnavailable,
    CompileFailed,
    DeviceError,
    DeviceLost,
    LaunchFailed,
    OutOfDeviceMemory,
    StreamflowError,
)

__all__ = ["DriverCallError", "check", "code_name", "translate"]

_STICKY = """
    ILLEGAL_ADDRESS LAUNCH_FAILED LAUNCH_TIMEOUT ASSERT HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION
    MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE INVALID_PC ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE
    CONTAINED TENSOR_MEMORY_LEAK EXTERNAL_DEVICE UNKNOWN DEVICE_UNAVAILABLE CONTEXT_IS_DESTROYED
    MPS_CONNECTION_FAILED MPS_RPC_FAILURE MPS_SERVER_NOT_READY MPS_CLIENT_TERMINATED DEINITIALIZED
"""
_UNAVAILABLE = """
    NO_DEVICE STUB_LIBRARY INSUFFICIENT_DRIVER CALL_REQUIRES_NEWER_DRIVER SYSTEM_DRIVER_MISMATCH
    COMPAT_NOT_SUPPORTED_ON_DEVICE SYSTEM_NOT_READY NOT_INITIALIZED INSUFFICIENT_LOADER_VERSION
    DEVICE_NOT_LICENSED MPS_MAX_CLIENTS_REACHED MPS_MAX_CONNECTIONS_REACHED JIT_COMPILER_NOT_FOUND
"""
_LAUNCH = """
    LAUNCH_OUT_OF_RESOURCES LAUNCH_INCOMPATIBLE_TEXTURING COOPERATIVE_LAUNCH_TOO_LARGE
    INVALID_CLUSTER_SIZE INVALID_RESOURCE_CONFIGURATION INVALID_RESOURCE_TYPE
"""
_CODE = """
    INVALID_IMAGE INVALID_PTX NO_BINARY_FOR_GPU UNSUPPORTED_PTX_VERSION INVALID_SOURCE
    JIT_COMPILATION_DISABLED UNSUPPORTED_DEVSIDE_SYNC
"""

# NOT_FOUND, INVALID_HANDLE and the like stay plain DeviceErrors: they are found by a
# miss here. INVALID_VALUE depends on what was being done; see _classify.
_TABLE: dict[str, type[StreamflowError]] = {
    f"CUDA_ERROR_{code}": kind
    for codes, kind in (
        ("OUT_OF_MEMORY", OutOfDeviceMemory),
        (_STICKY, DeviceLost),
        (_UNAVAILABLE, BackendUnavailable),
        (_LAUNCH, LaunchFailed),
        (_CODE, CompileFailed),
    )
    for code in codes.split()
}

# What a launch refuses with when its shape, shared memory or arguments are wrong.
_REFUSED_LAUNCH = frozenset({"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"})

# cuda.core: "CUDA_ERROR_X: explanation"; for codes newer than its bindings,
# "UNEXPECTED ERROR CODE: 123".
_CUDA_CORE_TEXT = re.compile(r"(CUDA_ERROR_\w+|UNEXPECTED ERROR CODE: \d+)(?::\s*(.*))?", re.DOTALL)


class DriverCallError(Exception):
    """A driver call of ours returned something other than success.

    Attributes
    ----------
    code : str
        The result's name, ``CUDA_ERROR_...``.
    call : str
        The driver function.
    description : str
        The driver's own words.
    """

    def __init__(self, result: Any, call: str) -> None:
        self.code: str = getattr(result, "name", f"CUresult {result}")
        self.call = call
        self.description = _describe(result)
        super().__init__(f"{call} returned {self.code}: {self.description}")


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a ``cuda.bindings`` result tuple.

    Raises
    ------
    DriverCallError
        The call did not succeed.
    """
    if result[0]:
        raise DriverCallError(result[0], call)
    return result[1] if len(result) == 2 else None


def code_name(error: BaseException) -> str | None:
    """The driver's name for what ``error`` carries; None where it carries no code."""
    if isinstance(error, DriverCallError):
        return error.code
    found = _CUDA_CORE_TEXT.match(str(error)) if _is_from_cuda(error) else None
    return found.group(1) if found else None


def translate(error: BaseException, doing: str) -> StreamflowError:
    """``error`` as one of streamflow's, saying what was being done.

    Parameters
    ----------
    error : BaseException
        What a verb of the backend, a stream or an event raised.
    doing : str
        A participle phrase, such as ``"launching saxpy"``. Where it starts with
        "launch", bad values count as a refused launch.
    """
    if isinstance(error, StreamflowError):
        return error
    code = code_name(error)
    kind = _classify(code, error, doing)
    said = _words(error)
    message = f"{doing}: {said}" if code is None else f"{doing}: {code}: {said}"
    translated = _MAKERS.get(kind, kind)(message)
    translated.__cause__ = error
    return translated


def _classify(code: str | None, error: BaseException, doing: str) -> type[StreamflowError]:
    is_launch = doing.startswith("launch")
    if code is None:
        if type(error).__name__ == "DynamicLibNotFoundError":
            return BackendUnavailable
        # cuda.core checks shapes and argument types before it calls the driver.
        refused = isinstance(error, (ValueError, TypeError, OverflowError))
        return LaunchFailed if is_launch and refused else DeviceError
    if is_launch and code in _REFUSED_LAUNCH:
        return LaunchFailed
    return _TABLE.get(code, DeviceError)


def _words(error: BaseException) -> str:
    if isinstance(error, DriverCallError):
        return f"{error.description} ({error.call})"
    if _is_from_cuda(error):
        found = _CUDA_CORE_TEXT.match(str(error))
        if found:
            return " ".join((found.group(2) or "no description").split())
    return f"{type(error).__name__}: {error}"


def _lost(message: str) -> DeviceLost:
    return DeviceLost(
        f"{message}. Nothing that runs on this device in this process can succeed any more; "
        "start a new process."
    )


def _out_of_memory(message: str) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(f"{message}. The device stays usable.")


_MAKERS: dict[type[StreamflowError], Callable[[str], StreamflowError]] = {
    DeviceLost: _lost,
    OutOfDeviceMemory: _out_of_memory,
}


def _is_from_cuda(error: BaseException) -> bool:
    # By name: importing cuda.core here would make this module need it.
    return any(base.__name__ == "CUDAError" for base in type(error).__mro__)


def _describe(result: Any) -> str:
    try:
        from cuda.bindings import driver

        code, text = driver.cuGetErrorString(result)
    except (ImportError, RuntimeError, TypeError, ValueError):  # no library to ask
        return "no description"
    return text.decode() if not code and text else "no description"
