"""Frees that wait for the uses ordered before them, where the driver's own would not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from streamflow.memory.order import FreePoint, StreamOrder
from streamflow.memory.space import Place, Space

__all__ = ["DeferredFrees"]


class DeferredFrees:
    """Addresses by the moment of a stream after which they may go. Not thread-safe.

    Streams are kept apart, so that a slow one holds up nobody else's memory.
    """

    def __init__(self) -> None:
        self._order = StreamOrder()
        self._waiting: dict[int, deque[tuple[FreePoint, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[int]:
        return (address for queue in self._waiting.values() for _, address in queue)

    def add(self, space: Space, place: Place, address: int) -> None:
        """``address`` may go once everything given to ``place`` so far has ended."""
        point = self._order.mark(space, place)
        self._waiting.setdefault(point.uid, deque()).append((point, address))

    def take_passed(self, space: Space) -> list[int]:
        """The addresses that may go now. One query for each stream that has some, and no wait.

        Raises
        ------
        Exception
            The backend's own: the device has failed.
        """
        passed: list[int] = []
        for uid, queue in list(self._waiting.items()):
            while queue and self._order.is_passed(queue[0][0]):
                point, address = queue.popleft()
                self._order.drop(space, point)
                passed.append(address)
            if not queue:
                del self._waiting[uid]
        return passed
