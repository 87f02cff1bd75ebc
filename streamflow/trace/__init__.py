"""What a program did: ops, the edges between them and why, and answers about both."""

from streamflow.trace.answers import Overlap, overlap
from streamflow.trace.model import EdgeReason, Trace, TracedEdge, TracedOp
from streamflow.trace.recorder import Recorder

__all__ = [
    "EdgeReason",
    "Overlap",
    "Recorder",
    "Trace",
    "TracedEdge",
    "TracedOp",
    "overlap",
]
