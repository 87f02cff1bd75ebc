"""What parks: an op with all it takes to go on, and who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from streamflow.runtime.op import Op
from streamflow.scheduler.budget import Budget
from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = [
    "NOTHING",
    "After",
    "Parked",
    "PickLine",
    "Run",
    "Start",
    "no_calls",
    "path_between",
    "tell_cycle",
]

Run = Callable[[Any], int]
"""Makes the driver calls of an op on a backend stream; returns how many they were."""

PickLine = Callable[[list[Ticket]], Timeline]
"""Picks a lane, at the moment of submission, from what the op comes after."""

Start = Callable[["Parked"], None]
"""Begins the work of an op on the host, once nothing parked is before it any more."""


class After:
    """What ``after=`` names: ops that exist, and futures that may stand for some to come."""

    __slots__ = ("futures", "tickets")

    def __init__(self, tickets: list[Ticket], futures: Sequence[Any] = ()) -> None:
        self.tickets = tickets
        self.futures = futures


NOTHING = After([])


class Parked:
    """An op that waits to go on, with all it takes to do so."""

    __slots__ = (
        "_need",
        "budgets",
        "deps",
        "followers",
        "has_left",
        "line",
        "num_blockers",
        "op",
        "predecessors",
        "run",
        "sources",
        "start",
        "stops",
        "withdraw",
    )

    def __init__(
        self,
        op: Op[Any],
        line: Timeline | PickLine | None,
        run: Run,
        deps: list[Ticket],
        sources: list[Ticket],
        start: Start | None,
        budgets: Sequence[Budget[Parked]],
    ) -> None:
        self.op = op
        self.line = line
        self.run = run
        self.deps = deps
        self.sources = sources
        self.start = start
        self.budgets = budgets  # still to be asked
        self.num_blockers = 0
        self.predecessors: Sequence[Parked] = ()  # these three are lists once they have any
        self.followers: Sequence[Parked] = ()
        self.has_left = False
        self._need = ""
        self.stops: Sequence[Callable[[], None]] = ()  # end the watching of futures
        self.withdraw: Callable[[], None] | None = None  # leaves the queue it waits in

    @property
    def need(self) -> str:
        """What else it waits for on the host, in words."""
        return self._need

    @need.setter
    def need(self, what: str) -> None:
        self._need = what
        rare = self.op._rare
        if what and rare is not None and rare.traced is not None:
            note = rare.traced
            note.needs = (*note.needs, what)


def path_between(start: Parked, goal: Parked) -> list[Parked] | None:
    """From ``start`` to ``goal`` along what each waits for; None if no way leads there."""
    came_from: dict[Parked, Parked | None] = {start: None}
    found = deque((start,))
    while found:
        here = found.popleft()
        if here is goal:
            path: list[Parked] = []
            step: Parked | None = here
            while step is not None:
                path.append(step)
                step = came_from[step]
            return path[::-1]
        for before in here.predecessors:
            if not before.has_left and before not in came_from:
                came_from[before] = here
                found.append(before)
    return None


def tell_cycle(path: Sequence[Parked]) -> str:
    """The path in words, with the lines that made it."""
    told = [path[0].op.name]
    for here, before in pairwise(path):
        same = here.line is not None and here.line is before.line
        order = f", which is earlier on stream {before.op.stream}" if same else ""
        told.append(f"{before.op.name} ({before.op.where}{order})")
    return "these ops would wait for each other: " + " -> ".join(told)


def no_calls(_: Any) -> int:
    """The :data:`Run` of an op that has its place in the order, and no work on the device."""
    return 0
