"""The helper thread that wakes the loop: once per request, whatever the events do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from streamflow.scheduler import backoff
from streamflow.scheduler.backoff import Backoff
from streamflow.scheduler.completion import Head

PATIENCE_S = 20.0  # a bound for a broken build; nothing waits this long otherwise


class FakeEvent:
    """Done from its ``num``-th query on; ``asked`` is set at the first."""

    def __init__(self, num: int = 1, error: BaseException | None = None) -> None:
        self.num_left = num
        self.error = error
        self.asked = threading.Event()

    @property
    def is_done(self) -> bool:
        self.asked.set()
        if self.error is not None:
            raise self.error
        self.num_left -= 1
        return self.num_left <= 0


NEVER = 1 << 60


def heads(*events: FakeEvent) -> list[Head]:
    return [Head(event, time.monotonic(), 0.0, False) for event in events]


class Loop:
    """Counts how often it was woken."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.backoff = Backoff(self._woken.release)

    def wait(self) -> None:
        assert self._woken.acquire(timeout=PATIENCE_S), "never woken"

    @property
    def was_woken(self) -> bool:
        return self._woken.acquire(blocking=False)

    def close(self) -> None:
        self.backoff.close()
        thread: Any = self.backoff._thread
        if thread is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_no_thread_runs_before_there_is_something_to_watch(loop: Loop) -> None:
    assert loop.backoff._thread is None
    loop.backoff.cancel()


def test_the_loop_is_woken_once_an_event_is_done(loop: Loop) -> None:
    loop.backoff.watch(heads(FakeEvent(NEVER), FakeEvent(3)))
    loop.wait()


def test_the_loop_is_woken_once_per_request(loop: Loop) -> None:
    loop.backoff.watch(heads(FakeEvent()))
    loop.wait()
    second = FakeEvent(3)
    loop.backoff.watch(heads(second))
    loop.wait()
    loop.close()
    assert not loop.was_woken


def test_without_events_the_loop_is_woken_after_a_sleep(loop: Loop) -> None:
    loop.backoff.watch(heads())
    loop.wait()


def test_a_query_that_raises_wakes_the_loop(loop: Loop) -> None:
    loop.backoff.watch(heads(FakeEvent(error=RuntimeError("fault"))))
    loop.wait()


def test_a_new_request_replaces_the_old_one(loop: Loop) -> None:
    never = FakeEvent(NEVER)
    loop.backoff.watch(heads(never))
    assert never.asked.wait(PATIENCE_S)
    loop.backoff.watch(heads(FakeEvent()))
    loop.wait()


def test_a_cancelled_request_wakes_nobody(loop: Loop) -> None:
    never = FakeEvent(NEVER)
    loop.backoff.watch(heads(never))
    assert never.asked.wait(PATIENCE_S)
    loop.backoff.cancel()
    never.num_left = 0
    loop.close()  # the thread notices the cancellation before it ends
    # It may have been inside the query at the time: at most one spurious wake.
    assert [loop.was_woken, loop.was_woken][1] is False


def test_closing_ends_the_thread_while_it_watches(loop: Loop) -> None:
    never = FakeEvent(NEVER)
    loop.backoff.watch(heads(never))
    assert never.asked.wait(PATIENCE_S)
    loop.close()
    assert not loop.was_woken


def test_closing_ends_the_thread_while_it_is_idle(loop: Loop) -> None:
    loop.backoff.watch(heads(FakeEvent()))
    loop.wait()
    loop.close()


def test_c12_an_idle_thread_ends_and_the_next_request_starts_another(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "IDLE_S", 0.01)
    for _ in range(3):
        loop.backoff.watch(heads(FakeEvent()))
        thread = loop.backoff._thread
        loop.wait()
        if thread is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert loop.backoff._thread is None


def test_c12_the_thread_ends_when_the_loop_is_over_whatever_it_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "ASK_S", 0.0)
    is_over, event = threading.Event(), FakeEvent(NEVER)
    watching = backoff.Backoff(lambda: None, is_over.is_set)
    watching.watch(heads(event))
    assert event.asked.wait(PATIENCE_S)
    thread = watching._thread
    assert thread is not None
    is_over.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    watching.close()
