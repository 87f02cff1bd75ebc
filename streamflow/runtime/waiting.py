"""All who wait for something that a device's work or program gives back, and not for an op."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from typing import Protocol

    from streamflow.runtime.core import Core
    from streamflow.runtime.lease_queue import LeaseQueue
    from streamflow.runtime.memory_queue import MemoryQueue
    from streamflow.runtime.synced_pair import Pair

    class Told(Protocol):
        """Something built on the device that goes on by itself: a run of a pipeline."""

        def fail(self, error: BaseException) -> None:
            """The device goes, for this reason."""

        def silence(self) -> None:
            """Its loop has ended."""


__all__ = ["Waiting"]


class Waiting:
    """The queues of one device: for memory, for leases, and for turns at each SyncedArray.

    Attributes
    ----------
    pairs : mapping
        The SyncedArrays that are alive, in the order they were made.
    runs : dict
        The runs of pipelines that are not over, by their ids, in the order they were begun.
    """

    __slots__ = ("_core", "pairs", "runs")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.pairs: WeakValueDictionary[int, Pair] = WeakValueDictionary()
        self.runs: dict[int, Told] = {}

    def fail(self, error: BaseException) -> None:
        """Nobody will get anything any more."""
        for queue in self._queues():
            queue.fail(error)

    def silence(self) -> None:
        """Wake nobody any more: who waited is on a loop that ended (C12)."""
        for queue in self._queues():
            queue.silence()

    def _queues(self) -> list[MemoryQueue | LeaseQueue | Pair | Told]:
        core = self._core
        return [core.memory.queue, core.leases, *self.pairs.values(), *self.runs.values()]
