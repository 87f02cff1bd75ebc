"""streamflow: an async/await task-graph runtime for CUDA with stream-ordered memory."""

from typing import TYPE_CHECKING, Any

from streamflow.backends import register_backend
from streamflow.backends.base import Access, DeviceProperties, PoolInfo
from streamflow.config import Settings, SimOptions
from streamflow.device import Device
from streamflow.errors import (
    BackendUnavailable,
    CaptureRefused,
    Closed,
    CompileFailed,
    CycleFound,
    DeadlineExceeded,
    DeviceError,
    DeviceLost,
    ForkedProcess,
    LaunchFailed,
    OpCancelled,
    OutOfDeviceMemory,
    RaceDetected,
    SimulatorWarning,
    StreamflowError,
    UpstreamFailed,
    WrongThread,
)
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.collect import as_completed, gather
from streamflow.runtime.foreign import CallStream
from streamflow.runtime.kernel import Kernel, kernel
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.pinned import Lease, PinnedPool, PinnedStats
from streamflow.runtime.pinning import Pin
from streamflow.runtime.report import Report, Unfinished
from streamflow.runtime.scope import Scope
from streamflow.runtime.shortage import MemoryReport
from streamflow.runtime.stream import Lane, Stream
from streamflow.scheduler.placement import LaneLoad, PlacementRequest

if TYPE_CHECKING:
    from streamflow.capture.captured import CapturedFunction
    from streamflow.capture.graph import CapturedGraph
    from streamflow.pipeline.pipeline import Pipeline
    from streamflow.pipeline.stats import PipelineStats, StageStats
    from streamflow.runtime.ledger import DeviceStats
    from streamflow.runtime.mapped import MappedArray
    from streamflow.runtime.synced import SyncedArray, SyncedState
    from streamflow.trace.answers import Overlap
    from streamflow.trace.critical import CriticalPath, Step
    from streamflow.trace.explain import Explanation
    from streamflow.trace.hints import Hint, HintKind
    from streamflow.trace.model import (
        EdgeReason,
        TracedArray,
        TracedDevice,
        TracedEdge,
        TracedMemory,
        TracedOp,
    )
    from streamflow.trace.trace import Trace
    from streamflow.trace.waits import Wait, WaitKind
    from streamflow.trace.what_if import WhatIf

__all__ = [
    "Access",
    "BackendUnavailable",
    "CallStream",
    "CaptureRefused",
    "CapturedFunction",
    "CapturedGraph",
    "Closed",
    "CompileFailed",
    "CriticalPath",
    "CycleFound",
    "DeadlineExceeded",
    "Device",
    "DeviceArray",
    "DeviceError",
    "DeviceLost",
    "DeviceProperties",
    "DeviceStats",
    "EdgeReason",
    "Explanation",
    "ForkedProcess",
    "Hint",
    "HintKind",
    "Kernel",
    "Lane",
    "LaneLoad",
    "LaunchFailed",
    "Lease",
    "MappedArray",
    "MemoryReport",
    "Op",
    "OpCancelled",
    "OpState",
    "OutOfDeviceMemory",
    "Overlap",
    "Pin",
    "PinnedPool",
    "PinnedStats",
    "Pipeline",
    "PipelineStats",
    "PlacementRequest",
    "PoolInfo",
    "RaceDetected",
    "Report",
    "Scope",
    "Settings",
    "SimOptions",
    "SimulatorWarning",
    "StageStats",
    "Step",
    "Stream",
    "StreamflowError",
    "SyncedArray",
    "SyncedState",
    "Trace",
    "TracedArray",
    "TracedDevice",
    "TracedEdge",
    "TracedMemory",
    "TracedOp",
    "Unfinished",
    "UpstreamFailed",
    "Wait",
    "WaitKind",
    "WhatIf",
    "WrongThread",
    "as_completed",
    "gather",
    "kernel",
    "register_backend",
]

_HOMES = {  # what few programs name, brought in when one does (R13)
    "CapturedFunction": "capture.captured",
    "CapturedGraph": "capture.graph",
    "DeviceStats": "runtime.ledger",
    "MappedArray": "runtime.mapped",
    "SyncedArray": "runtime.synced",
    "SyncedState": "runtime.synced",
    **dict.fromkeys(("CriticalPath", "Step"), "trace.critical"),
    "Explanation": "trace.explain",
    **dict.fromkeys(("Hint", "HintKind"), "trace.hints"),
    "Overlap": "trace.answers",
    "Pipeline": "pipeline.pipeline",
    **dict.fromkeys(("PipelineStats", "StageStats"), "pipeline.stats"),
    "Trace": "trace.trace",
    **dict.fromkeys(("Wait", "WaitKind"), "trace.waits"),
    "WhatIf": "trace.what_if",
    **dict.fromkeys(
        (
            "EdgeReason",
            "TracedArray",
            "TracedDevice",
            "TracedEdge",
            "TracedMemory",
            "TracedOp",
        ),
        "trace.model",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "testing":  # only tests need it
        from importlib import import_module

        return import_module("streamflow.testing")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"streamflow.{_HOMES[name]}"), name)
    if name == "__version__":  # reading metadata takes longer than the rest of this import
        from importlib.metadata import version

        return version("streamflow-cuda")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
