"""Pinned blocks of a caching allocator: in the program's hands, as it keeps them, as it tells."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from streamflow.backends.base import Backend
from streamflow.backends.origin import describe, user_instruction
from streamflow.errors import Closed, DeviceLost
from streamflow.memory.space import Space
from streamflow.scheduler.hazards import Region

if TYPE_CHECKING:
    from types import CodeType

    from streamflow.memory.caching_host import CachingHostAllocator

__all__ = [
    "Cell",
    "DrainPoint",
    "HostBlock",
    "HostBlockInfo",
    "HostBytes",
    "Point",
    "UsePoint",
    "reraise",
]

_generations = count(1)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes of an allocator's blocks.

    Attributes
    ----------
    free : int
        In the cache.
    live : int
        In the program's hands.
    """

    free: int
    live: int


@dataclass(frozen=True, slots=True)
class HostBlockInfo:
    """What an allocator knows of one of its blocks.

    Attributes
    ----------
    pointer : int
        Its address.
    nbytes : int
        The size of its bin; of a block of no bin, what was asked for.
    bin : int
        ``INVALID_BIN``: too large for any.
    device : int
        The ordinal of the device that it was last handed out for.
    stream : object
        The one given at its latest allocation; None for the host's use only.
    ready_events : tuple
        The backend's, one per stream that may still use it. Empty for a live block.
    """

    pointer: int
    nbytes: int
    bin: int
    device: int
    stream: Any
    ready_events: tuple[Any, ...]


class Point(Protocol):
    """Something that must have passed before a block may be used again."""

    uid: int
    space: Space
    is_over: bool

    @property
    def event(self) -> Any:
        """The backend's, where it has one that is its own."""

    def is_passed(self) -> bool:
        """Whether it has; may ask the device."""

    def finish(self) -> None:
        """It has, somebody knows."""


class UsePoint:
    """The moment of a stream at which a block was freed."""

    __slots__ = ("_events", "backend", "is_over", "space", "uid")

    def __init__(self, space: Space, backend: Backend, event: Any, uid: int) -> None:
        self.space = space
        self.backend = backend
        self.uid = uid
        self.is_over = False
        self._events = [event]  # taken out by whoever gives it back: one thread alone

    @property
    def event(self) -> Any:
        """None once it has passed."""
        return next(iter(self._events), None)

    def is_passed(self) -> bool:
        """Whether the device has got that far; one query. A failure is not a yes.

        Raises
        ------
        StreamflowError
            The query failed, and not because the device is lost.
        """
        event = self.event
        if self.is_over or event is None:
            return self.is_over
        try:
            if not event.is_done:
                return False
        except Closed:
            # One of several devices on this memory, whose streams had ended, as a rule. The last
            # one says so when it closes; where it doesn't, nothing tells what still runs (R6).
            if not self.space.is_open or self.space.was_left(self.backend):
                return False
        except Exception as error:
            doing = "asking whether a pinned block is in use"
            if isinstance(self.backend.translate(error, doing), DeviceLost):  # the ops report it
                return False
            reraise(self.backend, error, doing)
        self.finish()
        return True

    def finish(self) -> None:
        """It has passed."""
        self.is_over = True
        with suppress(IndexError):  # another thread has given it back
            self.space.give_event(self._events.pop(), self.backend)


class DrainPoint:
    """The moment at which a block was freed whose stream can't be asked: the device must drain."""

    __slots__ = ("_is_running", "event", "is_over", "space", "uid")

    def __init__(self, space: Space, uid: int) -> None:
        self.space = space
        self.uid = uid
        self.event = None
        self.is_over = False
        self._is_running = False

    def is_passed(self) -> bool:
        """Whether the device has drained since; has that looked at, off the loop (rule R1)."""
        if not self.is_over and not self._is_running and self.space.is_open:
            self._is_running = True
            self.space.release(self._drain_blocking)
        return self.is_over

    def finish(self) -> None:
        """It has passed."""
        self.is_over = True

    def _drain_blocking(self) -> None:
        backend = self.space.backend
        try:
            backend.synchronize_blocking()
        except Exception:  # lost, or held by a closed gate on virtual time: ask again later
            return
        finally:
            self._is_running = False
        self.is_over = True


