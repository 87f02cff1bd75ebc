"""Where items come from: iterables, async iterables, functions that return one, and memmaps."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from streamflow.pipeline.items import copied
from streamflow.runtime.array import DeviceArray

__all__ = ["END", "Opened", "Pull", "Source", "SourceLike", "checked_count"]

SourceLike: TypeAlias = Iterable[Any] | AsyncIterable[Any] | Callable[[], Any]

END = object()
"""What a pull brings once there is nothing more."""

Pull = Callable[[], Any]
"""Returns the next item or :data:`END`; a coroutine function where the source is one."""


class Source:
    """What a program named as its source, checked.

    Parameters
    ----------
    given : iterable, async iterable or callable
    batch_size : int, optional
        Cut an ndarray along its first axis into views of so many rows.
    is_owner : bool
        The items have nothing in common, so the next one may be asked for at any time.

    Raises
    ------
    TypeError
        It is none of these.
    """

    def __init__(self, given: SourceLike, *, batch_size: int | None, is_owner: bool) -> None:
        if batch_size is not None:
            given = _Rows(given, batch_size)
        elif isinstance(given, (str, bytes, bytearray, dict)) or not (
            hasattr(given, "__aiter__") or _is_iterable(given) or callable(given)
        ):
            raise TypeError(
                "a pipeline's source is an iterable or async iterable of items, a function that "
                f"returns one, or an ndarray with batch_size=; found {type(given).__name__}"
            )
        self._given = given
        self._is_used = False
        self.is_declared_owner = is_owner
        # These hold all their items at once: there is no one buffer that is filled again.
        self.is_owner = is_owner or isinstance(given, (list, tuple, _Rows, np.ndarray))
        self.is_callable = not hasattr(given, "__aiter__") and not _is_iterable(given)

    @property
    def total(self) -> int | None:
        """How many items there will be, where the source can say."""
        try:
            return len(self._given)  # type: ignore[arg-type]
        except TypeError:
            return None

    def begin(self) -> Opened:
        """For one run.

        Raises
        ------
        RuntimeError
            It can be gone through once, and was.
        """
        given: Any = self._given
        is_once = getattr(given, "__anext__", None) or getattr(given, "__next__", None)
        if is_once and self._is_used:
            raise RuntimeError(
                f"this source, a {type(given).__name__}, was gone through already: give the "
                "pipeline the function that makes it, and each run calls it again"
            )
        self._is_used = True
        return Opened(given, self.is_callable)


class Opened:
    """A source in one run: its iterator, once there is one."""

    def __init__(self, given: Any, is_callable: bool) -> None:
        self._given = given
        self._sync: Iterator[Any] | None = None
        self._async: AsyncIterator[Any] | None = None
        self.to_call: Callable[[], Any] | None = given if is_callable else None
        """To be called first, as a host task; what it returns goes to :meth:`returned`."""

    def returned(self, given: Any) -> None:
        """The function has returned what to iterate over.

        Raises
        ------
        TypeError
            Nothing that can be iterated over.
        """
        self.to_call = None
        if not hasattr(given, "__aiter__") and not _is_iterable(given):
            raise TypeError(
                "the source's function has to return an iterable or an async iterable, and "
                f"returned {type(given).__name__}"
            )
        self._given = given

    @property
    def is_async(self) -> bool:
        """Whether it is pulled on the loop."""
        return hasattr(self._given, "__aiter__")

    @property
    def is_instant(self) -> bool:
        """Whether the next item is there already, so that no worker thread is asked for it."""
        return self.to_call is None and type(self._given) in _INSTANT

    def pull(self, copies: bool) -> Pull:
        """What brings the next item, with arrays of its own if it ``copies``.

        An async source never copies: that would hold the loop up (rule R1).
        """
        if self.is_async:
            return self._pull_async
        return self._pull_copied_blocking if copies else self._pull_blocking

    def _pull_blocking(self) -> Any:
        if self._sync is None:
            self._sync = iter(self._given)
        return next(self._sync, END)

    def _pull_copied_blocking(self) -> Any:
        return copied(self._pull_blocking())

    async def _pull_async(self) -> Any:
        if self._async is None:
            self._async = aiter(self._given)
        try:
            return await anext(self._async)
        except StopAsyncIteration:
            return END

    @property
    def close(self) -> Callable[[], Any] | None:
        """What ends the iterator, if it wants to be ended; async where the iterator is."""
        if self._async is not None:
            found = getattr(self._async, "aclose", None)
        else:
            found = getattr(self._sync, "close", None)
            if found is not None and not hasattr(self._sync, "throw"):
                found = None  # no generator: a file's close, say, is whoever's who opened it
        return None if found is None else _Closing(found, self._async is not None).function


class _Closing:
    """A method as a function that ``dev.host`` can tell the colour of."""

    def __init__(self, method: Callable[[], Any], is_coroutine: bool) -> None:
        self._method = method
        self.function = self._close_async if is_coroutine else self._close_blocking

    async def _close_async(self) -> None:
        await self._method()

    def _close_blocking(self) -> None:
        self._method()


class _Rows:
    """An ndarray or memmap in pieces of ``batch_size`` rows: views, nothing is read yet."""

    def __init__(self, array: Any, batch_size: int) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                "batch_size= cuts an ndarray or memmap along its first axis; the source is "
                f"{type(array).__name__}: use .batch(n)"
            )
        if not array.ndim:
            raise ValueError("batch_size= needs an array with a first axis, this one has shape ()")
        self._array = array
        self._batch_size = checked_count(batch_size, "batch_size")

    def __len__(self) -> int:
        return math.ceil(len(self._array) / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self._array), self._batch_size):
            yield self._array[start : start + self._batch_size]


_INSTANT = (list, tuple, np.ndarray, np.memmap, _Rows)


def checked_count(number: Any, name: str) -> int:
    """``number`` as an int of at least 1.

    Raises
    ------
    TypeError, ValueError
        It is none.
    """
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} is an integer, found {number!r}")
    count: int = number.__index__()
    if count < 1:
        raise ValueError(f"{name} is at least 1, found {count}")
    return count


def _is_iterable(given: Any) -> bool:
    if isinstance(given, np.ndarray) and not given.ndim:
        return False
    if isinstance(given, (DeviceArray, np.generic)):
        return False
    return hasattr(type(given), "__iter__") or hasattr(type(given), "__getitem__")
