"""The simulator: the same programs, on a faithful and deterministic machine without a GPU."""

from streamflow.backends.sim.device import open_device

__all__ = ["open_device"]
