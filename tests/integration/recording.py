"""A backend that notes the sizes it is given and moves nothing: for data larger than memory.

Streams, events and the clock are a simulated device's. Pinned memory is address space only.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from streamflow.backends import open_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings

_FIRST_ADDRESS = 1 << 52
_GAP_NBYTES = 1 << 12


class RecordingBackend:
    """Hands streams, events and time to a simulated device, and notes every other verb.

    Attributes
    ----------
    calls : list of tuple
        Each a verb and its arguments, without the stream.
    """

    name = "recording"

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._next = _FIRST_ADDRESS
        self._pinned: dict[int, mmap.mmap] = {}
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def of(self, verb: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of ``verb``."""
        return [call[1:] for call in self.calls if call[0] == verb]

    def allocate(self, pool: object, nbytes: int, stream: object) -> int:
        self.calls.append(("allocate", nbytes))
        address, self._next = self._next, -(-(self._next + nbytes + _GAP_NBYTES) // 512) * 512
        return address

    def deallocate(self, address: int, stream: object) -> None:
        self.calls.append(("deallocate", address))

    def allocate_pinned_blocking(self, nbytes: int) -> int:
        self.calls.append(("allocate_pinned_blocking", nbytes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = mmap.mmap(-1, nbytes, flags=flags)
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        self._pinned[address] = memory
        return address

    def free_pinned_blocking(self, address: int) -> None:
        self._pinned.pop(address, None)

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: object) -> None:
        self.calls.append(("copy_h2d", dst, nbytes))

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: object) -> None:
        self.calls.append(("copy_d2h", src, nbytes))

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: object) -> None:
        self.calls.append(("copy_d2d", dst, src, nbytes))

    def fill(self, dst: int, pattern: bytes, count: int, stream: object) -> int:
        self.calls.append(("fill", dst, pattern, count))
        return 1

    def array_argument(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return address, shape, dtype

    def launch(self, stream: object, config: Any, kernel: object, *args: Any) -> None:
        self.calls.append(("launch", config.grid, config.block, *args))

    def translate(self, error: BaseException, doing: str) -> Any:
        return self._inner.translate(error, doing)


def open_recording(index: int, settings: Settings, loop_key: object) -> RecordingBackend:
    """For :func:`streamflow.backends.register_backend`."""
    return RecordingBackend(open_backend("sim", index, settings, loop_key))
