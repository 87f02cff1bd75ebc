"""A driver's pool while somebody uses it: destroyed once, by whoever is last, off the loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio.to_thread

from streamflow.errors import Closed
from streamflow.memory.space import Space

__all__ = ["PoolHandle", "destroy_dropped", "drop", "keep_current"]

_owned: set[PoolHandle] = set()
"""Strongly: a space refers to its tenants weakly, and a dropped pool is still to be destroyed."""
_current: dict[Space, PoolHandle] = {}
"""Pools that a program made the current one: the driver would let them be destroyed."""
_dropped: deque[PoolHandle] = deque()


class PoolHandle:
    """The backend's pool, and how many calls on other threads are using it.

    Attributes
    ----------
    space : Space
    is_owned : bool
        Whether it is destroyed at the end.
    is_closed : bool
    """

    def __init__(self, space: Space, handle: Any, *, is_owned: bool) -> None:
        self.space = space
        self.is_owned = is_owned
        self.is_closed = False
        self._handle = handle
        self._num_users = 0
        self._lock = threading.Lock()
        if is_owned:
            _owned.add(self)
            space.tenants[id(self)] = self

    @property
    def key(self) -> object:
        """The same for two handles of one pool: the driver's don't compare, but are addresses."""
        handle = self._handle
        return (self.space.key, int(handle) if hasattr(handle, "__int__") else id(handle))

    def get(self) -> Any:
        """The handle.

        Raises
        ------
        Closed
            The pool or its device was closed.
        """
        if self.is_closed:
            raise Closed("this memory pool is closed")
        if not self.space.is_open:
            raise Closed(f"device {self.space.index}, which this memory pool is on, is closed")
        return self._handle

    async def run(self, action: Callable[[], None]) -> None:
        """``action()`` off the loop (R1), at once on virtual time (R15); the pool stays for it.

        Cancelled, it leaves the thread to its work.
        """
        if self.space.is_virtual:
            action()
            return
        self._enter()
        left = deque((self._leave,))  # to be called once, by the thread or in its stead

        def work() -> None:
            try:
                leave = left.popleft()
            except IndexError:  # cancelled before it began
                return
            try:
                action()
            finally:
                leave()

        try:
            await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        finally:
            if left:
                left.popleft()()

    def close(self) -> None:
        """Destroy it, if it is ours, once nobody uses it."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
            is_last = not self._num_users
        if self.is_owned and is_last and not was_closed:
            self._destroy()

    def _enter(self) -> None:
        with self._lock:
            self.get()
            self._num_users += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self.is_closed and not self._num_users
        if is_last and self.is_owned:
            self._destroy()

    def _destroy(self) -> None:
        space = self.space
        self._forget()
        space.tenants.pop(id(self), None)
        if space.is_open:
            space.release(lambda: space.backend.destroy_pool(self._handle))

    @property
    def _depth(self) -> int:
        """Below every resource: those that take from it give back first."""
        return -1

    def _reap(self) -> bool:
        """Nothing of it is ever left to the space: see :func:`drop`."""
        return True

    def _on_space_closing(self) -> None:
        """The device has drained: destroy it here, where that may block."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        self._forget()
        if not was_closed:
            self.space.backend.destroy_pool(self._handle)

    def _forget(self) -> None:
        _owned.discard(self)
        if _current.get(self.space) is self:
            del _current[self.space]


def drop(known: PoolHandle) -> None:
    """Leave a pool to :func:`destroy_dropped`. Safe in a finaliser: one append (R12)."""
    _dropped.append(known)


def destroy_dropped() -> None:
    """Destroy the pools that were dropped without being closed."""
    for _ in range(len(_dropped)):
        try:
            known = _dropped.popleft()
        except IndexError:  # another thread took the last one
            return
        if _current.get(known.space) is known:
            _dropped.append(known)  # later, once another is the current one
        else:
            known.close()


def keep_current(known: PoolHandle) -> None:
    """``known`` is its device's current pool now: it stays, also if the program drops it."""
    if known.is_owned:
        _current[known.space] = known
    else:
        _current.pop(known.space, None)
