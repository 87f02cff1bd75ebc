"""Opening a GPU, without one."""

from __future__ import annotations

import pytest

from streamflow.backends import open_backend
from streamflow.config import Settings
from streamflow.errors import DeviceError, OutOfDeviceMemory

device = pytest.importorskip("streamflow.backends.cuda.device", reason="no CUDA packages here")


class CUDAError(Exception):
    """By name, as cuda.core's."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (CUDAError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), OutOfDeviceMemory),
        (CUDAError("CUDA_ERROR_DEVICE_UNAVAILABLE: busy or unavailable"), DeviceError),
        (ValueError("device 7 does not exist"), ValueError),
    ],
)
def test_what_the_driver_raises_becomes_an_error_of_ours(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: int) -> None:
        raise raised

    monkeypatch.setattr("streamflow.backends.cuda.probe.why_unavailable", lambda: None)
    monkeypatch.setattr(device, "CudaBackend", refuse)
    with pytest.raises(expected) as caught:
        open_backend("cuda", 7, Settings(), "a loop")
    assert "device 7" in str(caught.value)
