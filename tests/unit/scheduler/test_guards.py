"""What a fork and the end of the interpreter ask of whatever is guarded (R12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from streamflow.errors import ForkedProcess
from streamflow.scheduler import guards


class Item:
    def __init__(self, threads: Sequence[threading.Thread] = ()) -> None:
        self.threads = threads
        self.told: list[str] = []

    def on_fork(self) -> None:
        self.told.append("fork")

    def on_exit(self) -> Sequence[threading.Thread]:
        self.told.append("exit")
        return self.threads


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A process of its own, in which nothing is guarded yet; what it keeps for ever."""
    kept: list[object] = []
    monkeypatch.setattr(guards, "_guarded", guards.WeakSet())
    monkeypatch.setattr(guards, "_has_entered", False)
    monkeypatch.setattr(guards, "_is_forked", False)
    monkeypatch.setattr(guards, "_keep_for_ever", kept.append)
    return kept


def test_c44_a_fork_before_any_device_is_like_its_parent(kept: list[object]) -> None:
    item = Item()
    guards.guard(item)
    guards._after_fork_in_child()
    guards.note_entering()
    assert (item.told, kept) == ([], [])


def test_c44_a_fork_after_a_device_is_told_and_refused(kept: list[object]) -> None:
    item = Item()
    guards.guard(item)
    guards.note_entering()
    with guards._lock:  # as a thread of the parent might
        guards._after_fork_in_child()
    assert item.told == ["fork"]
    assert [item] in kept
    for call in (guards.note_entering, guards.check_process):
        with pytest.raises(ForkedProcess, match='"spawn"'):
            call()


def test_c45_at_the_end_threads_are_told_and_waited_for(kept: list[object]) -> None:
    told = threading.Event()
    thread = threading.Thread(target=told.wait, args=(20,), daemon=True)
    thread.start()

    class Worker(Item):
        def on_exit(self) -> Sequence[threading.Thread]:
            told.set()
            return super().on_exit()

    item = Worker([thread])
    guards.guard(item)
    guards._at_exit()
    assert item.told == ["exit"]
    assert [item] in kept
    assert not thread.is_alive()


def test_c45_a_thread_that_does_not_end_is_left_alone(
    kept: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "EXIT_S", 0.01)
    release = threading.Event()
    stuck = [threading.Thread(target=release.wait, args=(20,), daemon=True) for _ in range(3)]
    for thread in stuck:
        thread.start()
    item = Item(stuck)
    guards.guard(item)
    began_s = time.monotonic()
    guards._at_exit()
    assert all(thread.is_alive() for thread in stuck)
    assert time.monotonic() - began_s < 10
    release.set()
    for thread in stuck:
        thread.join(20)


def test_c45_the_end_of_a_fork_waits_for_nothing_of_its_parents(kept: list[object]) -> None:
    item = Item()
    guards.guard(item)
    guards.note_entering()
    guards._after_fork_in_child()
    guards._at_exit()
    assert item.told == ["fork"]
