"""When to look for completions, where, and how many queries it takes (sans-IO).

Only streams on which somebody wants a completion are looked at, and of those only the
head: the oldest op that is not known to be done. While some awaited head is young the loop
polls once a turn; after that a helper thread does, sleeping in proportion to how long the
heads have taken already or may be expected to (R11, DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamflow.scheduler.timeline import Timeline

__all__ = ["Completion", "Head", "Looks"]

NAP_MIN_S = 50e-6
NAP_FRACTION = 0.015
GROWTH = 0.25
"""A head may turn out shorter than the one before it: it is never seen later than by this share."""
STEADY_FRACTION = 0.1
"""By how much two heads in a row may differ for the next one to be expected to take as long."""
GLANCE_FRACTION = 0.125
"""How much of the spin bound a head gets on a stream whose last two took longer than that."""


class Head(NamedTuple):
    """The oldest unfinished op of a stream, as the helper thread sees it."""

    event: Any
    since_s: float
    """Since when it is awaited, and at the head."""
    before_s: float
    """How long the head before it took; 0 if that is not known."""
    is_steady: bool
    """The two before it took equally long."""

    def nap_s(self, now_s: float) -> float:
        """How long not to look at it from now on.

        An op tends to take as long as its predecessor on the stream: looking in earnest
        sooner than that would cost a queue of equal ops more than one long op.
        """
        age_s, before_s = now_s - self.since_s, self.before_s
        grown_s = GROWTH * age_s
        nap_s = max(NAP_MIN_S, min(grown_s, NAP_FRACTION * before_s), NAP_FRACTION * age_s)
        if self.is_steady:  # little is lost by not looking until it is nearly due
            nap_s = max(nap_s, min(grown_s, (1 - STEADY_FRACTION) * before_s - age_s))
        return nap_s


class Looks:
    """When the helper thread looks at which of some heads: each at its own pace."""

    __slots__ = ("_idle_s", "_naps_s", "_next_s", "heads")

    def __init__(self, heads: Sequence[Head], now_s: float, idle_s: float = NAP_MIN_S) -> None:
        self.heads = heads
        self._idle_s = idle_s  # the nap where there are none
        self._naps_s = [head.nap_s(now_s) for head in heads]
        self._next_s = [now_s + each_s for each_s in self._naps_s]

    def sleep_s(self, now_s: float) -> float:
        """How long until the next look."""
        return max(NAP_MIN_S, min(self._next_s) - now_s) if self.heads else self._idle_s

    def due(self, now_s: float) -> list[Head]:
        """The heads to look at now; those almost due come along and save a wake-up."""
        found = []
        for place, head in enumerate(self.heads):
            if self._next_s[place] - GROWTH * self._naps_s[place] <= now_s:
                found.append(head)
                self._naps_s[place] = nap_s = head.nap_s(now_s)
                self._next_s[place] = now_s + nap_s
        return found


class _Wait:
    """What is known of a wanted timeline's present head."""

    __slots__ = ("before_s", "is_steady", "num_long", "since_s", "spin_until_s")

    since_s: float
    spin_until_s: float
    before_s: float
    is_steady: bool

    num_long: int
    """How many heads in a row took longer than the spin bound."""


