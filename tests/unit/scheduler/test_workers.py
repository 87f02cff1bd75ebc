"""A bounded pool whose results come back to the loop, in a fixed order where asked (R15)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamflow.scheduler import workers
from streamflow.scheduler.workers import Workers

PATIENCE_S = 20.0


class Lab:
    def __init__(self, num_threads: int, prepare: Callable[[], None]) -> None:
        self._woken = threading.Semaphore(0)
        self.workers = Workers("test", num_threads, prepare, self._woken.release)
        self.got: list[tuple[Any, BaseException | None]] = []

    def submit(self, seq: int, task: Callable[[], Any]) -> None:
        self.workers.submit(seq, task, lambda result, error: self.got.append((result, error)))

    def wait(self, num: int = 1) -> None:
        for _ in range(num):
            assert self._woken.acquire(timeout=PATIENCE_S), "never woken"

    def deliver(self) -> bool:
        results = sorted(self.workers.take_results(), key=lambda result: result[:2])
        for _, _, done, result, error in results:
            done(result, error)
        return bool(results)

    @property
    def results(self) -> list[Any]:
        return [result for result, _ in self.got]


@pytest.fixture
def open_lab() -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def open_one(num_threads: int = 2, prepare: Callable[[], None] = lambda: None) -> Lab:
        labs.append(Lab(num_threads, prepare))
        return labs[-1]

    yield open_one
    for lab in labs:
        lab.workers.close()
        for thread in lab.workers._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def lab(open_lab: Callable[..., Lab]) -> Lab:
    return open_lab()


def test_a_result_is_delivered_on_the_thread_that_asks(lab: Lab) -> None:
    where: list[int] = []
    lab.workers.submit(
        1, threading.get_ident, lambda ran_on, _: where.extend((ran_on, threading.get_ident()))
    )
    lab.wait()
    assert not where
    assert lab.deliver()
    assert where[0] != where[1] == threading.get_ident()


def test_delivering_nothing_says_so(lab: Lab) -> None:
    assert not lab.deliver()


def test_an_error_is_delivered(lab: Lab) -> None:
    error = ValueError("bad")

    def task() -> None:
        raise error

    lab.submit(1, task)
    lab.wait()
    lab.deliver()
    assert lab.got == [(None, error)]


def test_a_thread_that_cannot_be_prepared_fails_every_task(open_lab: Callable[..., Lab]) -> None:
    error = RuntimeError("no device")

    def prepare() -> None:
        raise error

    lab = open_lab(1, prepare)
    lab.submit(1, lambda: 1)
    lab.submit(2, lambda: 2)
    lab.wait(2)
    lab.deliver()
    assert lab.got == [(None, error), (None, error)]


def test_each_thread_is_prepared_once(open_lab: Callable[..., Lab]) -> None:
    prepared: list[int] = []
    lab = open_lab(1, lambda: prepared.append(threading.get_ident()))
    for seq in range(3):
        lab.submit(seq, threading.get_ident)
    lab.wait(3)
    lab.deliver()
    assert lab.results == prepared * 3


def test_no_thread_starts_before_it_is_needed(lab: Lab) -> None:
    assert lab.workers._threads == []
    lab.submit(1, int)
    lab.wait()
    lab.deliver()
    lab.submit(2, int)
    lab.wait()
    assert len(lab.workers._threads) == 1


def test_no_more_threads_start_than_allowed(lab: Lab) -> None:
    for seq in range(10):
        lab.submit(seq, int)
    lab.wait(10)
    assert len(lab.workers._threads) == 2


def test_results_sort_into_the_order_of_ops_and_submissions(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(1)
    for seq, name in ((5, "late"), (3, "first"), (3, "second")):
        lab.submit(seq, lambda name=name: name)
    lab.wait(3)
    assert lab.workers.num_undelivered == 3
    assert lab.deliver()
    assert lab.results == ["first", "second", "late"]
    assert lab.workers.num_undelivered == lab.workers.num_busy == 0


def test_queued_tasks_do_not_count_as_running(open_lab: Callable[..., Lab]) -> None:
    gate = threading.Event()
    lab = open_lab(1)
    for seq in range(3):
        lab.submit(seq, lambda: gate.wait(PATIENCE_S))
    assert (lab.workers.num_busy, lab.workers.num_running) == (3, 1)
    gate.set()
    lab.wait(3)
    assert lab.workers.num_running == 0


def test_results_in_any_order_do_not_wait(lab: Lab) -> None:
    gate = threading.Event()
    lab.submit(1, lambda: gate.wait(PATIENCE_S) and "slow")
    lab.submit(2, lambda: "quick")
    lab.wait()
    assert lab.deliver()
    assert lab.results == ["quick"]
    gate.set()
    lab.wait()
    lab.deliver()
    assert lab.results == ["quick", "slow"]


def test_what_a_result_submits_is_counted(lab: Lab) -> None:
    lab.workers.submit(1, int, lambda *_: lab.submit(2, lambda: "second"))
    lab.wait()
    lab.deliver()
    assert lab.workers.num_undelivered == 1
    lab.wait()
    lab.deliver()
    assert lab.results == ["second"]


def test_closing_lets_queued_tasks_finish(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(1)
    for seq in range(3):
        lab.submit(seq, lambda seq=seq: seq)
    lab.workers.close()
    lab.wait(3)
    lab.deliver()
    assert lab.results == [0, 1, 2]


class Big:
    pass


def test_an_idle_worker_holds_nothing_of_its_last_task(lab: Lab) -> None:
    big = Big()
    gone = weakref.ref(big)
    lab.submit(1, lambda big=big: big)
    lab.wait()
    lab.deliver()
    del big
    lab.got.clear()
    gc.collect()
    assert gone() is None


def test_c12_a_thread_with_nothing_to_do_ends_and_another_starts(
    open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    lab = open_lab(2)
    for num in (1, 2):
        lab.submit(num, threading.current_thread)
        lab.wait()
        lab.deliver()
        lab.results[-1].join(PATIENCE_S)
        assert not lab.results[-1].is_alive()
        assert lab.workers.threads == []
    assert lab.results[0] is not lab.results[1]


def test_no_task_is_lost_to_a_thread_that_is_ending(
    open_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.0)  # every thread is always about to end
    lab = open_lab(2)
    for num in range(200):
        lab.submit(num, lambda num=num: num)
        lab.wait()
        lab.deliver()
    assert lab.results == list(range(200))


class Tokens:
    """A checker that gives out numbers, and notes which of them the loop gets back."""

    def __init__(self) -> None:
        self.given = 0
        self.taken: list[Any] = []
        self.delivered: list[Any] = []

    def hand_off(self) -> int:
        self.given += 1
        return self.given

    def take_up(self, known: Any) -> None:
        self.taken.append(known)

    def deliver(self, known: Any) -> None:
        self.delivered.append(known)


@pytest.mark.parametrize("checker", [None, Tokens()], ids=["unchecked", "checked"])
def test_nothing_is_kept_of_results_that_were_delivered(checker: Any) -> None:
    woken = threading.Semaphore(0)
    pool = Workers("test", 2, lambda: None, woken.release, checker)
    for seq in range(20):
        pool.submit(seq, lambda: None, lambda result, error: None)
        assert woken.acquire(timeout=PATIENCE_S)
        assert len(pool.take_results()) == 1
    assert [each for each in vars(pool).values() if isinstance(each, deque) and each] == []
    if checker is not None:  # each task took up what it came with, and its end was told
        assert checker.taken == [each for n in range(1, 40, 2) for each in (n, None)]
        assert checker.delivered == list(range(2, 41, 2))
    pool.close()
