"""What every memory resource has in common: the calls, and their checks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from streamflow.backends.origin import caller, describe, user_instruction
from streamflow.errors import Closed, DeviceLost
from streamflow.memory.blocks import DROPPED, Block, Piece
from streamflow.memory.current import checked_device, find_space
from streamflow.memory.sizes import ALIGNMENT, checked_alignment, checked_nbytes
from streamflow.memory.space import Place, Space, space_of

if TYPE_CHECKING:
    from types import CodeType

__all__ = ["DeviceMemoryResource", "checked_resource"]


class DeviceMemoryResource(ABC):
    """Allocates memory, and takes it back.

    Stream-ordered calls return at once: the memory may be used on ``stream`` from then on, and
    on another one after an event; a free promises that all uses are ordered before it there.
    Every method may be called from any thread.

    Attributes
    ----------
    is_device_accessible, is_host_accessible : bool
        Who may touch the memory.
    is_stream_ordered : bool
        Whether a free returns at once, and the memory is handed on in stream order.
    """

    is_device_accessible = True
    is_host_accessible = False
    is_stream_ordered = True

    def __init__(self, device: Any = None) -> None:
        # An ordinal may be named before that device is entered; an open Device is one space.
        self._device: int | None = None if device is None else checked_device(device)
        named = device is not None and not hasattr(device, "__index__")
        self._space: Space | None = find_space(device) if named else None
        self._lock = threading.RLock()
        self._is_closed = False
        self._dropped: deque[tuple[Piece, Space, Any, Block | None]] = deque()
        self._is_dropped = False
        if self._space is not None:
            self._space.tenants[id(self)] = self

    # -- the calls -----------------------------------------------------------------------

    def allocate(self, nbytes: int, *, stream: Any, alignment: int = ALIGNMENT) -> Block:
        """Memory that work given to ``stream`` from now on may use.

        Parameters
        ----------
        nbytes : int
            0 gives address 0, and never reaches the driver.
        stream : Stream or Lane
            Or a stream of the backend's own.
        alignment : int
            A power of two, in bytes.

        Ordering
        --------
        Usable on ``stream`` at once, elsewhere after an event recorded there.

        Raises
        ------
        TypeError, ValueError
            A size that is none, an alignment that is not a power of two, a stream of another
            device.
        OutOfDeviceMemory
            There is not so much, or the size is not below 2**63 - ``alignment``.
        Closed
            The resource, the stream or the device is closed.
        """
        if alignment is not ALIGNMENT:
            alignment = checked_alignment(alignment)
        checked = checked_nbytes(nbytes, alignment)
        place = self._place(stream)
        return self._block(self.take(checked, alignment, place), stream)

    def deallocate(self, block: Block, *, stream: Any) -> None:
        """Take ``block`` back, in the order of ``stream``.

        Parameters
        ----------
        block : Block
        stream : Stream or Lane
            Or a stream of the backend's own.

        Ordering
        --------
        Every use of the block is ordered before this moment of ``stream``.

        Raises
        ------
        TypeError
            Not a block.
        ValueError
            Of another resource, freed already, or a stream of another device.
        Closed
            Its device or its resource was closed meanwhile, which gave it back.
        """
        self._check_back(block)
        place = self._place(stream)
        self._give_back(block, place)

    def deallocate_later(self, block: Block, *, stream: Any) -> None:
        """:meth:`deallocate`, for finalisers: the next call of any resource there does it.

        Parameters
        ----------
        block, stream
            As for :meth:`deallocate`.

        Ordering
        --------
        Every use of the block is ordered before this moment of ``stream``; the free comes at a
        later one.

        Raises
        ------
        TypeError, ValueError, Closed
            As :meth:`deallocate`, but for the stream, which is only looked at later.
        """
        self._check_back(block)
        if block._freed_at is not None:  # it was dropped, and is free
            return
        block._freed_at = user_instruction()
        if block.address:
            block.resource._post(block._piece, block._space, stream, None)

    def allocate_sync(self, nbytes: int, alignment: int = ALIGNMENT) -> Block:
        """Memory that every stream may use when this returns. May block the thread.

        Parameters
        ----------
        nbytes, alignment
            As for :meth:`allocate`, and so are the errors.
        """
        alignment = checked_alignment(alignment)
        checked = checked_nbytes(nbytes, alignment)
        place = self._sync_place()
        piece = self.take(checked, alignment, place)
        if piece.address:
            try:
                _finish_blocking(place)
            except BaseException:
                self.give(piece, place)
                raise
        return self._block(piece, None)

    def deallocate_sync(self, block: Block) -> None:
        """Take ``block`` back once all that was given to the device has ended. May block.

        Parameters
        ----------
        block : Block
            The errors are those of :meth:`deallocate`.
        """
        self._check_back(block)
        place = self._sync_place()
        if block.address:
            place.backend.synchronize_blocking()
        self._give_back(block, place)

    def close(self) -> None:
        """Give back what is not in use, and refuse further allocations.

        Blocks in use may still be freed.
        """
        with self._lock:
            self._is_closed = True
        self.trim()

    def trim(self) -> None:
        """Give what is kept for later back to the upstream, as far as nothing uses it."""
        self._drain()

    # -- for the runtime and for wrapping resources ------------------------------------------

    def take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        """:meth:`allocate`, for resources over this one: the arguments were checked.

        Parameters
        ----------
        nbytes, alignment : int
        place : Place
            The stream, at the moment of the call.
        """
        if self._is_closed:
            raise Closed(f"{self!r} is closed")
        space = self._space
        if space is None or space.key != place.backend.space or not space.is_open:
            self._enter(place)
        if self._dropped:
            self._drain()
        if not nbytes:
            return Piece(self, 0, 0, alignment)
        return self._take(nbytes, alignment, place)

    def give(self, piece: Piece, place: Place) -> None:
        """Take ``piece`` back: the resource that it names does.

        Parameters
        ----------
        piece : Piece
            Every use of it is ordered before ``place``.
        place : Place
            The stream, at the moment of the call.
        """
        if piece.address:
            piece.resource._give(piece, place)

    def give_later(self, piece: Piece, place: Place, space: Space) -> None:
        """:meth:`give` has failed: whoever calls next tries again.

        Parameters
        ----------
        piece : Piece
            Every use of it is ordered before ``place``.
        place : Place
        space : Space
            That of ``place``.
        """
        if piece.address:  # else it is back all the same
            space.count_blocks(1)
            self._post(piece, space, place.stream, None)

    @abstractmethod
    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        """A piece of at least 1 byte, usable on ``place`` at once."""

    @abstractmethod
    def _give(self, piece: Piece, place: Place) -> None:
        """Take back a piece that :meth:`_take` gave.

        If this raises, the caller still has it; but where it has set the piece's address to 0, it
        is back all the same.
        """

    @property
    def device(self) -> int | None:
        """The device's ordinal; None until it is known."""
        return self._device if self._space is None else self._space.index

    @property
    def largest_nbytes(self) -> int | None:
        """The largest request that it could serve if nothing of it were in use.

        None: as large a one as the memory it takes from.
        """
        return None

    @property
    def _depth(self) -> int:
        """How many resources lie below this one, one under the other."""
        return 0

    def _enter(self, place: Place) -> None:
        """Take memory in the space of ``place`` from now on, unless bound to another."""
        space = self._space
        if space is None or not space.is_open:
            with self._lock:
                space = self._space
                if space is None or not space.is_open:  # else another thread was faster
                    space = self._begin(space_of(place.backend))
        if space.key != place.backend.space:
            other = f"device {place.backend.index}"
            if place.backend.index == space.index:
                other += " of another event loop, whose simulated memory is another"
            raise ValueError(
                f"{self!r} has its memory on device {space.index}, the stream belongs to {other}"
            )

    def _begin(self, space: Space) -> Space:
        """Start anew in ``space``. Called with the lock held."""
        if self._device is not None and self.device != space.index:
            raise ValueError(
                f"{self!r} was made for device {self.device}, the stream belongs to "
                f"device {space.index}"
            )
        self._forget()
        self._space = space
        space.tenants[id(self)] = self
        return space

    def _on_space_closing(self) -> None:
        """The device is about to close, and has drained: give everything back, start anew."""
        self.trim()
        self._forget()
        self._space = None

    def _forget(self) -> None:  # noqa: B027 - most have nothing to forget
        """The memory that this resource held is gone: go back to how it was made."""

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether memory of one may be given back to the other.

        Parameters
        ----------
        other : DeviceMemoryResource
        """
        return self is other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMemoryResource) and self.is_equal(other)

    def __hash__(self) -> int:
        return id(type(self))  # equal ones are of one type

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    # -- inside ------------------------------------------------------------------------------

    def _block(self, piece: Piece, stream: Any) -> Block:
        assert self._space is not None
        if piece.address:
            self._space.count_blocks(1)
        return Block(self, piece, self._space, stream)

    def _place(self, stream: Any) -> Place:
        space = self._space
        if space is not None and space.is_open:
            place = space.place(stream)
        else:
            owner = getattr(getattr(stream, "_line", None), "owner", None)
            space = space_of(owner.backend) if owner is not None else self._known_space()
            place = space.place(stream)
            self._enter(place)
        if space.dropped:
            space.reap()
        return place

    def _sync_place(self) -> Place:
        space = self._known_space()
        place = space.sync_place()
        self._enter(place)
        if space.dropped:
            space.reap()
        return place

    def _known_space(self) -> Space:
        """The space in use, else the one that the constructor or the task names."""
        space = self._space
        return space if space is not None and space.is_open else find_space(self._device)

    def _check_back(self, block: Block) -> None:
        if not isinstance(block, Block):
            raise TypeError(f"takes a Block, found {block!r}")
        if block.resource is not self and not self.is_equal(block.resource):
            raise ValueError(f"{block!r} is not a block of {self!r}")
        if block._freed_at is not None and block._freed_at is not DROPPED:
            raise ValueError(f"{block!r} was freed already, at {describe(*block._freed_at)}")
        if not block._space.is_open:
            raise Closed(f"{block!r}: its device was closed, which gave it back")

    def _give_back(self, block: Block, place: Place) -> None:
        if block._space.key != place.backend.space:  # equal resources, different memory
            raise ValueError(f"{block!r} does not lie on device {place.backend.index} opened here")
        frame = caller(3)  # who called what called this
        if not self._claim(block, (frame.f_code, frame.f_lasti)):
            self._check_back(block)  # another thread was faster
            return
        self._give_or_keep(block._piece, block._space, place)
        if self._dropped:
            self._drain()
        if block._space.listeners:
            block._space.freed()

    def _claim(self, block: Block, freed_at: tuple[CodeType, int]) -> bool:
        """Whether it falls to the caller to free ``block``."""
        with block.resource._lock:
            if block._freed_at is not None:
                return False
            block._freed_at = freed_at
            return True

    def _drain(self) -> None:
        """Free what was dropped without a free, each on the stream it was allocated on."""
        for _ in range(len(self._dropped)):
            try:
                piece, space, stream, block = self._dropped.popleft()
            except IndexError:  # another thread took the last one
                return
            if not space.is_open or (block is not None and not self._claim(block, DROPPED)):
                continue
            place: Place | None = None
            if stream is not None:
                with suppress(Closed):
                    place = space.place(stream)
            if place is None:  # nothing tells when what it was given has ended
                space.release(partial(self._give_after_all_blocking, piece, space, stream))
            else:
                self._give_or_keep(piece, space, place)

    def _give_or_keep(self, piece: Piece, space: Space, place: Place) -> None:
        """Give a piece back; where that fails it is not lost: the next call tries again."""
        if not piece.address:
            return
        try:
            piece.resource._give(piece, place)
        except BaseException:
            if piece.address:
                self._dropped.append((piece, space, place.stream, None))
            else:  # it is back all the same
                space.count_blocks(-1)
            raise
        space.count_blocks(-1)

    def _give_after_all_blocking(self, piece: Piece, space: Space, stream: Any) -> None:
        place = space.sync_place()
        try:
            place.backend.synchronize_blocking()
        except Exception as error:
            # On virtual time a closed gate is an error: another call comes when it is open.
            if not isinstance(place.backend.translate(error, "freeing"), DeviceLost):
                self._post(piece, space, stream, None)
            return
        self._give_or_keep(piece, space, place)

    def _post(self, piece: Piece, space: Space, stream: Any, block: Block | None) -> None:
        """Have ``piece`` freed by whoever calls next. For finalisers: takes no lock (R12)."""
        if space.is_open:  # else all of it was given back
            self._dropped.append((piece, space, stream, block))
            space.dropped.append(self)
            if space.listeners:
                space.freed()

    def _reap(self) -> bool:
        self._drain()
        if not self._is_dropped:
            return True
        self.trim()
        if not self._is_empty():
            return False
        self._on_space_closing()
        return True

    def _is_empty(self) -> bool:
        """Whether it has given everything back, after a :meth:`trim`: then it may go."""
        return False

    def __del__(self) -> None:
        # What it holds goes back by the next call there: until then its space keeps it (R12).
        space = getattr(self, "_space", None)
        if space is not None and space.is_open:
            self._is_dropped = True
            space.dropped.append(self)


def _finish_blocking(place: Place) -> None:
    """Wait for all that was given to ``place``, on whichever clock."""
    backend = place.backend
    event = backend.create_event()
    try:
        place.stream.record(event)
        while backend.is_virtual and not event.is_done and backend.advance(0):
            pass
        event.sync()  # on virtual time an error where a closed gate holds it up
    finally:
        event.close()


def checked_resource(value: Any, name: str = "") -> DeviceMemoryResource:
    """``value``, which the argument ``name`` was given.

    Raises
    ------
    TypeError
        Not a resource; says how to make one of what resembles it.
    """
    if isinstance(value, DeviceMemoryResource):
        return value
    hint = ""
    if isinstance(value, type):
        hint = ": call the class to make one"
    elif hasattr(type(value), "allocate"):
        hint = ": from_cuda_core(...) makes one of cuda.core's"
    elif hasattr(type(value), "handle"):
        hint = ": CudaAsyncViewMemoryResource(...) makes one of a pool"
    raise TypeError(f"{name} takes a memory resource, found {value!r}{hint}".lstrip())
