"""The backend contract: what every backend must do, as tests to subclass.

A backend's own test module subclasses :class:`BackendContract`, says how to open it,
and is done::

    class TestMyBackend(BackendContract):
        def open(self, index: int = 0) -> Backend:
            return open_backend("mine", index, Settings(), self)

Give :class:`PeerContract` the same treatment where two devices exist.
"""

from __future__ import annotations

import pytest

_MODULES = ("devices", "harness", "kernels", "memory", "pools", "streams")

# Before the modules are imported: their asserts then explain themselves as a test's do.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from streamflow.testing.contract.devices import DeviceContract, PeerContract  # noqa: E402
from streamflow.testing.contract.harness import Harness, Rig, drain  # noqa: E402
from streamflow.testing.contract.kernels import KernelContract  # noqa: E402
from streamflow.testing.contract.memory import MemoryContract  # noqa: E402
from streamflow.testing.contract.pools import PoolContract  # noqa: E402
from streamflow.testing.contract.streams import StreamContract  # noqa: E402

__all__ = ["BackendContract", "Harness", "PeerContract", "Rig", "drain"]


class BackendContract(StreamContract, MemoryContract, PoolContract, KernelContract, DeviceContract):
    """Every verb of one device. Subclass it and define :meth:`Harness.open`."""
