"""Adaptors that change what an upstream gives, or when: limit, retry, prefetch, alignment."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

from streamflow.backends.memory import Location, MemoryKind
from streamflow.errors import OutOfDeviceMemory, StreamflowError
from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT, checked_alignment, checked_nbytes
from streamflow.memory.space import Place
from streamflow.scheduler.budget import parse_nbytes

__all__ = [
    "AlignedResourceAdaptor",
    "FailureCallbackResourceAdaptor",
    "LimitingResourceAdaptor",
    "PrefetchResourceAdaptor",
]


def _align_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


class LimitingResourceAdaptor(UpstreamResourceAdaptor):
    """Refuses what would exceed a number of bytes.

    Each block counts as its size rounded up to 256, from before the upstream is asked until
    after it has the block back: the sum is at no moment above the limit, whatever threads do.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    allocation_limit : int or str
        Bytes, or a size such as ``"1GiB"``.
    device : Device or int, optional
        By default the upstream's.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        allocation_limit: int | str,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        self._limit_nbytes = checked_nbytes(
            parse_nbytes(allocation_limit)
            if isinstance(allocation_limit, str)
            else allocation_limit
        )
        self._allocated_nbytes = 0
        self._charged: dict[Piece, int] = {}

    @property
    def largest_nbytes(self) -> int | None:
        """The limit, or what the upstream can serve if that is less."""
        below = self.upstream_mr.largest_nbytes
        return self._limit_nbytes if below is None else min(self._limit_nbytes, below)

    def get_allocated_bytes(self) -> int:
        """What blocks that were given out take now, each rounded up to 256."""
        return self._allocated_nbytes

    def get_allocation_limit(self) -> int:
        """The limit, in bytes."""
        return self._limit_nbytes

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        size = _align_up(nbytes, ALIGNMENT)
        with self._lock:
            allocated = self._allocated_nbytes
            if allocated + size > self._limit_nbytes:
                raise OutOfDeviceMemory(
                    f"{nbytes} bytes do not fit: {allocated} of the limit of "
                    f"{self._limit_nbytes} bytes are allocated. Free something, or raise "
                    "allocation_limit"
                )
            charged = self._charged
            self._allocated_nbytes = allocated + size
        try:
            inner = self.upstream_mr.take(nbytes, alignment, place)
        except BaseException:
            with self._lock:
                if charged is self._charged:  # else the device was closed meanwhile
                    self._allocated_nbytes -= size
            raise
        piece = self._wrap(inner, nbytes, alignment)
        with self._lock:
            charged[piece] = size
        return piece

    def _on_given(self, piece: Piece) -> None:
        with self._lock:  # without a charge the device was closed meanwhile
            self._allocated_nbytes -= self._charged.pop(piece, 0)

    def _is_empty(self) -> bool:
        return not self._charged

    def _forget(self) -> None:
        self._allocated_nbytes = 0
        self._charged = {}

    def _parameters(self) -> tuple[object, ...]:
        return (self._limit_nbytes,)


class FailureCallbackResourceAdaptor(UpstreamResourceAdaptor):
    """Asks a function what to do when the upstream has no memory.

    It is called on the thread that allocates, with no lock held: it may free blocks of this
    very stack, and allocate. What it raises goes to the caller.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    callback : callable
        ``callback(nbytes) -> bool``: true to try again, false to let the error go on.
    max_retries : int
        How often one allocation is tried again at most. RMM sets no bound.
    device : Device or int, optional
        By default the upstream's.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        callback: Callable[[int], bool],
        max_retries: int = 100,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        if not callable(callback):
            raise TypeError(f"callback takes a function of a number of bytes, found {callback!r}")
        self._callback = callback
        self._max_retries = index(max_retries)
        if self._max_retries < 0:
            raise ValueError(f"max_retries is not negative, found {max_retries}")

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        num_retries = 0
        while True:
            try:
                # The upstream's own piece: there is nothing to remember for the free.
                return self.upstream_mr.take(nbytes, alignment, place)
            except MemoryError as error:  # OutOfDeviceMemory, or a callback resource's own
                if num_retries == self._max_retries:
                    error.add_note(f"after {num_retries} retries, the most that max_retries allows")
                    raise
                if not self._callback(nbytes):
                    raise
            num_retries += 1

    def _parameters(self) -> tuple[object, ...]:
        return self._callback, self._max_retries


class PrefetchResourceAdaptor(UpstreamResourceAdaptor):
    """Moves new managed and system memory to the device, in the order of the stream.

    Memory of other kinds is left alone, as is any where the device can't prefetch.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    device : Device or int, optional
        By default the upstream's.
    """

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        piece = self.upstream_mr.take(nbytes, alignment, place)
        backend = place.backend
        try:
            if not backend.memory_support().has_concurrent_managed_access:
                return piece
            kind = backend.pointer_attributes(piece.address).kind
            if kind in (MemoryKind.MANAGED, MemoryKind.UNREGISTERED):
                backend.prefetch(
                    piece.address, nbytes, Location("device", backend.index), place.stream
                )
                place.num_calls += 1
        except BaseException as error:
            self.upstream_mr.give(piece, place)
            if isinstance(error, StreamflowError) or not isinstance(error, Exception):
                raise
            raise backend.translate(error, f"prefetching {nbytes} bytes") from error
        return piece


class AlignedResourceAdaptor(UpstreamResourceAdaptor):
    """Aligns blocks from a threshold on, in larger ones of the upstream.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    alignment : int
        A power of two; 256 or less changes nothing.
    alignment_threshold : int or str
        Blocks of fewer bytes are the upstream's own.
    device : Device or int, optional
        By default the upstream's.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        alignment: int = ALIGNMENT,
        alignment_threshold: int | str = 0,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        self._alignment = checked_alignment(alignment)
        self._threshold_nbytes = checked_nbytes(
            parse_nbytes(alignment_threshold)
            if isinstance(alignment_threshold, str)
            else alignment_threshold
        )

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        wanted = max(alignment, self._alignment)
        if nbytes < self._threshold_nbytes or wanted <= ALIGNMENT:
            return self.upstream_mr.take(nbytes, alignment, place)
        # The upstream's block begins at a multiple of 256, so this much more is enough.
        size = checked_nbytes(_align_up(nbytes, wanted) + wanted - ALIGNMENT)
        inner = self.upstream_mr.take(size, ALIGNMENT, place)
        return Piece(
            self,
            _align_up(inner.address, wanted),
            nbytes,
            wanted,
            capacity_nbytes=inner.capacity_nbytes,
            inner=inner,
        )

    def _parameters(self) -> tuple[object, ...]:
        return self._alignment, self._threshold_nbytes
