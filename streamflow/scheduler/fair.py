"""A queue that takes turns between its users (sans-IO): fair, and the same every time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First come first served for each key, one item of each key after the other.

    A key is whoever must not be kept waiting by the others: a scope, or None for the
    device itself. Ties go to the key that has waited longest for its turn.

    Parameters
    ----------
    what : str
        What the items wait for, for reports.
    """

    __slots__ = ("_turns", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._turns: OrderedDict[object, OrderedDict[T, None]] = OrderedDict()

    def push(self, key: object, item: T) -> None:
        """Put ``item`` behind the others of ``key``."""
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = OrderedDict()
        turn[item] = None

    def peek(self) -> T:
        """What :meth:`pop` would take. The queue must not be empty."""
        return next(iter(next(iter(self._turns.values()))))

    def pop(self) -> T:
        """Take the item whose turn it is; the next turn is another key's."""
        key, turn = next(iter(self._turns.items()))
        item, _ = turn.popitem(last=False)
        if turn:
            self._turns.move_to_end(key)
        else:
            del self._turns[key]
        return item

    def remove(self, key: object, item: T) -> None:
        """Take ``item`` out; the others keep their places."""
        turn = self._turns[key]
        del turn[item]
        if not turn:
            del self._turns[key]

    def __iter__(self) -> Iterator[T]:
        for turn in self._turns.values():
            yield from turn

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def __bool__(self) -> bool:
        return bool(self._turns)
