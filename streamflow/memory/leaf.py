"""What the resources at the bottom have in common: they ask the driver, and know what they have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from streamflow.backends.base import Backend
from streamflow.errors import DeviceLost, OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.current import current_device
from streamflow.memory.deferred import DeferredFrees
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT
from streamflow.memory.space import Place, Space

__all__ = ["DeferringMemoryResource", "LeafMemoryResource", "padded"]

_PATIENCE_S = 0.1


class LeafMemoryResource(DeviceMemoryResource):
    """A resource without an upstream.

    Two of one class and one device are equal: memory of one may be given back to the other. One
    that has taken no memory yet counts as of the task's current device.
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        # Addresses as the driver gave them. Not pieces: those would keep the resource alive.
        self._live: dict[int, int] = {}
        self._prepared: Space | None = None
        if self._space is not None:
            self._check_support(self._space.backend)

    # -- for subclasses ----------------------------------------------------------------------

    def _check_support(self, backend: Backend) -> None:
        """Raise ``DeviceError`` where the device offers no such memory."""

    def _prepare(self, place: Place) -> None:
        """Called once for each device that memory is taken on, before anything else."""

    @abstractmethod
    def _allocate(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        """An address of the driver's and the bytes there, with ``nbytes`` aligned ones in it."""

    def _on_forgotten(self) -> None:
        """The memory is gone, also what was about to be freed."""

    # -- a resource --------------------------------------------------------------------------

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        space = self._space
        assert space is not None
        with self._translating(place.backend, f"allocating {nbytes} bytes"):
            if self._prepared is not space:
                with self._lock:
                    if self._prepared is not space:
                        self._check_support(place.backend)
                        self._prepare(place)
                        self._prepared = space
            base, capacity = self._allocate_again(nbytes, alignment, place)
        self._live[base] = capacity
        address = -(-base // alignment) * alignment
        note = (base, space)
        return Piece(self, address, nbytes, alignment, capacity_nbytes=capacity, note=note)

    def _allocate_again(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        return self._allocate(nbytes, alignment, place)

    def _base_of(self, piece: Piece) -> int | None:
        """The driver's address; None where the device was closed since, which freed it."""
        base, space = piece.note
        return base if space is self._space and base in self._live else None

    def _translated(self, backend: Backend, error: Exception, doing: str) -> Exception:
        if isinstance(error, (TypeError, ValueError)):  # of a callback's, or bad arguments
            return error
        return backend.translate(error, f"{doing} from {self!r}")

    @contextmanager
    def _translating(self, backend: Backend, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            translated = self._translated(backend, error, doing)
            try:
                if translated is error:
                    raise
                raise translated from error
            finally:
                del translated  # it has this frame, and so every caller's, with arrays (C23)

    def _forget(self) -> None:
        self._live.clear()
        self._prepared = None
        self._on_forgotten()

    def _is_empty(self) -> bool:
        return not self._live and not self._dropped

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether both are of one class and one device."""
        return type(other) is type(self) and _ordinal(self) == _ordinal(other)


class DeferringMemoryResource(LeafMemoryResource):
    """A leaf whose driver frees at once, whatever still runs: so its frees wait (rules R5, R6).

    A block goes back once the uses ordered before its free have ended, off the loop. That is
    looked at whenever the resource is called, and when it is trimmed; out of memory, it gives
    back what may go before it gives up.
    """

    is_stream_ordered = False

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self._deferred = DeferredFrees()
        self._num_releasing = 0

    @property
    def pending_nbytes(self) -> int:
        """Bytes that were freed, and wait for their uses to end."""
        with self._lock:
            return sum(self._live[base] for base in self._deferred)

    @abstractmethod
    def _free_blocking(self, backend: Backend, base: int) -> None:
        """Give ``base`` back to the driver: nothing uses it any more."""

    def trim(self) -> None:
        """Give back what was freed and isn't used any more."""
        super().trim()
        self._release_passed()

    def _allocate_again(self, nbytes: int, alignment: int, place: Place) -> tuple[int, int]:
        if self._deferred:
            self._release_passed()
        may_come_back = self._num_releasing > 0
        try:
            return self._allocate(nbytes, alignment, place)
        except Exception as error:
            if not may_come_back or not self._is_short(place.backend, error):
                raise
        # Nothing uses it any more, and a thread is giving it back. Idle, that takes the driver a
        # tenth of a millisecond; behind a kernel, whoever's, as long as that runs, which nobody
        # on a loop can wait for (R1): then it is `alloc` that waits.
        assert self._space is not None
        self._space.wait_released_blocking(_PATIENCE_S)
        return self._allocate(nbytes, alignment, place)

    def _is_short(self, backend: Backend, error: Exception) -> bool:
        return isinstance(self._translated(backend, error, "allocating"), OutOfDeviceMemory)

    def _give(self, piece: Piece, place: Place) -> None:
        with self._lock:
            base = self._base_of(piece)
            if base is None:
                return
            assert self._space is not None
            with self._translating(place.backend, "freeing"):
                self._deferred.add(self._space, place, base)
        self._release_passed()

    def _release_passed(self) -> None:
        with self._lock:
            space = self._space
            if space is None or not space.is_open:
                return
            try:
                passed = self._deferred.take_passed(space)
            except Exception as error:
                # The ops report it; what waits here goes with the device.
                if isinstance(space.backend.translate(error, "freeing"), DeviceLost):
                    return
                raise
            if not passed:
                return
            for base in passed:
                del self._live[base]
            self._num_releasing += 1
        space.release(partial(self._release_passed_blocking, space.backend, passed))

    def _release_passed_blocking(self, backend: Backend, bases: Iterable[int]) -> None:
        try:
            self._release_blocking(backend, bases)
        finally:
            with self._lock:
                self._num_releasing -= 1

    def _release_blocking(self, backend: Backend, bases: Iterable[int]) -> None:
        errors: list[Exception] = []
        for base in bases:
            try:
                self._free_blocking(backend, base)
            except Exception as error:
                translated = self._translated(backend, error, "freeing")
                if not isinstance(translated, DeviceLost):
                    errors.append(translated)
        if errors:
            raise errors[0]

    def _on_space_closing(self) -> None:
        space = self._space
        with self._lock:
            bases = list(self._live)
            self._dropped.clear()
            self._forget()
            self._space = None
        if space is not None:
            self._release_blocking(space.backend, bases)

    def _on_forgotten(self) -> None:
        self._deferred = DeferredFrees()


def padded(nbytes: int, alignment: int) -> int:
    """How much to ask of a driver that aligns to 256 bytes."""
    return nbytes + max(0, alignment - ALIGNMENT)


def _ordinal(resource: DeviceMemoryResource) -> int:
    device = resource.device
    return current_device() if device is None else device
