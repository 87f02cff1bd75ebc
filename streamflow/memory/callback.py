"""Memory that functions of the program's own allocate and free."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeAlias

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import checked_alignment
from streamflow.memory.space import Place

__all__ = ["AllocateCallback", "CallbackMemoryResource", "DeallocateCallback"]

AllocateCallback: TypeAlias = Callable[[Any, int, int, Any], int]
"""``(stream, nbytes, alignment, arg)``, and returns an address."""

DeallocateCallback: TypeAlias = Callable[[Any, int, int, int, Any], None]
"""``(stream, address, nbytes, alignment, arg)``."""


class CallbackMemoryResource(DeviceMemoryResource):
    """Forwards to two functions.

    Parameters
    ----------
    allocate_func : callable
        ``allocate_func(stream, nbytes, alignment, arg) -> int``: the address of that many bytes
        at a multiple of ``alignment``, usable on ``stream`` at once. The stream is the backend's
        own: on CUDA a ``cuda.core.Stream``.
    deallocate_func : callable
        ``deallocate_func(stream, address, nbytes, alignment, arg)``, with the size and alignment
        of the allocation. All uses are ordered before this moment of ``stream``.
    arg : object
        Handed to both.
    device : Device or int, optional
        Default: that of the stream of its first allocation.

    Raises
    ------
    TypeError
        What can't be called.

    Notes
    -----
    They run in the calling thread, never for zero bytes, and under no lock of ours, so they may
    allocate themselves. What ``allocate_func`` raises reaches its caller. A free has nobody to
    raise at, since finalisers cause some: what ``deallocate_func`` raises goes to
    :func:`sys.unraisablehook`, and the memory counts as given back. A resource equals itself
    only.
    """

    def __init__(
        self,
        allocate_func: AllocateCallback,
        deallocate_func: DeallocateCallback,
        arg: Any = None,
        device: Any = None,
    ) -> None:
        for name, function in (
            ("allocate_func", allocate_func),
            ("deallocate_func", deallocate_func),
        ):
            if not callable(function):
                raise TypeError(f"{name} takes a function, found {function!r}")
        self._allocate_func = allocate_func
        self._deallocate_func = deallocate_func
        self._arg = arg
        super().__init__(device)

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        checked_alignment(alignment)
        given = self._allocate_func(place.stream, nbytes, alignment, self._arg)
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise TypeError(f"allocate_func returns an address, found {given!r}")
        address = index(given)
        if not address:
            raise OutOfDeviceMemory(f"allocate_func gave address 0 for {nbytes} bytes")
        piece = Piece(self, address, nbytes, alignment)
        if address < 0 or address % alignment:
            self._give(piece, place)
            raise ValueError(
                f"allocate_func gave {address:#x}, which is not a multiple of {alignment}"
            )
        return piece

    def _give(self, piece: Piece, place: Place) -> None:
        try:
            self._deallocate_func(
                place.stream, piece.address, piece.nbytes, piece.alignment, self._arg
            )
        except Exception as error:
            error.add_note(
                f"raised by deallocate_func for {piece.nbytes} bytes at {piece.address:#x}, "
                "which count as given back"
            )
            _Unraisable(error)

    def _is_empty(self) -> bool:
        return not self._dropped


class _Unraisable:
    """Hands an error to ``sys.unraisablehook``, whose argument only the interpreter can make."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error