class Cell:
    """A pinned range, as its allocator keeps it.

    Attributes
    ----------
    address, nbytes, bin : int
        ``nbytes`` is its bin's size.
    pinned_nbytes : int
        How many of them are there.
    backend : Backend
        Which pinned it, and unpins it, also after it was closed.
    num_asked : int
        What its present holder asked for.
    space : Space
        Of the device that it was last handed out for.
    stream : object
        As given then.
    uses : dict
        By id, the streams that its present holder uses it on, and their spaces.
    regions : dict
        By thread, the hazards of its loop's ops on it.
    is_live : bool
        It is in the program's hands.
    points : tuple
        What must have passed before it may be used again.
    key : frozenset of int
        The ids of the streams of ``points``.
    turn : int
        Its place among all that were ever cached.
    """

    __slots__ = (
        "address",
        "backend",
        "bin",
        "is_live",
        "key",
        "nbytes",
        "num_asked",
        "pinned_nbytes",
        "points",
        "regions",
        "space",
        "stream",
        "turn",
        "uses",
    )

    def __init__(
        self,
        address: int,
        nbytes: int,
        pinned_nbytes: int,
        order: int,
        space: Space,
        backend: Backend,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.pinned_nbytes = pinned_nbytes
        self.bin = order
        self.space = space
        self.backend = backend
        self.num_asked = 0
        self.stream: Any = None
        self.uses: dict[int, tuple[Space, Any]] = {}
        self.regions: dict[int, Region] = {}
        self.is_live = False
        self.points: tuple[Point, ...] = ()
        self.key: frozenset[int] = frozenset()
        self.turn = 0

    def is_ready(self) -> bool:
        """Whether nothing on a device uses it any more: a query for each of its streams at most.

        Raises
        ------
        StreamflowError
            As :meth:`UsePoint.is_passed`.
        """
        return all(point.is_passed() for point in self.points)

    def info(self) -> HostBlockInfo:
        """What the allocator tells of it."""
        events = tuple(point.event for point in self.points if point.event is not None)
        return HostBlockInfo(
            self.address, self.nbytes, self.bin, self.space.index, self.stream, events
        )


class HostBlock:
    """Pinned memory that a :class:`CachingHostAllocator` gave to the program.

    Keeps its allocator and its streams alive. Dropped without a free, also by its last view, it
    goes back by a later call (rule R12).

    Attributes
    ----------
    address : int
        0 for no bytes.
    nbytes : int
        What was asked for.
    capacity_nbytes : int
        What is pinned for it: at most a quarter more, unless it was asked for more before.
    bin_nbytes : int
        The size of its bin, as which it is counted.
    bin : int
    device : int
        The ordinal of the device that it was handed out for.
    stream : object
        As given to ``host_allocate``.
    generation : int
        No two of a process have the same: an address alone comes again.
    """

    __slots__ = (
        "__weakref__",
        "_allocator",
        "_cell",
        "_claims",
        "_freed_at",
        "_made_at",
        "address",
        "bin",
        "bin_nbytes",
        "capacity_nbytes",
        "device",
        "generation",
        "nbytes",
        "stream",
    )

    def __init__(
        self, allocator: CachingHostAllocator, cell: Cell | None, device: int, stream: Any
    ) -> None:
        self._allocator = allocator
        self._cell = cell
        self.address = 0 if cell is None else cell.address
        self.nbytes = 0 if cell is None else cell.num_asked
        self.capacity_nbytes = 0 if cell is None else cell.pinned_nbytes
        self.bin_nbytes = 0 if cell is None else cell.nbytes
        self.bin = allocator.INVALID_BIN if cell is None else cell.bin
        self.device = device
        self.stream = stream
        self.generation = next(_generations)
        self._made_at = user_instruction()
        self._freed_at: tuple[CodeType, int] | None = None
        self._claims = [True]  # whoever takes it out frees the block: one thread alone, no lock

    @property
    def is_freed(self) -> bool:
        """Whether it was given back."""
        return not self._claims

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Its ``nbytes`` bytes, as a view that keeps the block from being dropped.

        Raises
        ------
        Closed
            The block was freed.
        """
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Its bytes, for NumPy.

        Raises
        ------
        Closed
            The block was freed.
        """
        if not self._claims:
            raise Closed(f"{self!r} was freed, at {self._freed_where()}")
        shape, data = (self.nbytes,), (self.address, False)
        if not self.nbytes:  # NumPy takes no null address for what it may write to
            data = (np.empty(1, np.uint8).ctypes.data, False)
        return {"version": 3, "shape": shape, "typestr": "|u1", "data": data}

    def record_stream(self, stream: Any) -> None:
        """Have the free wait for ``stream`` as well: foreign work given to it uses the block.

        Ops that were given its :attr:`array` are known without.

        Parameters
        ----------
        stream : Stream or Lane
            Or a stream of the backend's own. Of any device.

        Ordering
        --------
        Issues nothing. The free records an event on every stream that was noted.

        Raises
        ------
        TypeError
            Not a stream.
        Closed
            The stream is closed, or the block was freed.
        """
        self._allocator._record_stream(self, stream)

    def _freed_where(self) -> str:
        return "another thread" if self._freed_at is None else describe(*self._freed_at)

    def __del__(self) -> None:
        # A finaliser never calls the driver, nor takes a lock (R12).
        if getattr(self, "_claims", None) and self._cell is not None:
            self._claims.clear()
            self._allocator._cache.post(self._cell)

    def __repr__(self) -> str:
        state = " freed" if self.is_freed else ""
        return (
            f"<HostBlock {self.nbytes} bytes at {self.address:#x}, "
            f"made at {describe(*self._made_at)}{state}>"
        )


def reraise(backend: Backend, error: Exception, doing: str) -> NoReturn:
    """Raise ``error`` as one of streamflow's, from where it was caught."""
    translated = backend.translate(error, doing)
    try:
        if translated is error:
            raise error
        raise translated from error
    finally:
        del translated  # it has this frame, and so every caller's, with blocks (C23)
