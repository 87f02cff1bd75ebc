"""How items go from stage to stage: by request, so that nothing is made that nobody has room for.

Whoever wants an item asks the stage before for one, and is told later, on the loop: the answer to
the i-th request is the i-th item, whenever it comes, or that there is none. So what is in flight
is bounded by who asks last, which has as many requests open as there are slots (back-pressure).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from streamflow.runtime.op import Op

__all__ = ["Deliver", "Item", "Node", "Outcome", "Request", "Sequencer", "Stop"]


class Item:
    """A value on its way.

    Attributes
    ----------
    value : object
    number : int
        Counts what the last stage that makes items of its own has made.
    nbytes : int
        Of its arrays on the way in and out; 0 where nobody has counted.
    ops : sequence of Op
        What was submitted for an item that is handed over on the device.
    """

    __slots__ = ("_lent", "nbytes", "number", "ops", "value")

    def __init__(
        self, value: Any, number: int, lent: Callable[[], None] | None = None, nbytes: int = 0
    ) -> None:
        self.value = value
        self.number = number
        self.nbytes = nbytes
        self.ops: Sequence[Op[Any]] = ()
        self._lent = lent

    @property
    def is_lent(self) -> bool:
        """Whether somebody waits for :meth:`give_back`."""
        return self._lent is not None

    def give_back(self) -> None:
        """Say that nobody here will look at what was lent with it any more."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent()

    def hand_on(self) -> Callable[[], None] | None:
        """Take over the duty to give back."""
        lent, self._lent = self._lent, None
        return lent


class Stop:
    """There are no more items: the source has ended, or something failed here."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


Outcome = Item | Stop
Deliver = Callable[[Outcome], None]


class Node(Protocol):
    """A stage of one run."""

    def request(self, deliver: Deliver) -> None:
        """Have ``deliver`` called with the next item. May call it at once."""


class Request:
    """A request in its place, and what came of it."""

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome: Outcome | None = None


class Sequencer(ABC):
    """A stage that has to look at items one by one, in order.

    Parameters
    ----------
    upstream : Node
    ordered : bool
        False: items are taken as they come; the end and errors still wait for those before.
    """

    def __init__(self, upstream: Node, ordered: bool) -> None:
        self._upstream = upstream
        self._ordered = ordered
        self._cells: deque[Request] = deque()
        self._is_advancing = False
        self._stop: Stop | None = None
        self.waiting: deque[Deliver] = deque()

    @abstractmethod
    def num_wanted(self) -> int:
        """How many requests to have open."""

    @abstractmethod
    def take(self, item: Item) -> None:
        """An item has come whose turn it is."""

    def stop(self, stop: Stop) -> None:
        """Nothing more will come."""
        self.end(stop)

    def prepare(self, outcome: Outcome, settle: Deliver) -> None:
        """Something has come, maybe out of turn: ``settle`` what it is to be in its turn."""
        settle(outcome)

    def request(self, deliver: Deliver) -> None:
        self.waiting.append(deliver)
        self.advance()

    def end(self, stop: Stop) -> None:
        """Answer ``stop`` to whoever asks next, and that there is nothing to all others."""
        if self._stop is None:
            self._stop = stop

    def advance(self) -> None:
        """Take what has come, and ask for more."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._take_one() or self._ask_one():
                pass
            while self._stop is not None and self.waiting:
                stop, self._stop = self._stop, Stop(None)
                self.waiting.popleft()(stop)
        finally:
            self._is_advancing = False

    def _ask_one(self) -> bool:
        if self._stop is not None or len(self._cells) >= self.num_wanted():
            return False
        cell = Request()
        self._cells.append(cell)

        def settle(outcome: Outcome) -> None:
            cell.outcome = outcome
            self.advance()

        self._upstream.request(partial(self.prepare, settle=settle))
        return True

    def _take_one(self) -> bool:
        for place, cell in enumerate(self._cells):
            outcome = cell.outcome
            if outcome is not None and (place == 0 or isinstance(outcome, Item)):
                del self._cells[place]
                if self._stop is not None:
                    pass  # too late
                elif isinstance(outcome, Stop):
                    self.stop(outcome)
                else:
                    self.take(outcome)
                return True
            if self._ordered:
                return False
        return False
