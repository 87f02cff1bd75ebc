"""R9: every result of the driver has one place in our tree."""

from __future__ import annotations

import pytest

from streamflow.backends.cuda.errors import DriverCallError, check, code_name, translate
from streamflow.errors import (
    BackendUnavailable,
    Closed,
    CompileFailed,
    DeviceError,
    DeviceLost,
    LaunchFailed,
    OutOfDeviceMemory,
    StreamflowError,
)


class CUDAError(Exception):
    """By name, as cuda.core's."""


class NVRTCError(CUDAError):
    pass


class DynamicLibNotFoundError(RuntimeError):
    """By name, as cuda.pathfinder's."""


class Code(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("OUT_OF_MEMORY", OutOfDeviceMemory),
        ("ILLEGAL_ADDRESS", DeviceLost),
        ("LAUNCH_FAILED", DeviceLost),
        ("LAUNCH_TIMEOUT", DeviceLost),
        ("ASSERT", DeviceLost),
        ("HARDWARE_STACK_ERROR", DeviceLost),
        ("ILLEGAL_INSTRUCTION", DeviceLost),
        ("MISALIGNED_ADDRESS", DeviceLost),
        ("INVALID_ADDRESS_SPACE", DeviceLost),
        ("INVALID_PC", DeviceLost),
        ("ECC_UNCORRECTABLE", DeviceLost),
        ("NVLINK_UNCORRECTABLE", DeviceLost),
        ("UNKNOWN", DeviceLost),
        ("DEVICE_UNAVAILABLE", DeviceLost),
        ("CONTEXT_IS_DESTROYED", DeviceLost),
        ("MPS_RPC_FAILURE", DeviceLost),
        ("MPS_CLIENT_TERMINATED", DeviceLost),
        ("NO_DEVICE", BackendUnavailable),
        ("STUB_LIBRARY", BackendUnavailable),
        ("SYSTEM_DRIVER_MISMATCH", BackendUnavailable),
        ("LAUNCH_OUT_OF_RESOURCES", LaunchFailed),
        ("COOPERATIVE_LAUNCH_TOO_LARGE", LaunchFailed),
        ("INVALID_PTX", CompileFailed),
        ("NO_BINARY_FOR_GPU", CompileFailed),
        ("INVALID_VALUE", DeviceError),
        ("NOT_FOUND", DeviceError),
        ("INVALID_HANDLE", DeviceError),
        ("STREAM_CAPTURE_INVALIDATED", DeviceError),
        ("MADE_NEXT_YEAR", DeviceError),
    ],
)
def test_r9_codes_map_to_the_narrowest_error(code: str, kind: type[StreamflowError]) -> None:
    error = CUDAError(f"CUDA_ERROR_{code}: what the driver\n  says about it.")
    translated = translate(error, "copying x")
    assert type(translated) is kind
    assert translated.__cause__ is error
    assert f"copying x: CUDA_ERROR_{code}: what the driver says about it." in str(translated)


@pytest.mark.parametrize("code", ["INVALID_VALUE", "NOT_SUPPORTED"])
def test_c22_bad_values_of_a_launch_are_a_refused_launch(code: str) -> None:
    error = CUDAError(f"CUDA_ERROR_{code}: no.")
    assert type(translate(error, "launching saxpy")) is LaunchFailed
    assert type(translate(error, "copying x")) is DeviceError


def test_c22_a_fault_seen_while_launching_is_not_a_refused_launch() -> None:
    error = CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: somewhere.")
    assert type(translate(error, "launching saxpy")) is DeviceLost


@pytest.mark.parametrize("kind", [ValueError, TypeError, OverflowError])
def test_c22_cuda_cores_own_refusals_count_as_the_launchs(kind: type[Exception]) -> None:
    translated = translate(kind("grid values must be >= 1"), "launching saxpy")
    assert type(translated) is LaunchFailed
    assert "launching saxpy" in str(translated)
    assert "grid values" in str(translated)


def test_r9_an_error_from_elsewhere_is_a_device_error() -> None:
    translated = translate(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY is only a word here"), "doing x")
    assert type(translated) is DeviceError
    assert "RuntimeError" in str(translated)


def test_r9_a_code_newer_than_the_bindings_is_named_by_number() -> None:
    error = CUDAError("UNEXPECTED ERROR CODE: 4711")
    assert code_name(error) == "UNEXPECTED ERROR CODE: 4711"
    assert type(translate(error, "doing x")) is DeviceError


def test_r9_a_missing_library_is_an_unavailable_backend() -> None:
    error = DynamicLibNotFoundError("no nvrtc")
    assert type(translate(error, "compiling k")) is BackendUnavailable


def test_r9_our_own_errors_pass_unchanged() -> None:
    error = Closed("the stream is closed")
    assert translate(error, "launching x") is error


def test_r9_subclasses_of_cuda_cores_error_are_read_too() -> None:
    assert code_name(NVRTCError("6: NVRTC_ERROR_COMPILATION, compilation log:")) is None
    assert code_name(NVRTCError("CUDA_ERROR_ASSERT: x")) == "CUDA_ERROR_ASSERT"


def test_check_returns_the_value_or_raises_naming_call_and_code() -> None:
    assert check((0,), "cuNothing") is None
    assert check((0, 5), "cuOne") == 5
    with pytest.raises(DriverCallError, match=r"cuMemAlloc.*CUDA_ERROR_OUT_OF_MEMORY") as caught:
        check((Code(2), None), "cuMemAlloc")
    assert caught.value.call == "cuMemAlloc"
    translated = translate(caught.value, "allocating x")
    assert type(translated) is OutOfDeviceMemory
    assert "cuMemAlloc" in str(translated)
    assert isinstance(translated, MemoryError)


def test_every_code_of_the_table_exists_in_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="no bindings on this platform")
    from streamflow.backends.cuda.errors import _REFUSED_LAUNCH, _TABLE

    known = {code.name for code in driver.CUresult}
    # The runtime's name for it; other libraries' errors carry it.
    unknown = set(_TABLE) | _REFUSED_LAUNCH
    assert unknown - known == {"CUDA_ERROR_INSUFFICIENT_DRIVER"}
