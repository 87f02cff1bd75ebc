"""Every error streamflow raises by a name of its own.

::

    StreamflowError
    ├── BackendUnavailable   (RuntimeError)   no such backend, or it cannot start here
    ├── DeviceError          (RuntimeError)   the device or its driver refused or failed
    │   ├── OutOfDeviceMemory    (MemoryError)
    │   ├── LaunchFailed                       a launch the driver refused; not sticky
    │   ├── CompileFailed                      ``log`` holds what the compiler said
    │   └── DeviceLost                         a sticky fault; ``suspects`` names ops
    ├── UpstreamFailed       (RuntimeError)   an op whose input was never made right
    ├── OpCancelled          (CancelledError) the op was removed before it was submitted
    ├── DeadlineExceeded     (TimeoutError)   ``report`` says what had not ended, and why
    ├── CaptureRefused       (RuntimeError)   what a captured graph can't hold; with the line
    ├── RaceDetected         (RuntimeError)   work that nothing orders; ``races`` has the details
    ├── CycleFound           (ValueError)     ops that would wait for each other; with the path
    ├── WrongThread          (RuntimeError)   not the thread and loop that own the device
    ├── ForkedProcess        (RuntimeError)   a fork of a process that had entered a device
    └── Closed               (ValueError)     use of a closed device, closed stream or freed array

Bad arguments raise plain ``TypeError``, ``ValueError``, ``IndexError`` and
``OverflowError``, before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError

__all__ = [
    "BackendUnavailable",
    "CaptureRefused",
    "Closed",
    "CompileFailed",
    "CycleFound",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceLost",
    "ForkedProcess",
    "LaunchFailed",
    "OpCancelled",
    "OutOfDeviceMemory",
    "RaceDetected",
    "SimulatorWarning",
    "StreamflowError",
    "UpstreamFailed",
    "WrongThread",
]


class StreamflowError(Exception):
    """The root of the tree."""


class BackendUnavailable(StreamflowError, RuntimeError):
    """No backend of that name, or it cannot start on this machine."""


class DeviceError(StreamflowError, RuntimeError):
    """The device or its driver refused a call, or failed while running one."""


class OutOfDeviceMemory(DeviceError, MemoryError):
    """The pool could not give the bytes asked for. The device stays usable.

    Attributes
    ----------
    report : object
        A :class:`streamflow.MemoryReport` where arrays of a device were allocated: what was
        asked for, what there is, who holds it, what is about to come back. Else None.
    """

    def __init__(self, message: str = "", *, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class LaunchFailed(DeviceError):
    """The driver refused to launch a kernel. The device stays usable."""


class CompileFailed(DeviceError):
    """CUDA C++ source that does not compile.

    Attributes
    ----------
    log : str
        The compiler's own words, with file and line.
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class DeviceLost(DeviceError):
    """A sticky fault: nothing that runs on this device can succeed any more (rule R9).

    Attributes
    ----------
    suspects : tuple of str
        The ops that had not been seen to finish when the fault showed, oldest
        first; the simulator names the one that failed.
    """

    def __init__(self, message: str, *, suspects: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class UpstreamFailed(StreamflowError, RuntimeError):
    """An op read data whose writer failed; ``__cause__`` is the writer's error (rule R9)."""


class OpCancelled(StreamflowError, CancelledError):
    """The op was cancelled while parked and never reached the device."""


class CaptureRefused(StreamflowError, RuntimeError):
    """A captured graph can't hold this: a read on the host, an await, a pageable copy.

    The device stays usable; nothing of the capture has run.
    """


class DeadlineExceeded(StreamflowError, TimeoutError):
    """Work did not end in time.

    Attributes
    ----------
    report : object
        A :class:`streamflow.Report`, made when the time was up: the oldest unfinished op
        of each stream, what it waits for, since when, and where it was submitted.
    """

    def __init__(self, message: str, *, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class RaceDetected(StreamflowError, RuntimeError):
    """The simulator saw memory used in an order that nothing guarantees.

    Attributes
    ----------
    races : tuple
        One :class:`streamflow.testing.Race` for each: both ops, both lines, what is missing.
    """

    def __init__(self, message: str, *, races: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.races = tuple(races)


class CycleFound(StreamflowError, ValueError):
    """An op waits, through others, for itself; the message names them in order."""


class WrongThread(StreamflowError, RuntimeError):
    """A public call from a thread or event loop other than the device's own (rule R11)."""


class ForkedProcess(StreamflowError, RuntimeError):
    """Use of streamflow in a fork of a process that had entered a device (rule R12)."""


class Closed(StreamflowError, ValueError):
    """Use of a closed device or stream, or of a freed array."""


class SimulatorWarning(UserWarning):
    """``Device`` fell back to the simulator; the message says why (rule R14)."""
