"""When to look for completions, where, and how many queries it takes (sans-IO).

Only streams on which somebody wants a completion are looked at, and of those only the
head: the oldest op that is not known to be done. While the youngest awaited head is
younger than the spin bound the loop polls once a turn; after that a helper thread
polls, sleeping in proportion to how long the heads have already taken (R11, DESIGN
section 6).
"""

from __future__ import annotations

from collections.abc import Iterable

from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = ["Completion", "count_done", "sleep_s"]

SLEEP_MIN_S = 50e-6
SLEEP_FRACTION = 0.015


def count_done(timeline: Timeline) -> int:
    """How many of the oldest tickets in flight are done, in O(log n) event queries.

    Raises whatever a query raises: a fault of the device.
    """
    inflight = timeline.inflight
    if not inflight or not inflight[0].event.is_done:
        return 0
    low, high = 1, len(inflight)
    if high == 1 or inflight[-1].event.is_done:
        return high
    high -= 1  # the newest is pending: between 1 and all but one are done
    step = 1
    while low + step <= high:  # gallop from the old end: few are done as a rule
        if not inflight[low + step - 1].event.is_done:
            high = low + step - 1
            break
        low, step = low + step, step * 2
    while low < high:  # then bisect
        probe = (low + high + 1) // 2
        if inflight[probe - 1].event.is_done:
            low = probe
        else:
            high = probe - 1
    return low


def sleep_s(ages_s: Iterable[float]) -> float:
    """How long the helper thread may sleep, given how long each head has been awaited."""
    return min(max(SLEEP_MIN_S, SLEEP_FRACTION * age) for age in ages_s)


class Completion:
    """Who waits on which timeline, and since when its present head has been awaited."""

    __slots__ = ("_heads", "spin_s")

    def __init__(self, spin_s: float) -> None:
        self.spin_s = spin_s
        # The head, since when it is awaited, and how long the head before it took.
        self._heads: dict[Timeline, tuple[Ticket | None, float, float]] = {}

    @property
    def is_idle(self) -> bool:
        """Nobody wants anything: no query may be made."""
        return not self._heads

    def want(self, timeline: Timeline, now_s: float) -> None:
        """Count one more caller that wants to see completions on ``timeline``."""
        timeline.wants += 1
        # Each new want makes the head young again: it is worth spinning for.
        self._heads[timeline] = (_head(timeline), now_s, 0.0)

    def unwant(self, timeline: Timeline) -> None:
        """Take one want back."""
        if timeline.wants > 0:  # after clear() there is nothing to take back
            timeline.wants -= 1
            if timeline.wants == 0:
                self._heads.pop(timeline, None)

    def clear(self) -> None:
        """Forget every want (the device is lost or closed)."""
        for timeline in self._heads:
            timeline.wants = 0
        self._heads.clear()

    def wanted(self) -> list[Timeline]:
        """The timelines to look at."""
        return list(self._heads)

    def heads(self) -> list[Ticket]:
        """The oldest unfinished op of each wanted timeline."""
        return [line.inflight[0] for line in self._heads if line.inflight]

    def moved(self, timeline: Timeline, now_s: float) -> None:
        """Note that ``timeline`` has a new head, whose wait begins now."""
        known = self._heads.get(timeline)
        if known is not None:
            self._heads[timeline] = (_head(timeline), now_s, now_s - known[1])

    def ages_s(self, now_s: float) -> list[float]:
        """How long each wanted head has been awaited, or the one before it was.

        An op tends to take as long as its predecessor on the stream: looking sooner than
        that in earnest would cost a queue of equal ops more than one long op.
        """
        return [
            max(now_s - since, before_s)
            for head, since, before_s in self._heads.values()
            if head is not None
        ]

    def should_spin(self, now_s: float) -> bool:
        """Whether the youngest awaited head is still worth a poll each loop turn."""
        after_s = now_s - self.spin_s
        # A loop, since this runs once a turn: any() costs three times as much.
        for head, since, _ in self._heads.values():  # noqa: SIM110
            if since > after_s and head is not None:
                return True
        return False


def _head(timeline: Timeline) -> Ticket | None:
    return timeline.inflight[0] if timeline.inflight else None
