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

_MODULES = (
    "devices",
    "fidelity",
    "graph_nodes",
    "graph_queue",
    "graphs",
    "guide",
    "harness",
    "kernels",
    "kinds",
    "memory",
    "pool_rules",
    "pools",
    "programs",
    "registering",
    "streams",
)

# Before the modules are imported: their asserts then explain themselves as a test's do.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from streamflow.testing.contract.devices import DeviceContract, PeerContract  # noqa: E402
from streamflow.testing.contract.fidelity import FidelityContract  # noqa: E402
from streamflow.testing.contract.graph_nodes import GraphNodesContract  # noqa: E402
from streamflow.testing.contract.graph_queue import GraphQueueContract  # noqa: E402
from streamflow.testing.contract.graphs import GraphContract  # noqa: E402
from streamflow.testing.contract.guide import GuideContract  # noqa: E402
from streamflow.testing.contract.harness import Harness, Rig, drain  # noqa: E402
from streamflow.testing.contract.kernels import KernelContract  # noqa: E402
from streamflow.testing.contract.kinds import KindsContract  # noqa: E402
from streamflow.testing.contract.memory import MemoryContract  # noqa: E402
from streamflow.testing.contract.pool_rules import PoolRulesContract  # noqa: E402
from streamflow.testing.contract.pools import PoolContract  # noqa: E402
from streamflow.testing.contract.programs import ProgramContract  # noqa: E402
from streamflow.testing.contract.registering import RegisterContract  # noqa: E402
from streamflow.testing.contract.streams import StreamContract  # noqa: E402

__all__ = ["BackendContract", "Harness", "PeerContract", "Rig", "drain", "fidelity_rows"]


class BackendContract(
    StreamContract,
    MemoryContract,
    KindsContract,
    RegisterContract,
    PoolContract,
    GuideContract,
    PoolRulesContract,
    KernelContract,
    GraphContract,
    GraphNodesContract,
    GraphQueueContract,
    DeviceContract,
    FidelityContract,
    ProgramContract,
):
    """Every verb of one device. Subclass it and define :meth:`Harness.open`."""


def fidelity_rows() -> dict[str, str]:
    """The tests that are rows of docs/reference/fidelity.md, ``Class.method``: what each shows."""
    rows = {}
    for kind in (*BackendContract.__mro__, PeerContract):
        for name, test in vars(kind).items():
            if getattr(test, "is_fidelity_row", False):
                rows[f"{kind.__name__}.{name}"] = str(test.__doc__).partition("\n")[0]
    return rows
