"""Memory in somebody's hands: a piece in a resource's, a block in a program's.

A resource gives a *piece* of memory and takes it back; a wrapping resource makes a piece of its
own around its upstream's where it has something to remember. A :class:`Block` is a piece in the
hands of a program.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from streamflow.backends.origin import caller, describe

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.memory.resource import DeviceMemoryResource
    from streamflow.memory.space import Space

__all__ = ["DROPPED", "Block", "Piece"]

_generations = count(1)


class Piece:
    """Memory as one resource gave it to its caller.

    Attributes
    ----------
    resource : DeviceMemoryResource
        Which takes it back.
    address : int
    nbytes : int
        What was asked for.
    capacity_nbytes : int
        What it really takes.
    alignment : int
    inner : Piece or None
        The upstream's, where this one lies in it or is it.
    note : object
        The resource's own.
    """

    __slots__ = (
        "address",
        "alignment",
        "capacity_nbytes",
        "inner",
        "nbytes",
        "note",
        "resource",
    )

    def __init__(
        self,
        resource: DeviceMemoryResource,
        address: int,
        nbytes: int,
        alignment: int,
        capacity_nbytes: int | None = None,  # not by keyword only: one is made at every call
        inner: Piece | None = None,
        note: Any = None,
    ) -> None:
        self.resource = resource
        self.address = address
        self.nbytes = nbytes
        self.alignment = alignment
        self.capacity_nbytes = nbytes if capacity_nbytes is None else capacity_nbytes
        self.inner = inner
        self.note = note


class Block:
    """Memory that a resource gave to the program.

    Keeps its resource and its stream alive. Dropped without a
    :meth:`DeviceMemoryResource.deallocate`, it is freed on the stream that it was allocated on,
    by the next call of any resource of the device (rule R12); one of ``allocate_sync`` when all
    that the device was given by then has ended (rule R6).

    Attributes
    ----------
    address : int
        0 for no bytes.
    nbytes : int
        What was asked for.
    capacity_nbytes : int
        What it takes of its resource.
    alignment : int
    generation : int
        No two blocks of a process have the same: an address alone comes again.
    resource : DeviceMemoryResource
        The one that it was asked of.
    stream : object
        The one it was allocated on; None for ``allocate_sync``.
    """

    __slots__ = (
        "__weakref__",
        "_freed_at",
        "_made_at",
        "_piece",
        "_space",
        "generation",
        "resource",
        "stream",
    )

    def __init__(
        self, resource: DeviceMemoryResource, piece: Piece, space: Space, stream: Any
    ) -> None:
        self.resource = resource
        self.stream = stream
        self.generation = next(_generations)
        self._piece: Piece = piece
        self._space = space
        frame = caller(4)  # who called what called _block
        self._made_at = frame.f_code, frame.f_lasti
        self._freed_at: tuple[CodeType, int] | None = None

    @property
    def address(self) -> int:
        """Where it begins; 0 for no bytes."""
        return self._piece.address

    @property
    def nbytes(self) -> int:
        """The bytes asked for."""
        return self._piece.nbytes

    @property
    def capacity_nbytes(self) -> int:
        """The bytes it takes of its resource."""
        return self._piece.capacity_nbytes

    @property
    def alignment(self) -> int:
        """What the address is a multiple of, at least."""
        return self._piece.alignment

    @property
    def is_freed(self) -> bool:
        """Whether it was given back."""
        return self._freed_at is not None

    def __del__(self) -> None:
        # A finaliser never calls the driver, nor takes a lock (R12).
        if getattr(self, "_freed_at", True) is None and self._piece.address:
            # Itself, not its piece: where both are garbage of one cycle, a finaliser of the
            # program's may free it after this, and one free is enough.
            self.resource._post(self._piece, self._space, self.stream, self)

    def __repr__(self) -> str:
        state = " freed" if self.is_freed else ""
        return (
            f"<Block {self.nbytes} bytes at {self.address:#x} of {self.resource!r}, "
            f"made at {describe(*self._made_at)}{state}>"
        )


DROPPED = Block.__del__.__code__, 0
"""Where a block was freed that was dropped: a finaliser may free it once more, for nothing."""
