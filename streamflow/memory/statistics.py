"""How much memory a program and its tasks take: now, at most, and in all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place

__all__ = ["Counters", "Statistics", "StatisticsResourceAdaptor"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was allocated, with RMM's names."""

    current_bytes: int
    """Not freed yet."""
    current_count: int
    peak_bytes: int
    """The most that ``current_bytes`` has been."""
    peak_count: int
    total_bytes: int
    """All that was ever allocated."""
    total_count: int


class Counters:
    """Counts the allocations of a task, and the frees of those, until taken off.

    Attributes
    ----------
    current_bytes, current_count, peak_bytes, peak_count, total_bytes, total_count : int
        As in :class:`Statistics`; they go on counting.
    """

    __slots__ = (
        "_key",
        "current_bytes",
        "current_count",
        "peak_bytes",
        "peak_count",
        "total_bytes",
        "total_count",
    )

    def __init__(self, key: object) -> None:
        self._key = key
        self.current_bytes = 0
        self.current_count = 0
        self.peak_bytes = 0
        self.peak_count = 0
        self.total_bytes = 0
        self.total_count = 0

    def __repr__(self) -> str:
        return f"<Counters: {self.current_bytes} bytes, at most {self.peak_bytes}>"

    def _snapshot(self) -> Statistics:
        return Statistics(
            self.current_bytes,
            self.current_count,
            self.peak_bytes,
            self.peak_count,
            self.total_bytes,
            self.total_count,
        )

    def _add(self, nbytes: int) -> None:
        self.current_bytes += nbytes
        self.current_count += 1
        self.total_bytes += nbytes
        self.total_count += 1
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self.peak_count = max(self.peak_count, self.current_count)

    def _subtract(self, nbytes: int) -> None:
        self.current_bytes -= nbytes
        self.current_count -= 1


# Of every adaptor, innermost last. Never changed in place: a task that starts another hands it
# on, and neither sees what the other pushes from then on.
_PUSHED: ContextVar[tuple[Counters, ...]] = ContextVar("streamflow_counters", default=())


class StatisticsResourceAdaptor(UpstreamResourceAdaptor):
    """Counts bytes and allocations: of the resource, and of each task that asks for it.

    What a task pushes counts what this task allocates, and tasks that it starts meanwhile; not
    what others do between its turns. A free is counted where its allocation was, whoever frees
    the block, and wherever. Sizes are those asked for; blocks of no bytes don't count.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    device : Device or int, optional
        By default the upstream's.
    """

    def __init__(self, upstream_mr: DeviceMemoryResource, device: Any = None) -> None:
        super().__init__(upstream_mr, device)
        self._key = object()  # tasks must not keep the adaptor
        self._whole = Counters(self._key)
        self._charged: dict[Piece, tuple[Counters, ...]] = {}

    @property
    def allocation_counts(self) -> Statistics:
        """Those of the task's innermost counters; of the whole resource where none are pushed."""
        with self._lock:
            return self._innermost()._snapshot()

    @property
    def resource_counts(self) -> Statistics:
        """Those of the whole resource, whatever is pushed."""
        with self._lock:
            return self._whole._snapshot()

    def push_counters(self) -> Statistics:
        """Count what this task allocates from now on anew.

        Returns
        -------
        Statistics
            Those that :attr:`allocation_counts` had up to now.
        """
        with self._lock:
            before = self._innermost()._snapshot()
        self._push()
        return before

    def pop_counters(self) -> Statistics:
        """Take the task's innermost counters off; those around them have counted all along.

        A task that was started under counters of another may take these off for itself: for
        the other they stay.

        Returns
        -------
        Statistics
            What they counted.

        Raises
        ------
        IndexError
            This task has none.
        """
        counters = self._innermost()
        if counters is self._whole:
            raise IndexError("this task has pushed no counters, so there are none to pop")
        self._remove(counters)
        with self._lock:
            return counters._snapshot()

    @contextmanager
    def counters(self) -> Iterator[Counters]:
        """Counters for a block of this task, which may be read in it and after it."""
        counters = self._push()
        try:
            yield counters
        finally:
            self._remove(counters)

    def _innermost(self) -> Counters:
        for counters in reversed(_PUSHED.get()):
            if counters._key is self._key:
                return counters
        return self._whole

    def _push(self) -> Counters:
        counters = Counters(self._key)
        _PUSHED.set((*_PUSHED.get(), counters))
        return counters

    def _remove(self, counters: Counters) -> None:
        # Wherever it stands: blocks of generators may end in any order.
        _PUSHED.set(tuple(other for other in _PUSHED.get() if other is not counters))

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        inner = self.upstream_mr.take(nbytes, alignment, place)
        piece = self._wrap(inner, nbytes, alignment)
        charged = (self._whole, *(each for each in _PUSHED.get() if each._key is self._key))
        with self._lock:
            self._charged[piece] = charged
            for counters in charged:
                counters._add(nbytes)
        return piece

    def _on_given(self, piece: Piece) -> None:
        with self._lock:
            for counters in self._charged.pop(piece, ()):
                counters._subtract(piece.nbytes)

    def _is_empty(self) -> bool:
        return not self._charged

    def _forget(self) -> None:
        """The device was closed, which freed all."""
        with self._lock:
            forgotten, self._charged = self._charged, {}  # a finaliser inside may free one
            for piece, charged in forgotten.items():
                for counters in charged:
                    counters._subtract(piece.nbytes)