class Completion:
    """Who waits on which timeline, and since when its present head has been awaited.

    Attributes
    ----------
    num_queries : int
        Events asked, on the loop.
    """

    __slots__ = ("_waits", "num_queries", "spin_s")

    def __init__(self, spin_s: float) -> None:
        self.spin_s = spin_s
        self.num_queries = 0
        self._waits: dict[Timeline, _Wait] = {}

    # -- who wants what ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nobody wants anything: no query may be made."""
        return not self._waits

    def want(self, timeline: Timeline, now_s: float) -> None:
        """Count one more caller that wants to see completions on ``timeline``."""
        timeline.wants += 1
        wait = self._waits.get(timeline)
        if wait is None:
            wait = self._waits[timeline] = _Wait()
            wait.num_long = 0
        elif len(timeline.inflight) > 1:
            return  # what is wanted is queued behind a head whose age is known
        wait.since_s = now_s
        wait.spin_until_s = now_s + self.spin_s
        wait.before_s = 0.0
        wait.is_steady = False

    def unwant(self, timeline: Timeline) -> None:
        """Take one want back."""
        if timeline.wants > 0:  # after clear() there is nothing to take back
            timeline.wants -= 1
            if timeline.wants == 0:
                self._waits.pop(timeline, None)

    def clear(self) -> None:
        """Forget every want (the device is lost or closed)."""
        for timeline in self._waits:
            timeline.wants = 0
        self._waits.clear()

    def moved(self, timeline: Timeline, now_s: float, num: int = 1) -> None:
        """Note that ``num`` ops retired and ``timeline`` has a new head, whose wait begins now."""
        wait = self._waits.get(timeline)
        if wait is None:
            return
        spin_s = self.spin_s
        took_s = now_s - wait.since_s
        if took_s > spin_s and (took_s := took_s / num) > spin_s:
            wait.is_steady = abs(took_s - wait.before_s) <= STEADY_FRACTION * took_s
            wait.num_long += 1
            if wait.num_long > 1:
                spin_s *= GLANCE_FRACTION
        else:
            wait.is_steady = False
            wait.num_long = 0
        wait.before_s = took_s
        wait.since_s = now_s
        wait.spin_until_s = now_s + spin_s

    # -- where to look -----------------------------------------------------------------

    def wanted(self) -> list[Timeline]:
        """The timelines to look at."""
        return list(self._waits)

    def done(self, asked: set[Timeline] | None = None) -> Sequence[Timeline]:
        """The wanted timelines whose head is done, in one query for each.

        Those in ``asked`` are left out, and those that are asked now are added to it.
        Raises whatever a query raises: a fault of the device.
        """
        found: Sequence[Timeline] = ()
        # Runs once a turn of the loop, and most turns find nothing: no list then.
        for timeline in self._waits:
            if timeline.inflight and (asked is None or timeline not in asked):
                if asked is not None:
                    asked.add(timeline)
                self.num_queries += 1
                if timeline.inflight[0].event.is_done:
                    found = [*found, timeline]
        return found

    def count_done(self, timeline: Timeline, is_head_done: bool = False) -> int:
        """How many of the oldest tickets in flight are done, in O(log n) event queries.

        ``is_head_done``: the head was asked already, and is done. Raises whatever a query
        raises: a fault of the device.
        """
        inflight = timeline.inflight
        if not inflight:
            return 0
        if not is_head_done:
            self.num_queries += 1
            if not inflight[0].event.is_done:
                return 0
        low, high = 1, len(inflight)
        if high == 1:
            return 1
        self.num_queries += 1
        if inflight[-1].event.is_done:
            return high
        high -= 1  # the newest is pending: between 1 and all but one are done
        step = 1
        while low + step <= high:  # gallop from the old end: few are done as a rule
            self.num_queries += 1
            if not inflight[low + step - 1].event.is_done:
                high = low + step - 1
                break
            low, step = low + step, step * 2
        while low < high:  # then bisect
            probe = (low + high + 1) // 2
            self.num_queries += 1
            if inflight[probe - 1].event.is_done:
                low = probe
            else:
                high = probe - 1
        return low

    # -- when to look again ------------------------------------------------------------

    def should_spin(self, now_s: float) -> bool:
        """Whether some awaited head is still worth a poll each loop turn."""
        # A loop, since this runs once a turn: any() costs three times as much.
        for timeline, wait in self._waits.items():
            if wait.spin_until_s > now_s and timeline.inflight:
                return True
        return False

    def heads(self) -> list[Head]:
        """The oldest unfinished op of each wanted timeline."""
        return [
            Head(line.inflight[0].event, wait.since_s, wait.before_s, wait.is_steady)
            for line, wait in self._waits.items()
            if line.inflight
        ]
