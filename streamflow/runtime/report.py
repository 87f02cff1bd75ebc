"""What has not ended, what it waits for, since when, and where it was submitted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from streamflow.backends.origin import describe
from streamflow.runtime.op import Op, OpState

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.memory_queue import Waiter
    from streamflow.runtime.synced_pair import Pair, Wait

__all__ = ["Report", "Unfinished", "fresh_report", "make_report"]

_NUM_SHOWN = 20

Holding: TypeAlias = Callable[[Any], str]
"""What of a simulator's controls holds a stream up."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One op that had not ended.

    Attributes
    ----------
    name, kind : str
    state : str
    stream : str or None
        The lane or stream; None for work on the host, or before a lane is picked.
    waits_for : str
        In words.
    age_s : float
        Seconds since it was called for, on the clock the device runs by.
    where : str
        File and line of the call.
    scope : str or None
        The name of the scope that waits for it; None for the device itself.
    """

    name: str
    kind: str
    state: str
    stream: str | None
    waits_for: str
    age_s: float
    where: str
    scope: str | None

    def __str__(self) -> str:
        scope = "" if self.scope is None else f" in {self.scope}"
        return (
            f"{self.stream or 'host'}: {self.name} ({self.where}){scope} {self.state} for "
            f"{self.age_s:.3g} s, waits for {self.waits_for}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The oldest unfinished op of each stream, then all that is parked or on the host.

    Attributes
    ----------
    title : str
        The device and its health.
    rows : tuple of Unfinished
    """

    title: str
    rows: tuple[Unfinished, ...]

    def __str__(self) -> str:
        shown = [f"  {row}" for row in self.rows[:_NUM_SHOWN]]
        more = len(self.rows) - len(shown)
        if more:
            shown.append(f"  and {more} more")
        return "\n".join([self.title, *(shown or ["  nothing is unfinished"])])


def fresh_report(core: Core) -> Report:
    """Report on all of ``core``'s device, after a look at what has ended."""
    if core.lost is None and not core.is_closed:
        for line in list(core.lines):
            core.reap(line)
    return make_report(core)


def make_report(core: Core, among: Collection[Op[Any]] | None = None) -> Report:
    """Report on ``core``'s device, or on the ops ``among`` which somebody waits for."""
    heads: list[Op[Any]] = []
    for line in core.lines:
        for ticket in line.inflight:
            op: Op[Any] | None = ticket.op
            if op is not None and (among is None or op in among):
                heads.append(op)
                break
    parked = [op for op in core.pending_ops() if among is None or op in among]
    waiters = core.memory.queue.all_waiters() if among is None else []
    pairs = core.waiting.pairs.values() if among is None else ()
    now_s = core.clock_s()
    controls = core.backend.controls()
    holding = (lambda stream: "") if controls is None else controls.holding
    health = "healthy" if core.lost is None else f"lost: {core.lost}"
    return Report(
        f"device {core.backend.index}, {health}",
        (
            *(_row(op, now_s, holding) for op in (*heads, *parked)),
            *(_waiting_row(waiter, now_s) for waiter in waiters),
            *(_turn_row(pair, wait, now_s) for pair in pairs for wait in pair.waits.values()),
        ),
    )


def _turn_row(pair: Pair, wait: Wait, now_s: float) -> Unfinished:
    what, called_s, origin = wait
    why, where = f"its turn at {pair!r}", describe(*origin)
    return Unfinished(what, "turn", "waiting", None, why, max(0.0, now_s - called_s), where, None)


def _waiting_row(waiter: Waiter, now_s: float) -> Unfinished:
    return Unfinished(
        "alloc",
        "alloc",
        "waiting",
        None,
        f"{waiter.nbytes} bytes of memory",
        max(0.0, now_s - waiter.called_s),
        describe(*waiter.origin),
        None,
    )


def _row(op: Op[Any], now_s: float, holding: Holding) -> Unfinished:
    scope = op._rare.scope if op._rare is not None else None
    return Unfinished(
        op.name,
        op.kind,
        op.state.value,
        op.stream,
        _why(op, holding),
        max(0.0, now_s - op.called_s),
        op.where,
        scope.name if scope is not None else None,
    )


def _why(op: Op[Any], holding: Holding) -> str:
    if op._state is OpState.SUBMITTED:
        return _why_submitted(op, holding)
    parked = op._rare.parked if op._rare is not None else None
    if op._state is OpState.STAGING or parked is None:
        return "its work on the host"
    before = [other.op for other in parked.predecessors if not other.has_left]
    if before:
        return ", ".join(f"{other.name} ({other.where})" for other in before[:4])
    running = [ticket.op for ticket in parked.deps if ticket.position and not ticket.is_passed]
    names = [f"{other.name} on {other.stream}" for other in running if other is not None]
    return ", ".join([*filter(None, [parked.need]), *names[:4]]) or "its turn"


def _why_submitted(op: Op[Any], holding: Holding) -> str:
    """The work on other streams that this one's stream was told to wait for, if it still runs."""
    ticket = op.ticket
    stream = ticket.timeline.stream  # None once the program has dropped it
    held = "" if stream is None else holding(stream)
    names = [f"{held} (dev.sim)"] if held else []
    for line, position in ticket.seen.items():
        ahead = [t.op for t in line.inflight if t.position <= position and t.op is not None]
        if ahead:
            names.append(f"{ahead[0].name} on {line.name}")
    first = ticket.timeline.inflight[0]
    if first is not ticket and first.op is not None:
        names.append(f"{first.op.name} ahead of it")
    return ", ".join(names[:4]) or "the device, which is working on it"
