"""Resources and spaces for tests of what wraps resources."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamflow import OutOfDeviceMemory, Settings, SimOptions
from streamflow.backends import open_backend
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place, Space, enter_space, leave_space


class Upstream(DeviceMemoryResource):
    """Gives addresses that count up and lead nowhere, and says what it was asked.

    Parameters
    ----------
    total_nbytes : int
        What it has.
    fails_at : container of int
        The takes that raise, counted from 0.
    """

    def __init__(self, total_nbytes: int = 1 << 40, fails_at: Any = (), device: Any = None) -> None:
        super().__init__(device)
        self.total_nbytes = total_nbytes
        self.fails_at = fails_at
        self.num_refusals = 0  # of the frees that come next
        self.error: type[BaseException] = OutOfDeviceMemory
        self.num_takes = 0
        self.num_trims = 0
        self.live: dict[int, Piece] = {}
        self.used_nbytes = 0
        self.high_nbytes = 0
        self.asked: list[tuple[int, int]] = []
        self._next = 0x1000_0000

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        with self._lock:
            number, self.num_takes = self.num_takes, self.num_takes + 1
            if number in self.fails_at:
                raise self.error(f"take {number} fails")
            if self.used_nbytes + nbytes > self.total_nbytes:
                raise OutOfDeviceMemory(f"{nbytes} bytes do not fit")
            self.asked.append((nbytes, alignment))
            address = -(-self._next // alignment) * alignment
            self._next = address + nbytes
            piece = self.live[address] = Piece(self, address, nbytes, alignment)
            self.used_nbytes += nbytes
            self.high_nbytes = max(self.high_nbytes, self.used_nbytes)
            return piece

    def _give(self, piece: Piece, place: Place) -> None:
        with self._lock:
            if self.num_refusals:
                self.num_refusals -= 1
                raise self.error("a free is refused")
            if self.live.pop(piece.address, None) is not piece:
                raise AssertionError(f"{piece.address:#x} is not live")
            self.used_nbytes -= piece.nbytes

    def trim(self) -> None:
        super().trim()
        self.num_trims += 1


class Ground:
    """A simulated device at the level of resources: its space, and streams on demand."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.backend = space.backend

    def stream(self) -> Any:
        return self.backend.create_stream()


@contextmanager
def simulated(index: int = 0, loop_key: object = None) -> Iterator[Ground]:
    """A device on the virtual clock that no event loop has entered."""
    settings = Settings(sim=SimOptions(clock="virtual"))
    backend = open_backend("sim", index, settings, object() if loop_key is None else loop_key)
    space = enter_space(backend)
    try:
        yield Ground(space)
    finally:
        leave_space(space, backend)
        backend.close()
