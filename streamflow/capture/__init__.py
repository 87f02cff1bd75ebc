"""Graphs that are recorded once and launched many times."""

from streamflow.capture.captured import CapturedFunction
from streamflow.capture.graph import CapturedGraph
from streamflow.capture.recorder import Node

__all__ = ["CapturedFunction", "CapturedGraph", "Node"]
