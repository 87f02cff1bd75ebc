"""The simulator keeps the contract on both of its clocks."""

from __future__ import annotations

import pytest

from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings, SimOptions
from streamflow.testing.contract import BackendContract, PeerContract


class _Simulated:
    clock = "virtual"

    def open(self, index: int = 0) -> Backend:
        return open_backend("sim", index, Settings(sim=SimOptions(clock=self.clock)), self)


class TestVirtualClock(_Simulated, BackendContract):
    pass


class TestWallClock(_Simulated, BackendContract):
    clock = "wall"


class TestPeersOnVirtualClock(_Simulated, PeerContract):
    pass


class TestPeersOnWallClock(_Simulated, PeerContract):
    clock = "wall"


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_only_the_virtual_clock_is_virtual(clock: str) -> None:
    backend = open_backend("sim", 0, Settings(sim=SimOptions(clock=clock)), clock)
    assert backend.is_virtual is (clock == "virtual")
    backend.close()
