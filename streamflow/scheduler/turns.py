"""Readers together, writers alone, first come first served (sans-IO)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Turn", "Turns"]


class Turn:
    """One reader or writer, from its asking until it leaves.

    Attributes
    ----------
    on_granted : callable or None
        Called once when a turn that had to wait is granted, or is refused for good.
    error : BaseException or None
        Why it never will be granted.
    """

    __slots__ = ("error", "is_held", "is_write", "on_granted")

    def __init__(self, is_write: bool) -> None:
        self.is_write = is_write
        self.is_held = False
        self.on_granted: Callable[[], None] | None = None
        self.error: BaseException | None = None

    def tell(self) -> None:
        """Call :attr:`on_granted`, once."""
        tell, self.on_granted = self.on_granted, None
        if tell is not None:
            tell()


class Turns:
    """Who uses one thing now, and who waits for it."""

    __slots__ = ("_held", "_waiting")

    def __init__(self) -> None:
        self._held: OrderedDict[Turn, None] = OrderedDict()
        self._waiting: OrderedDict[Turn, None] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Whether anybody has a turn, or waits for one."""
        return bool(self._held or self._waiting)

    def ask(self, *, is_write: bool, is_nested: bool = False) -> Turn:
        """A turn, held at once if nobody is in the way.

        Parameters
        ----------
        is_nested : bool
            The asker reads already: another reader's turn is its at once, since those who
            wait wait for the asker itself.
        """
        turn = Turn(is_write)
        self._waiting[turn] = None
        if is_nested and self._may_start(turn):
            self._grant(turn)
        elif len(self._waiting) == 1:
            self._serve()
        return turn

    def leave(self, turn: Turn) -> None:
        """Give ``turn`` up, granted or not; the next ones get theirs. Twice is harmless."""
        turn.on_granted = None
        was_known = turn in self._held or turn in self._waiting
        self._held.pop(turn, None)
        self._waiting.pop(turn, None)
        if was_known:
            self._serve()

    def fail(self, error: Callable[[], BaseException]) -> None:
        """Nobody who waits will get a turn any more; each hears an error of its own."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for turn in waiting:
            turn.error = error()
            turn.tell()

    def silence(self) -> None:
        """Tell nobody of anything any more: they are on a loop that has ended (C12)."""
        for turn in self._waiting:
            turn.on_granted = None
        self._waiting.clear()

    def _may_start(self, turn: Turn) -> bool:
        if turn.is_write:
            return not self._held
        return not any(other.is_write for other in self._held)

    def _grant(self, turn: Turn) -> None:
        del self._waiting[turn]
        self._held[turn] = None
        turn.is_held = True
        turn.tell()

    def _serve(self) -> None:
        while self._waiting:
            first = next(iter(self._waiting))
            if not self._may_start(first):
                return
            self._grant(first)
