"""Graphs that are recorded once and launched many times."""

from streamflow.capture.graph import CapturedGraph

__all__ = ["CapturedGraph"]
