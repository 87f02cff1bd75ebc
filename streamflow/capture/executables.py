"""What the backend made of a captured graph."""

from __future__ import annotations

from streamflow.capture.recorder import Handle
from streamflow.scheduler.timeline import Ticket

__all__ = ["Executables"]


class Executables:
    """What the backend made of the parts of one graph.

    Attributes
    ----------
    num_launches : list of int
        Of the present recording, by part.
    alone : dict
        By part, its latest launch of those that went alone.
    """

    __slots__ = ("alone", "num_launches", "parts")

    def __init__(self) -> None:
        self.parts: list[Handle] = []
        self.num_launches: list[int] = []
        self.alone: dict[int, Ticket] = {}

    def places_of(self, part: int) -> int:
        """What a launch of that part takes of its stream's queue; 0 where nothing was captured."""
        num: int = self.parts[part].handle.num_places if self.parts else 0
        return num
