"""The CUDA backend: thin over cuda.core, and cuda.bindings where cuda.core has no call.

Importing this package imports no CUDA module and touches no driver (rule R13):
:mod:`streamflow.backends.cuda.probe` lives in it and runs on machines without either.
"""

from __future__ import annotations

from streamflow.backends.base import Backend
from streamflow.config import Settings

__all__ = ["open_device"]


def open_device(index: int, settings: Settings, loop_key: object) -> Backend:
    """Open GPU ``index``; blocks while its primary context is made.

    Parameters
    ----------
    index : int
        The driver's ordinal, after ``CUDA_VISIBLE_DEVICES``.
    settings : Settings
        Unused so far; every backend takes it.
    loop_key : object
        Unused: any two CUDA streams may depend on each other.

    Raises
    ------
    BackendUnavailable
        No driver, no device, or a driver that is there and broken.
    ValueError
        ``index`` is not a device of this machine.
    DeviceError
        The driver makes no context on it.
    """
    del settings, loop_key
    from streamflow.backends.cuda.probe import why_unavailable
    from streamflow.errors import BackendUnavailable

    reason = why_unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend 'cuda' cannot start: {reason}")
    from streamflow.backends.cuda.device import CudaBackend
    from streamflow.backends.cuda.errors import translate

    try:
        return CudaBackend(index)
    except ValueError:  # the index
        raise
    except Exception as error:  # the driver's own: out of memory, or a device in exclusive mode
        raise translate(error, f"opening device {index}") from error
