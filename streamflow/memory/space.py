"""The memory of one device, as resources see it: who reaches it, and how to give it back.

Several open devices may stand for one GPU (rule R11): their addresses are the same memory, and
a resource serves all of them. A :class:`Space` lives while any of them is open. When the last
one closes, every resource there gives back what it holds and forgets it; used again, it starts
anew on the next device of that index.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from streamflow.backends.base import Backend
from streamflow.errors import Closed, DeviceLost
from streamflow.memory.release import Releaser
from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = ["Place", "Space", "enter_space", "leave_space", "open_spaces", "space_of"]


class Tenant(Protocol):
    """A resource, as its space knows it."""

    @property
    def _depth(self) -> int:
        """How many resources lie below this one, one under the other."""

    def _reap(self) -> bool:
        """Free what was dropped. False where the resource was, too, and still holds something."""

    def _is_empty(self) -> bool:
        """Whether it holds no memory of the device."""

    def trim(self) -> None:
        """Give back what it keeps for later, as far as nothing uses it."""

    def _on_space_closing(self) -> None:
        """Give everything back: nothing on the device uses it any more. May block."""


class Space:
    """One device's memory and the open backends that reach it. Thread-safe.

    Attributes
    ----------
    index : int
        The device's ordinal.
    is_open : bool
        Whether a device is.
    tenants : WeakValueDictionary
        The resources that took memory here, each by its ``id``: equal ones are several.
    dropped : deque of Tenant
        Resources of which something was dropped, or that were dropped themselves: finalisers
        put them here, :meth:`reap` frees what they hold (rule R12).
    listeners : list of callable
        Called from any thread when memory became free that was not before.
    """

    def __init__(self, backend: Backend) -> None:
        self.key = backend.space
        self.index = backend.index
        self.is_virtual = backend.is_virtual
        self.tenants: WeakValueDictionary[int, Tenant] = WeakValueDictionary()
        self.dropped: deque[Tenant] = deque()
        self.listeners: list[Callable[[], None]] = []
        self.is_open = False
        self._backends: list[Backend] = []
        self._left: list[Backend] = []
        self._caches: dict[int, Callable[[], None]] = {}  # by the id of the backend
        self._num_blocks = 0
        self._releaser = Releaser(f"streamflow-release-{backend.index}", self._after_release)
        self._events: dict[int, deque[Any]] = {}  # by the id of the backend, which ends them
        self._lines: dict[int, Timeline] = {}  # of streams that no device of ours made
        # The same by stream object, for speed: what was looked up stays so until it is closed.
        self._known: dict[int, tuple[Any, Backend, Timeline]] = {}
        self._own: dict[str, Place] = {}
        self._lock = threading.RLock()  # a collection inside may free a block in its finaliser

    @property
    def backend(self) -> Backend:
        """Any of the open ones.

        Raises
        ------
        Closed
            None is open any more.
        """
        backends = self._backends
        if not backends:
            raise Closed(f"device {self.index} is closed")
        return backends[0]

    @property
    def is_shared(self) -> bool:
        """Whether several devices are open here, or the program holds blocks of its own."""
        return len(self._backends) > 1 or self._num_blocks > 0

    def count_blocks(self, num: int) -> None:
        """``num`` more blocks are in the program's hands, or fewer."""
        with self._lock:
            self._num_blocks += num

    def trim_caches(self) -> None:
        """Have every open device here give back what its own pool keeps for later."""
        with self._lock:
            for trim in self._caches.values():
                trim()

    def trim_resources(self) -> None:
        """Have every resource here give back what it keeps for later. Hold none of their locks."""
        # The outer ones first: each gives back to those below it.
        for tenant in sorted(self.tenants.values(), key=lambda one: one._depth, reverse=True):
            tenant.trim()

    def has(self, backend: object) -> bool:
        """Whether ``backend`` is one of the open ones."""
        return backend in self._backends

    def was_left(self, backend: object) -> bool:
        """Whether ``backend`` was closed with work that had not ended: who knows when it has."""
        return backend in self._left

    def place(self, stream: Any) -> Place:
        """Where work goes that is given to ``stream``.

        Parameters
        ----------
        stream : Stream, Lane or a stream of the backend's own

        Raises
        ------
        TypeError
            Not a stream.
        ValueError
            A stream of another device.
        Closed
            A closed stream.
        """
        known = self._known.get(id(stream))
        if known is not None:
            same, backend, line = known
            if (
                same is stream
                and backend in self._backends
                and not getattr(stream, "is_closed", False)
            ):
                # A stream may have several objects, of which one may be closed.
                line.stream = stream
                return Place(backend, line)
        ours = getattr(stream, "_line", None)
        if isinstance(ours, Timeline):
            if ours.stream is None or getattr(stream, "is_closed", False):
                raise Closed(f"stream {ours.name} is closed")
            backend = ours.owner.backend
            if backend.space != self.key:
                raise ValueError(
                    f"{stream!r} belongs to device {backend.index}, the memory to "
                    f"device {self.index}"
                )
            return Place(backend, ours)
        if not (hasattr(stream, "record") and hasattr(stream, "wait") and hasattr(stream, "sync")):
            raise TypeError(f"stream= takes a streamflow Stream or Lane, found {stream!r}")
        if getattr(stream, "is_closed", False):
            raise Closed(f"{stream!r} is closed")
        # The simulator's streams name the backend that ends them.
        owner: Any = getattr(stream, "device", None)
        if self.has(owner):
            backend = owner
        elif getattr(owner, "space", None) == self.key:
            raise Closed(f"{stream!r}: its device was closed")
        else:
            backend = self.backend
        uid = backend.stream_id(stream)
        with self._lock:
            found = self._lines.get(uid)
        if found is None:
            self._check_owner(stream)
            with self._lock:
                if len(self._lines) >= _NUM_LINES_MAX:
                    # They keep their streams. What is forgotten costs a wait that was not needed.
                    for old in list(self._lines)[: _NUM_LINES_MAX // 2]:
                        del self._lines[old]
                found = self._lines.setdefault(uid, Timeline(uid, stream, f"stream {uid}"))
        if not backend.is_cuda or int(stream.handle) > _LAST_DEFAULT_HANDLE:
            if len(self._known) >= _NUM_LINES_MAX:
                self._known.clear()
            self._known[id(stream)] = stream, backend, found
        found.stream = stream
        return Place(backend, found)

    def sync_place(self) -> Place:
        """A stream of our own, for the calls that take none."""
        return self._own_place("sync")

    def release_place(self) -> Place:
        """Another one, for frees that come after what is still running."""
        return self._own_place("release")

    def _own_place(self, name: str) -> Place:
        with self._lock:
            place = self._own.get(name)
            if place is None or place.backend not in self._backends:  # its device was closed
                backend = self.backend
                stream = backend.create_stream()
                line = Timeline(backend.stream_id(stream), stream, name)
                place = self._own[name] = Place(backend, line)
        return Place(place.backend, place.line)

    def take_event(self, backend: Backend) -> Any:
        """An event for :class:`~streamflow.memory.order.StreamOrder`, of an open backend."""
        try:
            return self._events[id(backend)].pop()
        except (KeyError, IndexError):
            return backend.create_event()

    def give_event(self, event: Any, backend: Backend) -> None:
        """Nobody asks this event any more; waits for it stay as they were made."""
        events = self._events.get(id(backend))
        if events is not None:  # else it is closed
            events.append(event)

    def destroy_pool(self, pool: Any) -> None:
        """Destroy a pool of the device. Of several open devices one has it, whichever made it."""
        for backend in tuple(self._backends):
            backend.destroy_pool(pool)

    def release(self, action: Callable[[], None]) -> None:
        """Run what may block, off the loop; at once where time is virtual (rules R1, R15)."""
        if self.is_virtual:
            action()
            self._after_release()
        else:
            self._releaser.submit(action)

    @property
    def is_releasing(self) -> bool:
        """Whether an action of :meth:`release` has not ended: listeners hear when it has."""
        return self._releaser.is_busy

    def wait_released_blocking(self, timeout_s: float | None = None) -> None:
        """Until every action of :meth:`release` so far has ended, or the time is over."""
        self._releaser.wait_idle_blocking(timeout_s)

    def reap(self) -> None:
        """Free what was dropped, of every resource here. Takes their locks: hold none."""
        for _ in range(len(self.dropped)):
            try:
                tenant = self.dropped.popleft()
            except IndexError:  # another thread took the last one
                return
            if not tenant._reap():
                self.dropped.append(tenant)

    def freed(self) -> None:
        """Tell those who wait for memory that some came back. Any thread."""
        for listener in tuple(self.listeners):
            listener()

    def _check_owner(self, stream: Any) -> None:
        # cuda.core's name their device.
        owner = getattr(stream, "device", None)
        index = getattr(owner, "device_id", getattr(owner, "index", self.index))
        if index != self.index or getattr(owner, "space", self.key) != self.key:
            raise ValueError(
                f"{stream!r} belongs to device {index}, the memory to device {self.index}"
            )

    def _after_release(self) -> None:
        self.freed()

    def _close(self) -> None:
        """The last backend is about to close, and the device has drained."""
        tenants = {id(tenant): tenant for tenant in (*self.tenants.values(), *self.dropped)}
        errors: list[Exception] = []
        if not all(tenant._is_empty() for tenant in tenants.values()):
            try:
                self.backend.synchronize_blocking()  # the runtime drained what it knew of
            except Exception as error:
                if not isinstance(self.backend.translate(error, "closing"), DeviceLost):
                    errors.append(error)
                    tenants.clear()  # what still runs keeps what it uses (R6)
        # The outer ones first: each gives back to those below it.
        for tenant in sorted(tenants.values(), key=lambda one: one._depth, reverse=True):
            try:
                tenant._on_space_closing()
            except Exception as error:  # the others' memory is to go back all the same
                errors.append(error)
        self.tenants.clear()
        self.dropped.clear()
        self.wait_released_blocking()
        self._releaser.close()
        for events in self._events.values():
            while events:
                events.pop().close()
        for place in self._own.values():
            if place.backend in self._backends:
                place.stream.close()
        self._own.clear()
        if errors:
            raise errors[0]


class Place:
    """A stream at the moment of an allocation or a free, and what the call did there.

    Attributes
    ----------
    backend : Backend
        To make the calls by.
    line : Timeline
        The stream, with what the runtime knows it has waited for.
    stream : object
        The backend's own.
    ticket : Ticket or None
        Of the op that this is for, where the runtime makes one.
    num_calls : int
        Waits and other work put on the stream meanwhile (rule R7).
    waited : list of Ticket
        The runtime's tickets that the stream was told to wait for.
    """

    __slots__ = ("backend", "line", "num_calls", "stream", "ticket", "waited")

    def __init__(self, backend: Backend, line: Timeline, ticket: Ticket | None = None) -> None:
        self.backend = backend
        self.line = line
        self.stream = line.stream
        self.ticket = ticket
        self.num_calls = 0
        self.waited: list[Ticket] = []


_NUM_LINES_MAX = 256
_LAST_DEFAULT_HANDLE = 2
"""CUDA's default streams have handles up to this; one of them is another one in every thread."""
_lock = threading.RLock()  # a finaliser inside may look for a space
_spaces: dict[Any, Space] = {}


def enter_space(backend: Backend, trim: Callable[[], None] | None = None) -> Space:
    """The space of a backend that was just opened; ``trim()`` gives back what it keeps unused."""
    with _lock:
        space = _spaces.get(backend.space)
        if space is None:
            space = _spaces[backend.space] = Space(backend)
        space._backends.append(backend)
        space._events[id(backend)] = deque()
        space.is_open = True
    if trim is not None:
        with space._lock:
            space._caches[id(backend)] = trim
    return space


def leave_space(space: Space, backend: Backend, *, keeps: bool = False) -> None:
    """``backend`` is about to close; may block. ``keeps``: something is still running (R6)."""
    with space._lock:
        space._caches.pop(id(backend), None)
    with _lock:
        is_last = space._backends == [backend]
        if is_last:
            del _spaces[space.key]
    try:
        if is_last and not keeps:
            space._close()
    finally:
        if keeps:
            space._left.append(backend)
        space._backends.remove(backend)
        space._events.pop(id(backend), None)
        space._known.clear()
        space.is_open = bool(space._backends)


def space_of(backend: Backend) -> Space:
    """The space that an open backend reaches.

    Raises
    ------
    Closed
        The backend is closed.
    """
    space = _spaces.get(backend.space)
    if space is None:
        raise Closed(f"device {backend.index} is closed")
    return space


def open_spaces(index: int) -> list[Space]:
    """The spaces of every open device with this ordinal."""
    with _lock:
        return [space for space in _spaces.values() if space.index == index]
