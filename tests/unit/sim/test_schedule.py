"""Schedules: what they may do to a machine, what each strategy does, and how they are written."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.backends.sim.log import Logged
from streamflow.backends.sim.schedule import PATIENCE, STRATEGIES, Hold, Imposed, Plan, Turn
from streamflow.backends.sim.worlds import IMPOSED
from streamflow.config import SimOptions
from streamflow.errors import DeviceLost

numbers = st.integers(0, 10**6)
holds = st.builds(Hold, numbers, numbers, numbers, numbers)
turns = st.builds(Turn, numbers, numbers, numbers)
plans = st.one_of(
    st.builds(Plan, st.sampled_from(sorted(STRATEGIES)), numbers),
    st.builds(Plan, deviations=st.lists(holds | turns, max_size=5).map(tuple)),
)


# -- the text ---------------------------------------------------------------------------------


@given(plans)
def test_what_is_written_reads_the_same_and_settings_take_it(plan):
    assert Plan.parse(str(plan)) == plan
    assert SimOptions(clock="virtual", schedule=str(plan)).schedule == str(plan)


def test_the_forms_of_a_schedule():
    assert str(Plan()) == "plain"
    assert Plan.parse("") == Plan.parse("plain") == Plan()
    assert str(Plan("starved", 4)) == "starved:4"
    deviations = (Hold(0, 3, 2), Hold(1, 5, 1, 2), Turn(0, 12, 0), Turn(1, 2, 8))
    assert str(Plan(deviations=deviations)) == "3.2,1.5.1=2,@12=0,1@2=8"


@pytest.mark.parametrize(
    "text", ["random", "fair:1", "random:-1", "1", "1.2.3.4", "@3", "1.2,", "x"]
)
def test_what_is_no_schedule_is_told(text):
    with pytest.raises(ValueError, match="a schedule is 'plain', a strategy"):
        Plan.parse(text)
    with pytest.raises(ValueError, match="schedule is 'random:SEED'"):
        SimOptions(clock="virtual", schedule=text)


# -- deviations -------------------------------------------------------------------------------


def order(open_lab, schedule, program, **options):
    """What ``program`` leaves in the log of a machine with that schedule."""
    lab = open_lab(key=object(), schedule=schedule, **options)
    program(lab)
    lab.run()
    return lab.log


def two_streams(lab):
    for name, stream in (("a", lab.stream()), ("b", lab.stream())):
        for number in (1, 2):
            lab.mark(stream, f"{name}{number}")


def test_a_command_held_back_runs_when_nothing_else_can(open_lab):
    assert order(open_lab, "", two_streams) == ["a1", "b1", "a2", "b2"]
    assert order(open_lab, "0.1", two_streams) == ["b1", "b2", "a1", "a2"]
    assert order(open_lab, "1.2", two_streams) == ["a1", "b1", "a2", "b2"]
    assert order(open_lab, "0.2", two_streams) == ["a1", "b1", "b2", "a2"]


def test_of_several_the_lowest_level_goes_first_and_then_the_oldest(open_lab):
    assert order(open_lab, "0.1=2,1.1=1", two_streams) == ["b1", "b2", "a1", "a2"]
    assert order(open_lab, "0.1,1.1", two_streams)[0] == "a1"


def test_waits_hold_under_every_schedule(open_lab):
    def program(lab):
        first, second = lab.stream(), lab.stream()
        lab.mark(first, "before")
        second.wait(lab.record(first))
        lab.mark(second, "after")

    for plan in ("0.1", "1.1", "0.1,1.1", *(f"{s}:{n}" for s in STRATEGIES for n in range(20))):
        assert order(open_lab, plan, program) == ["before", "after"]


def test_an_allocation_and_a_free_can_be_held_back(open_lab):
    lab = open_lab(schedule="0.1,0.3")
    stream, other = lab.stream(), lab.stream()
    lab.mark(other, "other")
    with pytest.raises(DeviceLost):
        address = lab.allocate(stream, 64)
        lab.launch(other, lambda x: x.sum(), "r", lab.view(address, 16))
        lab.run()
        stream.sync()

    lab = open_lab(key="another", schedule="0.2")
    stream, other = lab.stream(), lab.stream()
    address = lab.allocate(stream, 64)
    lab.device.deallocate(address, stream)
    done = lab.record(stream)
    lab.mark(other, "other")
    lab.device.advance(0)
    assert lab.log == ["other"]
    assert not done.is_done
    lab.run()
    assert done.is_done


def test_a_stall_holds_and_what_is_held_back_does_not_wait_for_it(open_lab):
    for plan in ("", "2.1,0.1", *(f"{s}:{n}" for s in STRATEGIES for n in range(20))):
        lab = open_lab(key=object(), schedule=plan)
        stream, other = lab.stream(), lab.stream()
        sim = lab.device.controls()
        with sim.log() as log:
            sim.stall("h2d", 60.0)  # on stream 2
            sim.stall(other, 30.0)
            lab.mark(stream, "held back")
            lab.mark(other, "late")
            address = lab.allocate(stream, 64)
            lab.device.copy_h2d(address, lab.host(64)[0], 64, stream)
            lab.run()
        ended_s = {entry.label: entry.time_s for entry in log}
        assert ended_s.keys() == {"held back", "late", "allocate", "copy h2d"}, plan
        assert ended_s["held back"] < 1.0
        assert ended_s["late"] > 30.0
        assert ended_s["copy h2d"] > 60.0


def test_a_turn_can_see_nothing_or_several_completions(open_lab):
    lab = open_lab(schedule="@1=0,@2=3")
    two_streams(lab)
    assert lab.device.advance(0)  # the loop is to go on
    assert lab.log == []
    assert lab.device.advance(0)
    assert len(lab.log) == 3
    assert lab.device.advance(0)
    assert len(lab.log) == 4
    assert not lab.device.advance(0)


def test_a_turn_ends_where_a_worker_goes_on(open_lab):
    lab = open_lab(schedule="@1=64")
    lab.device.advance(0)  # this thread drives the clock; nothing runs, so no turn is counted
    stream, other = lab.stream(), lab.stream()
    lab.mark(stream, "first")
    done = lab.record(stream)
    for number in range(5):
        lab.mark(other, number)
    world = lab.device.world
    thread = threading.Thread(target=done.sync, daemon=True)
    thread.start()
    pause = threading.Event()
    while world.num_blocked < 1:
        pause.wait(0.001)
    assert lab.device.advance(1)
    assert lab.log == ["first"]  # what the worker does now comes before anything else
    thread.join(10)
    lab.run()
    assert len(lab.log) == 6


def test_a_turn_does_not_pass_a_timer(open_lab):
    lab = open_lab(schedule="@1=64")
    stream = lab.stream()
    for number in (1, 2, 3):
        lab.mark(stream, number, cost_s=lambda: 1.0)
    assert lab.device.advance(0, until_s=2.5)
    assert lab.log == [1, 2]
    assert not lab.device.advance(0, until_s=2.5)


def test_patience_ends(open_lab):
    lab = open_lab(schedule="0.1")
    stream, other = lab.stream(), lab.stream()
    lab.mark(stream, "held")
    for _ in range(PATIENCE + 10):  # there is always something else
        lab.mark(other, "other")
        lab.mark(other, "other")
        lab.device.advance(0)
        lab.device.advance(0)
        lab.mark(other, "other")
        if "held" in lab.log:
            break
    assert PATIENCE <= len(lab.log) <= PATIENCE + 10


def test_what_is_held_back_goes_with_its_device(open_lab):
    lab = open_lab(schedule="0.1,1.1")
    stream, other = lab.stream(), lab.stream()
    lab.mark(stream, "never")
    lab.allocate(other, 64)
    lab.device.close()
    assert lab.device.world.next_s() is None
    assert lab.log == []


def test_blocking_waits_let_go_what_is_held_back(open_lab):
    lab = open_lab(schedule="0.1")
    stream = lab.stream()
    lab.mark(stream, "held")
    stream.sync()
    assert lab.log == ["held"]

    lab = open_lab(key="instant", schedule="0.1,0.2")
    stream = lab.stream()
    lab.device.deallocate(lab.allocate(stream, 64), stream)
    stream.sync()


# -- strategies -------------------------------------------------------------------------------


def many(lab):
    """Five independent pieces of work on each of three streams, the last one most urgent."""
    for name, priority in (("a", 0), ("b", 0), ("c", -5)):
        stream = lab.stream(priority=priority)
        for number in range(5):
            lab.mark(stream, f"{name}{number}")


def in_stream_order(log):
    return all(
        [each for each in log if each[0] == name] == [f"{name}{n}" for n in range(5)]
        for name in "abc"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_keeps_program_order_and_a_seed_its_schedule(open_lab, strategy):
    logs = [order(open_lab, f"{strategy}:{seed}", many) for seed in range(40)]
    assert all(in_stream_order(log) and len(log) == 15 for log in logs)
    assert logs == [order(open_lab, f"{strategy}:{seed}", many) for seed in range(40)]


def test_random_gives_many_orders(open_lab):
    plain = order(open_lab, "", many)
    logs = [order(open_lab, f"random:{seed}", many) for seed in range(40)]
    assert len(set(map(tuple, logs))) > 20
    assert plain in logs


def test_priority_inverting_runs_the_most_urgent_stream_last_and_the_youngest_first(open_lab):
    assert order(open_lab, "", many, compute_slots=1)[0] == "c0"
    log = order(open_lab, "priority-inverting:0", many)
    # b is younger than a at first; from then on, what became ready last.
    assert log == [f"{name}{n}" for name in "bac" for n in range(5)]


def test_starved_lets_one_stream_run_only_when_nothing_else_can(open_lab):
    logs = [order(open_lab, f"starved:{seed}", many) for seed in range(60)]
    lasts = {log[-1][0] for log in logs if [each[0] for each in log[-5:]] == [log[-1][0]] * 5}
    assert lasts == {"a", "b", "c"}


def test_starved_finds_streams_that_were_made_late(open_lab):
    def program(lab):
        streams = [lab.stream() for _ in range(45)]
        lab.mark(streams[43], "a")
        lab.mark(streams[44], "b")

    assert ["b", "a"] in [order(open_lab, f"starved:{seed}", program) for seed in range(100)]


@pytest.mark.parametrize("engine", ["h2d", "d2h", "compute"])
def test_starved_lets_one_engine_run_only_when_nothing_else_can(open_lab, engine):
    def program(lab):
        host, _ = lab.host(64)
        setup = lab.stream()
        address, other = lab.allocate(setup, 64), lab.allocate(setup, 64)
        lab.run()
        streams = [lab.stream() for _ in range(3)]
        for _ in range(3):
            lab.device.copy_h2d(address, host, 64, streams[0])
            lab.device.copy_d2h(host, other, 64, streams[1])
            lab.mark(streams[2], "compute")

    kinds = {"h2d": "copy h2d", "d2h": "copy d2h", "compute": "compute"}
    found = False
    for seed in range(60):
        lab = open_lab(key=object(), schedule=f"starved:{seed}")
        with lab.device.controls().log() as log:
            program(lab)
            lab.run()
        labels = [entry.label for entry in log if entry.label in kinds.values()]
        found |= lab.device.world.schedule._strategy._engine == engine and (
            labels[-3:] == [kinds[engine]] * 3
        )
    assert found


def test_some_seeds_make_the_device_fast_and_slow_against_the_host(open_lab):
    seen = set()
    for seed in range(40):
        lab = open_lab(key=object(), schedule=f"random:{seed}")
        many(lab)
        while True:
            before = len(lab.log)
            if not lab.device.advance(0):
                break
            seen.add(len(lab.log) - before)
    assert {0, 1, 2} < seen


# -- imposing ---------------------------------------------------------------------------------


def test_an_imposed_plan_goes_before_settings_and_tells_its_story(open_lab):
    imposed = Imposed(Plan.parse("0.1,@1=0,7.7"))
    token = IMPOSED.set(imposed)
    try:
        lab = open_lab(clock="wall")
    finally:
        IMPOSED.reset(token)
    assert lab.device.is_virtual
    two_streams(lab)
    lab.run()
    assert lab.log == ["b1", "b2", "a1", "a2"]
    assert [(deviation, text) for deviation, text in imposed.story] == [
        (Turn(0, 1, 0), "turn 1 of the loop went by without a completion"),
        (
            Hold(0, 0, 1, 1),
            (
                "'a1' on stream #0, command 1 there, was held back; meanwhile ran: "
                "'b1' on stream #1, 'b2' on stream #1"
            ),
        ),
    ]
    (schedule,) = imposed.schedules
    assert [entry.label for entry in schedule.log] == lab.log
    assert isinstance(schedule.log[0], Logged)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_story_without_its_strategy_gives_the_same_order(open_lab, strategy):
    def imposed_order(plan):
        imposed = Imposed(plan)
        token = IMPOSED.set(imposed)
        try:
            log = order(open_lab, "", many)
        finally:
            IMPOSED.reset(token)
        return log, [deviation for deviation, _ in imposed.story]

    for seed in range(40):
        log, deviations = imposed_order(Plan(strategy, seed))
        again, found = imposed_order(Plan(deviations=tuple(deviations)))
        assert again == log
        assert [each[:3] for each in found] == [each[:3] for each in deviations]


def test_a_second_machine_of_a_run_has_deviations_of_its_own(open_lab):
    imposed = Imposed(Plan.parse("1.0.1"))
    token = IMPOSED.set(imposed)
    try:
        logs = [order(open_lab, "", two_streams) for _ in range(2)]
    finally:
        IMPOSED.reset(token)
    assert logs == [["a1", "b1", "a2", "b2"], ["b1", "b2", "a1", "a2"]]


def test_what_made_no_difference_is_not_in_the_story(open_lab):
    imposed = Imposed(Plan.parse("0.1,0.2,@3=1"))
    token = IMPOSED.set(imposed)
    try:
        lab = open_lab()
    finally:
        IMPOSED.reset(token)
    stream = lab.stream()
    lab.mark(stream, "alone")
    lab.mark(stream, "still alone")
    lab.run()
    assert lab.log == ["alone", "still alone"]
    assert imposed.story == []
