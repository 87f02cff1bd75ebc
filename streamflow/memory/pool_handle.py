"""A driver's pool while somebody uses it: destroyed once, by whoever is last, off the loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio.to_thread

from streamflow.backends.base import Backend
from streamflow.errors import Closed
from streamflow.memory.space import Space

__all__ = ["PoolHandle", "keep_current"]

_current: dict[Space, PoolHandle] = {}
"""Pools that a program made the current one: the driver would let them be destroyed."""


class PoolHandle:
    """The backend's pool, and how many calls on other threads are using it.

    Attributes
    ----------
    space : Space
    is_owned : bool
        Whether it is destroyed at the end.
    is_closed : bool
    """

    _depth = -1  # below every resource: destroyed after they have given back

    def __init__(self, space: Space, handle: Any, *, is_owned: bool) -> None:
        self.space = space
        self.is_owned = is_owned
        self.is_closed = False
        self._handle = handle
        self._num_users = 0
        self._changed = threading.Condition()
        if is_owned:
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
        if not self.space.is_open:
            raise Closed(f"device {self.space.index}, which this memory pool is on, is closed")
        if self.is_closed:
            raise Closed("this memory pool is closed")
        return self._handle

    @property
    def backend(self) -> Backend:
        """By which to make calls; raises as :meth:`get`."""
        self.get()
        return self.space.backend

    async def run(self, action: Callable[[], None]) -> None:
        """``action()`` off the loop (R1), at once on virtual time (R15); the pool stays for it.

        Cancelled, it leaves the thread to its work.
        """
        if self.space.is_virtual:
            action()
            return
        with self._changed:
            self.get()
            self._num_users += 1
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
            with suppress(IndexError):  # the thread has begun
                left.popleft()()

    def close(self) -> None:
        """Destroy it, if it is ours, once nobody uses it."""
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            is_last = not self._num_users
        if is_last and not was_closed:
            self._destroy()

    def drop(self) -> None:
        """Have the space close it. For finalisers: one append (R12)."""
        if self.is_owned and not self.is_closed:
            self.space.dropped.append(self)

    def _leave(self) -> None:
        with self._changed:
            self._num_users -= 1
            is_last = self.is_closed and not self._num_users
            self._changed.notify_all()
        if is_last:
            self._destroy()

    def _destroy(self) -> None:
        space = self.space
        self._forget()
        if self.is_owned and space.is_open:
            space.release(lambda: space.destroy_pool(self._handle))

    def _reap(self) -> bool:
        if _current.get(self.space) is self:
            return False  # later, once another one is current
        self.close()
        return True

    def trim(self) -> None:
        """Leave it: a program's own pool keeps what its threshold says."""

    def _is_empty(self) -> bool:
        return True  # the driver destroys a pool once its last block was freed

    def _on_space_closing(self) -> None:
        """The device has drained: destroy it here, where that may block."""
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            self._changed.wait_for(lambda: not self._num_users)
        self._forget()
        if not was_closed:
            self.space.destroy_pool(self._handle)

    def _forget(self) -> None:
        self.space.tenants.pop(id(self), None)
        if _current.get(self.space) is self:
            del _current[self.space]


def keep_current(known: PoolHandle) -> None:
    """``known`` is its device's current pool now: it stays, also if the program drops it."""
    if known.is_owned:
        _current[known.space] = known
    else:
        _current.pop(known.space, None)
