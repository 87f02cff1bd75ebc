"""Counting event queries. ``cuda.core.Event`` takes no patches, so its callers are wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import streamflow.runtime.core as core_module
from streamflow.scheduler.backoff import Backoff

__all__ = ["Queries", "counted_queries"]


class Queries:
    """How often events were asked, on the loop and by the helper thread."""

    def __init__(self) -> None:
        self.num_on_loop = 0
        self.num_by_helper = 0

    @property
    def num(self) -> int:
        return self.num_on_loop + self.num_by_helper


class _Event:
    def __init__(self, event: Any, queries: Queries, counter: str) -> None:
        self._event, self._queries, self._counter = event, queries, counter

    @property
    def is_done(self) -> bool:
        setattr(self._queries, self._counter, getattr(self._queries, self._counter) + 1)
        return bool(self._event.is_done)


class _Inflight:
    """A timeline's queue, to ``count_done``: its length and its tickets' events."""

    def __init__(self, tickets: Any, queries: Queries) -> None:
        self._tickets, self._queries = tickets, queries
        self.inflight = self
        self.event: Any = None

    def __len__(self) -> int:
        return len(self._tickets)

    def __getitem__(self, place: int) -> _Inflight:
        self.event = _Event(self._tickets[place].event, self._queries, "num_on_loop")
        return self


@contextmanager
def counted_queries() -> Iterator[Queries]:
    """Count every query of the runtime inside the block."""
    queries = Queries()
    count_done, watch = core_module.count_done, Backoff.watch

    def counting(timeline: Any) -> int:
        return count_done(_Inflight(timeline.inflight, queries))  # type: ignore[arg-type]

    def counting_watch(self: Backoff, events: Sequence[Any], ages_s: list[float]) -> None:
        watch(self, [_Event(event, queries, "num_by_helper") for event in events], ages_s)

    core_module.count_done = counting
    Backoff.watch = counting_watch  # type: ignore[method-assign]
    try:
        yield queries
    finally:
        core_module.count_done = count_done
        Backoff.watch = watch  # type: ignore[method-assign]
