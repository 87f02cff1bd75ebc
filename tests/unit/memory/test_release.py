"""The thread that gives memory back: who waits for it hears when it has ended, whatever failed."""

from __future__ import annotations

import threading

import pytest

from streamflow.memory.release import Releaser


def test_the_last_word_comes_when_it_is_no_longer_busy() -> None:
    """Who asks at an earlier one is told that something may still come, and is to hear again."""
    heard: list[bool] = []
    is_over = threading.Event()

    def after() -> None:
        heard.append(releaser.is_busy)
        if not heard[-1]:
            is_over.set()

    releaser = Releaser("test", after)
    releaser.submit(lambda: None)
    assert is_over.wait(10)
    assert heard == [True, False]


def test_what_raises_holds_up_neither_the_next_nor_who_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []
    num_heard = 0

    def after() -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard == 1:
            raise RuntimeError("a listener")

    def fail() -> None:
        raise RuntimeError("a free")

    releaser = Releaser("test", after)
    releaser.submit(fail)
    releaser.submit(lambda: done.append(1))
    releaser.wait_idle_blocking(10)
    assert not releaser.is_busy
    assert done == [1]
    assert [record.exc_info[1].args for record in caplog.records] == [("a free",), ("a listener",)]


def test_a_wait_for_what_takes_long_is_bounded() -> None:
    go_on = threading.Event()
    releaser = Releaser("test", lambda: None)
    releaser.submit(go_on.wait)  # type: ignore[arg-type]
    releaser.wait_idle_blocking(0.01)
    assert releaser.is_busy
    go_on.set()
    releaser.wait_idle_blocking(10)
    assert not releaser.is_busy
