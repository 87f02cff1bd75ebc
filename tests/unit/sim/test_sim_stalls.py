import math
import threading

import pytest

from streamflow.errors import Closed, DeviceLost


@pytest.fixture
def sim(lab):
    return lab.device.controls()


def test_a_stalled_engine_starts_nothing_until_its_time_has_passed(lab, sim):
    address, (host, _) = lab.allocate(stream := lab.stream(), 64), lab.host(64)
    sim.stall("h2d", 7.0)
    lab.device.copy_h2d(address, host, 64, stream)
    copied = lab.record(stream)
    assert lab.device.advance(0)  # the stall ends
    assert sim.clock.now_s == 7.0
    assert not copied.is_done
    lab.run()
    assert copied.is_done
    assert 7.0 < sim.clock.now_s < 7.001


def test_other_engines_go_on(lab, sim):
    address, (host, _) = lab.allocate(stream := lab.stream(), 64), lab.host(64)
    sim.stall("h2d", 7.0)
    sim.stall("compute", 7.0)
    lab.device.copy_d2h(host, address, 64, stream)
    copied = lab.record(stream)
    assert lab.device.advance(0)
    assert copied.is_done
    assert sim.clock.now_s < 1.0


def test_every_slot_of_an_engine_is_stalled(open_lab):
    lab = open_lab(compute_slots=3)
    sim = lab.device.controls()
    sim.stall("compute", 5.0)
    for name in "abcd":
        lab.mark(lab.stream(), name, cost_s=lambda: 1.0)
    lab.run()
    assert sim.clock.now_s == 7.0  # three at a time, from 5.0 on
    assert sorted(lab.log) == ["a", "b", "c", "d"]


def test_what_an_engine_runs_already_ends_in_its_own_time(lab, sim):
    lab.mark(lab.stream(), "running", cost_s=lambda: 2.0)
    assert sim.clock.next_s == 2.0  # it has started
    sim.stall("compute", 10.0)
    lab.mark(lab.stream(), "urgent", cost_s=lambda: 0.0)
    assert lab.device.advance(0)
    assert (lab.log, sim.clock.now_s) == (["running"], 2.0)
    lab.run()
    assert (lab.log, sim.clock.now_s) == (["running", "urgent"], 10.0)


def test_one_copy_engine_is_stalled_both_ways(open_lab):
    lab = open_lab(copy_engines=1)
    address, (host, _) = lab.allocate(stream := lab.stream(), 64), lab.host(64)
    lab.device.controls().stall("h2d", 7.0)
    lab.device.copy_d2h(host, address, 64, stream)
    lab.run()
    assert lab.device.clock_s() > 7.0


def test_a_stalled_stream_does_its_next_work_that_much_later(lab, sim):
    stream, other = lab.stream(), lab.stream()
    lab.mark(stream, "before", cost_s=lambda: 1.0)
    sim.stall(stream, 4.0)
    lab.mark(stream, "after", cost_s=lambda: 1.0)
    for _ in range(20):  # a stalled stream takes no engine from others
        lab.mark(other, "other", cost_s=lambda: 0.1)
    lab.run()
    assert sim.clock.now_s == 6.0
    assert lab.log[-1] == "after"
    assert [lab.log.count(what) for what in ("before", "other", "after")] == [1, 20, 1]


def test_a_stall_can_be_ended_early(lab, sim):
    stream, calls = lab.stream(), []
    sim.on_change = lambda: calls.append("woken")
    for target in (stream, "compute"):
        with sim.stall(target, 1e6) as stall:
            lab.mark(stream, target, cost_s=lambda: 1.0)
            assert sim.clock.advance(10.0) == 10.0
            assert not stall.is_over
        assert stall.is_over
        lab.run()
    assert sim.clock.now_s == 22.0
    assert calls == ["woken"] * 2
    stall.end()
    assert calls == ["woken"] * 2


def test_a_stall_whose_turn_has_not_come_can_be_ended(lab, sim):
    stream = lab.stream()
    with sim.gate(stream):
        sim.stall(stream, 1e6).end()
        lab.mark(stream, "after", cost_s=lambda: 1.0)
    lab.run()
    assert lab.log == ["after"]
    assert sim.clock.now_s == 1.0


def test_waiting_for_the_device_passes_over_a_stalled_engine(lab, sim):
    """A synchronisation waits for work; an engine that has none to do isn't any."""
    sim.stall("h2d", 1e6)
    lab.mark(lab.stream(), "work", cost_s=lambda: 1.0)
    lab.device.synchronize_blocking()
    assert (lab.log, sim.clock.now_s) == (["work"], 1.0)


def test_a_lost_device_is_not_held_by_its_stalls(lab, sim):
    stream = lab.stream()
    sim.stall(stream, 1e6)
    sim.stall("compute", 1.0)
    lab.launch(lab.stream(), lambda: 1 / 0)
    lab.run()
    with pytest.raises(DeviceLost):
        sim.stall("h2d", 1.0)
    with pytest.raises(DeviceLost):
        sim.stall(stream, 1.0)


def test_a_stall_says_what_it_takes(lab, sim):
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="gate"):
            sim.stall("h2d", seconds)
    with pytest.raises(TypeError, match="a stall needs a simulated stream"):
        sim.stall("free of doubt", 1.0)
    stream = lab.stream()
    stream.close()
    with pytest.raises(Closed):
        sim.stall(stream, 1.0)


def test_on_the_wall_clock_a_stall_holds_until_it_is_ended(open_lab):
    lab = open_lab(clock="wall")
    sim, stream, other, ran = lab.device.controls(), lab.stream(), lab.stream(), threading.Event()
    on_engine, on_stream = sim.stall("compute", 1000.0), sim.stall(stream, 1000.0)
    lab.launch(stream, ran.set)
    event = lab.record(stream)
    address, (host, _) = lab.allocate(other, 64), lab.host(64)
    lab.device.copy_d2h(host, address, 64, other)
    lab.record(other).sync()  # another engine and another stream go on
    assert not event.is_done
    on_stream.end()
    assert not ran.is_set()
    on_engine.end()
    event.sync()
    assert ran.is_set()


def test_on_the_wall_clock_a_stall_ends_by_itself(open_lab):
    lab = open_lab(clock="wall")
    stream = lab.stream()
    start_s = lab.device.clock_s()
    stall = lab.device.controls().stall(stream, 0.02)
    lab.record(stream).sync()
    assert stall.is_over
    assert lab.device.clock_s() - start_s >= 0.02


def test_closing_a_device_lets_the_threads_of_its_stalls_go(open_lab):
    lab = open_lab(clock="wall")
    stall = lab.device.controls().stall("h2d", 1000.0)
    lab.device.close()
    assert stall.is_over
