"""An upstream that is a counter of addresses, and a device to use resources on without a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamflow import Settings, SimOptions
from streamflow.backends.sim import open_device
from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place, enter_space, leave_space


class FakeUpstream(DeviceMemoryResource):
    """Gives addresses nobody may touch; knows what is out, and fails when told.

    Attributes
    ----------
    live : dict
        By address, the pieces that are out.
    sizes : list
        What it was asked for, refusals included.
    fails_at : set
        Numbers of calls, takes and gives together, that fail.
    """

    is_stream_ordered = False

    def __init__(self, limit_nbytes: int = 1 << 40, device: Any = None) -> None:
        super().__init__(device)
        self.limit_nbytes = limit_nbytes
        self.live: dict[int, Piece] = {}
        self.sizes: list[int] = []
        self.fails_at: set[int] = set()
        self.num_calls = 0
        self._next = 1 << 30

    @property
    def live_nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.live.values())

    def _call(self, what: str) -> None:
        self.num_calls += 1
        if self.num_calls in self.fails_at:
            raise OutOfDeviceMemory(f"{what} fails, as told")

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        self.sizes.append(nbytes)
        self._call("taking")
        if self.live_nbytes + nbytes > self.limit_nbytes:
            raise OutOfDeviceMemory(f"there are no {nbytes} bytes")
        address = -(-self._next // alignment) * alignment
        # Never a neighbour of the one before: what lies apart must not be joined.
        self._next = address + -(-nbytes // 256) * 256 + 256
        piece = self.live[address] = Piece(self, address, nbytes, alignment)
        return piece

    def _give(self, piece: Piece, place: Place) -> None:
        self._call("giving")
        assert self.live.pop(piece.address) is piece, "given back twice, or never taken"

    def _forget(self) -> None:
        self.live.clear()


class Machine:
    """A simulated device on the virtual clock, its space, and streams."""

    def __init__(self, **options: Any) -> None:
        settings = Settings(sim=SimOptions(clock="virtual", **options))
        self.backend = open_device(0, settings, object())
        self.space = enter_space(self.backend)
        self.sim = self.backend.controls()

    def stream(self) -> Any:
        return self.backend.create_stream()

    def run(self) -> None:
        """Let the device do all that it can."""
        while self.backend.advance(0):
            pass

    def write(self, block: Any, stream: Any) -> None:
        """Overwrite a block, for the race checker to see."""
        self.backend.fill(block.address, b"\1", block.nbytes, stream)

    def races(self) -> list[Any]:
        """What the checker has found; forgotten with that."""
        return list(self.sim.take_races())

    def close(self) -> None:
        leave_space(self.space, self.backend)
        self.backend.close()


@contextmanager
def machine(**options: Any) -> Iterator[Machine]:
    opened = Machine(**options)
    try:
        yield opened
    finally:
        opened.close()
