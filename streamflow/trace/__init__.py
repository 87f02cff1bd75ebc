"""What a program did: ops, the edges between them and why, and answers about both."""

from streamflow.trace.answers import Overlap, overlap
from streamflow.trace.model import (
    EdgeReason,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)
from streamflow.trace.recorder import Recorder
from streamflow.trace.trace import Trace

__all__ = [
    "EdgeReason",
    "Overlap",
    "Recorder",
    "Trace",
    "TracedArray",
    "TracedDevice",
    "TracedEdge",
    "TracedMemory",
    "TracedOp",
    "overlap",
]
