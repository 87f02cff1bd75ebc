"""What a log comes to when it is run against other resources."""

from __future__ import annotations

import random

import pytest

from streamflow.memory import LogAction, LogRecord
from streamflow.memory.replay import Plan, Replayed, plan_replay, replay
from streamflow.memory.spec import parse_resource

GIB = 1 << 30


class Log:
    """Records, one line and ten microseconds after the other."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.time_us = 0

    def add(self, action: LogAction, address: int, nbytes: int, stream: int = 0) -> Log:
        line = len(self.records) + 2
        self.records.append(LogRecord(line, 1, self.time_us, action, address, nbytes, stream))
        self.time_us += 10
        return self

    def take(self, address: int, nbytes: int, stream: int = 0) -> Log:
        return self.add(LogAction.ALLOCATE, address, nbytes, stream)

    def give(self, address: int, nbytes: int, stream: int = 0) -> Log:
        return self.add(LogAction.FREE, address, nbytes, stream)

    def plan(self) -> Plan:
        return plan_replay(self.records)


def run(plan: Plan, text: str, *, memory_nbytes: int = GIB, lag_s: float = 0.0) -> Replayed:
    return replay(plan, parse_resource(text), memory_nbytes=memory_nbytes, lag_s=lag_s)


# -- the plan -------------------------------------------------------------------------


def test_streams_and_blocks_are_numbered_and_time_counts_from_the_start() -> None:
    log = Log()
    log.time_us = 5000
    plan = log.take(16, 100, 7).take(32, 50, 9).give(16, 100, 9).take(16, 1, 7).plan()
    assert [(s.is_free, s.block, s.nbytes, s.stream) for s in plan.steps] == [
        (False, 0, 100, 0),
        (False, 1, 50, 1),
        (True, 0, 100, 1),
        (False, 2, 1, 0),
    ]
    assert [step.time_s for step in plan.steps] == pytest.approx([0, 10e-6, 20e-6, 30e-6])
    assert (plan.num_streams, plan.num_left, plan.peak_live_nbytes) == (2, 2, 150)
    assert not plan.problems


def test_frees_that_have_no_allocation_are_told_with_their_lines() -> None:
    plan = Log().give(16, 8).take(32, 8).give(32, 8).give(32, 8).take(48, 8).take(48, 9).plan()
    assert plan.problems == (
        "line 2: 0x10 was never allocated",
        "line 5: 0x20 was freed before, on line 4",
        "line 7: 0x30 was allocated again, and never freed since line 6",
    )
    assert [step.block for step in plan.steps] == [0, 0, 1, 2]
    assert plan.num_left == 2


def test_a_free_of_another_size_is_told_and_done() -> None:
    plan = Log().take(16, 8).give(16, 9).plan()
    assert plan.problems == ("line 3: 9 bytes freed at 0x10, but 8 were allocated on line 2",)
    assert plan.num_left == 0


def test_failures_and_blocks_of_no_bytes_are_left_out() -> None:
    log = Log().add(LogAction.ALLOCATE_FAILURE, 0, 1 << 50).take(0, 0).give(0, 0)
    plan = log.plan()
    assert not plan.steps
    assert not plan.problems
    assert plan.num_failures == 1


def test_time_goes_on_past_midnight_and_never_back() -> None:
    records = [
        LogRecord(number + 2, 1, time_us, LogAction.ALLOCATE, 16 * (number + 1), 8, 0)
        for number, time_us in enumerate([86_399_999_990, 86_399_999_985, 5, 3, 10])
    ]
    times = [step.time_s for step in plan_replay(records).steps]
    assert times == pytest.approx([0, 0, 15e-6, 15e-6, 20e-6])


def test_an_empty_log_is_a_plan_of_nothing() -> None:
    plan = plan_replay([])
    outcome = run(plan, "cuda")
    assert (outcome.num_allocations, outcome.peak_reserved_nbytes) == (0, 0)
    assert outcome.fragmentation is None
    assert outcome.allocate_us == 0


# -- the run ----------------------------------------------------------------------------


def test_what_is_live_and_reserved_is_measured() -> None:
    plan = Log().take(1, 1 << 20).take(2, 1 << 20).give(1, 1 << 20).take(3, 1 << 19).plan()
    outcome = run(plan, "cuda")
    assert (outcome.num_allocations, outcome.num_frees, outcome.num_failures) == (3, 1, 0)
    assert outcome.peak_live_nbytes == outcome.peak_reserved_nbytes == 2 << 20
    outcome = run(plan, "pool(cuda, 8MiB)")
    assert outcome.peak_reserved_nbytes == 8 << 20
    assert outcome.allocate_us > 0
    assert outcome.free_us > 0


@pytest.mark.parametrize("text", ["pool(cuda, 8MiB)", "limiting(pool(cuda, 8MiB), 8MiB)"])
def test_fragmentation_is_how_scattered_the_free_memory_of_the_stack_is(text: str) -> None:
    few = Log().take(1, 1 << 20).take(2, 1 << 20)
    assert run(few.plan(), text).fragmentation == 0.0  # much is free, in one stretch
    hole = few.give(1, 1 << 20)
    assert run(hole.plan(), text).fragmentation == pytest.approx((0 + 0 + 1 / 7) / 3)


@pytest.mark.parametrize("text", ["cuda", "limiting(async, 8MiB)"])
def test_without_a_sub_allocator_nothing_is_known_of_fragmentation(text: str) -> None:
    assert run(Log().take(1, 1 << 20).plan(), text).fragmentation is None


def test_a_device_that_is_behind_keeps_the_memory() -> None:
    log = Log()
    for turn in range(20):
        log.take(turn + 1, 1 << 20).give(turn + 1, 1 << 20)
    assert run(log.plan(), "cuda").peak_reserved_nbytes == 1 << 20
    behind = run(log.plan(), "cuda", lag_s=1.0)
    assert behind.peak_reserved_nbytes == 20 << 20
    assert behind.peak_live_nbytes == 1 << 20


def test_a_block_for_another_stream_waits_while_the_device_is_behind() -> None:
    nbytes = 1 << 20
    plan = Log().take(1, nbytes, 1).give(1, nbytes, 1).take(2, nbytes, 2).plan()
    assert run(plan, "pool(cuda, 1MiB, 1MiB)", lag_s=1.0).num_waits == 1
    assert run(plan, "pool(cuda, 1MiB, 1MiB)").num_waits == 0  # the device has caught up


def test_a_free_on_another_stream_is_ordered_by_the_replay_and_not_counted() -> None:
    plan = Log().take(1, 100, 1).give(1, 100, 2).plan()
    outcome = run(plan, "async", lag_s=1.0)
    assert (outcome.num_frees, outcome.num_waits) == (1, 0)


def test_the_device_gets_as_far_as_the_time_of_the_log() -> None:
    log = Log()
    for turn in range(20):
        log.take(turn + 1, 1 << 20).give(turn + 1, 1 << 20)
    # One free every 20 us: with the block that is live, those of the last 45 us are in use.
    assert run(log.plan(), "cuda", lag_s=45e-6).peak_reserved_nbytes == 3 << 20


def test_a_block_freed_on_another_stream_is_in_use_until_its_own_stream_has_come_so_far() -> None:
    nbytes = 1 << 20
    log = Log().take(1, nbytes, 1).give(1, nbytes, 1)  # stream 1 is busy for 10 s from here
    log.take(2, nbytes, 1).give(2, nbytes, 2)
    log.time_us += 5 * 10**6
    log.take(3, 2 * nbytes, 3)
    assert run(log.plan(), "cuda", lag_s=10.0).peak_reserved_nbytes == 4 * nbytes
    log.time_us += 7 * 10**6  # and not for longer
    log.take(4, 2 * nbytes, 3)
    assert run(log.plan(), "cuda", lag_s=10.0).peak_reserved_nbytes == 4 * nbytes


def test_streams_do_not_hold_each_other_up() -> None:
    nbytes = 1 << 20
    log = Log()
    for stream in range(12):
        log.take(stream + 1, nbytes, stream).give(stream + 1, nbytes, stream)
    log.time_us += 1_500_000
    log.take(100, 12 * nbytes, 100)
    assert run(log.plan(), "cuda", lag_s=1.0).peak_reserved_nbytes == 12 * nbytes


def test_memory_that_a_stack_keeps_for_later_is_given_back_when_it_is_short() -> None:
    small, large = 1 << 20, 150 << 20
    plan = Log().take(1, small).give(1, small).take(2, large).plan()
    outcome = run(plan, "binning(cuda, 20, 20)", memory_nbytes=200 << 20)
    assert (outcome.num_failures, outcome.num_stalls) == (0, 1)


def test_memory_that_comes_back_with_time_is_waited_for() -> None:
    nbytes = 600 << 20
    plan = Log().take(1, nbytes).give(1, nbytes).take(2, nbytes).plan()
    outcome = run(plan, "cuda", lag_s=1.0)
    assert (outcome.num_stalls, outcome.num_failures) == (1, 0)


def test_what_does_not_fit_is_counted_and_its_free_skipped() -> None:
    plan = Log().take(1, 2048).take(2, 100).give(1, 2048).give(2, 100).plan()
    outcome = run(plan, "limiting(cuda, 1KiB)")
    assert (outcome.num_failures, outcome.num_allocations, outcome.num_frees) == (1, 1, 1)


def test_a_stream_takes_more_than_the_driver_queues() -> None:
    log = Log()
    for turn in range(1100):
        log.take(turn + 1, 256).give(turn + 1, 256)
    outcome = run(log.plan(), "pool(cuda, 1MiB)", lag_s=1.0)
    assert outcome.num_frees == 1100


STACKS = (
    "cuda",
    "async",
    "pool(async, 16MiB)",
    "arena(cuda, 64MiB)",
    "binning(pool(cuda, 16MiB), 10, 16)",
    "limiting(pool(cuda, 16MiB), 20MiB)",
    "statistics(tracking(aligned(cuda, 4096)))",
    "prefetch(managed)",
    "pinned",
    "system",
)


@pytest.mark.parametrize("text", STACKS)
def test_every_stack_takes_a_random_log(text: str) -> None:
    draw = random.Random(7)
    log, live = Log(), []
    for number in range(400):
        if live and draw.random() < 0.5:
            address, nbytes, stream = live.pop(draw.randrange(len(live)))
            log.give(address, nbytes, draw.choice([stream, 3]))
        else:
            block = number + 1, int(2 ** draw.uniform(3, 17)), draw.randrange(4)
            live.append(block)
            log.take(*block)
    plan = log.plan()
    outcome = run(plan, text, lag_s=1e-4)
    assert outcome.num_failures == 0
    assert outcome.peak_live_nbytes == plan.peak_live_nbytes <= outcome.peak_reserved_nbytes
    assert outcome.num_frees == sum(step.is_free for step in plan.steps)
    again = run(plan, text, lag_s=1e-4)  # time on the host aside, a function of the log
    for name in ("peak_reserved_nbytes", "num_waits", "num_stalls", "fragmentation"):
        assert getattr(again, name) == getattr(outcome, name)
